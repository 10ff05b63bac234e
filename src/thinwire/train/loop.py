"""The training loop: build the parts, run the steps, keep what must not be lost."""

import json
import resource
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

from thinwire.control import Settings
from thinwire.core.errors import NonFinite, RunFailure, UserError
from thinwire.instruments.mismatch import GAP_MEANS, gap_parts
from thinwire.models.load import LoadedModel, load_model
from thinwire.train import checkpoint
from thinwire.train.anchor import AnchorState, initial_anchor_state
from thinwire.train.check import notes
from thinwire.train.config import Recipe
from thinwire.train.parts import build, dropped_note, model_facts, save_model
from thinwire.train.progress import Observer
from thinwire.train.rollout import sample_rows, validate
from thinwire.train.rundir import RunDir, commit, environment
from thinwire.train.steering import control_series, settings_of, steer
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
    tree = _taken_up(run, parts, loaded) if resume else _fresh(run, parts, loaded, arm)
    observer.start(arm or recipe.name, tree.progress.step + 1, recipe.steps)
    for note in [*notes(recipe, loaded.model.config), *dropped_note(parts)]:
        observer.message(note)
    status, stand = "failed", _Stand(tree.anchor, tree.progress)
    with _finish_step_on_interrupt() as stop:
        try:
            status = _run_steps(_Run(parts, run, loaded, observer, stop), stand)
        except OSError as error:
            raise RunFailure(f"{out}: {error.strerror or error}; {_resumable(run)}") from error
        finally:
            with suppress(OSError):
                summary = _write_summary(run, recipe, arm, status, stand.progress.seconds)
    observer.finish(summary)
    return summary


def _fresh(run: RunDir, parts: Parts, loaded: LoadedModel, arm: str | None) -> checkpoint.Tree:
    run.create(
        parts.recipe, environment(parts.recipe, arm, str(parts.engine.device)), model_facts(parts, loaded)
    )
    return _beginning(parts)


def _beginning(parts: Parts) -> checkpoint.Tree:
    """Where a run stands before its first step."""
    initial = initial_anchor_state(parts.codec, parts.engine.num_boundaries, parts.recipe.seed)
    return checkpoint.Tree({}, initial, checkpoint.Progress())


def _taken_up(run: RunDir, parts: Parts, loaded: LoadedModel) -> checkpoint.Tree:
    """The newest checkpoint loaded, later lines cut; a run stopped before its first one starts over."""
    if not (run.path / "config.toml").exists():
        raise UserError(f"--resume: {run.path} holds no run; start one with --out {run.path}")
    _refuse_other_weights(run, loaded)
    steps = checkpoint.list_steps(run.checkpoints)
    tree = beginning = _beginning(parts)
    if steps:
        folder = run.checkpoints / f"step-{steps[-1]}"
        tree = checkpoint.load(folder)
        try:
            checkpoint.refuse_other_states(beginning.anchor.states, tree.anchor.states)
            parts.engine.load_state(tree.engine)
        except (KeyError, ValueError) as error:
            raise UserError(f"--resume: {folder} does not fit this run's model and codec ({error})") from None
    at, unlogged = tree.progress.step, tree.progress.unlogged
    run.cut_after(at if at else -1)
    if unlogged:
        run.cut_after(at - 1, [run.metrics])
        run.append(run.metrics, unlogged)
        tree = replace(tree, progress=replace(tree.progress, unlogged={}))
    run.append(run.events, {"step": at, "event": "resumed", "commit": commit()})
    return tree


def _refuse_other_weights(run: RunDir, loaded: LoadedModel) -> None:
    """The reference policy is the model the run started from: another one would change its KL unseen."""
    try:
        known = json.loads((run.path / "environment.json").read_text())["model"]["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"--resume: {run.path}/environment.json does not name the model's weights") from None
    if known != loaded.fingerprint:
        raise UserError(
            f"--resume: model.path now holds other weights ({loaded.fingerprint[:20]}) than the run started "
            f"from ({known[:20]}); give it back the old ones"
        )


def _write_summary(
    run: RunDir, recipe: Recipe, arm: str | None, status: str, seconds: float
) -> dict[str, Any]:
    summary = run_summary(run.read_metrics(), recipe.name, arm, recipe.seed, status, seconds)
    run.write_json("summary.json", summary)
    return summary


@dataclass
class _Stand:
    """Where the run stands after its last whole step."""

    anchor: AnchorState
    progress: checkpoint.Progress


@dataclass(frozen=True)
class _Run:
    parts: Parts
    dir: RunDir
    loaded: LoadedModel
    observer: Observer
    stop: _Stop


def _run_steps(run: _Run, stand: _Stand) -> str:
    """All remaining steps; keeps `stand` at the last whole one; returns "done" or "interrupted"."""
    recipe = run.parts.recipe
    settings = settings_of(run.parts, stand.progress)
    if stand.progress.step == 0:
        stand.progress = _first_validation(run, stand.progress)
    for step in range(stand.progress.step + 1, recipe.steps + 1):
        started = time.perf_counter()
        result = _step_or_refuse(run, stand, step, settings)
        metrics = _step_metrics(run.parts, result, step, settings, stand.progress)
        stand.anchor, stand.progress = result.anchor, _advanced(stand.progress, step, metrics)
        stand.progress, decision = steer(run.parts, stand.progress, metrics)
        try:
            stand.progress = _logged(run, result, metrics, stand.progress)
            for event in decision.events if decision else ():
                run.dir.append(run.dir.events, event)
        except OSError:
            with suppress(OSError):
                _save(run, stand.anchor, replace(stand.progress, unlogged=metrics))
            raise
        seconds = stand.progress.seconds + time.perf_counter() - started
        stand.progress = replace(stand.progress, seconds=seconds)
        every, last = recipe.checkpoint.every, step == recipe.steps or run.stop.asked
        if last or (every and step % every == 0):
            _save(run, stand.anchor, stand.progress)
        if decision:
            settings = decision.settings
            _refuse_to_go_on(run, stand, decision.stop)
        if run.stop.asked and step < recipe.steps:
            return "interrupted"
    if recipe.checkpoint.models:
        save_model(run.loaded, run.dir.path / "final")
    return "done"


def _step_or_refuse(run: _Run, stand: _Stand, step: int, settings: Settings) -> StepResult:
    """One step; a bad number or a bad reward ends the run with the last whole step on disk."""
    before = _backup(run.parts)
    try:
        return run_step(run.parts, step, settings, stand.anchor)
    except NonFinite as error:
        if before is not None:
            run.parts.engine.load_state(before)
        if before is not None or error.series != "actor/weights":
            _save(run, stand.anchor, stand.progress)
        run.dir.append(run.dir.events, {"step": step, "event": "non_finite", "series": error.series})
        raise RunFailure(
            f"step {step} refused: {error.series} was the first series that is not finite ({error}); "
            f"{_resumable(run.dir)}"
        ) from None
    except UserError as error:
        _save(run, stand.anchor, stand.progress)
        raise UserError(f"step {step}: {error}; {_resumable(run.dir)}") from None


def _first_validation(run: _Run, progress: checkpoint.Progress) -> checkpoint.Progress:
    try:
        return _validated(run, progress, {"step": 0})
    except NonFinite:
        raise UserError(
            f"model.path = {run.parts.recipe.model.path!r} gives logits that are not finite"
        ) from None


def _advanced(progress: checkpoint.Progress, step: int, metrics: Mapping[str, float]) -> checkpoint.Progress:
    """Progress after a step; the first step with response tokens is the origin of the gap's parts."""
    means = {key: metrics[key] for key in GAP_MEANS if key in metrics}
    return replace(progress, step=step, gap_origin=progress.gap_origin or means)


def _refuse_to_go_on(run: _Run, stand: _Stand, reason: str) -> None:
    """The controller's hard stop, with a checkpoint to resume from."""
    if not reason:
        return
    _save(run, stand.anchor, stand.progress)
    run.dir.append(run.dir.events, {"step": stand.progress.step, "event": "stopped", "reason": reason})
    raise RunFailure(
        f"step {stand.progress.step}: stopped by the controller, {reason}; {_resumable(run.dir)}"
    )


def _step_metrics(
    parts: Parts, result: StepResult, step: int, settings: Settings, progress: checkpoint.Progress
) -> dict[str, float]:
    """The step's line of metrics.jsonl, but for its validation; `settings` are those it ran with."""
    versions = [state.version for state in result.anchor.states]
    return {
        "step": step,
        **result.metrics,
        **gap_parts(result.metrics, progress.gap_origin or result.metrics),
        **control_series(parts, progress, settings),
        "memory/peak_rss_bytes": peak_rss_bytes(),
        "codec/version": float(max(versions, default=0)),
    }


def _logged(
    run: _Run, result: StepResult, metrics: dict[str, float], progress: checkpoint.Progress
) -> checkpoint.Progress:
    """Validate if due, then write the step's samples and last its metrics."""
    recipe, step = run.parts.recipe, progress.step
    limit = recipe.logging.rollouts_max_megabytes * 1e6
    for row in sample_rows(result.scored, step, recipe.logging.rollouts_per_step):
        run.dir.append(run.dir.rollouts, row, limit)
    every = recipe.validation.every
    if step == recipe.steps or (every > 0 and step % every == 0):
        progress = _validated(run, progress, metrics)
    else:
        run.dir.append(run.dir.metrics, metrics)
    run.observer.step(step, metrics)
    return progress


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
