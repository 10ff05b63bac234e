"""Rewards: (problem, response text) -> Score, for text that may be anything a model can write.

Every built-in reward is linear in the response's length, reads at most its last `MAX_RESPONSE_CHARACTERS`
and never builds a number longer than `MAX_ANSWER_CHARACTERS`, so no response can stall a run.
Not covered: equality of expressions ("x+1" is not "1+x").
"""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from types import ModuleType
from typing import Any

from thinwire.core.errors import UserError
from thinwire.tasks.base import Problem, Score

Reward = Callable[[Problem, str], Score]

MAX_RESPONSE_CHARACTERS = 100_000
"""Only the end of a longer response is read: the answer stands last."""

MAX_ANSWER_CHARACTERS = 1_000
"""A longer answer counts as unparseable (Python itself refuses integers of more than 4300 digits)."""

_UNPARSEABLE = Score(0.0, None)
_INTEGER = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_GROUPED_NUMBER = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_FRACTION = re.compile(r"([+-]?)\\frac(?:\{([+-]?[0-9]+)\}|([0-9]))(?:\{([+-]?[0-9]+)\}|([0-9]))")
_RATIO = re.compile(r"([+-]?[0-9]+)/([0-9]+)")
_NUMBER_IN_TEXT = re.compile(
    r"(?:(?<![0-9A-Za-z)\]}])-)?[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?(?:/[0-9]+)?"
)
_BRACES = re.compile(r"\\boxed[ \t\r\n]?\{|\\.|[{}]", re.DOTALL)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox) ?\{([^{}]*)\}")
_LAYOUT = re.compile(r"\\[!,;: ]|\\(?:left|right)(?![A-Za-z])|\\?\$|\s|~")


def make_reward(spec: str) -> Reward:
    """The reward that `task.reward` names: "integer", "boxed", "number" or "module:function"."""
    built_in = {"integer": integer_reward, "boxed": boxed_reward, "number": number_reward}
    if spec in built_in:
        return built_in[spec]
    if ":" in spec:
        return _wrap_function(spec, _import_function(spec))
    raise UserError(
        f'task.reward must be "integer", "boxed", "number" or "module:function", got {spec!r}; '
        "a function of your own is called as function(problem, response)"
    )


def integer_reward(problem: Problem, response: str) -> Score:
    """1 when the stripped response is an integer and nothing else, equal to the gold integer."""
    gold = parse_number(normalise_answer(problem.answer))
    if gold is None or gold.denominator != 1:
        raise UserError(
            f'task.reward="integer" needs integer answers, problem {problem.id!r} has {problem.answer!r}; '
            'set task.reward="boxed" or "number"'
        )
    parsed = response.strip()
    if len(parsed) > MAX_ANSWER_CHARACTERS or not _INTEGER.fullmatch(parsed):
        return _UNPARSEABLE
    return Score(float(int(parsed) == gold), parsed)


def boxed_reward(problem: Problem, response: str) -> Score:
    r"""1 when the last \boxed{} of the response equals the gold answer after normalisation."""
    boxed = last_boxed(response[-MAX_RESPONSE_CHARACTERS:])
    if boxed is None or not boxed.strip() or len(boxed) > MAX_ANSWER_CHARACTERS:
        return _UNPARSEABLE
    return Score(float(same_answer(boxed, problem.answer)), boxed)


def number_reward(problem: Problem, response: str) -> Score:
    r"""As `boxed_reward`; a response without a closed \boxed{} is judged by the last number in it."""
    if last_boxed(response[-MAX_RESPONSE_CHARACTERS:]) is not None:
        return boxed_reward(problem, response)
    number = last_number(response[-MAX_RESPONSE_CHARACTERS:])
    if number is None or len(number) > MAX_ANSWER_CHARACTERS:
        return _UNPARSEABLE
    return Score(float(same_answer(number, problem.answer)), number)


def last_boxed(text: str) -> str | None:
    r"""The content of the \boxed{ that opens last, or None when there is none or it is never closed.

    One pass over braces and backslash pairs (so \{ and \} do not count): linear, whatever the nesting.
    """
    open_groups: list[int | None] = []  # the content's start for \boxed{, None for a plain {
    latest_start, content = -1, None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{":
            open_groups.append(None)
        elif token == "}":
            start = open_groups.pop() if open_groups else None
            if start is not None and start == latest_start:
                content = text[start : match.start()]
        elif token.endswith("{") and token != "\\{":
            latest_start, content = match.end(), None
            open_groups.append(latest_start)
    return content


def last_number(text: str) -> str | None:
    """The last number written in `text`: sign, digits with commas, decimals, or a ratio a/b.

    A minus right after a digit, letter or closing bracket is an operator, not a sign.
    """
    last = None
    for match in _NUMBER_IN_TEXT.finditer(text.replace("\\$", "").replace("$", "").replace("\u2212", "-")):
        last = match.group()
    return last


def same_answer(one: str, other: str) -> bool:
    """Exact equality as rational numbers when both are numbers, else of the normalised texts."""
    one, other = normalise_answer(one), normalise_answer(other)
    number, other_number = parse_number(one), parse_number(other)
    if number is None or other_number is None:
        return one == other
    return number == other_number


def normalise_answer(text: str) -> str:
    r"""Layout removed: spaces, $, \text{}, \left, \right, the commas of a number, a final full stop.

    \dfrac and \tfrac become \frac. A trailing .0 is left to `same_answer`, which compares by value.
    """
    text = _TEXT.sub(r"\1", text.strip().replace("\u2212", "-").replace("{,}", ","))
    grouped = text.strip("\\$ ")
    if _GROUPED_NUMBER.fullmatch(grouped):
        text = grouped.replace(",", "")
    text = _LAYOUT.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return text.removesuffix(".")


def parse_number(text: str) -> Fraction | None:
    r"""An integer, a decimal, a/b or \frac{a}{b} as an exact rational; None for anything else."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    if match := _RATIO.fullmatch(text):
        sign, top, bottom = "", match[1], match[2]
    elif match := _FRACTION.fullmatch(text):
        sign, top, bottom = match[1], match[2] or match[3], match[4] or match[5]
    else:
        return None
    if int(bottom) == 0:
        return None
    value = Fraction(int(top), int(bottom))
    return -value if sign == "-" else value


def _import_function(spec: str) -> Callable[..., Any]:
    """The function at module:function; the current directory is searched after the installed packages."""
    module_name, _, attribute = spec.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module = _import_module(spec, module_name)
    function: Any = module
    for name in attribute.split("."):
        if not hasattr(function, name):
            raise UserError(
                f"task.reward={spec!r}: {getattr(module, '__file__', module_name)} has no {attribute!r}; "
                "name a function(problem, response) of that module"
            )
        function = getattr(function, name)
    if not callable(function):
        raise UserError(
            f"task.reward={spec!r}: {attribute!r} is a {type(function).__name__}, not a function; "
            "name a function(problem, response) of that module"
        )
    checked: Callable[..., Any] = function
    return checked


def _import_module(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a user's module may fail to load in any way
        raise UserError(
            f"task.reward={spec!r}: module {name!r} could not be imported ({type(error).__name__}: {error}); "
            "run from the folder that holds it or put that folder on PYTHONPATH"
        ) from error


def _wrap_function(spec: str, function: Callable[..., Any]) -> Reward:
    """A user's function as a reward: a finite number counts as parsed; it may return a Score to say more."""

    def reward(problem: Problem, response: str) -> Score:
        try:
            result = function(problem, response)
        except (Exception, SystemExit) as error:  # sys.exit(0) would end the run as if it were done
            raise UserError(
                f"task.reward={spec!r} raised {type(error).__name__}: {error} on problem {problem.id!r}"
            ) from error
        score = result if isinstance(result, Score) else None
        value = score.value if score else result
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise UserError(
                f"task.reward={spec!r} must return a finite number, got {value!r} on problem {problem.id!r}"
            )
        if score is None:
            return Score(number, response[:MAX_ANSWER_CHARACTERS])
        return Score(number, None if score.parsed is None else str(score.parsed)[:MAX_ANSWER_CHARACTERS])

    return reward
