"""Problem files: JSON Lines with id, problem and answer, asked in a keyed order without end.

Shapes: P problems of a set.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import torch

from thinwire.core.errors import UserError
from thinwire.core.keys import Stream, scalar_keys, words
from thinwire.tasks.base import Problem, TaskConfig
from thinwire.tasks.prompts import PromptTokenizer, keep_fitting

HELD_OUT_SEED = 0
"""The validation part's own seed: runs of every seed hold out the same problems."""

_TRAINING, _VALIDATION = 0, 1  # the `boundary` part of a key tells the two draws apart


class ProblemFileTask:
    """The problems of a file, each once per epoch, every epoch in another keyed order.

    Step t (1-based) of `num` prompts asks entries (t - 1) num .. t num - 1 of the endless sequence
    order_0, order_1, ..., where order_e is a permutation keyed by (seed, epoch e). So the whole depends on
    (seed, step) only as long as `num` stays the same; a changed `num` starts at another place.
    """

    def __init__(self, config: TaskConfig, seed: int, tokenizer: PromptTokenizer | None = None) -> None:
        self.num_dropped = 0
        self._seed = seed
        assert config.problems is not None, "TaskConfig refuses name='problems' without a file"
        training = self._load(config.problems, config, tokenizer)
        if config.validation_problems is None:
            self._training, self._validation = _hold_out(training, config)
        else:
            self._training = training
            validation = self._load(config.validation_problems, config, tokenizer)
            order = keyed_order(HELD_OUT_SEED, 0, _VALIDATION, len(validation))
            self._validation = [validation[i] for i in sorted(order[: config.num_validation])]

    def prompts(self, step: int, num: int) -> list[Problem]:
        """The `num` problems of rollout step `step`; more than the file holds continues in the next epoch."""
        if step < 1 or num < 0:
            raise ValueError(f"step must be 1 or more and num 0 or more, got step {step} and num {num}")
        size, first = len(self._training), (step - 1) * num
        places = [divmod(place, size) for place in range(first, first + num)]
        return [self._training[keyed_order(self._seed, e, _TRAINING, size)[i]] for e, i in places]

    def validation(self) -> list[Problem]:
        """The fixed validation problems, in the order of their file."""
        return list(self._validation)

    def _load(self, path: Path, config: TaskConfig, tokenizer: PromptTokenizer | None) -> list[Problem]:
        """The file's problems whose prompts fit (all of them as long as no tokenizer is given)."""
        problems = read_problems(path)
        if tokenizer is None:
            return problems
        kept, num_dropped = keep_fitting(tokenizer, problems, config)
        self.num_dropped += num_dropped
        if not kept:
            raise UserError(
                f"task.max_prompt_tokens={config.max_prompt_tokens} drops all {len(problems)} problems "
                f"of {path}; raise it"
            )
        return kept


@lru_cache(maxsize=8)
def keyed_order(seed: int, epoch: int, boundary: int, size: int) -> list[int]:
    """A uniform permutation of range(size) keyed by (seed, epoch): entries sorted by a 63-bit keyed number.

    Equal numbers (probability below size^2 / 2^64) keep their file order. O(size log size).
    """
    word_P2 = words(scalar_keys(seed, epoch), Stream.TASK, boundary, 2 * size).reshape(size, 2)
    order: list[int] = torch.argsort(((word_P2[:, 0] >> 1) << 32) | word_P2[:, 1], stable=True).tolist()
    return order


def read_problems(path: Path) -> list[Problem]:
    """Every problem of a JSON Lines file, in order; a wrong line is an error with file and line number.

    Fields: id (text or integer), problem (text), answer (text or number); others are ignored. A byte-order
    mark, CRLF line ends and blank lines are tolerated. Numbers keep the digits as written.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"problem file {path} cannot be read: {error.strerror}; check the path") from error
    problems: list[Problem] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        problem = _read_line(line, f"{path}:{number}")
        if problem.id in line_of:
            raise UserError(
                f"{path}:{number}: id {problem.id!r} is already used on line {line_of[problem.id]}; "
                "ids must be unique"
            )
        line_of[problem.id] = number
        problems.append(problem)
    if not problems:
        raise UserError(f"problem file {path} holds no problem; it needs one JSON object a line")
    return problems


def _read_line(line: bytes, place: str) -> Problem:
    try:
        # Numbers stay text: 0.10 keeps its zero, and integers beyond Python's 4300 digits do not raise.
        record = json.loads(line.decode("utf-8"), parse_int=str, parse_float=str)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not a line of JSON ({error}); one object a line, UTF-8") from error
    if not isinstance(record, dict):
        raise UserError(f"{place}: expected a JSON object, got {type(record).__name__}")
    for field in ("id", "problem", "answer"):
        if field not in record:
            raise UserError(f"{place}: field {field!r} is missing; id, problem and answer are needed")
        if not isinstance(record[field], str):
            raise UserError(
                f"{place}: field {field!r} must be text or a number, got {json.dumps(record[field])[:60]}"
            )
        try:
            record[field].encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"{place}: field {field!r} is not valid Unicode ({error.reason})") from None
    if not record["problem"].strip():
        raise UserError(f"{place}: field 'problem' is empty")
    return Problem(record["id"], record["problem"], record["answer"])


def _hold_out(problems: list[Problem], config: TaskConfig) -> tuple[list[Problem], list[Problem]]:
    """(training, validation): `num_validation` problems chosen by key leave the training set."""
    if config.num_validation >= len(problems):
        raise UserError(
            f"task.num_validation must be in 0..{len(problems) - 1} ({config.problems} has {len(problems)} "
            f"problems and the rest is trained on), got {config.num_validation}; lower it or set "
            "task.validation_problems"
        )
    order = keyed_order(HELD_OUT_SEED, 0, _VALIDATION, len(problems))
    held_out = set(order[: config.num_validation])
    training = [p for i, p in enumerate(problems) if i not in held_out]
    return training, [p for i, p in enumerate(problems) if i in held_out]
