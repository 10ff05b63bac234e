"""Where recipes and run directories are found, and which may be used. Loads no torch."""

import difflib
import json
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from thinwire.core.errors import UserError
from thinwire.train.locks import is_empty

RUNS = Path("runs")
"""Where runs without --out go, below the working directory."""


def find_recipe(name: str) -> Path:
    """A file as given, or else one of the package's recipes by its name."""
    folder = Path(str(resources.files("thinwire").joinpath("recipes")))
    shipped = {file.stem: file for file in sorted(folder.glob("*.toml"))}
    path = Path(name)
    if path.exists():
        return path
    if path.parent == Path() and path.name.removesuffix(".toml") in shipped:
        return shipped[path.name.removesuffix(".toml")]
    close = did_you_mean(path.name.removesuffix(".toml"), shipped)
    raise UserError(f"recipe {name} does not exist{close}; the package has {', '.join(shipped)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at the nearest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def new_out(name: str) -> Path:
    """runs/NAME-N with the first N that is free; what could leave that folder is left out of the name."""
    name = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "run"
    number = 1
    while (RUNS / f"{name}-{number}").exists():
        number += 1
    return RUNS / f"{name}-{number}"


def refuse_used(out: Path) -> None:
    """A new run starts in a new or empty directory."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a directory")
    if out.is_dir() and not is_empty(out):
        holds_run = (out / "config.toml").is_file()
        way_out = f"holds a run; go on with --resume {out}, or" if holds_run else "is not empty;"
        raise UserError(f"--out {out} {way_out} name another directory")


def latest_run() -> Path:
    """The run below runs/ with the newest checkpoint that is not done."""
    found = [
        (checkpoint.stat().st_mtime, checkpoint.parent.parent)
        for checkpoint in RUNS.glob("**/checkpoints/step-*")
        if read_status(checkpoint.parent.parent) != "done"
    ]
    if not found:
        raise UserError(
            f"--resume latest: no interrupted run with a checkpoint below {RUNS}/; give its directory"
        )
    return max(found)[1]


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none or only a part of one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_status(run: Path) -> str | None:
    """The status in a run's summary.json, None where there is none (not started, running or killed)."""
    return read_object(run / "summary.json").get("status")


def recorded_arm(run: Path) -> str | None:
    """The arm a run was started as."""
    return read_object(run / "environment.json").get("arm")
