"""What a bench measures and how often."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire.codecs import Codec, CodecState, Moments

DEFAULT_FIRES = 16
"""Fires of `learn` on the same moments, each from the last one's state."""
DEFAULT_DRAWS = 4
DEFAULT_CADENCE = 20
DEFAULT_SEED = 42
Say = Callable[[str], None]
"""Takes a line of progress."""


@dataclass(frozen=True)
class Entry:
    """A codec to measure, bound to the model's width, under the name it was asked for."""

    label: str
    codec: Codec


@dataclass(frozen=True)
class Plan:
    """The codecs, and what their readings depend on besides tokens and statistics."""

    entries: Sequence[Entry]
    sweep: Sequence[Entry] = ()
    """Codecs at other budgets, of which only gap, KL, entropy and bits are read, from one draw."""
    fires: int = DEFAULT_FIRES
    draws: int = DEFAULT_DRAWS
    """Steps' draws of a codec that draws; one that does not has one."""
    seed: int = DEFAULT_SEED
    cadence: int = DEFAULT_CADENCE
    tokens_per_step: int | None = None
    """Tokens of one step for the side channel; default 256 rollouts of the scored ones' mean length."""


def learn_state(
    codec: Codec, boundary: int, forward: Moments, backward: Moments, fires: int, seed: int
) -> CodecState:
    """A boundary's state after `fires` fires on the same moments, versions 1..fires."""
    state = codec.initial_state(seed, boundary)
    for version in range(1, fires + 1):
        state = codec.learn(state, forward, version, backward)
    return state
