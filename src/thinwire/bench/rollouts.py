"""Rollouts of the dense model in two parts by prompt: one teaches the codecs, the other scores them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.core.errors import UserError
from thinwire.core.keys import Stream, TokenKeys, words
from thinwire.engines.batch import Batch, Rows, partition
from thinwire.models.load import LoadedModel
from thinwire.sampling.base import Rollouts, SamplingConfig
from thinwire.sampling.hf import HFSampler
from thinwire.tasks.base import Task, TaskConfig
from thinwire.tasks.prompts import encode_prompt

MIN_SCORED = 2
"""Scored rollouts that an interval over sequences needs at least."""
MICRO_TOKENS = 512
"""Positions of one micro-batch at most (one row at least): 0.5 GB of activations in 30 blocks, width 576."""
_SIGN = 2  # the `boundary` part of a key: training prompts are 0, held-out ones 1


@dataclass(frozen=True)
class Sampled:
    """Rows for statistics and rows to score; no prompt stands in both. Advantages are keyed signs."""

    statistics: Rows
    scored: Rows


def sample(loaded: LoadedModel, task: Task, config: TaskConfig, sampling: SamplingConfig, seed: int) -> Rows:
    """One dense response to each of the first `sampling.prompts` prompts of the task, with keyed advantages.

    The advantage of a row is +1 or -1 with equal odds, keyed by (seed, sample): of mean 0 over a group, as a
    run's are, but not learned from any reward.
    """
    problems = task.prompts(1, sampling.prompts)
    prompts = [encode_prompt(loaded.tokenizer, problem, config) for problem in problems]
    sampler = HFSampler(loaded.model, loaded.eos_ids, loaded.pad_id)
    rollouts = sampler.sample(prompts, seed=seed, step=1, group_size=1, config=sampling)
    return to_rows(rollouts, seed)


def to_rows(rollouts: Rollouts, seed: int) -> Rows:
    """The rollouts as rows, each with its keyed sign as advantage."""
    keys = TokenKeys(seed, 0, torch.tensor(rollouts.sample), torch.tensor(0))
    sign_B = 1.0 - 2.0 * (words(keys, Stream.TASK, _SIGN, 1).squeeze(-1) >> 31).double()
    return Rows(
        rollouts.prompt_ids, rollouts.response_ids, rollouts.logprobs, rollouts.sample, sign_B.tolist()
    )


def split_by_prompt(rows: Rows, statistics_share: float) -> Sampled:
    """Whole prompts, in order of appearance: the first round(share P) of P different ones for statistics.

    UserError where that leaves no rollout for statistics or fewer than MIN_SCORED to score.
    """
    distinct = dict.fromkeys(map(tuple, rows.prompt_ids))
    teaching = set(list(distinct)[: round(statistics_share * len(distinct))])
    own = [index for index, prompt in enumerate(rows.prompt_ids) if tuple(prompt) in teaching]
    other = [index for index, prompt in enumerate(rows.prompt_ids) if tuple(prompt) not in teaching]
    if not own or len(other) < MIN_SCORED:
        raise UserError(
            f"--rollouts {len(rows.sample)} gives {len(distinct)} different prompts: with --statistics-share "
            f"{statistics_share:g} {len(own)} rollouts for statistics and {len(other)} to score, but 1 and "
            f"{MIN_SCORED} are needed; raise --rollouts"
        )
    return Sampled(pick(rows, own), pick(rows, other))


def pick(rows: Rows, chosen: Sequence[int]) -> Rows:
    """These rows, in this order."""
    return Rows(
        [rows.prompt_ids[i] for i in chosen],
        [rows.response_ids[i] for i in chosen],
        [rows.rollout_logprobs[i] for i in chosen],
        [rows.sample[i] for i in chosen],
        [rows.advantages[i] for i in chosen],
    )


def micro_batches(rows: Rows, device: torch.device) -> list[Batch]:
    """All rows in order, in micro-batches of at most MICRO_TOKENS positions."""
    longest = max(len(p) + len(r) for p, r in zip(rows.prompt_ids, rows.response_ids, strict=True))
    num_rows = len(rows.sample)
    (batches,) = partition(rows, num_rows, max(1, MICRO_TOKENS // longest), 1, device)
    return batches


def num_tokens(rows: Rows) -> int:
    """Prompt and response tokens of all rows."""
    return sum(map(len, rows.prompt_ids)) + sum(map(len, rows.response_ids))
