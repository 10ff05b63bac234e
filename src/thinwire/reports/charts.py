"""What the charts show: the series, their colours and the points of each line. Values in, values out.

Every line is raw: no smoothing. Up to 600 points a line all points are kept; beyond that each bucket of
steps keeps its lowest and its highest reading, and the page says so.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.reports.load import Run
from thinwire.reports.marks import run_span

MAX_POINTS = 600
# Okabe-Ito colours, (on light, on dark), adjusted in lightness only for 3:1 contrast on either ground.
ARM_COLOURS = {
    "dense": ("#2b2f36", "#c9ced6"),
    "exact-k": ("#0072b2", "#56b4e9"),
    "subspace-20": ("#d55e00", "#ff7f3f"),
    "subspace-10": ("#c98500", "#f0c04a"),
    "shaped": ("#00835f", "#2bc49a"),
}
OTHER_COLOURS = (
    ("#b0508a", "#e39ac6"),
    ("#6b4fa0", "#b9a3e8"),
    ("#7a6a00", "#d8cf5a"),
    ("#5b6770", "#93a1ad"),
)
GROUND = {"text": ("#1c1f24", "#e6e8eb"), "muted": ("#5d6570", "#9aa3ae"), "rule": ("#e4e6ea", "#2b3037")}
GROUND["ground"] = ("#ffffff", "#14171b")
MAX_BAND_POINTS = 120
# A shaded span: arm, first step, last step.
Shade = tuple[str, int, int]


@dataclass(frozen=True)
class ChartSpec:
    """One chart: the series, how it is called, its unit (values are multiplied by `scale` to get it).

    `spans` shades failure spans, `marks` draws an upright line where the controller changed a setting,
    `level` a dashed level line at this value.
    """

    key: str
    title: str
    unit: str
    group: str
    note: str = ""
    scale: float = 1.0
    points: bool = False
    lens: bool = False
    spans: bool = False
    marks: bool = False
    level: float | None = None


CHARTS = (
    ChartSpec(
        "critic/score/mean",
        "Score",
        "mean reward",
        "learning",
        "Sampled answers of each step.",
        spans=True,
        marks=True,
    ),
    ChartSpec(
        "val/score",
        "Validation",
        "mean reward",
        "learning",
        "Greedy answers, held-out problems, codec off.",
        points=True,
    ),
    ChartSpec(
        "rollout_corr/kl",
        "Train-inference gap",
        "nats a token",
        "stability",
        "Level matters less than slope.",
        spans=True,
        marks=True,
    ),
    ChartSpec(
        "actor/grad_norm", "Gradient norm", "L2 norm before clipping", "stability", "Should stay level."
    ),
    ChartSpec(
        "actor/kl_loss",
        "Reference KL",
        "nats a token",
        "lens",
        "Codec on, at most 10 a token.",
        lens=True,
        spans=True,
    ),
    ChartSpec(
        "probe/kl_dense", "Reference KL, codec off", "nats a token", "lens", "The same weights.", points=True
    ),
    ChartSpec("actor/entropy", "Entropy", "nats a token", "lens", "Codec on.", lens=True, spans=True),
    ChartSpec(
        "probe/entropy_dense", "Entropy, codec off", "nats a token", "lens", "The same weights.", points=True
    ),
    ChartSpec(
        "actor/pg_clipfrac", "Clipped tokens", "% of tokens", "clipping", "Ordinary clip.", 100.0, spans=True
    ),
    ChartSpec(
        "actor/pg_clipfrac_lower", "Dual clip", "% of tokens", "clipping", "Negative advantages only.", 100.0
    ),
    ChartSpec(
        "probe/gap_policy_part",
        "Gap: the policy's part",
        "nats a token",
        "parts",
        "How far the sampler has sharpened.",
    ),
    ChartSpec(
        "probe/gap_view_part",
        "Gap: the view's part",
        "nats a token",
        "parts",
        "How far the trainer's view of the same tokens has moved.",
    ),
    ChartSpec(
        "probe/kl_gain",
        "KL through the lens over KL without it",
        "times",
        "parts",
        "How much of the codec-view KL is the lens.",
        points=True,
    ),
    ChartSpec(
        "probe/held_kl",
        "KL of the reference to the policy, codec off",
        "nats a token",
        "parts",
        "On the fixed batch, answered by the initial policy.",
        points=True,
    ),
    ChartSpec(
        "error_growth/exponent",
        "Error growth exponent",
        "power of the step",
        "growth",
        "1/2: redrawn every step. 1: the same thing thrown away every step.",
        marks=True,
    ),
    ChartSpec("error_growth/cosine", "Cosine of successive mean errors", "cosine", "growth"),
    ChartSpec(
        "movement/relative_change",
        "Relative change of the weights",
        "% of their norm",
        "movement",
        "All weights together.",
        100.0,
        points=True,
        level=100 * 2.0**-9,
    ),
    ChartSpec(
        "movement/center_of_mass",
        "Centre of mass over depth",
        "block",
        "movement",
        "Block index weighted by squared change.",
        points=True,
    ),
    ChartSpec(
        "controller/demand",
        "Demand",
        "actuators at their limit",
        "controller",
        "What the controller asks for.",
        marks=True,
    ),
    ChartSpec("controller/view_alignment_weight", "View alignment weight", "weight", "controller"),
    ChartSpec("controller/kl_coefficient", "KL coefficient", "weight", "controller"),
    ChartSpec("controller/learning_rate_scale", "Learning rate scale", "times", "controller"),
)


@dataclass(frozen=True)
class Band:
    """From the lowest to the highest reading of an arm's seeds, in the chart's unit."""

    arm: str
    steps: NDArray[np.int64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """The readings of one run in one chart, in the chart's unit; `thinned` when points were left out."""

    arm: str
    seed: int
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    thinned: bool = False


def arm_colours(arms: Sequence[str]) -> list[tuple[str, str]]:
    """(on light, on dark) of each arm: fixed for the named arms, in order of appearance for any other."""
    others = [arm for arm in arms if arm not in ARM_COLOURS]
    return [ARM_COLOURS.get(a) or OTHER_COLOURS[others.index(a) % len(OTHER_COLOURS)] for a in arms]


def palette_css(arms: Sequence[str], selector: str = ":root") -> str:
    """Custom properties --arm-0.. and the ground colours, for light, dark and print."""
    pairs = {f"arm-{i}": pair for i, pair in enumerate(arm_colours(arms))} | GROUND
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in pairs.items()) for i in (0, 1))
    return f"{selector}{{{light}}}@media screen and (prefers-color-scheme:dark){{{selector}{{{dark}}}}}"


def chart_lines(runs: Sequence[Run], spec: ChartSpec, max_points: int = MAX_POINTS) -> list[Line]:
    """One line per run that measured the series, in the order of `runs`."""
    lines = []
    for run in runs:
        series = run.get(spec.key)
        if len(series):
            kept = _kept_points(series.values, max_points)
            thinned = len(kept) < len(series)
            lines.append(
                Line(run.arm, run.seed, series.steps[kept], series.values[kept] * spec.scale, thinned)
            )
    return lines


def chart_bands(runs: Sequence[Run], spec: ChartSpec) -> list[Band]:
    """One band for every arm of two or more seeds, at the steps that all its seeds read as finite numbers.

    Beyond MAX_BAND_POINTS steps each bucket of steps keeps its lowest and its highest reading at its first
    step, so that no reading lies outside.
    """
    bands = []
    for arm in dict.fromkeys(run.arm for run in runs):
        own = [run.get(spec.key) for run in runs if run.arm == arm]
        own = [series for series in own if len(series)]
        if len(own) < 2:
            continue
        finite = [series.steps[np.isfinite(series.values)] for series in own]
        steps = functools.reduce(np.intersect1d, finite)
        if len(steps) < 2:
            continue
        values = np.array([series.values[np.searchsorted(series.steps, steps)] for series in own])
        buckets = np.array_split(np.arange(len(steps)), min(len(steps), MAX_BAND_POINTS))
        low = np.array([values[:, bucket].min() for bucket in buckets]) * spec.scale
        high = np.array([values[:, bucket].max() for bucket in buckets]) * spec.scale
        at = steps[[bucket[0] for bucket in buckets]]
        at[-1] = steps[-1]
        bands.append(Band(arm, at, low, high))
    return bands


def chart_spans(runs: Sequence[Run], spec: ChartSpec) -> list[Shade]:
    """(arm, first step, last step) of every run's failure span, for the charts that shade it."""
    found = [(run.arm, run_span(run)) for run in runs] if spec.spans else []
    return [(arm, span.first, span.last) for arm, span in found if span is not None]


def step_range(runs: Sequence[Run]) -> tuple[int, int]:
    """First and last step of anything these runs recorded: the x axis that all charts of a page share."""
    series = [s for run in runs for s in run.series.values() if len(s)]
    return min(int(s.steps[0]) for s in series), max(int(s.steps[-1]) for s in series)


def _kept_points(values: NDArray[np.float64], max_points: int) -> NDArray[np.int64]:
    """Indices to draw: all of them up to the limit, else each bucket's lowest and highest reading."""
    if len(values) <= max_points:
        return np.arange(len(values))
    kept: set[int] = {0, len(values) - 1}
    for bucket in np.array_split(np.arange(len(values)), max_points // 2 - 1):
        finite = bucket[np.isfinite(values[bucket])]
        if len(finite):
            kept |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
    return np.array(sorted(kept), np.int64)
