"""`train --check`: the reference recipe's known figures, and the memory formulas against torch."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config

from tests.tiny import FAMILIES, save_tiny, tiny_config, tiny_model
from thinwire.core.errors import UserError
from thinwire.models.layout import refuse_unsplittable
from thinwire.models.load import MetaModel
from thinwire.train.check import check, describe, human, shipped_config, wire
from thinwire.train.config import load_recipe, resolve
from thinwire.train.memory import block_activations, memory
from thinwire.train.places import find_recipe


@pytest.fixture
def problems(tmp_path):
    file = tmp_path / "problems.jsonl"
    lines = [{"id": str(i), "problem": f"{i}?", "answer": str(i)} for i in range(6)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def reference(problems):
    overrides = [f"--task.problems={problems}", f"--task.validation_problems={problems}"]
    return load_recipe(find_recipe("qwen2.5-math-1.5b"), overrides)


def test_the_reference_recipe_resolves_without_weights_or_network_to_the_published_figures(reference):
    """The reference run: 1232 bits, 5.01% of dense, 0.802 bits per value, boundaries 3 7 11 15 18 21 24; the
    parameter count is that of the published checkpoint."""
    checked = check(reference)
    assert checked["model"]["parameters"] == 1_543_714_304
    assert checked["model"]["boundaries_after_blocks"] == [3, 7, 11, 15, 18, 21, 24]
    assert checked["wire"]["bits_per_token_per_boundary"] == 1232
    assert round(checked["wire"]["bits_per_value"], 3) == 0.802
    assert round(checked["wire"]["share_of_dense"], 4) == 0.0501
    assert (checked["task"]["num_problems"], checked["task"]["num_validation"]) == (6, 6)
    assert "1,543,714,304 parameters" in describe(checked)
    json.dumps(checked, allow_nan=False)


def test_bytes_of_a_step_count_three_passes_forward_and_one_back(reference):
    wired = wire(reference, reference.codec.at_width(1536), 7)
    tokens = 128 * 8 * 3072
    assert wired["forward_bytes_per_step"] == 3 * tokens * 7 * 154
    assert wired["backward_bytes_per_step"] == tokens * 7 * 154
    assert wired["dense_bytes_per_step"] == 4 * tokens * 7 * 1536 * 2
    assert wired["anchor_bytes_per_fire"] == 0  # exact-k learns nothing, so its anchor never fires


def test_a_learned_codec_counts_its_anchor_and_its_side_channel():
    recipe = load_recipe(find_recipe("demo"), ["--anchor.token_share=0.3"], "subspace-10")
    wired = wire(recipe, recipe.codec.at_width(128), 1)
    rows = -(-3 * recipe.sampling.prompts * recipe.sampling.group_size // 10)
    length = -(-(recipe.task.max_prompt_tokens + 5) // recipe.rl.length_bucket) * recipe.rl.length_bucket
    assert wired["anchor_bytes_per_fire"] == rows * length * 128 * 2
    assert wired["side_channel_bytes_per_fire"] == 128 * recipe.codec.subspace_dim * 4
    assert wired["anchor_bytes_per_step"] == wired["anchor_bytes_per_fire"] / 10


def saved_bytes(model, num_rows, num_tokens):
    """Bytes of distinct storages that autograd keeps of one forward pass, weights and buffers apart."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ids = torch.zeros(num_rows, num_tokens, dtype=torch.int64)
        output = model.model(input_ids=ids, use_cache=False).last_hidden_state
    assert output.requires_grad
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_activation_formula_counts_every_byte_that_torch_keeps_of_a_block(family, dtype):
    """Two more blocks add exactly twice the formula's block: no tolerance."""
    shallow, deep = (tiny_model(family, layers=layers).to(dtype) for layers in (2, 4))
    measured = saved_bytes(deep, 2, 64) - saved_bytes(shallow, 2, 64)
    formula = [
        block_activations(MetaModel(model, 0, 0, ""), dtype.itemsize, 128)["without_checkpointing"]
        for model in (shallow, deep)
    ]
    assert measured == formula[1] - formula[0]


def test_memory_names_what_a_setting_adds(tmp_path):
    save_tiny(tmp_path / "model", layers=4)
    base = {"model": {"path": str(tmp_path / "model"), "stages": 2}, "task": {"max_prompt_tokens": 8},
            "sampling": {"prompts": 4, "max_new_tokens": 8}}  # fmt: skip

    def parts(*overrides):
        return check(resolve(base, overrides))["memory_bytes"]

    plain = parts()
    params = plain["weights"] / 4
    assert (plain["masters"], plain["snapshot"], plain["refusal_copy"]) == (0, 0, 0)
    assert plain["adamw_moments"] == 8 * params
    assert parts("--model.dtype=bfloat16")["masters"] == 4 * params
    assert parts("--anchor.delay=1")["snapshot"] == 4 * params
    assert parts("--rl.mini_batch_prompts=2")["refusal_copy"] == 12 * params
    assert parts("--codec.name=identity")["keyed_draws"] == 0
    assert parts("--sampling.batch_rows=8")["kv_cache"] == plain["kv_cache"] / 4
    assert parts("--model.gradient_checkpointing=true")["peak"] < plain["peak"]


def test_a_folder_with_nothing_but_a_config_is_enough(tmp_path, reference):
    folder = shipped_config("Qwen/Qwen2.5-Math-1.5B")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    local = reference.model_copy(update={"model": reference.model.model_copy(update={"path": str(tmp_path)})})
    assert check(local)["model"]["parameters"] == 1_543_714_304
    assert check(local)["model"]["configuration"] == str(tmp_path)
    assert shipped_config("Someone/Else") is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--codec.keep=1537", ["codec.keep", "1..1536", "1537"]),
        ("--model.stages=29", ["model.stages", "1..28", "29"]),
        ("--model.boundaries=[3, 7]", ["model.boundaries = [3, 7]", "set model.stages = 3"]),
        ("--task.problems=missing.jsonl", ["missing.jsonl", "check the path"]),
        ("--task.reward=nosuchreward", ["task.reward", "nosuchreward"]),
    ],
)
def test_what_would_fail_later_fails_in_the_check(reference, problems, override, words):
    overrides = [f"--task.problems={problems}", f"--task.validation_problems={problems}", override]
    with pytest.raises(UserError) as error:
        check(load_recipe(find_recipe("qwen2.5-math-1.5b"), overrides))
    assert all(word in str(error.value) for word in words)


def test_what_is_allowed_but_may_surprise_is_noted(reference):
    assert check(reference)["notes"] == []
    sampling = reference.sampling.model_copy(update={"max_new_tokens": 4096, "top_p": 0.9})
    long, nucleus = check(reference.model_copy(update={"sampling": sampling}))["notes"]
    assert "4096 positions" in long
    assert "top_p" in nucleus


def test_the_estimate_uses_the_recipe_it_is_given(reference):
    meta_free = memory(reference, reference.codec.at_width(1536), tiny_meta(), 7)
    assert meta_free["keyed_draws"] == 2 * 77 * 7 * 128 * 8 * 3072  # int16 channel indices


def tiny_meta():
    model = tiny_model("qwen2")
    return MetaModel(model, sum(p.numel() for p in model.parameters()), 0, "")


def test_bytes_are_shown_in_powers_of_a_thousand():
    assert [human(n) for n in (999, 1000, 10_170_000_000, 2e15)] == [
        "999 B",
        "1.00 kB",
        "10.17 GB",
        "2000.00 TB",
    ]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPT2Config(n_layer=2, n_embd=32, n_head=2), "which has no `model.layers`"),
        (Gemma2Config(num_hidden_layers=26), "whose stages do not reproduce the whole model"),
    ],
)
def test_an_architecture_that_cannot_be_split_fails_in_the_check_as_it_would_in_a_run(
    tmp_path, config, words
):
    """Gemma-2 scales its embeddings within the decoder, so a stage that starts later would scale again."""
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=words):
        check(resolve({"model": {"path": str(tmp_path), "stages": 2, "attention": "eager"}}))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_small_twin_of_a_supported_family_passes_and_draws_nothing(family):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family, layers=4, hidden=64))
    before = torch.get_rng_state()
    refuse_unsplittable(model)
    assert torch.get_rng_state().equal(before)
