"""The training loop: build the parts, run the steps, keep what must not be lost."""

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.control import Settings
from thinwire.core.errors import NonFinite, RunFailure, UserError
from thinwire.instruments.error_growth import ErrorGrowth
from thinwire.instruments.mismatch import GAP_MEANS, gap_parts
from thinwire.models.load import LoadedModel, load_model
from thinwire.train import checkpoint
from thinwire.train.anchor import AnchorState
from thinwire.train.begin import fresh, taken_up
from thinwire.train.check import notes
from thinwire.train.clock import peak_rss_bytes
from thinwire.train.config import Recipe
from thinwire.train.failures import explained, is_out_of_memory, resumable, told
from thinwire.train.locks import locked
from thinwire.train.movement import record_movement
from thinwire.train.parts import backup, build, dropped_note, num_updates, save_model
from thinwire.train.progress import Observer
from thinwire.train.rollout import sample_rows, validate
from thinwire.train.rundir import RunDir
from thinwire.train.signals import Stop, finish_step_on_signal
from thinwire.train.steering import control_series, settings_of, steer
from thinwire.train.step import Parts, StepResult, run_step
from thinwire.train.summary import run_summary
from thinwire.train.trackers import Trackers, refuse_missing


def train(
    recipe: Recipe, out: Path, *, arm: str | None = None, resume: bool = False, observer: Observer
) -> dict[str, Any]:
    """Run (or resume) a recipe in directory `out` and return the run's summary.

    Raises UserError for wrong input and RunFailure when the run had to stop. Ctrl-C, SIGTERM and SIGHUP
    give a summary with status "interrupted" and a checkpoint at the last whole step; a second Ctrl-C raises
    KeyboardInterrupt, whose text says how to go on from the last checkpoint.
    """
    if resume and not (out / "config.toml").exists():
        raise UserError(f"--resume: {out} holds no run; start one with --out {out}")
    refuse_missing(recipe.trackers)
    loaded = load_model(recipe.model)
    parts = build(recipe, loaded)
    with locked(out):  # only now: a recipe that cannot run makes no directory
        run = RunDir(out)
        if resume:
            tree, damaged = taken_up(run, parts, loaded)
        else:
            tree, damaged = fresh(run, parts, loaded, arm), []
        messages = [*damaged, *notes(recipe, loaded.model.config), *dropped_note(parts)]
        return _train(parts, run, loaded, arm, tree, observer, messages)


def _train(
    parts: Parts,
    run: RunDir,
    loaded: LoadedModel,
    arm: str | None,
    tree: checkpoint.Tree,
    observer: Observer,
    messages: Iterable[str],
) -> dict[str, Any]:
    """All steps from `tree` on, and the summary, however they end."""
    recipe = parts.recipe
    observer.start(arm or recipe.name, tree.progress.step + 1, recipe.steps)
    for message in messages:
        observer.message(message)
    stand = _Stand(tree.anchor, tree.progress, tree.errors)
    with finish_step_on_signal() as stop:
        trackers = Trackers(recipe, arm, run, tree.progress.next_line, observer.message)
        try:
            status = _run_steps(_Run(parts, run, loaded, observer, stop, trackers), stand)
            summary = _write_summary(run, recipe, arm, status, stand.progress.seconds)
            trackers.close(status)
        except BaseException as error:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            with suppress(OSError):
                _write_summary(run, recipe, arm, status, stand.progress.seconds)
            trackers.close(status, hurried=isinstance(error, KeyboardInterrupt))
            if isinstance(error, OSError) or is_out_of_memory(error):
                raise told(error, str(run.path), resumable(run)) from error
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(f"stopped within a step; {resumable(run)}") from None
            raise
    observer.finish(summary)
    return summary


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
    errors: ErrorGrowth


@dataclass(frozen=True)
class _Run:
    parts: Parts
    dir: RunDir
    loaded: LoadedModel
    observer: Observer
    stop: Stop
    trackers: Trackers

    def log(self, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl, on disk before any tracker has it."""
        self.dir.append(self.dir.metrics, metrics)
        self.trackers.log(metrics)


def _run_steps(run: _Run, stand: _Stand) -> str:
    """All remaining steps; keeps `stand` at the last whole one; returns "done" or "interrupted"."""
    recipe = run.parts.recipe
    settings = settings_of(run.parts, stand.progress)
    with explained(f"{run.dir.path}: before step {stand.progress.step + 1}", lambda: resumable(run.dir)):
        if stand.progress.step == 0:
            stand.progress = _first_validation(run, stand.progress)
        if stand.progress.unlogged:
            stand.progress = _log_pending(run, stand.progress)
    for step in range(stand.progress.step + 1, recipe.steps + 1):
        started = time.perf_counter()
        result = _step_or_refuse(run, stand, step, settings)
        metrics = _step_metrics(run.parts, result, step, settings, stand.progress)
        if result.errors_ND is not None:
            stand.errors = stand.errors.after(result.errors_ND)
            metrics |= stand.errors.series()
        stand.anchor, stand.progress = result.anchor, _advanced(stand.progress, step, metrics)
        stand.progress, decision = steer(run.parts, stand.progress, metrics)
        _log_or_keep(run, stand, result, metrics, decision.events if decision else ())
        seconds = stand.progress.seconds + time.perf_counter() - started
        stand.progress = replace(stand.progress, seconds=seconds)
        every, last = recipe.checkpoint.every, step == recipe.steps or run.stop.asked
        if last or (every and step % every == 0):
            _save(run, stand)
        if decision:
            settings = decision.settings
            _refuse_to_go_on(run, stand, decision.stop)
        if run.stop.asked and step < recipe.steps:
            return "interrupted"
    if recipe.checkpoint.models:
        save_model(run.loaded, run.dir.path / "final")
    return "done"


def _step_or_refuse(run: _Run, stand: _Stand, step: int, settings: Settings) -> StepResult:
    """One step; what fails in it ends the run with the last whole step on disk."""
    before: Mapping[str, Tensor] | None = None
    updates = num_updates(run.parts)

    def keep(error: Exception) -> None:
        if before is not None:
            run.parts.engine.load_state(before)
        if before is not None or num_updates(run.parts) == updates:
            _save(run, stand)
        if isinstance(error, NonFinite):
            run.dir.append(run.dir.events, {"step": step, "event": "non_finite", "series": error.series})

    with explained(f"step {step}", lambda: resumable(run.dir), keep):
        before = backup(run.parts)
        return run_step(run.parts, step, settings, stand.anchor)


def _first_validation(run: _Run, progress: checkpoint.Progress) -> checkpoint.Progress:
    try:
        return _validated(run, progress, {"step": 0})
    except NonFinite as error:
        if error.series != "rollout_logprobs":
            raise
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
    _save(run, stand)
    run.dir.append(run.dir.events, {"step": stand.progress.step, "event": "stopped", "reason": reason})
    raise RunFailure(f"step {stand.progress.step}: stopped by the controller, {reason}; {resumable(run.dir)}")


def _log_pending(run: _Run, progress: checkpoint.Progress) -> checkpoint.Progress:
    """Log the last step of a run that ended in doing so, validation included."""
    metrics, progress = dict(progress.unlogged), replace(progress, unlogged={})
    metrics |= record_movement(run.parts, run.dir, progress.step)
    if "val/score" in metrics or not _validation_due(run.parts.recipe, progress.step):
        run.log(metrics)
        return progress
    return _validated(run, progress, metrics)


def _validation_due(recipe: Recipe, step: int) -> bool:
    return step == recipe.steps or (recipe.validation.every > 0 and step % recipe.validation.every == 0)


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


def _log_or_keep(
    run: _Run,
    stand: _Stand,
    result: StepResult,
    metrics: dict[str, float],
    decided: Iterable[Mapping[str, Any]],
) -> None:
    """Log a whole step; where its validation or the disk fails, a checkpoint keeps its line for a resume."""

    def keep(error: Exception) -> None:
        _save(run, replace(stand, progress=replace(stand.progress, unlogged=metrics)))

    where = f"{run.dir.path}: after step {stand.progress.step}"
    with explained(where, lambda: resumable(run.dir), keep):
        stand.progress = _logged(run, result, metrics, stand.progress)
        for event in decided:
            run.dir.append(run.dir.events, event)


def _logged(
    run: _Run, result: StepResult, metrics: dict[str, float], progress: checkpoint.Progress
) -> checkpoint.Progress:
    """Write the step's samples and movement, validate if due, and last write its metrics."""
    recipe, step = run.parts.recipe, progress.step
    limit = recipe.logging.rollouts_max_megabytes * 1e6
    for row in sample_rows(result.scored, step, recipe.logging.rollouts_per_step):
        run.dir.append(run.dir.rollouts, row, limit)
    metrics |= record_movement(run.parts, run.dir, step)
    if _validation_due(recipe, step):
        progress = _validated(run, progress, metrics)
    else:
        run.log(metrics)
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
    run.log(metrics)
    return progress


def _save(run: _Run, stand: _Stand) -> None:
    tree = checkpoint.Tree(run.parts.engine.state(), stand.anchor, stand.progress, stand.errors)
    checkpoint.save(run.dir.checkpoints, tree, run.parts.recipe.checkpoint.keep)
