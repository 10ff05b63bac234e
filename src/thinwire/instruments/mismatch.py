"""The rollout_corr/* series: how far the policy that trains is from the policy that sampled.

Formulas and names of verl 0.9.1 (`compute_offpolicy_metrics` in verl/trainer/ppo/rollout_corr_helper.py),
computed in float64.

Letters in shape suffixes: `B` rows (one rollout each), `R` response positions, padded at the right.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
GAP_MEANS = ("probe/rollout_logprob", "probe/old_logprob")
"""E log pi of the dense sampler and E log v of the trainer's view: the gap is their difference."""


def mismatch_series(rollout_logprob_BR: Tensor, old_logprob_BR: Tensor, mask_BR: Tensor) -> dict[str, float]:
    """Every rollout_corr/* series of one batch, in nats where not a ratio; empty when the mask is.

    rollout = log-probability under the policy that sampled (dense), old = under the trainer's view of the
    same weights. Over tokens on the mask, with x = old - rollout:
        kl = mean(-x), THE GAP: KL(sampler || trainer) by k1;  k3_kl = mean(e^x - x - 1), the same by k3
        chi2_token = mean(e^(2 clamp(x, +-20))) - 1
    Over rows, with row means o of old and s of rollout (0 for a row without tokens, which verl counts):
        training_log_ppl = mean(-o);  training_ppl = mean(e^-o);  rollout_log_ppl, rollout_ppl likewise from s
        log_ppl_diff = mean(s - o), its _max and _min;  log_ppl_abs_diff = mean|s - o|
        ppl_ratio = mean(e^(s - o))
        chi2_seq = mean(e^(2 clamp(row sum of x, +-20))) - 1
    Not covered: overflow. e^x is held to x <= 700, so that every value is a finite number.
    """
    kept_BR = mask_BR.bool()
    if not bool(kept_BR.any()):
        return {}
    old_BR = torch.where(kept_BR, old_logprob_BR.detach().to(torch.float64), 0.0)
    rollout_BR = torch.where(kept_BR, rollout_logprob_BR.detach().to(torch.float64), 0.0)
    tokens_B = kept_BR.sum(dim=-1).clamp_min(1)
    row_old_B, row_rollout_B = old_BR.sum(dim=-1) / tokens_B, rollout_BR.sum(dim=-1) / tokens_B
    row_gap_B = row_rollout_B - row_old_B
    x_BR = old_BR - rollout_BR
    x_N = x_BR[kept_BR]
    series = {
        "kl": (-x_N).mean(),
        "k3_kl": (_exp(x_N) - x_N - 1.0).mean(),
        "log_ppl_diff": row_gap_B.mean(),
        "log_ppl_abs_diff": row_gap_B.abs().mean(),
        "log_ppl_diff_max": row_gap_B.max(),
        "log_ppl_diff_min": row_gap_B.min(),
        "ppl_ratio": _exp(row_gap_B).mean(),
        "training_ppl": _exp(-row_old_B).mean(),
        "rollout_ppl": _exp(-row_rollout_B).mean(),
        "training_log_ppl": (-row_old_B).mean(),
        "rollout_log_ppl": (-row_rollout_B).mean(),
        "chi2_token": _chi_square(x_N),
        "chi2_seq": _chi_square(x_BR.sum(dim=-1)),
    }
    return _named(series)


def gap_means(rollout_logprob_BR: Tensor, old_logprob_BR: Tensor, mask_BR: Tensor) -> dict[str, float]:
    """The gap's two halves at this step, nats a token: probe/rollout_logprob = E_t log pi_t of the dense
    sampler, probe/old_logprob = E_t log v_t of the trainer's view, over the same tokens."""
    kept_BR = mask_BR.bool()
    if not bool(kept_BR.any()):
        return {}
    means = [float(part_BR[kept_BR].double().mean()) for part_BR in (rollout_logprob_BR, old_logprob_BR)]
    return dict(zip(GAP_MEANS, means, strict=True))


def gap_parts(means: Mapping[str, float], origin: Mapping[str, float]) -> dict[str, float]:
    """The gap's change since step 1 as a sum of two parts, nats a token (means and origin: series with
    `gap_means` of now and of step 1; empty where either has none).

    gap_t - gap_1 = (E_t log pi_t - E_1 log pi_1) - (E_t log v_t - E_1 log v_1): gap_policy_part is
    the sampler growing surer of its own tokens, gap_view_part the trainer's view losing them. Each E_t is
    over the tokens of step t, sampled from pi_t.
    """
    if any(key not in series for key in GAP_MEANS for series in (means, origin)):
        return {}
    policy, view = (means[key] - origin[key] for key in GAP_MEANS)
    return {"probe/gap_policy_part": policy, "probe/gap_view_part": -view}


def _named(series: dict[str, Tensor]) -> dict[str, float]:
    values = torch.stack(list(series.values())).tolist()
    return {f"rollout_corr/{name}": float(value) for name, value in zip(series, values, strict=True)}


def _exp(x: Tensor) -> Tensor:
    return torch.exp(x.clamp(max=700.0))


def _chi_square(log_ratio: Tensor) -> Tensor:
    return torch.exp(2.0 * log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).mean() - 1.0
