"""Payloads as bytes: a token's fields side by side in one uint8 buffer of fixed size.

Letters: N any leading shape (tokens), V values of a field, B bytes of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Sent = tuple[Tensor, ...]
"""What a codec sends of N tokens: one tensor (N, V) a field of its layout, already rounded to what the field
can hold."""


@dataclass(frozen=True)
class Field:
    """One part of a token's payload: `num` values of `bits` bits.

    A floating `dtype` is sent as it is; torch.int32 holds unsigned codes in [0, 2^bits), 1 <= bits <= 16.
    """

    num: int
    dtype: torch.dtype
    bits: int


def floats(num: int, dtype: torch.dtype) -> Field:
    """`num` values sent in their own floating type."""
    return Field(num, dtype, dtype.itemsize * 8)


def codes(num: int, bits: int) -> Field:
    """`num` unsigned integers of `bits` bits each, int32 in memory."""
    if not 1 <= bits <= 16:
        raise ValueError(f"a code takes 1..16 bits, got {bits}")
    return Field(num, torch.int32, bits)


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` as `dtype`; what is beyond its range becomes its largest finite value, never inf."""
    limit = torch.finfo(dtype).max
    if torch.finfo(values.dtype).max > limit:
        values = values.clamp(-limit, limit)
    return values.to(dtype)


def bytes_per_token(layout: Sequence[Field]) -> int:
    """B: the sum of all fields' bits, rounded up to whole bytes once a token."""
    return (sum(field.num * field.bits for field in layout) + 7) // 8


def pack_fields(layout: Sequence[Field], sent: Sent, num_bytes: int) -> Tensor:
    """(N, num_bytes) uint8: floating fields, then one bit stream of all codes (lowest bit first), then zeros.

    ValueError where a field is not what the layout says.
    """
    if len(sent) != len(layout):
        raise ValueError(f"a payload of {len(layout)} fields got {len(sent)}")
    shape = sent[0].shape[:-1]
    for field, values in zip(layout, sent, strict=True):
        if values.shape != (*shape, field.num) or values.dtype != field.dtype:
            raise ValueError(
                f"a field of {field.num} values of {field.dtype} got {tuple(values.shape)} of {values.dtype}"
            )
    parts = [_bytes_of(values) for field, values in zip(layout, sent, strict=True) if _is_float(field)]
    streams = [
        _bits_of(values, field.bits)
        for field, values in zip(layout, sent, strict=True)
        if not _is_float(field)
    ]
    if streams:
        parts.append(_bits_to_bytes(torch.cat(streams, -1)))
    buffer_NB = torch.cat(parts, -1)
    return torch.nn.functional.pad(buffer_NB, (0, num_bytes - buffer_NB.shape[-1]))


def unpack_fields(layout: Sequence[Field], buffer_NB: Tensor) -> Sent:
    """The fields out of `pack_fields`' buffer, in the layout's order."""
    fields: dict[int, Tensor] = {}
    start = 0
    for index, field in enumerate(layout):
        if _is_float(field):
            end = start + field.num * field.dtype.itemsize
            raw_C = buffer_NB[..., start:end].reshape(-1).clone()  # clone: aligned to the wider type
            fields[index] = raw_C.view(field.dtype).reshape(*buffer_NB.shape[:-1], field.num)
            start = end
    num_bits = sum(field.num * field.bits for field in layout if not _is_float(field))
    if num_bits:
        bits_NC = _bytes_to_bits(buffer_NB[..., start : start + (num_bits + 7) // 8])
        at = 0
        for index, field in enumerate(layout):
            if not _is_float(field):
                width = field.num * field.bits
                fields[index] = _codes_of(bits_NC[..., at : at + width], field.bits)
                at += width
    return tuple(
        fields.get(index, buffer_NB.new_zeros((*buffer_NB.shape[:-1], field.num), dtype=field.dtype))
        for index, field in enumerate(layout)
    )


def _is_float(field: Field) -> bool:
    return field.dtype.is_floating_point


def _bytes_of(values_NV: Tensor) -> Tensor:
    num_bytes = values_NV.shape[-1] * values_NV.element_size()
    return values_NV.contiguous().reshape(-1).view(torch.uint8).reshape(*values_NV.shape[:-1], num_bytes)


def _bits_of(codes_NV: Tensor, bits: int) -> Tensor:
    """(N, V bits) of zeros and ones, uint8, lowest bit of each code first."""
    place_b = torch.arange(bits, dtype=torch.int32, device=codes_NV.device)
    if bits <= 8:
        codes_NV, place_b = codes_NV.to(torch.uint8), place_b.to(torch.uint8)
    return ((codes_NV[..., None] >> place_b) & 1).to(torch.uint8).flatten(-2)


def _codes_of(bits_NC: Tensor, bits: int) -> Tensor:
    bits_NVb = bits_NC.reshape(*bits_NC.shape[:-1], bits_NC.shape[-1] // bits, bits)
    codes_NV = bits_NVb[..., 0].to(torch.int32)
    for place in range(1, bits):
        codes_NV |= bits_NVb[..., place].to(torch.int32) << place
    return codes_NV


def _bits_to_bytes(bits_NC: Tensor) -> Tensor:
    padded_NC = torch.nn.functional.pad(bits_NC, (0, -bits_NC.shape[-1] % 8))
    bits_NB8 = padded_NC.reshape(*padded_NC.shape[:-1], padded_NC.shape[-1] // 8, 8)
    bytes_NB = bits_NB8[..., 0].clone()
    for place in range(1, 8):
        bytes_NB |= bits_NB8[..., place] << place
    return bytes_NB


def _bytes_to_bits(bytes_NB: Tensor) -> Tensor:
    place_8 = torch.arange(8, dtype=torch.uint8, device=bytes_NB.device)
    return ((bytes_NB[..., None] >> place_8) & 1).flatten(-2)
