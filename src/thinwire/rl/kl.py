"""Estimators of the divergence from the reference policy, one value a token.

Schulman, "Approximating KL divergence", 2020 (joschu.net/blog/kl-approx.html); clamps as in verl 0.9.1
(`kl_penalty`, kinds kl, mse and low_var_kl there).

Letters in shape suffixes: `B` rows (one rollout each), `R` response positions, padded at the right.
"""

from dataclasses import dataclass
from typing import Literal, assert_never, get_args

import torch
from torch import Tensor

from thinwire.core.errors import UserError
from thinwire.rl.aggregation import masked_difference

KlKind = Literal["k1", "k2", "k3"]
DIFFERENCE_BOUND = 20.0
VALUE_BOUND = 10.0
EXPONENT_BOUND = 700.0


@dataclass(frozen=True)
class KlEstimate:
    """Nats a token, 0 or False off the mask; only `value_BR` carries a gradient.

    `unclamped_BR` (float64) is the estimate without the loss's clamps, `clamped_BR` where they changed it.
    """

    value_BR: Tensor
    unclamped_BR: Tensor
    clamped_BR: Tensor


def kl_estimate(
    logprob_BR: Tensor, reference_logprob_BR: Tensor, mask_BR: Tensor, kind: KlKind
) -> KlEstimate:
    """KL(current || reference) a token, estimated from tokens that the current policy sampled.

    d = reference - logprob.  k1 = -d;  k2 = d^2 / 2;  k3 = clamp(e^c - c - 1, +-10), c = clamp(d, +-20).
    k1 and k3 are unbiased; k2 is biased, and is the one whose gradient is that of the KL in expectation.
    k3 saturates at d < -11 and d > 2.61: at most 10 a token, and no gradient there. k1 and k2 have no clamp.

    Not covered: the wrong sampler. On tokens drawn by another policy (the dense sampler, when both
    log-probabilities are seen through a codec) it is a reading of the lens, not a KL.
    The unclamped k3 is e^d - d - 1 in float64 with the exponent alone held to +-700 against overflow.
    """
    if kind not in get_args(KlKind):
        raise UserError(f"rl.kl_estimator must be one of {', '.join(get_args(KlKind))}; got {kind!r}")
    difference_BR = masked_difference(reference_logprob_BR.detach(), logprob_BR, mask_BR)
    match kind:
        case "k1":
            value_BR = -difference_BR
        case "k2":
            value_BR = 0.5 * difference_BR.square()
        case "k3":
            return _k3(difference_BR)
        case _:
            assert_never(kind)
    unclamped_BR = value_BR.detach().to(torch.float64)
    return KlEstimate(value_BR, unclamped_BR, torch.zeros_like(value_BR, dtype=torch.bool))


def _k3(difference_BR: Tensor) -> KlEstimate:
    bounded_BR = difference_BR.clamp(-DIFFERENCE_BOUND, DIFFERENCE_BOUND)
    value_BR = (torch.exp(bounded_BR) - bounded_BR - 1).clamp(-VALUE_BOUND, VALUE_BOUND)
    exact_BR = difference_BR.detach().to(torch.float64)
    unclamped_BR = torch.expm1(exact_BR.clamp(-EXPONENT_BOUND, EXPONENT_BOUND)) - exact_BR
    return KlEstimate(value_BR, unclamped_BR, unclamped_BR > VALUE_BOUND)
