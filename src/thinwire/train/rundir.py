"""A run directory: what is written where, each line flushed, nothing half-written taken for whole."""

import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from thinwire.core.errors import UserError
from thinwire.train.config import Recipe, dump_toml

_TRACKERS_TABLE = re.compile(rb"^\n?\[trackers\]\n.*?(?=\n\[|\Z)", re.MULTILINE | re.DOTALL)
"""With the empty line before it, up to the one before the next table: what is left is a file without it."""


class RunDir:
    """Paths and writers of one run. Only the training loop writes; reports read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts.jsonl"
        self.events = path / "events.jsonl"
        self.movement = path / "movement.jsonl"
        self.checkpoints = path / "checkpoints"

    def create(self, recipe: Recipe, environment: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        """Make the directory with config.toml and environment.json; an old run there is refused."""
        if self.metrics.exists() or (self.path / "config.toml").exists():
            raise UserError(
                f"--out {self.path} already holds a run; resume it with --resume, or name another"
            )
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {self.path} cannot be made: {error.strerror}") from None
        config = dump_toml(recipe).encode()
        (self.path / "config.toml").write_bytes(config)
        facts = {**environment, "recipe_sha256": recipe_sha256(config), "model": dict(model)}
        self.write_json("environment.json", facts)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace a JSON file in one move."""
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self.path / name)

    def append(self, file: Path, value: Mapping[str, Any], max_bytes: float | None = None) -> None:
        """Add one JSON line (NaN and inf as Python's json spells them); none past `max_bytes`."""
        line = json.dumps(value) + "\n"
        if max_bytes is not None and file.exists() and file.stat().st_size + len(line) > max_bytes:
            return
        with file.open("a", encoding="utf-8") as stream:
            stream.write(line)

    def cut_after(self, step: int, files: Sequence[Path] = ()) -> None:
        """Drop lines of later steps and a half-written last line, before a run resumes at step + 1."""
        for file in files or (self.metrics, self.rollouts, self.events, self.movement):
            if not file.exists():
                continue
            kept = [line for line in _lines(file) if _step_of(line, step + 1) <= step]
            temporary = file.with_suffix(".tmp")
            temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            os.replace(temporary, file)

    def read_metrics(self) -> list[dict[str, Any]]:
        """All whole lines of metrics.jsonl; one that a full disk cut in half is left out."""
        if not self.metrics.exists():
            return []
        return [json.loads(line) for line in _lines(self.metrics) if _step_of(line, -1) >= 0]


def _lines(file: Path) -> list[str]:
    """Lines of a file of ours; bytes that are no text (a disk's fault) are kept visible, not fatal."""
    return file.read_text(encoding="utf-8", errors="replace").splitlines()


def _step_of(line: str, otherwise: int) -> int:
    """The whole number under "step", or `otherwise` where a line is none of ours."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return otherwise
    return step if isinstance(step, int) and not isinstance(step, bool) else otherwise


def recipe_sha256(config: bytes) -> str:
    """SHA-256 of a config.toml but for its [trackers] table, which changes no number of a run and may be
    edited between its parts."""
    return hashlib.sha256(_TRACKERS_TABLE.sub(b"", config)).hexdigest()


def environment(recipe: Recipe, arm: str | None, device: str) -> dict[str, Any]:
    """Versions, seed, commit, threads and device: what a figure depends on besides the recipe."""
    packages = ("thinwire", "torch", "transformers", "numpy", "scipy", "statsmodels", "pydantic")
    return {
        "arm": arm,
        "seed": recipe.seed,
        "versions": {name: _version(name) for name in packages} | {"python": platform.python_version()},
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "device": device,
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "machine": platform.machine(),
        "system": platform.system(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The package's git commit, with "+changes" when the tree differs; None outside a checkout."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
        changes = subprocess.run(
            ["git", "status", "--porcelain", "."],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if changes else "")
