"""The training loop: build the parts, run the steps, keep what must not be lost."""

import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from thinwire.core.errors import NonFinite, RunFailure, UserError
from thinwire.engines.local import LocalEngine, PassConfig
from thinwire.models.load import LoadedModel, load_model, quiet_transformers
from thinwire.sampling.hf import HFSampler
from thinwire.tasks.base import make_task
from thinwire.tasks.rewards import make_reward
from thinwire.train import checkpoint
from thinwire.train.anchor import AnchorState, initial_anchor_state
from thinwire.train.config import Recipe
from thinwire.train.losses import initial_settings
from thinwire.train.progress import Observer
from thinwire.train.rollout import Workload, validate
from thinwire.train.rundir import RunDir
from thinwire.train.step import Parts, StepResult, run_step
from thinwire.train.summary import run_summary


@dataclass
class _Stop:
    """Set by the first Ctrl-C: the step at hand is finished, then the run stops at its boundary."""

    asked: bool = False


def train(
    recipe: Recipe, out: Path, *, arm: str | None = None, resume: bool = False, observer: Observer
) -> dict[str, Any]:
    """Run (or resume) a recipe in directory `out` and return the run's summary.

    Raises UserError for wrong input and RunFailure when the run had to stop; Ctrl-C gives a summary with
    status "interrupted" and a checkpoint at the last whole step.
    """
    run = RunDir(out)
    loaded = load_model(recipe.model)
    parts = build(recipe, loaded)
    initial = initial_anchor_state(parts.codec, parts.engine.num_boundaries, recipe.seed)
    tree = checkpoint.Tree({}, initial, checkpoint.Progress())
    if resume:
        tree = _latest(run) or tree
        if tree.engine:
            parts.engine.load_state(tree.engine)
        run.cut_after(tree.progress.step or -1)
        if tree.progress.unlogged:
            run.append(run.metrics, tree.progress.unlogged)
            tree = replace(tree, progress=replace(tree.progress, unlogged={}))
    else:
        run.create(recipe, arm, model_facts(parts, loaded))
    observer.start(arm or recipe.name, tree.progress.step + 1, recipe.steps)
    with _finish_step_on_interrupt() as stop:
        try:
            progress, status = _run_steps(_Run(parts, run, loaded, observer, stop), tree)
        except OSError as error:
            raise RunFailure(f"{out}: {error.strerror or error}; {_resumable(run)}") from error
        except RunFailure:
            _write_summary(run, recipe, arm, "failed", tree.progress.seconds)
            raise
    summary = _write_summary(run, recipe, arm, status, progress.seconds)
    observer.finish(summary)
    return summary


def _write_summary(
    run: RunDir, recipe: Recipe, arm: str | None, status: str, seconds: float
) -> dict[str, Any]:
    summary = run_summary(run.read_metrics(), recipe.name, arm, recipe.seed, status, seconds)
    run.write_json("summary.json", summary)
    return summary


def build(recipe: Recipe, loaded: LoadedModel) -> Parts:
    """The parts of a run out of its recipe; settings that do not fit the model are refused here."""
    passes = PassConfig(recipe.sampling.temperature or 1.0, recipe.rl.logprob_chunk_tokens)
    if recipe.model.gradient_checkpointing:
        loaded.model.train()  # transformers recomputes blocks in training mode only; there is no dropout
    codec = recipe.codec.at_width(int(loaded.model.config.hidden_size))
    engine = LocalEngine(
        loaded.model,
        recipe.model.stages,
        recipe.model.boundaries,
        recipe.optimizer,
        passes,
        has_snapshot=recipe.anchor.delay > 0,
    )
    sampler = HFSampler(loaded.model, loaded.eos_ids, loaded.pad_id)
    task = make_task(recipe.task, recipe.seed, loaded.tokenizer)
    work = Workload(task, recipe.task, make_reward(recipe.task.reward), loaded.tokenizer)
    return Parts(recipe, codec, engine, sampler, work)


def model_facts(parts: Parts, loaded: LoadedModel) -> dict[str, Any]:
    """What environment.json says of the model: source, weights, width, where it is cut, bits a token."""
    return {
        "source": loaded.source,
        "fingerprint": loaded.fingerprint,
        "num_parameters": sum(p.numel() for p in loaded.model.parameters()),
        "hidden_size": parts.engine.hidden_dim,
        "boundaries": list(parts.engine.boundaries),
        "wire_bits_per_token": parts.codec.wire_bits(parts.engine.dtype),
    }


@dataclass(frozen=True)
class _Run:
    parts: Parts
    dir: RunDir
    loaded: LoadedModel
    observer: Observer
    stop: _Stop


def _run_steps(run: _Run, tree: checkpoint.Tree) -> tuple[checkpoint.Progress, str]:
    """All remaining steps; returns where the run stands and "done" or "interrupted"."""
    recipe, engine = run.parts.recipe, run.parts.engine
    anchor, progress = tree.anchor, tree.progress
    settings = initial_settings(recipe.rl, recipe.anchor.cadence)
    if progress.step == 0:
        progress = _validated(run, progress, {"step": 0})
    for step in range(progress.step + 1, recipe.steps + 1):
        started = time.perf_counter()
        before = _backup(run.parts)
        try:
            result = run_step(run.parts, step, settings, anchor)
        except NonFinite as error:
            if before is not None:
                engine.load_state(before)
            _save(run, anchor, progress)
            run.dir.append(run.dir.events, {"step": step, "event": "non_finite", "series": error.series})
            raise RunFailure(
                f"step {step} refused: {error.series} was the first series that is not finite ({error}); "
                f"{_resumable(run.dir)}"
            ) from None
        anchor = result.anchor
        progress = replace(progress, step=step)
        try:
            progress = _logged(run, result, progress, started)
        except OSError:
            with suppress(OSError):
                _save(run, anchor, replace(progress, unlogged={"step": step, **result.metrics}))
            raise
        last = step == recipe.steps or run.stop.asked
        if last or (recipe.checkpoint.every and step % recipe.checkpoint.every == 0):
            _save(run, anchor, progress)
        if run.stop.asked and step < recipe.steps:
            return progress, "interrupted"
    if recipe.checkpoint.models:
        save_model(run.loaded, run.dir.path / "final")
    return progress, "done"


def _logged(
    run: _Run, result: StepResult, progress: checkpoint.Progress, started: float
) -> checkpoint.Progress:
    """Validate if due, then write the step's metrics, samples and progress."""
    recipe, step = run.parts.recipe, progress.step
    metrics: dict[str, float] = {"step": step, **result.metrics}
    metrics["memory/peak_rss_bytes"] = peak_rss_bytes()
    metrics["codec/version"] = float(result.anchor.num_fires)
    every = recipe.validation.every
    due = step == recipe.steps or (every > 0 and step % every == 0)
    if due:
        progress = _validated(run, progress, metrics)
    else:
        run.dir.append(run.dir.metrics, metrics)
    limit = recipe.logging.rollouts_max_megabytes * 1e6
    for row in sample_rows(result, step, recipe.logging.rollouts_per_step):
        run.dir.append(run.dir.rollouts, row, limit)
    run.observer.step(step, metrics)
    return replace(progress, seconds=progress.seconds + time.perf_counter() - started)


def _validated(run: _Run, progress: checkpoint.Progress, metrics: dict[str, float]) -> checkpoint.Progress:
    """Score the held-out problems, write the line, keep the best model (the earlier one on a tie)."""
    recipe, parts = run.parts.recipe, run.parts
    problems = parts.work.task.validation()
    if problems:
        started = time.perf_counter()
        parts.sampler.push(progress.step + 1, parts.engine.gather_weights())
        value = validate(parts.work, parts.sampler, problems, recipe.sampling, recipe.validation.batch_rows)
        metrics |= {"val/score": value, "timing_s/validation": time.perf_counter() - started}
        best = progress.best_validation
        if best is None or value > best:
            progress = replace(progress, best_validation=value, best_step=progress.step)
            if recipe.checkpoint.models:
                save_model(run.loaded, run.dir.path / "best")
    run.dir.append(run.dir.metrics, metrics)
    return progress


def sample_rows(result: StepResult, step: int, num: int) -> list[dict[str, Any]]:
    """The first `num` rollouts of a step, one of each group before a second of any."""
    scored = result.scored
    order = sorted(range(len(scored.responses)), key=lambda row: (row % scored.group_size, row))
    return [
        {
            "step": step,
            "sample": scored.rollouts.sample[row],
            "prompt": scored.problems[row // scored.group_size].text,
            "response": scored.responses[row],
            "answer": scored.problems[row // scored.group_size].answer,
            "parsed": scored.scores[row].parsed,
            "score": scored.scores[row].value,
            "finished": scored.rollouts.finished[row],
        }
        for row in order[:num]
    ]


def _backup(parts: Parts) -> Mapping[str, Tensor] | None:
    """A copy of the engine's state, only where a later tick of a step may be refused after an earlier one
    was applied; with one tick a step the refused step has changed nothing."""
    mini = parts.recipe.rl.mini_batch_prompts
    if mini == 0 or mini >= parts.recipe.sampling.prompts:
        return None
    return {name: tensor.clone() for name, tensor in parts.engine.state().items()}


def _save(run: _Run, anchor: AnchorState, progress: checkpoint.Progress) -> None:
    tree = checkpoint.Tree(run.parts.engine.state(), anchor, progress)
    checkpoint.save(run.dir.checkpoints, tree, run.parts.recipe.checkpoint.keep)


def save_model(loaded: LoadedModel, folder: Path) -> None:
    """Write model and tokenizer as a plain transformers folder, complete or not at all."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    with checkpoint.as_os_errors(), quiet_transformers():
        loaded.model.save_pretrained(temporary)
    loaded.tokenizer.save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def _latest(run: RunDir) -> checkpoint.Tree | None:
    """The newest checkpoint; None for a run that was stopped before its first one and starts over."""
    if not (run.path / "config.toml").exists():
        raise UserError(f"--resume: {run.path} holds no run; start one with --out {run.path}")
    steps = checkpoint.list_steps(run.checkpoints)
    return checkpoint.load(run.checkpoints / f"step-{steps[-1]}") if steps else None


def _resumable(run: RunDir) -> str:
    steps = checkpoint.list_steps(run.checkpoints)
    where = f"from step {steps[-1]}" if steps else "from the start"
    return f"resume {where} with: thinwire train --resume {run.path}"


def peak_rss_bytes() -> float:
    """Peak resident memory of this process, bytes (ru_maxrss is KiB on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


@contextmanager
def _finish_step_on_interrupt() -> Iterator[_Stop]:
    """The first SIGINT or SIGTERM asks for a stop at the step boundary; a second SIGINT ends at once."""
    stop = _Stop()

    def ask(signum: int, frame: FrameType | None) -> None:
        if stop.asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        stop.asked = True

    try:
        previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals stay with whoever owns them
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
