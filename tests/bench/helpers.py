"""A tiny random model with random rollouts of it, for tests of the bench."""

import functools

import torch

from tests.tiny import tiny_model
from thinwire.bench.passes import Subject, statistics
from thinwire.bench.rollouts import Sampled, micro_batches
from thinwire.bench.store import Saved
from thinwire.codecs import CODECS, publish
from thinwire.engines.batch import Rows

WIDTH = 32
CPU = torch.device("cpu")


@functools.cache
def subject(stages=3, dtype=torch.float32):
    return Subject.of(tiny_model("llama", layers=4, hidden=WIDTH).to(dtype), stages)


def rows(num=12, first=0):
    """Random prompts and responses of several lengths; advantages of both signs."""
    generator = torch.Generator().manual_seed(first)

    def draw(low, high):
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(2, 60, (length,), generator=generator).tolist()

    prompts, responses = [draw(3, 7) for _ in range(num)], [draw(1, 6) for _ in range(num)]
    signs = [1.0 if i % 3 else -1.0 for i in range(num)]
    return Rows(
        prompts, responses, [[-3.0] * len(r) for r in responses], list(range(first, first + num)), signs
    )


@functools.cache
def saved(stages=3):
    model = subject(stages)
    sampled = Sampled(rows(16, first=100), rows())
    forward, backward = statistics(model, micro_batches(sampled.statistics, CPU))
    facts = {
        "source": "tiny",
        "fingerprint": "sha256:0",
        "width": WIDTH,
        "boundaries": list(model.stages.after),
        "dtype": "float32",
        "temperature": 1.0,
    }
    return Saved(sampled, forward, backward, facts)


def bound(name, **settings):
    kind = next(kind for kind in CODECS if kind.model_fields["name"].default == name)
    return kind(**settings).at_width(WIDTH)


def views(codec, num=1, seed=7, fires=3):
    """Views of steps 1..num after some fires on the saved statistics."""
    states = []
    for b, (ahead, back) in enumerate(zip(saved().forward, saved().backward, strict=True)):
        state = codec.initial_state(seed, b)
        for version in range(1, fires + 1):
            state = codec.learn(state, ahead, version, back)
        states.append(state)
    return [publish(codec, states, seed, step + 1) for step in range(num)]
