"""The embedded tiny model: what it is, what it scores, and what its tokenizer does with any text."""

import importlib.util
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import thinwire.models
from thinwire.tasks import TaskConfig, encode_prompt, make_reward, make_task
from thinwire.tasks.arithmetic import Sum, operand_range, to_problem

TINY = Path(thinwire.models.__file__).parent / "tiny"
BOS, EOS, UNK = 1, 2, 3
BUILDER = Path(__file__).parents[2] / "tools" / "build_tiny_model.py"


@pytest.fixture(scope="module")
def builder():
    """The script that made the model, as a module."""
    spec = importlib.util.spec_from_file_location("build_tiny_model", BUILDER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(TINY).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def test_it_is_a_llama_of_8_blocks_and_width_128_in_float32(model):
    assert isinstance(model, LlamaForCausalLM)
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (8, 128, 4)
    assert not config.tie_word_embeddings
    assert 1.5e6 < sum(p.numel() for p in model.parameters()) < 1.7e6
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_its_weights_are_finite_untied_safetensors_below_8_megabytes():
    weights = load_file(TINY / "model.safetensors")
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 8e6
    assert all(torch.isfinite(weight).all() for weight in weights.values())
    assert not torch.equal(weights["model.embed_tokens.weight"], weights["lm_head.weight"])


def test_greedy_accuracy_on_the_held_out_sums_is_between_40_and_60_percent(model, tokenizer):
    """The default task's own validation set, prompts and reward; 4 tokens hold every answer and its <eos>."""
    config = TaskConfig()
    problems, reward = make_task(config, seed=1).validation(), make_reward(config.reward)
    assert len(problems) == 512
    prompts = torch.tensor([encode_prompt(tokenizer, problem, config) for problem in problems])
    output = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=4, do_sample=False
    )
    responses = tokenizer.batch_decode(output[:, prompts.shape[1] :], skip_special_tokens=True)
    scores = [reward(problem, response) for problem, response in zip(problems, responses, strict=True)]
    assert 0.40 <= sum(score.value for score in scores) / 512 <= 0.60
    assert all(score.parsed is not None for score in scores)
    wrong = [p for p, s in zip(problems, scores, strict=True) if s.value == 0]
    near = [
        p
        for p, r, s in zip(problems, responses, scores, strict=True)
        if s.value == 0 and abs(int(r) - int(p.answer)) <= 2
    ]
    assert len(near) >= 0.5 * len(wrong)  # near misses, which sampling can correct, are most of the errors


def test_every_prompt_has_7_tokens_and_every_answer_at_most_4(tokenizer):
    config = TaskConfig()
    corners = [Sum(a, o, b) for a in (10, 99) for b in (10, 99) for o in "+-"]
    assert (operand_range(2)[0], operand_range(2)[-1]) == (10, 99)
    for problem in (to_problem(value, config.expression) for value in corners):
        assert len(encode_prompt(tokenizer, problem, config)) == 7
        assert len(tokenizer(problem.answer, add_special_tokens=False).input_ids) + 1 <= 4


def test_the_tokenizer_gives_its_characters_back_without_spaces_put_in(tokenizer):
    alphabet = "0123456789+-= "
    generator = random.Random(0)
    for length in (0, 1, 2, 40):
        text = "".join(generator.choices(alphabet, k=length))
        ids = tokenizer(text).input_ids
        assert ids[0] == BOS
        assert len(ids) == 1 + length
        assert EOS not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_characters_outside_the_vocabulary_become_unknown_one_by_one(tokenizer):
    assert tokenizer("1x\u00e9\U0001f600\n=").input_ids[2:6] == [UNK] * 4
    assert tokenizer("1x=").input_ids == [BOS, *tokenizer.convert_tokens_to_ids(["1", "<unk>", "="])]


def test_padding_is_put_on_the_left_and_masked(tokenizer):
    batch = tokenizer(["1+2=", "10+20="], padding=True)
    assert batch.input_ids[0][:3] == [tokenizer.pad_token_id] * 2 + [BOS]
    assert batch.attention_mask[0] == [0, 0, 1, 1, 1, 1, 1]


def test_the_warm_start_never_saw_a_validation_problem(builder):
    training, held_out = builder.split_sums()
    assert len(training) + len(held_out) == 90 * 90 * 2
    assert not set(training) & set(held_out)
    config = TaskConfig()
    assert [to_problem(value, config.expression) for value in held_out] == make_task(config, 1).validation()


def test_the_script_still_builds_this_architecture_and_tokenizer(builder, model, tmp_path):
    fresh = builder.build_model(seed=1).state_dict()
    embedded = model.state_dict()
    assert {k: v.shape for k, v in fresh.items()} == {k: v.shape for k, v in embedded.items()}
    builder.build_tokenizer().save_pretrained(tmp_path)
    rebuilt, shipped = (json.loads((p / "tokenizer.json").read_text()) for p in (tmp_path, TINY))
    assert rebuilt == shipped


def test_the_scripts_teacher_forced_accuracy_is_that_of_greedy_decoding(builder, model, tokenizer):
    """64 problems; equality is exact unless two logits tie to the last bit."""
    _, held_out = builder.split_sums()
    ids, labels = builder.encode_sums(held_out[:64], tokenizer)
    prompts = ids[:, : builder.NUM_PROMPT]
    output = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=4, do_sample=False
    )
    responses = tokenizer.batch_decode(output[:, builder.NUM_PROMPT :], skip_special_tokens=True)
    answers = [to_problem(value, builder.EXPRESSION).answer for value in held_out[:64]]
    right = sum(r == a for r, a in zip(responses, answers, strict=True))
    assert builder.greedy_accuracy(model, ids, labels) == right / 64
