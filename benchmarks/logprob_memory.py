"""Peak memory and seconds of log-probabilities and entropy at a large vocabulary, chunked against naive.

Each way runs in a process of its own, one after the other, on one thread: forward and backward of
sum(logprob) + 0.01 sum(entropy) with gradients in the hidden states and in the head's weight. `baseline`
makes the same inputs and the weight's gradient buffer and stops there. Peaks are ru_maxrss; `added_ratio`
compares what the two ways add to the baseline. `seconds` are wall-clock; `cpu_seconds` are stretched less by
a busy machine. One JSON object on standard output.

    python benchmarks/logprob_memory.py [--vocabulary 151936] [--tokens 768] [--hidden 256] [--dtype float32]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time

import torch
from torch import Tensor

from thinwire.rl.logprobs import default_chunk_tokens, logprobs_and_entropy

WAYS = ("baseline", "naive", "chunked")


def naive(hidden_ND: Tensor, head: torch.nn.Linear, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """The textbook way: all logits at once, their log-softmax, and the entropy from it."""
    log_softmax_NV = torch.log_softmax(head(hidden_ND).float(), dim=-1)
    entropy_N = -(log_softmax_NV.exp() * log_softmax_NV).sum(dim=-1)
    return log_softmax_NV.gather(-1, target_N[:, None])[:, 0], entropy_N


def measure(way: str, vocabulary: int, tokens: int, hidden: int, dtype: torch.dtype) -> dict[str, float]:
    """Seconds, peak bytes of this process, and two numbers by which the ways can be seen to agree."""
    torch.manual_seed(0)
    head = torch.nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)
    hidden_ND = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    target_N = torch.randint(vocabulary, (tokens,))
    head.weight.grad = torch.zeros_like(head.weight)
    start, cpu_start = time.perf_counter(), time.process_time()
    result = {"loss": 0.0, "weight_gradient_norm": 0.0}
    if way != "baseline":
        function = naive if way == "naive" else logprobs_and_entropy
        logprob_N, entropy_N = function(hidden_ND, head, target_N)
        loss = logprob_N.sum() + 0.01 * entropy_N.sum()
        torch.autograd.backward(loss)
        result = {"loss": loss.item(), "weight_gradient_norm": head.weight.grad.norm().item()}
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    chunk_tokens = default_chunk_tokens(hidden_ND, head)
    timing = {"seconds": seconds, "cpu_seconds": cpu_seconds}
    return result | timing | {"peak_bytes": peak_bytes, "chunk_tokens": chunk_tokens}


def compare(arguments: argparse.Namespace) -> dict[str, object]:
    """All ways one after the other, and their ratios."""
    options = [f"--{name}={getattr(arguments, name)}" for name in ("vocabulary", "tokens", "hidden", "dtype")]
    found: dict[str, dict[str, float]] = {}
    for way in WAYS:
        child = [sys.executable, __file__, f"--way={way}", *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(child, check=True, capture_output=True, text=True, env=environment)
        found[way] = json.loads(done.stdout)
    base = found["baseline"]["peak_bytes"]
    return {
        "vocabulary": arguments.vocabulary,
        "tokens": arguments.tokens,
        "hidden": arguments.hidden,
        "dtype": arguments.dtype,
        "logits_bytes": 4 * arguments.vocabulary * arguments.tokens,
        **found,
        "peak_ratio": found["chunked"]["peak_bytes"] / found["naive"]["peak_bytes"],
        "added_ratio": (found["chunked"]["peak_bytes"] - base) / (found["naive"]["peak_bytes"] - base),
        "seconds_ratio": found["chunked"]["seconds"] / found["naive"]["seconds"],
        "cpu_seconds_ratio": found["chunked"]["cpu_seconds"] / found["naive"]["cpu_seconds"],
    }


def main() -> None:
    """Parse, then compare in children or, as a child, measure one way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", choices=WAYS, help="measure this one way in this process")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    if arguments.way is None:
        print(json.dumps(compare(arguments), indent=1))
        return
    shape = (arguments.vocabulary, arguments.tokens, arguments.hidden)
    print(json.dumps(measure(arguments.way, *shape, getattr(torch, arguments.dtype))))


if __name__ == "__main__":
    main()
