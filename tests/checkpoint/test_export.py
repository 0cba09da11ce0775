"""A checkpoint of any layout as a Hugging Face folder: what ``from_pretrained`` gives is what was saved, bitwise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_pretrained import HEADS, build, built, same, tokens
from torch import nn

import meshwright as mw
from meshwright.checkpoint import folder as folders
from meshwright.checkpoint.export import export
from meshwright.checkpoint.jobs import save_checkpoint
from meshwright.checkpoint.tensorfiles import open_folder
from meshwright.errors import CheckpointError, PlanError

transformers = pytest.importorskip("transformers")


def saved(kind, plan, folder):
    job = mw.parallelize(built(kind), plan, batch=tokens())
    job.save(folder, step=3)
    return job.full_state_dict()


def read(folder, kind="gpt2", **options):
    head = HEADS.get(kind, "AutoModelForCausalLM")
    return getattr(transformers, head).from_pretrained(folder, **options)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        pytest.param("gpt2", "dp_shard=2,tp=2", marks=pytest.mark.proof),  # a tied head, a fused QKV
        ("mixtral", "tp=3"),  # experts that transformers would save one by one
        pytest.param("t5", "pp=2,tp=2", marks=pytest.mark.proof),  # an embedding that three modules share
        pytest.param("llama", "dp_shard=3", marks=pytest.mark.proof),
        pytest.param("bert", "dp_replicate=2,tp=2", marks=pytest.mark.proof),
    ],
)
def test_from_pretrained_gives_what_was_saved(kind, plan, workers, tmp_path):
    state = workers.run(saved, kind, plan, tmp_path / "run", ranks=mw.Mesh.parse(plan).size)[0]
    found = export(tmp_path / "run", tmp_path / "out", shard_size="20KB")
    model, said = read(tmp_path / "out", kind, output_loading_info=True)
    same(model.state_dict(), state)
    assert not said["missing_keys"] and not said["unexpected_keys"] and not said["mismatched_keys"]
    assert found.step == 3 and len(found.files) > 1 and (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert type(model).__name__ in json.loads((tmp_path / "out/config.json").read_text())["architectures"]
    sizes = [sum(v.read().nbytes for v in open_folder(tmp_path / "out" / file).values()) for file in found.files]
    assert sum(sizes) == found.bytes
    assert all(
        size <= 20_000 or len(open_folder(tmp_path / "out" / f)) == 1
        for size, f in zip(sizes, found.files, strict=True)
    )


def test_and_a_job_reads_it_back(tmp_path):
    model = build("llama")
    save_checkpoint(tmp_path / "run", model, step=1)
    export(tmp_path / "run", tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors"
    ]  # fmt: skip
    job = mw.parallelize(built("llama"), "dp_shard=1", batch=tokens())
    assert job.load_pretrained(tmp_path / "out").missing == ()
    same(job.full_state_dict(), model.state_dict())


def test_halves_on_request(tmp_path):
    model = build("gpt2")
    save_checkpoint(tmp_path / "run", model, step=1)
    export(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
    found = read(tmp_path / "out")
    assert found.dtype == torch.bfloat16
    same(found.state_dict(), model.bfloat16().state_dict())


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("flags", torch.tensor([True, False]))


def test_a_model_without_a_config_gives_weights_alone(tmp_path):
    model = Odd()
    save_checkpoint(tmp_path, model, torch.optim.AdamW(model.parameters()), step=1)
    found = export(tmp_path, tmp_path / "out", dtype="float16")
    assert not found.config and [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    half = {k: v.half() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    same({name: value.read() for name, value in open_folder(tmp_path / "out").items()}, half)


def test_what_is_wrong_is_told_at_once_and_leaves_nothing(tmp_path):
    save_checkpoint(tmp_path / "run", build("gpt2"), step=1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(PlanError) as caught:
        export(tmp_path / "run", tmp_path / "out", shard_size="5 apples", dtype="float33")
    assert [f.where for f in caught.value.findings] == ["shard size", "dtype", str(tmp_path / "out")]
    data = next(folders.newest(tmp_path / "run").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=data.name):
        export(tmp_path / "run", tmp_path / "other")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]


def test_one_that_fails_leaves_nothing(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "run", build("gpt2"), step=1)
    monkeypatch.setattr("meshwright.checkpoint.export._write_config", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(tmp_path / "run", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


PEAK = """
import sys, threading
from pathlib import Path
from meshwright.checkpoint.export import export
def memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024
before, most, done = memory(), [0], threading.Event()
def watch():
    while not done.wait(0.0005):
        most[0] = max(most[0], memory())
watcher = threading.Thread(target=watch)
watcher.start()
export(sys.argv[1], sys.argv[2])
done.set()
watcher.join()
print(most[0] - before)
assert "transformers" not in sys.modules
import torch.distributed as dist
assert not dist.is_initialized()
"""


@pytest.mark.proof
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory as Linux tells it")
def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    model = nn.Sequential(*(nn.Linear(2048, 4096, bias=False) for _ in range(6)))  # 32 MiB each
    save_checkpoint(tmp_path / "run", model, step=1)
    command = [sys.executable, "-c", PEAK, str(tmp_path / "run"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert int(done.stdout) < 1.5 * 32 * 2**20
    same({k: v.read() for k, v in open_folder(tmp_path / "out").items()}, model.state_dict())
