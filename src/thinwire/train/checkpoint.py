"""Step-boundary checkpoints: one tree that holds everything a resumed run needs.

A checkpoint folder is complete or absent: it is written beside its final name, flushed, and moved.
Tensors are safetensors, everything else JSON; nothing is pickled.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from thinwire.codecs import CodecState
from thinwire.core.errors import UserError
from thinwire.instruments.error_growth import ErrorGrowth
from thinwire.train.anchor import AnchorState

FORMAT = 2
"""Of state.json and the tensors' names; a checkpoint of another format is refused."""


class Damaged(UserError):
    """A checkpoint folder that cannot be read whole."""


@dataclass(frozen=True)
class Progress:
    """The small part of the tree: where the run stands after a whole step."""

    step: int = 0
    best_step: int = 0
    best_validation: float | None = None
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    """The Settings of the next step, where they differ from the recipe's (a controller changed them)."""
    control: dict[str, Any] = field(default_factory=dict)
    """The controller's memory (ControlState), where it is on."""
    gap_origin: dict[str, float] = field(default_factory=dict)
    """`gap_means` of step 1, from which the gap's two parts are counted."""
    unlogged: dict[str, float] = field(default_factory=dict)
    """The last step's series, when the disk was too full to log them: written first on resume."""

    @property
    def next_line(self) -> int:
        """Step of the next line of metrics.jsonl; the one before the first step has step 0."""
        return self.step + 1 if self.step and not self.unlogged else self.step


@dataclass(frozen=True)
class Tree:
    """All state of a run at a step boundary: engine tensors, learned codec states, progress, codec errors."""

    engine: Mapping[str, Tensor]
    anchor: AnchorState
    progress: Progress
    errors: ErrorGrowth


def save(folder: Path, tree: Tree, keep: int) -> Path:
    """Write checkpoints/step-N and drop all but the newest `keep`."""
    final = folder / f"step-{tree.progress.step}"
    temporary = folder / f".step-{tree.progress.step}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tensors = {f"engine.{name}": tensor for name, tensor in tree.engine.items()}
    for boundary, state in enumerate(tree.anchor.states):
        tensors |= {f"codec.{boundary}.{name}": tensor for name, tensor in state.tensors.items()}
    tensors |= {"errors.total": tree.errors.total_ND, "errors.recent": tree.errors.recent_WND}
    with as_os_errors():
        save_file(
            {name: t.detach().cpu().contiguous() for name, t in tensors.items()},
            temporary / "state.safetensors",
        )
    small = {
        "format": FORMAT,
        "progress": asdict(tree.progress),
        "anchor_fires": tree.anchor.num_fires,
        "codec_versions": [state.version for state in tree.anchor.states],
    }
    (temporary / "state.json").write_text(json.dumps(small, indent=1) + "\n", encoding="utf-8")
    for file in temporary.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    for old in list_steps(folder)[:-keep]:
        shutil.rmtree(folder / f"step-{old}")
    return final


@contextmanager
def as_os_errors() -> Iterator[None]:
    """safetensors reports a full disk as its own error; here it is an OSError like any other."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(errno.EIO, f"weights could not be written ({error})") from None


def list_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    names = [entry.name for entry in folder.glob("step-*")] if folder.exists() else []
    return sorted(int(name[5:]) for name in names if name[5:].isdigit())


def load(folder: Path) -> Tree:
    """Read one checkpoint folder; Damaged if it is not a whole one, UserError if it has another format."""
    try:
        small = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if small["format"] != FORMAT:
            raise UserError(
                f"--resume: {folder} has format {small['format']!r}, this thinwire reads {FORMAT}; resume it "
                "with the version that wrote it (environment.json)"
            )
        tensors = load_file(folder / "state.safetensors")
        versions = small["codec_versions"]
        states = []
        for boundary, version in enumerate(versions):
            prefix = f"codec.{boundary}."
            own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            states.append(CodecState(version, own))
        progress = Progress(**small["progress"])
        if not isinstance(progress.step, int) or not isinstance(progress.settings, dict):
            raise TypeError("progress must hold a whole step and a table of settings")
        engine = {n.removeprefix("engine."): t for n, t in tensors.items() if n.startswith("engine.")}
        errors = ErrorGrowth(tensors["errors.total"], tensors["errors.recent"])
        return Tree(engine, AnchorState(tuple(states), small["anchor_fires"]), progress, errors)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise Damaged(f"--resume: {folder} is not a whole checkpoint ({error})") from None


def refuse_other_states(expected: Sequence[CodecState], got: Sequence[CodecState]) -> None:
    """ValueError unless both hold the same named tensors, of the same shapes and types, at every boundary."""
    layouts = [
        [{name: (t.dtype, t.shape) for name, t in state.tensors.items()} for state in states]
        for states in (expected, got)
    ]
    if layouts[0] != layouts[1]:
        raise ValueError("its learned codec states have other names, shapes or numbers")
