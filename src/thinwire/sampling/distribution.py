"""The distribution a token is really drawn from, and the draw: pure functions of logits and a uniform.

Letters in shape suffixes: `B` rows, `V` vocabulary.
"""

import torch
from torch import Tensor

from thinwire.core.errors import NonFinite
from thinwire.sampling.base import SamplingConfig


def log_distribution(logits_BV: Tensor, config: SamplingConfig) -> Tensor:
    """Log-probabilities after temperature, top-k and top-p, renormalised; -inf where a token is excluded.

    Tokens are ranked by descending logit, equal ones by ascending id. top-k keeps ranks below k; top-p
    keeps, of what is left, every token whose higher-ranked tokens hold less than `top_p` (so at least one).
    """
    logits_BV = logits_BV / config.temperature
    top_k = min(config.top_k or logits_BV.shape[1], logits_BV.shape[1])
    if top_k == logits_BV.shape[1] and config.top_p == 1.0:
        return torch.log_softmax(logits_BV, dim=-1)
    ranked_BV, id_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    ranked_BV[:, top_k:] = -torch.inf
    probability_BV = torch.softmax(ranked_BV, dim=-1).double()
    above_BV = probability_BV.cumsum(-1) - probability_BV
    ranked_BV = ranked_BV.masked_fill(above_BV >= config.top_p, -torch.inf)
    return torch.log_softmax(torch.empty_like(ranked_BV).scatter_(1, id_BV, ranked_BV), dim=-1)


def inverse_cdf(logprob_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """The token i with cdf[i - 1] <= u cdf[V - 1] < cdf[i], in the order of ids, and its log-probability.

    Exact against zero probabilities: the strict inequality needs cdf[i] > cdf[i - 1], and u < 1 keeps i
    below V. The sums are float64: u has 32 bits, which float32 sums (24 bits) would blur for rare tokens,
    and over 10^5 tokens their rounding would move the total by up to 1e-4.
    """
    cdf_BV = logprob_BV.exp().double().cumsum(-1)
    total_B1 = cdf_BV[:, -1:]
    refuse_unless(total_B1 > 0)
    token_B1 = torch.searchsorted(cdf_BV, uniform_B.unsqueeze(-1) * total_B1, right=True)
    return token_B1.squeeze(-1), logprob_BV.gather(-1, token_B1).squeeze(-1)


def refuse_unless(sane_B: Tensor) -> None:
    """NonFinite where a row has no distribution to draw from: the weights hold nan or inf."""
    if not bool(sane_B.all()):
        raise NonFinite("rollout_logprobs", float("nan"))
