"""Sizes, counts and seconds as text, in a unit that gives a small number."""

from __future__ import annotations


def size_text(size: float) -> str:
    """A number of bytes as text.

    >>> size_text(26615936)
    '25.4 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def count_text(count: float) -> str:
    """A count as text.

    >>> count_text(6738415616)
    '6.74 G'
    """
    for unit in ("", " k", " M", " G"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} T"


def duration_text(seconds: float) -> str:
    """A number of seconds as text.

    >>> duration_text(0.0123)
    '12.3 ms'
    """
    for unit, least in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= least:
            return f"{seconds / least:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
