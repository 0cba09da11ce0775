"""What kernels take while they run, against what torch's allocator reports."""

import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from meshwright.prediction.allocations import convolution_workspace, workspace


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


ATEN = torch.ops.aten
X = torch.randn(64, 32, 128)
GIVEN = {"contiguous": X.transpose(0, 1).contiguous(), "transposed": X.transpose(0, 1)}
ONES, MEAN = torch.ones(128), torch.zeros(32, 64, 1)


@pytest.mark.parametrize("first", GIVEN)
@pytest.mark.parametrize("second", GIVEN)
@pytest.mark.parametrize(
    ("function", "more"),
    [
        (ATEN._softmax, (-1, False)),
        (ATEN._log_softmax, (0, False)),
        (ATEN.native_layer_norm, ([128], ONES, ONES, 1e-5)),
        (ATEN._softmax_backward_data, (-1, torch.float32)),
        (ATEN._log_softmax_backward_data, (0, torch.float32)),
        (ATEN.native_layer_norm_backward, ([128], MEAN, MEAN + 1, ONES, ONES, [True] * 3)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_contiguous_copies_of_inputs(function, more, first, second):
    name = function.__name__
    args = (GIVEN[first], *([GIVEN[second]] if "backward" in name else []), *more)
    most, live, _ = taken(lambda: function(*args))
    assert most == pytest.approx(live + workspace(name, args, None), rel=0.05)
