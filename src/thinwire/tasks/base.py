"""What a task is: problems in, scored answers out, and nothing remembered between steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from thinwire.core.errors import UserError

if TYPE_CHECKING:
    from thinwire.tasks.prompts import PromptTokenizer


@dataclass(frozen=True)
class Problem:
    """One question with its gold answer; `id` is unique within its set."""

    id: str
    text: str
    answer: str


@dataclass(frozen=True)
class Score:
    """What a reward says of one response; `parsed` is None when no answer could be read from it."""

    value: float
    parsed: str | None


class TaskConfig(BaseModel):
    """The `[task]` table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: Literal["arithmetic", "problems"] = "arithmetic"
    """Where problems come from: drawn sums ("arithmetic") or a JSONL file ("problems")."""

    digits: int = Field(default=2, ge=1, le=6)
    """Arithmetic: decimal digits of each operand, 1..6 (2 means 10..99, 1 means 0..9)."""

    operators: Literal["+", "-", "+-"] = "+-"
    """Arithmetic: the operators drawn."""

    expression: str = "{a}{operator}{b}="
    """Arithmetic: how a sum is written, with {a}, {operator} and {b} filled in."""

    problems: Path | None = None
    """Problems: the JSONL file to train on, one object a line with id, problem and answer."""

    validation_problems: Path | None = None
    """Problems: the JSONL file to validate on; without one, part of `problems` is held out of training."""

    num_validation: int = Field(default=512, ge=0)
    """Validation problems, 0 or more; one fixed set whatever the seed, never trained on (unless the two
    files share problems). A validation file with fewer problems is used whole."""

    template: str = "plain"
    """How a problem becomes a prompt: "plain" (the text as it is), "chat" (the tokenizer's chat template
    with the generation prompt), or any text containing {problem}."""

    system: str | None = None
    """Chat template: the system message; none by default."""

    suffix: str = ""
    """Text put after every problem, before the template is applied."""

    reward: str = "integer"
    """How a response is scored: "integer", "boxed", "number" or your own function as "module:function"."""

    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt in tokens, special tokens included, 1 or more."""

    overlong_prompts: Literal["error", "drop"] = "error"
    """What a longer prompt does: stop with an error or, in a problem file, leave the set (and be counted)."""

    @model_validator(mode="after")
    def _refuse_ignored_settings(self) -> Self:
        """A setting that would have no effect is an error; defaults pass, so a resolved recipe reloads."""
        other = "problems" if self.name == "arithmetic" else "arithmetic"
        without_effect = {
            "arithmetic": ("problems", "validation_problems", "overlong_prompts"),
            "problems": ("digits", "operators", "expression"),
        }
        for field in without_effect[self.name]:
            value = getattr(self, field)
            if value != type(self).model_fields[field].default:
                raise UserError(
                    f'task.{field} has no effect with task.name="{self.name}", got {str(value)!r}; '
                    f'set task.name="{other}" or remove it'
                )
        if self.name == "problems" and self.problems is None:
            raise UserError('task.problems must name a JSONL file when task.name="problems", got nothing')
        self._check_template()
        return self

    def _check_template(self) -> None:
        if self.template not in ("plain", "chat") and "{problem}" not in self.template:
            raise UserError(
                'task.template must be "plain", "chat" or a text containing {problem}, '
                f"got {self.template!r}"
            )
        if self.system is not None and self.template != "chat":
            raise UserError(
                f'task.system has no effect with task.template="{self.template}", got {self.system!r}; '
                'set task.template="chat" or remove it'
            )
        for name in ("{a}", "{operator}", "{b}"):
            if name not in self.expression:
                raise UserError(
                    f"task.expression must contain {{a}}, {{operator}} and {{b}}, got {self.expression!r}"
                )


class Task(Protocol):
    """A source of problems without state: what a step asks depends on (seed, step) only, so a run resumes."""

    num_dropped: int
    """Problems that left the set because their prompts are too long."""

    def prompts(self, step: int, num: int) -> list[Problem]:
        """The `num` problems of rollout step `step` (1-based)."""
        ...

    def validation(self) -> list[Problem]:
        """The fixed validation set: the same for every seed and step, never among the prompts."""
        ...


def make_task(config: TaskConfig, seed: int, tokenizer: PromptTokenizer | None = None) -> Task:
    """The task that `config` describes, its training draws keyed by `seed`.

    With a tokenizer every prompt of a problem file is measured at once: an overlong one is an error now (not
    at the step that would ask it) or, with task.overlong_prompts="drop", leaves the set before any order is
    drawn, so that a step always has its full number of prompts.
    """
    from thinwire.tasks.arithmetic import ArithmeticTask  # both import this module
    from thinwire.tasks.problems import ProblemFileTask

    if config.name == "arithmetic":
        return ArithmeticTask(config, seed)
    return ProblemFileTask(config, seed, tokenizer)
