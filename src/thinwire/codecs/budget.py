"""From a wire budget to how many values a codec sends, and the refusals that name the way out.

Letters: D hidden size, K values sent per token.
"""

import math
from bisect import bisect_right
from collections.abc import Callable

from thinwire.core.errors import UserError

REFERENCE_BUDGET = 0.05
"""Share of the channels the reference codecs send by default: 77 of 1536, 29 of 576, 6 of 128."""


def reference_kept(hidden_dim: int) -> int:
    """round(0.05 D), at least 1: the channels exact-k keeps; 16 bits each are every default budget."""
    return max(1, round(REFERENCE_BUDGET * hidden_dim))


def budget_bits(bits_per_value: float | None, hidden_dim: int) -> int:
    """Whole bytes a token, in bits: floor(bits_per_value D / 8) bytes, or exact-k's by default."""
    if bits_per_value is None:
        return 16 * reference_kept(hidden_dim)
    return 8 * int(bits_per_value * hidden_dim / 8 + 1e-9)


def resolve_kept(field: str, kept: int | None, bits_per_value: float | None, hidden_dim: int) -> int:
    """K of 16 bits out of `field`, or floor(bits_per_value D / 16), or round(0.05 D); checked against D."""
    refuse_both(field, kept, bits_per_value)
    if bits_per_value is not None:
        kept = int(bits_per_value * hidden_dim / 16 + 1e-9)
        if kept < 1:
            raise too_small(bits_per_value, hidden_dim, 16)
        field = f"codec.bits_per_value = {bits_per_value} gives {field}"
    if kept is None:
        kept = reference_kept(hidden_dim)
    return in_width(field, kept, hidden_dim)


def resolve_within(
    kept: int | None, bits_per_value: float | None, hidden_dim: int, bits_of: Callable[[int], int]
) -> int:
    """K out of codec.keep, or the most channels, at most D, whose `bits_of(K)` bits the budget holds."""
    refuse_both("codec.keep", kept, bits_per_value)
    if kept is not None:
        return in_width("codec.keep", kept, hidden_dim)
    budget = budget_bits(bits_per_value, hidden_dim)
    kept = bisect_right(range(hidden_dim + 1), budget, lo=1, key=bits_of) - 1
    if kept < 1:
        raise too_small(bits_per_value, hidden_dim, bits_of(1))
    return kept


def in_width(field: str, value: int, hidden_dim: int, low: int = 1) -> int:
    """`value` in low..D, or UserError."""
    if not low <= value <= hidden_dim:
        raise UserError(
            f"{field} must be in {low}..{hidden_dim} (the hidden size), got {value}; "
            f"set {field.split()[-1]} = {hidden_dim} to send everything"
        )
    return value


def in_range(field: str, value: int, low: int, high: int) -> int:
    """`value` in low..high, or UserError."""
    if not low <= value <= high:
        raise UserError(f"{field} must be in {low}..{high}, got {value}")
    return value


def refuse_both(field: str, kept: int | None, bits_per_value: float | None) -> None:
    """UserError where a number of values and a budget are both set."""
    if kept is not None and bits_per_value is not None:
        raise UserError(f"{field} = {kept} and codec.bits_per_value = {bits_per_value} both set; give one")


def too_small(bits_per_value: float | None, hidden_dim: int, smallest_bits: int) -> UserError:
    """A budget below the smallest payload of the codec: what the least is at this width."""
    least_bits = 8 * -(-smallest_bits // 8)
    # Rounded up, so that what the message proposes is accepted.
    least = math.ceil(1e4 * least_bits / hidden_dim) / 1e4
    asked = "the default budget" if bits_per_value is None else f"codec.bits_per_value = {bits_per_value}"
    return UserError(
        f"{asked} is {budget_bits(bits_per_value, hidden_dim)} bits a token at width {hidden_dim}, and this "
        f"codec sends {least_bits} at least: set codec.bits_per_value = {least} or more"
    )
