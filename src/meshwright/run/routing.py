"""Parameters that get a gradient on some ranks only, because a value decided which of them were used."""

from __future__ import annotations


class Routed:
    """(placeholder)"""
