"""What other trainers call our series. Whatever is not in these tables keeps its own name."""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

STEP_KEYS = (
    "step",
    "training/global_step",
    "train/global_step",
    "trainer/global_step",
    "global_step",
    "_step",
    "Step",
)
"""Where a row or a column names its step, best first; W&B's own _step counts log calls, not steps."""

RENAMED = {
    # TRL: trainer_state.json, and with train/ or eval/ before it in W&B and TensorBoard.
    "reward": "critic/score/mean",
    "eval_reward": "val/score",
    "kl": "actor/kl_loss",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "clip_ratio": "actor/pg_clipfrac",
    "clip_ratio/region_mean": "actor/pg_clipfrac",
    "clip_ratio/high_mean": "actor/pg_clipfrac/above_range",
    "clip_ratio/low_mean": "actor/pg_clipfrac/below_range",
    "completion_length": "response_length/mean",
    "completions/mean_length": "response_length/mean",
    "completions/max_length": "response_length/max",
    "completions/min_length": "response_length/min",
    "completions/clipped_ratio": "response_length/clip_ratio",
    # verl before rollout_corr/* had its name.
    "mismatch/mismatch_kl": "rollout_corr/kl",
    "mismatch/kl": "rollout_corr/kl",
}
KEPT = {
    "sampling/sampling_logp_difference/mean": "TRL: mean |old - rollout|, read in place of the gap",
    "sampling/importance_sampling_ratio/mean": "TRL: mean importance weight of the sampler's tokens",
}
"""Series of others that have no twin here and are read under their own name."""
VALIDATION_PREFIXES = ("val-core/", "val/test_score/")


def rename(series: Mapping[str, T]) -> tuple[dict[str, T], list[str]]:
    """The same series under our names, and what was renamed in words; a name already taken is left alone."""
    renamed, notes = dict(series), []
    for key in series:
        ours = _ours(key)
        if ours is not None and ours not in renamed:
            renamed[ours] = renamed.pop(key)
            notes.append(f"{key} is read as {ours}")
    validations = sorted(key for key in series if key.startswith(VALIDATION_PREFIXES) and _is_mean(key))
    if validations and "val/score" not in renamed:
        renamed["val/score"] = renamed[validations[0]]
        others = f" (of {len(validations)} validation scores)" if len(validations) > 1 else ""
        notes.append(f"{validations[0]} is read as val/score{others}")
    return renamed, notes


def _ours(key: str) -> str | None:
    if key.startswith("eval/"):
        key = "eval_" + key.removeprefix("eval/")
    key = key.removeprefix("train/")
    return key if key in KEPT else RENAMED.get(key)


def _is_mean(key: str) -> bool:
    """verl: val-core/SOURCE/reward/mean@N; older: val/test_score/SOURCE."""
    return key.startswith("val/test_score/") or key.rpartition("/")[2].startswith("mean@")
