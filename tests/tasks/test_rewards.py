"""Rewards: what counts as right, what counts as unparseable, and no response that can stall a run."""

import sys
import time
from pathlib import Path

import pytest

from thinwire.core.errors import UserError
from thinwire.tasks import Problem, Score, make_reward
from thinwire.tasks.problems import read_problems
from thinwire.tasks.rewards import last_boxed, last_number, same_answer

SHARED_DATA = Path(__file__).parents[2] / ".." / "shared" / "data"


def score(spec: str, answer: str, response: str) -> Score:
    return make_reward(spec)(Problem("p", "", answer), response)


@pytest.mark.parametrize(
    ("answer", "response", "expected"),
    [
        ("46", "46", Score(1.0, "46")),
        ("-7", " -7\n", Score(1.0, "-7")),
        ("46", "046", Score(1.0, "046")),
        ("0", "-0", Score(1.0, "-0")),
        ("1,234", "1234", Score(1.0, "1234")),
        ("18.0", "18", Score(1.0, "18")),
        ("46", "47", Score(0.0, "47")),
        ("46", "46.", Score(0.0, None)),
        ("46", "4 6", Score(0.0, None)),
        ("46", "- 46", Score(0.0, None)),
        ("46", "--46", Score(0.0, None)),
        ("46", "x=46", Score(0.0, None)),
        ("46", "", Score(0.0, None)),
        ("46", "\u0664\u0666", Score(0.0, None)),  # 46 in Arabic-Indic digits, which int() would accept
        ("46", "4_6", Score(0.0, None)),  # int() would accept this too
    ],
)
def test_integer_reward_wants_the_integer_and_nothing_else(answer, response, expected):
    assert score("integer", answer, response) == expected


def test_integer_reward_refuses_a_problem_it_could_never_score():
    with pytest.raises(
        UserError, match=r"task\.reward=\"integer\" needs integer answers, problem 'p' has 'x\+1'"
    ):
        score("integer", "x+1", "5")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{5} no, \boxed{6}", "6"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{x \in \left\{ 1 \right.}", r"x \in \left\{ 1 \right."),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed {5}", "5"),
        (r"}} \boxed{5}", "5"),
        (r"\\boxed{5}", None),  # a line break, then the word boxed
        (r"\boxed{5} \boxed{6", None),  # cut off in the last one: the earlier one is not the answer
        (r"\boxed{", None),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_the_last_box_is_found_with_balanced_braces(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("5", "5.0"),
        ("5", "5."),
        ("0", "-.0"),
        ("0.5", r"\frac{1}{2}"),
        (".5", "1/2"),
        (r"-\frac{1}{2}", "-0.5"),
        (r"\frac{-1}{2}", r"-\dfrac12"),
        (r"\tfrac{2}{4}", "1/2"),
        ("1,234,567", "1234567"),
        ("1{,}234", "1234"),
        (r"\$1,234.50", "1234.5"),
        ("$x + 1$", "x+1"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"1\,000", "1000"),
        ("\u22125", "-5"),
        ("+5", "5"),
    ],
)
def test_equal_answers_in_two_spellings(one, other):
    assert same_answer(one, other)
    assert same_answer(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("0.333333333333333333333", "1/3"),  # equal as floats
        ("100000000000000000000001", "100000000000000000000000"),  # equal as floats
        ("(1,234)", "1234"),
        ("1,23", "123"),
        ("1/0", "0"),
        (r"\frac{1}{0}", r"\frac{2}{0}"),
        ("1e3", "1000"),
        ("x", "X"),
        ("", "0"),
        (r"\leftarrow", "arrow"),
    ],
)
def test_different_answers_stay_different(one, other):
    assert not same_answer(one, other)
    assert not same_answer(other, one)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", "42"),
        ("3 + 4 = -7 apples", "-7"),
        ("10-5", "5"),
        ("it costs $1,234.50!", "1,234.50"),
        ("-\\$5", "-5"),
        ("about 3/4 of it", "3/4"),
        ("1,2,3", "3"),
        ("x2", "2"),
        ("no digits", None),
        ("", None),
    ],
)
def test_the_last_number_is_found(text, number):
    assert last_number(text) == number


def test_number_reward_prefers_a_box_and_falls_back_to_the_last_number():
    assert score("number", "6", r"\boxed{6}, not 7") == Score(1.0, "6")
    assert score("number", "7", "so 6, no: 7.00") == Score(1.0, "7.00")
    assert score("number", "7", r"\boxed{6} then 7 \boxed{") == Score(1.0, "7")
    assert score("number", "7", "nothing") == Score(0.0, None)
    assert score("boxed", "7", "so 7") == Score(0.0, None)
    assert score("boxed", "7", r"\boxed{ }") == Score(0.0, None)


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{" * 200_000,
        "{" * 1_000_000 + "}" * 1_000_000,
        r"\boxed{" + "9" * 1_000_000 + "}",
        r"\boxed{" + r"\text{" * 100_000,
        "9" * 1_000_000,
        "1," * 500_000,
        "1/" * 500_000,
        "-" * 1_000_000,
        "\\" * 1_000_001,
        " " * 1_000_000,
        r"\boxed{9^{9^{9^{9}}}}",
        "\x00\ud800\U0001f600" * 1000,
    ],
    ids=range(12),
)
@pytest.mark.parametrize("spec", ["integer", "boxed", "number"])
def test_a_hostile_response_scores_nothing_and_costs_little_time(spec, response):
    """Linear work on at most 10^5 characters takes milliseconds; 2 s allow for a busy machine."""
    started = time.monotonic()
    assert score(spec, "12345", response).value == 0.0
    assert time.monotonic() - started < 2.0


def test_a_long_answer_is_unparseable_and_a_long_response_is_read_at_its_end():
    assert score("boxed", "1", r"\boxed{" + "0" * 999 + "1}") == Score(1.0, "0" * 999 + "1")
    assert score("boxed", "1", r"\boxed{" + "0" * 1000 + "1}") == Score(0.0, None)
    assert score("integer", "1", "0" * 5000 + "1") == Score(0.0, None)
    assert score("boxed", "1", "x" * 10**6 + r"\boxed{1}") == Score(1.0, "1")


@pytest.fixture
def reward_module(tmp_path, monkeypatch):
    """A user's file in the current directory, importable by its name only through make_reward."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_tiny_reward.py").write_text(
        "from thinwire.tasks import Score\n"
        "NUMBER = 3\n"
        "def length(problem, response): return len(response) + len(problem.answer)\n"
        "def says_more(problem, response): return Score(0.5, None)\n"
        "def infinite(problem, response): return float('inf')\n"
        "def nothing(problem, response): return None\n"
        "def text(problem, response): return '1'\n"
        "def fails(problem, response): raise KeyError('oops')\n"
        "def leaves(problem, response): raise SystemExit(0)\n"
        "class Group:\n    @staticmethod\n    def half(problem, response): return 0.5\n"
    )
    (tmp_path / "my_broken_reward.py").write_text("import absent_dependency_of_mine\n")
    (tmp_path / "my_leaving_reward.py").write_text("import sys\nsys.exit(0)\n")
    yield
    for name in ("my_tiny_reward", "my_broken_reward", "my_leaving_reward"):
        sys.modules.pop(name, None)


def test_a_function_of_the_user_is_called_with_problem_and_response(reward_module):
    assert score("my_tiny_reward:length", "12", "abc") == Score(5.0, "abc")
    assert score("my_tiny_reward:says_more", "12", "abc") == Score(0.5, None)
    assert score("my_tiny_reward:Group.half", "12", "abc") == Score(0.5, "abc")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exact", 'must be "integer", "boxed", "number" or "module:function"'),
        ("absent_module_of_mine:f", "could not be imported (ModuleNotFoundError"),
        ("my_broken_reward:f", "No module named 'absent_dependency_of_mine'"),
        ("my_leaving_reward:f", "could not be imported (SystemExit: 0)"),
        ("my_tiny_reward:absent", "my_tiny_reward.py has no 'absent'"),
        ("my_tiny_reward:", "my_tiny_reward.py has no ''"),
        (":f", "could not be imported"),
        ("my_tiny_reward:NUMBER", "'NUMBER' is a int, not a function"),
    ],
)
def test_a_function_that_cannot_be_found_is_named(reward_module, spec, message):
    with pytest.raises(UserError) as error:
        make_reward(spec)
    assert "task.reward" in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("infinite", "must return a finite number, got inf on problem 'p'"),
        ("nothing", "must return a finite number, got None on problem 'p'"),
        ("text", "must return a finite number, got '1' on problem 'p'"),
        ("fails", "raised KeyError: 'oops' on problem 'p'"),
        ("leaves", "raised SystemExit: 0 on problem 'p'"),
    ],
)
def test_a_function_that_returns_no_finite_number_is_named(reward_module, name, message):
    with pytest.raises(UserError) as error:
        score(f"my_tiny_reward:{name}", "1", "2")
    assert "task.reward" in str(error.value)
    assert message in str(error.value)


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the problem sets in ../shared/data are not here")
@pytest.mark.parametrize("name", ["gsm8k_test", "math500", "aime2025", "olympiadbench"])
def test_every_published_gold_answer_scores_one_when_boxed(name):
    for problem in read_problems(SHARED_DATA / f"{name}.jsonl"):
        result = make_reward("boxed")(problem, rf"Thus the answer is $\boxed{{{problem.answer}}}$.")
        assert result.value == 1.0, problem
