"""What the contract suites share: every codec, learned states, keys and tokens.

Letters: N tokens, D hidden size.
"""

import pytest
import torch

from thinwire.codecs import CODECS, Moments
from thinwire.core.keys import TokenKeys

every_codec = pytest.mark.parametrize("kind", CODECS, ids=lambda kind: kind.model_fields["name"].default)
compressing = pytest.mark.parametrize(
    "kind",
    [kind for kind in CODECS if "bits_per_value" in kind.model_fields],
    ids=lambda kind: kind.model_fields["name"].default,
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def spending(kind, bits_per_value):
    """The codec at a budget; identity has none to set."""
    takes_budget = "bits_per_value" in kind.model_fields and bits_per_value is not None
    return kind(bits_per_value=bits_per_value) if takes_budget else kind()


def tokens(shape, width, dtype, scale=1.0, massive=False, seed=0):
    """Normal hidden states, one channel 1e4 times the others if asked, none beyond the range of `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(*shape, width, generator=generator) * scale
    if massive:
        hidden_ND[..., width // 2] *= 1e4
    limit = torch.finfo(dtype).max
    return hidden_ND.clamp(-limit, limit).to(dtype)


def shape_keys(shape):
    count_N = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return TokenKeys(5, 1, count_N, count_N * 3 + 2)


def learned(codec, seed=0):
    """A state as an anchor leaves it, for codecs that learn; the initial one for others."""
    torch.manual_seed(seed)
    hidden = torch.randn(200, codec.hidden_dim)
    gradient = torch.randn(200, codec.hidden_dim) * 1e-3
    return codec.learn(codec.initial_state(seed, 0), moments_of(hidden), 1, moments_of(gradient))


def moments_of(values_ND):
    """What an anchor sums over these tokens."""
    return Moments(len(values_ND), values_ND.sum(0), values_ND.T @ values_ND)


def keys(num, step=1, first=0):
    return TokenKeys(5, step, torch.arange(first, first + num), torch.arange(num) + 2)
