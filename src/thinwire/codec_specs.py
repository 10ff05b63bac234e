"""Codecs as typed on a command line, NAME[:key=value,...], at budgets. Loads torch."""

from collections.abc import Iterable, Sequence
from typing import Any

from thinwire.bench.plan import Entry
from thinwire.codecs import CODECS
from thinwire.core.errors import UserError
from thinwire.train.config import codec_of, parse_overrides

BUDGET = "bits_per_value"
"""The setting that every codec with a choice of budgets takes."""
Refusal = dict[str, Any]
"""A codec that cannot meet a budget: its label, the budget, and the codec's own reason."""


def parse_spec(spec: str) -> dict[str, Any]:
    """The [codec] table that NAME[:key=value,...] stands for; values are TOML, or else plain text."""
    name, _, rest = spec.partition(":")
    table: dict[str, Any] = {"name": name}
    for pair in rest.split(",") if rest else ():
        key, equals, _ = pair.partition("=")
        if not equals or not key or "." in key:
            raise UserError(f"--codec {spec!r}: {pair!r} is no key=value; write NAME:key=value,key=value")
        table |= parse_overrides([f"--{pair}"])
    codec_of(table)  # an unknown name or key is refused before a model is loaded
    return table


def entries_for(
    specs: Sequence[str], bits_per_value: float | None, width: int
) -> tuple[list[Entry], list[Refusal]]:
    """The codecs asked for, at the budget unless they name one themselves: what does not fit is an error.

    With none asked for, every codec of the package that can meet the budget, and those that cannot.
    """
    if not specs:
        return _fitting(((name, {"name": name}, bits_per_value) for name in _names()), width)
    tables = [(spec, _at_budget(parse_spec(spec), bits_per_value)) for spec in specs]
    return [Entry(spec, codec_of(table).at_width(width)) for spec, table in tables], []


def sweep_entries(
    specs: Sequence[str], budgets: Sequence[float], width: int
) -> tuple[list[Entry], list[Refusal]]:
    """The codecs asked for (default all) that take a budget, at each of these, whatever else they name."""
    wanted = []
    for label, table in [(spec, parse_spec(spec)) for spec in specs] or [(n, {"name": n}) for n in _names()]:
        table.pop(BUDGET, None)
        if BUDGET in type(codec_of(table)).model_fields:
            wanted += [(label, table, budget) for budget in budgets]
    return _fitting(wanted, width)


def _fitting(
    wanted: Iterable[tuple[str, dict[str, Any], float | None]], width: int
) -> tuple[list[Entry], list[Refusal]]:
    entries, refused = [], []
    for label, table, budget in wanted:
        try:
            entries.append(Entry(label, codec_of(_at_budget(table, budget)).at_width(width)))
        except UserError as error:
            refused.append({"label": label, BUDGET: budget, "reason": str(error)})
    return entries, refused


def _at_budget(table: dict[str, Any], bits_per_value: float | None) -> dict[str, Any]:
    """The table with the budget laid in where the codec takes one and the table does not name it."""
    if bits_per_value is None or BUDGET in table or BUDGET not in type(codec_of(table)).model_fields:
        return table
    return {**table, BUDGET: bits_per_value}


def _names() -> list[str]:
    return [str(kind.model_fields["name"].default) for kind in CODECS]
