"""Which modules are units, if the layers of a model are containers that are never called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.plan import Plan
from meshwright.planned import Planned
from meshwright.planning.passes import shards
from meshwright.planning.units import called_modules, repeated_blocks


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class ListsOfLayers(nn.Module):
    """Layers as lists of a norm and a block, which the model's own forward takes apart."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(8), FeedForward()]) for _ in range(3))

    def forward(self, x):
        for norm, block in self.layers:
            x = x + block(norm(x))
        return x.square().mean()


def test_layers_that_are_never_called_give_way_to_the_modules_in_them():
    assert repeated_blocks(ListsOfLayers()) == ("layers.0.1", "layers.1.1", "layers.2.1")
    assert called_modules("layers", ListsOfLayers().layers)[:2] == ("layers.0.0", "layers.0.1")


def rows():
    return (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)


def test_such_layers_train_as_on_one_device(workers):
    for plan in (
        {"mesh": {"dp_shard": 2}, "recompute": "blocks"},
        {
            "mesh": {"dp_shard": 2},
            "modules": {"layers.0": {"dp": "replicate"}, "layers.1": {"unit": True, "recompute": "block"}},
        },
    ):
        report = mw.check(ListsOfLayers, rows(), plan, workers=workers, dtype=torch.float64)
        assert report.passed, str(report)
        assert [u.name for u in report.recipe.units if u.name.endswith(".1")] == [f"layers.{i}.1" for i in range(3)]
    data = {line.name: line.data for line in report.recipe.parameters}
    assert data["layers.0.0.weight"] == data["layers.0.1.up.weight"] == "replicate"
    assert data["layers.1.1.up.weight"] == "shard"


class Reverse(torch.autograd.Function):
    """Blocks whose inputs are computed again from their outputs, by running the blocks again in the backward."""

    @staticmethod
    def forward(ctx, x, blocks):
        ctx.blocks = blocks
        for block in blocks:
            x = block(x)
        ctx.output = x.detach()
        return x

    @staticmethod
    def backward(ctx, gradient):
        y = ctx.output
        for block in reversed(ctx.blocks):
            y, gradient = block.reverse(y, gradient)
        return gradient, None


class Additive(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = FeedForward()

    def forward(self, x):
        kept, changed = x.chunk(2)
        return torch.cat([kept, changed + self.inner(kept)])

    def reverse(self, y, gradient):
        kept, changed = y.chunk(2)
        by_kept, by_changed = gradient.chunk(2)
        with torch.enable_grad():
            kept = kept.detach().requires_grad_()
            added = self.inner(kept)
            added.backward(by_changed)
        return torch.cat([kept, changed - added]).detach(), torch.cat([by_kept + kept.grad, by_changed])


class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Additive() for _ in range(3))
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        x = self.first(x).reshape(-1, 2, 8).transpose(0, 1)
        x = Reverse.apply(x.reshape(-1, 8), list(self.blocks))
        return self.last(x.reshape(2, -1, 8).transpose(0, 1).reshape(-1, 16)).square().mean()


@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": {"dp_shard": 2}, "microbatches": 2},
        {"mesh": {"pp": 2}},
        pytest.param({"mesh": {"dp_shard": 2, "tp": 2}}, marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_blocks_that_a_custom_backward_runs_again_stay_gathered(plan, workers):
    report = mw.check(Reversible, rows(), plan, workers=workers, dtype=torch.float64)
    assert report.passed, str(report)
    assert "dp_shard" not in plan["mesh"] or any(
        "blocks.0 is no unit of its own: blocks.0.inner" in note for note in report.notes
    ), report.notes


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = FeedForward().double()
        self.scale = nn.Parameter(torch.linspace(1, 2, 8))

    def forward(self, x):
        return x + self.inner(x) * self.scale


class OfTwoTypes(nn.Module):
    """Most parameters are of float64, the scales of float32, as models in a half type keep their norms and routers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(2))
        self.head = nn.Linear(8, 1).double()
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float16))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def gradients_of_two_types(mesh):
    """(type, gradient on one device, gradient) of each parameter, after two backwards."""
    batch = rows()[0].double()
    torch.manual_seed(0)
    model = OfTwoTypes()
    job = mw.parallelize(OfTwoTypes, {"mesh": mesh, "seed": 0}, batch=(batch,))
    values = {line.name: value for line, value in job.full_parameters()}
    if job.rank == 0:
        model.load_state_dict(values)
    for _ in range(2):
        model(batch).backward()
        job.step((job_rows(job, batch),))
    found = {line.name: gradient for line, gradient in job.full_gradients()}
    return [(p.dtype, p.grad, found[name]) for name, p in model.named_parameters()] if job.rank == 0 else []


def job_rows(job, batch):
    size = job.recipe.mesh.data_size
    index = job.recipe.mesh.data_index(job.rank)
    return batch[index * len(batch) // size : (index + 1) * len(batch) // size]


def test_parameters_of_another_type_than_their_unit_stay_out_of_it(workers):
    for mesh in ({"dp_shard": 2}, {"dp_replicate": 2, "tp": 2}):
        ranks = 2 if len(mesh) == 1 else 4
        for dtype, expected, found in workers.run(gradients_of_two_types, mesh, ranks=ranks)[0]:
            assert (expected is None) == (found is None)
            if expected is not None:
                assert found.dtype == dtype
                torch.testing.assert_close(found, expected, rtol=1e-6 if dtype != torch.float64 else 1e-12, atol=0)


def test_such_parameters_are_named_if_a_half_type_would_leave_them_uncast():
    with pytest.raises(mw.PlanError, match=r"(?s)precision.*layers\.0\.scale \(float32 in a unit of float64\)"):
        mw.make_recipe(OfTwoTypes, {"mesh": {"dp_shard": 2}, "precision": "bfloat16"}, (rows()[0].double(),))


class Angles(nn.Module):
    """Computes angles in its first forward, and keeps them."""

    def __init__(self):
        super().__init__()
        self.frequencies = nn.Parameter(torch.linspace(0.1, 1, 8), requires_grad=False)
        self.register_buffer("kept", torch.zeros(8), persistent=False)
        self.is_kept = False

    def forward(self, x):
        if not self.is_kept:
            self.kept.copy_((3 * self.frequencies.detach()).sin())
            self.is_kept = True
        return x * self.kept


class Turned(nn.Module):
    def __init__(self, angles):
        super().__init__()
        self.angles, self.block = angles, FeedForward()

    def forward(self, x):
        return x + self.block(self.angles(x))


class OneEmbeddingForAll(nn.Module):
    """Its blocks hold one module, whose parameter the first block alone uses, in the first forward alone."""

    def __init__(self):
        super().__init__()
        angles = Angles()
        self.blocks = nn.ModuleList(Turned(angles) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_a_parameter_that_stands_in_several_units_is_in_none(workers):
    report = mw.check(OneEmbeddingForAll, rows(), {"mesh": {"dp_shard": 2}}, workers=workers, dtype=torch.float64)
    assert report.passed, str(report)
    of = {line.name: line for line in report.recipe.parameters}
    assert of["blocks.0.angles.frequencies"].data == "loose"
    assert of["blocks.0.block.up.weight"].data == "shard"


class Passes(nn.Module):
    """Computes with its parameters, or hands on what it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, computes):
        return self.linear(x).tanh() if computes else x * 2


class CallsTwice(nn.Module):
    """Calls each block twice, and computes with its parameters in one of the calls, the first or the second."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Passes() for _ in range(2))

    def forward(self, x):
        first, second = self.blocks
        y = first(x, True) + first(x, False) + second(x, False) + second(x, True)
        # The path depends on values, so ranks may take different paths; all must reduce alike.
        return y.square().mean() if bool(y.sum() < 1e9) else y.sum()


def test_a_gradient_of_one_of_several_calls_of_a_unit_stays(workers):
    report = mw.check(CallsTwice, rows(), {"mesh": {"dp_shard": 2}}, workers=workers, dtype=torch.float64)
    assert report.passed, str(report)
    assert len(report.recipe.units) == 3 and report.recipe.routed


class Recurrent(nn.Module):
    """A block whose state comes from outside: at first the block's own parameter, taken before its forward."""

    def __init__(self):
        super().__init__()
        self.state, self.both = nn.Parameter(torch.randn(8)), nn.Linear(8, 16)
        self.out = nn.Linear(8, 8)

    def forward(self, x, state):
        a, b = self.both(x + state).chunk(2, -1)
        return x + self.out(a * b.sigmoid())


class StatesOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Recurrent() for _ in range(3))

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x, block.state if i == 1 else 0.5)
        return x.square().mean() + self.blocks[2].both.bias.sum() + sum(block.state.sum() for block in self.blocks[::2])


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}])
def test_a_parameter_that_is_taken_before_its_unit_runs_is_in_none(mesh, workers):
    """Also if the forward was given up within a unit, to run again with what was learnt there (how ``chunk`` cuts over tp)."""
    report = mw.check(StatesOutside, rows(), {"mesh": mesh}, workers=workers, dtype=torch.float64)
    assert report.passed, str(report)
    assert [u.name for u in report.recipe.units] == [""]


class Around(nn.Module):
    """A module with a parameter of its own, and blocks that are units."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.blocks = nn.ModuleList(FeedForward() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x * self.scale)
        return x


class WithAround(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Around() for _ in range(2))
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x + self.shift)
        return x.square().mean()


@pytest.mark.parametrize(
    "mesh", [{"dp_shard": 2}, pytest.param({"dp_shard": 2, "tp": 2}, marks=pytest.mark.proof)], ids=str
)
def test_a_unit_with_a_parameter_of_its_own_stands_around_units_of_another_mesh(mesh, workers):
    modules = {
        "layers.0": {"dp": "replicate", "unit": True},
        "layers.0.blocks.*": {"dp": "shard", "unit": True},
        "layers.1": {"unit": True},
        "layers.1.blocks.*": {"dp": "replicate", "unit": True},
    }
    report = mw.check(
        WithAround, rows(), {"mesh": mesh, "modules": modules}, workers=workers, dtype=torch.float64, steps=1
    )
    assert report.passed, str(report)
    units = {u.name: u.data for u in report.recipe.units}
    assert (units["layers.0"], units["layers.0.blocks.0"]) == ("replicate", "shard")
    assert (units["layers.1"], units["layers.1.blocks.0"]) == ("shard", "replicate")


class Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum(0)


class HandsItsScale(FeedForward):
    """As a norm does whose kernel is somebody's own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return Multiplied.apply(super().forward(x), self.scale).square().mean()


def test_a_parameter_that_a_function_of_the_model_s_own_is_handed_is_sharded():
    """What planning asked of it on the way was taken for a use from elsewhere than its module: it was whole on every rank, and in
    a half type nobody cast it."""
    for mesh in ("dp_shard=2", "dp_shard=2,tp=2"):
        recipe = mw.make_recipe(HandsItsScale, {"mesh": mesh}, rows())
        assert {line.name: line.data for line in recipe} == dict.fromkeys(
            ["scale", "up.weight", "up.bias", "down.weight", "down.bias"], "shard"
        )
        assert not recipe.notes


class Asking(nn.Module):
    """Blocks that run if a value of the batch is positive. ``selects``: and whose rows a mask selects, of which a block that
    does nothing to none of them is left out."""

    def __init__(self, selects: bool):
        super().__init__()
        self.layers, self._selects = nn.ModuleList(FeedForward() for _ in range(3)), selects
        self.last = nn.ModuleList(FeedForward() for _ in range(2))

    def forward(self, x):
        if (x.abs() >= 0).all():
            x = self.layers[0](x)
        x = self.layers[2](self.layers[1](x))
        if self._selects:
            x = x[x[:, 0] > 0]
        if not self._selects or x.shape[0]:
            x = self.last[1](self.last[0](x))
        return x.square().sum()


@pytest.mark.parametrize(("selects", "forwards"), [(False, 2), (True, 3)])
def test_a_forward_that_selects_nothing_by_masks_is_not_run_for_empty_masks(selects, forwards):
    ran = []

    def loss(output):
        ran.append(None)
        return output

    planned = Planned(lambda: Asking(selects), Plan.from_dict({"mesh": {"dp_shard": 2}}), rows(), loss)
    units = {unit.name for unit in planned.recipe.units}
    assert "layers.0" not in units and {"layers.1", "layers.2"} <= units
    assert ("last.0" in units) is not selects
    assert len(ran) == forwards


@torch.jit.script
def shifted(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x + shift)


class Scripted(nn.Module):
    """A function of torch.jit takes a parameter: of the block, or the object that also stands in a list."""

    def __init__(self, listed):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.shift = nn.Parameter(torch.ones(16))
        self.held = [self.shift] if listed else []

    def forward(self, x):
        return self.down(shifted(self.up(x), self.held[0] if self.held else self.shift))


class ScriptedLayers(nn.Module):
    def __init__(self, listed=False):
        super().__init__()
        self.layers = nn.Sequential(*(Scripted(listed) for _ in range(2)))

    def forward(self, x):
        return self.layers(x).square().mean()


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_shard=2,tp=2"])
def test_a_parameter_that_a_scripted_function_takes_stays_in_its_unit(mesh):
    recipe = mw.make_recipe(ScriptedLayers, mesh, rows())
    assert {line.data for line in recipe.parameters} == {"shard"}


def loss_in_half(build):
    job = mw.parallelize(build, {"mesh": "dp_shard=2", "precision": "bfloat16"}, batch=rows(), timeout=20)
    return float(job.step(tuple(x[:4] for x in rows())))


def test_a_scripted_function_takes_what_fsdp_leaves_as_it_is_in_the_half_type(workers):
    found = workers.run(loss_in_half, lambda: ScriptedLayers(listed=True), ranks=2)[0]
    assert found == pytest.approx(workers.run(loss_in_half, ScriptedLayers, ranks=2)[0], rel=1e-2)


class FollowsByData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.teacher, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.layer.weight, 0.1)
        self.scale.weight.data = 0.9 * self.scale.weight.data
        return (self.layer(x) - self.teacher(x).detach() * self.scale.weight.detach().mean()).square().mean()


def test_parameters_that_are_written_are_known_though_the_cuts_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else trials of rows would not undo what their forwards write."""
    expected = {"teacher.weight", "scale.weight"}
    plan = {"mesh": "dp_replicate=2", "modules": {"layer": {"recompute": "block"}}}
    for found in (True, False):
        if not found:
            monkeypatch.setattr(shards, "infer_shards", lambda *_, **__: [][0])
        recipe = mw.make_recipe(FollowsByData, plan, batch=(torch.randn(4, 4),))
        assert any("could not be followed" in note for note in recipe.notes) is not found
        assert {line.name for line in recipe.parameters if line.data == "loose"} == expected
        assert recipe.recompute == (("layer",) if found else ())
