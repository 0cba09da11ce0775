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


@pytest.mark.parametrize("shape", [(8, 32, 64, 32), (4, 64, 64, 64), (2, 3, 32, 64)])
def test_a_convolution_s_workspace(shape):
    rows, channels, given, side = shape
    x, weight = torch.randn(rows, channels, side, side), torch.randn(given, channels, 3, 3)
    if torch._C._select_conv_backend(x, weight, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1).name != "Mkldnn":
        pytest.skip("torch was built without oneDNN")
    most, live, out = taken(lambda: functional.conv2d(x, weight, padding=1))
    assert most == pytest.approx(live + convolution_workspace("convolution", (x, weight), out), rel=0.02)
    gradient, options = torch.randn_like(out), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
    args = (gradient, x, weight, [given], *options)
    most, live, _ = taken(lambda: torch.ops.aten.convolution_backward(*args))
    assert most == pytest.approx(live + convolution_workspace("convolution_backward", args, None), rel=0.1)
