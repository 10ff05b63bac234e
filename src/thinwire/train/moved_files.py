"""`thinwire movement`: the weights of checkpoints against a base, from files, a tensor at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.core.errors import UserError
from thinwire.instruments.movement import BF16_LINE, center_shifts, movement, table
from thinwire.models.assets import EMBEDDED, embedded_model_path
from thinwire.models.weights import (
    EMBEDDING,
    HEAD,
    PICKLES,
    Entry,
    Weights,
    open_files,
    open_folder,
    refuse_pickle,
)
from thinwire.train.checkpoint import list_steps
from thinwire.train.config import load_recipe
from thinwire.train.movement import MASTER
from thinwire.train.places import read_object


@dataclass(frozen=True)
class Opened:
    """Weights on disk, the step they are of if known, and the type the run they belong to started in."""

    weights: Weights
    step: int | None = None
    start_dtype: torch.dtype | None = None


def compare_files(base: str, checkpoints: Sequence[str]) -> dict[str, Any]:
    """The readings of every checkpoint as one JSON object, with the centre's shift from one to the next.

    Weights of a run that computes in bf16 are compared with bf16(base): that is what it started from.
    """
    start = open_weights(base)
    opened = [open_weights(path) for path in checkpoints]
    pairs = [matched(start.weights, own.weights) for own in opened]  # refuse before anything is read
    rows = []
    for own, (old, new) in zip(opened, pairs, strict=True):
        readings = table(movement(_tensors(old, new, own.start_dtype)))
        rows.append({"checkpoint": own.weights.source, "step": own.step, **readings})
    shifts = center_shifts([row["center_of_mass"] for row in rows])
    notes = [note for own in opened for note in _notes(start.weights, own)]
    return {
        "base": start.weights.source,
        "bf16_line": BF16_LINE,
        "checkpoints": [row | {"center_shift": shift} for row, shift in zip(rows, shifts, strict=True)],
        "notes": notes,
    }


def open_weights(path: str) -> Opened:
    """What a path names: a transformers folder, a .safetensors or .gguf file, embedded, package:NAME, a
    checkpoint of a run, or a run directory (its final model, or else its newest checkpoint)."""
    if path == EMBEDDED:
        return Opened(_named(open_folder(embedded_model_path()), path))
    file = Path(path).expanduser()
    if path.startswith("package:") or (file.suffix.lower() == ".gguf" and file.is_file()):
        return Opened(_dequantised(path))
    if file.is_file():
        if file.suffix in PICKLES:
            refuse_pickle(file)
        if file.suffix != ".safetensors":
            raise UserError(f"{path} is not a folder, a .safetensors or a .gguf file")
        return Opened(open_files(path, [file]))
    if not file.is_dir():
        raise UserError(
            f"{path} does not exist; give a model folder, a run directory or a checkpoint of a run"
        )
    return _of_folder(file)


def _of_folder(folder: Path) -> Opened:
    if (folder / "state.safetensors").is_file():
        weights = open_files(str(folder), [folder / "state.safetensors"], f"engine.{MASTER}")
        step = read_object(folder / "state.json").get("progress", {}).get("step")
        return Opened(weights, step, _start_dtype(folder.parent.parent))
    if not (folder / "config.toml").is_file():
        run = folder.parent if folder.name in ("final", "best") else None
        return Opened(open_folder(folder), _last_step(folder), _start_dtype(run) if run else None)
    if (folder / "final").is_dir():
        return _of_folder(folder / "final")
    steps = list_steps(folder / "checkpoints")
    if not steps:
        raise UserError(f"{folder} is a run without a final model or a checkpoint")
    return _of_folder(folder / "checkpoints" / f"step-{steps[-1]}")


def _last_step(folder: Path) -> int | None:
    """The step of a run's final model."""
    step = read_object(folder.parent / "summary.json").get("steps") if folder.name == "final" else None
    return step if isinstance(step, int) else None


def _start_dtype(run: Path) -> torch.dtype | None:
    """The type in which a run's weights began, None where this is no run's folder."""
    if not (run / "config.toml").is_file():
        return None
    dtype: torch.dtype = getattr(torch, load_recipe(run / "config.toml").model.dtype)
    return dtype


def _named(weights: Weights, source: str) -> Weights:
    return Weights(source, weights.entries, weights.read)


def _dequantised(path: str) -> Weights:
    """A GGUF file's weights in fp32, all of them in memory at once."""
    from thinwire.models.load import ModelConfig, load_model

    tensors = dict(load_model(ModelConfig(path=path, device="cpu")).model.named_parameters())
    entries = {name: Entry(tuple(tensor.shape), "F32") for name, tensor in tensors.items()}
    return Weights(path, entries, lambda name: tensors[name].detach())


def matched(base: Weights, current: Weights) -> tuple[Weights, Weights]:
    """Both with the same names and shapes, tied heads counted once; UserError names the first other tensor.

    A head on one side only is left out if it equals that side's embedding (files of tied models may hold it
    or not); on both sides, if it does so in both.
    """
    holders = [weights for weights in (base, current) if HEAD in weights.entries]
    if holders and all(_is_tied(weights) for weights in holders):
        base, current = base.without(HEAD), current.without(HEAD)
    for own, other in ((base, current), (current, base)):
        for name in own.entries:
            if name not in other.entries:
                raise UserError(f"{name} is in {own.source} but not in {other.source}; are they one model?")
    for name, entry in base.entries.items():
        shape = current.entries[name].shape
        if shape != entry.shape:
            raise UserError(
                f"{name} is {list(entry.shape)} in {base.source} but {list(shape)} in {current.source}"
            )
    return base, current


def _is_tied(weights: Weights) -> bool:
    head, embedding = weights.entries[HEAD], weights.entries.get(EMBEDDING)
    return head == embedding and torch.equal(weights.read(HEAD), weights.read(EMBEDDING))


def _tensors(
    base: Weights, current: Weights, start_dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor, Tensor]]:
    for name in base.entries:
        old, new = base.read(name), current.read(name)
        for weights, tensor in ((base, old), (current, new)):
            if not bool(torch.isfinite(tensor).all()):
                raise UserError(f"{name} in {weights.source} holds values that are not finite")
        yield name, old if start_dtype is None else old.to(start_dtype), new


def _notes(base: Weights, own: Opened) -> list[str]:
    """Where the rounding of a narrower file passes for movement."""
    if own.start_dtype is not None:
        return []
    size = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
    for name, entry in own.weights.entries.items():
        before = base.entries[name].format if name in base.entries else entry.format
        if size[entry.format] < size[before]:
            held = f"{own.weights.source} holds {entry.format}, {base.source} {before}"
            return [f"{held}: rounding reads as movement"]
    return []


def describe(found: dict[str, Any]) -> str:
    """The comparison as text: for every checkpoint a line a block and a kind, then the whole."""
    head = f"{'':<14}{'change':>10}{'1 - cosine':>12}{'bf16 changed':>14}{'spectral norm':>15}"
    lines = [f"base {found['base']}; a bf16 weight shows no change below {found['bf16_line']:.3%} of itself"]
    for row in found["checkpoints"]:
        step = "" if row["step"] is None else f" (step {row['step']})"
        lines += ["", f"{row['checkpoint']}{step}", head]
        cells = [(f"block {block['block']}", block) for block in row["blocks"]]
        cells += [*row["kinds"].items(), ("all", row["total"])]
        lines += [_line(name, cell) for name, cell in cells]
        center, shift = row["center_of_mass"], row["center_shift"]
        where = "no block moved" if center is None else f"block {center:.2f}"
        moved_by = "" if shift is None else f", {shift:+.2f} since the checkpoint before"
        lines.append(f"centre of mass over depth: {where}{moved_by}")
    return "\n".join([*lines, *(f"note: {note}" for note in found["notes"])])


def _line(name: str, cell: dict[str, Any]) -> str:
    change, cosine = cell["relative_change"], cell["cosine"]
    change_text = "-" if change is None else f"{change:.3%}"
    angle = "-" if cosine is None else f"{1 - cosine:.2e}"
    norm = "-" if cell["spectral_norm"] is None else f"{cell['spectral_norm']:.4g}"
    return f"{name:<14}{change_text:>10}{angle:>12}{cell['changed_bf16_share']:>14.1%}{norm:>15}"
