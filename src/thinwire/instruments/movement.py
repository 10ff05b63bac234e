"""How far weights have moved from where they started: a block, a matrix kind, and where over depth.

Everything is a sum over weights, so that groups (a block, a kind, the model) are exact sums of their parts.
Arithmetic is float64, in chunks that bound the memory.

Letters: R rows and C columns of a matrix, R >= C after a transpose.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

BF16_LINE = 2.0**-9
"""0.195%: a weight ON the bf16 grid that changes by this share of itself or less rounds back to itself.

bf16 keeps 8 significant bits, so between 2^e and 2^(e+1) its grid has the spacing 2^(e-7), and a change shows
once it passes half of that: 2^-8 of the weight just above 2^e, 2^-9 just below 2^(e+1) (and just below 2^e,
where the spacing halves). Below the line no such weight can change; above 2^-8 (0.39%) every one does. It
speaks of single weights that start on the grid: a norm below the line may hold weights above it, and an fp32
master between two grid points may cross the middle on any change.
"""

CHUNK_WEIGHTS = 1 << 22
KINDS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "embed_tokens": "embedding",
    "lm_head": "head",
}
"""Kind of a matrix by the module that holds it; any module with "norm" in its name is of kind "norm"."""
_BLOCK_LISTS = ("layers", "h", "blocks")


@dataclass(frozen=True)
class Place:
    """Where a parameter belongs: its block (None: embedding, head, final norm) and its kind."""

    block: int | None
    kind: str


def place(name: str) -> Place:
    """Block and kind from a parameter's name; a name that is not known is kept as its own kind.

    model.layers.3.self_attn.q_proj.weight -> (3, q); a bias is a kind of its own, as in q.bias.
    """
    parts = name.split(".")
    block, inner = None, parts
    for at, part in enumerate(parts[:-1]):
        if part in _BLOCK_LISTS and parts[at + 1].isdigit():
            block, inner = int(parts[at + 1]), parts[at + 2 :]
            break
    holder, leaf = inner[-2:] if len(inner) > 1 else ("", inner[-1] if inner else name)
    known = KINDS.get(holder) or ("norm" if "norm" in holder.lower() else None)
    kind = known or ".".join(inner[:-1] if leaf == "weight" and len(inner) > 1 else inner) or name
    return Place(block, f"{kind}.{leaf}" if known and leaf != "weight" else kind)


@dataclass(frozen=True)
class Moved:
    """Sums over the weights of a group: W_0 the base, W_t now, dW = W_t - W_0. They add up over groups."""

    num_weights: int = 0
    base_square: float = 0.0
    current_square: float = 0.0
    product: float = 0.0
    change_square: float = 0.0
    num_changed_bf16: int = 0
    spectral_norm: float = 0.0
    """The largest |dW|_2 of the group's matrices (largest singular value)."""

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(
            self.num_weights + other.num_weights,
            self.base_square + other.base_square,
            self.current_square + other.current_square,
            self.product + other.product,
            self.change_square + other.change_square,
            self.num_changed_bf16 + other.num_changed_bf16,
            float(np.maximum(self.spectral_norm, other.spectral_norm)),  # nan stays, unlike in max()
        )

    @property
    def relative_change(self) -> float | None:
        """|W_t - W_0|_F / |W_0|_F; None where W_0 is 0 and W_t is not."""
        if self.change_square == 0.0:
            return 0.0
        return math.sqrt(self.change_square / self.base_square) if self.base_square > 0.0 else None

    @property
    def cosine(self) -> float | None:
        """<W_t, W_0> / (|W_t|_F |W_0|_F), exactly 1 without a change; None where either is 0."""
        norms = math.sqrt(self.base_square) * math.sqrt(self.current_square)
        if norms == 0.0:
            return None
        return 1.0 if self.change_square == 0.0 else max(-1.0, min(1.0, self.product / norms))

    @property
    def changed_bf16_share(self) -> float:
        """Share of weights with bf16(W_t) != bf16(W_0), both rounded to the nearest; 0 without weights."""
        return self.num_changed_bf16 / self.num_weights if self.num_weights else 0.0

    def cell(self) -> dict[str, float | None]:
        """The readings of one group by name."""
        return {
            "relative_change": self.relative_change,
            "cosine": self.cosine,
            "changed_bf16_share": self.changed_bf16_share,
            "spectral_norm": self.spectral_norm,
            "change_norm": math.sqrt(self.change_square),
            "num_weights": self.num_weights,
        }


@torch.no_grad()
def moved(base: Tensor, current: Tensor) -> Moved:
    """The sums of one tensor against its base, of one shape and any float types.

    Types are widened, never narrowed: against a bf16 base an fp32 master shows changes bf16 cannot.
    ValueError where the shapes differ.
    """
    if base.shape != current.shape:
        raise ValueError(f"shapes must agree, got {tuple(base.shape)} and {tuple(current.shape)}")
    sums = Moved()
    base = base.to(current.device)
    for base_N, current_N in _chunks(base.reshape(-1), current.reshape(-1)):
        old_N, new_N = base_N.double(), current_N.double()
        change_N = new_N - old_N
        sums += Moved(
            num_weights=base_N.numel(),
            base_square=float(torch.dot(old_N, old_N)),
            current_square=float(torch.dot(new_N, new_N)),
            product=float(torch.dot(old_N, new_N)),
            change_square=float(torch.dot(change_N, change_N)),
            num_changed_bf16=int((base_N.bfloat16() != current_N.bfloat16()).sum()),
        )
    if sums.change_square == 0.0:
        return sums
    return sums + Moved(spectral_norm=spectral_norm(base, current))


def spectral_norm(base: Tensor, current: Tensor) -> float:
    """|W_t - W_0|_2 = sqrt(largest eigenvalue of dW^T dW), by torch.linalg.eigvalsh in float64.

    The smaller of the two Gram matrices is summed over chunks of rows: 2 R C^2 operations, C^2 and a chunk
    of memory. torch.linalg.matrix_norm(ord=2), a singular value decomposition, took 2.6 times as long at
    576 x 1536 and 11 times at 1536 x 8960 for the same 14 digits. Squaring costs small singular values their
    digits, not the largest: its relative error stays below C x 1e-16. A vector counts as one row; of more
    than two dimensions (stacked experts) the largest matrix counts. A dW that is not finite gives nan.
    """
    if base.ndim < 2:
        base, current = base.reshape(1, -1), current.reshape(1, -1)
    stacks = zip(base.flatten(0, -3), current.flatten(0, -3), strict=True) if base.ndim > 2 else None
    return float(np.max([0.0, *(_largest_singular(*pair) for pair in stacks or [(base, current)])]))


def _largest_singular(base_RC: Tensor, current_RC: Tensor) -> float:
    if base_RC.shape[0] < base_RC.shape[1]:
        base_RC, current_RC = base_RC.T, current_RC.T
    num_columns = base_RC.shape[1]
    if base_RC.numel() == 0:
        return 0.0
    gram_CC = torch.zeros(num_columns, num_columns, dtype=torch.float64, device=current_RC.device)
    for base_chunk, current_chunk in _chunks(base_RC, current_RC):
        change_RC = current_chunk.double() - base_chunk.double()
        gram_CC += change_RC.T @ change_RC
    if not bool(torch.isfinite(gram_CC).all()):
        return math.nan
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram_CC)[-1])))


def _chunks(base: Tensor, current: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of both over the same rows, of about CHUNK_WEIGHTS weights."""
    num_rows = max(1, CHUNK_WEIGHTS // max(1, base[:1].numel()))
    for first in range(0, base.shape[0], num_rows):
        yield base[first : first + num_rows], current[first : first + num_rows]


Movement = Mapping[Place, Moved]
"""The sums of every block and kind."""


def movement(tensors: Iterable[tuple[str, Tensor, Tensor]]) -> Movement:
    """Sums by place over (name, base, current); the iterable is read once, a tensor at a time."""
    found: dict[Place, Moved] = {}
    for name, base, current in tensors:
        where = place(name)
        found[where] = found.get(where, Moved()) + moved(base, current)
    return found


def center_of_mass(by_block: Mapping[int, Moved]) -> float | None:
    """sum_l l |dW_l|^2 / sum_l |dW_l|^2 over block indices l, from 0; None where no block moved.

    Equal movement of L blocks reads (L - 1) / 2. Embedding, head and final norm have no depth and no part.
    """
    total = math.fsum(sums.change_square for sums in by_block.values())
    if total == 0.0:
        return None
    return math.fsum(block * sums.change_square for block, sums in by_block.items()) / total


def center_shifts(centers: Sequence[float | None]) -> list[float | None]:
    """Blocks by which the centre of mass moved since the reading before it; None where either has none."""
    shifts: list[float | None] = [None]
    for before, after in pairwise(centers):
        shifts.append(None if before is None or after is None else after - before)
    return shifts[: len(centers)]


def by_block(found: Movement, kind: str | None = None) -> dict[int, Moved]:
    """Sums of each block in order, over all kinds or one."""
    sums: dict[int, Moved] = {}
    for where, own in found.items():
        if where.block is not None and kind in (None, where.kind):
            sums[where.block] = sums.get(where.block, Moved()) + own
    return dict(sorted(sums.items()))


def table(found: Movement) -> dict[str, Any]:
    """All readings as one JSON object: total, center_of_mass, kinds, blocks (with their kinds), outside."""
    kinds: dict[str, Moved] = {}
    for where, own in found.items():
        kinds[where.kind] = kinds.get(where.kind, Moved()) + own
    blocks = by_block(found)
    return {
        "total": sum(found.values(), Moved()).cell(),
        "center_of_mass": center_of_mass(blocks),
        "kinds": {
            kind: sums.cell() | {"center_of_mass": center_of_mass(by_block(found, kind))}
            for kind, sums in kinds.items()
        },
        "blocks": [
            {
                "block": block,
                **sums.cell(),
                "kinds": {at.kind: own.cell() for at, own in found.items() if at.block == block},
            }
            for block, sums in blocks.items()
        ],
        "outside": {at.kind: own.cell() for at, own in found.items() if at.block is None},
    }


def movement_series(readings: Mapping[str, Any]) -> dict[str, float]:
    """movement/* of one `table`; a reading that does not exist (no block moved) is left out."""
    total = readings["total"]
    values = {
        "movement/relative_change": total["relative_change"],
        "movement/cosine": total["cosine"],
        "movement/changed_bf16_share": total["changed_bf16_share"],
        "movement/spectral_norm_max": total["spectral_norm"],
        "movement/center_of_mass": readings["center_of_mass"],
    }
    return {key: float(value) for key, value in values.items() if value is not None}
