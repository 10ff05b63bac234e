"""From values per token to one loss, so that micro-batches add up to exactly their mini-batch.

The five modes and their names are those of verl 0.9.1 (`agg_loss` in verl/trainer/ppo/core_algos.py).

Letters in shape suffixes: `B` rows (one rollout each), `R` response positions, padded at the right.
"""

from dataclasses import dataclass
from typing import Literal, assert_never, get_args

import torch
from torch import Tensor

from thinwire.core.errors import UserError

AggregationMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]


@dataclass(frozen=True)
class Denominator:
    """What a whole mini-batch divides by; all its micro-batches share one.

    `tokens`: response tokens. `sequences`: rows with at least one of them. `norm_tokens`: the constant
    length of seq-mean-token-sum-norm. verl's trainer passes the configured mini-batch size for
    `sequences` and so counts empty rows too; its `agg_loss` alone counts as here. Build a Denominator
    with `sequences` = B to reproduce the trainer.
    """

    tokens: int
    sequences: int
    norm_tokens: int


def denominator(mask_BR: Tensor, loss_scale_factor: int | None = None) -> Denominator:
    """Count tokens and non-empty rows of a whole mini-batch, once, before it is split.

    norm_tokens = loss_scale_factor, or R, the padded length of this mini-batch (as verl); a run whose
    padded length changes from step to step should set it, or the loss scale moves with the padding.
    """
    if loss_scale_factor is not None and loss_scale_factor < 1:
        raise UserError(
            f"rl.loss_scale_factor must be >= 1 (tokens), got {loss_scale_factor}; leave it out to divide by "
            "the padded response length"
        )
    tokens_B = mask_BR.bool().sum(dim=-1)
    return Denominator(
        tokens=int(tokens_B.sum()),
        sequences=int((tokens_B > 0).sum()),
        norm_tokens=mask_BR.shape[-1] if loss_scale_factor is None else loss_scale_factor,
    )


def aggregate(values_BR: Tensor, mask_BR: Tensor, mode: AggregationMode, denominator: Denominator) -> Tensor:
    """This micro-batch's share of the mini-batch's loss, a scalar; the shares add up to the whole.

    token-mean: sum / tokens; token-sum: sum; seq-mean-token-sum: (sum of row sums) / sequences;
    seq-mean-token-sum-norm: that / norm_tokens; seq-mean-token-mean: (sum of row means) / sequences.
    Rows without tokens add nothing. A mini-batch without tokens gives 0 with zero gradient (verl: nan).

    Not covered: weights. The mask is read as yes or no; multiply the values for weights.
    """
    total = aggregate_sum(values_BR, mask_BR, mode)
    match mode:
        case "token-mean":
            return total / max(denominator.tokens, 1)
        case "token-sum":
            return total
        case "seq-mean-token-sum" | "seq-mean-token-mean":
            return total / max(denominator.sequences, 1)
        case "seq-mean-token-sum-norm":
            return total / max(denominator.sequences, 1) / max(denominator.norm_tokens, 1)
        case _:
            assert_never(mode)


def aggregate_sum(values_BR: Tensor, mask_BR: Tensor, mode: AggregationMode) -> Tensor:
    """The numerator that micro-batches add: the sum over tokens, or over row means for seq-mean-token-mean.

    Values off the mask are replaced before any arithmetic: nan or inf there reach neither value nor gradient.
    """
    if mode not in get_args(AggregationMode):
        raise UserError(f"rl.aggregation must be one of {', '.join(get_args(AggregationMode))}; got {mode!r}")
    kept_BR = mask_BR.bool()
    masked_BR = torch.where(kept_BR, values_BR, 0.0)
    if mode == "seq-mean-token-mean":
        return (masked_BR.sum(dim=-1) / kept_BR.sum(dim=-1).clamp_min(1)).sum()
    return masked_BR.sum()


def masked_difference(minuend_BR: Tensor, subtrahend_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """minuend - subtrahend on the mask and exactly 0 off it, in float32 or wider.

    Padding may hold anything. It is replaced before a later exp can see it: exp(200) at a padded token
    gives a finite masked loss but, by 0 * inf, a nan gradient.
    """
    wide = torch.promote_types(torch.promote_types(minuend_BR.dtype, subtrahend_BR.dtype), torch.float32)
    return torch.where(mask_BR.bool(), minuend_BR.to(wide) - subtrahend_BR.to(wide), 0.0)
