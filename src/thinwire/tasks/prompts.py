"""From a problem to the token ids that are sampled from and trained on: one list serves both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from thinwire.core.errors import UserError
from thinwire.tasks.base import Problem, TaskConfig


class PromptTokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...


def encode_prompt(tokenizer: PromptTokenizer, problem: Problem, config: TaskConfig) -> list[int]:
    """The prompt's token ids; refuses one longer than task.max_prompt_tokens.

    Special tokens: a chat template brings its own, and nothing is added to it. Any other prompt gets what the
    tokenizer puts in front of a text, and never an end-of-text token that the tokenizer adds at the end (the
    response must follow). A text that spells <bos> itself does not get a second one.
    """
    ids = tokenize_prompt(tokenizer, problem, config)
    if len(ids) > config.max_prompt_tokens:
        raise UserError(
            f"task.max_prompt_tokens={config.max_prompt_tokens}: the prompt of problem {problem.id!r} has "
            f"{len(ids)} tokens; raise task.max_prompt_tokens to {len(ids)} or more, "
            'or set task.overlong_prompts="drop" (problem files)'
        )
    if not ids:
        raise UserError(
            f"task.template={config.template!r} gives problem {problem.id!r} a prompt of no tokens"
        )
    return ids


def keep_fitting(
    tokenizer: PromptTokenizer, problems: Iterable[Problem], config: TaskConfig
) -> tuple[list[Problem], int]:
    """The problems whose prompts fit, in order, and how many did not.

    With task.overlong_prompts="error" the first that does not fit is the error of `encode_prompt`.
    """
    kept, num_dropped = [], 0
    for problem in problems:
        if config.overlong_prompts == "drop":
            fits = len(tokenize_prompt(tokenizer, problem, config)) <= config.max_prompt_tokens
        else:
            fits = bool(encode_prompt(tokenizer, problem, config))
        num_dropped += not fits
        if fits:
            kept.append(problem)
    return kept, num_dropped


def tokenize_prompt(tokenizer: PromptTokenizer, problem: Problem, config: TaskConfig) -> list[int]:
    """`encode_prompt` without the check of the length."""
    text = problem.text + config.suffix
    if config.template == "chat":
        ids = tokenizer.encode(_render_chat(tokenizer, text, config), add_special_tokens=False)
    else:
        if config.template != "plain":
            text = config.template.replace("{problem}", text)
        ids = _strip_added_end(tokenizer, text, tokenizer.encode(text, add_special_tokens=True))
    bos = tokenizer.bos_token_id
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def _render_chat(tokenizer: PromptTokenizer, text: str, config: TaskConfig) -> str:
    if tokenizer.chat_template is None:
        raise UserError(
            'task.template="chat" needs a tokenizer with a chat template, this one has none; '
            'set task.template="plain" or a text containing {problem}'
        )
    system = [] if config.system is None else [{"role": "system", "content": config.system}]
    messages = [*system, {"role": "user", "content": text}]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates are programs of the model's author and raise what they like
        roles = " and ".join(message["role"] for message in messages)
        raise UserError(
            f'task.template="chat": the tokenizer\'s chat template refuses {roles} messages ({error}); '
            "remove task.system or set task.template to a text containing {problem}"
        ) from error


def _strip_added_end(tokenizer: PromptTokenizer, text: str, ids: list[int]) -> list[int]:
    """Drop end-of-text tokens that the tokenizer added; those that the text itself ends with stay."""
    if tokenizer.eos_token_id is None or ids[-1:] != [tokenizer.eos_token_id]:
        return ids
    bare = tokenizer.encode(text, add_special_tokens=False)
    num_added = _num_trailing(ids, tokenizer.eos_token_id) - _num_trailing(bare, tokenizer.eos_token_id)
    return ids[: len(ids) - num_added]


def _num_trailing(ids: list[int], token: int) -> int:
    return next((n for n, other in enumerate(reversed(ids)) if other != token), len(ids))
