"""A small engine and rows for tests of engines and steps."""

import torch

from tests.tiny import tiny_model
from thinwire.codecs import Codec, View, publish
from thinwire.engines.batch import Batch, Rows, partition
from thinwire.engines.local import LocalEngine, PassConfig
from thinwire.engines.optimizer import AdamWConfig
from thinwire.train.losses import Losses, RlConfig, initial_settings, loss_terms, total_denominator


def engine(model=None, stages=3, has_snapshot=False, **optimizer):
    return LocalEngine(
        model if model is not None else tiny_model("llama", layers=4),
        stages,
        None,
        AdamWConfig(**{"learning_rate": 1e-3} | optimizer),
        PassConfig(),
        has_snapshot=has_snapshot,
    )


def rows(num=8, seed=0):
    """Random prompts and responses of several lengths, with advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(2, 60, (length,), generator=generator).tolist()

    prompts, responses = [draw(1, 6) for _ in range(num)], [draw(1, 5) for _ in range(num)]
    advantages = torch.randn(num, generator=generator).tolist()
    return Rows(prompts, responses, [[-3.0] * len(r) for r in responses], list(range(num)), advantages)


def batches(num=8, micro=4, seed=0) -> list[Batch]:
    (tick,) = partition(rows(num, seed), num, micro, 4, torch.device("cpu"))
    return tick


def view(codec: Codec, boundaries: int, width=32, step=1) -> View:
    bound = codec.at_width(width)
    return publish(bound, [bound.initial_state(1, b) for b in range(boundaries)], seed=1, step=step)


def losses(eng, tick, seen, rl=None) -> Losses:
    """The loss of one tick with the engine's own old and reference passes through `seen`."""
    rl = rl or RlConfig(kl_coefficient=0.05)
    old = eng.forward(tick, seen)
    reference = eng.forward(tick, seen, "reference")
    return Losses(
        rl,
        loss_terms(rl, initial_settings(rl, 20)),
        total_denominator(tick, 8),
        [reading.logprob_BR for reading in old],
        [reading.logprob_BR for reading in reference],
        [],
    )


def gradients(eng):
    return [p.grad.clone() if p.grad is not None else None for p in eng.model.parameters()]
