"""The codec of the dense control: everything is sent, in the compute type, unchanged."""

from typing import Literal, Self

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, CodecState, Direction
from thinwire.codecs.packing import Field, Sent, floats


class Identity(Codec):
    """h~ = h bit for bit, so the dense control is the same program with this codec.

    Wire: D values of the compute type (16 bits in bf16, 32 in fp32) a token a boundary, each direction.
    """

    name: Literal["identity"] = "identity"

    def at_width(self, hidden_dim: int) -> Self:
        return self.model_copy(update={"hidden_dim": hidden_dim})

    def layout(self, dtype: torch.dtype) -> tuple[Field, ...]:
        return (floats(self.hidden_dim, dtype),)

    def encode(self, hidden_ND: Tensor, draw: Tensor | None, state: CodecState) -> Sent:
        return (hidden_ND,)

    def decode(self, sent: Sent, draw: Tensor | None, state: CodecState) -> Tensor:
        return sent[0]

    @property
    def unbiased(self) -> frozenset[Direction]:
        return frozenset(("forward", "backward"))
