"""Weights from a Hugging Face folder: every rank its slices, as ``from_pretrained`` gives them, or one error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.checkpoint.lazy_tensor import InMemory, LazyTensor, read_slices
from meshwright.checkpoint.tensorfiles import TensorSpec, open_folder, write_file
from meshwright.errors import PlanError
from meshwright.recipe import take_slices
from meshwright.workers.pool import WorkerError

transformers = pytest.importorskip("transformers")

SMALL = {
    "gpt2": dict(n_layer=2, n_embd=24, n_head=3, vocab_size=65, n_positions=16),
    "llama": dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3, vocab_size=65,
                  num_key_value_heads=3, max_position_embeddings=16),
    "mixtral": dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3, vocab_size=65,
                    num_key_value_heads=3, num_local_experts=3, max_position_embeddings=16),
    "t5": dict(d_model=24, d_kv=8, d_ff=40, num_layers=2, num_heads=3, vocab_size=65, decoder_start_token_id=0),
    "bert": dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3, vocab_size=65,
                 max_position_embeddings=16),
}  # fmt: skip
HEADS = {"t5": "AutoModelForSeq2SeqLM", "bert": "AutoModelForMaskedLM"}


def build(kind, head=None, seed=0, **settings):
    """A model with random weights. Perturbed: ones and zeros would hide what was not read."""
    config = transformers.AutoConfig.for_model(kind, **{**SMALL[kind], **settings})
    torch.manual_seed(seed)
    model = getattr(transformers, head or HEADS.get(kind, "AutoModelForCausalLM")).from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


def built(kind, head=None, **settings):
    return lambda: build(kind, head, seed=1, **settings)


def tokens(head=None):
    ids = torch.randint(0, 60, (4, 8), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(4) % 2 if head and "Sequence" in head else ids
    return {"input_ids": ids} if head == "AutoModel" else {"input_ids": ids, "labels": labels}


def sum_of_output(output):
    return output.last_hidden_state.square().mean()


def job_of(kind, plan, head=None, **settings):
    loss = sum_of_output if head == "AutoModel" else None
    return mw.parallelize(built(kind, head, **settings), plan, batch=tokens(head), **({"loss": loss} if loss else {}))


def loaded(kind, plan, folder, head=None, strict=True, settings=None):
    job = job_of(kind, plan, head, **(settings or {}))
    found = job.load_pretrained(folder, strict=strict)
    return job.full_state_dict(), found


def same(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("gpt2", "dp_shard=2,tp=2"),
        ("mixtral", "dp_shard=2,tp=2"),
        *(
            pytest.param(kind, plan, marks=pytest.mark.proof)
            for kind, plan in [
                ("gpt2", "tp=3"),
                ("t5", "pp=2,tp=2"),
                ("llama", "dp_shard=3"),
                ("bert", "dp_replicate=2,tp=2"),
            ]
        ),
    ],
)
def test_a_saved_model_is_read_slice_by_slice(kind, plan, workers, tmp_path):
    model = build(kind)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    found = workers.run(loaded, kind, plan, tmp_path, ranks=mw.Mesh.parse(plan).size)
    same(found[0][0], model.state_dict())
    assert all(not r.missing and not r.unexpected for _, r in found)


def test_experts_that_a_folder_has_one_by_one_become_one_tensor_slice_by_slice(monkeypatch, tmp_path):
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    assert any(".experts.2.w3." in name for name in open_folder(tmp_path)), "transformers saves them so"
    job = mw.parallelize(built("mixtral"), "dp_shard=1", batch=tokens())
    monkeypatch.setattr(LazyTensor, "read", lambda self: pytest.fail("read whole"))
    job.load_pretrained(tmp_path / "model.safetensors")
    same(job.full_state_dict(), model.state_dict())


@pytest.mark.parametrize("head", ["AutoModel", "AutoModelForCausalLM"])
def test_a_base_model_s_prefix_may_be_missing_or_too_much(head, workers, tmp_path):
    whole = build("gpt2")
    (whole.transformer if head == "AutoModelForCausalLM" else whole).save_pretrained(tmp_path)
    expected = (whole if head == "AutoModelForCausalLM" else whole.transformer).state_dict()
    same(workers.run(loaded, "gpt2", "tp=2", tmp_path, head, ranks=2)[0][0], expected)


def test_a_new_head_is_an_error_or_stays_as_it_is(workers, tmp_path):
    build("bert", "AutoModel").save_pretrained(tmp_path)
    head = "AutoModelForSequenceClassification"
    with pytest.raises(WorkerError) as caught:
        workers.run(loaded, "bert", "dp_shard=2", tmp_path, head, ranks=2)
    assert [f.where for f in caught.value.plan_error.findings] == ["classifier.weight", "classifier.bias"]
    state, found = workers.run(loaded, "bert", "dp_shard=2", tmp_path, head, strict=False, ranks=2)[0]
    assert found.missing == ("classifier.weight", "classifier.bias")
    assert "classifier.weight" in found.notes[0] and "left as initialised" in found.notes[0]
    same(state, transformers.BertForSequenceClassification.from_pretrained(tmp_path).state_dict()
         | {name: build("bert", head, seed=1).state_dict()[name] for name in found.missing})  # fmt: skip


def test_halves_become_floats(workers, tmp_path):
    model = build("llama").bfloat16()
    model.save_pretrained(tmp_path)
    state = workers.run(loaded, "llama", "tp=3", tmp_path, ranks=3)[0][0]
    same(state, {name: value.float() for name, value in model.state_dict().items()})


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(6, 12), nn.BatchNorm1d(12)
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x):
        return self.norm(self.up(x)).square().mean()


@pytest.mark.parametrize("prefix", ["", "model.backbone."])
def test_a_model_of_one_s_own_with_buffers_and_a_prefix(prefix, tmp_path):
    model = Normed()
    model(torch.randn(4, 6))
    state = {prefix + k: v for k, v in model.state_dict().items()}
    specs = [TensorSpec(k, tuple(v.shape), v.dtype) for k, v in state.items()]
    write_file(tmp_path / "any.safetensors", specs, lambda e: state[e.name])
    job = mw.parallelize(Normed, "dp_shard=1", batch={"x": torch.randn(4, 6)})
    job.load_pretrained(tmp_path)
    same(job.full_state_dict(), model.state_dict())
    assert int(job.module.norm.num_batches_tracked) == 1


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(folder, kind="gpt2", **settings):
    job = job_of(kind, "dp_shard=1", **settings)
    before = job.full_state_dict()
    before = {k: v.clone() for k, v in before.items()}
    with pytest.raises(PlanError) as caught:
        job.load_pretrained(folder)
    same(job.full_state_dict(), before)
    return caught.value


def test_every_problem_is_told_at_once_and_nothing_is_changed(tmp_path):
    state = {k: v for k, v in build("gpt2").state_dict().items() if k != "lm_head.weight"}
    del state["transformer.h.0.ln_1.weight"], state["transformer.h.1.ln_1.weight"]
    state["transformer.wpe.weight"] = state["transformer.wpe.weight"][:4].contiguous()
    state["transformer.ln_f.weight"] = state["transformer.ln_f.weight"].to(torch.int8)
    state["transformer.h.0.stranger"] = torch.ones(2)
    specs = [TensorSpec(k, tuple(v.shape), v.dtype) for k, v in state.items()]
    write_file(tmp_path / "model.safetensors", specs, lambda e: state[e.name])
    error = refused(tmp_path)
    assert {f.where for f in error.findings} == {
        "transformer.wpe.weight",
        "transformer.ln_f.weight",
        "transformer.h.{0…1}.ln_1.weight",
        "transformer.h.0.stranger",
    }
    text = str(error)
    assert "[4, 24]" in text and "[16, 24]" in text and "int8" in text and "strict=False" in text


def test_tied_in_the_model_and_two_in_the_folder(tmp_path):
    build("gpt2", tie_word_embeddings=False).save_pretrained(tmp_path)
    error = refused(tmp_path)
    assert [f.where for f in error.findings] == ["lm_head.weight"]
    assert "tie_word_embeddings=False" in str(error)


@pytest.mark.parametrize("what", ["no folder", "empty", "pickle", "cut off", "no shard", "index", "outside"])
def test_a_folder_that_is_none(what, tmp_path):
    folder = tmp_path / "folder"
    if what != "no folder":
        folder.mkdir()
    if what == "pickle":
        (folder / "pytorch_model.bin").write_bytes(b"...")
    if what in ("cut off", "no shard", "index", "outside"):
        build("gpt2").save_pretrained(folder, max_shard_size="20KB")
        shards = sorted(folder.glob("*.safetensors"))
        index = folder / "model.safetensors.index.json"
        if what == "cut off":
            shards[1].write_bytes(shards[1].read_bytes()[:-5])
        elif what == "no shard":
            shards[1].unlink()
        elif what == "index":
            index.write_text('{"weights": 1}')
        else:
            index.write_text(json.dumps({"weight_map": {"transformer.wte.weight": "../other.safetensors"}}))
    error = refused(folder)
    expected = {
        "no folder": "no such folder", "empty": "empty folder", "pickle": "pytorch_model.bin",
        "cut off": shards[1].name if what == "cut off" else "", "no shard": "no such file", "index": "weight_map",
        "outside": "../other.safetensors",
    }  # fmt: skip
    assert expected[what] in str(error)


# --- memory -----------------------------------------------------------------------------------------------------------


def memory():
    """Bytes of this process's own, without those of mapped files, which are the disk's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 4096, bias=False) for _ in range(8))

    def forward(self, x):
        return sum(layer(x).square().mean() for layer in self.layers)


def grown(folder):
    import threading

    import safetensors  # noqa: F401  (what modules take is not counted)

    job = mw.parallelize(Wide, "tp=2,dp_shard=2", batch={"x": torch.randn(4, 1024)})
    before, most, done = memory(), 0, threading.Event()

    def watch():
        nonlocal most
        while not done.wait(0.001):
            most = max(most, memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    job.load_pretrained(folder)
    done.set()
    watcher.join()
    return most - before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory as Linux tells it")
def test_a_rank_needs_no_more_than_its_share_and_one_tensor(workers, tmp_path):
    tensor = 4 * 1024 * 4096
    specs = [TensorSpec(f"layers.{i}.weight", (4096, 1024), torch.float32) for i in range(8)]
    write_file(tmp_path / "model.safetensors", specs, lambda e: torch.randn(e.shape))
    most = workers.run(grown, tmp_path, ranks=4)
    assert max(most) < tensor


# --- parts ------------------------------------------------------------------------------------------------------------


def test_unread_tensors_join_stack_split_and_swap_as_read_ones_do():
    a, b = torch.arange(24.0).view(4, 6), torch.arange(100.0, 124.0).view(4, 6)

    def through(x, y):
        stacked = torch.stack([torch.cat([x, y], dim=1), torch.cat([y, x], dim=1)], dim=0)
        first, last = torch.split(stacked, [5, 7], dim=2)
        chunks = torch.chunk(torch.transpose(last, 0, 2).contiguous(), 3, dim=0)
        return [first, *chunks, torch.chunk(stacked, 2, dim=0)[1].squeeze(0), x.transpose(0, 1), first.reshape(5, 8)]

    slices = {3: (((1, 2),), ((0, 2), (3, 4)), ((2, 3),)), 2: (((0, 1), (2, 4)), ((1, 3),))}
    for unread, read in zip(through(InMemory(a), InMemory(b)), through(a, b), strict=True):
        assert unread.shape == read.shape
        if not isinstance(unread, torch.Tensor):
            assert torch.equal(unread.read(), read)
            some = tuple(
                tuple((lo, min(hi, n)) for lo, hi in ranges if lo < n)
                for ranges, n in zip(slices[read.dim()], read.shape, strict=True)
            )
            expected = take_slices(read, some)
            out = torch.empty_like(expected)
            read_slices(unread, some, out)
            assert torch.equal(out, expected)


def test_what_is_written_safetensors_reads(tmp_path):
    from safetensors.torch import load_file

    values = {
        "half": torch.randn(3, 5).bfloat16(), "scalar": torch.tensor(7.0), "none": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]), "count": torch.tensor([2**40]), "ünder.score": torch.randn(7, 1).T,
        "double": torch.randn(1, dtype=torch.float64), "eight": torch.randn(3).to(torch.float8_e4m3fn),
    }  # fmt: skip
    specs = [TensorSpec(k, tuple(v.shape), v.dtype) for k, v in values.items()]
    write_file(tmp_path / "a.safetensors", specs, lambda e: values[e.name])
    found = load_file(tmp_path / "a.safetensors")
    assert set(found) == set(values)
    for name, value in values.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        assert torch.equal(found[name].float(), value.float())
    with pytest.raises(ValueError, match="not torch"):
        write_file(tmp_path / "b.safetensors", specs, lambda e: values[e.name].double())
