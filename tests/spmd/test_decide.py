"""Every rule of the view, judged by the whole computation: results, writes, gradients, random numbers."""

from __future__ import annotations

import itertools
import os
import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import decide_cases
import gathered_cases
import pointwise_cases
import pytest
import torch
import torch.distributed as dist
from harness import GUISES, Case, Make, Outcome, rule_name, run_cases
from torch import Tensor, nn
from torch.nn import functional

from meshwright.layout import REPLICATE, even_shard
from meshwright.spmd.comm import Axis, Ledger
from meshwright.spmd.decide import ANSWERS, DECIDERS
from meshwright.spmd.decision import Decision, use_local
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.mode import SpmdMode
from meshwright.workers.pool import LocalWorkers

FAMILIES: dict[str, dict[str, Case]] = {
    "pointwise": pointwise_cases.CASES,
    "ruled": decide_cases.CASES,
    "unruled": gathered_cases.CASES,
}

# Cases in which the view is known to be wrong, and why: strict expected failures.
BUGS: dict[str, str] = {}

# Those that end the process, or leave a rank waiting: not run.
CRASHES: dict[str, str] = {}

# Cases that are not judged in a guise, and why.
_MEMORY = "masks follow the order of memory on one device, which a gathered value has not kept"
_FAST_PATH = "in eval mode, one device takes a fused path under autocast on a CPU, which ends in another type"
EXCUSED = {
    ("strided", "dropout of whole channels"): _MEMORY,
    ("autocast", "TransformerEncoderLayer, the module"): _FAST_PATH,
    ("autocast to float16 of both", "TransformerEncoderLayer, the module"): _FAST_PATH,
}

# Functions with a rule that no case reaches, and why.
UNREACHED = {
    "cuda": "needs another device",
    "__iter__": "Tensor.__iter__ hands over unbind",
    "upsample": "hands over interpolate",
    "retain_grad": "tested below: its effect is seen after backward",
    "grad.get": "tested below: its effect is seen after backward",
    "backward": "tested below: its effect is seen after it",
    **dict.fromkeys(("stride", "is_contiguous", "storage_offset", "data_ptr"), "a View answers; see test_alias"),
}


# ---- functions that run in the workers ----


def try_cases(family: str, names: list[str], **options: Any) -> Outcome:
    return run_cases([FAMILIES[family][name] for name in names], **options)


def try_guises(chosen: dict[str, list[tuple[str, str]]], **options: Any) -> tuple[dict[str, list[str]], int]:
    """For (family, case) by guise: what failed, and the number of trials."""
    failures: dict[str, list[str]] = {}
    trials = 0
    for guise, names in chosen.items():
        cases = [FAMILIES[family][name] for family, name in names if (guise, name) not in EXCUSED]
        outcome = run_cases(cases, guise=GUISES[guise], **options)
        failures |= {f"{name} ({guise})": found for name, found in outcome.failures.items()}
        trials += outcome.trials
    return failures, trials


def make_work() -> Dispatcher:
    ledger = Ledger()
    return Dispatcher(Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD, ledger), ledger)


def collectives_of_cross_entropy(options: dict[str, Any], places: int) -> tuple[Counter[str], int, float]:
    """(collectives of forward and backward, bytes of the largest kind, the error of loss and gradient)."""
    dispatcher, make = make_work(), Make("loss")
    rows, classes = 6, 50
    shape = (rows, classes, places) if places else (rows, classes)
    plain = make.normal(*shape).requires_grad_()
    target = make.ints(classes, *shape[:1], *shape[2:])
    expected = functional.cross_entropy(plain, target, **options)
    expected.sum().backward()
    layout = even_shard(1, classes, dispatcher.axis.size)
    local = layout.take(plain.detach(), dispatcher.axis.rank).clone().requires_grad_()
    with SpmdMode(dispatcher, lambda p: None).on():
        loss = functional.cross_entropy(dispatcher.global_tensor(local, layout), target, **options)
    found = dispatcher.full_tensor(loss)
    found.sum().backward()
    assert plain.grad is not None and local.grad is not None
    error = (found - expected).abs().max() + (local.grad - layout.take(plain.grad, dispatcher.axis.rank)).abs().max()
    return dispatcher.ledger.calls, max(dispatcher.ledger.bytes.values()), float(error)


def dropout_streams() -> list[tuple[bool, bool, Tensor]]:
    """For whole, cut and partial inputs: (as on one device, the default generator too, its next draw)."""
    found = []
    for turn in range(3):
        dispatcher, make = make_work(), Make("dropout")
        x = make(5, 7)
        torch.manual_seed(turn)
        expected = functional.dropout(x, 0.4)
        state = torch.get_rng_state()
        torch.manual_seed(turn)
        layout = even_shard(turn - 1, x.shape[turn - 1], dispatcher.axis.size) if turn else None
        given = x if layout is None else dispatcher.global_tensor(layout.take(x, dispatcher.axis.rank), layout)
        with SpmdMode(dispatcher, lambda p: None).on():
            out = functional.dropout(given, 0.4)
        in_step = torch.equal(state, torch.get_rng_state())
        found.append((torch.equal(dispatcher.full_tensor(out), expected), in_step, torch.rand(1)))
    return found


def retained_gradients() -> list[Tensor]:
    """Gradients that a model keeps of a value: cut over each dim, or a partial sum."""
    found = []
    for dim in (0, 1, None):
        dispatcher = make_work()
        leaf = torch.ones(4, 6, dtype=torch.float64, requires_grad=True)
        layout = even_shard(dim or 0, leaf.shape[dim or 0], dispatcher.axis.size)
        with SpmdMode(dispatcher, lambda p: None).on():
            x = leaf if dim is None else dispatcher.global_tensor(dispatcher.shard(leaf, layout), layout)
            y = x * 2
            y.retain_grad()
            (y**2).sum().mul(1.5).backward()
            found.append(dispatcher.full_tensor(y.grad))
    return found


def where_fallbacks_are_counted() -> list[str]:
    dispatcher = make_work()
    layout = even_shard(0, 6, dispatcher.axis.size)
    block = Sorts()
    dispatcher.names[id(block)] = "blocks.0"
    with SpmdMode(dispatcher, lambda p: None).on():
        for _ in range(2):
            block(dispatcher.global_tensor(layout.take(torch.rand(6, 4), dispatcher.axis.rank), layout))
    assert set(dispatcher.ledger.fallbacks.values()) == {2}
    return [str(place) for place in dispatcher.ledger.fallbacks]


class Sorts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sort(0).values


# ---- the tests ----

_seen: dict[tuple[str, int], Outcome] = {}


def _trials() -> Iterator[Any]:
    for family, cases in FAMILIES.items():
        for ranks in (2, 3):
            for name in cases:
                if ranks == 3 and name.endswith((")", ") number")):
                    continue  # another name of a function that is tried already
                # One rule, tried with many functions: in uneven shares, which are the harder ones.
                marks = [pytest.mark.proof] if (family, ranks) == ("pointwise", 2) else []
                if name in BUGS or name in CRASHES:
                    reason = (BUGS | CRASHES)[name]
                    marks += [pytest.mark.xfail(strict=True, reason=reason, run=name not in CRASHES)]
                yield pytest.param((family, ranks), name, marks=marks, id=f"{family}-{ranks}-{name}")


@pytest.fixture
def outcome(workers: LocalWorkers, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """All selected cases of a family: tried once, in one run, also if several test processes share the tests."""
    family, ranks = request.param
    if (family, ranks) in _seen:
        return _seen[family, ranks]
    folder, process = tmp_path_factory.getbasetemp(), os.environ.get("PYTEST_XDIST_WORKER")
    kept = (folder.parent if process else folder) / f"outcome-{family}-{ranks}.pickle"
    if kept.exists():
        _seen[family, ranks] = pickle.loads(kept.read_bytes())
        return _seen[family, ranks]
    chosen = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.originalname == "test_a_function_gives_what_it_gives_on_one_device"
        and item.callspec.params["outcome"] == (family, ranks)
    ]
    names = [name for name in chosen if name not in CRASHES]
    often = "not proof" in request.config.getoption("markexpr")
    # All pointwise functions have the same rule: one trial of each is enough here.
    most = 6 if not often else 1 if family == "pointwise" else 2
    fewer = {"rounds": 1, "most": most} if ranks == 3 or often else {}
    result: Outcome = workers.run(try_cases, family, names, ranks=ranks, **fewer)[0]
    _seen[family, ranks] = result
    (unfinished := kept.with_suffix(f".{process}")).write_bytes(pickle.dumps(result))
    unfinished.replace(kept)
    return result


@pytest.mark.parametrize(("outcome", "name"), list(_trials()), indirect=["outcome"])
def test_a_function_gives_what_it_gives_on_one_device(outcome: Outcome, name: str) -> None:
    failures = outcome.failures.get(name, [])
    assert not failures, "\n".join(failures)


def test_functions_give_what_they_give_on_one_device_in_other_types_strides_and_sizes(workers: LocalWorkers) -> None:
    """One guise a case, in turn: half types and mixed ones, autocast, reversed strides, ranks that hold one element or none."""
    turns = itertools.cycle(GUISES)
    chosen: dict[str, list[tuple[str, str]]] = {guise: [] for guise in GUISES}
    for family in ("ruled", "unruled"):
        for name in FAMILIES[family]:
            chosen[next(turns)].append((family, name))
    failures, trials = workers.run(try_guises, chosen, rounds=1, most=2, ranks=2)[0]
    assert not failures, "\n".join(f"{name}: {found[0]}" for name, found in failures.items())
    assert trials > 200


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("guise", GUISES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_function_in_every_guise(workers: LocalWorkers, family: str, guise: str, ranks: int) -> None:
    chosen = {guise: [(family, name) for name in FAMILIES[family]]}
    failures, _ = workers.run(try_guises, chosen, rounds=2, most=6, ranks=ranks)[0]
    assert not failures, "\n".join(f"{name}: {found[0]}" for name, found in failures.items())


def test_excused_cases_exist() -> None:
    names = {name for cases in FAMILIES.values() for name in cases}
    assert {name for _, name in EXCUSED} <= names and {guise for guise, _ in EXCUSED} <= GUISES.keys()


def test_every_function_that_has_a_rule_has_a_case() -> None:
    if not FAMILIES.keys() <= {family for family, _ in _seen}:
        pytest.skip("only some of the cases were run")
    asked = set().union(*(outcome.asked for outcome in _seen.values()))
    missing = {rule_name(function) for function in ANSWERS | DECIDERS} - asked - set(UNREACHED)
    # Operators hand over the function they stand for: x + y asks for Tensor.add.
    missing -= {name for name in missing if name.startswith("__")}
    assert not missing, f"functions with a rule but no case that reaches it: {sorted(missing)}"


def test_cases_that_are_excused_exist() -> None:
    names = {name for cases in FAMILIES.values() for name in cases}
    assert set(BUGS) | set(CRASHES) <= names


@pytest.mark.parametrize("places", [0, 3])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 3}], ids=str)
def test_cross_entropy_never_gathers_logits_that_are_cut_over_classes(
    workers: LocalWorkers, options: dict[str, Any], places: int
) -> None:
    for calls, most, error in workers.run(collectives_of_cross_entropy, options, places, ranks=3):
        assert set(calls) == {"all_reduce"} and calls["all_reduce"] == 3  # the maximum, the sum, the target's logit
        assert most == 3 * 6 * max(places, 1) * 8  # each a number a row
        assert error < 1e-12


def test_dropout_draws_as_on_one_device_and_keeps_the_ranks_in_step(workers: LocalWorkers) -> None:
    results = workers.run(dropout_streams, ranks=3)
    for found in zip(*results, strict=True):
        assert all(same and in_step for same, in_step, _ in found)
        assert len({draw.item() for _, _, draw in found}) == 1


def test_a_fallback_is_counted_with_its_module_and_the_models_line(workers: LocalWorkers) -> None:
    for (place,) in workers.run(where_fallbacks_are_counted, ranks=2):
        line = Sorts.forward.__code__.co_firstlineno + 1
        assert place == f"sort in blocks.0 at spmd/test_decide.py:{line}"


def test_a_value_keeps_its_gradient_where_the_model_asks(workers: LocalWorkers) -> None:
    for gradients in workers.run(retained_gradients, ranks=2):
        assert all(torch.equal(g, torch.full((4, 6), 6.0, dtype=torch.float64)) for g in gradients)


def test_the_harness_notices_what_is_wrong(workers: LocalWorkers) -> None:
    failures = workers.run(try_wrong_rules, ranks=2)[0]
    assert set(failures) == {"wrong value", "wrong gradient", "wrong layout"}


def try_wrong_rules() -> dict[str, list[str]]:
    """Rules made wrong on purpose."""

    def build(make: Make) -> Any:
        return [make(4, 6)], lambda x: torch.sin(x)

    found: dict[str, list[str]] = {}
    before = DECIDERS[torch.sin]

    def wrong(run: Any, whole: bool = False) -> Any:
        return lambda call: Decision(run, (use_local(call.args[0]),), {}, REPLICATE if whole else call.args[0].layout)

    rules = {
        "wrong value": wrong(lambda x: x * 2),
        "wrong gradient": wrong(lambda x: x.detach().sin() + 0 * x),
        "wrong layout": wrong(lambda x: x.sin(), whole=True),
    }
    try:
        for name, rule in rules.items():
            DECIDERS[torch.sin] = rule
            found |= run_cases([Case(name, build)]).failures
    finally:
        DECIDERS[torch.sin] = before
    return found
