"""The list of series is what the documentation shows."""

from pathlib import Path

from thinwire.core.records import SERIES, markdown


def test_docs_series_is_the_declared_list():
    assert markdown() in (Path(__file__).parents[2] / "docs" / "series.md").read_text()


def test_no_series_is_declared_twice_or_without_unit_and_formula():
    assert len({series.key for series in SERIES}) == len(SERIES)
    assert all(series.unit and series.formula for series in SERIES)
