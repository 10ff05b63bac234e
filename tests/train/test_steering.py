"""The controller in a run: it changes settings of later steps only, says so, and resumes."""

import json

import pytest

from tests.train.runs import recipe, run
from tests.train.test_probe import lines
from tests.train.test_step import start
from thinwire.core.errors import RunFailure
from thinwire.train.steering import plant

ALARM = (  # a dense table of 0 and a probe at every step: every look is an alarm once the weights have moved
    "--controller.on=true",
    "--controller.look_every=2",
    "--controller.dense_kl={ 0 = 0.0 }",
    "--probe.every=1",
)


def events(out):
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def without_clocks(rows):
    dropped = ("timing_s/", "memory/", "controller/")
    return [{k: v for k, v in row.items() if not k.startswith(dropped)} for row in rows]


def test_a_controller_that_does_not_act_changes_no_bit(tmp_path):
    run(tmp_path / "off", "--steps=5")
    run(tmp_path / "on", "--steps=5", "--controller.on=true", "--controller.look_every=2")
    assert without_clocks(lines(tmp_path / "on")) == without_clocks(lines(tmp_path / "off"))
    assert lines(tmp_path / "on")[-1]["controller/demand"] == 0.0


def test_a_decision_serves_from_the_next_step_and_is_written_down(tmp_path):
    run(tmp_path / "a", "--steps=5", *ALARM)
    rows = lines(tmp_path / "a")[1:]
    weights = [row["controller/view_alignment_weight"] for row in rows]
    assert weights[:2] == [0.0, 0.0]
    first = events(tmp_path / "a")[0]
    assert (first["step"], first["event"], first["actuator"]) == (2, "controller", "view_alignment_weight")
    assert weights[2] == first["to"] > 0.0
    assert "probe/kl_dense" in first["reason"]


def test_a_resumed_run_decides_as_the_whole_one(tmp_path):
    run(tmp_path / "whole", "--steps=6", *ALARM)
    run(tmp_path / "cut", "--steps=6", "--checkpoint.every=3", "--checkpoint.keep=9", *ALARM)
    (tmp_path / "cut" / "checkpoints" / "step-6" / "state.json").unlink()
    for file in sorted((tmp_path / "cut" / "checkpoints" / "step-6").iterdir()):
        file.unlink()
    (tmp_path / "cut" / "checkpoints" / "step-6").rmdir()
    run(tmp_path / "cut", "--steps=6", "--checkpoint.every=3", "--checkpoint.keep=9", *ALARM, resume=True)
    assert without_clocks(lines(tmp_path / "cut")) == without_clocks(lines(tmp_path / "whole"))
    own = [event for event in events(tmp_path / "cut") if event["event"] == "controller"]
    assert own == events(tmp_path / "whole")


def test_a_hard_stop_leaves_a_checkpoint(tmp_path):
    """Every look adds 0.25 for the dense KL: demand reaches the one actuator's end at the fourth, step 8."""
    settings = ('--controller.order=["view_alignment_weight"]', "--controller.stop_looks=1")
    rate = "--controller.view_alignment_weight={ limit = 0.1, rate = 1.0 }"
    with pytest.raises(RunFailure, match=r"step 8: stopped by the controller.*resume from step 8"):
        run(tmp_path / "a", "--steps=9", *ALARM, *settings, rate)
    assert events(tmp_path / "a")[-1]["event"] == "stopped"
    assert len(lines(tmp_path / "a")) == 9


def test_more_bits_are_sent_where_the_codec_allows_it(tmp_path):
    order = '--controller.order=["bits_per_value"]'
    bits = "--controller.bits_per_value={ limit = 8.0, rate = 8.0 }"
    run(tmp_path / "a", "--steps=5", *ALARM, order, bits)
    rows = lines(tmp_path / "a")[1:]
    assert rows[0]["wire/bits_per_value"] == 96 / 128
    assert rows[-1]["wire/bits_per_value"] > 96 / 128
    assert rows[-1]["controller/bits_per_value"] >= rows[-1]["wire/bits_per_value"]


@pytest.mark.parametrize(
    ("codec", "compresses", "learns", "has_bits"),
    [("identity", False, False, False), ("exact-k", True, False, True), ("subspace", True, True, False)],
)
def test_the_plant_says_what_a_codec_allows(codec, compresses, learns, has_bits):
    parts, *_ = start(recipe(codec=codec))
    own = plant(parts)
    assert (own.compresses, own.learns, own.bits_per_value is not None) == (compresses, learns, has_bits)


def test_one_stage_has_nothing_to_control():
    parts, *_ = start(recipe("--model.stages=1"))
    assert not plant(parts).compresses
