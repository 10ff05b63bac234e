"""Small recipes on the embedded model, and a run of them in a folder."""

from thinwire.train.config import Recipe, resolve
from thinwire.train.loop import train
from thinwire.train.progress import NullObserver

BASE = {
    "steps": 3,
    "seed": 1,
    "model": {"stages": 3},
    "task": {"num_validation": 16},
    "sampling": {"prompts": 4, "group_size": 4, "max_new_tokens": 5},
    "rl": {"mini_batch_prompts": 2, "micro_batch_rows": 5, "length_bucket": 4},
    "optimizer": {"learning_rate": 1e-4},
    "checkpoint": {"models": False, "every": 0},
}


def recipe(*overrides: str, codec: str = "exact-k") -> Recipe:
    return resolve(BASE, [f"--codec.name={codec}", *overrides])


def run(out, *overrides: str, codec: str = "exact-k", resume=False):
    return train(recipe(*overrides, codec=codec), out, resume=resume, observer=NullObserver())


def huge_reward(problem, response):
    """A user's reward whose sums are near the end of fp32: the mean of 16 is finite, a sum of losses not."""
    return 2e37 if len(response) % 2 else -2e37


def infinite_reward(problem, response):
    """Finite as Python has it, infinite in fp32."""
    return 1e300


def large_reward(problem, response):
    """Finite in fp32, but not the sum of two."""
    return 3e38
