"""Quantities as text: a number, a space and a unit, ``3.35 TB/s``.

Prefixes of bytes are decimal (``GB``) or binary (``GiB``). ``Gb/s`` are bits per second, as in data sheets of networks.
Numbers are read and written as decimals, so that a quantity that was written is read as the same float.
"""

from __future__ import annotations

import re
from decimal import Decimal
from math import isfinite
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["flop", "flop/s", "B", "B/s", "s"]

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES = {f"{prefix}B": Decimal(size) for prefix, size in (_DECIMAL | _BINARY).items()}

UNITS: dict[Kind, dict[str, Decimal]] = {
    "flop": {f"{prefix}flop": Decimal(size) for prefix, size in _DECIMAL.items()},
    "flop/s": {f"{prefix}flop/s": Decimal(size) for prefix, size in _DECIMAL.items()},
    "B": _BYTES,
    "B/s": {f"{unit}/s": size for unit, size in _BYTES.items()}
    | {f"{prefix}b/s": Decimal(size) / 8 for prefix, size in _DECIMAL.items()},
    "s": {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6"), "µs": Decimal("1e-6"), "ns": Decimal("1e-9")},
}
"""Kind of quantity → unit → its size in bytes, flops or seconds."""

EXAMPLES: dict[Kind, str] = {"flop": "1 Gflop", "flop/s": "989 Tflop/s", "B": "80 GiB", "B/s": "3.35 TB/s", "s": "5 us"}

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?) +(\S+)")


def read_quantity(text: object, kind: Kind) -> float | None:
    """The quantity in bytes, flops or seconds; None if the text is not a number, a space and a unit of this kind.

    >>> read_quantity("400 Gb/s", "B/s")
    50000000000.0
    >>> read_quantity("3.35 TB", "B/s") is None
    True
    """
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2] not in UNITS[kind]:
        return None
    value = float(Decimal(match[1]) * UNITS[kind][match[2]])
    return value if isfinite(value) else None


def spell_quantity(value: float, kind: Kind) -> str:
    """The quantity as text, from which ``read_quantity`` reads the same float.

    The unit is the largest one in which the number is at least 1. Bytes have a unit that divides them, so that 80 GiB is not
    written as 85.89934592 GB.

    >>> spell_quantity(3.35e12, "B/s"), spell_quantity(80 * 2**30, "B"), spell_quantity(0.0, "s")
    ('3.35 TB/s', '80 GiB', '0 s')
    """
    exact = Decimal(repr(value))
    fitting = [(unit, size) for unit, size in _written_units(kind).items() if exact >= size]
    if kind == "B":  # 85899345920 B is 80 GiB, and 85.89934592 GB
        exact_units = [(unit, size) for unit, size in fitting if exact % size == 0]
        fitting = [max(exact_units, key=lambda pair: pair[1])] if exact_units else [("B", Decimal(1))]
    smallest = min(_written_units(kind).items(), key=lambda pair: pair[1])
    unit, size = max(fitting, key=lambda pair: pair[1]) if fitting else smallest
    if not value:
        unit, size = kind, Decimal(1)
    number = format((exact / size).normalize(), "f")
    return f"{number} {unit}"


def _written_units(kind: Kind) -> dict[str, Decimal]:
    """The units that are written: rates in bytes with decimal prefixes, no bits, and us as ASCII."""
    units = UNITS[kind]
    if kind == "B/s":
        units = {unit: size for unit, size in units.items() if "i" not in unit and "B" in unit}
    return {unit: size for unit, size in units.items() if unit != "µs"}
