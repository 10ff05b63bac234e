"""Rollouts and statistics of a model, sampled now or taken from a file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.bench.errors import refuse_non_finite
from thinwire.bench.passes import Subject, statistics
from thinwire.bench.plan import Say
from thinwire.bench.rollouts import micro_batches, sample, split_by_prompt
from thinwire.bench.store import Saved, load, save
from thinwire.models.load import LoadedModel
from thinwire.sampling.base import SamplingConfig
from thinwire.tasks.base import TaskConfig, make_task


@dataclass(frozen=True)
class Source:
    """How rollouts are sampled and split, and where they are kept."""

    task: TaskConfig
    sampling: SamplingConfig
    statistics_share: float
    seed: int
    save: Path | None = None


def collect(loaded: LoadedModel, subject: Subject, source: Source, say: Say) -> Saved:
    """Sample, split by prompt, take the statistics of the first part; UserError where they are not finite."""
    task = make_task(source.task, source.seed, loaded.tokenizer)
    say(f"sampling {source.sampling.prompts} rollouts")
    rows = sample(loaded, task, source.task, source.sampling, source.seed)
    sampled = split_by_prompt(rows, source.statistics_share)
    say(f"statistics of {len(sampled.statistics.sample)} rollouts")
    tempered = subject.at(source.sampling.temperature)
    forward, backward = statistics(tempered, micro_batches(sampled.statistics, subject.device))
    for b, (ahead, back) in enumerate(zip(forward, backward, strict=True)):
        refuse_non_finite(ahead, b, "forward")
        refuse_non_finite(back, b, "backward")
    saved = Saved(sampled, forward, backward, _facts(loaded, subject, source))
    if source.save is not None:
        say(f"kept in {source.save}: {save(source.save, saved) / 1e6:.1f} MB")
    return saved


def reload(path: Path, loaded: LoadedModel, subject: Subject) -> Saved:
    """What --save kept, for the same weights and boundaries."""
    return load(path, _identity(loaded, subject), subject.device)


def _facts(loaded: LoadedModel, subject: Subject, source: Source) -> dict[str, Any]:
    return {
        **_identity(loaded, subject),
        "source": Path(loaded.source).name,
        "task": source.task.model_dump(mode="json", exclude_none=True),
        "temperature": source.sampling.temperature,
        "max_new_tokens": source.sampling.max_new_tokens,
        "statistics_share": source.statistics_share,
        "sampling_seed": source.seed,
    }


def _identity(loaded: LoadedModel, subject: Subject) -> Mapping[str, Any]:
    return {
        "fingerprint": loaded.fingerprint,
        "dtype": str(subject.dtype).removeprefix("torch."),
        "width": subject.hidden_dim,
        "boundaries": list(subject.stages.after),
    }
