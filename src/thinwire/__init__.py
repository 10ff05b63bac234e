"""thinwire: reinforcement learning of language models over thin wires."""

__version__ = "0.1.0"
