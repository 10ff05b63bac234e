"""What the mask codecs share: K of D channels a token, each value 16 bits, their indices never sent.

Letters: N tokens, D hidden size, K channels kept.
"""

from typing import Self

import torch
from torch import Tensor

from thinwire.codecs.base import PAYLOAD_DTYPE, Codec, CodecState
from thinwire.codecs.budget import resolve_kept
from thinwire.codecs.draws import scatter_channels
from thinwire.codecs.packing import Field, Sent, floats


class KeptChannels(Codec):
    """A codec that sends K channels a token and decodes the others as zero; what is sent differs."""

    keep: int | None = None
    """K, channels sent per token, 1..D; default round(0.05 D)."""
    bits_per_value: float | None = None
    """Budget instead of keep: K = floor(bits_per_value D / 16)."""

    def at_width(self, hidden_dim: int) -> Self:
        keep = resolve_kept("codec.keep", self.keep, self.bits_per_value, hidden_dim)
        return self.model_copy(update={"hidden_dim": hidden_dim, "keep": keep, "bits_per_value": None})

    def layout(self, dtype: torch.dtype) -> tuple[Field, ...]:
        return (floats(self.values_per_token(), PAYLOAD_DTYPE),)

    def decode(self, sent: Sent, draw: Tensor | None, state: CodecState) -> Tensor:
        assert draw is not None
        return scatter_channels(sent[0], draw, self.hidden_dim)

    @property
    def can_change_bits(self) -> bool:
        return True

    def with_bits(self, bits_per_value: float) -> Self:
        keep = resolve_kept("codec.keep", None, bits_per_value, self.hidden_dim)
        return self.model_copy(update={"keep": keep})

    def values_per_token(self) -> int:
        """K."""
        assert self.keep is not None
        return self.keep
