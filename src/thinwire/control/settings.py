"""What may differ between two steps of a run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What is fixed within a step and a controller may change between steps."""

    kl_coefficient: float
    """Weight of the KL term."""
    view_alignment_weight: float
    """Weight of the view alignment term."""
    anchor_cadence: int
    """Rollout steps between anchor fires, at least 1."""
    learning_rate_scale: float = 1.0
    """Times optimizer.learning_rate."""
    bits_per_value: float | None = None
    """Wire budget of the step's codec, forward and backward alike; None = the recipe's."""
    codec_off: bool = False
    """Run this step's passes dense."""
    extra_anchor: bool = False
    """Fire the anchor before this step whatever the cadence says."""
