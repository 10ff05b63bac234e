"""Builds the embedded tiny model: a character-level Llama, warm-started on two-digit sums.

    python tools/build_tiny_model.py --out DIR

The model sees every sum and difference of two two-digit numbers except the held-out validation set of the
arithmetic task, and training stops as soon as greedy accuracy on that set is in the wanted range: a start
that can still learn. The same seed on the same machine and library versions gives the same weights.

Shapes: P problems, T token positions (prompt 7, answer 4), V vocabulary.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, processors
from tokenizers.models import BPE
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from thinwire.tasks.arithmetic import Sum, held_out_sums, operand_range, to_problem

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNK = range(4)
CHARACTERS = "0123456789+-= "
EXPRESSION = "{a}{operator}{b}="
NUM_VALIDATION = 512
NUM_PROMPT, NUM_ANSWER = 7, 4  # <bos>12+34= and at most "198<eos>" or "-89<eos>"
IGNORE = -100
WARM_UP_STEPS, EVALUATION_STEPS = 50, 10
INITIALIZER_RANGE = 0.08
"""About 1 / sqrt(width). The library's 0.02 (batch 256, learning rate 1e-3) took three times the computing to
the same accuracy, and plain GRPO at learning rate 2e-4 fell to 0.01 from there (one run); here it learns."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, <bos> put first, nothing put last; unknown characters become <unk>."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    core = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )


def build_model(seed: int) -> LlamaForCausalLM:
    """8 blocks of width 128 with 4 heads, fp32, about 1.6 million parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config.pad_token_id = PAD
    return model


def split_sums() -> tuple[list[Sum], list[Sum]]:
    """(training, held out): all 16,200 two-digit sums; the task's validation set is held out."""
    held_out = held_out_sums(2, "+-", NUM_VALIDATION)
    everything = {Sum(a, o, b) for a in operand_range(2) for b in operand_range(2) for o in "+-"}
    return sorted(everything - set(held_out)), held_out


def encode_sums(sums: list[Sum], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Token ids and labels, (P, 11) each: prompt, answer, <eos>, padding; labels on answer and <eos> only."""
    ids_PT = torch.full((len(sums), NUM_PROMPT + NUM_ANSWER), PAD)
    labels_PT = torch.full_like(ids_PT, IGNORE)
    for row, value in enumerate(sums):
        problem = to_problem(value, EXPRESSION)
        prompt = tokenizer(problem.text).input_ids
        answer = [*tokenizer(problem.answer, add_special_tokens=False).input_ids, EOS]
        assert len(prompt) == NUM_PROMPT
        assert len(answer) <= NUM_ANSWER
        end = NUM_PROMPT + len(answer)
        ids_PT[row, :end] = torch.tensor(prompt + answer)
        labels_PT[row, NUM_PROMPT:end] = torch.tensor(answer)
    return ids_PT, labels_PT


def answer_loss(model: LlamaForCausalLM, ids_PT: Tensor, labels_PT: Tensor) -> Tensor:
    """Mean cross-entropy over answer tokens, <eos> included."""
    logits_PTV = model(input_ids=ids_PT[:, :-1], use_cache=False).logits[:, NUM_PROMPT - 1 :]
    labels = labels_PT[:, NUM_PROMPT:].reshape(-1)
    return torch.nn.functional.cross_entropy(logits_PTV.flatten(0, 1), labels, ignore_index=IGNORE)


@torch.no_grad()
def greedy_accuracy(model: LlamaForCausalLM, ids_PT: Tensor, labels_PT: Tensor) -> float:
    """Share of problems whose greedy answer is right.

    Greedy decoding gives the gold answer exactly when the largest logit is the gold token at every answer
    position after the gold prefix, so one teacher-forced pass measures it.
    """
    logits_PTV = model(input_ids=ids_PT[:, :-1], use_cache=False).logits[:, NUM_PROMPT - 1 :]
    labels_PR = labels_PT[:, NUM_PROMPT:]
    right_PR = (logits_PTV.argmax(-1) == labels_PR) | (labels_PR == IGNORE)
    return right_PR.all(-1).double().mean().item()


@torch.no_grad()
def sampled_scores(model: LlamaForCausalLM, ids_PT: Tensor, labels_PT: Tensor, group: int) -> Tensor:
    """Score (0 or 1) of `group` answers a problem at temperature 1, (P, group)."""
    generator = torch.Generator().manual_seed(0)
    rows = ids_PT[:, :NUM_PROMPT].repeat_interleave(group, 0)
    for _ in range(NUM_ANSWER):
        probabilities_PV = model(input_ids=rows, use_cache=False).logits[:, -1].softmax(-1)
        rows = torch.cat([rows, torch.multinomial(probabilities_PV, 1, generator=generator)], 1)
    gold = labels_PT[:, NUM_PROMPT:].repeat_interleave(group, 0)
    right = ((rows[:, NUM_PROMPT:] == gold) | (gold == IGNORE)).all(-1)
    return right.double().reshape(-1, group)


def supervised_step_(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, lr: float, batch: tuple[Tensor, Tensor]
) -> float:
    """One AdamW step at `lr`, gradient norm clipped at 1; returns the loss before it."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss = answer_loss(model, *batch)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def warm_start_(
    model: LlamaForCausalLM,
    training: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
    arguments: argparse.Namespace,
) -> int:
    """Supervised steps until greedy validation accuracy reaches the target; returns their number."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.99), weight_decay=0.0)
    generator = torch.Generator().manual_seed(arguments.seed)
    started = time.monotonic()
    for step in range(1, arguments.max_steps + 1):
        rows = torch.randint(len(training[0]), (arguments.batch,), generator=generator)
        lr = arguments.lr * min(1.0, step / WARM_UP_STEPS)
        loss = supervised_step_(model, optimizer, lr, (training[0][rows], training[1][rows]))
        if step % EVALUATION_STEPS == 0:
            accuracy = greedy_accuracy(model, *validation)
            seconds = time.monotonic() - started
            print(
                f"step {step}: loss {loss:.4f}, greedy validation {accuracy:.4f}, {seconds:.0f} s", flush=True
            )
            if accuracy >= arguments.target:
                return step
    raise SystemExit(f"greedy accuracy {arguments.target} not reached in {arguments.max_steps} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model into")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-3, help="constant after 50 steps of warm-up")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--target", type=float, default=0.5, help="greedy validation accuracy to stop at")
    parser.add_argument("--max-steps", type=int, default=3000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    training_sums, held_out = split_sums()
    training, validation = encode_sums(training_sums, tokenizer), encode_sums(held_out, tokenizer)
    model = build_model(arguments.seed)
    print(
        f"{sum(p.numel() for p in model.parameters())} parameters; {len(training[0])} sums to train on, "
        f"{len(held_out)} held out",
        flush=True,
    )
    num_steps = warm_start_(model, training, validation, arguments)
    model.eval()
    scores = sampled_scores(model, *validation, group=8)
    mixed = (scores.amax(-1) > scores.amin(-1)).double().mean()
    print(
        f"after {num_steps} steps: greedy validation {greedy_accuracy(model, *validation):.4f}; "
        f"temperature 1, 8 samples: mean score {scores.mean():.4f}, mixed groups {mixed:.4f}"
    )
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
