"""The [controller] table: set points, the price of a false alarm, and how far each actuator may go."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from thinwire.core.errors import UserError

ActuatorName = Literal[
    "view_alignment_weight", "kl_coefficient", "learning_rate_scale", "anchor_cadence", "bits_per_value"
]
"""Continuous actuators: fields of Settings."""

NonNegative = Annotated[float, Field(ge=0)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Actuator(_Table):
    """Bounds of one continuous actuator: from the recipe's value to `limit`, at most `rate` a look."""

    limit: NonNegative
    """Value at full demand; the recipe's own value is the other bound."""
    rate: float = Field(gt=0)
    """Largest change at one look, in the setting's own unit."""


class ControllerConfig(_Table):
    """Off by default. The set point is on the gap's SLOPE, never on its level."""

    on: bool = False
    """Whether readings change settings at all."""
    look_every: int = Field(20, ge=1)
    """Rollout steps between looks; nothing changes between them."""
    window: int = Field(120, ge=20)
    """Steps a slope is fitted over, at most; every action starts the window again."""
    min_window: int = Field(60, ge=20)
    """Steps a slope is fitted over, at least."""
    slope_bound: NonNegative = 0.001
    """Set point: the gap may rise by this many nats a step (600 stable steps of a reference run: 0.00085)."""
    grad_norm_rise: NonNegative = 1.0
    """Set point: the gradient norm may rise by this share of its level over a window."""
    false_alarm: float = Field(0.05, gt=0, lt=1)
    """Bound on the chance that the slope tests touch a stationary run, over all its looks."""
    gain: float = Field(2.0, gt=0)
    """Demand added by an alarm for a reading that rises by its own level over a window."""
    release_looks: int = Field(5, ge=1)
    """Looks without an alarm before demand is given back."""
    release: float = Field(0.1, gt=0)
    """Demand given back at each such look."""
    persistent_exponent: float = Field(0.8, gt=0.5, le=1)
    """Error growth above which the same thing is thrown away every step (1/2 = redrawn, 1 = held)."""
    settled_exponent: float = Field(0.65, ge=0.5, le=1)
    """Error growth below which it no longer does (hysteresis)."""
    feed_forward: NonNegative = 0.3
    """Least demand while the error is persistent."""
    dense_kl: dict[str, NonNegative] = Field(default_factory=dict)
    """probe/kl_dense of a dense control by step, linear in between and held at the ends; empty = not used."""
    dense_kl_factor: float = Field(2.0, gt=0)
    """Alarm where probe/kl_dense exceeds this many times the dense control's."""
    order: tuple[ActuatorName, ...] = (
        "view_alignment_weight",
        "kl_coefficient",
        "learning_rate_scale",
        "anchor_cadence",
        "bits_per_value",
    )
    """Split range: demand 0..1 drives the first actuator, 1..2 the second, ...; cheapest first."""
    view_alignment_weight: Actuator | None = Actuator(limit=0.1, rate=0.03)
    """Restoring force without wire; it sharpens the sampler."""
    kl_coefficient: Actuator | None = Actuator(limit=0.01, rate=0.003)
    """Holds the policy near the reference."""
    learning_rate_scale: Actuator | None = Actuator(limit=0.3, rate=0.25)
    """Slows everything."""
    anchor_cadence: Actuator | None = Actuator(limit=5, rate=5)
    """Fresher statistics, paid in dense anchor traffic (codecs that learn)."""
    bits_per_value: Actuator | None = None
    """More wire (codecs whose budget may change between steps: exact-k)."""
    extra_anchor_every: int = Field(0, ge=0)
    """Least steps between anchors fired by an alarm; 0 = none (codecs that learn)."""
    codec_off_every: int = Field(0, ge=0)
    """Least steps between single steps run dense after an alarm; 0 = none."""
    stop_looks: int = Field(0, ge=0)
    """Alarms in a row at full demand before the run is stopped with a checkpoint; 0 = never."""

    @field_validator("dense_kl")
    @classmethod
    def _steps(cls, table: dict[str, float]) -> dict[str, float]:
        wrong = [step for step in table if not step.isdigit()]
        if wrong:
            raise UserError(
                f"controller.dense_kl must map steps to nats, such as 100 = 0.2, got {wrong[0]!r}"
            )
        return table

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.settled_exponent > self.persistent_exponent:
            raise UserError(
                f"controller.settled_exponent must be at most {self.persistent_exponent}, the "
                f"persistent_exponent, got {self.settled_exponent}"
            )
        if self.min_window > self.window:
            raise UserError(
                f"controller.min_window must be at most {self.window}, the window, got {self.min_window}"
            )
        if self.anchor_cadence is not None and self.anchor_cadence.limit < 1:
            raise UserError(
                f"controller.anchor_cadence.limit must be 1 step or more, got {self.anchor_cadence.limit}"
            )
        if len(set(self.order)) < len(self.order):
            raise UserError(f"controller.order must name every actuator once, got {list(self.order)}")
        return self
