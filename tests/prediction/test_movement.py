"""Bytes that functions of ATen read and write."""

import pytest
import torch

from meshwright.prediction.movement import moved_by
from meshwright.prediction.tracker import _kind as kind_of
from meshwright.spmd.torch_functions import flops_of

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


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_on_a_cpu_counts_as_many_operations_as_that_of_a_gpu(causal):
    q, k = torch.zeros(2, 4, 8, 16), torch.zeros(2, 2, 8, 16)  # 4 heads, two for each of keys
    cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    gpu = torch.ops.aten._scaled_dot_product_flash_attention
    whole = 2 if causal else 1  # torch's formulas count what is masked, too
    forward = flops_of(cpu.default, (q, q, q, 0.0, causal), {}, None)
    assert whole * forward == flops_of(gpu.default, (q, q, q), {}, (q,)) == 2 * 2 * 2 * 4 * 8 * 8 * 16
    assert flops_of(cpu.default, (q, k, k, 0.0, causal), {}, None) == forward
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    assert flops_of(backward.default, (q, q, q, q, q, q, 0.0, causal), {}, None) == 2.5 * forward
    assert (kind_of(cpu.default, 1), kind_of(backward.default, 1)) == ("attention", "attention_backward")
