"""Rollouts and statistics as one safetensors file, so that codecs are compared on the same tokens later."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from thinwire.bench.errors import DIRECTIONS, refuse_non_finite
from thinwire.bench.rollouts import Sampled
from thinwire.codecs import Moments
from thinwire.core.errors import UserError
from thinwire.engines.batch import Rows

FORMAT = "thinwire-bench-1"
MUST_AGREE = ("fingerprint", "width", "boundaries")
"""Facts of a file that have to be those of the model it is used with."""


@dataclass(frozen=True)
class Saved:
    """Two parts of rollouts, the moments of the first at every boundary and direction, and where they are
    from (`facts`: plain JSON)."""

    sampled: Sampled
    forward: tuple[Moments, ...]
    backward: tuple[Moments, ...]
    facts: Mapping[str, Any]


def refuse_target(path: Path) -> None:
    """UserError unless --save may be written: a new file in a folder that exists."""
    if path.suffix != ".safetensors" or not path.parent.is_dir() or path.exists():
        raise UserError(f"--save must name a new .safetensors file in a folder that exists, got {path}")


def save(path: Path, saved: Saved) -> int:
    """Write the file, complete or not at all, and say how many bytes it has."""
    tensors: dict[str, Tensor] = {}
    for part, rows in (("statistics", saved.sampled.statistics), ("scored", saved.sampled.scored)):
        tensors |= {f"{part}.{name}": tensor for name, tensor in _from_rows(rows).items()}
    for direction, moments in zip(DIRECTIONS, (saved.forward, saved.backward), strict=True):
        for b, one in enumerate(moments):
            prefix = f"moments.{b}.{direction}"
            tensors[f"{prefix}.num_tokens"] = torch.tensor(one.num_tokens)
            tensors[f"{prefix}.sum"] = one.sum_D.cpu().contiguous()
            tensors[f"{prefix}.second"] = one.second_DD.cpu().contiguous()
    metadata = {"format": FORMAT, "facts": json.dumps(dict(saved.facts), sort_keys=True)}
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata)
    os.replace(partial, path)
    return path.stat().st_size


def load(path: Path, expected: Mapping[str, Any], device: torch.device) -> Saved:
    """The file's content; UserError where it is none, or of another model, cut or temperature."""
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"--load {path} is not a whole safetensors file: {reason}") from None
    if metadata.get("format") != FORMAT:
        raise UserError(f"--load {path} is no file of thinwire codecs bench --save ({FORMAT})")
    try:
        facts = json.loads(metadata["facts"])
        _refuse_other(path, facts, expected)
        num = len(facts["boundaries"])
        moments = [_to_moments(tensors, num, direction, device) for direction in DIRECTIONS]
        sampled = Sampled(_to_rows(tensors, "statistics"), _to_rows(tensors, "scored"))
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # torch raises RuntimeError
        raise UserError(f"--load {path} is damaged: {error!r} is missing or wrong") from None
    return Saved(sampled, moments[0], moments[1], facts)


def _refuse_other(path: Path, facts: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name in MUST_AGREE:
        if facts[name] != expected[name]:
            raise UserError(
                f"--load {path} was made with {name} {_short(facts[name])}, this model has "
                f"{_short(expected[name])}; give the same --model, --stages and settings, or sample anew"
            )


def _short(value: Any) -> str:
    return value[:19] if isinstance(value, str) else str(value)


def _from_rows(rows: Rows) -> dict[str, Tensor]:
    return {
        "prompt_length": torch.tensor([len(ids) for ids in rows.prompt_ids]),
        "prompt_ids": _flat(rows.prompt_ids, torch.int64),
        "response_length": torch.tensor([len(ids) for ids in rows.response_ids]),
        "response_ids": _flat(rows.response_ids, torch.int64),
        "rollout_logprobs": _flat(rows.rollout_logprobs, torch.float32),
        "sample": torch.tensor(list(rows.sample)),
        "advantages": torch.tensor(list(rows.advantages), dtype=torch.float32),
    }


def _flat(lists: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for values in lists for value in values], dtype=dtype)


def _to_rows(tensors: Mapping[str, Tensor], part: str) -> Rows:
    own = {name.removeprefix(f"{part}."): tensor for name, tensor in tensors.items()}

    def ragged(values: str, lengths: str) -> list[list[Any]]:
        pieces = torch.split(own[values], own[lengths].tolist())
        return [piece.tolist() for piece in pieces]

    return Rows(
        ragged("prompt_ids", "prompt_length"),
        ragged("response_ids", "response_length"),
        ragged("rollout_logprobs", "response_length"),
        own["sample"].tolist(),
        own["advantages"].tolist(),
    )


def _to_moments(
    tensors: Mapping[str, Tensor], num: int, direction: str, device: torch.device
) -> tuple[Moments, ...]:
    found = []
    for b in range(num):
        prefix = f"moments.{b}.{direction}"
        one = Moments(
            int(tensors[f"{prefix}.num_tokens"]),
            tensors[f"{prefix}.sum"].to(device),
            tensors[f"{prefix}.second"].to(device),
        )
        refuse_non_finite(one, b, "forward" if direction == "forward" else "backward")
        found.append(one)
    return tuple(found)
