"""Tasks: where problems come from, how they become prompts, and how responses are scored."""

from thinwire.tasks.base import Problem, Score, Task, TaskConfig, make_task
from thinwire.tasks.prompts import PromptTokenizer, encode_prompt, keep_fitting
from thinwire.tasks.rewards import Reward, make_reward

__all__ = [
    "Problem",
    "PromptTokenizer",
    "Reward",
    "Score",
    "Task",
    "TaskConfig",
    "encode_prompt",
    "keep_fitting",
    "make_reward",
    "make_task",
]
