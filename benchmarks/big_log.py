"""Seconds and peak memory of `thinwire analyze` on a log of 200 MB, in each text format.

A log of the size asked for is written for each format: verl console lines with Ray's coloured prefix among
lines that are no metrics, W&B history as JSON lines with null rows, the same as CSV, and a TRL state. The
command runs in a process of its own; wall-clock and CPU seconds and peak resident memory are of that process,
start and imports included. One JSON object on standard output.

    python benchmarks/big_log.py [--megabytes 200] [--formats console jsonl csv trl]
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GOAL_SECONDS, GOAL_MEGABYTES = 10.0, 500.0
NUM_KEYS = 80
NAMED = ("rollout_corr/kl", "actor/grad_norm", "critic/score/mean", "actor/kl_loss", "actor/entropy")
KEYS = (*NAMED, *(f"timing_s/part_{i}" for i in range(NUM_KEYS - len(NAMED))))
TRL_NAMES = {"rollout_corr/kl": "sampling/sampling_logp_difference/mean", "critic/score/mean": "reward"}
PREFIX = "\x1b[36m(TaskRunner pid=4711)\x1b[0m "


def readings(rng: random.Random) -> dict[str, float]:
    return {key: rng.gauss(2.0, 0.3) for key in KEYS}


def console(rng: random.Random, step: int) -> str:
    metrics = " - ".join(f"{key}:{value!r}" for key, value in readings(rng).items())
    return (
        f"{PREFIX}step:{step} - {metrics}\n"
        + f"{PREFIX}Training Progress: {step} of many, a line of text\n" * 3
    )


def jsonl(rng: random.Random, step: int) -> str:
    return json.dumps(readings(rng) | {"_step": step, "val/score": None}) + "\n"


def csv(rng: random.Random, step: int) -> str:
    head = ",".join(("_step", *KEYS)) + "\n" if step == 1 else ""
    return head + ",".join((str(step), *(repr(value) for value in readings(rng).values()))) + "\n"


def trl(rng: random.Random, step: int) -> str:
    record = {TRL_NAMES.get(key, key.removeprefix("actor/")): v for key, v in readings(rng).items()}
    head = '{\n  "global_step": 0,\n  "log_history": [\n' if step == 1 else ",\n"
    return head + json.dumps(record | {"step": step}, indent=2)


FORMATS = {
    "console": ("log.txt", console, ""),
    "jsonl": ("history.jsonl", jsonl, ""),
    "csv": ("history.csv", csv, ""),
    "trl": ("trainer_state.json", trl, "\n  ]\n}\n"),
}


def write(path: Path, name: str, num_bytes: int) -> int:
    """Write about `num_bytes` of a format and return the number of steps in it."""
    rng, (_, line, end) = random.Random(0), FORMATS[name]
    step = 0

    def lines() -> Iterator[str]:
        nonlocal step
        written = 0
        while written < num_bytes:
            step += 1
            text = line(rng, step)
            written += len(text)
            yield text
        yield end

    with path.open("w") as stream:
        stream.writelines(lines())
    return step


def measure(path: Path) -> dict[str, Any]:
    """Run the command on `path` in a child process; resources of that child alone."""
    begin = time.perf_counter()
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "thinwire", "analyze", str(path), "--json"],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, usage = os.wait4(child, 0)
    peak_kilobytes = usage.ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    return {
        "exit_status": os.waitstatus_to_exitcode(status),
        "wall_seconds": round(time.perf_counter() - begin, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_megabytes": round(peak_kilobytes / 1024, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=200.0)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.formats:
            path = Path(folder) / FORMATS[name][0]
            steps = write(path, name, int(options.megabytes * 1e6))
            found[name] = {"megabytes": round(path.stat().st_size / 1e6, 1), "steps": steps, **measure(path)}
            found[name]["met"] = (
                found[name]["wall_seconds"] <= GOAL_SECONDS
                and found[name]["peak_megabytes"] <= GOAL_MEGABYTES
            )
            path.unlink()
    goal = {"wall_seconds": GOAL_SECONDS, "peak_megabytes": GOAL_MEGABYTES}
    print(json.dumps({"goal": goal, "keys": NUM_KEYS, "formats": found}, indent=1))


if __name__ == "__main__":
    main()
