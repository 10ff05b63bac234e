"""`thinwire codecs list|bench|growth`: options, and what each action does.

Imports that load torch stand inside the functions, so that --help and usage errors answer at once.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.codec_options import (
    GROWTH_SAMPLED,
    SAMPLED,
    Command,
    checked,
    refuse_below_one,
    sampled,
    shared_options,
)
from thinwire.commands import Result
from thinwire.core.errors import UserError
from thinwire.train.streams import forgiving

if TYPE_CHECKING:
    from thinwire.bench.passes import Subject
    from thinwire.bench.store import Saved
    from thinwire.models.load import LoadedModel
    from thinwire.train.config import Recipe

SWEEP = (0.2, 0.4, 0.8, 1.6, 4.0)
"""Bits a value of --sweep."""


def declare(add: Callable[..., Command]) -> None:
    """Add the actions and their options to the command line."""
    listing = add("list", list_codecs, "Name, bias, settings and bits of every codec.", False)
    listing.option(
        "--width", type=int, default=1536, help="hidden size the bits are given for (default 1536)"
    )
    measure = add("bench", bench, "Codecs on a model's own tokens: gap, error, gradient, bits, time.", True)
    shared_options(measure, SAMPLED)
    measure.option("--draws", type=int, default=4, help="steps' draws of a codec that draws (default 4)")
    measure.option("--fires", type=int, default=16, help="anchor fires on the statistics (default 16)")
    measure.option(
        "--cadence", type=int, default=20, help="steps between fires, for the side channel's share"
    )
    measure.option("--tokens-per-step", type=int, metavar="N", help="default 256 rollouts of the mean length")
    measure.option("--sweep", action="store_true", help=f"also gaps at {SWEEP} bits a value")

    law = add("growth", growth, "How errors add up when draws and bases are held L steps.", True)
    shared_options(law, SAMPLED | GROWTH_SAMPLED)
    law.option(
        "--chunk-rollouts", type=int, default=32, metavar="N", help="a renewal learns from (default 32)"
    )
    law.option("--steps", type=int, default=512, metavar="T", help="steps that add up (default 512)")
    law.option("--hold", type=_whole_numbers, default=[1, 5, 10, 20], metavar="L,L,...", help="1,5,10,20")
    law.option("--fires", type=int, default=16, help="anchor fires at the first step (default 16)")


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,5,10") from None


def list_codecs(options: argparse.Namespace) -> Result:
    """Name, formula, bias, wire cost and settings of every codec at a width."""
    import torch

    from thinwire.codecs import CODECS

    if options.width < 1:
        raise UserError(f"--width must be at least 1 channel, got {options.width}")
    listed = []
    for kind in CODECS:
        bound = kind.model_validate({"name": kind.model_fields["name"].default}).at_width(options.width)
        fields = {
            name: info for name, info in kind.model_fields.items() if name not in ("name", "hidden_dim")
        }
        listed.append(
            {
                "name": bound.name,
                "about": (kind.__doc__ or "").strip().splitlines()[0],
                "settings": {name: info.description for name, info in fields.items()},
                "defaults": {name: getattr(bound, name) for name in fields},
                "unbiased": sorted(bound.unbiased),
                "learns": bound.learns,
                "bits_per_token": bound.wire_bits(torch.bfloat16),
                "bits_per_value": bound.wire_bits_per_value(torch.bfloat16),
            }
        )
    return Result({"width": options.width, "codecs": listed}, _list_text(options.width, listed))


def _list_text(width: int, listed: Sequence[dict[str, Any]]) -> str:
    lines = [f"bits a token a boundary, each way, at width {width} in bf16, default settings"]
    for codec in listed:
        bias = "unbiased" if len(codec["unbiased"]) == 2 else " ".join(["biased", *codec["unbiased"]])
        lines.append(
            f"{codec['name']}: {codec['bits_per_token']} bits, {codec['bits_per_value']:.3f} per value, "
            f"{bias}{', learned by the anchor' if codec['learns'] else ''}. {codec['about']}"
        )
        for name, about in codec["settings"].items():
            value = codec["defaults"][name]
            shown = str(value).lower() if isinstance(value, bool) else value
            given = "" if value is None else f" = {shown}"
            lines.append(f"    codec.{name}{given}: {' '.join(str(about).split())}")
    return "\n".join(lines)


def bench(options: argparse.Namespace) -> Result:
    """Every codec on the same tokens: JSON, tables and, with --out, a page."""
    refuse_below_one(options, "draws", "fires", "cadence", "tokens_per_step")
    recipe = checked(options)

    from thinwire.bench import run
    from thinwire.bench.plan import Plan
    from thinwire.bench.table import describe
    from thinwire.codec_specs import entries_for, sweep_entries
    from thinwire.reports.bench_page import write_bench

    loaded, subject = _load(recipe)
    entries, refused = entries_for(options.codec, options.bits_per_value, subject.hidden_dim)
    points, missed = sweep_entries(options.codec, SWEEP, subject.hidden_dim) if options.sweep else ([], [])
    plan = Plan(
        entries,
        points,
        fires=options.fires,
        draws=options.draws,
        seed=options.seed,
        cadence=options.cadence,
        tokens_per_step=options.tokens_per_step,
    )
    found = run.bench(subject, _rollouts(options, recipe, loaded, subject), plan, _say)
    found["refused"] = refused + missed + found["refused"]
    return _finished(found, describe(found), options.out, write_bench)


def growth(options: argparse.Namespace) -> Result:
    """How errors add up over steps when what a codec draws and learns is held: JSON, table, page."""
    refuse_below_one(options, "fires", "chunk_rollouts")
    holds = sorted(set(options.hold))
    if holds[0] < 1 or options.steps < 2 * holds[-1] or options.steps < 8:
        raise UserError(
            f"--hold must lie in 1..half of --steps and --steps be 8 or more, got {holds} and {options.steps}"
        )
    recipe = checked(options)

    from thinwire.bench.growth import GrowthPlan
    from thinwire.bench.growth import growth as measure
    from thinwire.bench.growth_table import describe
    from thinwire.codec_specs import entries_for
    from thinwire.reports.growth_page import write_growth

    loaded, subject = _load(recipe)
    entries, refused = entries_for(options.codec, options.bits_per_value, subject.hidden_dim)
    plan = GrowthPlan(
        entries, tuple(holds), options.steps, options.fires, options.seed, options.chunk_rollouts
    )
    found = measure(subject, _rollouts(options, recipe, loaded, subject), plan, _say)
    found["refused"] = refused
    return _finished(found, describe(found), options.out, write_growth)


def _finished(
    found: dict[str, Any], text: str, out: Path | None, write: Callable[[Mapping[str, Any], Path], Path]
) -> Result:
    if out is None:
        return Result(found, text)
    page = write(found, out)
    return Result(found | {"out": str(out), "report": str(page)}, f"{text}\nreport: {page}")


def _load(recipe: "Recipe") -> "tuple[LoadedModel, Subject]":
    from thinwire.bench.passes import Subject
    from thinwire.models.load import load_model

    loaded = load_model(recipe.model)
    return loaded, Subject.of(loaded.model, recipe.model.stages, recipe.model.boundaries)


def _rollouts(
    options: argparse.Namespace, recipe: "Recipe", loaded: "LoadedModel", subject: "Subject"
) -> "Saved":
    from thinwire.bench.collect import Source, collect, reload

    if options.load is not None:
        return reload(options.load, loaded, subject)
    share = float(sampled(options, "statistics_share"))
    source = Source(recipe.task, recipe.sampling, share, options.seed, options.save)
    return collect(loaded, subject, source, _say)


def _say(line: str) -> None:
    print(line, file=forgiving(sys.stderr), flush=True)
