"""The codec-off reading: the trained weights without the lens, beside the codec-view readings."""

from collections.abc import Sequence

from thinwire.codecs import View
from thinwire.engines.base import Engine
from thinwire.engines.batch import Batch
from thinwire.rl.kl import kl_estimate


def dense_probe(engine: Engine, batches: Sequence[Batch], view: View) -> dict[str, float]:
    """probe/kl_dense and probe/entropy_dense on this step's rollouts, both in nats a token.

    probe/kl_dense = mean of e^d - d - 1, d = log pi_ref - log pi_t, codec off for both: Schulman's unbiased
    k3 of KL(current || reference), since the tokens were sampled (at temperature 1, no top-p or top-k) from
    pi_t itself. Called before the step's updates, or the tokens would be one step old.
    """
    dense = view.dense()
    current = engine.forward(batches, dense)
    reference = engine.forward(batches, dense, "reference")
    kl, entropy, num_tokens = 0.0, 0.0, 0
    for batch, now, base in zip(batches, current, reference, strict=True):
        mask_BR = batch.response_mask_BR
        estimate = kl_estimate(now.logprob_BR, base.logprob_BR, mask_BR, "k3")
        kl += float(estimate.unclamped_BR.sum())
        entropy += float((now.entropy_BR * mask_BR).sum())
        num_tokens += batch.num_response_tokens
    return {"probe/kl_dense": kl / max(1, num_tokens), "probe/entropy_dense": entropy / max(1, num_tokens)}
