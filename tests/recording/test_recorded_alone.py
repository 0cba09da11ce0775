"""What a recording takes of a step, on one process: no ranks are needed to see it, and two of them can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import scripts
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.recording.folder import RecordingFolder


def step(path: Path, model: nn.Module, loss_of: Any, **how: Any) -> None:
    """One step of SGD, recorded."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mw.record(model, path, optimizer=optimizer, **how) as rec:
        loss = loss_of(model)
        loss.backward()
        rec.loss(loss)
        optimizer.step()


def value(path: Path, file: str, name: str) -> Tensor:
    [seen] = RecordingFolder.open(path).views(file, name)
    assert seen.value is not None
    return seen.value


def squares(model: nn.Module) -> Tensor:
    return sum((p.abs() ** 2).sum() for p in model.parameters())  # type: ignore[return-value]


# --- what is taken ----------------------------------------------------------------------------------------------------


def test_gradients_before_the_step_and_parameters_after_it(tmp_path: Path) -> None:
    model = scripts.net()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(tmp_path / "one", model, squares)
    assert set(RecordingFolder.open(tmp_path / "one").parameters) == set(start)
    for name, p in model.named_parameters():
        assert torch.equal(value(tmp_path / "one", "start", name), start[name])
        assert torch.equal(value(tmp_path / "one", "gradients-1", name), 2 * start[name])
        assert torch.equal(value(tmp_path / "one", "parameters-1", name), p.detach())


def test_clipping_before_the_step_is_in_the_gradients(tmp_path: Path) -> None:
    model, optimizer = nn.Linear(3, 3), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mw.record(model, tmp_path / "one", optimizer=optimizer):
        squares(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    taken = [value(tmp_path / "one", "gradients-1", name) for name in ("weight", "bias")]
    assert torch.stack([t.square().sum() for t in taken]).sum().sqrt().item() == pytest.approx(0.01, rel=1e-3)


class Odd(nn.Module):
    """Parameters of all sorts: tied, complex, of no dims, of no elements, frozen, unused, with a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.scale, self.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))
        self.frozen, self.unused = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
        self.embed = nn.Embedding(5, 3, sparse=True)
        self.bf16 = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def loss(self) -> Tensor:
        x = self.embed(torch.tensor([1, 3])) @ self.a.weight @ self.b.weight * self.scale * self.bf16
        return x.square().sum() + self.turn.abs().sum() + self.empty.sum()


def test_parameters_of_all_sorts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for name in ("one", "two"):
        torch.manual_seed(0)
        step(tmp_path / name, Odd(), Odd.loss)
    recorded = RecordingFolder.open(tmp_path / "one")
    assert recorded.parameters["a.weight"]["aliases"] == ["b.weight"] and "b.weight" not in recorded.parameters
    assert recorded.views("gradients-1", "unused")[0].value is None
    assert "frozen" not in recorded.names("gradients-1") and "frozen" in recorded.names("start")
    assert value(tmp_path / "one", "gradients-1", "turn").dtype == torch.complex128
    assert value(tmp_path / "one", "gradients-1", "embed.weight")[0].abs().max() == 0
    found = mw.compare_recordings(tmp_path / "one", tmp_path / "two")
    assert found.passed, str(found)


def test_names_of_wrappers_are_left_out(tmp_path: Path) -> None:
    model = scripts.net()
    step(tmp_path / "one", model, squares)
    wrapped = nn.DataParallel(torch.compile(scripts.net()))  # type: ignore[arg-type]
    step(tmp_path / "two", wrapped, squares)
    assert mw.compare_recordings(tmp_path / "one", tmp_path / "two").passed


def test_names_that_differ_by_a_prefix(tmp_path: Path) -> None:
    step(tmp_path / "one", scripts.net(), squares)
    step(tmp_path / "two", nn.ModuleDict({"model": scripts.net()}), squares)
    found = mw.compare_recordings(tmp_path / "one", tmp_path / "two")
    assert found.keys() == ["names_missing", "names_extra"]
    assert found.causes[0].wrong[0].detail == "nearest there: model.layers.0.norm.weight"
    assert mw.compare_recordings(tmp_path / "one", tmp_path / "two", renames=[(r"^model\.", "")]).passed


# --- optimizers -------------------------------------------------------------------------------------------------------


def test_an_optimizer_with_a_closure(tmp_path: Path) -> None:
    for name in ("one", "two"):
        model = scripts.net()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = squares(model)
            loss.backward()
            return loss

        with mw.record(model, tmp_path / name, optimizer=optimizer):
            optimizer.step(closure)  # type: ignore[arg-type]
    found = mw.compare_recordings(tmp_path / "one", tmp_path / "two")
    assert found.passed and found.judged["gradients"] == (14, 14)
    assert any("closure" in note for note in found.notes)


class Wrapper(torch.optim.Optimizer):
    """As Accelerate has it: no ``super().__init__``, and all that it does is done by another."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_that_another_wraps(given: bool, tmp_path: Path) -> None:
    step(tmp_path / "one", scripts.net(), squares)
    model = scripts.net()
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    with mw.record(model, tmp_path / "two", optimizer=optimizer if given else None) as rec:
        loss = squares(model)
        loss.backward()
        rec.loss(loss)
        optimizer.step()
    found = mw.compare_recordings(tmp_path / "one", tmp_path / "two")
    assert found.passed and found.judged["updates"] == (14, 14), str(found)


def test_several_optimizers_that_take_turns(tmp_path: Path) -> None:
    """Each has its own backward: gradients of the second are those before its own step."""
    for name, given in (("one", True), ("two", False)):
        model = scripts.net()
        parts = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.layers, model.head)]
        with mw.record(model, tmp_path / name, optimizer=parts if given else None) as rec:
            for optimizer, part in zip(parts, (model.layers, model.head), strict=True):
                loss = squares(part)
                loss.backward()
                rec.loss(loss)
                optimizer.step()
    assert torch.equal(
        value(tmp_path / "two", "gradients-1", "head.weight"), 2 * value(tmp_path / "two", "start", "head.weight")
    )
    found = mw.compare_recordings(tmp_path / "one", tmp_path / "two")
    assert found.passed and found.judged["updates"] == (14, 14), str(found)


def test_a_parameter_that_no_optimizer_holds(tmp_path: Path) -> None:
    step(tmp_path / "one", scripts.net(), squares)
    model = scripts.net()
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    with mw.record(model, tmp_path / "two", optimizer=optimizer) as rec:
        loss = squares(model)
        loss.backward()
        rec.loss(loss)
        optimizer.step()
    found = mw.compare_recordings(tmp_path / "one", tmp_path / "two")
    assert found.keys() == ["not_stepped"] and found.causes[0].names == "head.weight, head.bias"


def test_a_gradient_on_one_side_alone(tmp_path: Path) -> None:
    step(tmp_path / "one", scripts.net(), lambda net: squares(net.layers))
    step(tmp_path / "two", scripts.net(), squares)
    for pair, key in ((("one", "two"), "extra"), (("two", "one"), "none")):
        found = mw.compare_recordings(*(tmp_path / name for name in pair))
        assert [cause.key for cause in found.causes if cause.kind == "gradients"] == [key], str(found)


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    stale = torch.optim.SGD(scripts.net().parameters(), lr=0.1)
    with pytest.raises(mw.PlanError, match="make it after fully_shard"):
        mw.record(scripts.net(), tmp_path / "one", optimizer=stale)


def test_gradients_of_a_scaler_that_the_kernel_unscales(tmp_path: Path) -> None:
    step(tmp_path / "one", scripts.net(torch.float32), squares)
    model = scripts.net(torch.float32)
    optimizer, scaler = (
        torch.optim.SGD(model.parameters(), lr=0.1, fused=True),
        torch.amp.GradScaler("cpu", init_scale=8.0),
    )
    with mw.record(model, tmp_path / "two", optimizer=optimizer) as rec:
        loss = squares(model)
        scaler.scale(loss).backward()
        rec.loss(loss)
        scaler.step(optimizer)
    found = mw.compare_recordings(tmp_path / "one", tmp_path / "two")
    assert found.passed, str(found)
    assert any("GradScaler" in note for note in found.notes)


def test_decay_of_what_has_no_gradient(tmp_path: Path) -> None:
    for name, zeros in (("one", False), ("two", True)):
        model = scripts.net()
        optimizer = scripts.adam(model, weight_decay=0.1)
        with mw.record(model, tmp_path / name, optimizer=optimizer):
            squares(model.layers).backward()
            for p in model.head.parameters():
                p.grad = torch.zeros_like(p) if zeros else None
            optimizer.step()
    found = mw.compare_recordings(tmp_path / "one", tmp_path / "two")
    assert found.keys() == ["none_zeros"] and found.causes[0].wrong[0].name == "head.weight"


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        (torch.arange(8), []),
        (torch.arange(8).flip(0), []),
        (torch.arange(9), ["rows_extra"]),
        (torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 7]), ["rows_twice"]),
        (torch.tensor([0, 1, 2, 3, 4, 5, 6, 6]), ["rows_missing", "rows_twice"]),
        (torch.arange(10, 18), ["rows_other"]),
        (8, []),
        (16, []),
        (12, ["rows_counts"]),
    ],
    ids=str,
)
def test_rows(rows: Any, keys: list[str], tmp_path: Path) -> None:
    """Rows may come in any order, and each as often as the others: ranks of a tensor-parallel group see the same."""
    for name, seen in (("one", torch.arange(8) if isinstance(rows, Tensor) else 8), ("two", rows)):
        model = nn.Linear(2, 2)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mw.record(model, tmp_path / name, optimizer=optimizer) as rec:
            loss = squares(model)
            loss.backward()
            rec.loss(loss, **({"batch": {"ids": seen}} if isinstance(seen, Tensor) else {"rows": seen}))
            optimizer.step()
    assert mw.compare_recordings(tmp_path / "one", tmp_path / "two").keys() == keys


# --- rounding ---------------------------------------------------------------------------------------------------------


def test_float32_in_another_order_of_rows_is_the_same(tmp_path: Path) -> None:
    x, y = scripts.batch(torch.float32)
    for name, order in (("one", slice(None)), ("two", torch.arange(7, -1, -1))):
        step(
            tmp_path / name,
            scripts.net(torch.float32),
            lambda net, at=order: nn.functional.cross_entropy(net(x[at]), y[at]),
        )
    assert mw.compare_recordings(tmp_path / "one", tmp_path / "two").passed


def test_half_precision_on_one_side_is_called_rounding(tmp_path: Path) -> None:
    x, y = scripts.batch(torch.float32)

    def auto(net: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.cross_entropy(net(x).float(), y)

    step(tmp_path / "one", scripts.net(torch.float32), lambda net: nn.functional.cross_entropy(net(x), y))
    step(tmp_path / "two", scripts.net(torch.float32), auto)
    found = mw.compare_recordings(tmp_path / "one", tmp_path / "two")
    assert {cause.key for cause in found.causes if cause.kind == "gradients"} == {"rounding"}, str(found)
    assert mw.compare_recordings(tmp_path / "one", tmp_path / "two", tolerance=0.1).passed
    assert mw.compare_recordings(tmp_path / "one", tmp_path / "two", again=tmp_path / "two").judged["gradients"] == (
        14,
        14,
    )


def test_weights_in_another_type(tmp_path: Path) -> None:
    step(tmp_path / "one", scripts.net(torch.float32), squares)
    step(tmp_path / "two", scripts.net(torch.float32).bfloat16(), squares)
    found = mw.compare_recordings(tmp_path / "one", tmp_path / "two")
    assert found.causes[0].key == "weights_cast", str(found)


def test_a_small_gradient_twice_too_large_is_not_rounding(tmp_path: Path) -> None:
    """In bfloat16, beside gradients that are a thousand times larger."""

    def loss(factor: float) -> Any:
        return lambda net: squares(net.layers) + 1e-4 * factor * squares(net.head)

    for name, factor in (("one", 1.0), ("two", 2.0)):
        step(tmp_path / name, scripts.net(torch.bfloat16), loss(factor))
    found = mw.compare_recordings(tmp_path / "one", tmp_path / "two")
    [cause] = [cause for cause in found.causes if cause.kind == "gradients"]
    assert cause.key == "scaled" and "head.weight" in cause.names, str(found)


# --- accumulation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("divided", "key"), [(2.0, None), (1.0, "accumulated"), (4.0, "accumulation_divided")])
def test_accumulation(divided: float, key: str | None, tmp_path: Path) -> None:
    scripts.one(tmp_path / "one")
    model = scripts.net()
    optimizer, (x, y) = scripts.adam(model), scripts.batch()
    with mw.record(model, tmp_path / "two", optimizer=optimizer) as rec:
        for part in (slice(0, 4), slice(4, 8)):
            loss = nn.functional.cross_entropy(model(x[part]), y[part])
            (loss / divided).backward()
            rec.loss(loss, batch=(x[part], y[part]))
        optimizer.step()
    found = mw.compare_recordings(tmp_path / "one", tmp_path / "two")
    assert found.keys() == ([key] if key else []), str(found)
    assert found.judged["rows"] == (1, 1) and found.judged["loss"] == (1, 1)


# --- the folder -------------------------------------------------------------------------------------------------------


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    model = scripts.net()
    optimizer = scripts.adam(model)
    with pytest.raises(ZeroDivisionError), mw.record(model, tmp_path / "one", optimizer=optimizer):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    squares(model).backward()
    optimizer.step()  # its hooks are gone
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    model = scripts.net()
    with pytest.raises(mw.PlanError, match="a folder or file that is not a recording"):
        mw.record(model, tmp_path, optimizer=scripts.adam(model))
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_recording_is_replaced_by_the_next(tmp_path: Path) -> None:
    step(tmp_path / "one", scripts.net(), squares)
    step(tmp_path / "one", nn.Linear(2, 2), squares)
    assert set(RecordingFolder.open(tmp_path / "one").parameters) == {"weight", "bias"}
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_no_step_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(mw.PlanError, match="no step of an optimizer"), mw.record(scripts.net(), tmp_path / "one"):
        pass
    with pytest.raises(mw.CheckpointError, match="no such folder"):
        mw.compare_recordings(tmp_path / "one", tmp_path / "one")


def test_a_loss_that_comes_too_late_is_told(tmp_path: Path) -> None:
    model = scripts.net()
    optimizer = scripts.adam(model)
    with mw.record(model, tmp_path / "one", optimizer=optimizer) as rec:
        loss = squares(model)
        loss.backward()
        optimizer.step()
        with pytest.warns(UserWarning, match=r"before optimizer.step"):
            rec.loss(loss)


@pytest.mark.proof
def test_ten_thousand_names(tmp_path: Path) -> None:
    for name in ("one", "two"):
        step(tmp_path / name, nn.ParameterList(torch.ones(2) for _ in range(10_000)), squares)
    assert mw.compare_recordings(tmp_path / "one", tmp_path / "two").judged["gradients"] == (10_000, 10_000)
