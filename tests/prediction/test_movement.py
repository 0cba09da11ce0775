"""Bytes that functions of ATen read and write."""

import pytest
import torch

from meshwright.prediction.movement import moved_by

X = torch.zeros(100, 10)  # 4000 bytes
TABLE, IDS = torch.zeros(1000, 10), torch.zeros(100, dtype=torch.long)  # 40 kB, 800 bytes


@pytest.mark.parametrize(
    ("name", "args", "given", "nbytes"),
    [
        ("add", (X, X), X, 12000),
        ("empty", ([100, 10],), X, 0),
        ("zeros_like", (X,), X, 4000),
        ("fill_", (X, 0.0), X, 4000),
        ("copy_", (X, X.bfloat16()), X, 6000),
        ("embedding", (TABLE, IDS), X, 8800),
        ("mul", (X, torch.zeros(1, 10).expand(100, 10)), X, 8040),
        ("all_gather_copy_in", ([X], TABLE, [1000], 1000, 0), (X, TABLE), 8000),
    ],
)
def test_bytes(name, args, given, nbytes):
    assert moved_by(name, args, {}, given if isinstance(given, tuple) else (given,)) == nbytes
