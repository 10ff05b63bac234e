"""The contract of a codec: encode -> payload -> decode with an adjoint, drawn from explicit keys.

A codec is a frozen value. Its randomness comes from `draw`, a pure function of keys; its learned state
comes from an anchor's statistics through `learn`; it keeps nothing between calls, so recomputation,
micro-batch order and padding cannot change what it sends. Add a codec by writing one file like
`exact_k.py` and adding its class to `CODECS` in `codecs/__init__.py`; the contract suite tests it.

Letters: N tokens (any leading shape), D hidden size, K values sent per token, B bytes of a token.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, Self

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from thinwire.codecs.packing import Field, Sent, bytes_per_token, pack_fields, unpack_fields
from thinwire.core.keys import TokenKeys

Direction = Literal["forward", "backward"]
"""Hidden states go forward, their gradients backward."""

PAYLOAD_DTYPE = torch.bfloat16
"""What a value is on the wire, whatever the compute type: 16 bits."""


@dataclass(frozen=True)
class Moments:
    """What an anchor saw at one boundary: token count, sum of h (D,), sum of h h^T (D, D), fp32."""

    num_tokens: int
    sum_D: Tensor
    second_DD: Tensor


@dataclass(frozen=True)
class CodecState:
    """What a codec has learned at one boundary: named tensors and the version that published them.

    Computed at one end and sent, never recomputed at the other: eigh and QR differ in the last bit
    between machines. Empty for codecs that learn nothing.
    """

    version: int
    tensors: dict[str, Tensor]

    def fingerprint(self) -> str:
        """sha256 over version, names, types, shapes and bytes of the learned tensors."""
        digest = hashlib.sha256(str(self.version).encode())
        for name in sorted(self.tensors):
            tensor = self.tensors[name].detach().cpu().contiguous()
            digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def to(self, device: torch.device) -> "CodecState":
        """The same state with its tensors on a device: kept on the CPU, moved once a step by `publish`."""
        return CodecState(self.version, {name: tensor.to(device) for name, tensor in self.tensors.items()})

    def num_bytes(self) -> int:
        """Bytes of the side channel when this state is published once across its boundary: all tensors but
        those named own_*, which only the end that computed them needs."""
        sent = (tensor for name, tensor in self.tensors.items() if not name.startswith("own_"))
        return sum(tensor.numel() * tensor.element_size() for tensor in sent)


@dataclass(frozen=True)
class Payload:
    """What really crosses a boundary: one fixed-size uint8 buffer, and the facts that must agree.

    `buffer_NB` holds B = bits / 8 bytes for each token, in both directions. `fingerprint` names the codec and
    its settings, `version` the learned state; a receiver with others refuses the buffer instead of
    misreading it.
    """

    buffer_NB: Tensor
    fingerprint: str
    version: int
    direction: Direction = "forward"


class Codec(BaseModel, ABC):
    """One codec with its settings. `hidden_dim` 0 means not yet bound to a width: see `at_width`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    hidden_dim: int = 0
    """Width D of the hidden states; filled in from the model."""

    @abstractmethod
    def at_width(self, hidden_dim: int) -> Self:
        """The same codec bound to width D, its defaults resolved; UserError if a setting does not fit."""

    def draw(self, keys: TokenKeys, boundary: int) -> Tensor | None:
        """The keyed random part for every token, computed once a step and shared by all its passes."""
        return None

    @abstractmethod
    def layout(self, dtype: torch.dtype) -> tuple[Field, ...]:
        """The fields of one token's forward payload, for hidden states of `dtype`."""

    @abstractmethod
    def encode(self, hidden_ND: Tensor, draw: Tensor | None, state: CodecState) -> Sent:
        """What is sent forward: one tensor (N, num) a field of `layout`, rounded to what the field holds."""

    @abstractmethod
    def decode(self, sent: Sent, draw: Tensor | None, state: CodecState) -> Tensor:
        """The hidden states (N, D) in fp32 that the next stage reads out of what was sent."""

    def gradient_layout(self, dtype: torch.dtype) -> tuple[Field, ...]:
        """The fields of one token's backward payload; on the wire the shorter layout is padded."""
        return self.layout(dtype)

    def encode_gradient(self, gradient_ND: Tensor, draw: Tensor | None, state: CodecState) -> Sent:
        """What is sent backward. Default: the map is symmetric (its own adjoint), as all linear reference
        codecs are: <C x, y> = <x, C y>."""
        return self.encode(gradient_ND, draw, state)

    def decode_gradient(self, sent: Sent, draw: Tensor | None, state: CodecState) -> Tensor:
        """dL/dh of the sending stage (N, D) out of what was sent backward."""
        return self.decode(sent, draw, state)

    @property
    def is_linear(self) -> bool:
        """Whether the map of a given draw is linear up to rounding and the backward map its adjoint."""
        return True

    @property
    def unbiased(self) -> frozenset[Direction]:
        """The directions in which the mean over keys is what was encoded, up to the payload's rounding."""
        return frozenset()

    def initial_state(self, seed: int, boundary: int) -> CodecState:
        """The state before any anchor has fired (version 0)."""
        return CodecState(0, {})

    def learn(
        self,
        state: CodecState,
        moments: Moments,
        version: int,
        gradient_moments: Moments | None = None,
    ) -> CodecState:
        """The next state from an anchor's statistics; codecs without learned state return theirs.

        `gradient_moments`: the same of dL/dh, for codecs that learn from gradients.
        """
        return state

    @property
    def learns(self) -> bool:
        """Whether an anchor's statistics change this codec."""
        return False

    @property
    def learns_from_gradients(self) -> bool:
        """Whether the anchor needs a backward pass to teach this codec."""
        return False

    @property
    def can_change_bits(self) -> bool:
        """Whether `with_bits` may be used between steps: not where the budget is part of what was learned."""
        return False

    def with_bits(self, bits_per_value: float) -> Self:
        """This codec, bound to a width, at another wire budget; ValueError where it cannot change."""
        raise ValueError(f"codec.bits_per_value of {self.name} cannot change between steps")

    def wire_bits(self, dtype: torch.dtype) -> int:
        """Bits a token a boundary in each direction, whole bytes, for hidden states of `dtype`."""
        return 8 * max(bytes_per_token(self.layout(dtype)), bytes_per_token(self.gradient_layout(dtype)))

    def wire_bits_per_value(self, dtype: torch.dtype) -> float:
        """Wire bits over the D values of a hidden state."""
        return self.wire_bits(dtype) / self.hidden_dim

    def fingerprint(self) -> str:
        """sha256 of the codec's name and settings: equal at both ends or nothing is decoded."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()[:16]

    def pack(
        self, sent: Sent, state: CodecState, dtype: torch.dtype, direction: Direction = "forward"
    ) -> Payload:
        """What is sent as bytes, the fields side by side: uint8 (N, B). `dtype`: of the hidden states."""
        buffer_NB = pack_fields(self.fields(dtype, direction, state), sent, self.wire_bits(dtype) // 8)
        return Payload(buffer_NB, self.fingerprint(), state.version, direction)

    def unpack(self, payload: Payload, state: CodecState, dtype: torch.dtype) -> Sent:
        """What was sent out of the bytes; ValueError for another codec, version or a cut buffer."""
        if payload.fingerprint != self.fingerprint():
            raise ValueError(
                f"payload of codec {payload.fingerprint} refused: this end runs {self.fingerprint()}"
            )
        if payload.version != state.version:
            raise ValueError(
                f"payload of state version {payload.version} refused: this end holds {state.version}"
            )
        num_bytes = self.wire_bits(dtype) // 8
        if payload.buffer_NB.dtype != torch.uint8 or payload.buffer_NB.shape[-1] != num_bytes:
            raise ValueError(
                f"payload must hold {num_bytes} bytes a token, got "
                f"{payload.buffer_NB.shape[-1]} of {payload.buffer_NB.dtype}"
            )
        return unpack_fields(self.fields(dtype, payload.direction, state), payload.buffer_NB)

    def fields(self, dtype: torch.dtype, direction: Direction, state: CodecState) -> tuple[Field, ...]:
        """The fields of a payload under a learned state: `layout`, unless the state says how it is cut."""
        return self.layout(dtype) if direction == "forward" else self.gradient_layout(dtype)
