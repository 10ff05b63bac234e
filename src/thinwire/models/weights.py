"""The named weights of a model on disk, read one tensor at a time: safetensors files, sharded or not.

Nothing is unpickled, no model is built. A tensor lives only as long as its caller holds it: the file behind
it is mapped for that tensor alone, so memory does not grow with the model.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from thinwire.core.errors import UserError

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FLOATS = ("F16", "BF16", "F32", "F64")
_NO_WEIGHTS = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints hold beside the weights."""


@dataclass(frozen=True)
class Entry:
    """One tensor on disk: its shape, and its format as safetensors spells it."""

    shape: tuple[int, ...]
    format: str


@dataclass(frozen=True)
class Weights:
    """Names in the files' order with what each holds, and `read(name)`; `source` names them in messages."""

    source: str
    entries: Mapping[str, Entry]
    read: Callable[[str], Tensor]

    def without(self, name: str) -> "Weights":
        return replace(self, entries={own: entry for own, entry in self.entries.items() if own != name})


def open_folder(folder: Path) -> Weights:
    """The weights of a transformers folder; UserError where they are missing, damaged or pickled."""
    files = _listed(folder) if (folder / INDEX).is_file() else _unlisted(folder)
    return open_files(str(folder), files)


def open_files(source: str, files: list[Path], prefix: str = "") -> Weights:
    """The float tensors whose names start with `prefix` (which is cut off) in safetensors files."""
    entries: dict[str, Entry] = {}
    places: dict[str, Path] = {}
    for file in files:
        for name, entry in _headers(file).items():
            own = name.removeprefix(prefix)
            if not name.startswith(prefix) or own.endswith(_NO_WEIGHTS) or entry.format == "BOOL":
                continue
            if own in entries:
                raise UserError(f"{source} holds {own} twice, in {places[own].name} and in {file.name}")
            if entry.format not in _FLOATS:
                raise UserError(
                    f"{source} holds {own} as {entry.format}: quantised weights cannot be compared"
                )
            entries[own], places[own] = entry, file

    def read(name: str) -> Tensor:
        with _readable(places[name]), safe_open(places[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(prefix + name)
        return tensor

    if not entries:
        raise UserError(f"{source} holds no weights")
    return Weights(source, entries, read)


class _readable:  # noqa: N801
    """safetensors' and the system's errors on one file as one UserError line that names it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, SafetensorError | OSError):
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise UserError(f"{self._file} is not a whole safetensors file: {reason}") from None


def _headers(file: Path) -> dict[str, Entry]:
    found = {}
    with _readable(file), safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - no mapping
            described = opened.get_slice(name)
            found[name] = Entry(tuple(described.get_shape()), described.get_dtype())
    return found


def _listed(folder: Path) -> list[Path]:
    """The shards of an index, each of them a file of this folder."""
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{folder / INDEX} is no index of shards (JSON with a weight_map)") from None
    missing = [name for name in names if not (folder / name).is_file()]
    if outside or missing:
        raise UserError(f"{folder} lacks the shard {(outside or missing)[0]!r} of its {INDEX}")
    return [folder / name for name in names]


def _unlisted(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if (folder / WHOLE) in files:
        return [folder / WHOLE]
    if files:
        return files
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickles:
        refuse_pickle(folder / pickles[0])
    raise UserError(f"{folder} holds no *.safetensors weights, no run and no checkpoint")


def refuse_pickle(file: Path) -> None:
    """Always a UserError: pickle can run code when read."""
    raise UserError(
        f"{file} is a pickle file, which can run code when read; save the model once as safetensors "
        "(save_pretrained) where you trust it"
    )
