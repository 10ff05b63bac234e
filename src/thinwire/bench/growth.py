"""How a codec's errors add up when what it draws and learns is held L steps and then renewed.

At every boundary the same dense hidden states h cross T times. Step t uses draw and learned state number
j = floor(t / L), so e_t = mean over tokens of (h~ - h) is e_j, and S_T = sum of e_t. With independent e_j of
mean 0, E|S_T|^2 = L T E|e|^2: |S_T| grows like T while one is held and like sqrt(L T) beyond. A state
relearned from other rollouts of the same weights is renewed too, but not independent: it errs where the last
one did. Not covered: weights that move between renewals, and tokens that differ from step to step.

Letters: T steps, J renewals, N boundaries, D hidden size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.bench.errors import sent_over
from thinwire.bench.passes import Dense, Subject, hidden_passes, statistics
from thinwire.bench.plan import DEFAULT_FIRES, DEFAULT_SEED, Entry, Say
from thinwire.bench.rollouts import micro_batches, num_tokens, pick
from thinwire.bench.store import Saved
from thinwire.codecs import Codec, CodecState, Moments, View, publish
from thinwire.engines.batch import Rows
from thinwire.instruments.error_growth import displacements, growth_exponent, octaves

FAR = 8
"""The prefactor of sqrt(L T) is fitted over lags of at least this many L."""


@dataclass(frozen=True)
class GrowthPlan:
    """The codecs, T, and the numbers of steps L that a draw or a learned state is held."""

    entries: Sequence[Entry]
    holds: Sequence[int] = (1, 5, 10, 20)
    steps: int = 512
    fires: int = DEFAULT_FIRES
    """Fires on the first renewal's moments; one, from the last state, on each later one's."""
    seed: int = DEFAULT_SEED
    chunk_rollouts: int = 32
    """Rollouts that one renewal learns from, another chunk each time; all of them where there are fewer."""


READINGS = ("exponent", "effective_hold", "prefactor", "cosine")
Chunks = Sequence[tuple[tuple[Moments, ...], tuple[Moments, ...]]]
"""Moments of h and of dL/dh at every boundary, of successive steps' rollouts."""


def growth(subject: Subject, saved: Saved, plan: GrowthPlan, say: Say) -> dict[str, Any]:
    """Readings of every codec held L steps for each L, and for good, as one JSON object."""
    subject = subject.at(float(saved.facts["temperature"]))
    scored = saved.sampled.scored
    passes = hidden_passes(subject, micro_batches(scored, subject.device))
    chunks = chunks_of(subject, saved.sampled.statistics, plan)
    found = []
    for entry in plan.entries:
        errors_JND = renewal_errors(entry.codec, passes, chunks, plan, subject.device)
        holds = (*plan.holds, plan.steps) if len(errors_JND) > 1 else (plan.steps,)
        found.append(
            {
                "label": entry.label,
                "draws": is_drawn(entry.codec, passes),
                "learns": entry.codec.learns,
                "held": [held(errors_JND, hold, plan.steps) for hold in holds],
            }
        )
        say(f"{entry.label}: {len(errors_JND)} renewals")
    return {
        "model": dict(saved.facts),
        "scored": {"rollouts": len(scored.sample), "tokens": num_tokens(scored)},
        "steps": plan.steps,
        "learning_chunks": len(chunks),
        "chunk_rollouts": min(plan.chunk_rollouts, len(saved.sampled.statistics.sample)),
        "seed": plan.seed,
        "codecs": found,
    }


def chunks_of(subject: Subject, teaching: Rows, plan: GrowthPlan) -> Chunks:
    """Statistics of disjoint chunks of the rollouts, taken in turn."""
    if not any(entry.codec.learns for entry in plan.entries):
        return []
    size = min(plan.chunk_rollouts, len(teaching.sample))
    starts = range(0, len(teaching.sample) - size + 1, size)
    parts = [pick(teaching, range(start, start + size)) for start in starts]
    return [statistics(subject, micro_batches(part, subject.device)) for part in parts]


def renewal_errors(
    codec: Codec, passes: Sequence[Dense], chunks: Chunks, plan: GrowthPlan, device: torch.device
) -> Tensor:
    """e_j over the root mean square |h|, renewals j = 0..J-1, every boundary: (J, N, D) float64; J = 1 where
    nothing ever changes."""
    num_boundaries = len(passes[0].hidden)
    states = [codec.initial_state(plan.seed, b) for b in range(num_boundaries)]
    renews = codec.learns or is_drawn(codec, passes)
    errors = []
    for j in range(math.ceil(plan.steps / min(plan.holds)) if renews else 1):
        if codec.learns:
            states = relearned(codec, states, chunks[j % len(chunks)], j, plan.fires if j == 0 else 1)
        errors.append(mean_errors(publish(codec, states, plan.seed, j + 1, device), passes))
    return torch.stack(errors)


def relearned(
    codec: Codec,
    states: Sequence[CodecState],
    chunk: tuple[tuple[Moments, ...], tuple[Moments, ...]],
    version: int,
    fires: int,
) -> list[CodecState]:
    """The next state of every boundary, from where the last one stood."""
    found = list(states)
    for _ in range(fires):
        trio = zip(found, *chunk, strict=True)
        found = [codec.learn(state, ahead, version + 1, back) for state, ahead, back in trio]
    return found


def mean_errors(view: View, passes: Sequence[Dense]) -> Tensor:
    """Mean over all real tokens of h~ - h, over the root mean square |h|, every boundary: (N, D) float64."""
    num_boundaries, hidden_dim = len(view.states), view.codec.hidden_dim
    total_ND = torch.zeros(num_boundaries, hidden_dim, dtype=torch.float64)
    square_N = torch.zeros(num_boundaries, dtype=torch.float64)
    num_tokens = 0
    for dense in passes:
        mask_BT = dense.batch.token_mask_BT
        num_tokens += int(mask_BT.sum())
        for b, state in enumerate(view.states):
            hidden_BTD = dense.hidden[b]
            draw = view.draw(b, dense.batch.sample_B, mask_BT.shape[1])
            sent_BTD = sent_over(view.codec, hidden_BTD, draw, state, "forward")
            hidden_ND = hidden_BTD[mask_BT].double()
            total_ND[b] += (sent_BTD[mask_BT].double() - hidden_ND).sum(0).cpu()
            square_N[b] += hidden_ND.square().sum().cpu()
    return total_ND / num_tokens / (square_N / num_tokens).sqrt()[:, None]


def is_drawn(codec: Codec, passes: Sequence[Dense]) -> bool:
    """Whether anything of the codec depends on the step's keys."""
    states = [codec.initial_state(0, b) for b in range(len(passes[0].hidden))]
    return publish(codec, states, 0, 1).draw(0, passes[0].batch.sample_B[:1], 1) is not None


def held(errors_JND: Tensor, hold: int, steps: int) -> dict[str, Any]:
    """T steps of errors each held `hold` steps: how their sum grows, means over boundaries.

    With m(l) the mean square displacement over windows of l steps (`displacements`), as a multiple of the
    boundary's mean |e|^2:
    exponent: of |S| ~ T^H (`growth_exponent`) over lags 1..T/2: 1 while held, 1/2 when renewed independently
    each step; effective_hold: m(l) / l at l = T / 2, the L for which sqrt(L T) gives what was found there;
    prefactor: c of sqrt(m(l)) = c sqrt(L l) at lags l >= FAR L (mean of the logarithms; None without such a
    lag). Independent renewals have 1, less up to L / (6 l) because windows begin within a block;
    cosine: of successive renewals' errors; curve: (l, sqrt(m(l))).
    None where the codec makes no error at all. Absolute, over the root mean square |h|: step_error =
    sqrt(E|e|^2) (of a codec without bias it falls like 1 / sqrt(tokens)) and accumulated = that times
    sqrt(m(T / 2)).
    """
    index_T = (torch.arange(steps) // hold).clamp(max=len(errors_JND) - 1)
    erring = errors_JND.square().sum((0, 2)) > 0
    renewed_JND = errors_JND[: int(index_T.max()) + 1, erring]
    named: dict[str, Any] = {"hold": hold, "for_good": hold >= steps, "renewals": len(renewed_JND)}
    if not bool(erring.any()):
        return named | dict.fromkeys(READINGS) | {"step_error": 0.0, "accumulated": 0.0, "curve": []}
    lags = octaves(steps)
    walks = errors_JND[index_T][:, erring].unbind(1)
    growths = [_relative_displacements(error_TD, lags) for error_TD in walks]
    growth = [math.fsum(column) / len(column) for column in zip(*growths, strict=True)]
    steps_N = [math.sqrt(float(error_TD.square().sum(-1).mean())) for error_TD in walks]
    return named | {
        "step_error": math.fsum(steps_N) / len(erring),
        "accumulated": math.fsum(e * math.sqrt(m[-1]) for e, m in zip(steps_N, growths, strict=True))
        / len(erring),
        "exponent": _mean([growth_exponent(error_TD) for error_TD in walks]),
        "effective_hold": growth[-1] / lags[-1],
        "prefactor": prefactor(lags, growth, hold),
        "cosine": successive_cosine(renewed_JND),
        "curve": [[lag, math.sqrt(one)] for lag, one in zip(lags, growth, strict=True)],
    }


def _relative_displacements(error_TD: Tensor, lags: Sequence[int]) -> list[float]:
    square = float(error_TD.square().sum(-1).mean())
    return [one / square for one in displacements(error_TD, lags)]


def prefactor(lags: Sequence[int], growth: Sequence[float], hold: int) -> float | None:
    """exp(mean log) of sqrt(m(l) / (L l)) over lags l >= FAR L."""
    logs = [math.log(m / (hold * lag)) / 2 for lag, m in zip(lags, growth, strict=True) if lag >= FAR * hold]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def successive_cosine(errors_JND: Tensor) -> float | None:
    """Mean over boundaries and successive renewals of the cosine of their errors; None for one renewal."""
    if len(errors_JND) < 2:
        return None
    cosine_JN = torch.cosine_similarity(errors_JND[1:], errors_JND[:-1], dim=-1)
    return float(cosine_JN.mean())


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return math.fsum(present) / len(present) if present else None
