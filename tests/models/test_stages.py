"""Stages reproduce the whole model bit for bit, for every supported family."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tests.tiny import FAMILIES, tiny_model
from thinwire.core.errors import UserError
from thinwire.models.stages import boundaries, split, stage_of_parameters


@pytest.mark.parametrize(
    ("layers", "stages", "after"),
    [
        (28, 8, [3, 7, 11, 15, 18, 21, 24]),
        (30, 8, [3, 7, 11, 15, 19, 23, 26]),
        (8, 8, [0, 1, 2, 3, 4, 5, 6]),
        (8, 1, []),
        (5, 2, [2]),
    ],
)
def test_boundaries_stand_after_the_last_block_of_every_stage_but_the_last(layers, stages, after):
    assert boundaries(layers, stages) == after


@pytest.mark.parametrize("stages", [0, 9, -1])
def test_more_stages_than_blocks_or_none_are_refused(stages):
    with pytest.raises(UserError, match=r"model.stages must be in 1..8 .*got"):
        boundaries(8, stages)


@pytest.mark.parametrize(
    ("chosen", "stages", "words"),
    [
        ([7], 2, "0..6"),
        ([3, 1], 3, "rise"),
        ([1, 1], 3, "rise"),
        ([-1], 2, "0..6"),
        ([1], 3, "set model.stages = 2"),
    ],
)
def test_chosen_boundaries_that_make_no_stages_are_refused(chosen, stages, words):
    with pytest.raises(UserError, match=r"model.boundaries") as caught:
        boundaries(8, stages, chosen)
    assert words in str(caught.value)


def test_chosen_boundaries_are_where_the_model_is_cut():
    model = tiny_model("llama", layers=4)
    parts = split(model, 3, [0, 1])
    ids = torch.randint(2, 60, (3, 7))
    assert parts.after == (0, 1)
    assert torch.equal(parts.head(parts.forward(ids, None)), model(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_give_the_logits_and_gradients_of_the_whole_model_bit_for_bit(family, stages):
    model = tiny_model(family, layers=4)
    ids = torch.randint(2, 60, (3, 7))
    whole = model(input_ids=ids, use_cache=False).logits
    whole.square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    parts = split(model, stages)
    staged = parts.head(parts.forward(ids, None))
    staged.square().sum().backward()
    assert torch.equal(whole, staged)
    assert all(torch.equal(e, p.grad) for e, p in zip(expected, model.parameters(), strict=True))


def test_mixed_attention_types_keep_their_layer():
    """Sliding and full layers alternate; a slice that forgot its offset would use the wrong mask."""
    model = tiny_model(
        "qwen3",
        layers=4,
        use_sliding_window=True,
        sliding_window=2,
        layer_types=["full_attention", "sliding_attention"] * 2,
    )
    ids = torch.randint(2, 60, (2, 9))
    for stages in (2, 3, 4):
        parts = split(model, stages)
        assert torch.equal(parts.head(parts.forward(ids, None)), model(input_ids=ids, use_cache=False).logits)


def test_splitting_copies_no_parameter_and_leaves_the_model_as_it_was():
    model = tiny_model("llama", layers=4)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    parts = split(model, 4)
    own = set(before.values())
    assert all(p.data_ptr() in own for module in parts.modules for p in module.parameters())
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert model.config.num_hidden_layers == 4


def test_right_padding_does_not_reach_real_tokens():
    """Causal attention: values equal to float32 rounding (another shape may sum in another order)."""
    model = tiny_model("llama", layers=2)
    parts = split(model, 2)
    ids = torch.randint(2, 60, (1, 5))
    padded = torch.cat([ids, torch.full((1, 4), 7)], 1)
    torch.testing.assert_close(
        parts.forward(padded, None)[:, :5], parts.forward(ids, None), rtol=0, atol=2e-6
    )


def test_every_boundary_is_sent_once_and_in_order():
    parts = split(tiny_model("llama", layers=4), 3)
    seen = []
    parts.forward(torch.tensor([[3, 4]]), lambda hidden, boundary: (seen.append(boundary), hidden)[1])
    assert seen == [0, 1]


def test_parameters_belong_to_the_stage_of_their_block():
    model = tiny_model("llama", layers=4)
    names = [name for name, _ in model.named_parameters()]
    owner = dict(zip(names, stage_of_parameters(split(model, 2), names), strict=True))
    assert owner["model.embed_tokens.weight"] == 0
    assert owner["model.layers.1.mlp.up_proj.weight"] == 0
    assert owner["model.layers.2.mlp.up_proj.weight"] == 1
    assert owner["model.norm.weight"] == owner["lm_head.weight"] == 1


def test_an_unknown_layout_is_refused_by_its_name():
    with pytest.raises(UserError, match=r"GPT2LMHeadModel.*decoder-only"):
        split(GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=20)), 2)


def test_a_model_that_does_more_between_its_blocks_is_refused():
    """A head that adds something the stages cannot see: the check at split time notices."""
    model = tiny_model("llama", layers=2)
    inner = model.lm_head
    model.lm_head = nn.Sequential(inner, nn.ReLU())
    model.get_output_embeddings = lambda: inner
    with pytest.raises(UserError, match="do not reproduce"):
        split(model, 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named_as_such(value):
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = value
    with pytest.raises(UserError, match="logits are not finite"):
        split(model, 2)
