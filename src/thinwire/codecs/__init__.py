"""Codecs: encode -> payload -> decode with an adjoint, drawn from explicit keys.

`CODECS` is the one list a new codec is added to; the recipe's [codec] table and the contract suite
read it.
"""

from thinwire.codecs.base import Codec, CodecState, Moments, Payload
from thinwire.codecs.boundary import View, cross, publish
from thinwire.codecs.exact_k import ExactK
from thinwire.codecs.identity import Identity
from thinwire.codecs.subspace import Subspace

CODECS: tuple[type[Codec], ...] = (Identity, Subspace, ExactK)

__all__ = [
    "CODECS",
    "Codec",
    "CodecState",
    "ExactK",
    "Identity",
    "Moments",
    "Payload",
    "Subspace",
    "View",
    "cross",
    "publish",
]
