"""Series with known answers."""

import numpy as np
from scipy.signal import lfilter

GAP, GRAD_NORM, SCORE, VALIDATION = "rollout_corr/kl", "actor/grad_norm", "critic/score/mean", "val/score"


def autoregressive(seed, num_steps, correlation):
    """AR(1) of variance 1, after 300 steps of warming up."""
    shocks = np.random.default_rng(seed).standard_normal(num_steps + 300)
    return lfilter([np.sqrt(1 - correlation**2)], [1, -correlation], shocks)[300:]


def run(seed=0, num_steps=600, correlation=0.0, slope=0.0, curvature=0.0, rise=0.3, level=3.0, noise=0.3):
    """A run that learns by `rise` with a gap of the given slope and curvature (a step, a step squared)."""
    steps = np.arange(1, num_steps + 1)
    rng = np.random.default_rng([seed, 1])
    gap = level + noise * autoregressive([seed, 2], num_steps, correlation)
    norm = 1.7 + 0.2 * autoregressive([seed, 3], num_steps, correlation)
    score = rng.binomial(256, 0.5 + rise * steps / num_steps) / 256
    return {
        GAP: (steps, gap + slope * steps + curvature * steps**2),
        GRAD_NORM: (steps, norm),
        SCORE: (steps, score),
    }
