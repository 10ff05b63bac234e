"""The loss side of GRPO as pure functions on tensors."""
