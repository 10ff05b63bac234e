"""Bytes a step sends over all boundaries, from shapes and the codec's true bits."""

from dataclasses import dataclass

DENSE_BYTES_PER_VALUE = 2
"""What a dense bf16 pipeline sends a value."""


@dataclass(frozen=True)
class WireShape:
    """What sending a token costs: wire bits a token a boundary, the width and the boundaries."""

    bits_per_token: int
    hidden_dim: int
    num_boundaries: int


def wire_bytes(
    shape: WireShape,
    forward_tokens: int,
    backward_tokens: int,
    anchor_tokens: int,
    probe_tokens: int,
    side_channel_bytes: int,
) -> dict[str, float]:
    """wire/* of one step, in bytes; tokens count padding, once per pass that sends them.

    forward = boundaries x bits / 8 x tokens over the old, reference and training passes; backward the
    same over training backward passes; anchor and probe = boundaries x 2 D x tokens, codec off; dense =
    what forward and backward would cost at 2 bytes a value. Not covered: framing of a transport.
    """
    per_token = shape.num_boundaries * shape.bits_per_token / 8
    dense_token = shape.num_boundaries * shape.hidden_dim * DENSE_BYTES_PER_VALUE
    return {
        "wire/forward_bytes": forward_tokens * per_token,
        "wire/backward_bytes": backward_tokens * per_token,
        "wire/anchor_bytes": float(anchor_tokens * dense_token),
        "wire/probe_bytes": float(probe_tokens * dense_token),
        "wire/side_channel_bytes": float(side_channel_bytes),
        "wire/dense_bytes": float((forward_tokens + backward_tokens) * dense_token),
        "wire/bits_per_value": shape.bits_per_token / shape.hidden_dim,
    }
