"""Problem files: what is read, what is refused with file and line, and the order in which it is asked."""

import json
from collections import Counter
from pathlib import Path

import pytest

from thinwire.core.errors import UserError
from thinwire.tasks import TaskConfig, make_task
from thinwire.tasks.problems import keyed_order, read_problems

SHARED_DATA = Path(__file__).parents[2] / ".." / "shared" / "data"


def write_set(path: Path, num: int) -> Path:
    lines = [json.dumps({"id": i, "problem": f"problem {i}", "answer": i}) for i in range(num)]
    path.write_text("\n".join(lines) + "\n")
    return path


def file_task(path: Path, seed: int = 1, **settings):
    return make_task(TaskConfig(name="problems", problems=path, **settings), seed)


def test_ids_and_answers_may_be_text_or_numbers_and_keep_their_digits(tmp_path):
    path = tmp_path / "set.jsonl"
    huge = "7" * 5000  # Python refuses to convert integers of more than 4300 digits
    path.write_text(
        '{"id": "a", "problem": "p", "answer": "x+1", "level": 3}\n'
        '{"id": 2, "problem": "q", "answer": 0.10}\n'
        f'{{"id": 3, "problem": "r", "answer": {huge}}}'
    )
    problems = read_problems(path)
    assert [(p.id, p.text, p.answer) for p in problems] == [
        ("a", "p", "x+1"),
        ("2", "q", "0.10"),
        ("3", "r", huge),
    ]


def test_byte_order_mark_crlf_and_blank_lines_are_tolerated(tmp_path):
    path = tmp_path / "set.jsonl"
    lines = [
        '{"id": 1, "problem": "p\u2028q", "answer": 1}',
        "",
        "  ",
        '{"id": 2, "problem": "q", "answer": 2}',
        "",
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert [(p.id, p.text) for p in read_problems(path)] == [("1", "p\u2028q"), ("2", "q")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "not a line of JSON"),
        ('{"id": 1, "problem": "p"', "not a line of JSON"),
        ("[" * 100_000, "not a line of JSON"),
        ("[1, 2]", "expected a JSON object, got list"),
        ('{"id": 1, "problem": "p"}', "field 'answer' is missing"),
        ('{"id": 1, "answer": "p"}', "field 'problem' is missing"),
        ('{"problem": "p", "answer": 1}', "field 'id' is missing"),
        ('{"id": 1, "problem": "p", "answer": null}', "field 'answer' must be text or a number, got null"),
        ('{"id": true, "problem": "p", "answer": 1}', "field 'id' must be text or a number, got true"),
        ('{"id": 1, "problem": "p", "answer": NaN}', "field 'answer' must be text or a number, got NaN"),
        ('{"id": 1, "problem": " ", "answer": 1}', "field 'problem' is empty"),
        ('{"id": "0", "problem": "p", "answer": 1}', "id '0' is already used on line 1"),
    ],
)
def test_a_wrong_line_is_named_by_file_and_line(tmp_path, line, message):
    path = tmp_path / "set.jsonl"
    path.write_text('{"id": 0, "problem": "p", "answer": 1}\n\n' + line + "\n")
    with pytest.raises(UserError) as error:
        read_problems(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert message in str(error.value)


def test_bytes_that_are_not_utf8_are_named_by_line(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_bytes(b'{"id": 0, "problem": "\xff", "answer": 1}\n')
    with pytest.raises(UserError, match=r"set\.jsonl:1: not a line of JSON"):
        read_problems(path)


def test_missing_empty_and_unreadable_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"absent\.jsonl cannot be read: No such file"):
        read_problems(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_problems(tmp_path)
    empty = tmp_path / "empty.jsonl"
    for content in (b"", b"\n\r\n", b"\xef\xbb\xbf"):
        empty.write_bytes(content)
        with pytest.raises(UserError, match="holds no problem"):
            read_problems(empty)


def test_every_epoch_asks_every_problem_once_across_step_boundaries(tmp_path):
    """10 problems, 3 a step: 10 steps are exactly 3 epochs, whose borders fall inside steps."""
    task = file_task(write_set(tmp_path / "set.jsonl", 10), num_validation=0)
    asked = [p.id for step in range(1, 11) for p in task.prompts(step, 3)]
    epochs = [asked[:10], asked[10:20], asked[20:]]
    assert [sorted(epoch, key=int) for epoch in epochs] == [[str(i) for i in range(10)]] * 3
    assert epochs[0] != epochs[1]
    assert epochs[1] != epochs[2]


def test_more_prompts_than_problems_wrap_into_the_next_epochs(tmp_path):
    task = file_task(write_set(tmp_path / "set.jsonl", 4), num_validation=0)
    assert set(Counter(p.id for p in task.prompts(1, 12)).values()) == {3}


def test_the_order_depends_on_seed_and_step_only(tmp_path):
    path = write_set(tmp_path / "set.jsonl", 50)
    task = file_task(path, seed=1, num_validation=5)
    again = file_task(path, seed=1, num_validation=5)
    assert [task.prompts(s, 8) for s in (30, 2)] == [again.prompts(s, 8) for s in (30, 2)]
    assert task.prompts(2, 8) != file_task(path, seed=2, num_validation=5).prompts(2, 8)


def test_keyed_orders_are_uniform():
    """All 24 orders of 4 entries over 2400 keys: chi-square with 23 degrees below 65 (p of failing 7e-6)."""
    counts = Counter(tuple(keyed_order(seed, 0, 0, 4)) for seed in range(2400))
    assert len(counts) == 24
    assert sum((n - 100) ** 2 / 100 for n in counts.values()) < 65


def test_the_held_out_part_is_fixed_and_never_asked(tmp_path):
    path = write_set(tmp_path / "set.jsonl", 30)
    task = file_task(path, num_validation=10)
    held_out = {p.id for p in task.validation()}
    assert len(held_out) == 10
    assert task.validation() == file_task(path, seed=9, num_validation=10).validation()
    asked = {p.id for step in range(1, 5) for p in task.prompts(step, 5)}
    assert asked == {str(i) for i in range(30)} - held_out


def test_holding_out_the_whole_file_is_refused(tmp_path):
    path = write_set(tmp_path / "set.jsonl", 30)
    with pytest.raises(UserError, match=r"task\.num_validation must be in 0\.\.29 .* got 512"):
        file_task(path)


def test_a_validation_file_leaves_the_training_file_whole(tmp_path):
    train, validation = write_set(tmp_path / "train.jsonl", 6), write_set(tmp_path / "validation.jsonl", 20)
    task = file_task(train, validation_problems=validation, num_validation=8)
    assert len({p.id for p in task.prompts(1, 6)}) == 6
    chosen = [p.id for p in task.validation()]
    assert len(chosen) == 8
    assert chosen == sorted(chosen, key=int)
    assert len(file_task(train, validation_problems=validation).validation()) == 20


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the problem sets in ../shared/data are not here")
@pytest.mark.parametrize(
    ("name", "num"),
    [("gsm8k_train", 7473), ("math500", 500), ("aime2024", 30), ("olympiadbench", 675), ("svamp", 1000)],
)
def test_published_sets_are_read_whole(name, num):
    problems = read_problems(SHARED_DATA / f"{name}.jsonl")
    assert len(problems) == num
    assert all(p.text.strip() and p.answer.strip() for p in problems)


def test_text_that_is_no_unicode_is_refused_with_its_place(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"id": 1, "problem": "a \\ud800 b", "answer": 1}\n')
    with pytest.raises(UserError, match=r"p.jsonl:1.*'problem' is not valid Unicode"):
        read_problems(file)
