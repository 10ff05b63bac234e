"""Drawn sums: right answers, keyed draws, and a validation set that training never sees."""

import pytest
from pydantic import ValidationError

from thinwire.core.errors import UserError
from thinwire.tasks import TaskConfig, make_task
from thinwire.tasks.arithmetic import HELD_OUT_SEED, held_out_sums, operand_range


def test_every_gold_answer_is_the_value_of_its_text():
    problems = make_task(TaskConfig(), seed=3).prompts(step=1, num=500)
    for problem in problems:
        left, operator, right = problem.text[:2], problem.text[2], problem.text[3:5]
        assert problem.text == f"{left}{operator}{right}="
        expected = int(left) + int(right) if operator == "+" else int(left) - int(right)
        assert problem.answer == str(expected)
    assert any(problem.answer.startswith("-") for problem in problems)


def test_validation_is_fixed_distinct_and_never_drawn_for_training():
    """Half of the one-digit sums are held out: 2000 draws would hit one for certain if they could."""
    config = TaskConfig(digits=1, num_validation=100)
    validation = make_task(config, seed=1).validation()
    assert validation == make_task(config, seed=2).validation()
    held_out = {problem.id for problem in validation}
    assert len(held_out) == 100
    task = make_task(config, seed=1)
    trained = {problem.id for step in range(1, 41) for problem in task.prompts(step, 50)}
    assert not trained & held_out
    assert len(trained) == 100  # all others; a given one is missed with probability 0.99^2000 < 2e-9


def test_the_training_seed_equal_to_the_held_out_seed_draws_other_sums():
    """Seed 0 is also the key of the validation draw: the two use different parts of the key."""
    config = TaskConfig()
    task = make_task(config, seed=HELD_OUT_SEED)
    drawn = [problem.id for step in range(5) for problem in task.prompts(step, 128)]
    assert not set(drawn) & {problem.id for problem in task.validation()}


def test_a_smaller_validation_set_is_a_prefix_of_a_larger_one():
    assert held_out_sums(2, "+-", 100) == held_out_sums(2, "+-", 512)[:100]


def test_prompts_depend_on_seed_and_step_only():
    task, again = make_task(TaskConfig(), seed=7), make_task(TaskConfig(), seed=7)
    later_first = [task.prompts(step, 16) for step in (9, 2)]
    assert later_first == [again.prompts(step, 16) for step in (9, 2)]
    assert task.prompts(2, 64)[:16] == later_first[1]
    assert task.prompts(2, 16) != task.prompts(3, 16)
    assert task.prompts(2, 16) != make_task(TaskConfig(), seed=8).prompts(2, 16)
    assert task.prompts(2, 0) == []


@pytest.mark.parametrize(("digits", "lowest", "highest"), [(1, 0, 9), (2, 10, 99), (3, 100, 999)])
def test_operands_have_the_set_number_of_digits(digits, lowest, highest):
    assert (operand_range(digits)[0], operand_range(digits)[-1]) == (lowest, highest)
    task = make_task(TaskConfig(digits=digits, operators="+", num_validation=20), seed=1)
    for problem in task.prompts(1, 200):
        left, right = problem.id.split("+")
        assert lowest <= int(left) <= highest
        assert lowest <= int(right) <= highest


def test_both_operators_are_drawn_equally():
    """4000 fair draws: the count of one lies within 2000 +- 158, five standard deviations (p < 1e-6)."""
    num_plus = sum("+" in p.id for p in make_task(TaskConfig(num_validation=0), seed=5).prompts(1, 4000))
    assert abs(num_plus - 2000) <= 158


def test_the_expression_is_written_as_asked():
    config = TaskConfig(digits=1, num_validation=0, expression="{a} {operator} {b} =")
    problem = make_task(config, seed=1).prompts(1, 1)[0]
    assert problem.text == f"{problem.id[0]} {problem.id[1]} {problem.id[2]} ="


def test_holding_out_more_than_half_of_the_sums_is_refused():
    with pytest.raises(UserError, match=r"task\.num_validation must be in 0\.\.50 .*got 51"):
        make_task(TaskConfig(digits=1, operators="+", num_validation=51), seed=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"problems": "x.jsonl"}, "task.problems has no effect"),
        ({"overlong_prompts": "drop"}, "task.overlong_prompts has no effect"),
        ({"name": "problems", "problems": "x.jsonl", "digits": 3}, "task.digits has no effect"),
        ({"name": "problems"}, "task.problems must name a JSONL file"),
        ({"system": "Be brief."}, "task.system has no effect"),
        ({"template": "Q: {question}"}, "task.template must be"),
        ({"expression": "{a}+{b}="}, "task.expression must contain"),
        ({"digits": 0}, "greater than or equal to 1"),
        ({"operators": "*"}, "operators"),
        ({"digit": 2}, "Extra inputs are not permitted"),
    ],
)
def test_a_wrong_or_ignored_setting_is_refused(settings, message):
    with pytest.raises(ValidationError, match=message.replace(".", r"\.")):
        TaskConfig(**settings)


def test_a_resolved_table_reloads_to_the_same_config():
    for config in (
        TaskConfig(),
        TaskConfig(name="problems", problems="train.jsonl", template="chat", system="s", reward="boxed"),
    ):
        assert TaskConfig(**config.model_dump(mode="json")) == config


def test_every_field_of_the_table_is_described():
    assert all(field.description for field in TaskConfig.model_fields.values())
