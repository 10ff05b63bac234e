"""The whole bench on a tiny model: identities of the exact codec, costs, reuse of saved rollouts."""

import functools
import json
import math

import pytest
import torch

from tests.bench.helpers import CPU, WIDTH, bound, rows, saved, subject, views
from thinwire.bench import cost
from thinwire.bench.passes import dense_passes
from thinwire.bench.plan import Entry, Plan
from thinwire.bench.rollouts import micro_batches
from thinwire.bench.run import bench
from thinwire.bench.store import load, save
from thinwire.bench.table import describe
from thinwire.codecs import CODECS, Identity
from thinwire.core.errors import RunFailure
from thinwire.reports.bench_page import render_bench

NAMES = [kind.model_fields["name"].default for kind in CODECS]
EXACT = {"mean": 0.0, "low": 0.0, "high": 0.0}


def plan(names=NAMES, **settings):
    return Plan([Entry(name, bound(name)) for name in names], fires=2, draws=2, **settings)


def quiet(_):
    pass


@functools.cache
def found():
    points = tuple(Entry("exact-k", bound("exact-k", keep=keep)) for keep in (1, 8))
    return bench(subject(), saved(), plan(sweep=points), quiet)


def row(name):
    return next(row for row in found()["codecs"] if row["label"] == name)


def without_clocks(result):
    return [{k: v for k, v in row.items() if k != "microseconds_per_token"} for row in result["codecs"]]


def test_every_reading_of_identity_is_exactly_zero_or_one():
    exact = row("identity")
    assert exact["gap"] == exact["kl"] == EXACT
    assert exact["entropy"]["view"] == exact["entropy"]["dense"] > 0
    assert exact["gradient"] == {
        "cosine": 1.0,
        "relative_error": 0.0,
        "norm_ratio": 1.0,
        "cosine_of_mean": 1.0,
        "relative_error_of_mean": 0.0,
        "not_finite": None,
    }
    for boundary in exact["boundaries"]:
        for direction in ("forward", "backward"):
            reading = {k: v for k, v in boundary[direction].items() if k != "gaussian_reference"}
            assert set(reading.values()) == {0.0}
    assert exact["side_channel"] == {"bits_a_fire": 0, "bits_per_token": 0.0}
    assert exact["bits_per_token"] == {"forward": 32.0 * WIDTH, "backward": 32.0 * WIDTH}
    assert exact["num_draws"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_identity_is_exact_in_bf16_too(dtype):
    (exact,) = bench(subject(dtype=dtype), saved(), plan(["identity"]), quiet)["codecs"]
    assert exact["gap"] == exact["kl"] == EXACT
    assert exact["gradient"]["cosine"] == 1.0
    assert exact["gradient"]["relative_error"] == 0.0


def test_rows_come_sorted_by_gap_with_every_codec_and_plain_json():
    gaps = [row["gap"]["mean"] for row in found()["codecs"]]
    assert gaps == sorted(gaps)
    assert sorted(row["label"] for row in found()["codecs"]) == sorted(NAMES)
    assert json.loads(json.dumps(found(), allow_nan=False)) == found()
    assert found()["refused"] == []
    assert [point["bits_per_value"] for point in found()["sweep"]] == [0.5, 4.0]
    for one in (*found()["codecs"], *found()["sweep"]):
        assert one["gap"]["low"] <= one["gap"]["mean"] <= one["gap"]["high"]
        assert one["kl"]["mean"] >= 0


def test_a_codec_that_draws_is_read_over_its_draws_and_others_once():
    assert row("exact-k")["num_draws"] == 2
    assert row("subspace")["num_draws"] == 1
    single = row("subspace")["gradient"]
    assert single["cosine"] == single["cosine_of_mean"]
    assert -1 <= row("exact-k")["gradient"]["cosine"] <= 1


def test_the_same_seed_reads_the_same_and_another_draws_anew():
    again = bench(subject(), saved(), plan(["exact-k"]), quiet)
    assert without_clocks(again) == [one for one in without_clocks(found()) if one["label"] == "exact-k"]
    other = bench(subject(), saved(), plan(["exact-k"], seed=43), quiet)
    assert without_clocks(other) != without_clocks(again)


def test_saved_and_loaded_rollouts_give_the_same_figures(tmp_path):
    save(tmp_path / "kept.safetensors", saved())
    kept = load(tmp_path / "kept.safetensors", saved().facts, CPU)
    again = bench(subject(), kept, plan(), quiet)
    assert without_clocks(again) == without_clocks(found())
    assert again["model"] == found()["model"]


@pytest.mark.parametrize("kind", CODECS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wire_bits_are_the_length_of_the_packed_bytes(kind, dtype):
    model = subject(dtype=dtype)
    passes, _ = dense_passes(model, micro_batches(rows(), CPU))
    (view,) = views(kind().at_width(WIDTH))
    codec, batch, hidden_BTD = view.codec, passes[0].batch, passes[0].hidden[0]
    draw = view.draw(0, batch.sample_B, hidden_BTD.shape[1])
    buffer = codec.pack(codec.encode(hidden_BTD, draw, view.states[0]), view.states[0], dtype).buffer_NB
    found = cost.wire_bits(view, passes[0])
    assert found["forward"] * batch.input_ids_BT.numel() == 8 * len(bytes(buffer.flatten().tolist()))
    assert found == dict.fromkeys(("forward", "backward"), codec.wire_bits(dtype))


class Exploding(Identity):
    """Identity whose other end reads infinity, in one direction."""

    direction: str = "backward"

    def decode(self, sent, draw, state):
        return sent[0] * (math.inf if self.direction == "forward" else 1.0)

    def decode_gradient(self, sent, draw, state):
        return sent[0] * math.inf


@pytest.mark.parametrize("stages", [2, 3])
def test_a_gradient_that_is_not_finite_is_named_and_the_rest_is_read(stages):
    entry = Entry("exploding", Exploding().at_width(WIDTH))
    found = bench(subject(stages), saved(stages), Plan([entry], fires=1), quiet)
    json.dumps(found, allow_nan=False)
    assert "exploding: not finite:" in describe(found)
    assert "<svg" not in render_bench(found)  # a gap of 0 alone
    (one,) = found["codecs"]
    assert one["boundaries"][0]["backward"]["relative_error"] is None
    assert one["gap"] == EXACT
    assert one["gradient"].pop("not_finite") == ("gradient" if stages == 2 else "boundary/0/backward")
    assert set(one["gradient"].values()) == {None}


@pytest.mark.parametrize("stages", [2, 3])
def test_a_codec_whose_forward_pass_is_not_finite_is_told_and_the_others_go_on(stages):
    exploding = Entry("exploding", Exploding(direction="forward").at_width(WIDTH))
    entries = [exploding, Entry("identity", bound("identity"))]
    found = bench(subject(stages), saved(stages), Plan(entries, [exploding], fires=1), quiet)
    assert [row["label"] for row in found["codecs"]] == ["identity"]
    place = "logits/forward" if stages == 2 else "boundary/1/forward"
    assert [one["reason"] for one in found["refused"]] == [f"not finite: {place} = nan"] * 2
    assert "not measured: exploding at 32 bits a value: not finite" in describe(found).replace("\n", " ")
    with pytest.raises(RunFailure, match=r"codec exploding: not finite: .*/forward"):
        bench(subject(stages), saved(stages), Plan([exploding], fires=1), quiet)


def test_the_side_channel_is_the_state_shared_by_the_tokens_between_fires():
    (view,) = views(bound("subspace", subspace_dim=4))
    found = cost.side_channel(view.states, cadence=20, tokens_per_step=1000)
    assert found == {"bits_a_fire": 32 * 4 * WIDTH, "bits_per_token": 32 * 4 * WIDTH / 20_000}
    (view,) = views(bound("subspace"), fires=0)  # both ends derive the keyed start
    assert cost.side_channel(view.states, 20, 1000)["bits_a_fire"] == 0


def test_times_are_positive_and_the_threads_are_left_as_they_were():
    passes, _ = dense_passes(subject(), micro_batches(rows(), CPU))
    before = torch.get_num_threads()
    found = cost.microseconds(subject(), views(bound("exact-k"))[0], passes[0], repeats=3)
    assert torch.get_num_threads() == before
    assert all(math.isfinite(value) and value > 0 for value in found.values())
    assert found["share_of_layer"] == pytest.approx((found["encode"] + found["decode"]) / found["layer"])


def test_the_tables_fit_eighty_columns_and_name_what_was_refused():
    refused = [{"label": "x", "bits_per_value": 0.01, "reason": "codec.keep must be in 1..32"}]
    text = describe(found() | {"refused": refused})
    assert max(map(len, text.splitlines())) <= 80
    assert "not measured: x at 0.01 bits a value: codec.keep must be in 1..32" in text.replace("\n", " ")
    for name in (*NAMES, "|g|/|g0|", "layer", "Gaussian"):
        assert name in text


def test_the_page_stands_alone_and_escapes_labels():
    page = render_bench(found() | {"model": {**found()["model"], "source": "<b>"}})
    assert "<svg" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert "<b>" not in page
