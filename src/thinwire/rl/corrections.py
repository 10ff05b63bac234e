"""Importance weights that correct for sampling from another policy than the one trained.

Letters in shape suffixes: `B` rows (one rollout each), `R` response positions, padded at the right.
"""

import torch
from torch import Tensor

from thinwire.core.errors import UserError
from thinwire.rl.aggregation import masked_difference

LOG_WEIGHT_BOUND = 20.0


def truncated_importance_weights(
    old_logprob_BR: Tensor, rollout_logprob_BR: Tensor, mask_BR: Tensor, truncation: float | None = None
) -> Tensor:
    """Detached weights that multiply the policy loss token by token; all 1 when `truncation` is None.

    weight = min(exp(clamp(old - rollout, +-20)), truncation), 0 off the mask: the token-level rule of
    verl 0.9.1 (`compute_rollout_correction_weights`, rollout_is "token", one threshold). `rollout` is the
    log-probability of the policy that sampled, `old` that of the trainer at the start of the step, in nats.

    Not covered: a gap of many nats. Under a codec at 5% of dense bits the mean weight was measured at 0.005,
    so nearly all signal goes; below about 1 nat the weights help. Truncation and tokenwise weighting bias.
    """
    kept_BR = mask_BR.bool()
    log_weight_BR = masked_difference(old_logprob_BR.detach(), rollout_logprob_BR.detach(), kept_BR)
    if truncation is None:
        return kept_BR.to(log_weight_BR.dtype)
    if not truncation > 0.0:
        raise UserError(
            f"rl.importance_truncation must be > 0, got {truncation}; 2 is usual, leave it out to switch off"
        )
    weight_BR = log_weight_BR.clamp(-LOG_WEIGHT_BOUND, LOG_WEIGHT_BOUND).exp().clamp(max=truncation)
    return torch.where(kept_BR, weight_BR, 0.0)
