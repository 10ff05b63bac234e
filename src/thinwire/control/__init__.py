"""The controller: what a run's readings change in the settings of its next step."""

from thinwire.control.config import Actuator, ControllerConfig
from thinwire.control.controller import ControlState, Decision, Plant, decide
from thinwire.control.settings import Settings

__all__ = ["Actuator", "ControlState", "ControllerConfig", "Decision", "Plant", "Settings", "decide"]
