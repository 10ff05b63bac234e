"""Recipes: what resolves, what is refused in one line that names field, value and way out."""

from pathlib import Path

import pytest
import torch

from thinwire.core.errors import UserError
from thinwire.train.compare import differences
from thinwire.train.config import dump_toml, load_recipe, parse_overrides, read_toml, resolve
from thinwire.train.places import find_recipe, new_out

RECIPES = (
    "demo",
    "learning-rate-zero",
    "smollm2-one-digit",
    "smollm2-gsm8k",
    "qwen2.5-math-1.5b",
    "seven-boundaries",
)
PROBLEMS = {"task": {"name": "problems", "problems": "file.jsonl"}}


def refused(tables, *overrides, arm=None):
    with pytest.raises(UserError) as error:
        resolve(tables, overrides, arm)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_of_the_package_resolves_and_reloads_to_an_equal_one(name, tmp_path):
    path = find_recipe(name)
    for arm in (None, *read_toml(path).get("arms", {})):
        recipe = load_recipe(path, (), arm)
        (tmp_path / "config.toml").write_text(dump_toml(recipe))
        assert load_recipe(tmp_path / "config.toml") == recipe
        assert recipe.name == name


def test_the_arms_of_the_recipes_are_the_four_and_differ_in_codec_and_anchor_only():
    for name in ("demo", "learning-rate-zero", "smollm2-one-digit", "qwen2.5-math-1.5b"):
        raw = read_toml(find_recipe(name))
        assert list(raw["arms"]) == ["dense", "exact-k", "subspace-20", "subspace-10"]
        arms = [resolve(raw, (), arm) for arm in raw["arms"]]
        assert [arm.codec.name for arm in arms] == ["identity", "exact-k", "subspace", "subspace"]
        assert [arm.anchor.cadence for arm in arms[2:]] == [20, 10]
        keys = {key.split(".")[0] for arm in arms for key in differences(arms[0], arm)}
        assert keys == {"codec", "anchor"}


def test_the_compressed_arms_of_a_recipe_send_the_same_bits():
    for name, width, bits in (
        ("demo", 128, None),
        ("smollm2-one-digit", 576, 464),
        ("qwen2.5-math-1.5b", 1536, 1232),
    ):
        arms = [load_recipe(find_recipe(name), (), arm) for arm in ("exact-k", "subspace-20", "subspace-10")]
        sent = {arm.codec.at_width(width).wire_bits(torch.bfloat16) for arm in arms}
        assert len(sent) == 1
        assert bits is None or sent == {bits}


def test_the_control_recipe_is_the_demo_with_a_rate_of_zero():
    demo, control = (load_recipe(find_recipe(name)) for name in ("demo", "learning-rate-zero"))
    changed = differences(demo, control)
    assert set(changed) <= {"name", "steps", "optimizer.learning_rate"}
    assert changed["optimizer.learning_rate"][1] == 0.0


def test_the_reference_recipe_is_that_of_the_long_run():
    recipe = load_recipe(find_recipe("qwen2.5-math-1.5b"))
    rl, optimizer, sampling = recipe.rl, recipe.optimizer, recipe.sampling
    assert (recipe.seed, recipe.steps, recipe.model.stages, recipe.model.dtype) == (42, 600, 8, "bfloat16")
    assert (optimizer.learning_rate, optimizer.betas, optimizer.weight_decay) == (1e-6, (0.9, 0.999), 0.01)
    assert (rl.clip_low, rl.clip_high, rl.dual_clip, rl.aggregation) == (0.2, 0.2, 3.0, "token-mean")
    assert (rl.kl_coefficient, rl.kl_estimator, rl.entropy_coefficient) == (0.001, "k3", 0.0)
    assert (sampling.prompts, sampling.group_size, rl.mini_batch_prompts) == (128, 8, 128)
    assert (recipe.task.max_prompt_tokens, sampling.max_new_tokens) == (1024, 2048)
    assert recipe.task.suffix.endswith("put your final answer within \\boxed{}.")


def test_an_unknown_key_names_the_nearest_at_every_depth():
    assert "unknown key step = 3; did you mean 'steps'" in refused({"step": 3})
    assert "did you mean 'learning_rate'" in refused({"optimizer": {"learning_rte": 1.0}})
    assert "did you mean 'keep'" in refused({"codec": {"name": "exact-k", "kepe": 6}})
    assert "known keys: every" in refused({"probe": {"qqq": 1}})


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"anchor": {"cadence": 0}}, ["anchor.cadence", "0", "greater than or equal to 1"]),
        ({"steps": -5}, ["steps", "-5", "greater than or equal to 1"]),
        ({"steps": "many"}, ["steps", "'many'", "integer"]),
        ({"seed": 1 << 32}, ["seed", str(1 << 32)]),
        ({"sampling": {"temperature": "warm"}}, ["sampling.temperature", "'warm'"]),
        ({"optimizer": {"betas": [0.9]}}, ["optimizer.betas"]),
        ({"codec": {"name": "exactk"}}, ["codec.name", "'exactk'", "did you mean 'exact-k'"]),
        ({"codec": {"name": "exact-k", "keep": "six"}}, ["codec.keep", "'six'", "integer"]),
        ({"task": {"name": "problems"}}, ["task.problems"]),
        ({"model": 3}, ["model", "3"]),
    ],
)
def test_a_wrong_value_is_refused_with_its_field_and_what_was_given(tables, words):
    message = refused(tables)
    assert all(word in message for word in words), message


def test_a_codec_setting_that_does_not_fit_the_width_is_refused_with_the_range():
    for name, field in (("exact-k", "keep"), ("subspace", "subspace_dim")):
        recipe = resolve({"codec": {"name": name, field: 129}})
        with pytest.raises(UserError, match=rf"codec.{field} must be in 1..128 \(the hidden size\), got 129"):
            recipe.codec.at_width(128)


def test_a_missing_recipe_and_one_that_is_not_toml_say_so(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("steps == 3")
    with pytest.raises(UserError, match="not a TOML file"):
        read_toml(tmp_path / "bad.toml")
    with pytest.raises(UserError, match="not a TOML file"):
        read_toml(tmp_path)
    with pytest.raises(UserError, match=r"recipe dmeo does not exist; did you mean demo\?"):
        find_recipe("dmeo")


def test_an_unknown_arm_names_the_nearest_and_those_there_are():
    tables = {"arms": {"dense": {"codec": {"name": "identity"}}, "exact-k": {}}}
    assert "did you mean 'dense'" in refused(tables, arm="dens")
    assert "dense, exact-k" in refused(tables, arm="dens")


def test_overrides_lie_over_the_arm_and_the_arm_over_the_recipe():
    tables = {"codec": {"name": "exact-k", "keep": 3}, "arms": {"wide": {"codec": {"keep": 5}}}}
    assert resolve(tables).codec.keep == 3
    assert resolve(tables, (), "wide").codec.keep == 5
    assert resolve(tables, ["--codec.keep=7"], "wide").codec.keep == 7


def test_another_codec_name_replaces_the_whole_codec_table():
    tables = {"codec": {"name": "exact-k", "keep": 3}}
    assert resolve(tables, ["--codec.name=identity"]).codec.name == "identity"
    assert resolve(tables, ["--codec.name=subspace"]).codec.subspace_dim is None


def test_override_values_are_toml_or_else_text():
    parsed = parse_overrides(
        ["--steps", "20", "--task.template=chat", "--optimizer.betas=[0.8, 0.9]", "--a.b=true"]
    )
    assert parsed == {
        "steps": 20, "task": {"template": "chat"}, "optimizer": {"betas": [0.8, 0.9]}, "a": {"b": True},
    }  # fmt: skip
    for arguments in (["steps", "3"], ["--steps"]):
        with pytest.raises(UserError):
            parse_overrides(arguments)


@pytest.mark.parametrize(
    ("tables", "overrides", "words"),
    [
        ({"codec": "exact-k"}, [], "codec must be a table"),
        ({"codec": "exact-k"}, ["--codec.keep=2"], "codec.name"),
        ({"codec": {"name": [1]}}, [], "codec.name must be one of"),
        ({}, ["--model", "3", "--model.stages=2"], "was given as a value before"),
        ({"optimizer": {"betas": [1.5, 0.9]}}, [], "optimizer.betas"),
        ({"optimizer": {"learning_rate": 1e30}}, [], "optimizer.learning_rate"),
        ({"optimizer": {"learning_rate": float("inf")}}, [], "optimizer.learning_rate"),
        ({"codec": {"name": "exact-k", "hidden_dim": 9}}, [], "codec.hidden_dim"),
    ],
)
def test_odd_shapes_of_a_recipe_are_refused_in_one_line(tables, overrides, words):
    if words == "codec.name":  # the text is replaced by the table of the override, exact-k by default
        assert resolve(tables, overrides).codec.keep == 2
    else:
        assert words in refused(tables, *overrides)


def test_an_arm_that_is_no_table_is_refused():
    assert "arms.a must be a table" in refused({"arms": {"a": 3}}, arm="a")


def test_a_codec_setting_without_a_name_is_a_setting_of_exact_k():
    assert resolve({}, ["--codec.keep=5"]).codec.keep == 5


def test_another_number_of_stages_drops_boundaries_that_belong_to_the_old_one():
    raw = {"model": {"stages": 2, "boundaries": [5]}}
    assert resolve(raw).model.boundaries == (5,)
    assert resolve(raw, ["--model.stages=3"]).model.boundaries is None
    assert resolve(raw, ["--model.stages=2"]).model.boundaries == (5,)
    assert resolve(raw, ["--model.stages=3", "--model.boundaries=[1,3]"]).model.boundaries == (1, 3)


@pytest.mark.parametrize(
    ("override", "field"),
    [("--steps=true", "steps"), ("--codec.keep=true", "codec.keep"), ("--rl.clip_low=false", "rl.clip_low")],
)
def test_an_on_off_value_is_no_number(override, field):
    assert refused({}, override).startswith(f"{field} = {override.partition('=')[2]} is not valid")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("--learning_rate=1", "optimizer.learning_rate"),
        ("--group_sise=4", "sampling.group_size"),
        ("--model.keep=2", "codec.keep"),
        ("--cadence=5", "anchor.cadence"),
    ],
)
def test_a_key_of_another_table_is_named_in_full(override, hint):
    assert f"did you mean {hint}?" in refused({}, override)


def test_text_settings_take_numbers_and_a_mistake_in_an_arm_names_it():
    assert resolve({}, ["--name=5"]).name == "5"
    raw = {"arms": {"a": {"codec": {"kep": 3}}}}
    assert refused(raw, arm="a").startswith("arm a: unknown key codec.kep")
    assert "arms must be tables" in refused({"arms": 3}, arm="a")
    assert "it has none" in refused({}, arm="a")


def test_a_very_deep_recipe_and_one_with_a_byte_order_mark(tmp_path):
    (tmp_path / "deep.toml").write_text("a = " + "[" * 20_000)
    with pytest.raises(UserError, match="too deep"):
        load_recipe(tmp_path / "deep.toml")
    (tmp_path / "mark.toml").write_bytes(b"\xef\xbb\xbfsteps = 3\n")
    assert load_recipe(tmp_path / "mark.toml").steps == 3


def test_a_name_never_leaves_the_folder_of_runs():
    assert new_out("../../esc") == Path("runs/esc-1")
    assert new_out("/") == Path("runs/run-1")
    assert new_out("a b/c") == Path("runs/a-b-c-1")


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(
    "key", ["rl.entropy_coefficient", "sampling.temperature", "optimizer.learning_rate", "sampling.top_p"]
)
def test_numbers_that_are_not_finite_are_refused(key, value):
    assert refused({}, f"--{key}={value}").startswith(f"{key} = {value} is not valid")


def test_a_rule_over_two_keys_and_a_switch_say_what_is_wrong_and_nothing_else():
    line = refused({"sampling": {"min_new_tokens": 99, "max_new_tokens": 5}})
    assert line.startswith("sampling.min_new_tokens must be in 0..5")
    assert "Value error" not in line
    line = refused({"controller": {"on": "maybe"}})
    assert line == "controller.on = 'maybe' is not valid: it is true or false"
