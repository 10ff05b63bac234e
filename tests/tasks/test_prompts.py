"""Prompts: the ids that are sampled from are the ids that are trained on, with no token too many."""

import json
from pathlib import Path

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

import thinwire.models
from thinwire.core.errors import UserError
from thinwire.tasks import Problem, TaskConfig, encode_prompt, keep_fitting, make_task

TINY = Path(thinwire.models.__file__).parent / "tiny"
PAD, BOS, EOS = 0, 1, 2
SUM = Problem("12+34", "12+34=", "46")


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def characters(tokenizer, text: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(character) for character in text]


def test_a_plain_prompt_starts_with_one_bos_and_ends_with_its_text(tokenizer):
    assert encode_prompt(tokenizer, SUM, TaskConfig()) == [BOS, *characters(tokenizer, "12+34=")]


def test_an_end_token_that_the_tokenizer_adds_is_removed(tokenizer):
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    assert tokenizer("1").input_ids[-1] == EOS
    assert encode_prompt(tokenizer, SUM, TaskConfig()) == [BOS, *characters(tokenizer, "12+34=")]
    spelled = TaskConfig(suffix="<eos>")  # the text's own end token stays, the added one goes
    assert encode_prompt(tokenizer, SUM, spelled) == [BOS, *characters(tokenizer, "12+34="), EOS]


def test_a_tokenizer_without_special_tokens_gets_none(tokenizer):
    tokenizer.backend_tokenizer.post_processor = None
    assert encode_prompt(tokenizer, SUM, TaskConfig()) == characters(tokenizer, "12+34=")


def test_a_text_that_spells_bos_does_not_get_a_second_one(tokenizer):
    config = TaskConfig(template="<bos>{problem} ")
    assert tokenizer("<bos>1").input_ids[:2] == [BOS, BOS]
    assert encode_prompt(tokenizer, SUM, config) == [BOS, *characters(tokenizer, "12+34= ")]


def test_suffix_and_template_surround_the_problem_and_braces_stay(tokenizer):
    config = TaskConfig(template="1 {problem} 2", suffix="+3")
    assert encode_prompt(tokenizer, SUM, config) == [BOS, *characters(tokenizer, "1 12+34=+3 2")]
    latex = Problem("x", r"\frac{1}{2}", "")  # braces must not be read as fields
    ids = encode_prompt(tokenizer, latex, TaskConfig(template="{problem}"))
    assert ids == tokenizer(latex.text).input_ids


CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ {'system': '0', 'user': '1'}[m.role] }} {{ m.content }}="
    "{% endfor %}{% if add_generation_prompt %}2 {% endif %}"
)


def test_a_chat_prompt_has_its_templates_own_special_tokens_once(tokenizer):
    tokenizer.chat_template = CHAT
    config = TaskConfig(template="chat", suffix="-4")
    expected = [BOS, *characters(tokenizer, "1 12+34=-4=2 ")]
    assert encode_prompt(tokenizer, SUM, config) == expected
    library = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12+34=-4"}], add_generation_prompt=True, return_dict=False
    )
    assert library == expected
    with_system = TaskConfig(template="chat", system="7")
    assert encode_prompt(tokenizer, SUM, with_system) == [BOS, *characters(tokenizer, "0 7=1 12+34==2 ")]


def test_a_missing_or_refusing_chat_template_is_named(tokenizer):
    with pytest.raises(UserError, match=r"task\.template=\"chat\" needs a tokenizer with a chat template"):
        encode_prompt(tokenizer, SUM, TaskConfig(template="chat"))
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    with pytest.raises(
        UserError, match=r"refuses system and user messages \(no system\); remove task\.system"
    ):
        encode_prompt(tokenizer, SUM, TaskConfig(template="chat", system="x"))


def test_a_prompt_longer_than_the_limit_names_problem_length_and_way_out(tokenizer):
    assert len(encode_prompt(tokenizer, SUM, TaskConfig(max_prompt_tokens=7))) == 7
    with pytest.raises(UserError) as error:
        encode_prompt(tokenizer, SUM, TaskConfig(max_prompt_tokens=6))
    for part in ("task.max_prompt_tokens=6", "'12+34'", "7 tokens", 'task.overlong_prompts="drop"'):
        assert part in str(error.value)


def test_a_prompt_of_no_tokens_is_refused(tokenizer):
    tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(UserError, match="prompt of no tokens"):
        encode_prompt(tokenizer, Problem("e", "", ""), TaskConfig())


def file_config(tmp_path: Path, limit: int, **settings) -> TaskConfig:
    path = tmp_path / "set.jsonl"
    lines = [json.dumps({"id": n, "problem": "1" * n, "answer": n}) for n in range(1, 9)]
    path.write_text("\n".join(lines))
    return TaskConfig(name="problems", problems=path, num_validation=2, max_prompt_tokens=limit, **settings)


def test_dropped_prompts_leave_the_set_before_the_order_is_drawn(tokenizer, tmp_path):
    """Prompts of 2..9 tokens (bos included) and a limit of 7: six fit, two of them are held out."""
    task = make_task(file_config(tmp_path, 7, overlong_prompts="drop"), 1, tokenizer)
    assert task.num_dropped == 2
    asked = {problem.id for problem in task.prompts(1, 4)} | {problem.id for problem in task.validation()}
    assert asked == {"1", "2", "3", "4", "5", "6"}


def test_an_overlong_prompt_of_a_file_is_an_error_before_the_first_step(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"problem '7' has 8 tokens"):
        make_task(file_config(tmp_path, 7), 1, tokenizer)
    with pytest.raises(UserError, match=r"task\.max_prompt_tokens=1 drops all 8 problems"):
        make_task(file_config(tmp_path, 1, overlong_prompts="drop"), 1, tokenizer)


def test_keep_fitting_keeps_the_order_and_counts_the_rest(tokenizer, tmp_path):
    problems = [Problem(text, text, "") for text in ("11111", "1", "1111", "11")]
    kept, num_dropped = keep_fitting(tokenizer, problems, file_config(tmp_path, 3, overlong_prompts="drop"))
    assert ([p.id for p in kept], num_dropped) == (["1", "11"], 2)
