"""What every sampler takes and gives back: settings, rollouts, and the two calls of the interface."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor


class SamplingConfig(BaseModel):
    """How responses are drawn from the dense model.

    Order of operations on the logits of one token: end-of-sequence ids masked while fewer than
    `min_new_tokens` are drawn, division by `temperature`, `top_k`, `top_p`, renormalisation.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompts: int = Field(default=32, ge=1)
    """Prompts a step."""
    group_size: int = Field(default=8, ge=1)
    """Responses a prompt."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Tokens a response at most, the end-of-sequence token included."""
    min_new_tokens: int = Field(default=0, ge=0)
    """Tokens before the end-of-sequence token may be drawn, 0..max_new_tokens."""
    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Divides the logits; 0 takes the most probable token (greedy)."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Only the fewest most probable tokens that reach this mass are drawn; 1 = all. Below 1 even an
    uncompressed run has a gap, because the trainer's log-probabilities know no top-p."""
    top_k: int = Field(default=0, ge=0)
    """Only the k most probable tokens are drawn; 0 = all. Gives a gap like top_p."""
    batch_rows: int = Field(default=0, ge=0)
    """Responses decoded at once; 0 = all. Bounds memory; the draws do not depend on it."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"sampling.min_new_tokens must be in 0..{self.max_new_tokens} (sampling.max_new_tokens), "
                f"got {self.min_new_tokens}; lower it or raise sampling.max_new_tokens"
            )
        return self


@dataclass(frozen=True)
class Rollouts:
    """Responses of one step, one entry a row; rows = prompts x group_size, groups consecutive.

    `response_ids` hold the end-of-sequence token if it was sampled. `logprobs` are natural logarithms of
    the distribution really sampled from, after temperature, top-k, top-p and the minimum length; greedy
    decoding draws from a distribution with all mass on one token, so they are 0.0 there. `finished` rows
    ended with an end-of-sequence token; the others were cut at max_new_tokens. `sample` is the sample
    index within the step, `version` that of the weights.
    """

    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    logprobs: list[list[float]]
    finished: list[bool]
    sample: list[int]
    version: int

    def __len__(self) -> int:
        return len(self.response_ids)


class Sampler(Protocol):
    """A source of responses with its own dense copy, or view, of the weights."""

    version: int

    def push(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Sample from these weights from now on."""
        ...

    def sample(
        self,
        prompt_ids: Sequence[Sequence[int]],
        *,
        seed: int,
        step: int,
        group_size: int,
        config: SamplingConfig,
        sample_ids: Sequence[int] | None = None,
    ) -> Rollouts:
        """`group_size` responses to every prompt.

        The draws are a function of (seed, step, sample index, position) alone. Row r = prompt index x
        group_size + member has sample index r, or `sample_ids[r]` where given.
        """
        ...
