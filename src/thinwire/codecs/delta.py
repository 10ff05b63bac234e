"""Coding of what changed since a prefix was last seen (AQ-SGD). A codec with memory, so not one of CODECS.

Source: Wang et al., "Fine-tuning language models over slow networks using activation compression with
guarantees", NeurIPS 2022. Letters: B rows, T positions, N tokens, D hidden size, M remembered prefixes.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire.codecs.base import PAYLOAD_DTYPE, Codec, CodecState
from thinwire.codecs.packing import saturated

FirstVisit = Literal["dense", "codec"]
"""How a prefix without memory is sent: all D values in bf16, as AQ-SGD does, or through the codec."""


@dataclass(frozen=True)
class DeltaMemory:
    """What both ends of one boundary remember: the last decoded hidden state of every prefix seen.

    `key_M` ascends. A causal model's hidden state depends on the whole prefix, so that is what a key names:
    see `prefix_keys`.
    """

    key_M: Tensor
    hidden_MD: Tensor

    @staticmethod
    def empty(hidden_dim: int, dtype: torch.dtype = PAYLOAD_DTYPE) -> "DeltaMemory":
        """Nothing seen yet; hidden states will be kept in `dtype`."""
        return DeltaMemory(torch.zeros(0, dtype=torch.int64), torch.zeros(0, hidden_dim, dtype=dtype))

    def num_bytes(self) -> int:
        """Bytes at EACH end of the boundary: M (8 + 2 D) in bf16; M has no bound where text never repeats."""
        return sum(t.numel() * t.element_size() for t in (self.key_M, self.hidden_MD))

    def seen(self, key_N: Tensor) -> Tensor:
        """Which tokens have a remembered prefix."""
        if self.key_M.numel() == 0:
            return torch.zeros_like(key_N, dtype=torch.bool)
        slot_N = torch.searchsorted(self.key_M, key_N).clamp(max=self.key_M.numel() - 1)
        return self.key_M[slot_N] == key_N

    def hit_rate(self, key_N: Tensor) -> float:
        """Share of tokens whose (prompt, prefix) was seen before; nan without tokens.

        On-policy text is sampled afresh, so a response's prefix repeats only while it is short and likely: a
        fixed corpus reads 1 from the second epoch on, RL reads the share of prompt tokens that come again.
        """
        return float(self.seen(key_N).double().mean())

    def recall(self, key_N: Tensor) -> Tensor:
        """The remembered hidden states (N, D) in fp32, zero where there is none."""
        seen_N = self.seen(key_N)
        recalled_ND = torch.zeros(*key_N.shape, self.hidden_MD.shape[-1], device=self.hidden_MD.device)
        recalled_ND[seen_N] = self.hidden_MD[torch.searchsorted(self.key_M, key_N[seen_N])].float()
        return recalled_ND

    def remember(self, key_N: Tensor, decoded_ND: Tensor) -> "DeltaMemory":
        """The memory after these tokens; of equal keys the last token's state stays."""
        key_C = torch.cat((self.key_M, key_N.reshape(-1)))
        hidden_CD = torch.cat((self.hidden_MD, decoded_ND.reshape(key_N.numel(), decoded_ND.shape[-1])))
        sorted_C, order_C = torch.sort(key_C, stable=True)
        last_C = torch.ones_like(sorted_C, dtype=torch.bool)
        last_C[:-1] = sorted_C[1:] != sorted_C[:-1]
        return DeltaMemory(sorted_C[last_C], hidden_CD[order_C[last_C]])


def delta_cross(
    codec: Codec,
    memory: DeltaMemory,
    hidden_ND: Tensor,
    key_N: Tensor,
    draw: Tensor | None,
    state: CodecState,
    first_visit: FirstVisit = "dense",
) -> tuple[Tensor, DeltaMemory]:
    """h~ = m + C(h - m) where the prefix has a memory m, then m <- h~, rounded to the memory's type.

    First visit: h itself in that type, or C(h) with "codec". If C is contractive, that is
    E||C(x) - x||^2 <= a ||x||^2 with a < 1, and h stands still, the error falls by a at every visit; an
    unbiased mask at 5% has a = 19 and makes it grow, so C should be a rounding of all channels.
    Forward only: AQ-SGD sends gradients through C alone, without memory. A pure function: all passes of a
    step take the memory from before the step, else old and new log-probabilities would differ at ratio 1.
    Wire: see `delta_wire_bits`. Memory: `DeltaMemory.num_bytes` at each end of each boundary.
    """
    recalled_ND = memory.recall(key_N)
    change_ND = hidden_ND.float() - recalled_ND
    decoded_ND = recalled_ND + codec.decode(codec.encode(change_ND, draw, state), draw, state)
    if first_visit == "dense":
        decoded_ND = torch.where(memory.seen(key_N)[..., None], decoded_ND, hidden_ND.float())
    kept_ND = saturated(decoded_ND, memory.hidden_MD.dtype)
    return saturated(kept_ND.float(), hidden_ND.dtype), memory.remember(key_N, kept_ND)


def delta_wire_bits(
    codec: Codec, num_seen: int, num_new: int, dtype: torch.dtype, first_visit: FirstVisit = "dense"
) -> int:
    """Bits forward: the codec's for seen tokens, 16 D ("dense") or the codec's for new ones. Both ends hold
    the token ids and thus know which is which."""
    new_bits = 16 * codec.hidden_dim if first_visit == "dense" else codec.wire_bits(dtype)
    return num_seen * codec.wire_bits(dtype) + num_new * new_bits


def prefix_keys(ids_BT: Tensor) -> Tensor:
    """A 64-bit key of ids[:, :t + 1] for every position, int64 (B, T): equal rows up to t have equal keys.

    Each id is folded into the key of the prefix before it by an invertible mix of 64 bits; two of M different
    prefixes collide with chance about M^2 / 2^65 (3e-4 at 1e8). Padding gets keys too: leave it out.
    """
    key_B = torch.full(ids_BT.shape[:1], _SEED, dtype=torch.int64, device=ids_BT.device)
    keys = []
    for ids_B in ids_BT.unbind(1):
        key_B = _mixed((key_B ^ ids_B.to(torch.int64)) * _ODD_1 + _SEED)
        keys.append(key_B)
    return torch.stack(keys, 1) if keys else ids_BT.to(torch.int64)


# Odd constants near 2^64 / golden ratio and from its multiples: any odd multiplier is invertible mod 2^64.
_SEED, _ODD_1, _ODD_2 = 0x1E3779B97F4A7C15, 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D


def _mixed(key_B: Tensor) -> Tensor:
    """Multiply and shift, twice, in wrapping int64: every bit of the key reaches every other."""
    for shift in (29, 32):
        key_B = (key_B ^ ((key_B >> shift) & ((1 << (64 - shift)) - 1))) * _ODD_2
    return key_B ^ ((key_B >> 31) & ((1 << 33) - 1))
