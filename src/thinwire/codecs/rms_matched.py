"""Exact-k mask whose decoded vector has the length of the true one.

Letters: N tokens, D hidden size, K channels kept.
"""

from typing import Literal

import torch
from torch import Tensor

from thinwire.codecs.base import PAYLOAD_DTYPE, CodecState
from thinwire.codecs.draws import permuted_channels
from thinwire.codecs.kept import KeptChannels
from thinwire.codecs.packing import Sent, saturated
from thinwire.core.keys import TokenKeys


class RmsMatched(KeptChannels):
    """h~ = (||h|| / ||h_S||) 1_S * h, |S| = K: the RMS of h~ is that of h, which a scale D / K does not keep.

    Biased: with rho = ||h_S|| / ||h||, <h~, h> = rho ||h||^2, so E||h~ - h||^2 = 2 (1 - E[rho]) ||h||^2 with
    E[rho^2] = K / D, E[rho] <= sqrt(K / D); where all |h_i| are equal, E[h~] = sqrt(K / D) h. The encoder
    multiplies the scale into the values, so it costs no bits of its own. Nothing can be rescaled where
    h_S = 0: then h~ = 0. Not linear in h; a gradient is sent the same way, matched to its own RMS (the
    sender no longer has the forward scale), not through the adjoint.

    Wire: 16 K bits a token a boundary, each direction.
    """

    name: Literal["rms-matched"] = "rms-matched"

    def draw(self, keys: TokenKeys, boundary: int) -> Tensor:
        """S for every token: distinct channel indices (N, K), those of exact-k under the same keys."""
        return permuted_channels(keys, boundary, self.hidden_dim, self.values_per_token())

    def encode(self, hidden_ND: Tensor, draw: Tensor | None, state: CodecState) -> Sent:
        assert draw is not None
        direction_NK, _ = _direction_and_norm(hidden_ND.gather(-1, draw.long()).float())
        _, norm_N1 = _direction_and_norm(hidden_ND.float())
        return (saturated(direction_NK * norm_N1, PAYLOAD_DTYPE),)

    @property
    def is_linear(self) -> bool:
        return False


def _direction_and_norm(values_NV: Tensor) -> tuple[Tensor, Tensor]:
    """v / ||v|| (zero for zero) and ||v||, by way of v / max|v|: squares of 1e30 or 1e-30 leave fp32."""
    largest_N1 = values_NV.abs().amax(-1, keepdim=True)
    scaled_NV = values_NV / torch.where(largest_N1 > 0, largest_N1, 1.0)
    norm_N1 = scaled_NV.square().sum(-1, keepdim=True).sqrt()
    return scaled_NV / torch.where(norm_N1 > 0, norm_N1, 1.0), norm_N1 * largest_N1
