"""Run directories with series shaped like real ones, for tests that need no training."""

import json
from pathlib import Path
from typing import Any

import numpy as np

ARMS = ("dense", "exact-k", "subspace-20", "subspace-10")
HOSTILE = (
    '<script>document.documentElement.dataset.hacked="yes"</script><img src="https://example.com/x.png">'
)


def score_level(arm: str, num_steps: int) -> np.ndarray:
    """Expected score of each step: dense learns, exact-k holds, the subspaces fall in a lasting cliff."""
    t = np.arange(1, num_steps + 1) / num_steps
    if arm == "dense":
        return 0.58 + 0.20 * t
    if arm == "exact-k":
        return np.full(num_steps, 0.58)
    return 0.60 - 0.32 / (1 + np.exp(-(t - (0.45 if arm == "subspace-20" else 0.55)) * 14))


def metrics(arm: str, seed: int, num_steps: int) -> list[dict[str, Any]]:
    """One record a step with the keys of a real metrics.jsonl; binomial scores of 256 answers."""
    rng = np.random.default_rng([seed, ARMS.index(arm)])
    t = np.arange(1, num_steps + 1) / num_steps
    codec = arm != "dense"
    falling = arm.startswith("subspace")
    gap = {"dense": 0 * t, "exact-k": 1.9 + 0.1 * t}.get(
        arm, 3.1 + (1.2 if arm == "subspace-20" else 1.0) * t**2
    )
    reference_kl = {"dense": 0.004 * t, "exact-k": 0.2 * t}.get(arm, 3.4 * t**2)
    entropy = {"dense": 0.6 - 0.2 * t, "exact-k": 1.6 + 0 * t}.get(arm, 0.1 + 1.4 * (1 - t) ** 2)
    clip = {"dense": 0.01 + 0 * t, "exact-k": 0.025 - 0.009 * t}.get(arm, 0.02 + 0.11 * t)
    score = rng.binomial(256, score_level(arm, num_steps)) / 256

    def noisy(level: float, size: float) -> float:
        return float(level * (1 + size * rng.standard_normal()) + 1e-6)

    records: list[dict[str, Any]] = [{"step": 0, "val/score": 0.58}]
    for i in range(num_steps):
        record = {
            "step": i + 1,
            "critic/score/mean": float(score[i]),
            "actor/entropy": noisy(entropy[i], 0.05),
            "actor/kl_loss": noisy(reference_kl[i], 0.08),
            "rollout_corr/kl": noisy(gap[i], 0.03),
            "actor/pg_clipfrac": noisy(clip[i], 0.15),
            "actor/pg_clipfrac_lower": noisy(clip[i] / 20, 0.4),
            "actor/grad_norm": noisy(1.7 + (2.5 * t[i] if falling else 0), 0.12),
            "probe/gap_policy_part": noisy(0.2 * t[i], 0.05),
            "probe/gap_view_part": noisy(gap[i] - gap[0] - 0.2 * t[i], 0.05),
            "error_growth/exponent": noisy(0.97 if falling else 0.5, 0.02),
            "error_growth/cosine": noisy(0.85 if falling else 0.0, 0.05),
            "controller/demand": 0.3 if falling and i >= 20 else 0.0,
            "controller/view_alignment_weight": 0.03 if falling and i >= 20 else 0.0,
            "controller/kl_coefficient": 0.001,
            "controller/learning_rate_scale": 1.0,
            "wire/forward_bytes": 240_000 if codec else 4_800_000,
            "wire/backward_bytes": 120_000 if codec else 2_400_000,
            "wire/anchor_bytes": 150_000 if falling and i % 20 == 0 else 0,
            "wire/side_channel_bytes": 3_072 if falling and i % 20 == 0 else 0,
            "wire/dense_bytes": 7_200_000,
            "wire/bits_per_value": 0.75 if codec else 16.0,
        }
        if (i + 1) % 20 == 0:
            record["val/score"] = float(rng.binomial(500, score_level(arm, num_steps)[i]) / 500)
            record["probe/kl_dense"] = noisy(0.01 + 0.1 * t[i] * (3 if falling else 1), 0.1)
            record["movement/relative_change"] = 0.01 * t[i]
            record["movement/center_of_mass"] = 3.5 + t[i]
            record["probe/kl_gain"] = noisy(10.0 if falling else 1.5, 0.1)
            record["probe/held_kl"] = noisy(0.01 + 0.1 * t[i], 0.1)
            record["probe/entropy_dense"] = noisy(0.6 - 0.15 * t[i], 0.05)
        records.append(record)
    return records


def write_run(folder: Path, arm: str, seed: int, num_steps: int = 200, response: str = "= 59") -> Path:
    """A complete run directory."""
    folder.mkdir(parents=True)
    keep = "subspace_dim = 6" if arm.startswith("subspace") else "keep = 6"
    codec = '[codec]\nname = "identity"\n' if arm == "dense" else f'[codec]\nname = "{arm[:8]}"\n{keep}\n'
    (folder / "config.toml").write_text(
        f'name = "two-digit sums"\nseed = {seed}\nsteps = {num_steps}\n'
        '[model]\npath = "embedded"\nstages = 2\ndtype = "float32"\n[task]\nname = "arithmetic"\n'
        f"[sampling]\nprompts = 32\ngroup_size = 8\n[optimizer]\nlearning_rate = 2e-4\n{codec}"
    )
    (folder / "environment.json").write_text(json.dumps({"model": {"hidden_size": 128, "boundaries": [3]}}))
    records = metrics(arm, seed, num_steps)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    answers = [
        {
            "step": step,
            "sample": 0,
            "prompt": "17 + 42",
            "response": response,
            "score": 1.0,
            "answer": "59",
            "finished": True,
        }
        for step in (1, num_steps)
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    if arm.startswith("subspace"):
        lines = [
            {"step": s, "blocks": [{"block": b, "relative_change": 1e-4 * s * (1 + b)} for b in range(8)]}
            for s in range(20, num_steps + 1, 20)
        ]
        (folder / "movement.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if arm == "subspace-20":
        event = {
            "step": 20,
            "event": "controller",
            "actuator": "view_alignment_weight",
            "from": 0.0,
            "to": 0.03,
        }
        event |= {"demand": 0.3, "reason": f"error growth <exponent> 0.97 {response}"}
        (folder / "events.jsonl").write_text(json.dumps(event) + '\nnot json\n{"step": "x"}\n')
    summary = {"name": "two-digit sums", "arm": arm, "seed": seed, "status": "done", "steps": num_steps}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def write_comparison(root: Path, seeds: tuple[int, ...] = (1, 2, 3), num_steps: int = 200) -> Path:
    """A compare directory, <arm>/seed-<n>; one arm's answers try to run a script and to load an image."""
    for arm in ARMS:
        for seed in seeds:
            response = HOSTILE if arm == "exact-k" else "= 59"
            write_run(root / arm / f"seed-{seed}", arm, seed, num_steps, response)
    return root
