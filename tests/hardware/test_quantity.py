"""Quantities are read strictly, and written so that they read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.hardware.quantity import UNITS, read_quantity, spell_quantity


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("989 Tflop/s", "flop/s", 989e12),
        ("3.35 TB/s", "B/s", 3.35e12),
        ("400 Gb/s", "B/s", 50e9),
        ("80 GiB", "B", 80 * 2**30),
        ("141 GB", "B", 141e9),
        ("5 us", "s", 5e-6),
        ("5 µs", "s", 5e-6),
        ("1.5e-3 ms", "s", 1.5e-6),
        ("0 s", "s", 0.0),
        ("2  Gflop", "flop", 2e9),
    ],
)
def test_a_quantity_is_a_number_and_a_unit(text, kind, value) -> None:
    assert read_quantity(text, kind) == value


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("3.35 TB", "B/s"),  # a size is no rate
        ("3.35TB/s", "B/s"),
        ("3.35 tb/s", "B/s"),
        ("3.35", "B/s"),
        (3.35e12, "B/s"),
        ("-1 us", "s"),
        ("nan us", "s"),
        ("1 GiB/s ", "B/s"),
        ("1_000 us", "s"),
        ("five us", "s"),
        ("1e999 s", "s"),
        (None, "s"),
    ],
)
def test_anything_else_is_none(text, kind) -> None:
    assert read_quantity(text, kind) is None


@given(st.floats(1e-12, 1e18), st.sampled_from(sorted(UNITS)))
def test_what_is_written_reads_back_as_the_same_number(value, kind) -> None:
    assert read_quantity(spell_quantity(value, kind), kind) == value


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (989e12, "flop/s", "989 Tflop/s"),
        (50e9, "B/s", "50 GB/s"),
        (80 * 2**30, "B", "80 GiB"),
        (100e3, "B", "100 kB"),
        (1, "B", "1 B"),
        (7e-10, "s", "0.7 ns"),
    ],
)
def test_the_unit_makes_the_number_short(value, kind, text) -> None:
    assert spell_quantity(value, kind) == text
