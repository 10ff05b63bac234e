"""The growth of errors as text for a terminal."""

from collections.abc import Mapping
from typing import Any

from thinwire.bench.table import fill, label, new_table, number, rendered

KEYS = ("exponent", "prefactor", "effective_hold", "cosine", "step_error", "accumulated")


def describe(found: Mapping[str, Any]) -> str:
    """One table of at most 80 columns and what its columns mean."""
    model, scored = found["model"], found["scored"]
    head = (
        f"{model['source']}, width {model['width']}, boundaries after blocks "
        f"{', '.join(map(str, model['boundaries']))}. The same {scored['tokens']} tokens cross "
        f"{found['steps']} times."
    )
    table = new_table("codec", "renews", "held", "exponent", "factor", "eff. hold", "cosine", "|e|", "|S|")
    for row in found["codecs"]:
        for one in row["held"]:
            table.add_row(
                label(row["label"]),
                renewed(row),
                "for good" if one["for_good"] else str(one["hold"]),
                *(number(one[key]) for key in KEYS),
            )
    notes = (
        "exponent of |S_T| ~ T^H: 1 the same error every step, 0.5 an independent one. factor c of "
        "|S_T| = c sqrt(L T) |e| at T >= 8 L: 1 if independent. eff. hold: the L that the growth over "
        "T/2 steps amounts to. cosine of successive renewals' errors. |e|, |S|: one step's and T/2 steps' "
        "error over |h| (an unbiased codec's falls with the number of tokens). A state is relearned from "
        f"{found['chunk_rollouts']} rollouts, {found['learning_chunks']} different sets in turn, of the same "
        "weights."
    )
    refused = [fill(f"not measured: {one['label']}: {one['reason']}") for one in found["refused"]]
    return "\n".join([fill(head), rendered(table), *refused, fill(notes)])


def renewed(row: Mapping[str, Any]) -> str:
    """What changes from one renewal to the next: the draw, the learned state, both or none."""
    if row["draws"]:
        return "both" if row["learns"] else "draw"
    return "state" if row["learns"] else "none"
