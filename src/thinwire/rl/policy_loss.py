"""The clipped policy loss with dual clip, its branches kept apart.

Schulman et al., "Proximal policy optimization", arXiv:1707.06347; dual clip: Ye et al., "Mastering
complex control in MOBA games", arXiv:1912.09729. Formulas of verl 0.9.1 (`compute_policy_loss_vanilla`).

Letters in shape suffixes: `B` rows (one rollout each), `R` response positions, padded at the right.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core.errors import UserError
from thinwire.rl.aggregation import masked_difference

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """Values per token, 0 or False off the mask; only `loss_BR` carries a gradient.

    The mean over response tokens of clipped_above + clipped_below is actor/pg_clipfrac, of clipped_dual
    actor/pg_clipfrac_lower, of negative_log_ratio (nats) actor/ppo_kl. A token is in at most one of the
    three masks: a dual-clipped one has r > dual_clip > 1 - clip_low and A < 0.
    """

    loss_BR: Tensor
    clipped_above_BR: Tensor
    clipped_below_BR: Tensor
    clipped_dual_BR: Tensor
    negative_log_ratio_BR: Tensor


def policy_loss(
    logprob_BR: Tensor,
    old_logprob_BR: Tensor,
    advantage: Tensor,
    mask_BR: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> PolicyLoss:
    """The loss to minimise at every response token, finite in value and gradient whatever padding holds.

    r = exp(clamp(logprob - old, +-20));  L1 = -A r;  L2 = -A clip(r, 1 - clip_low, 1 + clip_high);
    M = max(L1, L2);  L3 = -A dual_clip;  loss = min(L3, M) where A < 0, else M.
    clipped = L2 > L1: above the range for A > 0, below it for A < 0; dual = M > L3 and A < 0.

    logprob (current weights) and old_logprob (weights at the start of the step) see the model through the
    same view, in nats. `advantage` is one number a row (B) or a token (B, R). dual_clip = inf switches
    the dual clip off. Computed in float32, or float64 if a log-probability is.
    """
    _check_clips(clip_low, clip_high, dual_clip)
    kept_BR = mask_BR.bool()
    log_ratio_BR = masked_difference(logprob_BR, old_logprob_BR.detach(), kept_BR)
    log_ratio_BR = log_ratio_BR.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_BR = torch.exp(log_ratio_BR)
    advantage = advantage.detach().to(ratio_BR.dtype)
    advantage_BR = torch.where(kept_BR, advantage.unsqueeze(-1) if advantage.ndim == 1 else advantage, 0.0)
    loss_1_BR = -advantage_BR * ratio_BR
    loss_2_BR = -advantage_BR * ratio_BR.clamp(1 - clip_low, 1 + clip_high)
    loss_max_BR = torch.maximum(loss_1_BR, loss_2_BR)
    loss_3_BR = -advantage_BR * dual_clip
    negative_BR = advantage_BR < 0
    loss_BR = torch.where(negative_BR, torch.minimum(loss_3_BR, loss_max_BR), loss_max_BR)
    clipped_BR = loss_2_BR.detach() > loss_1_BR.detach()
    return PolicyLoss(
        loss_BR=torch.where(kept_BR, loss_BR, 0.0),
        clipped_above_BR=clipped_BR & (advantage_BR > 0),
        clipped_below_BR=clipped_BR & negative_BR,
        clipped_dual_BR=(loss_max_BR.detach() > loss_3_BR) & negative_BR,
        negative_log_ratio_BR=-log_ratio_BR.detach(),
    )


def _check_clips(clip_low: float, clip_high: float, dual_clip: float) -> None:
    if not 0.0 <= clip_low < 1.0:
        raise UserError(f"rl.clip_low must be in [0, 1), got {clip_low}; 0.2 keeps ratios above 0.8")
    if not clip_high >= 0.0:
        raise UserError(f"rl.clip_high must be >= 0, got {clip_high}; 0.2 keeps ratios below 1.2")
    if not dual_clip > 1.0:
        raise UserError(f"rl.dual_clip must be > 1, got {dual_clip}; 3 is usual, inf switches it off")
