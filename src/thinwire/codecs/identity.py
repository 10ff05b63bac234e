"""The codec of the dense control: everything is sent, in the compute type, unchanged."""

from typing import Literal, Self

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, CodecState


class Identity(Codec):
    """h~ = h bit for bit, so the dense control is the same program with this codec.

    Wire: D values of the compute type (16 bits in bf16, 32 in fp32) a token a boundary, each direction.
    """

    name: Literal["identity"] = "identity"

    def at_width(self, hidden_dim: int) -> Self:
        return self.model_copy(update={"hidden_dim": hidden_dim})

    def encode(self, hidden_ND: Tensor, draw: Tensor | None, state: CodecState) -> Tensor:
        return hidden_ND

    def decode(self, values_NK: Tensor, draw: Tensor | None, state: CodecState) -> Tensor:
        return values_NK

    def values_per_token(self) -> int:
        return self.hidden_dim

    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype
