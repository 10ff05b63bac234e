"""Is a run stable? One word, its reasons with their numbers, and the rule that decided.

Stable means a flat gap AND a flat gradient norm AND no cliff AND learning: each alone has been fooled. No
codec-view KL or entropy is read here, they are readings of the lens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from thinwire.instruments.cliff import CLIFF_RULE, score_cliff, trough
from thinwire.instruments.stationarity import CONFIDENCE, Points, despike, points, residual_autocorrelation
from thinwire.instruments.trend import Estimate, fit_trend

Word = Literal["COLLAPSED", "ACCELERATING", "DRIFTING", "NOT LEARNING", "TOO SHORT", "STATIONARY"]
"""Worst first."""
State = Literal["flat", "drifting", "accelerating", "undecided"]

GAP, GRAD_NORM = "rollout_corr/kl", "actor/grad_norm"
GAP_MAGNITUDE = "sampling/sampling_logp_difference/mean"
"""What TRL logs instead of the gap: the mean magnitude of the difference, at least as large as the gap."""
SCORES = ("critic/score/mean", "val/score")
DENSE_ENTROPY = "probe/entropy_dense"
READ = (GAP, GAP_MAGNITUDE, GRAD_NORM, *SCORES, DENSE_ENTROPY)
"""Every series a verdict may read."""

MIN_READINGS = 50
MIN_INDEPENDENT = 15
RELATIVE_SLOPE = 0.001
MIN_SLOPE, MAX_SLOPE = 0.0005, 0.005
POWER = 0.9
MIN_SCORES, MIN_TREND_SCORES = 5, 20
LEARNED_RISE = 0.05
LOST_READINGS = 3


@dataclass(frozen=True)
class Verdict:
    """`steps_needed`: further steps after which a slope of the size asked for would be seen (TOO SHORT)."""

    word: Word
    reasons: tuple[str, ...]
    rule: str
    steps_needed: int | None = None


@dataclass(frozen=True)
class _Finding:
    """What one series of the window says; `steps_needed` only where it is undecided."""

    state: State
    reason: str
    steps_needed: int | None = None


def rule(slope: float | None = None) -> str:
    """The rule in words, as printed beside every verdict."""
    size = (
        f"{RELATIVE_SLOPE:.1%} of its level at the window's start, held to {MIN_SLOPE}..{MAX_SLOPE}"
        if slope is None
        else f"{slope:g} (--slope)"
    )
    return (
        f"Size: the smallest slope a step that matters, for the gap {size}, for the gradient norm "
        f"{RELATIVE_SLOPE:.1%} of its level. Isolated spikes are clipped first. DRIFTING: the "
        f"{CONFIDENCE:.0%} interval of the slope of the gap or of the gradient norm excludes 0 and does "
        "not lie within the size (where the curvature is beyond doubt, the slope at the window's end "
        "counts too). ACCELERATING: the gap's curvature is above 0 beyond doubt, and its slope at the "
        "window's end is drifting upwards. Flat: the interval lies within the size. Intervals hold under "
        f"autocorrelation (prewhitened, fixed-b); those worth fewer than {MIN_INDEPENDENT} independent "
        "readings are doubled. COLLAPSED: a score cliff up to the window's end, or a series of the "
        f"verdict that ends in readings that are not finite. {CLIFF_RULE} NOT LEARNING: up to the window's "
        f"end neither score nor validation rises, and the rise of one of them is below {LEARNED_RISE} "
        "beyond doubt. TOO SHORT: some of this is missing or undecided, or there are fewer than "
        f"{MIN_READINGS} readings. STATIONARY: gap and gradient norm flat, no cliff, and score or "
        "validation rises. The first of COLLAPSED, ACCELERATING, DRIFTING, NOT LEARNING, TOO SHORT that "
        "holds is the word. Codec-view KL and entropy are never read."
    )


def verdict(
    series: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    slope: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
) -> Verdict:
    """The verdict over steps window[0]..window[1] of series named as in core/records.

    Flatness is judged inside the window; cliff and learning on everything up to its end, because a run that
    has learned may be level in its last stretch.
    """
    until = {key: _until(*pair, window[1]) for key, pair in series.items() if key in READ}
    known = {key: points(*pair) for key, pair in until.items()}
    gap_key = GAP if len(known.get(GAP, ())) or GAP_MAGNITUDE not in known else GAP_MAGNITUDE
    gap = _flatness(gap_key, known.get(gap_key), window, slope, curved=True)
    norm = _flatness(GRAD_NORM, known.get(GRAD_NORM), window, None, curved=False)
    collapse = _collapse(known) + _lost(until)
    learning, learning_reasons = _learning(known)
    needed = [found.steps_needed for found in (gap, norm) if found.steps_needed is not None]
    word: Word
    if collapse:
        word = "COLLAPSED"
    elif gap.state == "accelerating":
        word = "ACCELERATING"
    elif "drifting" in (gap.state, norm.state):
        word = "DRIFTING"
    elif learning is False:
        word = "NOT LEARNING"
    elif gap.state == norm.state == "flat" and learning:
        word = "STATIONARY"
    else:
        word = "TOO SHORT"
    reasons = (*collapse, gap.reason, norm.reason, *learning_reasons)
    return Verdict(word, reasons, rule(slope), max(needed) if needed and word == "TOO SHORT" else None)


def size_of(key: str, level: float, slope: float | None = None) -> float:
    """The smallest slope a step that matters; `slope` as asked for, else by the series' level."""
    if slope is not None:
        return slope
    relative = RELATIVE_SLOPE * abs(level)
    return relative if key == GRAD_NORM else min(MAX_SLOPE, max(MIN_SLOPE, relative))


def _until(
    steps: ArrayLike, values: ArrayLike, last: int | None
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    t, y = np.atleast_1d(np.asarray(steps)), np.atleast_1d(np.asarray(values, dtype=np.float64))
    return (t, y) if last is None else (t[t <= last], y[t <= last])


def _flatness(
    key: str, whole: Points | None, window: tuple[int | None, int | None], slope: float | None, curved: bool
) -> _Finding:
    """Flat, drifting, accelerating (`curved`) or undecided, with the numbers."""
    series = (whole or points([], [])).between(*window)
    if len(series) == 0:
        return _Finding("undecided", f"{key}: no finite reading in the window, so nothing can be said of it")
    if len(series) < MIN_READINGS:
        missing = (MIN_READINGS - len(series)) * _spacing(series)
        reason = f"{key}: {len(series)} readings in the window, a verdict needs {MIN_READINGS}"
        return _Finding("undecided", f"{reason}: {missing} more steps", missing)
    clipped, num_spikes = despike(series.values)
    series = Points(series.steps, clipped)
    size = size_of(key, float(clipped[: max(1, len(series) // 20)].mean()), slope)
    line, curve = fit_trend(series.steps, clipped), fit_trend(series.steps, clipped, degree=2)
    factor, independent = _caution(series)
    state, words = _state(line.slope(), size, factor)
    bend = _interval(curve.acceleration(), factor)
    if bend[0] > 0 or bend[1] < 0:
        end = curve.slope_at(float(series.steps[-1]))
        end_state, end_words = _state(end, size, factor)
        words += f"; it bends by {_signed(curve.acceleration().value)} a step, slope at the end {end_words}"
        if end_state == "drifting":
            state = "accelerating" if curved and bend[0] > 0 and end.value > 0 else "drifting"
        elif state == "drifting":
            words += "; it levels off, a later --window may be flat"
    needed = _steps_needed(series, line.slope(), size, factor) if state == "undecided" else None
    if needed is not None:
        words += f"; a slope of {size:.2g} needs about {needed} more steps"
    if num_spikes:
        words += f"; {num_spikes} spikes clipped"
    if independent < MIN_INDEPENDENT:
        words += f"; worth {independent:.1f} independent readings, interval doubled"
    return _Finding(state, f"{key}: {state}, slope {words}", needed)


def _state(slope: Estimate, size: float, factor: float) -> tuple[State, str]:
    low, high = _interval(slope, factor)
    words = f"{_signed(slope.value)} a step ({CONFIDENCE:.0%} interval {_signed(low)} to {_signed(high)}"
    if -size < low and high < size:
        return "flat", f"{words}, within {size:.2g})"
    state: State = "drifting" if low > 0 or high < 0 else "undecided"
    return state, f"{words}, not within {size:.2g})"


def _interval(estimate: Estimate, factor: float) -> tuple[float, float]:
    low, high = estimate.interval(CONFIDENCE)
    return estimate.value - factor * (estimate.value - low), estimate.value + factor * (high - estimate.value)


def _caution(series: Points) -> tuple[float, float]:
    """1, or 2 where n (1 - r) / (1 + r) independent readings are too few for the interval to be trusted."""
    r = residual_autocorrelation(series)
    independent = len(series) * (1 - r) / (1 + r)
    return (1.0 if independent >= MIN_INDEPENDENT else 2.0), independent


def _spacing(series: Points) -> int:
    return max(1, round(float(np.median(np.diff(series.steps))))) if len(series) > 1 else 1


def _steps_needed(series: Points, slope: Estimate, size: float, factor: float) -> int:
    """Further steps until `size` lies t + 1.28 standard errors from 0 (power 90%); they go as n^(-3/2)."""
    reach = factor * (slope.interval(CONFIDENCE)[1] - slope.value)
    wanted = reach + float(stats.norm.ppf(POWER)) * slope.standard_error
    if size <= 0 or wanted <= 0:
        return 0
    span = int(series.steps[-1] - series.steps[0]) + _spacing(series)
    further = math.ceil(span * (math.pow(wanted / size, 2 / 3) - 1))
    return max(_spacing(series), further)


def _collapse(known: Mapping[str, Points]) -> tuple[str, ...]:
    """A cliff of the score or of validation, and where the dense entropy went after it."""
    reasons = []
    for key in SCORES:
        series = known.get(key)
        cliff = score_cliff(series.steps, series.values) if series is not None else None
        if cliff is None:
            continue
        words = f"{key}: cliff at step {cliff.step}, "
        words += f"{cliff.best:.3f} up to step {cliff.best_step}, then {cliff.level:.3f}"
        entropy = known.get(DENSE_ENTROPY)
        lowest = trough(entropy.steps, entropy.values, cliff.step) if entropy is not None else None
        if lowest is not None:
            words += f"; {DENSE_ENTROPY} lowest at step {lowest[0]} ({lowest[1]:.3g} nats)"
        reasons.append(words)
    return tuple(reasons)


def _lost(until: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]) -> tuple[str, ...]:
    """Series whose last readings are NaN or infinite: the run went on without its numbers."""
    reasons = []
    for key, (steps, values) in until.items():
        finite = np.flatnonzero(np.isfinite(values[np.argsort(steps, kind="stable")]))
        lost = len(values) - (int(finite[-1]) + 1 if len(finite) else 0)
        if lost >= LOST_READINGS:
            reasons.append(f"{key}: its last {lost} readings are not finite")
    return tuple(reasons)


def _learning(known: Mapping[str, Points]) -> tuple[bool | None, tuple[str, ...]]:
    """True: score or validation rises. False: none does, and one certainly not. None: undecided."""
    answers: list[bool | None] = []
    reasons: list[str] = []
    for key in SCORES:
        series = known.get(key)
        if series is None or len(series) == 0:
            continue
        answer, reason = _rises(key, series)
        answers.append(answer)
        reasons.append(reason)
    if not reasons:
        return None, (f"{' and '.join(SCORES)}: no finite reading, so nothing is known of learning",)
    if True in answers:
        return True, tuple(reasons)
    return (False if False in answers else None), tuple(reasons)


def _rises(key: str, series: Points) -> tuple[bool | None, str]:
    """Rise = slope x steps covered, with its interval."""
    if len(series) < MIN_SCORES:
        return None, f"{key}: {len(series)} readings, learning needs {MIN_SCORES}"
    span = float(series.steps[-1] - series.steps[0])
    if len(series) >= MIN_TREND_SCORES:
        factor, _ = _caution(series)
        slope = fit_trend(series.steps, series.values).slope()
    else:
        # Too few for an autocorrelation: the classical interval. Validations are far apart.
        found = stats.linregress(series.steps, series.values)
        factor, slope = 1.0, Estimate(float(found.slope), float(found.stderr), len(series) - 2)
    low, high = (span * limit for limit in _interval(slope, factor))
    enough = LEARNED_RISE * max(1.0, float(np.abs(series.values).max()))
    answer = True if low > 0 else False if high < enough else None
    verb = {True: "rises", False: "does not rise", None: "undecided"}[answer]
    numbers = f"{_signed(slope.value * span)} ({_signed(low)} to {_signed(high)})"
    return answer, f"{key}: {verb}, {numbers} over steps {int(series.steps[0])}-{int(series.steps[-1])}"


def _signed(value: float) -> str:
    return f"{value:+.3g}"


def worst(words: Sequence[Word]) -> Word:
    """The word of several seeds: an arm is stationary only if every seed is."""
    return min(words, key=get_args(Word).index)
