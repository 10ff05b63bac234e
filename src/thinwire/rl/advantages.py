"""Group-relative advantages (GRPO, Shao et al., "DeepSeekMath", arXiv:2402.03300, outcome supervision).

Letters in shape suffixes: `B` rows = prompts x group size, groups on consecutive rows, `P` prompts,
`G` members of a group, `1` a single column.
"""

import torch
from torch import Tensor

from thinwire.core.errors import UserError


def group_advantages(
    score_B: Tensor, group_size: int, epsilon: float = 1e-6, standardise: bool = True
) -> Tensor:
    """One advantage a row, in the scores' type; exactly 0 throughout a group whose scores are all equal.

    advantage = (score - mean) / (std + epsilon), std with n - 1; `standardise` False leaves out the
    division (Liu et al., "Understanding R1-Zero-like training", arXiv:2503.20783). A group of one has
    mean 0 and std 1: score / (1 + epsilon). Formulas of verl 0.9.1 (`compute_grpo_outcome_advantage`),
    computed in float64.

    Deviation from verl: an all-equal group is set to 0. In float32 the mean of equal scores can miss them
    by a rounding, and divided by epsilon that residue is a large, meaningless advantage.
    Not covered: non-finite scores give non-finite advantages for their group.
    """
    score_PG = _grouped(score_B, group_size)
    if group_size == 1:
        advantage_PG = score_PG / (1.0 + epsilon) if standardise else score_PG
    else:
        advantage_PG = score_PG - score_PG.mean(dim=1, keepdim=True)
        if standardise:
            variance_P1 = advantage_PG.square().sum(dim=1, keepdim=True) / (group_size - 1)
            advantage_PG = advantage_PG / (variance_P1.sqrt() + epsilon)
        advantage_PG = torch.where(_all_equal(score_PG).unsqueeze(1), 0.0, advantage_PG)
    return advantage_PG.flatten().to(torch.promote_types(score_B.dtype, torch.float32))


def num_equal_groups(score_B: Tensor, group_size: int) -> int:
    """How many groups give no signal because all their scores are equal; 0 for groups of one, which do."""
    score_PG = _grouped(score_B, group_size)
    return 0 if group_size == 1 else int(_all_equal(score_PG).sum())


def _all_equal(score_PG: Tensor) -> Tensor:
    return (score_PG == score_PG[:, :1]).all(dim=1)


def _grouped(score_B: Tensor, group_size: int) -> Tensor:
    if group_size < 1:
        raise UserError(
            f"sampling.group_size must be >= 1, got {group_size}; 8 gives each prompt 8 answers to compare"
        )
    assert score_B.ndim == 1, f"one score a row expected, got shape {tuple(score_B.shape)}"
    assert score_B.shape[0] % group_size == 0, f"{score_B.shape[0]} rows are not groups of {group_size}"
    return score_B.detach().to(torch.float64).reshape(-1, group_size)
