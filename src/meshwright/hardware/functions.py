"""ATen functions that take longer than a copy of as many bytes, or than a product of as many operations, and for each a call
that times it.

Most functions move bytes as fast as a copy does. The functions in this file compute more for each element (``exp``), reduce
(``mean``), look up rows, or draw random numbers. Convolutions are products of matrices, and do more besides; but another
library computes them, which may be faster. `Profile.slower` says how many times as long they take. A trace has the name of such
a function as its kind of work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ROWS, WIDTH = 1024, 256  # shape of the tensors in the timed calls
IMAGE = (4, 32, 32, 32)  # and of the images: rows, channels, height, width
KERNEL = 3
POINTWISE = frozenset("exp log sqrt rsqrt tanh sigmoid silu gelu erf cos sin pow where gt eq masked_fill".split())
REDUCING = frozenset("mean sum amax _softmax _log_softmax native_layer_norm cumsum linalg_vector_norm".split())
BACKWARDS = frozenset(
    "tanh_backward sigmoid_backward silu_backward gelu_backward threshold_backward _softmax_backward_data "
    "_log_softmax_backward_data native_layer_norm_backward embedding_dense_backward".split()
)
UPDATES = frozenset("addcmul_ addcdiv_ lerp_".split())
DRAWS = frozenset("bernoulli_ native_dropout".split())
IMAGES = frozenset(
    "avg_pool2d avg_pool2d_backward upsample_nearest2d_backward native_group_norm native_group_norm_backward".split()
)
CONVOLUTIONS = frozenset("convolution convolution_backward".split())
"""Functions that are products of matrices: `Profile.slower` has their seconds / those of a product of as many operations."""
OWN_RATE = POINTWISE | REDUCING | BACKWARDS | UPDATES | DRAWS | IMAGES | CONVOLUTIONS
"""Names of all these functions, without their namespace."""


def function_calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Name of a function → (the function, arguments for a call of it)."""
    import torch

    ops = torch.ops.aten
    x, y, z = (torch.rand(ROWS, WIDTH) + 0.5 for _ in range(3))
    mask = (torch.arange(WIDTH) < WIDTH // 2).expand(ROWS, WIDTH).contiguous()
    ones, ids = torch.ones(WIDTH), torch.arange(ROWS) % WIDTH
    _, mean, rstd = ops.native_layer_norm(x, [WIDTH], ones, ones, 1e-5)
    arguments: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys("exp log sqrt rsqrt tanh sigmoid silu gelu erf cos sin".split(), (x,)),
        "pow": (x, 2), "where": (mask, x, y), "gt": (x, y), "eq": (x, y), "masked_fill": (x, mask, 0.0),
        "mean": (x, [-1]), "sum": (x, [-1]), "amax": (x, [-1]), "cumsum": (x, 1), "linalg_vector_norm": (x,),
        "_softmax": (x, -1, False), "_log_softmax": (x, -1, False), "native_layer_norm": (x, [WIDTH], ones, ones, 1e-5),
        **dict.fromkeys(("tanh_backward", "sigmoid_backward", "silu_backward", "gelu_backward"), (x, y)),
        "threshold_backward": (x, y, 0),
        **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), (x, y, -1, torch.float32)),
        "native_layer_norm_backward": (x, y, [WIDTH], mean, rstd, ones, ones, [True, True, True]),
        "embedding_dense_backward": (x, ids, WIDTH, -1, False),
        "addcmul_": (x.clone(), y, z), "addcdiv_": (x.clone(), y, z), "lerp_": (x.clone(), y, 0.1),
        "bernoulli_": (x.clone(), 0.5), "native_dropout": (x, 0.5, True),
    }  # fmt: skip
    arguments |= _of_images()
    return {name: (getattr(ops, name), args) for name, args in arguments.items()}


def convolution_flops(name: str) -> float:
    """Operations of the timed call of a convolution: two for each output and input of the kernel. Its backward has two
    convolutions, for the gradients of its input and of its weight."""
    rows, channels, height, width = IMAGE
    forward = 2.0 * rows * height * width * channels**2 * KERNEL**2
    return 2 * forward if name.endswith("backward") else forward


def _of_images() -> dict[str, tuple[Any, ...]]:
    """Arguments of the functions of images."""
    import torch

    rows, channels, *size = IMAGE
    x, small = torch.rand(IMAGE), torch.rand(rows, channels, *(side // 2 for side in size))
    weight, ones, groups, pixels = (
        torch.rand(channels, channels, KERNEL, KERNEL),
        torch.ones(channels),
        8,
        size[0] * size[1],
    )
    _, mean, rstd = torch.ops.aten.native_group_norm(x, ones, ones, rows, channels, pixels, groups, 1e-5)
    pool, pair = ([2, 2], [2, 2], [0, 0], False, True, None), [1, 1]
    return {
        "avg_pool2d": (x, *pool), "avg_pool2d_backward": (small, x, *pool),
        "upsample_nearest2d_backward": (x, size, list(small.shape)),
        "native_group_norm": (x, ones, ones, rows, channels, pixels, groups, 1e-5),
        "native_group_norm_backward": (x, x, mean, rstd, ones, rows, channels, pixels, groups, [True, True, True]),
        "convolution": (x, weight, ones, pair, pair, pair, False, [0, 0], 1),
        "convolution_backward": (x, x, weight, [channels], pair, pair, pair, False, [0, 0], 1, [True, True, True]),
    }  # fmt: skip
