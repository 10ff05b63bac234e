"""What a codec costs: bits from real packed bytes, side channel, microseconds beside a decoder layer."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor

from thinwire.bench.passes import Dense, Subject
from thinwire.codecs import CodecState, View
from thinwire.codecs.base import Direction
from thinwire.models.stages import split

REPEATS = 9
TIMED_TOKENS = 512
"""Positions of the first micro-batch that are timed, whole rows, one at least."""


def wire_bits(view: View, dense: Dense) -> dict[str, float]:
    """Bits a token of every direction's payload: length of the packed bytes of boundary 0, times 8, over the
    positions they hold."""
    codec, state = view.codec, view.states[0]
    draw = view.draw(0, dense.batch.sample_B, dense.batch.input_ids_BT.shape[1])
    found: dict[str, float] = {}
    sides: tuple[tuple[Direction, Tensor, Callable[..., Any]], ...] = (
        ("forward", dense.hidden[0], codec.encode),
        ("backward", dense.gradient[0], codec.encode_gradient),
    )
    for direction, value_BTD, encode in sides:
        payload = codec.pack(encode(value_BTD, draw, state), state, value_BTD.dtype, direction)
        num_bytes = len(payload.buffer_NB.cpu().numpy().tobytes())
        found[direction] = 8 * num_bytes / value_BTD[..., 0].numel()
    return found


def side_channel(states: Sequence[CodecState], cadence: int, tokens_per_step: int) -> dict[str, float]:
    """Bits of the learned state, per boundary (mean) and fire, and per token that crosses between fires."""
    bits = (
        8 * sum(state.num_bytes() for state in states) / len(states) if any(s.version for s in states) else 0
    )
    return {"bits_a_fire": bits, "bits_per_token": bits / (cadence * tokens_per_step)}


def microseconds(subject: Subject, view: View, dense: Dense, repeats: int = REPEATS) -> dict[str, float]:
    """Median microseconds a position of the draw, encode and decode (both directions) and one decoder layer.

    One thread; the parts take turns, so that a disturbance of the machine meets all alike. The layer is the
    model's second block (with mask and rotary tables) in forward on the same hidden states. The draw is
    apart: a step computes it once for all of its passes.
    """
    value_BTD, gradient_BTD, sample_B = _timed_part(dense)
    keyed, state = view, view.states[0]
    codec, num_positions = view.codec, value_BTD.shape[1]
    layer = split(subject.model, _num_blocks(subject), verify=False).blocks[1]
    draw = keyed.draw(0, sample_B, num_positions)
    sent, sent_back = codec.encode(value_BTD, draw, state), codec.encode_gradient(gradient_BTD, draw, state)
    parts: dict[str, Callable[[], Any]] = {
        "layer": lambda: layer(value_BTD),
        "draw": lambda: View(codec, view.states, view.seed, view.step).draw(0, sample_B, num_positions),
        "encode": lambda: codec.encode(value_BTD, draw, state),
        "decode": lambda: codec.decode(sent, draw, state).to(value_BTD.dtype),
        "encode_gradient": lambda: codec.encode_gradient(gradient_BTD, draw, state),
        "decode_gradient": lambda: codec.decode_gradient(sent_back, draw, state).to(gradient_BTD.dtype),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    with _one_thread(), torch.no_grad():
        for turn in range(repeats + 1):
            for name, part in parts.items():
                start = time.perf_counter()
                part()
                _wait(value_BTD)
                if turn:  # the first turn warms up
                    seconds[name].append(time.perf_counter() - start)
    positions = value_BTD.shape[0] * value_BTD.shape[1]
    found = {name: 1e6 * median(times) / positions for name, times in seconds.items()}
    return found | {"share_of_layer": (found["encode"] + found["decode"]) / found["layer"]}


def _timed_part(dense: Dense) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = max(1, TIMED_TOKENS // dense.hidden[0].shape[1])
    return (
        dense.hidden[0][:num_rows].contiguous(),
        dense.gradient[0][:num_rows].contiguous(),
        dense.batch.sample_B[:num_rows],
    )


def _num_blocks(subject: Subject) -> int:
    decoder: Any = subject.model.model
    return len(decoder.layers)


def _wait(value: Tensor) -> None:
    if value.is_cuda:
        torch.cuda.synchronize(value.device)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
