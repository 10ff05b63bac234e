"""Rollouts as right-padded micro-batches, fixed before the first pass of a step.

Letters: B rows, T positions, R response positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One micro-batch: rows of prompt + response, padded at the right to the micro-batch's bucket.

    A position of a row is its index, so the codec's keys do not depend on the padding. Masks come from
    recorded lengths, never from pad ids.
    """

    input_ids_BT: Tensor
    """Token ids, int64."""
    prompt_length_B: Tensor
    """Prompt tokens of each row, int64."""
    response_length_B: Tensor
    """Response tokens of each row (the EOS included when it was sampled), int64."""
    sample_B: Tensor
    """Sample index within the step: prompt index x group size + member, int64."""
    rollout_logprob_BR: Tensor
    """Log-probabilities recorded by the dense sampler, fp32, 0 at padding."""
    advantage_B: Tensor
    """Group advantage of each row, fp32."""

    @property
    def response_mask_BR(self) -> Tensor:
        """True on the recorded response tokens."""
        slots_R = torch.arange(self.rollout_logprob_BR.shape[1], device=self.response_length_B.device)
        return slots_R[None] < self.response_length_B[:, None]

    @property
    def token_mask_BT(self) -> Tensor:
        """True on real tokens, prompt and response."""
        length_B = self.prompt_length_B + self.response_length_B
        return torch.arange(self.input_ids_BT.shape[1], device=length_B.device)[None] < length_B[:, None]

    @property
    def num_response_tokens(self) -> int:
        """Response tokens of all rows."""
        return int(self.response_length_B.sum())

    def response_positions(self) -> tuple[Tensor, Tensor]:
        """Row and response slot of each of the N response tokens, row by row: (N,), (N,)."""
        row_N, slot_N = self.response_mask_BR.nonzero(as_tuple=True)
        return row_N, slot_N


@dataclass(frozen=True)
class Rows:
    """All rows of a step as plain lists, in sample order."""

    prompt_ids: Sequence[Sequence[int]]
    response_ids: Sequence[Sequence[int]]
    rollout_logprobs: Sequence[Sequence[float]]
    sample: Sequence[int]
    advantages: Sequence[float]


def partition(
    rows: Rows, mini_batch_rows: int, micro_batch_rows: int, length_bucket: int, device: torch.device
) -> list[list[Batch]]:
    """Mini-batches (one optimizer tick each) of micro-batches, consecutive rows in sample order.

    It is made once, before the old pass: another partition would change the last bits of the
    log-probabilities and the ratio would not be exactly 1.
    """
    num_rows = len(rows.sample)
    ticks = [range(a, min(a + mini_batch_rows, num_rows)) for a in range(0, num_rows, mini_batch_rows)]
    return [
        [
            collate(rows, tick[a : a + micro_batch_rows], length_bucket, device)
            for a in range(0, len(tick), micro_batch_rows)
        ]
        for tick in ticks
    ]


def collate(rows: Rows, chosen: Sequence[int], length_bucket: int, device: torch.device) -> Batch:
    """The chosen rows as one Batch; T is the longest row rounded up to a multiple of length_bucket."""
    prompts = [list(rows.prompt_ids[i]) for i in chosen]
    responses = [list(rows.response_ids[i]) for i in chosen]
    longest = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    width = -(-longest // length_bucket) * length_bucket
    num_slots = max(1, max(len(r) for r in responses))
    ids = [p + r + [0] * (width - len(p) - len(r)) for p, r in zip(prompts, responses, strict=True)]
    logprobs = [list(rows.rollout_logprobs[i]) for i in chosen]
    padded = [values + [0.0] * (num_slots - len(values)) for values in logprobs]
    return Batch(
        torch.tensor(ids, device=device),
        torch.tensor([len(p) for p in prompts], device=device),
        torch.tensor([len(r) for r in responses], device=device),
        torch.tensor([rows.sample[i] for i in chosen], device=device),
        torch.tensor(padded, dtype=torch.float32, device=device),
        torch.tensor([rows.advantages[i] for i in chosen], dtype=torch.float32, device=device),
    )
