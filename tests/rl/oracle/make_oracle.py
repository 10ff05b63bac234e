"""Make verl_oracle.json: numbers computed by verl 0.9.1 itself on seeded tensors, inputs kept beside outputs.

verl is not a dependency of this project. To make the numbers again, in an environment of its own:

    python -m venv oracle-venv
    oracle-venv/bin/pip install torch==2.13.0 "transformers>=5.5.3,<5.11" tensordict==0.10.0 hydra-core
    oracle-venv/bin/pip install --no-deps verl==0.9.1 ray codetiming
    oracle-venv/bin/pip install requests click jsonschema pyyaml msgpack protobuf packaging numpy
    OMP_NUM_THREADS=1 oracle-venv/bin/python tests/rl/oracle/make_oracle.py

Only `core_algos` and `rollout_corr_helper` are imported; nothing of verl is copied. Tensors are float32 and
a float32 value survives JSON exactly. Padding holds finite garbage, the most that verl bears.

Letters in shape suffixes: `B` rows, `R` response positions.
"""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.ppo import core_algos, rollout_corr_helper

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
LENGTHS = (9, 1, 0, 5, 9, 3)
POSITIONS = 9


def mask() -> Tensor:
    """Six rows of 9 positions, one full twice, one of a single token, one empty."""
    return (torch.arange(POSITIONS) < torch.tensor(LENGTHS)[:, None]).float()


def logprobs(generator: torch.Generator, spread: float) -> tuple[Tensor, Tensor]:
    """Old log-probabilities and new ones `spread` nats apart, garbage of +-50 nats in the padding."""
    old_BR = -3.0 * torch.rand(mask().shape, generator=generator)
    new_BR = old_BR + spread * torch.randn(mask().shape, generator=generator)
    garbage_BR = 50.0 * torch.randn(mask().shape, generator=generator)
    return old_BR, torch.where(mask().bool(), new_BR, garbage_BR)


def policy_case(seed: int, spread: float, low: float, high: float, dual: float, extremes: bool) -> dict:
    """Loss and gradient in every mode, and the three metrics, of one seeded batch."""
    generator = torch.Generator().manual_seed(seed)
    old_BR, new_BR = logprobs(generator, spread)
    advantage_B = torch.randn(len(LENGTHS), generator=generator)
    advantage_B[3] = 0.0
    if extremes:
        advantage_B[0], advantage_B[4] = -1.5, 0.75
        jumps = torch.tensor([-100.0, -30.0, -2.0, 0.1, 1.2, 5.0, 19.0, 30.0, 100.0])
        new_BR[0], new_BR[4] = old_BR[0] + jumps, old_BR[4] + jumps
    advantage_BR = advantage_B[:, None].expand_as(old_BR).contiguous()
    case = {
        "old": old_BR,
        "new": new_BR,
        "advantage_B": advantage_B,
        "mask": mask(),
        "clip": [low, high, dual],
        "loss": {},
        "gradient": {},
    }
    for mode in MODES:
        leaf_BR = new_BR.clone().requires_grad_()
        config = OmegaConf.create(
            {"clip_ratio": 0.2, "clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": dual}
            | {"global_batch_info": {}}
        )
        loss, metrics = core_algos.compute_policy_loss_vanilla(
            old_BR, leaf_BR, advantage_BR, mask(), loss_agg_mode=mode, config=config
        )
        loss.backward()
        case["loss"][mode], case["gradient"][mode] = loss.item(), leaf_BR.grad
    return case | {"metrics": metrics}


def kl_case(seed: int, spread: float, extremes: bool) -> dict:
    """Values per token and the gradient of their sum for k1, k2 and k3."""
    reference_BR, new_BR = logprobs(torch.Generator().manual_seed(seed), spread)
    if extremes:
        new_BR[0] = reference_BR[0] - torch.tensor([-100.0, -25.0, -12.0, -10.5, 0.0, 2.5, 2.7, 19.0, 80.0])
    case = {"reference": reference_BR, "new": new_BR, "mask": mask(), "value": {}, "gradient": {}}
    for kind in ("k1", "k2", "k3"):
        leaf_BR = new_BR.clone().requires_grad_()
        value_BR = core_algos.kl_penalty(leaf_BR, reference_BR, kind)
        (value_BR * mask()).sum().backward()
        case["value"][kind], case["gradient"][kind] = value_BR.detach() * mask(), leaf_BR.grad
    return case


def advantage_case(score_B: Tensor, group_size: int) -> dict:
    """GRPO advantages, standardised and not; one token a row, so that the row's advantage is seen."""
    index = np.arange(len(score_B)) // group_size
    case = {"score": score_B, "group_size": group_size}
    for name, flag in (("standardised", True), ("centred", False)):
        advantage_B1, _ = core_algos.compute_grpo_outcome_advantage(
            score_B[:, None].clone(), torch.ones(len(score_B), 1), index, norm_adv_by_std_in_grpo=flag
        )
        case[name] = advantage_B1[:, 0]
    return case


def aggregation_cases(seed: int) -> dict:
    """Each mode on a whole batch, and its two halves under the whole batch's own denominators."""
    value_BR = torch.randn(mask().shape, generator=torch.Generator().manual_seed(seed))
    case = {
        "value": value_BR,
        "mask": mask(),
        "loss_scale_factor": 7,
        "whole": {},
        "scaled": {},
        "shares": {},
    }
    world = {"batch_num_tokens": int(mask().sum()), "global_batch_size": int((mask().sum(-1) > 0).sum())}
    for mode in MODES:
        case["whole"][mode] = core_algos.agg_loss(value_BR, mask(), mode).item()
        case["scaled"][mode] = core_algos.agg_loss(value_BR, mask(), mode, loss_scale_factor=7).item()
        case["shares"][mode] = [
            core_algos.agg_loss(value_BR[rows], mask()[rows], mode, **world).item()
            for rows in (slice(0, 3), slice(3, 6))
        ]
    return case


def mismatch_case(seed: int, spread: float, gap: float) -> dict:
    """The rollout_corr series and truncated token weights for a trainer that sits `gap` nats lower."""
    rollout_BR, old_BR = logprobs(torch.Generator().manual_seed(seed), spread)
    old_BR = old_BR - gap
    case = {"rollout": rollout_BR, "old": old_BR, "mask": mask(), "weights": {}}
    case["series"] = rollout_corr_helper.compute_rollout_corr_metrics_from_logprobs(
        old_BR, rollout_BR, mask()
    )
    for threshold in (1.5, 2.0):
        weights_BR, _ = rollout_corr_helper.compute_rollout_correction_weights(
            old_BR - rollout_BR, mask(), rollout_is="token", rollout_is_threshold=threshold
        )
        case["weights"][str(threshold)] = weights_BR
    return case


def oracle() -> dict:
    """Every case; names say what is hard about it."""
    scores = torch.Generator().manual_seed(5)
    return {
        "versions": {"verl": version("verl"), "torch": torch.__version__},
        "policy": {
            "near the old policy": policy_case(11, 0.2, 0.2, 0.2, 3.0, False),
            "ratio exactly one": policy_case(12, 0.0, 0.2, 0.2, 3.0, False),
            "extreme ratios": policy_case(13, 1.0, 0.2, 0.2, 3.0, True),
            "asymmetric clips": policy_case(14, 0.5, 0.1, 0.28, 5.0, True),
        },
        "kl": {"small": kl_case(21, 0.1, False), "extreme": kl_case(22, 2.0, True)},
        "advantages": {
            "binary, groups of 8": advantage_case((torch.rand(32, generator=scores) < 0.4).float(), 8),
            "real, groups of 4": advantage_case(torch.randn(20, generator=scores), 4),
            "seven against one": advantage_case(torch.tensor([0.1] * 7 + [1.0]), 8),
            "group of one": advantage_case(torch.randn(5, generator=scores), 1),
            "all equal": advantage_case(torch.tensor([0.7] * 11), 11),
        },
        "aggregation": aggregation_cases(31),
        "mismatch": {
            "small gap": mismatch_case(41, 0.05, 0.0),
            "gap of 15 nats": mismatch_case(42, 3.0, 15.0),
            "trainer above sampler": mismatch_case(43, 1.0, -4.0),
        },
    }


def main() -> None:
    """Write the file beside this script."""
    path = Path(__file__).with_name("verl_oracle.json")
    path.write_text(json.dumps(oracle(), default=lambda value: value.tolist()) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
