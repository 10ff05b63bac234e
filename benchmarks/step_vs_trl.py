"""Seconds a rollout step of thinwire's dense and exact-k arms against TRL's GRPOTrainer doing the same work.

The work is the `demo` recipe's: the embedded model in fp32, the same prompts in the same order, group size,
response length, a frozen reference, and two optimizer ticks a step, each over half of the rows in one
micro-batch. TRL (1.16 or later, in an environment of its own) gets per_device_train_batch_size = rows / 2,
steps_per_generation = 2 and no gradient accumulation: one generation, old and reference log-probabilities
in two chunks, then two ticks, exactly thinwire's passes. Its loss is "dapo" (mean over tokens), the KL plain
k3, no vLLM, no bf16, no gradient checkpointing; neither side saves, validates or reports in the measured
steps. `tokens` counts what really went through the decoder layers, so the claim can be checked.

Each way runs in a process of its own, one after the other, in another order each round. A step is the time
between two ends of a step in the real training loop. `seconds` are wall-clock; `cpu_seconds` count only the
time on a core and are the ones to read on a busy machine. One JSON object on standard output.

    python benchmarks/step_vs_trl.py --trl-python OTHER_VENV/bin/python [--rounds 3] [--steps 10] [--threads 1]
"""

import argparse
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

WARM_UP_STEPS = 2
GOAL = 0.7
ARMS = ("dense", "exact-k")
WAYS = (*ARMS, "trl")


class Marks:
    """Clock readings at the end of each step, and the tokens that went through the decoder layers by then."""

    def __init__(self) -> None:
        self.readings: list[dict[str, float]] = []
        self._tokens = {"sampling": 0, "no_gradient": 0, "gradient": 0}
        self._layers = 1

    def count_tokens(self, num_layers: int) -> None:
        """From now on count rows x positions of every decoder layer call, by kind of pass."""
        import torch

        llama: Any = importlib.import_module("transformers.models.llama.modeling_llama")
        plain, tokens, self._layers = llama.LlamaDecoderLayer.forward, self._tokens, num_layers

        @functools.wraps(plain)
        def counted(layer: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
            cached = kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None
            kind = "sampling" if cached else "gradient" if torch.is_grad_enabled() else "no_gradient"
            tokens[kind] += hidden.shape[0] * hidden.shape[1]
            return plain(layer, hidden, *args, **kwargs)

        llama.LlamaDecoderLayer.forward = counted

    def mark(self) -> None:
        """A step has ended now."""
        tokens = {kind: count / self._layers for kind, count in self._tokens.items()}
        self.readings.append({"seconds": time.perf_counter(), "cpu_seconds": time.process_time(), **tokens})

    def steps(self) -> dict[str, list[float]]:
        """What each step after the warm-up took: seconds, CPU seconds and tokens by kind of pass."""
        pairs = list(zip(self.readings, self.readings[1:], strict=False))[WARM_UP_STEPS - 1 :]
        return {key: [end[key] - start[key] for start, end in pairs] for key in self.readings[0]}


def run_thinwire(arm: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    """One arm through the package's own training loop; the step after the last measured one is left out,
    because it ends with a validation and a checkpoint."""
    from thinwire.models.load import load_model
    from thinwire.train.config import load_recipe
    from thinwire.train.loop import train
    from thinwire.train.places import find_recipe
    from thinwire.train.progress import NullObserver

    recipe = load_recipe(find_recipe("demo"), thinwire_overrides(plan["steps"] + 1), arm)
    layers = int(load_model(recipe.model).model.config.num_hidden_layers)
    marks, lines = Marks(), []

    class Watch(NullObserver):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            marks.mark()
            lines.append(dict(metrics))

    marks.count_tokens(layers)
    with tempfile.TemporaryDirectory() as folder:
        train(recipe, Path(folder, "run"), arm=arm, observer=Watch())
    marks.readings.pop()
    measured = lines[WARM_UP_STEPS:-1]
    keys = [key for key in measured[0] if key.startswith("timing_s/")]
    return marks.steps() | {
        "phases": {key.removeprefix("timing_s/"): median(line[key] for line in measured) for key in keys},
        "response_tokens": [line["response_length/mean"] for line in measured],
        "score": [line["critic/score/mean"] for line in measured],
    }


def thinwire_overrides(steps: int) -> list[str]:
    """Two ticks a step, and nothing but steps: no probe, validation, checkpoint or saved model between."""
    settings = {
        "steps": steps,
        "model.device": "cpu",
        "probe.every": 0,
        "validation.every": 0,
        "checkpoint.every": 0,
        "checkpoint.models": "false",
    }
    return [f"--{key}={value}" for key, value in settings.items()]


def run_trl(plan: Mapping[str, Any]) -> dict[str, Any]:
    """TRL's trainer over the plan's prompts; its own callback marks the end of every second tick."""
    trl, transformers, torch = (importlib.import_module(name) for name in ("trl", "transformers", "torch"))
    datasets = importlib.import_module("datasets")
    model = transformers.AutoModelForCausalLM.from_pretrained(plan["model"], dtype=torch.float32)
    marks = Marks()
    marks.count_tokens(model.config.num_hidden_layers)
    lengths: list[float] = []
    scores: list[float] = []

    class Watch(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % plan["ticks"] == 0:
                marks.mark()

    def reward(completions: Sequence[str], answer: Sequence[str], **kwargs: Any) -> list[float]:
        values = [integer_score(text, gold) for text, gold in zip(completions, answer, strict=True)]
        lengths.append(sum(map(len, kwargs["completion_ids"])) / len(completions))
        scores.append(sum(values) / len(values))
        return values

    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=trl.GRPOConfig(output_dir=folder, **trl_settings(plan)),
            train_dataset=datasets.Dataset.from_list(plan["prompts"]),
            processing_class=transformers.AutoTokenizer.from_pretrained(plan["model"]),
            callbacks=[Watch()],
        )
        trainer.train()
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    measured = {"response_tokens": lengths[WARM_UP_STEPS:], "score": scores[WARM_UP_STEPS:]}
    return marks.steps() | measured | {"versions": versions}


def integer_score(response: str, gold: str) -> float:
    """thinwire's integer reward, written again because its package is not in TRL's environment."""
    text = response.strip()
    return float(bool(re.fullmatch(r"-?[0-9]+", text)) and int(text) == int(gold))


def trl_settings(plan: Mapping[str, Any]) -> dict[str, Any]:
    """GRPOConfig for the same ticks, rows and passes, with everything switched off that is not a step."""
    return {
        "max_steps": plan["steps"] * plan["ticks"],
        "per_device_train_batch_size": plan["rows"] // plan["ticks"],
        "steps_per_generation": plan["ticks"],
        "gradient_accumulation_steps": 1,
        "num_iterations": 1,
        "num_generations": plan["group_size"],
        "max_completion_length": plan["max_new_tokens"],
        "shuffle_dataset": False,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "beta": plan["kl_coefficient"],
        "use_bias_correction_kl": False,
        "epsilon": plan["clip_low"],
        "epsilon_high": plan["clip_high"],
        "temperature": plan["temperature"],
        "top_p": 1.0,
        "top_k": 0,
        "learning_rate": plan["learning_rate"],
        "lr_scheduler_type": "constant",
        "adam_beta1": plan["betas"][0],
        "adam_beta2": plan["betas"][1],
        "weight_decay": plan["weight_decay"],
        "max_grad_norm": plan["grad_clip"],
        "optim": "adamw_torch_fused",
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": plan["seed"],
    }


def make_plan(num_steps: int) -> dict[str, Any]:
    """What both sides do, out of the demo recipe: sizes, settings and the prompts of every step."""
    from thinwire.models.assets import embedded_model_path
    from thinwire.tasks.base import make_task
    from thinwire.train.config import load_recipe
    from thinwire.train.places import find_recipe

    recipe = load_recipe(find_recipe("demo"), thinwire_overrides(num_steps))
    task, sampling, rl = make_task(recipe.task, recipe.seed), recipe.sampling, recipe.rl
    ticks = sampling.prompts // (rl.mini_batch_prompts or sampling.prompts)
    assert ticks == 2, f"the demo recipe makes {ticks} ticks a step; this comparison is written for 2"
    assert rl.micro_batch_rows == 0 and rl.kl_coefficient > 0.0
    problems = [p for step in range(1, num_steps + 1) for p in task.prompts(step, sampling.prompts)]
    return {
        "model": str(embedded_model_path()),
        "steps": num_steps,
        "ticks": ticks,
        "rows": sampling.prompts * sampling.group_size,
        "group_size": sampling.group_size,
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "seed": recipe.seed,
        **rl.model_dump(include={"kl_coefficient", "clip_low", "clip_high"}),
        **recipe.optimizer.model_dump(include={"learning_rate", "betas", "weight_decay", "grad_clip"}),
        "prompts": [{"prompt": problem.text, "answer": problem.answer} for problem in problems],
    }


def run_child(way: str, python: str, threads: int, plan_file: Path) -> dict[str, Any]:
    """One way in a process of its own; what libraries print is dropped unless it fails."""
    result = plan_file.with_name("result.json")
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    child = [python, __file__, f"--way={way}", f"--plan={plan_file}", f"--result={result}"]
    done = subprocess.run(child, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"{way} failed:\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds, then the medians and their ratios."""
    plan = make_plan(WARM_UP_STEPS + arguments.steps)
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        plan_file = Path(folder, "plan.json")
        plan_file.write_text(json.dumps(plan))
        for number in range(arguments.rounds):
            shift = number % len(WAYS)
            for way in WAYS[shift:] + WAYS[:shift]:
                python = arguments.trl_python if way == "trl" else sys.executable
                rounds[way].append(run_child(way, python, arguments.threads, plan_file))
                print(f"round {number + 1}: {way}", file=sys.stderr)
    work = {key: value for key, value in plan.items() if key not in ("prompts", "model")}
    return {
        "work": work | {"threads": arguments.threads, "measured_steps": arguments.steps},
        "versions_of_trl": rounds["trl"][0]["versions"],
        "ways": {way: summary(rounds[way]) for way in WAYS},
        "ratio_to_trl": {arm: ratios(rounds[arm], rounds["trl"]) for arm in ARMS},
        "goal": GOAL,
    }


def summary(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over all measured steps, each round's own median, and means of what was done."""
    found: dict[str, Any] = {}
    for clock in ("cpu_seconds", "seconds"):
        found[clock] = median(value for one in rounds for value in one[clock])
        found[f"{clock}_of_rounds"] = [median(one[clock]) for one in rounds]
    for key in ("response_tokens", "score"):
        values = [value for one in rounds for value in one[key]]
        found[key] = sum(values) / len(values)
    found["tokens"] = {
        kind: sum(sum(one[kind]) for one in rounds) / sum(len(one[kind]) for one in rounds)
        for kind in ("sampling", "no_gradient", "gradient")
    }
    if "phases" in rounds[0]:
        found["phase_seconds"] = {
            name: median(one["phases"][name] for one in rounds) for name in rounds[0]["phases"]
        }
    return found


def ratios(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median over median, and the smallest and largest such ratio of one round."""
    found: dict[str, Any] = {}
    for clock in ("cpu_seconds", "seconds"):
        pooled = [[value for one in side for value in one[clock]] for side in (ours, theirs)]
        per_round = [median(a[clock]) / median(b[clock]) for a, b in zip(ours, theirs, strict=True)]
        found[clock] = median(pooled[0]) / median(pooled[1])
        found[f"{clock}_of_rounds"] = [min(per_round), max(per_round)]
    return found | {"goal_met": found["cpu_seconds"] <= GOAL}


def main() -> None:
    """Parse, then compare in children or, as a child, run one way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", help="python of an environment that has TRL and the same torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way is None:
        if arguments.trl_python is None:
            parser.error("--trl-python is needed: the python of an environment that has TRL")
        print(json.dumps(compare(arguments), indent=1))
        return
    plan = json.loads(arguments.plan.read_text())
    found = run_trl(plan) if arguments.way == "trl" else run_thinwire(arguments.way, plan)
    arguments.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
