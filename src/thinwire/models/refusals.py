"""What transformers loads without a word, and a run must not start with."""

from typing import Any

import torch

from thinwire.core.errors import UserError


def refuse_unfit_weights(info: dict[str, Any], path: str) -> None:
    """transformers fills what does not fit with random numbers and only prints a report."""
    if info["missing_keys"]:
        raise UserError(
            f"model.path={path!r} lacks {len(info['missing_keys'])} weights of its architecture, the first "
            f"is {min(info['missing_keys'])}; they would be random: complete the folder"
        )
    if info["mismatched_keys"]:
        name, found, expected = min(info["mismatched_keys"])
        raise UserError(
            f"model.path={path!r} holds {name} as {tuple(found)}, its config.json says {tuple(expected)}; "
            "take both from one model"
        )


def refuse_dropped_blocks(info: dict[str, Any], path: str) -> None:
    """transformers leaves out blocks past num_hidden_layers and only prints a report."""
    extra = sorted(name for name in info["unexpected_keys"] if ".layers." in name and "inv_freq" not in name)
    if extra:
        raise UserError(
            f"model.path={path!r} holds {len(extra)} weights of blocks its config.json has no place for, "
            f"the first is {extra[0]}; correct num_hidden_layers, or take both from one model"
        )


def refuse_large_tokenizer(model: Any, tokenizer: Any, path: str) -> None:
    """A token past the embeddings would end a run at the first problem that uses it. Added tokens (a pad, a
    turn's end) may lie there: fine-tuned models often have some that no text of theirs uses."""
    rows = int(model.get_input_embeddings().weight.shape[0])
    added = tokenizer.get_added_vocab()
    beyond = {i: token for token, i in tokenizer.get_vocab().items() if i >= rows and token not in added}
    if beyond:
        first = min(beyond)
        raise UserError(
            f"model.path={path!r} has a tokenizer with {len(beyond)} tokens past the {rows} embeddings, the "
            f"first is {beyond[first]!r} = {first}; take both from one model, or resize the embeddings"
        )


def refuse_bidirectional(model: torch.nn.Module, path: str) -> None:
    """BERT-like encoders have a causal class too, but see the future unless made decoders."""
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise UserError(
            f"model.path={path!r} attends to later tokens, so it is not a decoder-only causal language "
            "model; use one such as Llama, Qwen or SmolLM"
        )
