"""Seconds a rollout step of thinwire's dense and exact-k arms against TRL's GRPOTrainer doing the same work.

The work is a step of the `demo` recipe at 16 x 8 rows: the embedded model in fp32, the same prompts in the
same order, at most 5 new tokens, a frozen reference, and two optimizer ticks a step, each over half of the
rows in one micro-batch. TRL (1.16 or later, in an environment of its own, on the same torch) gets
per_device_train_batch_size = rows / 2, steps_per_generation = 2 and no gradient accumulation: one generation,
old and reference log-probabilities in two chunks, then two ticks, exactly thinwire's passes. Its loss is
"dapo" (mean over tokens), the KL plain k3, its attention kernel the one thinwire uses (--attention sets it on
both sides), no vLLM, no bf16, no gradient checkpointing; neither side saves, validates or reports in the
measured steps. `tokens` counts what really went through the decoder layers, so the claim can be checked, and
`work_ratio_to_trl` compares the products those tokens cost (a token with gradient counts three times): the
ratio of seconds to expect where matrix products are all that takes time.

Each way runs in a process of its own, and the processes take turns step by step, in another order each
turn: a slow spell of the machine meets all of them. A step is the time from the end of the one before in the
real training loop, waiting for the turn apart. `seconds` are wall-clock; `cpu_seconds` count only the time
on a core and are the ones to read on a busy machine. Ratios are paired by turn: median and quartiles.
One JSON object on standard output.

    python benchmarks/step_vs_trl.py --trl-python OTHER_VENV/bin/python [--rounds 2] [--steps 10]
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
from statistics import mean, median, quantiles
from typing import Any

WARM_UP_STEPS = 2
GOAL = 0.7
CLOCKS = ("cpu_seconds", "seconds")
ARMS = ("dense", "exact-k")
WAYS = (*ARMS, "trl")
SIZES = {
    "sampling.prompts": 16,
    "sampling.group_size": 8,
    "sampling.max_new_tokens": 5,
    "rl.mini_batch_prompts": 8,
    "rl.micro_batch_rows": 0,
}
"""Set here so that a change of the demo recipe does not change what is compared."""


class Marks:
    """What each step of this process took, and its turns: a step begins when the parent says so."""

    def __init__(self, turn_fd: int, done_fd: int) -> None:
        self._turn_fd, self._done_fd = turn_fd, done_fd
        self._tokens = {"sampling": 0, "no_gradient": 0, "gradient": 0}
        self._layers = 1
        self._start: dict[str, float] = {}
        self.steps: dict[str, list[float]] = {}

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

    def wait(self) -> None:
        """Tell the parent that this process stands before a step, and wait for the turn (or for the end)."""
        os.write(self._done_fd, b".")
        os.read(self._turn_fd, 1)
        self._start = self._read()

    def end_step(self) -> None:
        """A step has ended now."""
        for key, value in self._read().items():
            self.steps.setdefault(key, []).append(value - self._start[key])
        self.wait()

    def _read(self) -> dict[str, float]:
        tokens = {kind: count / self._layers for kind, count in self._tokens.items()}
        return {"seconds": time.perf_counter(), "cpu_seconds": time.process_time(), **tokens}

    def measured(self, num_steps: int) -> dict[str, list[float]]:
        """Seconds, CPU seconds and tokens by kind of pass of each step after the warm-up."""
        return {key: values[WARM_UP_STEPS:num_steps] for key, values in self.steps.items()}


def run_thinwire(arm: str, plan: Mapping[str, Any], marks: Marks) -> dict[str, Any]:
    """One arm through the package's own training loop. One step more than measured: the last one ends with
    a validation and a checkpoint."""
    from thinwire.models.load import load_model
    from thinwire.train.config import load_recipe
    from thinwire.train.loop import train
    from thinwire.train.places import find_recipe
    from thinwire.train.progress import NullObserver

    recipe = load_recipe(find_recipe("demo"), thinwire_overrides(plan["steps"] + 1, plan["attention"]), arm)
    layers = int(load_model(recipe.model).model.config.num_hidden_layers)
    lines: list[dict[str, float]] = []

    class Watch(NullObserver):
        def start(self, name: str, first_step: int, last_step: int) -> None:
            marks.wait()

        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            lines.append(dict(metrics))
            marks.end_step()

    marks.count_tokens(layers)
    with tempfile.TemporaryDirectory() as folder:
        train(recipe, Path(folder, "run"), arm=arm, observer=Watch())
    measured = lines[WARM_UP_STEPS:-1]
    keys = [key for key in measured[0] if key.startswith("timing_s/")]
    return marks.measured(plan["steps"]) | {
        "phases": {key.removeprefix("timing_s/"): median(line[key] for line in measured) for key in keys},
        "response_tokens": [line["response_length/mean"] for line in measured],
        "score": [line["critic/score/mean"] for line in measured],
    }


def thinwire_overrides(steps: int, attention: str | None) -> list[str]:
    """The sizes, and nothing but steps: no probe, validation, checkpoint or saved model between them."""
    settings = SIZES | {
        "steps": steps,
        "model.device": "cpu",
        "probe.every": 0,
        "validation.every": 0,
        "checkpoint.every": 0,
        "checkpoint.models": "false",
    }
    if attention is not None:
        settings["model.attention"] = attention
    return [f"--{key}={value}" for key, value in settings.items()]


def run_trl(plan: Mapping[str, Any], marks: Marks) -> dict[str, Any]:
    """TRL's trainer over the plan's prompts; its own callback marks the end of every second tick."""
    trl, transformers, torch = (importlib.import_module(name) for name in ("trl", "transformers", "torch"))
    datasets = importlib.import_module("datasets")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plan["model"], dtype=torch.float32, attn_implementation=plan["attention"]
    )
    marks.count_tokens(model.config.num_hidden_layers)
    lengths: list[float] = []
    scores: list[float] = []

    class Watch(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            marks.wait()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % plan["ticks"] == 0:
                marks.end_step()

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
    return marks.measured(plan["steps"]) | measured | {"versions": versions}


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


def make_plan(num_steps: int, attention: str | None) -> dict[str, Any]:
    """What both sides do, out of the demo recipe: sizes, settings and the prompts of every step."""
    from thinwire.models.assets import embedded_model_path
    from thinwire.tasks.base import make_task
    from thinwire.train.config import load_recipe
    from thinwire.train.places import find_recipe

    recipe = load_recipe(find_recipe("demo"), thinwire_overrides(num_steps, attention))
    task, sampling, rl = make_task(recipe.task, recipe.seed), recipe.sampling, recipe.rl
    assert rl.kl_coefficient > 0.0, "without a KL term TRL would leave out the reference pass"
    problems = [p for step in range(1, num_steps + 1) for p in task.prompts(step, sampling.prompts)]
    return {
        "model": str(embedded_model_path()),
        "steps": num_steps,
        "attention": recipe.model.attention,
        "ticks": sampling.prompts // rl.mini_batch_prompts,
        "rows": sampling.prompts * sampling.group_size,
        "group_size": sampling.group_size,
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "seed": recipe.seed,
        **rl.model_dump(include={"kl_coefficient", "clip_low", "clip_high"}),
        **recipe.optimizer.model_dump(include={"learning_rate", "betas", "weight_decay", "grad_clip"}),
        "prompts": [{"prompt": problem.text, "answer": problem.answer} for problem in problems],
    }


class Child:
    """One way in a process of its own that takes a step whenever it is told to."""

    def __init__(self, way: str, python: str, threads: int, folder: Path) -> None:
        self.way, self._result, self._log = way, folder / f"{way}.json", folder / f"{way}.log"
        turn_fd, self._turn_fd = os.pipe()
        self._done_fd, done_fd = os.pipe()
        child = [python, __file__, f"--way={way}", f"--plan={folder / 'plan.json'}"]
        child += [f"--result={self._result}", f"--fds={turn_fd},{done_fd}"]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                child, stdout=log, stderr=log, env=environment, pass_fds=(turn_fd, done_fd)
            )
        os.close(turn_fd)
        os.close(done_fd)
        self._wait()

    def _wait(self) -> None:
        if not os.read(self._done_fd, 1):
            sys.exit(f"{self.way} failed:\n{self._log.read_text()}")

    def step(self) -> None:
        """Let the child take one step."""
        os.write(self._turn_fd, b".")
        self._wait()

    def finish(self) -> dict[str, Any]:
        """Let the child run to its end, and what it measured."""
        os.close(self._turn_fd)
        if self._process.wait() != 0:
            sys.exit(f"{self.way} failed:\n{self._log.read_text()}")
        os.close(self._done_fd)
        found: dict[str, Any] = json.loads(self._result.read_text())
        return found


def run_round(plan: Mapping[str, Any], pythons: Mapping[str, str], threads: int) -> dict[str, dict[str, Any]]:
    """All ways once, a step at a time; the order of a turn moves on by one each time."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "plan.json").write_text(json.dumps(plan))
        children = [Child(way, pythons[way], threads, Path(folder)) for way in WAYS]
        for turn in range(plan["steps"]):
            shift = turn % len(children)
            for child in children[shift:] + children[:shift]:
                child.step()
        return {child.way: child.finish() for child in children}


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds, then the medians and their ratios."""
    plan = make_plan(WARM_UP_STEPS + arguments.steps, arguments.attention)
    pythons = dict.fromkeys(ARMS, sys.executable) | {"trl": arguments.trl_python}
    rounds = [run_round(plan, pythons, arguments.threads) for _ in range(arguments.rounds)]
    by_way = {way: [one[way] for one in rounds] for way in WAYS}
    ways = {way: summary(by_way[way]) for way in WAYS}
    work = {key: value for key, value in plan.items() if key not in ("prompts", "model", "steps")}
    return {
        "work": work | {"threads": arguments.threads, "measured_steps": arguments.steps * arguments.rounds},
        "versions_of_trl": rounds[0]["trl"]["versions"],
        "ways": ways,
        "work_ratio_to_trl": {arm: products(ways[arm]) / products(ways["trl"]) for arm in ARMS},
        "ratio_to_trl": {arm: ratios(by_way[arm], by_way["trl"]) for arm in ARMS},
        "goal": GOAL,
    }


def summary(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over all measured steps, each round's own median, and means of what was done."""
    found: dict[str, Any] = {}
    for clock in CLOCKS:
        found[clock] = median(pooled(rounds, clock))
        found[f"{clock}_of_rounds"] = [median(one[clock]) for one in rounds]
    for key in ("response_tokens", "score"):
        found[key] = mean(pooled(rounds, key))
    found["tokens"] = {kind: mean(pooled(rounds, kind)) for kind in ("sampling", "no_gradient", "gradient")}
    if "phases" in rounds[0]:
        names = rounds[0]["phases"]
        found["phase_seconds"] = {name: median(one["phases"][name] for one in rounds) for name in names}
    return found


def pooled(rounds: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The measured steps of all rounds."""
    return [value for one in rounds for value in one[key]]


def products(way: Mapping[str, Any]) -> float:
    """Forward passes of one token that a step is worth: backward costs two."""
    tokens = way["tokens"]
    return float(tokens["sampling"] + tokens["no_gradient"] + 3 * tokens["gradient"])


def ratios(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Our step over TRL's step of the same turn: median and quartiles, by both clocks."""
    found: dict[str, Any] = {}
    for clock in CLOCKS:
        pairs = zip(pooled(ours, clock), pooled(theirs, clock), strict=True)
        low, middle, high = quantiles([a / b for a, b in pairs], n=4, method="inclusive")
        found[clock], found[f"{clock}_quartiles"] = middle, [low, high]
    return found | {"goal_met": found["cpu_seconds"] <= GOAL}


def main() -> None:
    """Parse, then compare in children or, as a child, run one way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", help="python of an environment that has TRL and the same torch")
    parser.add_argument("--rounds", type=int, default=2, help="times all processes are started")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each process")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--attention", choices=("sdpa", "eager"), help="default: that of the demo recipe")
    for internal in ("--way", "--plan", "--result", "--fds"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way is None:
        if arguments.trl_python is None:
            parser.error("--trl-python is needed: the python of an environment that has TRL")
        print(json.dumps(compare(arguments), indent=1))
        return
    plan, marks = json.loads(Path(arguments.plan).read_text()), Marks(*map(int, arguments.fds.split(",")))
    trl = arguments.way == "trl"
    found = run_trl(plan, marks) if trl else run_thinwire(arguments.way, plan, marks)
    Path(arguments.result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
