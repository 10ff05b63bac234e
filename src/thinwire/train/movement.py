"""Weight movement of a live run: read after a step's updates, so that a line is its checkpoint's.

W_t is what the optimizer holds (fp32 masters when the model computes in bf16), W_0 the frozen start in the
compute type, which the masters began from exactly. bf16(master) is what the engine computes with, so the
changed bf16 share is that of the sampler's and the trainer's own weights. Nothing is drawn or written to the
engine: a run stays the same bit for bit.
"""

import time
from collections.abc import Iterator

from torch import Tensor

from thinwire.engines.base import Engine
from thinwire.instruments.movement import movement, movement_series, table
from thinwire.train.rundir import RunDir
from thinwire.train.step import Parts, is_probed

MASTER = "weight."


def record_movement(parts: Parts, run: RunDir, step: int) -> dict[str, float]:
    """movement/* of the weights after `step`, and their line in movement.jsonl; empty where none is due."""
    if not (parts.recipe.probe.movement and is_probed(parts.recipe, step)):
        return {}
    started = time.perf_counter()
    readings = table(movement(_since_start(parts.engine)))
    run.append(run.movement, {"step": step, **readings})
    return movement_series(readings) | {"timing_s/movement": time.perf_counter() - started}


def _since_start(engine: Engine) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, W_0, W_t) of every trained weight; tied ones once, as the optimizer holds them."""
    start = engine.gather_weights("reference")
    for key, current in engine.state().items():
        if key.startswith(MASTER):
            name = key.removeprefix(MASTER)
            yield name, start[name], current
