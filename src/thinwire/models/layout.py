"""Whether an architecture can be split into stages, known from its configuration alone."""

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from thinwire.models.load import quiet_transformers
from thinwire.models.stages import split

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 32,
}


def refuse_unsplittable(model: Any) -> None:
    """UserError if the model (which may be on the meta device) has no layout that `split` knows, or if a
    small random one of its architecture in two stages does not reproduce the whole.

    What the configuration switches on (scaling, soft caps, norms of queries) stays; a configuration that
    cannot be made small is left to the check at loading.
    """
    split(model, 1, verify=False)
    config = copy.deepcopy(model.config)
    for name, value in _SMALL.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: _SMALL["num_hidden_layers"]]
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            small = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            small(input_ids=torch.arange(4)[None], use_cache=False)
    except Exception:  # sizes that do not go together in this architecture
        return
    split(small, 2)
