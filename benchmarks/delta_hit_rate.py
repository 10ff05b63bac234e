"""How often delta coding (AQ-SGD) finds a prefix again on a recipe's own text, and what its memory takes.

The recipe's prompts are drawn and answered step by step with the weights it starts from; every real token's
prefix is looked up in what the steps before have left. Weights that move repeat themselves less, so the rates
are an upper bound for a run. `within_step` also counts a prefix that an earlier row of the same step has,
which one batch cannot use. Bytes are those of one boundary at one end, in bf16. One JSON object on standard
output.

    python benchmarks/delta_hit_rate.py [--recipe demo] [--steps 40] [--a.b value ...]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import thinwire
from thinwire.codecs import DeltaMemory, prefix_keys
from thinwire.models.load import load_model
from thinwire.train.config import Recipe, load_recipe
from thinwire.train.parts import build
from thinwire.train.rollout import roll_out


def measure(recipe: Recipe, steps: int) -> list[dict[str, Any]]:
    """Hit rates of prompt and response tokens and the memory's size, after each step."""
    parts = build(recipe, load_model(recipe.model))
    parts.sampler.push(0, parts.engine.gather_weights())
    memory, hidden_dim = DeltaMemory.empty(0), parts.engine.hidden_dim
    found = []
    for step in range(1, steps + 1):
        problems = parts.work.task.prompts(step, recipe.sampling.prompts)
        rollouts = roll_out(parts.work, parts.sampler, problems, recipe.sampling, recipe.seed, step)
        keys: dict[str, list[torch.Tensor]] = {"prompt": [], "response": []}
        for prompt, response in zip(rollouts.prompt_ids, rollouts.response_ids, strict=True):
            row_T = prefix_keys(torch.tensor([prompt + response]))[0]
            keys["prompt"].append(row_T[: len(prompt)])
            keys["response"].append(row_T[len(prompt) :])
        joined = {part: torch.cat(rows) for part, rows in keys.items()}
        joined["all"] = torch.cat((joined["prompt"], joined["response"]))
        num_tokens, num_before = len(joined["all"]), memory.key_M.numel()
        rates = {part: round(memory.hit_rate(key_N), 4) for part, key_N in joined.items()}
        memory = memory.remember(joined["all"], torch.zeros(num_tokens, 0, dtype=torch.bfloat16))
        within = 1 - (memory.key_M.numel() - num_before) / num_tokens
        size = memory.key_M.numel() * (8 + 2 * hidden_dim)
        found.append({"step": step, "tokens": num_tokens, "hit_rate": rates})
        found[-1] |= {"within_step": round(within, 4), "memory_bytes": size}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--recipe", default="demo", help="a shipped recipe's name, or a file")
    parser.add_argument("--steps", type=int, default=40)
    options, overrides = parser.parse_known_args()
    shipped = Path(thinwire.__file__).parent / "recipes" / f"{options.recipe}.toml"
    recipe = load_recipe(shipped if shipped.exists() else Path(options.recipe), overrides)
    found = measure(recipe, options.steps)
    chosen = [found[i] for i in sorted({0, 1, 9, 19, len(found) - 1}) if i < len(found)]
    print(json.dumps({"recipe": options.recipe, "overrides": overrides, "steps": chosen}))


if __name__ == "__main__":
    main()
