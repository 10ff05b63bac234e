"""The heat map of weight movement: its cells are the recorded readings; broken lines are left out."""

import json
import re

import pytest

from tests.reports.synthetic import write_run
from thinwire.reports import heatmap
from thinwire.reports.load import load_run
from thinwire.reports.page import render


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "run", "subspace-20", 1, 100)


def test_cells_are_the_readings_and_mark_those_below_the_bf16_line(folder):
    moves = heatmap.load_moves(load_run(folder))
    assert moves.steps == [20, 40, 60, 80, 100]
    assert moves.change[7][4] == pytest.approx(0.08)
    svg = heatmap.heatmap_svg(moves, 0.08)
    assert svg.count("<rect") == 8 * 5
    assert "<title>block 7, step 100: 8.000%</title>" in svg
    # 1e-4 * step * (1 + block) below 2^-9 = 0.001953: only step 20 without any block: 0.002 is above
    assert svg.count("heat low") == sum(v < 2**-9 for row in moves.change for v in row) == 0
    assert heatmap.heatmap_svg(heatmap.Moves([1], [0], [[0.001]]), 0.001).count("heat low") == 1


def test_the_page_shows_it_only_where_movement_was_recorded(folder, tmp_path):
    assert '<section id="heatmap"><h2>Where the weights moved' in render([load_run(folder)])
    other = load_run(write_run(tmp_path / "other", "dense", 1, 100))
    assert heatmap.section([other], ["dense"]) == ""


def test_broken_lines_and_values_are_left_out(folder):
    file = folder / "movement.jsonl"
    odd = [
        {
            "step": 120,
            "blocks": [{"block": 0, "relative_change": None}, {"block": "<b>", "relative_change": 1}, 3],
        },
        {"step": 140, "blocks": [{"block": 0, "relative_change": float("nan")}]},
        {"step": "x", "blocks": []},
        {"step": 160, "blocks": 7},
    ]
    file.write_text(file.read_text() + "".join(json.dumps(line) + "\n" for line in odd) + '{"step": 1')
    moves = heatmap.load_moves(load_run(folder))
    assert moves.blocks == list(range(8))
    svg = heatmap.heatmap_svg(moves, 0.08)
    assert len(re.findall("<rect", svg)) == 40


def test_a_long_run_is_thinned_and_keeps_its_last_step(folder):
    lines = [{"step": s, "blocks": [{"block": 0, "relative_change": 0.1}]} for s in range(1, 1001)]
    (folder / "movement.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    moves = heatmap.load_moves(load_run(folder))
    assert len(moves.steps) <= heatmap.MAX_COLUMNS
    assert moves.steps[-1] == 1000
