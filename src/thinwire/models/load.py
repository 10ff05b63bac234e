"""A decoder-only language model from the package, a folder, the hub or a GGUF file, ready for training.

Safe by default: safetensors or GGUF weights only, no pickle, no code from a model's repository. Quiet:
nothing is printed to stderr; what transformers would only warn about (weights that are missing and would
be drawn at random) is an error here.
"""

import hashlib
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from thinwire.core.errors import UserError
from thinwire.models.assets import EMBEDDED
from thinwire.models.refusals import (
    refuse_bidirectional,
    refuse_dropped_blocks,
    refuse_large_tokenizer,
    refuse_unfit_weights,
)
from thinwire.models.sources import Source, as_user_errors, refuse_missing_weights, resolve_source

# End-of-turn tokens of the chat templates of SmolLM/Qwen (ChatML), Llama 3, Gemma, Phi and others. A base
# model's config often names only the end of text, and its chat variant then never stops at a turn's end.
END_OF_TURN_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot|>",
)


class ModelConfig(BaseModel):
    """Which model, in which number format, in how many pipeline stages."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = EMBEDDED
    """embedded, a folder, a hub id (owner/name), a .gguf file, or package:NAME for the one .gguf file that
    an installed Python package holds."""
    stages: int = Field(default=1, ge=1)
    """Pipeline stages, 1..number of blocks; stages - 1 boundaries."""
    boundaries: tuple[int, ...] | None = None
    """0-based indices of the blocks after which to cut, rising, stages - 1 of them; default: equal stages."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the loaded weights."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention kernel: torch's fused one, or plain matrix products."""
    gradient_checkpointing: bool = False
    """Recompute each block in backward instead of keeping its activations."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto (cuda if there is one), cpu, cuda or cuda:N."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode with dropout 0, its tokenizer, and every id that ends a response.

    Checkpointed blocks recompute only after `model.train()`; nothing else differs between the modes.
    `pad_id` may be one of `eos_ids`: nothing may find the end of a response by looking for padding.
    `fingerprint` is the SHA-256 of the weights as loaded (names, formats, shapes, bytes).
    """

    model: Any
    tokenizer: Any
    eos_ids: frozenset[int]
    pad_id: int
    source: str
    fingerprint: str


@dataclass(frozen=True)
class MetaModel:
    """A model without weights, on the meta device, and its sizes; tied weights count once."""

    model: Any
    num_parameters: int
    num_embedding_parameters: int
    source: str


def load_model(config: ModelConfig) -> LoadedModel:
    """The model of `config` with all of its weights, or a UserError; the files on disk are not changed."""
    device = resolve_device(config.device)
    source = resolve_source(config.path)
    with quiet_transformers(), as_user_errors(config.path):
        refuse_missing_weights(source, config.path)
        model_config = _checked_config(source, config)
        model, info = _load_weights(source, model_config, config)
        refuse_unfit_weights(info, config.path)
        refuse_dropped_blocks(info, config.path)
        tokenizer = AutoTokenizer.from_pretrained(
            source.location, trust_remote_code=False, **source.arguments
        )
        refuse_large_tokenizer(model, tokenizer, config.path)
        refuse_bidirectional(model, config.path)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            # It also hooks the embeddings, for frozen ones; ours train, and hooks make the sampler refuse.
            model.disable_input_require_grads()
    eos_ids = find_eos_ids(model, tokenizer)
    if not eos_ids:
        raise UserError(
            f"model.path={config.path!r} names no end-of-sequence token, so no response would ever end; "
            "set eos_token_id in its generation_config.json"
        )
    fingerprint = weights_fingerprint(model)
    pad_id = _find_pad_id(model, tokenizer, eos_ids)
    return LoadedModel(model.to(device).eval(), tokenizer, eos_ids, pad_id, source.name, fingerprint)


def load_config_only(config: ModelConfig) -> MetaModel:
    """The model of `config` on the meta device: no weights are read, drawn or allocated."""
    source = resolve_source(config.path)
    with quiet_transformers(), as_user_errors(config.path):
        model_config = _checked_config(source, config)
        with torch.device("meta"):
            model = _build(model_config, config)
        refuse_bidirectional(model, config.path)
    embeddings = {
        id(module.weight): module.weight.numel()
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None
    }
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return MetaModel(model, num_parameters, sum(embeddings.values()), source.name)


def find_eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a response: of both configs, of the tokenizer, and of known chat templates.

    Ids outside the model's vocabulary can never be sampled and are left out.
    """
    named = [
        getattr(model.generation_config, "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ]
    ids = {
        int(i)
        for value in named
        for i in (value if isinstance(value, list | tuple) else [value])
        if i is not None
    }
    vocabulary = tokenizer.get_vocab()
    ids |= {vocabulary[token] for token in END_OF_TURN_TOKENS if token in vocabulary}
    return frozenset(i for i in ids if 0 <= i < _vocab_size(model))


def weights_fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 over name, format, shape and bytes of every parameter, in the order of names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        flat = parameter.detach().to("cpu").contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def resolve_device(device: str) -> torch.device:
    """The torch device that `model.device` names; auto prefers CUDA."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"model.device={device!r} but torch sees no CUDA device; set model.device=cpu")
    return torch.device(device)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, log lines or Python warnings from transformers and the hub client in this block."""
    hub_logger = logging.getLogger("huggingface_hub")
    verbosity, hub_level = transformers_logging.get_verbosity(), hub_logger.level
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        hub_logger.setLevel(hub_level)
        if bars:
            transformers_logging.enable_progress_bar()


def _checked_config(source: Source, config: ModelConfig) -> Any:
    """The model's configuration: decoder-only, unquantised, and every dropout rate set to 0.

    Dropout must be off because the old, reference and training passes of a step have to see one and the
    same model: with dropout their ratio would not be 1 at the first inner update.
    """
    model_config = AutoConfig.from_pretrained(source.location, trust_remote_code=False, **source.arguments)
    if getattr(model_config, "is_encoder_decoder", False) or not _has_causal_class(model_config):
        raise UserError(
            f"model.path={config.path!r} is a {model_config.model_type} model, which is not a decoder-only "
            "causal language model; use one such as Llama, Qwen or SmolLM"
        )
    if getattr(model_config, "quantization_config", None) is not None:
        raise UserError(
            f"model.path={config.path!r} holds quantised weights, which cannot be trained; "
            "use the unquantised model or its .gguf file"
        )
    for part in {id(part): part for part in (model_config, model_config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float) and value != 0.0:
                setattr(part, name, 0.0)
    return model_config


def _has_causal_class(model_config: Any) -> bool:
    return type(model_config) in AutoModelForCausalLM._model_mapping


def _build(model_config: Any, config: ModelConfig) -> Any:
    return AutoModelForCausalLM.from_config(
        model_config,
        dtype=getattr(torch, config.dtype),
        attn_implementation=config.attention,
        trust_remote_code=False,
    )


def _load_weights(source: Source, model_config: Any, config: ModelConfig) -> tuple[Any, dict[str, Any]]:
    """The model on the CPU, and which weights its source lacks or holds in another shape."""
    options = {
        "config": model_config,
        "dtype": getattr(torch, config.dtype),
        "attn_implementation": config.attention,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }
    if source.gguf_file:
        with torch.device("meta"):
            model_class = type(empty := _build(model_config, config))
        tensors = _gguf_tensors(Path(source.location, source.gguf_file), empty, config)
        model, info = model_class.from_pretrained(None, state_dict=tensors, **options)
    else:
        model, info = AutoModelForCausalLM.from_pretrained(
            source.location, use_safetensors=True, trust_remote_code=False, **options
        )
    return model, info


def _gguf_tensors(file: Path, empty: Any, config: ModelConfig) -> dict[str, Tensor]:
    """The weights of a GGUF file, dequantised, under the names of transformers.

    from_pretrained(gguf_file=...) would do the same, but it needs accelerate, may keep weights packed when
    a kernel package is installed, and leaves a quantization_config that makes save_pretrained refuse.
    """
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with redirect_stderr(io.StringIO()):  # its progress bar obeys no setting
        parsed = load_gguf_checkpoint(
            str(file), return_tensors=True, model_to_load=empty, torch_dtype=getattr(torch, config.dtype)
        )
    tensors: dict[str, Tensor] = parsed["tensors"]
    return tensors


def _find_pad_id(model: Any, tokenizer: Any, eos_ids: frozenset[int]) -> int:
    for pad_id in (tokenizer.pad_token_id, getattr(model.config, "pad_token_id", None)):
        if pad_id is not None and 0 <= pad_id < _vocab_size(model):
            return int(pad_id)
    return min(eos_ids)


def _vocab_size(model: Any) -> int:
    return int(model.get_output_embeddings().weight.shape[0])
