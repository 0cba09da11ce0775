"""Recorded init: bitwise what plain `build()` gives, for every parameter and buffer, without its memory."""

from __future__ import annotations

import copy
import gc
import io
import mmap
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.deferred import RecordedModule, operation, record
from meshwright.private import FakeTensor

Build = Callable[[], nn.Module]
SMALLS = pytest.mark.parametrize("small", [0, 100, 4096])


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Plain tensor attributes, also in containers."""

    def within(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            yield name, value
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                yield from within(f"{name}.{i}", item)
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from within(f"{name}.{key}", item)
        elif isinstance(value, Table):
            yield from within(name, vars(value))

    for prefix, owner in module.named_modules():
        for name, value in vars(owner).items():
            if name not in ("_parameters", "_modules", "_buffers"):
                yield from within(f"{prefix}.{name}", value)


def judge(build: Build, small: int = 4096) -> RecordedModule:
    """Record, and compare all there is with plain build."""
    torch.manual_seed(7)
    plain = build()
    after = torch.get_rng_state()
    torch.manual_seed(99)
    recorded = record(build, seed=7, small=small)
    assert torch.equal(torch.get_rng_state(), after), "the generator is not where plain build leaves it"
    parameters = dict(recorded.module.named_parameters(remove_duplicate=False))
    expected = dict(plain.named_parameters(remove_duplicate=False))
    assert parameters.keys() == expected.keys()
    assert dict(recorded.module.named_modules()).keys() == dict(plain.named_modules()).keys()
    for name in reversed(parameters):  # in any order
        want, meta, value = expected[name], parameters[name], recorded.value(name)
        assert meta.is_meta and isinstance(meta, nn.Parameter) and type(meta) is type(want), name
        assert vars(meta).keys() == vars(want).keys(), name
        geometry = [(t.shape, t.dtype, t.stride()) for t in (want, meta, value)]
        assert geometry[0] == geometry[1] == geometry[2], name
        assert meta.requires_grad == want.requires_grad and not value.requires_grad, name
        assert not value.is_meta and bits(value) == bits(want), f"{name} differs"
        assert value.untyped_storage().nbytes() == value.numel() * value.itemsize, name
    assert torch.equal(torch.get_rng_state(), after), "value() moved the generator"
    ties = [[a is b for a in tensors.values() for b in tensors.values()] for tensors in (parameters, expected)]
    assert ties[0] == ties[1]
    for kind in (lambda module: module.named_buffers(remove_duplicate=False), attributes):
        pairs, plains = list(kind(recorded.module)), list(kind(plain))
        assert [name for name, _ in pairs] == [name for name, _ in plains]
        for (name, tensor), (_, want) in zip(pairs, plains, strict=True):
            assert not tensor.is_meta and tensor.dtype == want.dtype and bits(tensor) == bits(want), name
    return recorded


# --- torch's own modules ------------------------------------------------------------------------------------


def transformer() -> nn.Module:  # deep copies of its layer
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 3)


def copied() -> nn.Module:
    first = nn.Sequential(nn.Linear(80, 80), nn.BatchNorm1d(80))
    first.register_buffer("table", torch.rand(90, 90))
    return nn.ModuleList([first, copy.deepcopy(first), copy.deepcopy(first)])


def weight_norm_old(width: int = 70) -> nn.Module:
    with pytest.warns(FutureWarning):
        return torch.nn.utils.weight_norm(nn.Linear(width, width))


def run_while_built() -> nn.Module:  # to find the sizes of what follows
    first = nn.Sequential(
        nn.Linear(90, 80), nn.BatchNorm1d(80), nn.ReLU(), nn.BatchNorm1d(80, track_running_stats=False)
    )
    return first.append(nn.Linear(first(torch.randn(5, 90)).shape[1], 70))


TORCH: dict[str, Build] = {
    "run while built": run_while_built,
    "mlp": lambda: nn.Sequential(nn.Linear(90, 80), nn.ReLU(), nn.Linear(80, 70), nn.LayerNorm(70)),
    "transformer": transformer,
    "copied": copied,
    "lstm": lambda: nn.LSTM(40, 64, 2, bidirectional=True),
    "gru": lambda: nn.GRU(40, 64),
    "attention": lambda: nn.MultiheadAttention(64, 4, kdim=48, vdim=40, add_bias_kv=True),
    "conv": lambda: nn.Sequential(nn.Conv2d(3, 64, 7), nn.BatchNorm2d(64), nn.ConvTranspose2d(64, 64, 3)),
    "embedding": lambda: nn.Sequential(nn.Embedding(130, 50, padding_idx=3), nn.EmbeddingBag(100, 60)),
    "bilinear": lambda: nn.Bilinear(20, 20, 30),
    "weight norm": lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(80, 70)),
    "weight norm, old": weight_norm_old,
    "spectral norm": lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(80, 70)),
    "orthogonal": lambda: torch.nn.utils.parametrizations.orthogonal(nn.Linear(70, 70)),
    "bfloat16": lambda: nn.Linear(90, 80).to(torch.bfloat16),
    "double": lambda: nn.Linear(90, 80).double(),
    "half": lambda: nn.Sequential(nn.Linear(90, 80), nn.LSTM(30, 40)).half(),
}


@SMALLS
@pytest.mark.parametrize("name", TORCH)
def test_torch_modules_are_bitwise_equal(name: str, small: int) -> None:
    judge(TORCH[name], small)


def test_recurrent_aliases_stay() -> None:
    lstm = judge(TORCH["lstm"], 0).module
    assert all(a is b for a, b in zip(lstm._flat_weights, lstm.parameters(), strict=True))
    assert all(ref() is p for ref, p in zip(lstm._flat_weight_refs, lstm.parameters(), strict=True))


# --- tricks that hand-written modules play ------------------------------------------------------------------


@dataclass
class Table:
    cos: Tensor
    more: dict[str, Any] = field(default_factory=dict)


def big() -> Tensor:
    return torch.empty(80, 70)


def parameter(value: Tensor) -> nn.Module:
    return nn.ParameterList([nn.Parameter(value)])


def holder(**tensors: Any) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


INITS: dict[str, Callable[[Tensor], Any]] = {
    "trunc_normal": lambda w: nn.init.trunc_normal_(w, std=0.02, a=-0.03),
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda w: nn.init.sparse_(w, 0.3),
    "eye": nn.init.eye_,
    "xavier": nn.init.xavier_normal_,
    "kaiming twice": lambda w: nn.init.kaiming_normal_(nn.init.kaiming_uniform_(w)),
    "dirac": lambda w: nn.init.dirac_(w.view(80, 10, 7)),
    "constant": lambda w: nn.init.constant_(w, 0.3),
    "exponential": lambda w: w.exponential_(2.0),
    "bernoulli": lambda w: w.bernoulli_(0.3),
    "bernoulli of tensor": lambda w: w.bernoulli_(torch.rand(80, 70)),
    "random": lambda w: w.random_(5),
    "cauchy": lambda w: w.cauchy_(),
    "geometric": lambda w: w.geometric_(0.4),
    "log_normal": lambda w: w.log_normal_(),
    "rows": lambda w: [row.normal_() for row in w.normal_()],
    "a part": lambda w: w.zero_()[3:40, ::2].uniform_(),
    "transposed": lambda w: w.t().normal_(),
    "two parts": lambda w: (w[:50].normal_(), w[50:].uniform_(), w[5, 3:9].zero_()),
    "depends on itself": lambda w: w.copy_(w.normal_().mul_(2).t().reshape(80, 70)),
    "normal of tensors": lambda w: w.copy_(torch.normal(torch.rand(80, 70), torch.rand(80, 70))),
    "out": lambda w: torch.randn(80, 70, out=w.detach()),
    "dropout": lambda w: w.copy_(F.dropout(torch.ones(80, 70), 0.3)),
    "multinomial": lambda w: w.fill_(0)[torch.multinomial(torch.rand(80), 20)].normal_(),
    "index_put": lambda w: w.zero_().__setitem__(torch.randperm(80)[:7], torch.rand(7, 70)),
    "masked": lambda w: w.normal_().masked_fill_(torch.rand(80, 70) < 0.5, 0.0),
    "by value": lambda w: w.normal_().__setitem__(w > 0.5, 0.25),
    "foreach": lambda w: torch._foreach_mul_([w.normal_()], 3.0),
    "generator": lambda w: w.normal_(generator=torch.Generator().manual_seed(5)),
    "generator, twice": lambda w: twice(w, torch.Generator().manual_seed(5)),
    "read": lambda w: w.mul_(w.normal_().abs().max().item()),
    "branch": lambda w: w.fill_(2.0) if w.normal_().sum() > 0 else w.fill_(3.0),
    "print": lambda w: w.mul_(len(f"{w.normal_()} {w} {w[0, 0]:.3f}" + repr(w))),
    "list": lambda w: w.mul_(sum(w.normal_()[0].tolist())),
    "tensor of tensors": lambda w: w[0, :2].copy_(torch.tensor([w.normal_()[0, 0], w[1, 1]])),
    "fork_rng": lambda w: forked(w),
    "numpy, read": lambda w: w.mul_(float(np.asarray(w.normal_()).mean())),
    "numpy, written": lambda w: w.normal_().numpy().__setitem__((3, 4), 5.0),
    "seed": lambda w: (w.normal_(), torch.manual_seed(1), w[:20].normal_()),
    "inference": lambda w: inferred(w),
}


def twice(w: Tensor, generator: torch.Generator) -> None:
    w.normal_(generator=generator)
    w[:40] = torch.rand(40, 70, generator=generator)


def forked(w: Tensor) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        w.normal_()
    w[0].normal_()


def inferred(w: Tensor) -> None:
    with torch.inference_mode():
        w.normal_().mul_(torch.rand(70, 80).t().contiguous().reshape(80, 70))


@SMALLS
@pytest.mark.parametrize("name", INITS)
def test_any_initialiser_is_bitwise_equal(name: str, small: int) -> None:
    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(70, 80), nn.Linear(5, 5))
        with torch.no_grad():
            INITS[name](module[0].weight)
        module.append(nn.Linear(80, 70))  # its numbers tell whether the generator went on rightly
        return module

    judge(build, small)


def by_data() -> nn.Module:
    module = nn.Linear(70, 80)
    module.weight.data = torch.randn(80, 70) * 0.1
    module.weight.data.mul_(2)
    module.bias.data[3].zero_()
    module.weight.data[5].zero_()
    return module


def by_copy() -> nn.Module:
    module = nn.ModuleList([nn.Linear(70, 80), nn.Linear(70, 80), nn.Linear(80, 70)])
    with torch.no_grad():
        module[1].weight.copy_(module[0].weight)
        module[0].weight.add_(1.0)  # the copy is of what was before
        module[2].weight.copy_(module[1].weight.t() + module[0].weight.t())
        module[2].bias.copy_(module[0].weight[0])  # real, from deferred
        module[0].bias[3:9].copy_(module[0].weight[0, 3:9])  # and in part
        scale = torch.rand(80, 1)
        module[1].weight.mul_(scale)
        scale.zero_()
    return module


def by_itself() -> nn.Module:
    """As a pretrained part is loaded: the rest of the state dict is the module's own."""
    module = nn.Sequential(nn.Linear(70, 80), nn.Linear(80, 70))
    state = module.state_dict()
    state.update({"1.bias": torch.ones(70)})
    module.load_state_dict(state)
    with torch.no_grad():
        module[0].weight[:] = module[0].weight
        torch.add(module[1].weight, 1, out=module[1].weight)
        grown = torch.linspace(0, 1, 80)  # real, and deferred from its sum with a deferred one
        torch.add(grown, module[0].weight[:, 0], out=grown)
        module[0].bias.copy_(grown)
    return module


def tied() -> nn.Module:
    module = nn.ModuleDict({"emb": nn.Embedding(90, 64), "head": nn.Linear(64, 90, bias=False)})
    module["head"].weight = module["emb"].weight
    nn.init.normal_(module["head"].weight)
    module["again"] = module["emb"]
    return module


def tables() -> nn.Module:
    angles = torch.outer(torch.arange(100).float(), 1.0 / 10000 ** (torch.arange(0, 64, 2).float() / 64))
    module = holder(
        cos=angles.cos(),
        sin=angles.sin().half(),
        mask=torch.tril(torch.ones(80, 80)).bool(),
        ids=torch.arange(5000).expand(1, -1),
        turns=torch.polar(torch.ones_like(angles), angles),
        noise=torch.randn(80, 80),
        codes=torch.randint(9, (5000,)),
        order=torch.randperm(5000),
    )
    module.plain = torch.linspace(0, 1, 5000)
    module.conj = module.turns.conj()
    module.held = [angles, (angles[3], {"a": torch.view_as_real(module.turns)}), Table(angles + 1)]
    module.held[2].more["deep"] = [torch.randn(5000)]
    module.rates = [rate.item() for rate in torch.linspace(0, 0.5, 7)]
    module.rates += torch.linspace(0, 0.5, 5000).tolist()
    module.weight = nn.Parameter(torch.randn(80, 70))
    module.alias = module.weight.data  # shares the parameter's storage
    module.double = torch.eye(80, dtype=torch.float64)[None].repeat(2, 1, 1)
    return module


def odds() -> nn.Module:
    module = nn.Module()
    module.scalar = nn.Parameter(torch.tensor(2.5))
    module.random = nn.Parameter(torch.rand(()))
    module.empty = nn.Parameter(torch.empty(0, 5))
    module.stacked = nn.ParameterList([torch.randn(4, 50, 50), nn.Parameter(torch.zeros(5000))])
    module.named = nn.ParameterDict({"a": torch.full((5000,), 2.0), "b": nn.Parameter(torch.ones(3))})
    module.frozen = nn.Linear(70, 80).requires_grad_(False)
    module.strided = nn.Parameter(torch.randn(70, 80).t())
    module.piece = nn.Parameter(torch.randn(3, 5000)[1])
    module.complex = nn.Parameter(torch.randn(70, 80, dtype=torch.cfloat))
    module.integer = nn.Parameter(torch.arange(5000), requires_grad=False)
    module.frozen.weight.note = "kept"
    return module


def outside() -> nn.Module:
    rng = np.random.default_rng(3)
    module = nn.Embedding(90, 64)
    module.weight.data.copy_(torch.from_numpy(rng.normal(size=(90, 64))))
    module.other = nn.Parameter(torch.from_numpy(rng.normal(size=(90, 64))).float())
    module.list = nn.Parameter(torch.tensor([[float(i * j) for i in range(70)] for j in range(80)]))
    module.grown = nn.Parameter(torch.as_tensor(rng.normal(size=5000)).float().repeat(3))
    return module


def through_as_tensor() -> nn.Module:
    """``torch.as_tensor`` and ``asarray`` of a tensor are the tensor: who writes to them writes to it."""
    module = nn.Conv2d(32, 40, 3)
    nn.init.kaiming_normal_(torch.as_tensor(module.weight))
    module.second = nn.Linear(70, 80)
    with torch.no_grad():
        torch.asarray(module.second.weight, requires_grad=True).mul_(torch.randn(80, 70))
    module.third = nn.Parameter(torch.as_tensor(torch.randn(80, 70), dtype=torch.float64))
    return module


def dtypes() -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        module = nn.Linear(70, 80)
        module.register_buffer("ratio", torch.arange(5000) / 7)
        module.raw = nn.Parameter(torch.arange(5000) / 3)
    finally:
        torch.set_default_dtype(before)
    return nn.ModuleList([module, nn.Linear(70, 80)])


class Guarded(nn.Module):
    """Refuses what is not a parameter, and looks where its tensors are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(80, 70))
        assert self.weight.device == torch.device("cpu") and not self.weight.is_meta and self.weight.is_leaf
        assert self.weight.data.data_ptr() == self.weight.data_ptr()
        assert np.isfinite(self.weight.detach().numpy()).all()
        assert torch.allclose(self.weight, self.weight.clone()) and torch.equal(self.weight, self.weight)
        assert len(self.weight.nonzero()) and self.weight.unique().numel() > 1

    def __setattr__(self, name: str, value: Any) -> None:
        assert name == "training" or name.startswith("_") or isinstance(value, nn.Parameter)
        super().__setattr__(name, value)


def buffers_copied() -> nn.Module:
    module = holder(a=torch.randn(5000))
    module.b = copy.deepcopy(module.a[100:4900])
    module.c = copy.deepcopy(module.a).share_memory_()
    module.d = torch.load(saved(module.a))
    return module


def saved(tensor: Tensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return file


TRICKS: dict[str, Build] = {
    "data": by_data,
    "copy": by_copy,
    "by itself": by_itself,
    "tied": tied,
    "tables": tables,
    "odds": odds,
    "outside": outside,
    "as_tensor": through_as_tensor,
    "dtypes": dtypes,
    "guarded": Guarded,
    "buffers copied": buffers_copied,
    "nothing": nn.Identity,
}


@SMALLS
@pytest.mark.parametrize("name", TRICKS)
def test_hand_written_tricks_are_bitwise_equal(name: str, small: int) -> None:
    judge(TRICKS[name], small)


def test_every_random_op_is_known_as_one() -> None:
    """An op with a generator but without the tag would be logged without the generator's state."""
    aten = torch.ops.aten
    for packet in (getattr(aten, name) for name in dir(aten)):
        for overload in getattr(packet, "overloads", list)():
            func = getattr(packet, overload)
            takes = any("Generator" in str(argument.type) for argument in func._schema.arguments)
            assert not takes or torch.Tag.nondeterministic_seeded in func.tags, func


def test_tables_cached_outside_the_module_are_right_afterwards() -> None:
    cache: list[Tensor] = []
    seen: list[Tensor] = [torch.zeros(80, 70)]

    def build() -> nn.Module:
        module = nn.Linear(70, 80)
        cache.append(torch.arange(5000).float().sin())
        with torch.no_grad():
            seen[0].copy_(module.weight)
        return module

    recorded = record(build, seed=1)
    assert torch.equal(cache[0], torch.arange(5000).float().sin())
    assert torch.equal(seen[0], recorded.value("weight"))


def test_addresses_of_dead_tensors_are_free_for_real_ones() -> None:
    kept: list[Tensor] = []

    def build() -> nn.Module:
        for i in range(20):
            torch.zeros(1 << 20).add_(1)
            memory = mmap.mmap(-1, 4 << 20)  # as a mapped file is: where the tensor was
            kept.append(torch.frombuffer(memory, dtype=torch.float32))
            np.frombuffer(memory, np.float32)[:] = i
            assert kept[-1].max().item() == i
        return nn.Linear(3, 3)

    record(build)
    assert [tensor.min().item() for tensor in kept] == list(range(20))


def test_hooks_and_attributes_of_parameters_stay() -> None:
    fired: list[str] = []

    def build() -> nn.Module:
        module = nn.Linear(70, 80)
        module.weight.register_hook(lambda grad: fired.append("grad"))
        module.weight.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
        module.weight.tag = [1, 2]
        return module

    module = record(build, seed=1).module
    assert module.weight.tag == [1, 2]
    module.weight.sum().backward()
    assert fired == ["grad", "accumulated"]


def test_errors_of_build_come_through() -> None:
    with pytest.raises(RuntimeError, match=r"shape|size"):
        record(lambda: parameter(torch.randn(80, 70) + torch.randn(70, 80)), small=0)


def test_no_seed_goes_on_from_the_generator() -> None:
    torch.manual_seed(5)
    torch.rand(3)
    before = torch.get_rng_state()
    plain = nn.Linear(70, 80)
    torch.set_rng_state(before)
    recorded = record(lambda: nn.Linear(70, 80))
    assert torch.equal(recorded.value("weight"), plain.weight)
    assert not torch.equal(recorded.value("weight"), record(lambda: nn.Linear(70, 80)).value("weight"))


def test_explicit_generators_go_on_as_in_plain_build() -> None:
    def build(generator: torch.Generator) -> nn.Module:
        return parameter(torch.randn(80, 70, generator=generator))

    one, two = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    build(one)
    recorded = record(lambda: build(two))
    assert torch.equal(one.get_state(), two.get_state())
    recorded.value("0")
    assert torch.equal(one.get_state(), two.get_state())


def test_values_under_the_callers_modes() -> None:
    recorded = record(lambda: parameter(nn.init.orthogonal_(big())), seed=2, small=0)
    want = recorded.value("0")
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        value = recorded.value("0")
    assert not value.is_inference() and torch.equal(value, want)
    value.zero_()
    assert torch.equal(recorded.value("0"), want), "a value was kept"


def test_unknown_names_and_undrawn_values_are_clear_errors() -> None:
    recorded = record(lambda: nn.Linear(70, 80), draw=False)
    with pytest.raises(RuntimeError, match="draw=True"):
        recorded.value("weight")
    with pytest.raises(KeyError, match=r"weigth.*weight, bias"):
        record(lambda: nn.Linear(70, 80)).value("weigth")
    with pytest.raises(RuntimeError, match="on meta"):
        record(lambda: nn.Linear(70, 80, device="meta")).value("weight")


def test_lazy_modules_and_undrawn_reads_build() -> None:
    recorded = record(lambda: nn.Sequential(nn.LazyLinear(80), nn.Linear(70, 80)), seed=1)
    assert bits(recorded.value("1.bias"))
    record(lambda: parameter(torch.randn(80, 70) * torch.randn(80, 70).max().item()), draw=False)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("own", [False, True])
def test_who_draws_until_the_values_fit_comes_to_an_end_without_drawing(own: bool) -> None:
    def build() -> nn.Module:
        generator = torch.Generator() if own else None
        return parameter(nn.init.trunc_normal_(torch.empty(80, 70), generator=generator))  # redraws what is outside

    record(build, draw=False)


def test_other_threads_are_left_alone() -> None:
    results: list[Tensor] = []

    def build() -> nn.Module:
        thread = threading.Thread(target=lambda: results.append(torch.ones(5000)))
        thread.start()
        thread.join()
        return nn.Linear(70, 80)

    record(build)
    assert results[0].sum() == 5000


# --- transformers -------------------------------------------------------------------------------------------


def family(name: str) -> Build:
    transformers = pytest.importorskip("transformers")
    size = {"vocab_size": 128, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    size |= {"intermediate_size": 64}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    text = {**size, **ends}
    vision = {key: size[key] for key in size if key != "vocab_size"} | {"image_size": 16, "patch_size": 4}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2, "vocab_size": 128}
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128, **ends}
    clip = {"text_config": text, "vision_config": vision, "projection_dim": 16}
    few = {**text, "num_key_value_heads": 2}
    configs: dict[str, tuple[str, str, dict[str, Any]]] = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", few),
        "llama tied": ("LlamaConfig", "LlamaForCausalLM", {**text, "tie_word_embeddings": True}),
        "gpt2": (
            "GPT2Config",
            "GPT2LMHeadModel",
            gpt2,
        ),
        "bert": ("BertConfig", "BertForMaskedLM", text),
        "t5": ("T5Config", "T5ForConditionalGeneration", t5),
        "vit": ("ViTConfig", "ViTForImageClassification", vision),
        "clip": (
            "CLIPConfig",
            "CLIPModel",
            clip,
        ),
        "mixtral": (
            "MixtralConfig",
            "MixtralForCausalLM",
            {**few, "num_local_experts": 4},
        ),
    }
    config, model, options = configs[name]
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**options))


@SMALLS
@pytest.mark.parametrize("name", ["llama", "llama tied", "gpt2", "bert", "t5", "vit", "clip", "mixtral"])
def test_transformers_are_bitwise_equal(name: str, small: int) -> None:
    judge(family(name), small)


def test_bfloat16_transformers_are_bitwise_equal() -> None:
    judge(lambda: family("llama")().to(torch.bfloat16))


# --- memory and time ----------------------------------------------------------------------------------------


def storages() -> int:
    """Bytes of live storages that are not on meta, nor of tensors without values."""
    gc.collect()
    real = [item for item in gc.get_objects() if issubclass(type(item), Tensor) and not isinstance(item, FakeTensor)]
    tensors = [item for item in real if item.device.type == "cpu"]
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())


def test_nothing_of_a_parameter_is_alive_after_recording_or_after_a_value() -> None:
    def build() -> nn.Module:
        module = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)], nn.LSTM(256, 256))
        module.append(torch.nn.utils.parametrizations.weight_norm(nn.Linear(512, 512)))
        module.append(weight_norm_old(512))
        nn.init.orthogonal_(module[0].weight)
        module[0].weight.detach().numpy()  # only read, so not to be held
        module[1].weight.detach().abs().max().item()
        return module

    before = storages()
    recorded = record(build, seed=1)
    assert recorded.module[-1].weight.grad_fn is None, "its graph would hold what it comes from"
    del recorded.module[-1].weight  # of the old weight norm: computed, a plain attribute
    assert storages() - before < 512 * 1024, "one weight is 1 MiB"
    gone = weakref.ref(recorded.value("1.weight"))
    assert gone() is None and storages() - before < 512 * 1024


def test_dead_writes_are_forgotten() -> None:
    recorded = record(lambda: parameter(nn.init.normal_(nn.init.kaiming_normal_(big().zero_()))), seed=1)
    assert len(recorded._log.ops) == 1


SCRIPT = """
import sys
import torch
from torch import nn
from meshwright.deferred import record

def status(key):  # KiB
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key + ":"))

{setup}
record(lambda: nn.Linear(128, 128), seed=1).value("weight")  # imports what is imported late
open("/proc/self/clear_refs", "w").write("5") if sys.argv[1:] == ["reset"] else None
before = status("VmRSS")
{body}
print(status("VmHWM") - before)
"""


def measured(setup: str, body: str) -> float:
    """Growth of the peak, in MiB, of a process of its own."""
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc")
    source = SCRIPT.format(setup=textwrap.dedent(setup), body=textwrap.dedent(body))
    path = os.pathsep.join([str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1]) / 1024


@pytest.mark.parametrize(
    "one",
    [
        "nn.Linear(1024, 1024)",
        pytest.param("nn.ParameterList([torch.randn(1024, 1024) * 0.02])", marks=pytest.mark.proof),
    ],
    ids=["in place", "functional"],
)
def test_peak_memory_is_that_of_some_parameters(one: str) -> None:
    """40 weights of 4 MiB: one is drawn on scratch, and one made, at a time; a slice of each stays."""
    peak = measured(
        "",
        f"""
        recorded = record(lambda: nn.Sequential(*[{one} for _ in range(40)]), seed=1)
        shards = [recorded.value(name)[:8].clone() for name, _ in recorded.module.named_parameters()]
        assert sum(shard.numel() for shard in shards) >= 40 << 13
        """,
    )
    assert peak < 40, f"{peak:.0f} MiB of 160"


@pytest.mark.proof
def test_planning_a_large_model_takes_no_memory() -> None:
    pytest.importorskip("transformers")
    peak = measured(
        "from transformers import LlamaConfig, LlamaForCausalLM",
        """
        module = record(lambda: LlamaForCausalLM(LlamaConfig()), draw=False).module
        assert sum(p.numel() for p in module.parameters()) > 6e9
        """,
    )
    assert peak < 500, f"{peak:.0f} MiB"


def test_repeated_blocks_ask_torch_once_for_what_their_ops_give() -> None:
    """The first block asks, with its type; no other does."""

    def blocks(count: int) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(*[nn.Linear(31, 37) for _ in range(count)])

    record(blocks(1))
    asked = operation._cached_outputs.cache_info().misses
    record(blocks(20))
    assert operation._cached_outputs.cache_info().misses == asked
    torch.set_default_dtype(torch.float64)
    try:
        assert {p.dtype for p in record(blocks(2)).module.parameters()} == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_long_log_is_replayed_by_looking_at_little_of_it() -> None:
    """Replay looks at a parameter's own entries, not at the whole log."""
    recorded = record(lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(1000)]), seed=1, small=0)
    recorded._log.ops = looked = Counting(recorded._log.ops)
    named = [name for name, _ in recorded.module.named_parameters()]
    for name in named:
        recorded.value(name)
    assert 2 * len(named) <= looked.count < 20 * len(named), "of a log of thousands of entries"


class Counting(dict):
    """Counts how often an entry is looked at."""

    count = 0

    def __getitem__(self, key):
        self.count += 1
        return super().__getitem__(key)

    def __iter__(self):
        self.count += len(self)
        return super().__iter__()

    def items(self):
        self.count += len(self)
        return super().items()

    def values(self):
        self.count += len(self)
        return super().values()
