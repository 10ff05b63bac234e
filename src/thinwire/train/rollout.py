"""The rollout phase of a step: prompts, dense samples, scores, advantages.

Letters: B rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from thinwire.core.errors import NonFinite
from thinwire.engines.batch import Rows
from thinwire.rl.advantages import group_advantages, num_equal_groups
from thinwire.sampling.base import Rollouts, Sampler, SamplingConfig
from thinwire.tasks.base import Problem, Score, Task, TaskConfig
from thinwire.tasks.prompts import encode_prompt
from thinwire.tasks.rewards import Reward


@dataclass(frozen=True)
class Workload:
    """Where prompts come from and how answers are scored."""

    task: Task
    config: TaskConfig
    reward: Reward
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class Scored:
    """The step's rollouts with their texts and scores, in sample order."""

    problems: Sequence[Problem]
    rollouts: Rollouts
    responses: Sequence[str]
    scores: Sequence[Score]
    group_size: int

    def values(self) -> torch.Tensor:
        """Score of every row, fp32 (B,)."""
        return torch.tensor([score.value for score in self.scores], dtype=torch.float32)


def roll_out(
    work: Workload,
    sampler: Sampler,
    problems: Sequence[Problem],
    config: SamplingConfig,
    seed: int,
    step: int,
) -> Rollouts:
    """group_size dense samples of every problem's prompt."""
    prompt_ids = [encode_prompt(work.tokenizer, problem, work.config) for problem in problems]
    return sampler.sample(prompt_ids, seed=seed, step=step, group_size=config.group_size, config=config)


def score(work: Workload, problems: Sequence[Problem], rollouts: Rollouts, group_size: int) -> Scored:
    """Decode the responses and apply the reward; row i belongs to problem i // group_size."""
    responses = [str(work.tokenizer.decode(ids, skip_special_tokens=True)) for ids in rollouts.response_ids]
    scores = [work.reward(problems[i // group_size], text) for i, text in enumerate(responses)]
    return Scored(problems, rollouts, responses, scores, group_size)


def refuse_scores(
    scored: Scored, advantages: Sequence[float] = (), series: str = "critic/score/mean"
) -> None:
    """NonFinite, with the row of the largest score, unless the mean (as `series`) and every advantage are
    finite in fp32: an infinite score would make its whole group equal and teach nothing, unseen."""
    value_B = scored.values()
    readings = {
        series: float(value_B.mean()),
        "critic/advantages/max": max(advantages, default=0.0),
        "critic/advantages/min": min(advantages, default=0.0),
    }
    for name, value in readings.items():
        if not math.isfinite(value):
            row = int(torch.where(value_B.isnan(), math.inf, value_B.abs()).argmax())
            problem, number = scored.problems[row // scored.group_size], scored.scores[row].value
            answer = scored.responses[row][:60]
            raise NonFinite(name, value, f", score {number:g} of problem {problem.id!r}, answer {answer!r}")


def to_rows(scored: Scored, standardise: bool) -> Rows:
    """The rows the trainer sees, with group advantages."""
    advantages = group_advantages(scored.values(), scored.group_size, standardise=standardise)
    rollouts = scored.rollouts
    return Rows(
        rollouts.prompt_ids,
        rollouts.response_ids,
        rollouts.logprobs,
        rollouts.sample,
        advantages.tolist(),
    )


def rollout_series(scored: Scored, rows: Rows) -> dict[str, float]:
    """critic/*, response_length/*, prompt_length/mean and the counts of what went wrong."""
    value_B = scored.values()
    length_B = torch.tensor([len(ids) for ids in scored.rollouts.response_ids], dtype=torch.float32)
    prompt_B = torch.tensor([len(ids) for ids in scored.rollouts.prompt_ids], dtype=torch.float32)
    cut_B = torch.tensor([not finished for finished in scored.rollouts.finished], dtype=torch.float32)
    unparsed = [score.parsed is None for score in scored.scores]
    empty = [not text.strip() for text in scored.responses]
    return {
        "critic/score/mean": float(value_B.mean()),
        "critic/score/max": float(value_B.max()),
        "critic/score/min": float(value_B.min()),
        "critic/advantages/max": max(rows.advantages),
        "critic/advantages/min": min(rows.advantages),
        "groups/all_equal_count": float(num_equal_groups(value_B, scored.group_size)),
        "response_length/mean": float(length_B.mean()),
        "response_length/max": float(length_B.max()),
        "response_length/min": float(length_B.min()),
        "response_length/clip_ratio": float(cut_B.mean()),
        "prompt_length/mean": float(prompt_B.mean()),
        "response/unparseable_share": sum(unparsed) / len(unparsed),
        "response/empty_count": float(sum(empty)),
    }


def validate(
    work: Workload, sampler: Sampler, problems: Sequence[Problem], config: SamplingConfig, batch_rows: int
) -> float:
    """Mean score of greedy dense answers to the held-out problems."""
    greedy = config.model_copy(
        update={"temperature": 0.0, "top_p": 1.0, "top_k": 0, "group_size": 1, "batch_rows": batch_rows}
    )
    rollouts = roll_out(work, sampler, problems, greedy, seed=0, step=0)
    scored = score(work, problems, rollouts, 1)
    refuse_scores(scored, series="val/score")
    return float(scored.values().mean())


def sample_rows(scored: Scored, step: int, num: int) -> list[dict[str, Any]]:
    """The first `num` rollouts of a step, one of each group before a second of any."""
    order = sorted(range(len(scored.responses)), key=lambda row: (row % scored.group_size, row))
    return [
        {
            "step": step,
            "sample": scored.rollouts.sample[row],
            "prompt": scored.problems[row // scored.group_size].text,
            "response": scored.responses[row],
            "answer": scored.problems[row // scored.group_size].answer,
            "parsed": scored.scores[row].parsed,
            "score": scored.scores[row].value,
            "finished": scored.rollouts.finished[row],
        }
        for row in order[:num]
    ]
