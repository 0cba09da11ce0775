"""The command line: ``meshwright show | check | plan | predict | dryrun | calibrate | train | compare | report | …``.

    TARGET, --set ──► load_target ─┬─► show    recipe ─ shard map ─ drawn, or JSON; starts no process
    --plan, --mesh, --set ──► Plan ┼─► check   local workers ─ compared with one device
    --loss, --device ──────────────┼─► train   local workers, or this process under torchrun
    --hardware, --global-batch ────┴─► predict, dryrun   ranks rehearsed, one after the other ─ drawn, or JSON

    request      the options of a command line, as typed
    options      their declarations for typer
    inputs       the inputs that a request names, read and checked together: target, plan, loss, device
    subject      these inputs with a global batch and a hardware profile, for commands that predict
    comparison   plan --compare: two plans instead of a search
    correction   a profile corrected by runs, for calibrate and plan
    run_steps    steps of a run, to predict
    step_timelines          the observed steps of a run, with predictions, for report
    run_folder live         the folder of a run and its progress display, for train
    processes    local workers; error messages and exit codes
    files        writes files
    help         prints --help with examples
    show check plan predict dryrun calibrate train compare report inspect export env    the commands, a file each

A command reports all problems of its arguments at once, without a traceback, and exits with code 2.
"""

from __future__ import annotations

import gc
import sys

import typer

from meshwright.cli import processes
from meshwright.cli.calibrate import calibrate
from meshwright.cli.check import check
from meshwright.cli.compare import compare
from meshwright.cli.dryrun import dryrun
from meshwright.cli.env import env
from meshwright.cli.export import export
from meshwright.cli.help import CommandWithExamples, GroupWithExamples
from meshwright.cli.inspect import inspect
from meshwright.cli.plan import plan
from meshwright.cli.predict import predict
from meshwright.cli.report import report
from meshwright.cli.show import show
from meshwright.cli.train import train

__all__ = ["app", "main"]

app = typer.Typer(
    name="meshwright",
    cls=GroupWithExamples,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The ``meshwright`` command."""
    # Importing torch and transformers makes a million objects that stay. Python's garbage collector runs after every 700 new
    # objects by default and looks at them again and again, which takes a second.
    gc.set_threshold(20_000, 10, 10)
    try:
        processes.recorded(app)()
    except SystemExit as end:
        processes.end_at_once(end.code)
        raise


@app.callback(
    epilog="""
# this machine; which rank would hold which part of 7 billion parameters
meshwright env
meshwright show hf:llama --mesh dp_shard=128,tp=8

# does it fit, and how fast would it be? needs no GPU
meshwright predict hf:gpt2 --mesh dp_shard=16,tp=4 --hardware h100 --seq 1024 \\
    --global-batch 64 --set vocab_size=50304,n_layer=2

# is it right? does it train? (4 local processes)
meshwright check hf:gpt2 --mesh dp_shard=2,tp=2 \\
    --set n_layer=2,n_embd=64,n_head=4,vocab_size=512
meshwright train hf:gpt2 --mesh dp_shard=2,tp=2 --seq 64 --lr 1e-2 \\
    --set n_layer=2,n_embd=64,n_head=4,vocab_size=512

# a model of your own: a function that returns it and a batch
cat > tiny.py <<'END'
import torch

def model():
    return torch.nn.Linear(8, 4), {"input": torch.randn(8, 8)}

def loss(output):
    return output.square().mean()
END
meshwright check tiny.py:model --loss tiny.py:loss --mesh dp_shard=2,tp=2
"""
)
def _about() -> None:
    """Run any PyTorch model, unedited, over a mesh of devices: data parallel (DDP, FSDP, HSDP), tensor and sequence
    parallel, pipeline, branches, and all of these combined.

    TARGET names the model: your own function, or hf: and a model type of
    transformers (an extra). --mesh names the axes and their sizes. Meshwright decides
    from the model's own forward how to shard each parameter; a plan or --set
    overrides the decision.
    """


app.command(
    cls=CommandWithExamples,
    epilog="""
# 1024 ranks, on a laptop
meshwright show hf:llama --mesh dp_shard=128,tp=8

# 16 ranks on 2 nodes: the ranks of each node, and which axes cross the network
meshwright show hf:gpt2 --mesh dp_replicate=2,dp_shard=4,tp=2 --nodes 2

# the slices of rank 3; two pictures of which rank holds which part
meshwright show hf:gpt2 --mesh fsdp=2,tp=2 --rank 3
meshwright show hf:gpt2 --mesh fsdp=2,tp=2 --parameter '*.c_attn.*' --pictures 2

# a plan, and its effect
printf 'mesh: {tp: 2}\\nmodules:\\n  "*.mlp": {tp: replicate}\\n' > plan.yaml
meshwright show hf:gpt2 --plan plan.yaml --parameter 'transformer.h.0' --pictures 0

# all pictures in one file; the second also has a predicted step
meshwright show hf:gpt2 --mesh fsdp=2,tp=2 --html gpt2.html
meshwright show hf:gpt2 --mesh pp=2,tp=2 --hardware h100 --html gpt2.html \\
    --set microbatches=4,n_layer=2,n_embd=64,n_head=4,vocab_size=512

# as data
meshwright show hf:gpt2 --mesh tp=2 --json > layout.json
""",
)(show)

app.command(
    cls=CommandWithExamples,
    epilog="""
# FSDP × tensor parallel; tensor and sequence parallel with recompute
meshwright check hf:gpt2 --mesh dp_shard=2,tp=2 \\
    --set n_layer=2,n_embd=64,n_head=4,vocab_size=512
meshwright check hf:gpt2 --mesh tp=2 \\
    --set n_layer=2,n_embd=64,n_head=4,vocab_size=512 \\
    --set sequence_parallel=true,recompute=blocks

# a model whose output is not a loss
cat > tiny.py <<'END'
import torch

def model():
    return torch.nn.Linear(8, 4), {"input": torch.randn(8, 8)}

def loss(output):
    return output.square().mean()
END
meshwright check tiny.py:model --loss tiny.py:loss --mesh dp_shard=2,tp=2
""",
)(check)

app.command(
    cls=CommandWithExamples,
    epilog="""
# the fastest plans that fit 8 H100; writes the best one to a file for train
meshwright plan hf:gpt2 --devices 8 --hardware h100 --seq 1024 --global-batch 64 \\
    --set vocab_size=50304 --out best.yaml

# 64 devices of 8 nodes; the two best, rehearsed as predict does
meshwright plan hf:gpt2 --devices 64 --nodes 8 --hardware a100-80 --global-batch 256 \\
    --top 2 --verify --set vocab_size=50304,n_layer=4

# the difference in time and memory between two plans, term by term
echo 'mesh: {dp_shard: 4, tp: 2}' > one.yaml; echo 'mesh: {pp: 2, dp_shard: 4}' > two.yaml
meshwright plan hf:gpt2 --compare one.yaml two.yaml --hardware h100 --set n_layer=2

# this machine: the two best, run for 4 steps each
meshwright calibrate
meshwright plan hf:gpt2 --devices 2 --top 2 --measure 4 --seq 64 \\
    --set n_layer=2,n_embd=64,n_head=4,vocab_size=512
""",
)(plan)

app.command(
    cls=CommandWithExamples,
    epilog="""
# 64 H100 in 8 nodes: does a step of 64 rows of 1024 tokens fit, and how long does it take?
meshwright predict hf:gpt2 --mesh dp_shard=16,tp=4 --hardware h100 --seq 1024 \\
    --global-batch 64 --set vocab_size=50304,n_layer=2

# a pipeline with recompute, over Ethernet, as data
meshwright predict hf:gpt2 --mesh pp=2,dp_shard=8 --hardware h100 --network roce-100 \\
    --set n_layer=2,recompute=blocks --json > prediction.json
""",
)(predict)

app.command(
    cls=CommandWithExamples,
    epilog="""
# rank 5 of 64: its memory at the peak and its collectives, beside the prediction
meshwright dryrun hf:gpt2 --rank 5 --mesh dp_shard=16,tp=4 --hardware h100 \\
    --set vocab_size=50304,n_layer=2

# the last stage of a pipeline, as data
meshwright dryrun hf:gpt2 --rank 1 --mesh pp=2 --hardware a100 --set n_layer=2 --json > rank.json
""",
)(dryrun)

app.command(
    cls=CommandWithExamples,
    epilog="""
# this machine, measured; then predicted, run, and compared
meshwright calibrate
meshwright predict hf:gpt2 --mesh dp_shard=2 --seq 64 --measure \\
    --set n_layer=2,n_embd=64,n_head=4,vocab_size=512

# processes of two threads each, in a file of its own
meshwright calibrate --threads 2 --out two-threads.yaml

# a profile, corrected by the steps of a run on its devices
meshwright train hf:gpt2 --mesh dp_shard=2 --seq 64 --steps 10 \\
    --set n_layer=2,n_embd=64,n_head=4,vocab_size=512
meshwright calibrate --from runs/gpt2 --out ours.yaml
""",
)(calibrate)

app.command(
    cls=CommandWithExamples,
    epilog="""
# 4 local processes
meshwright train hf:gpt2 --mesh dp_shard=2,tp=2 --seq 64 --steps 10 --lr 1e-2 \\
    --set n_layer=2,n_embd=64,n_head=4,vocab_size=512

# rows of your own: the third thing that the function returns
cat > rows.py <<'END'
import torch

def model():
    x = torch.randn(64, 8)
    return torch.nn.Linear(8, 4), {"input": x[:4]}, {"input": x}

def loss(output):
    return output.square().mean()
END
meshwright train rows.py:model --loss rows.py:loss --mesh fsdp=2 \\
    --global-batch 32 --lr 1e-2

# under torchrun, on one or many machines: if ranks die, torchrun starts the command
# again, and it resumes from the newest checkpoint
torchrun --nproc-per-node 2 --max-restarts 3 -m meshwright train rows.py:model \\
    --loss rows.py:loss --mesh fsdp=2 --global-batch 32 --lr 1e-2 --device cpu \\
    --save-every 5 --out runs/rows
""",
)(train)

app.command(
    cls=CommandWithExamples,
    epilog="""
# your own script; record one of its steps on one process and on two
cat > script.py <<'END'
import os, sys
import torch
import torch.distributed as dist
import meshwright as mw

torch.manual_seed(0)
model, rows, rank = torch.nn.Linear(8, 4), torch.randn(16, 8), int(os.environ.get("RANK", 0))
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    model, rows = torch.nn.parallel.DistributedDataParallel(model), rows.chunk(dist.get_world_size())[rank]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with mw.record(model, sys.argv[1], optimizer=optimizer) as rec:
    loss = model(rows).square().mean()
    loss.backward()
    rec.loss(loss, batch=rows)
    optimizer.step()
END
python script.py runs/one
torchrun --standalone --nproc-per-node 2 script.py runs/two
meshwright compare runs/one runs/two

# if names differ by a prefix; as JSON
meshwright compare runs/one runs/two --map '^model\\.='
meshwright compare runs/one runs/two --json > verdict.json
""",
)(compare)

_SAVED = """
# a run with checkpoints
meshwright train hf:gpt2 --mesh dp_shard=2,tp=2 --seq 64 --steps 2 --out run \\
    --set n_layer=2,n_embd=64,n_head=4,vocab_size=512
"""

app.command(
    cls=CommandWithExamples,
    epilog=f"""{_SAVED}
# its loss, rate, memory and checkpoints, in the terminal and in run/report.html
meshwright report run
meshwright report run --json > run.json
""",
)(report)

app.command(
    cls=CommandWithExamples,
    epilog=f"""{_SAVED}
# its checkpoints; each tensor of the newest; as JSON
meshwright inspect run
meshwright inspect run --tensors
meshwright inspect run --quick --json > run.json
""",
)(inspect)

app.command(
    cls=CommandWithExamples,
    epilog=f"""{_SAVED}
# its newest checkpoint, for transformers: from_pretrained("gpt2-64")
meshwright export run gpt2-64

# in bfloat16, in files of at most 100 kB
meshwright export run gpt2-64-bf16 --dtype bfloat16 --shard-size 100KB
""",
)(export)

app.command(
    cls=CommandWithExamples,
    epilog="""
meshwright env
torchrun --nproc-per-node 2 -m meshwright env
""",
)(env)


if __name__ == "__main__":
    sys.exit("run it as: python -m meshwright")
