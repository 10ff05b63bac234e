"""`thinwire codecs bench|growth` as typed: JSON alone on stdout, files, and one line for each mistake."""

import json
from pathlib import Path

import pytest
import torch

from tests.tiny import save_tiny
from thinwire.cli import main

QUICK = ("--rollouts", "24", "--max-new-tokens", "5", "--draws", "2", "--fires", "2")
TWO = ("--codec", "exact-k", "--codec", "subspace:subspace_dim=4,power_iterations=3")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def bench(capsys, *arguments):
    assert main(["codecs", "bench", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def wrong(capsys, *arguments):
    """The last stderr line (after lines of progress) of a command line that exits with 2, stdout empty."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.strip().splitlines()[-1]


def test_the_embedded_model_is_benched_saved_and_benched_again_the_same(capsys):
    first = bench(capsys, *QUICK, *TWO, "--save", "kept.safetensors", "--out", "out")
    labels = {row["label"]: row for row in first["codecs"]}
    assert labels["subspace:subspace_dim=4,power_iterations=3"]["settings"] == {
        "name": "subspace",
        "subspace_dim": 4,
        "power_iterations": 3,
    }
    assert first["model"]["boundaries"] == list(range(7))
    assert first["scored"]["rollouts"] + first["statistics"]["rollouts"] == 24
    assert json.loads(Path("out/bench.json").read_text())["codecs"] == first["codecs"]
    assert "<svg" in Path(first["report"]).read_text()
    again = bench(capsys, *QUICK[4:], *TWO, "--load", "kept.safetensors")
    for old, new in zip(first["codecs"], again["codecs"], strict=True):
        for timed in (old, new):
            timed.pop("microseconds_per_token")
        assert old == new


def test_a_budget_goes_to_all_codecs_that_take_one_and_a_sweep_moves_it(capsys):
    found = bench(capsys, *QUICK, "--bits-per-value", "1.5", "--sweep", "--stages", "3")
    bits = {row["label"]: row["bits_per_value"] for row in found["codecs"]}
    assert bits["exact-k"] == bits["subspace"] == 1.5
    assert bits["identity"] == 32.0
    swept = [point["bits_per_value"] for point in found["sweep"] if point["label"] == "exact-k"]
    assert swept == [0.125, 0.375, 0.75, 1.5, 4.0]
    assert found["refused"] == []


def test_a_budget_that_a_default_codec_cannot_meet_is_told_and_the_others_go_on(capsys):
    found = bench(capsys, *QUICK, "--bits-per-value", "0.01", "--stages", "2")
    assert "identity" in [row["label"] for row in found["codecs"]]
    refused = {one["label"]: one["reason"] for one in found["refused"]}
    assert "codec.bits_per_value = 0.01 is 0 bits a token at width 128" in refused["exact-k"]


def test_problem_files_folders_and_text_tables(capsys, tmp_path):
    save_tiny(tmp_path / "model", layers=3)
    lines = [json.dumps({"id": str(i), "problem": f"{i} + 1 =", "answer": str(i + 1)}) for i in range(30)]
    Path("sums.jsonl").write_text("\n".join(lines))
    arguments = (
        "--model",
        "model",
        "--stages",
        "3",
        "--problems",
        "sums.jsonl",
        *QUICK,
        "--codec",
        "exact-k",
    )
    assert main(["codecs", "bench", *arguments, "--model.dtype", "bfloat16", "--seed", "5"]) == 0
    text = capsys.readouterr().out
    assert "boundaries after blocks 0, 1, bfloat16" in text
    assert max(map(len, text.splitlines())) <= 80
    assert main(["codecs", "bench", *QUICK, "--save", "kept.safetensors", "--codec", "exact-k"]) == 0
    capsys.readouterr()
    message = wrong(
        capsys, "codecs", "bench", "--model", "model", "--stages", "3", "--load", "kept.safetensors"
    )
    assert "--load kept.safetensors was made with fingerprint sha256:" in message
    message = wrong(capsys, "codecs", "bench", "--stages", "4", "--load", "kept.safetensors")
    assert "was made with boundaries [0, 1, 2, 3, 4, 5, 6], this model has [1, 3, 5]" in message


def test_growth_prints_json_and_a_page(capsys):
    arguments = ("--stages", "2", "--rollouts", "24", "--steps", "32", "--hold", "1,4", "--out", "out")
    assert main(["codecs", "growth", *arguments, "--codec", "exact-k", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["hold"] for one in found["codecs"][0]["held"]] == [1, 4, 32]
    assert found["codecs"][0]["held"][-1]["exponent"] == pytest.approx(1.0)
    assert "<svg" in Path("out/growth.html").read_text()
    assert json.loads(Path("out/growth.json").read_text())["steps"] == 32


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--codec", "exactk"], ["codec.name", "'exactk'", "did you mean 'exact-k'?"]),
        (["--codec", "exact-k:kep=3"], ["codec.kep = 3", "did you mean 'keep'?"]),
        (["--codec", "exact-k:keep"], ["'keep' is no key=value"]),
        (["--codec", "exact-k:keep=500"], ["codec.keep must be in 1..128", "500"]),
        (["--codec", "exact-k", "--bits-per-value", "0.01"], ["codec.bits_per_value = 0.01", "or more"]),
        (["--codec", "exact-k:keep=2", "--bits-per-value", "1"], ["both set; give one"]),
        (["--stages", "9"], ["model.stages must be in 1..8", "got 9"]),
        (["--stages", "1"], ["--stages must be 2 or more", "got 1"]),
        (["--problems", "none.jsonl"], ["problem file none.jsonl cannot be read"]),
        (["--problems", "dmeo"], ["recipe dmeo does not exist", "did you mean demo?"]),
        (["--model", "./none"], ["model.path='./none' is not a folder"]),
        (["--load", "none.safetensors"], ["--load none.safetensors is not a file"]),
        (["--load", "x.safetensors", "--rollouts", "9"], ["--rollouts has no effect with --load"]),
        (["--load", "x.safetensors", "--save", "y.safetensors"], ["--save has no effect with --load"]),
        (["--load", "x.safetensors", "--task.digits", "1"], ["--task.digits has no effect with --load"]),
        (["--rollouts", "2"], ["--rollouts 2 gives 2 different prompts", "raise --rollouts"]),
        (["--rollouts", "0"], ["--rollouts must be 1 or more, got 0"]),
        (["--statistics-share", "1"], ["--statistics-share must lie between 0 and 1, got 1"]),
        (["--draws", "0"], ["--draws must be 1 or more"]),
        (["--rolouts", "9"], ["--rolouts has no effect here; did you mean --rollouts?"]),
        (["--optimizer.learning_rate", "1"], ["--optimizer.learning_rate has no effect here"]),
        (["--model.stages", "3"], ["--model.stages is set by --stages"]),
        (["--sampling.temperature", "0"], ["sampling.temperature must be > 0"]),
        (["--save", "none/kept.safetensors"], ["--save must name a new .safetensors file"]),
    ],
)
def test_bad_input_is_one_line_that_names_field_value_and_way_out(capsys, arguments, words):
    message = wrong(capsys, "codecs", "bench", *arguments)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["codecs"], ["ACTION"]),
        (["codecs", "bnech"], ["bnech", "bench"]),
        (["codecs", "list", "--stages", "8"], ["--stages"]),
        (["codecs", "growth", "--hold", "1,300"], ["--hold", "[1, 300] and 512"]),
        (["codecs", "growth", "--hold", "0"], ["--hold", "[0]"]),
        (["codecs", "growth", "--hold", "a"], ["'a' is not a list of whole numbers"]),
    ],
)
def test_wrong_actions_and_holds_are_refused(capsys, arguments, words):
    message = wrong(capsys, *arguments)
    for word in words:
        assert word in message, message


def test_weights_and_files_that_hold_no_numbers_are_refused(capsys, tmp_path):
    model = save_tiny(tmp_path / "model", layers=2)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(float("inf"))
    model.save_pretrained(tmp_path / "model")
    assert "not finite" in wrong(capsys, "codecs", "bench", "--model", "model", "--stages", "2")
    Path("text.safetensors").write_text("no tensors")
    assert "not a whole safetensors file" in wrong(capsys, "codecs", "bench", "--load", "text.safetensors")
