"""What a user types and what comes back: exit status, stdout, one line on stderr."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.test_compare import TINY
from thinwire.cli import main


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


def wrong(capsys, *arguments):
    """The one stderr line of a wrong command line, which exits with 2 and prints nothing on stdout."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("thinwire: ")
    return captured.err


def test_a_run_and_its_report_land_in_the_first_free_default_directory(recipe, capsys):
    assert main(["train", recipe, "--arm", "exact-k", "--steps", "1"]) == 0
    captured = capsys.readouterr()
    assert "runs/tiny-exact-k-1: done after 1 steps" in captured.out
    assert "step 1/1" in captured.err
    run = Path("runs/tiny-exact-k-1")
    assert json.loads((run / "environment.json").read_text())["arm"] == "exact-k"
    assert (run / "report.html").read_text().lstrip().lower().startswith("<!doctype html")
    assert main(["train", recipe, "--arm", "exact-k", "--steps", "1", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["status"], summary["out"]) == ("done", "runs/tiny-exact-k-2")


def test_settings_may_stand_anywhere_and_take_an_equals_sign_or_not(recipe, capsys):
    assert main(["train", "--steps", "9", recipe, "--check", "--model.stages=4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["boundaries_after_blocks"] == [1, 3, 5]
    assert not os.path.exists("runs")


def test_a_run_without_learning_resumes_by_name_or_as_the_latest(recipe, capsys):
    assert main(["train", recipe, "--out", "out", "--steps", "2"]) == 0
    assert main(["train", "--resume", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.split("report.html\n")[-1])["steps"] == 2
    assert "was made with steps = 2, this recipe has 3" in wrong(
        capsys, "train", "--resume", "out", "--steps", "3"
    )
    assert "no interrupted run" in wrong(capsys, "train", "--resume", "latest")
    assert "holds no run" in wrong(capsys, "train", "--resume", "elsewhere")
    assert "--out has no effect with --resume" in wrong(capsys, "train", "--resume", "out", "--out", "x")


def test_a_check_prints_its_figures_and_trains_nothing(recipe, capsys):
    assert main(["train", recipe, "--check"]) == 0
    assert "96 bits a token a boundary" in capsys.readouterr().out
    assert not os.path.exists("runs")


def test_a_report_is_written_again_on_request(recipe, capsys):
    main(["train", recipe, "--out", "out", "--steps", "1"])
    capsys.readouterr()
    assert main(["report", "out", "--out", "page.html", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": "page.html"}
    assert os.path.getsize("page.html") > 1000
    assert "directory" in wrong(capsys, "report", "nowhere")


def test_a_report_replaces_nothing_but_a_report(recipe, capsys):
    main(["train", recipe, "--out", "out", "--steps", "1"])
    capsys.readouterr()
    os.mkfifo("pipe")
    os.symlink(recipe, "link.html")
    before = Path(recipe).read_text()
    for target in (recipe, "pipe", "link.html", "/dev/null", "out"):
        message = wrong(capsys, "report", "out", "--out", target)
        assert "report --out" in message
        assert target in message
    assert Path(recipe).read_text() == before
    assert Path("link.html").is_symlink()
    for _ in range(2):
        assert main(["report", "out", "--out", "page.html"]) == 0


def test_the_codecs_are_listed_with_settings_and_bits(capsys):
    assert main(["codecs", "list", "--json"]) == 0
    listed = {codec["name"]: codec for codec in json.loads(capsys.readouterr().out)["codecs"]}
    assert listed["exact-k"]["bits_per_token"] == listed["subspace"]["bits_per_token"] == 1232
    assert "keep" in listed["exact-k"]["settings"]
    assert listed["exact-k"]["defaults"]["keep"] == 77
    assert listed["exact-k"]["unbiased"] == ["backward", "forward"]
    assert listed["round-to-nearest"]["unbiased"] == []
    assert [name for name, codec in listed.items() if codec["learns"]] == [
        "subspace",
        "low-rank-residual",
        "shaped",
    ]
    assert all(codec["bits_per_token"] <= 1232 for name, codec in listed.items() if name != "identity")
    assert main(["codecs", "list", "--width", "576"]) == 0
    printed = capsys.readouterr().out
    assert "exact-k: 464 bits, 0.806 per value, unbiased." in printed
    assert "    codec.symmetric = false: " in printed
    assert "--width" in wrong(capsys, "codecs", "list", "--width", "0")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["COMMAND"]),
        (["trian"], ["trian", "train"]),
        (["train"], ["needs a RECIPE"]),
        (["train", "dmeo"], ["recipe dmeo", "did you mean demo?"]),
        (["train", "none/none.toml"], ["none/none.toml", "does not exist"]),
        (["train", "RECIPE", "--steps"], ["--steps needs a value"]),
        (["train", "RECIPE", "--steps", "--arm", "dense"], ["--steps needs a value"]),
        (["train", "RECIPE", "--steps", "-5"], ["steps", "-5"]),
        (["train", "RECIPE", "--steps", "abc"], ["steps", "'abc'"]),
        (["train", "RECIPE", "--stesp", "5"], ["stesp", "did you mean 'steps'?"]),
        (["train", "RECIPE", "--codec.kep", "5"], ["codec.kep", "did you mean 'keep'?"]),
        (["train", "RECIPE", "--codec.keep", "129"], ["codec.keep", "1..128", "129"]),
        (["train", "RECIPE", "--model.stages", "9"], ["model.stages", "1..8", "9"]),
        (["train", "RECIPE", "--anchor.cadence", "0"], ["anchor.cadence", "0"]),
        (["train", "RECIPE", "--arm", "subspce"], ["'subspce'", "dense, exact-k"]),
        (["train", "RECIPE", "--resum", "latest"], ["--resum", "did you mean --resume?"]),
        (["train", "RECIPE", "--out"], ["--out"]),
        (["train", "RECIPE", "extra"], ["extra"]),
        (["train", "RECIPE", "--task.name=problems"], ["task.problems", "JSONL"]),
        (["train", "RECIPE", "--task.name=problems", "--task.problems=no.jsonl"], ["no.jsonl", "path"]),
        (["train", "RECIPE", "--task.name=problems", "--task.problems=EMPTY"], ["empty.jsonl"]),
        (["train", "RECIPE", "--task.name=problems", "--task.problems=BROKEN"], ["broken.jsonl:2"]),
        (["train", "RECIPE", "--model.path", "no/such folder"], ["model.path", "no/such folder"]),
        (["train", "BROKEN"], ["broken.jsonl", "not a TOML file"]),
        (["compare", "RECIPE", "--seeds", "1,b"], ["--seeds", "1,b", "1,2,3"]),
        (["compare", "RECIPE", "--jobs", "x"], ["--jobs", "x"]),
        (["compare", "RECIPE", "--jobs", "0"], ["--jobs", "0"]),
        (["compare", "RECIPE", "--job", "3"], ["--job", "did you mean --jobs?"]),
        (["compare", "RECIPE", "--arms", "dense,nil"], ["'nil'", "dense, exact-k"]),
        (["demo", "--sed", "3"], ["--sed", "did you mean --seed?"]),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line_that_names_field_and_way_out(recipe, capsys, tmp_path, arguments, words):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.jsonl").write_text('{"id": "1", "problem": "1+1", "answer": "2"}\n{"id"\n')
    stand_for = {"RECIPE": recipe, "EMPTY": "empty.jsonl", "BROKEN": "broken.jsonl"}
    for name, value in stand_for.items():
        arguments = [argument.replace(name, value) for argument in arguments]
    message = wrong(capsys, *arguments)
    assert all(word in message for word in words), message
    assert not os.path.exists("runs")


def test_an_argument_that_is_no_text_in_the_locale_is_refused_and_leaves_nothing(recipe, tmp_path):
    """In the C locale without UTF-8 mode a non-ASCII name reaches Python as surrogates."""
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "thinwire", "train", recipe, "--name", "\u00e9", "--out", "out"]
    done = subprocess.run(
        [os.fsencode(word) for word in command], env=environment, capture_output=True, timeout=60
    )
    assert done.returncode == 2
    assert b"is not text in this locale" in done.stderr
    assert b"PYTHONUTF8=1" in done.stderr
    assert done.stderr.count(b"\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_used_directory_is_refused_before_anything_is_loaded(recipe, capsys, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert "--out out is not empty; name another" in wrong(capsys, "train", recipe, "--out", "out")
    (tmp_path / "out" / "config.toml").write_text("steps = 2\n")
    assert "go on with --resume out" in wrong(capsys, "train", recipe, "--out", "out")
    assert "is a file" in wrong(capsys, "train", recipe, "--out", "out/notes.txt")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_is_refused(recipe, capsys, tmp_path):
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked").chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert "--out locked/run" in wrong(capsys, "train", recipe, "--out", "locked/run")
    assert "--out locked/all" in wrong(capsys, "compare", recipe, "--out", "locked/all")


@pytest.mark.parametrize("command", ["train", "compare"])
def test_an_out_below_a_file_is_refused(recipe, capsys, tmp_path, command):
    (tmp_path / "file").write_text("")
    message = wrong(capsys, command, recipe, "--out", "file/run")
    assert "--out file/run" in message


def test_an_error_with_json_is_one_object_on_stdout_too(recipe, capsys):
    assert main(["train", recipe, "--json", "--steps", "0"]) == 2
    captured = capsys.readouterr()
    error = json.loads(captured.out)
    assert error["exit_status"] == 2
    assert captured.err == f"thinwire: {error['error']}\n"


def test_a_run_that_diverges_exits_with_1_and_names_the_resumable_checkpoint(recipe, capsys):
    arguments = ["train", recipe, "--rl.standardise", "false", "--steps", "9",
                 "--task.reward", "rewards:huge"]  # fmt: skip
    Path("rewards.py").write_text(
        "def huge(problem, response):\n    return 2e37 if sum(map(ord, response)) % 2 else -2e37\n"
    )
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "thinwire train --resume runs/tiny-1" in captured.err.splitlines()[-1]
    assert main(["train", "--resume", "latest"]) == 1  # the same step diverges again
    assert "thinwire train --resume runs/tiny-1" in capsys.readouterr().err.splitlines()[-1]


def test_help_answers_without_loading_torch():
    code = (
        "import sys, thinwire.cli as cli\n"
        "try:\n    cli.main(['compare', '--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "assert cli.main(['train']) == 2\n"
        "assert not {'torch', 'transformers', 'scipy'} & set(sys.modules), 'loaded'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--vary PREFIX" in done.stdout


def test_a_reader_that_hangs_up_is_no_traceback():
    """`thinwire codecs list | true`: the pipe is closed before anything is printed."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "thinwire", "codecs", "list"],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(writer)
    assert done.stderr == b""


def test_the_quick_demo_compares_the_four_arms_and_prints_their_table(capsys):
    """The real command at 1 step of 2 prompts, one process at a time."""
    small = ["--steps", "1", "--sampling.prompts", "2", "--rl.mini_batch_prompts", "0",
             "--task.num_validation", "4", "--checkpoint.models", "false"]  # fmt: skip
    assert main(["demo", "--quick", "--seed", "5", "--out", "demo", *small]) == 0
    captured = capsys.readouterr()
    for arm in ("dense", "exact-k", "subspace-20", "subspace-10"):
        assert arm in captured.out
        assert os.path.exists(f"demo/{arm}/seed-5/summary.json")
    assert captured.out.splitlines()[-1] == "report: demo/report.html"
    summary = json.loads(Path("demo/summary.json").read_text())
    assert summary["arms"]["dense"]["mean"]["at"]["1"]["gap"]["n"] == 1
