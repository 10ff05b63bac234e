"""Tiny random models of the supported families, and a tokenizer for them, built without a network."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

FAMILIES = ("llama", "qwen2", "qwen3", "smollm")
_CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "smollm": LlamaConfig}


def tiny_config(
    family: str, layers: int = 2, hidden: int = 32, vocab: int = 64, tie: bool | None = None, **extra: Any
) -> Any:
    """A small configuration; SmolLM is a Llama with tied embeddings, the others are untied unless asked.

    Weights have a deviation of 0.2 instead of 0.02, so that the next-token distribution is far from uniform.
    """
    settings = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": family == "smollm" if tie is None else tie,
    }
    return _CONFIGS[family](**settings | extra)


def tiny_model(
    family: str,
    layers: int = 2,
    hidden: int = 32,
    vocab: int = 64,
    tie: bool | None = None,
    seed: int = 0,
    **extra: Any,
) -> Any:
    """A random model in eval mode, float32, the same for the same arguments; global random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(
            tiny_config(family, layers, hidden, vocab, tie, **extra), dtype=torch.float32
        ).eval()


def tiny_tokenizer(vocab: int = 64) -> PreTrainedTokenizerFast:
    """One token a character: 0 is padding, 1 ends a sequence, then digits, signs and letters."""
    characters = "0123456789+-= abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"[: vocab - 2]
    ids = {token: i for i, token in enumerate(("<pad>", "<eos>", *characters))}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def save_tiny(folder: Path, family: str = "llama", **arguments: Any) -> Any:
    """Write a tiny model and its tokenizer as a plain transformers folder; returns the model."""
    model = tiny_model(family, **arguments)
    model.save_pretrained(folder)
    tiny_tokenizer(model.config.vocab_size).save_pretrained(folder)
    return model
