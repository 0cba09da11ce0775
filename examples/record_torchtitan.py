"""torchtitan's Llama, laid out by its own parallelize_llama, two steps under mw.record; on a CPU.

    pip install torchtitan triton          (0.3.0 was tried)
    python examples/record_torchtitan.py runs/one
    torchrun --standalone --nproc-per-node 2 examples/record_torchtitan.py runs/two --dp 2
    meshwright compare runs/one runs/two

``--wrong`` divides each rank's loss by its own tokens: torchtitan has FSDP divide by nothing, so gradients are sums over ranks.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy

import meshwright as mw

ROWS, LENGTH, STEPS = 8, 32, 2


def laid_out(dp: int, tp: int) -> torch.nn.Module:
    """The model, in float32, the same weights on every rank; on several ranks as torchtitan lays it out."""
    import torchtitan.tools.utils as utils

    utils.device_type, utils.device_module = "cpu", torch.cpu  # it takes cuda where there is no accelerator
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    parallelism = ParallelismConfig(
        data_parallel_shard_degree=dp, tensor_parallel_degree=tp, spmd_backend="partial_dtensor",
        enable_sequence_parallel=False,
    )  # fmt: skip
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    spec = model_registry("debugmodel", attn_backend="flex")
    for layer in spec.model.layers:  # flex attention has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_llama3_sharding_config(spec.model, enable_sp=False)
    torch.manual_seed(0)
    model: Any = spec.model.build()
    model.init_weights(buffer_device=torch.device("cpu"))
    if dims.world_size > 1:
        model = spec.parallelize_fn(
            model, parallel_dims=dims, parallelism=parallelism, compile_config=CompileConfig(enable=False),
            training=TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32"),
            ac_config=None, dump_folder="",
        )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo lacks what a divide factor of 1 takes
    return model


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("folder")
    ask.add_argument("--dp", type=int, default=1, help="ranks that shard data and weights")
    ask.add_argument("--tp", type=int, default=1, help="ranks of tensor parallelism")
    ask.add_argument("--wrong", action="store_true", help="divide each rank's loss by its own tokens")
    args = ask.parse_args()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    if "RANK" not in os.environ:
        os.environ.update(alone)
    dist.init_process_group("gloo")
    model = laid_out(args.dp, args.tp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with mw.record(model, args.folder, optimizer=optimizer, steps=STEPS) as rec:
        for step in range(STEPS):
            tokens = torch.randint(0, 2000, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
            mine = tokens.chunk(args.dp)[dist.get_rank() // args.tp]
            output = model(mine[:, :-1])
            logits = output.full_tensor() if hasattr(output, "full_tensor") else output
            total = cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten(), reduction="sum")
            count = mine.shape[0] * LENGTH
            (total / (count if args.wrong else count * args.dp)).backward()
            rec.loss(total.detach() / count, batch={"tokens": mine})
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
