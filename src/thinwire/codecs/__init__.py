"""Codecs: encode -> payload -> decode with an adjoint, drawn from explicit keys.

`CODECS` is the one list a new codec is added to; the recipe's [codec] table and the contract suite
read it. Delta coding (`delta_cross`) has memory and stands apart.
"""

from thinwire.codecs.antithetic import Antithetic
from thinwire.codecs.base import Codec, CodecState, Moments, Payload
from thinwire.codecs.bernoulli import Bernoulli
from thinwire.codecs.boundary import View, cross, publish
from thinwire.codecs.delta import DeltaMemory, delta_cross, delta_wire_bits, prefix_keys
from thinwire.codecs.exact_k import ExactK
from thinwire.codecs.identity import Identity
from thinwire.codecs.low_rank_residual import LowRankResidual
from thinwire.codecs.rms_matched import RmsMatched
from thinwire.codecs.rounding import RoundToNearest, StochasticRounding
from thinwire.codecs.shaped import Shaped
from thinwire.codecs.subspace import Subspace
from thinwire.codecs.tile_rotated import TileRotated

CODECS: tuple[type[Codec], ...] = (
    Identity,
    Subspace,
    ExactK,
    Bernoulli,
    Antithetic,
    RmsMatched,
    LowRankResidual,
    StochasticRounding,
    RoundToNearest,
    TileRotated,
    Shaped,
)

__all__ = [
    "CODECS",
    "Antithetic",
    "Bernoulli",
    "Codec",
    "CodecState",
    "DeltaMemory",
    "ExactK",
    "Identity",
    "LowRankResidual",
    "Moments",
    "Payload",
    "RmsMatched",
    "RoundToNearest",
    "Shaped",
    "StochasticRounding",
    "Subspace",
    "TileRotated",
    "View",
    "cross",
    "delta_cross",
    "delta_wire_bits",
    "prefix_keys",
    "publish",
]
