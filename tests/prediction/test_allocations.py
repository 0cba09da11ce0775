"""What a convolution takes while it runs, against what torch's allocator reports."""

import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from meshwright.prediction.allocations import convolution_workspace


def taken(run):
    """Bytes at most, and after it."""
    run()  # what is made once is there
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    changes = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        live += change.nbytes()
        most = max(most, live)
    return most, live, kept


@pytest.mark.parametrize(
    "shape",
    [(8, 32, 64, 32, 3), (4, 64, 64, 64, 3), (2, 3, 32, 64, 3), (4, 32, 3, 64, 3), (4, 32, 17, 64, 5), (4, 32, 3, 64, 1), (4, 64, 32, 32, 1)],
)  # fmt: skip
def test_a_convolution_s_workspace(shape):
    rows, channels, out_channels, side, kernel = shape
    x, weight = torch.randn(rows, channels, side, side), torch.randn(out_channels, channels, kernel, kernel)
    padding = kernel // 2
    most, live, out = taken(lambda: functional.conv2d(x, weight, padding=padding))
    forward = (x, weight, None, [1, 1], [padding] * 2, [1, 1], False, [0, 0], 1)
    assert most == pytest.approx(live + convolution_workspace("convolution", forward, out), rel=0.02)
    gradient, options = torch.randn_like(out), ([1, 1], [padding] * 2, [1, 1], False, [0, 0], 1, [True, True, True])
    args = (gradient, x, weight, [out_channels], *options)
    most, live, _ = taken(lambda: torch.ops.aten.convolution_backward(*args))
    assert most == pytest.approx(live + convolution_workspace("convolution_backward", args, None), rel=0.1)
