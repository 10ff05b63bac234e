"""Drawn sums and differences of non-negative numbers with a set number of digits.

Shapes: P problems drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from thinwire.core.errors import UserError
from thinwire.core.keys import Stream, TokenKeys, words
from thinwire.tasks.base import Problem, TaskConfig

HELD_OUT_SEED = 0
"""The validation set's own seed: runs of every seed and a model's warm start hold out the same sums."""

_TRAINING, _VALIDATION = 0, 1  # the `boundary` part of a key tells the two draws apart


class Sum(NamedTuple):
    """a + b or a - b; `operator` is "+" or "-"."""

    a: int
    operator: str
    b: int


class ArithmeticTask:
    """Sums drawn uniformly with replacement, except those of the validation set.

    Problem i of a step depends on (seed, step, i) only: asking for more problems keeps the first ones.
    """

    num_dropped = 0

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self._validation = held_out_sums(config.digits, config.operators, config.num_validation)
        self._held_out = frozenset(self._validation)

    def prompts(self, step: int, num: int) -> list[Problem]:
        """The `num` problems of rollout step `step`: a held-out draw is drawn again at the next position."""
        chosen: dict[int, Sum] = {}
        missing, attempt = list(range(num)), 0
        while missing:
            keys = TokenKeys(self._seed, step, torch.tensor(missing), torch.tensor(attempt))
            drawn = draw_sums(keys, _TRAINING, self._config.digits, self._config.operators)
            chosen |= {i: s for i, s in zip(missing, drawn, strict=True) if s not in self._held_out}
            missing, attempt = [i for i in missing if i not in chosen], attempt + 1
        return [to_problem(chosen[i], self._config.expression) for i in range(num)]

    def validation(self) -> list[Problem]:
        """The held-out sums, the same for every seed."""
        return [to_problem(s, self._config.expression) for s in self._validation]


def operand_range(digits: int) -> range:
    """Every operand of `digits` digits: 0..9 for one, 10..99 for two, and so on."""
    return range(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


def draw_sums(keys: TokenKeys, boundary: int, digits: int, operators: str) -> list[Sum]:
    """One uniform sum per key: operand = low + floor(word * span / 2^32), relative bias <= span / 2^32."""
    operands = operand_range(digits)
    word_P3 = words(keys, Stream.TASK, boundary, 3)
    spans = torch.tensor([len(operands), len(operands), len(operators)])
    index_P3: list[list[int]] = ((word_P3 * spans) >> 32).tolist()
    return [Sum(operands[i], operators[k], operands[j]) for i, j, k in index_P3]


def held_out_sums(digits: int, operators: str, num: int) -> list[Sum]:
    """The first `num` distinct sums of the keyed validation draw: a smaller set is a prefix of a larger."""
    size = len(operators) * len(operand_range(digits)) ** 2
    if num > size // 2:
        raise UserError(
            f"task.num_validation must be in 0..{size // 2} (half of the {size} sums with "
            f'task.digits={digits} and task.operators="{operators}"), got {num}; '
            "lower it or raise task.digits"
        )
    found: dict[Sum, None] = {}
    first = 0
    while len(found) < num:
        sample_P = torch.arange(first, first + num)
        drawn = draw_sums(
            TokenKeys(HELD_OUT_SEED, 0, sample_P, torch.tensor(0)), _VALIDATION, digits, operators
        )
        found |= dict.fromkeys(drawn)
        first += num
    return list(found)[:num]


def to_problem(value: Sum, expression: str) -> Problem:
    """The sum as text, with its result as the gold answer."""
    answer = value.a + value.b if value.operator == "+" else value.a - value.b
    text = expression
    for name, part in (("{a}", value.a), ("{operator}", value.operator), ("{b}", value.b)):
        text = text.replace(name, str(part))
    return Problem(id=f"{value.a}{value.operator}{value.b}", text=text, answer=str(answer))
