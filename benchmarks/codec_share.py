"""Share of a training step that the codec takes: its draw, and encode and decode forward and backward.

A random Llama-shaped model of the width asked for (576 as SmolLM2-135M, 1536 as Qwen2.5-1.5B) with 4 decoder
layers and one boundary in the middle: 4 layers a boundary, as 28 or 30 layers in 8 stages have. The
package's own engine runs the passes of one step through one View: old, reference, training forward and
backward, then AdamW. All that would only dilute the codec is left out, so the share is an upper bound: the
vocabulary has 64 tokens (no head to speak of), nothing is sampled, and `share` is of the passes alone, the
optimizer apart. `share_of_step` counts the optimizer too.

Codecs take turns step by step on the same weights, in another order each turn. The codec's seconds are
measured inside the step, around its draw, encode and decode (backward calls them too). `added` is what the
whole step says: passes with the codec minus passes with identity of the same turn, over the former. All
seconds are CPU seconds of this process unless named otherwise. `draw` compares the keyed permutation prefix
with hashing all D channels and sorting the hashes, for the same tokens. One JSON object on standard output.

    python benchmarks/codec_share.py [--widths 576 1536] [--rows 4] [--row-tokens 64] [--dtype float32]
"""

# Letters: B rows, T positions, D hidden size, K channels kept.

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from thinwire.codecs import Codec, ExactK, Identity, Subspace, publish
from thinwire.core.keys import Stream, TokenKeys, permutation_prefix, words
from thinwire.engines.base import Reading, UpdateSettings
from thinwire.engines.batch import Batch
from thinwire.engines.local import LocalEngine, PassConfig
from thinwire.engines.optimizer import AdamWConfig

GOAL = 0.1
PARTS = ("draw", "encode", "decode")
SHAPES: dict[int, dict[str, int]] = {
    576: {"intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
    1536: {"intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2},
}
"""Decoder layers of SmolLM2-135M and Qwen2.5-1.5B."""
CODECS: dict[str, Codec] = {"identity": Identity(), "exact-k": ExactK(), "subspace": Subspace()}


def make_engine(width: int, dtype: torch.dtype) -> LocalEngine:
    """Four random layers in two stages of the package's one-process engine."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=4,
        vocab_size=64,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        **SHAPES[width],
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    return LocalEngine(model, 2, None, AdamWConfig(), PassConfig(), has_snapshot=False)


def make_batch(num_rows: int, row_tokens: int) -> Batch:
    """Random full rows, half prompt and half response."""
    num_prompt = row_tokens // 2
    num_response = row_tokens - num_prompt
    return Batch(
        torch.randint(64, (num_rows, row_tokens)),
        torch.full((num_rows,), num_prompt),
        torch.full((num_rows,), num_response),
        torch.arange(num_rows),
        torch.zeros(num_rows, num_response),
        torch.randn(num_rows),
    )


class CodecClock:
    """CPU seconds spent in draw, encode and decode of every codec since the last `take`."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        for codec in CODECS.values():
            for part in PARTS:
                setattr(type(codec), part, self._timed(part, getattr(type(codec), part)))

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                self._seconds[part] += time.process_time() - start

        return timed

    def take(self) -> dict[str, float]:
        taken, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return taken


def policy_gradient(index: int, batch: Batch, reading: Reading) -> Tensor:
    """A loss with a gradient at every response token; its own cost is nothing beside the passes."""
    return -(reading.logprob_BR * batch.advantage_B[:, None]).mean()


def run_step(
    engine: LocalEngine, codec: Codec, batch: Batch, step: int, clock: CodecClock
) -> dict[str, float]:
    """Old, reference and training pass through one View, then the optimizer: CPU seconds of each part."""
    states = [codec.initial_state(0, boundary) for boundary in range(engine.num_boundaries)]
    view = publish(codec, states, seed=0, step=step)
    clock.take()
    start, wall = time.process_time(), time.perf_counter()
    engine.forward([batch], view)
    engine.forward([batch], view, "reference")
    engine.train_step([batch], view, policy_gradient)
    passes, wall = time.process_time() - start, time.perf_counter() - wall
    parts = clock.take()
    start = time.process_time()
    engine.apply_update(UpdateSettings(learning_rate=1e-6, grad_clip=1.0))
    update = time.process_time() - start
    return parts | {"passes": passes, "update": update, "passes_wall": wall}


def measure_width(width: int, arguments: argparse.Namespace, clock: CodecClock) -> dict[str, Any]:
    """All codecs at one width, taking turns after one warm-up turn, and the draw against a sort."""
    engine = make_engine(width, getattr(torch, arguments.dtype))
    batch = make_batch(arguments.rows, arguments.row_tokens)
    codecs = {name: codec.at_width(width) for name, codec in CODECS.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in codecs}
    names = list(codecs)
    for turn in range(arguments.turns + 1):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            seconds = run_step(engine, codecs[name], batch, turn + 1, clock)
            if turn > 0:
                found[name].append(seconds)
    shares = {name: share(found[name], found["identity"]) for name in names if name != "identity"}
    kept = codecs["exact-k"].wire_bits(torch.bfloat16) // 16
    return {
        "values_per_token": kept,
        "identity": {key: median(one[key] for one in found["identity"]) for key in found["identity"][0]},
        **shares,
        "draw": draw_against_sort(batch, width, kept, arguments.turns),
    }


def share(codec: Sequence[dict[str, float]], identity: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Median seconds of each part, and the codec's share of the same step: median and quartiles."""
    spent = [sum(one[part] for part in PARTS) for one in codec]
    of_passes = [own / one["passes"] for own, one in zip(spent, codec, strict=True)]
    of_step = [own / (one["passes"] + one["update"]) for own, one in zip(spent, codec, strict=True)]
    added = [1 - base["passes"] / one["passes"] for one, base in zip(codec, identity, strict=True)]
    low, middle, high = quantiles(of_passes, n=4, method="inclusive")
    return {
        **{key: median(one[key] for one in codec) for key in codec[0]},
        "share": middle,
        "share_quartiles": [low, high],
        "share_of_step": median(of_step),
        "added": median(added),
        "added_quartiles": quantiles(added, n=4, method="inclusive")[::2],
        "goal_met": middle < GOAL,
    }


def draw_against_sort(batch: Batch, width: int, kept: int, turns: int) -> dict[str, float]:
    """CPU seconds of K distinct channels of D for every token: by permutation prefix, or by sorted hashes."""
    position_T = torch.arange(batch.input_ids_BT.shape[1])
    seconds: dict[str, list[float]] = {"prefix": [], "hash": [], "sort": []}
    for turn in range(turns + 1):
        keys = TokenKeys(0, turn, batch.sample_B[:, None], position_T[None])
        stamps = [time.process_time()]
        permutation_prefix(keys, Stream.ACTIVATION_MASK, 0, width, kept)
        stamps.append(time.process_time())
        hash_BTD = words(keys, Stream.ACTIVATION_MASK, 0, width)
        stamps.append(time.process_time())
        hash_BTD.argsort(dim=-1)[..., :kept].contiguous()
        stamps.append(time.process_time())
        if turn > 0:
            for name, start, end in zip(seconds, stamps, stamps[1:], strict=False):
                seconds[name].append(end - start)
    middle = {name: median(values) for name, values in seconds.items()}
    return middle | {
        "prefix_to_sort": middle["prefix"] / middle["sort"],
        "prefix_to_hash_and_sort": middle["prefix"] / (middle["hash"] + middle["sort"]),
    }


def main() -> None:
    """Parse, measure each width, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--row-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = CodecClock()
    widths = {str(width): measure_width(width, arguments, clock) for width in arguments.widths}
    setting = {key: value for key, value in vars(arguments).items() if key != "widths"}
    print(json.dumps(setting | {"layers_per_boundary": 4, "goal": GOAL, "widths": widths}, indent=1))


if __name__ == "__main__":
    main()
