"""Run directories as values: config, series, summary and rollouts, read without torch.

A run may be in progress, killed or failed: half-written lines, NaN, repeated steps are normal input.
"""

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.core.errors import UserError
from thinwire.reports.readings import EMPTY_SERIES as EMPTY_SERIES
from thinwire.reports.readings import Notes, Readings, json_lines, number, whole_step
from thinwire.reports.readings import Series as Series

METRICS_FILE = "metrics.jsonl"
ARM_ORDER = ("dense", "exact-k", "subspace-20", "subspace-10")
WIRE_PARTS = ("forward", "backward", "anchor", "side_channel")


@dataclass(frozen=True)
class WireTotals:
    """Bytes over `num_steps` steps, by part, and what dense forward + backward would have cost."""

    num_steps: int
    parts: dict[str, float]
    dense_bytes: float | None

    @property
    def sent_bytes(self) -> float:
        return sum(self.parts.values())

    def share_of_dense(self, num_bytes: float) -> float | None:
        return num_bytes / self.dense_bytes if self.dense_bytes else None


@dataclass(frozen=True)
class Rollout:
    """One sampled answer as recorded; the texts are a model's output and may hold anything."""

    step: int
    prompt: str
    response: str
    answer: str
    score: float | None
    finished: bool | None


@dataclass(frozen=True)
class Run:
    """One run directory. `notes` says in words what was left out while reading."""

    path: Path
    arm: str
    seed: int
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    summary: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.arm}, seed {self.seed}"

    @property
    def last_step(self) -> int:
        """The last step with any reading, 0 when none was recorded."""
        return max((int(s.steps[-1]) for s in self.series.values() if len(s)), default=0)

    @property
    def is_dense_control(self) -> bool:
        return lookup(self.config, "codec.name") in ("identity", "dense") or self.arm == "dense"

    def get(self, key: str) -> Series:
        return self.series.get(key, EMPTY_SERIES)

    def wire_totals(self) -> WireTotals | None:
        """Sums over the steps that recorded wire/forward_bytes; None when no step did.

        A part without a reading at a step sent nothing at that step (the anchor fires every cadence steps).
        """
        steps = len(self.get("wire/forward_bytes"))
        if steps == 0:
            return None
        parts = {part: float(np.nansum(self.get(f"wire/{part}_bytes").values)) for part in WIRE_PARTS}
        dense = self.get("wire/dense_bytes")
        return WireTotals(steps, parts, float(np.nansum(dense.values)) if len(dense) else None)


def lookup(tree: dict[str, Any], dotted: str) -> Any:
    """The value at a dotted path of nested dictionaries, None where a part is missing."""
    node: Any = tree
    for name in dotted.split("."):
        if not isinstance(node, dict) or name not in node:
            return None
        node = node[name]
    return node


def load_runs(directory: Path | str) -> list[Run]:
    """Every run of DIR: DIR itself, or DIR/<arm>/seed-<n>; the dense control first, then by arm and seed."""
    root = Path(directory)
    if not root.is_dir():
        raise UserError(f"report DIR must be an existing directory, got {str(root)!r}; give a run's --out")
    folders = run_folders(root)
    if not folders:
        raise UserError(
            f"report DIR must hold {METRICS_FILE} or <arm>/seed-<n>/{METRICS_FILE}, found neither in "
            f"{str(root)!r}; give the --out of train, compare or demo"
        )
    return sorted((load_run(folder) for folder in folders), key=lambda run: (arm_rank(run.arm), run.seed))


def run_folders(root: Path) -> list[Path]:
    """`root` itself if it is a run, else its <arm>/seed-<n> that are."""
    return [root] if _is_run(root) else sorted(p for p in root.glob("*/seed-*") if _is_run(p))


def load_together(directories: Sequence[Path]) -> list[Run]:
    """The runs of several directories; where two share an arm and a seed, arms get the folder's name."""
    loaded = [(folder, run) for folder in directories for run in load_runs(folder)]
    seen = {(run.arm, run.seed) for _, run in loaded}
    if len(seen) < len(loaded):
        names = _distinct(directories)
        loaded = [(f, replace(run, arm=f"{names[f]}: {run.arm}")) for f, run in loaded]
    return sorted((run for _, run in loaded), key=lambda run: (arm_rank(run.arm), run.seed))


def _distinct(directories: Sequence[Path]) -> dict[Path, str]:
    """The last part of each path, or as much of its end as tells it from the others."""
    paths = [folder.resolve() for folder in directories]
    if len(set(paths)) < len(paths):
        raise UserError(
            f"report DIR... names {str(directories[0])!r} or another directory twice; give it once"
        )
    parts = 1
    while len({path.parts[-parts:] for path in paths}) < len(paths):
        parts += 1
    return {f: "/".join(path.parts[-parts:]) for f, path in zip(directories, paths, strict=True)}


def load_run(directory: Path | str) -> Run:
    """One run directory as a value; raises UserError where a file is not what its name says."""
    folder = Path(directory)
    if not _is_run(folder):
        raise UserError(f"report DIR must hold {METRICS_FILE}, got {str(folder)!r}; give a run's --out")
    config = _read_config(folder / "config.toml")
    summary = _read_object(folder / "summary.json")
    environment = _read_object(folder / "environment.json") or {}
    series, notes = _read_series(folder / METRICS_FILE)
    if summary is None:
        notes.append("no summary.json: still running, or stopped before its end")
    elif summary.get("status", "done") != "done":
        notes.append(f"status {summary['status']}")
    if not series:
        notes.append("no step recorded yet")
    return Run(
        path=folder,
        arm=_arm_name(folder, config, summary or {}, environment),
        seed=_seed(folder, config, summary or {}, environment),
        config=config,
        environment=environment,
        series=series,
        summary=summary,
        notes=tuple(notes),
    )


def load_rollouts(run: Run, steps: Sequence[int] = (), per_step: int = 1) -> list[Rollout]:
    """The first `per_step` rollouts of each of `steps` (default: first and last recorded step)."""
    by_step: dict[int, list[Rollout]] = {}
    for _, record in json_lines(run.path / "rollouts.jsonl", Notes()):
        if not isinstance(record.get("step"), int):
            continue
        kept = by_step.setdefault(record["step"], [])
        if len(kept) < per_step:
            kept.append(_rollout(record))
    wanted = list(steps) or sorted({min(by_step, default=0), max(by_step, default=0)})
    return [rollout for step in wanted for rollout in by_step.get(step, [])]


def arm_rank(arm: str) -> tuple[int, str]:
    """Sort key: the four named arms in their fixed order, any other after them by name."""
    return (ARM_ORDER.index(arm) if arm in ARM_ORDER else len(ARM_ORDER), arm)


def arm_names(runs: Sequence[Run]) -> list[str]:
    return sorted({run.arm for run in runs}, key=arm_rank)


def _is_run(folder: Path) -> bool:
    return (folder / METRICS_FILE).is_file() or (folder / "config.toml").is_file()


def _arm_name(folder: Path, config: dict[str, Any], *records: dict[str, Any]) -> str:
    """As recorded, else the folder's of <arm>/seed-<n>, else codec or codec-cadence as arms are named."""
    recorded = [str(record["arm"]) for record in records if record.get("arm")]
    if recorded or re.fullmatch(r"seed-\d+", folder.name):
        return recorded[0] if recorded else folder.resolve().parent.name
    codec, cadence = lookup(config, "codec.name"), lookup(config, "anchor.cadence")
    named = {"identity": "dense", "subspace": f"subspace-{cadence}" if cadence else "subspace"}
    return named.get(codec, str(codec or config.get("name") or folder.resolve().name))


def _seed(folder: Path, config: dict[str, Any], *records: dict[str, Any]) -> int:
    named = re.fullmatch(r"seed-(\d+)", folder.name)
    known = [tree["seed"] for tree in (config, *records) if isinstance(tree.get("seed"), int)]
    return int(known[0] if known else named.group(1) if named else 0)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} must be TOML, got: {error}; restore the file the run wrote") from error


def _read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object, None when the file is missing or empty."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if not text.strip():
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path} must be JSON, got: {error}; delete it and run report again") from error
    if not isinstance(value, dict):
        raise UserError(
            f"{path} must hold a JSON object, got {type(value).__name__}; delete it and report again"
        )
    return value


def _read_series(path: Path) -> tuple[dict[str, Series], list[str]]:
    """All series of a metrics file; a repeated step keeps its last reading (resumed runs write it anew)."""
    readings, notes = Readings(), Notes()
    for line, record in json_lines(path, notes):
        step = whole_step(record.get("step"))
        if step is None:
            notes.add(f"{path.name} line {line} has no step and was left out")
        else:
            readings.add_record(step, record, "step")
    return readings.series(), notes.lines()


def _rollout(record: dict[str, Any]) -> Rollout:
    finished = record.get("finished")
    return Rollout(
        step=int(record["step"]),
        prompt=str(record.get("prompt", "")),
        response=str(record.get("response", "")),
        answer=str(record.get("answer", "")),
        score=number(record.get("score")),
        finished=finished if isinstance(finished, bool) else None,
    )
