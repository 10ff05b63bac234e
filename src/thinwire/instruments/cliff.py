"""Lasting falls of a score and the lowest point after one, by rules that are printed beside them.

Letters: n readings.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW = 10
CLIFF_DROP = 0.10
CLIFF_STANDARD_ERRORS = 4.0
CLIFF_RULE = (
    f"Score cliff: the first step at which the mean score of the last {WINDOW} recorded steps lies at least "
    f"{CLIFF_DROP:.2f} and at least {CLIFF_STANDARD_ERRORS:.0f} standard errors below the best earlier "
    f"{WINDOW}-step mean, with at least {WINDOW} further steps recorded, none of whose {WINDOW}-step means "
    "regains half of that loss. The noise of one step is read off successive differences."
)
TROUGH_RULE = f"Trough: the step that ends the lowest {WINDOW}-reading mean of the entropy after the cliff."


@dataclass(frozen=True)
class Cliff:
    """A lasting fall of the score: `loss` = `best` - `level`, 10-step means; `best_step` ends the best."""

    step: int
    best_step: int
    best: float
    level: float

    @property
    def loss(self) -> float:
        return self.best - self.level


def score_cliff(steps: NDArray[np.int64], score: NDArray[np.float64]) -> Cliff | None:
    """The first lasting fall of the score by CLIFF_RULE, None where there is none.

    m_t = mean(score_{t-9..t}); noise s^2 = mean((score_t - score_{t-1})^2) / 2 (von Neumann), so that a trend
    adds nothing; standard error of a difference of two means = s sqrt(2 / 10). Four of them, not three,
    because the best of many windows is compared with each later one: on a flat score the mark then appears in
    under 1% of runs of 200 steps and about 2% of 600 (16 prompts of very unequal difficulty, 8 samples).
    """
    finite = np.isfinite(score)
    steps, score = steps[finite], score[finite]
    if len(score) < 3 * WINDOW:
        return None
    mean = window_means(score)
    noise = math.sqrt(float(np.mean(np.diff(score) ** 2)) / 2)
    needed = max(CLIFF_DROP, CLIFF_STANDARD_ERRORS * noise * math.sqrt(2 / WINDOW))
    highest_so_far = np.maximum.accumulate(mean)
    highest_later = np.maximum.accumulate(mean[::-1])[::-1]
    for i in range(WINDOW, len(mean) - WINDOW):
        best, level = float(highest_so_far[i - WINDOW]), float(mean[i])
        # 1e-12: a fall of exactly 0.10 counts although 0.6 - 0.5 is a hair below 0.1 in binary.
        if best - level >= needed - 1e-12 and highest_later[i] < best - (best - level) / 2:
            best_index = int(np.argmax(mean[: i - WINDOW + 1]))
            return Cliff(int(steps[i + WINDOW - 1]), int(steps[best_index + WINDOW - 1]), best, level)
    return None


def trough(steps: NDArray[np.int64], values: NDArray[np.float64], after: int) -> tuple[int, float] | None:
    """The step past `after` that ends the lowest 10-reading mean, and that mean, by TROUGH_RULE.

    None without ten finite readings up to some step past `after`. A verdict may cite it only where the values
    are codec-off (probe/entropy_dense); of the codec-view entropy it is a mark on a picture.
    """
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    ends = steps[WINDOW - 1 :]
    later = ends > after
    if len(values) < WINDOW or not later.any():
        return None
    means = window_means(values)[later]
    lowest = int(np.argmin(means))
    return int(ends[later][lowest]), float(means[lowest])


def window_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """mean(values[i : i + 10]) for every i; entry i belongs to the step of its last reading, i + 9."""
    return np.convolve(values, np.full(WINDOW, 1 / WINDOW), mode="valid")
