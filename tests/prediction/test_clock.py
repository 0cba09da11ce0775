"""Seconds of a rank's actions: what runs beside what."""

import pytest

from meshwright.hardware.profile import Curve, Link, Profile
from meshwright.mesh import Mesh
from meshwright.prediction.clock import SPAN, SPANS_OF_UNIT, Clock
from meshwright.prediction.trace import Began, Collective, Op, Trace
from meshwright.schedule import Action

FLAT = Curve(((1.0, 1.0),))
WIRE = Link(latency=0.0, bandwidth=1e9, efficiency=FLAT, scatter=0.0)


def profile(cores=0, host=0.0, **more):
    return Profile(
        name="test", source="", date="", notes="", memory=1 << 30, context=0, per_group=0, reserve=0.0,
        peak={"float32": 1e9}, matmul={"float32": FLAT}, attention={"float32": FLAT}, bandwidth=1e18, streaming=FLAT,
        launch=0.0, host=host, host_backward=host, devices_per_node=8, network=None, scatter=0.0, cores=cores,
        **{"node": WIRE, **more},
    )  # fmt: skip


def matmul(seconds):
    return Op("mm", "matmul", round(seconds * 1e9), 0, "float32")


def gather(seconds, ranks=(0, 1)):  # a ring of two sends half
    return Collective("all_gather", round(2 * seconds * 1e9), ranks)


def reduce(seconds, ranks=(0, 1)):
    return Collective("reduce_scatter", round(2 * seconds * 1e9), ranks)


def clock(of, mesh, *, dtensors=False):
    return Clock(of, Mesh.parse(mesh), dtensors=dtensors)


def forward(events, *, mesh="dp_shard=2", kind="F", **options):
    trace = Trace([Began("step 0"), matmul(100.0), Began("step 1"), Began(Action(0, kind, 0)), *events])
    begin, phase = clock(profile(**options), mesh).phases(trace)
    assert begin.spent.total.seconds == options.get("job_step", 0)
    return phase.spent


def test_only_the_last_step_counts():
    assert forward([matmul(2.0)]).total.seconds == pytest.approx(2.0)


def test_the_gather_of_a_unit_runs_beside_the_unit_before():
    spent = forward([gather(1.0), matmul(3.0), gather(1.0), matmul(3.0), gather(4.0), matmul(3.0)])
    # The first cannot run beside anything; the second is hidden; the third takes a second longer than the unit before.
    assert spent.exposed["dp_shard"].seconds == pytest.approx(1.0 + 0.0 + 1.0)
    assert spent.device.seconds == pytest.approx(9.0)


def test_reductions_run_beside_what_follows_and_the_end_waits_for_the_last():
    spent = forward([matmul(3.0), reduce(2.0), matmul(3.0), reduce(2.0)], kind="B")
    assert spent.exposed["dp_shard"].seconds == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("seconds", "kind", "exposed"),
    [
        (1.0, "B", 1.0),  # 0 ── 3 ─ scatter ─ 4 ─ sum ─ 5; the second scatter from 6 to 7, its sum until 8
        (4.0, "B", 5.0),  # the first sum until 8, the second from then to 12, five seconds after the last scatter
        (1.0, "F", 2.0),  # a sum in a forward is none of FSDP2's: what follows waits for it
    ],
)
def test_sums_over_replicas_run_beside_what_follows_and_beside_reductions(seconds, kind, exposed):
    total = Collective("all_reduce", round(seconds * 1e9), (0, 2))  # a ring of two sends all of it
    events = [matmul(3.0), reduce(1.0), total, matmul(3.0), reduce(1.0), total]
    spent = forward(events, mesh="dp_replicate=2,dp_shard=2", kind=kind)
    assert spent.exposed["dp_replicate"].seconds == pytest.approx(exposed)


def test_nothing_runs_beside_tensor_parallel_traffic():
    spent = forward([matmul(1.0), Collective("all_reduce", 10**9, (0, 1)), matmul(1.0)], mesh="tp=2")
    assert spent.exposed["tp"].seconds == pytest.approx(1.0)


def test_on_a_cpu_nothing_runs_beside_anything():
    spent = forward([gather(1.0), matmul(3.0), gather(1.0), matmul(3.0)], cores=2, host=0.25)
    assert spent.exposed["dp_shard"].seconds == pytest.approx(2.0)
    assert spent.host.seconds == pytest.approx(0.5)
    assert spent.total.seconds == pytest.approx(8.5)


def test_a_device_waits_for_a_host_that_is_slower():
    assert forward([matmul(1.0)] * 4, host=0.5).host.seconds == 0.0
    assert forward([matmul(1.0)] * 4, host=1.5).host.seconds == pytest.approx(2.0)


def test_a_group_is_named_by_the_axes_along_which_it_lies():
    events = [Collective("all_reduce", 10**9, ranks) for ranks in ((0, 1), (0, 2), (0, 1, 2, 3), (0,))]
    assert set(forward(events, mesh="dp_shard=2,tp=2").exposed) == {"tp", "dp_shard", "dp_shard·tp"}


def test_a_job_s_own_time_is_the_host_s():
    """Of a CPU: 2 for the action, 3 for a gather by FSDP2, 5 for a collective of tp, 4 for a send, 1 for each function."""
    times = {"host": 1.0, "host_unit": 3.0, "host_collective": 5.0, "job_action": 2.0, "job_step": 7.0, "cores": 1}
    hooks = [Op(name, "other", 0, 0, "") for name in (SPAN, "_record_function_exit")] * SPANS_OF_UNIT
    over_tp = Collective("all_reduce", 10**9, (0, 1))
    spent = forward([*hooks, gather(1.0), matmul(1.0), over_tp], mesh="tp=2,dp_shard=2", **times)
    assert spent.host.seconds == pytest.approx(2 + (3 + 8) + 5 + 1)
    replicas = Collective("all_reduce", 10**9, (0, 2))
    assert forward([*hooks, replicas], mesh="tp=2,dp_replicate=2", **times).host.seconds == pytest.approx(
        2 + (3 + 8) + 5
    )
    sends = [Collective(kind, 10**6, (0, 1)) for kind in ("send", "recv")]
    assert forward(sends, mesh="pp=2", **times).host.seconds == 2 + 2 * 5
    assert forward(sends, mesh="pp=2", **times, host_send=4.0).host.seconds == 2 + 2 * 4
    begin, *_ = clock(profile(**times), "tp=2").phases(Trace([Began("step 1"), Began(Action(0, "F", 0))]))
    assert begin.spent.host.seconds == 7


def test_a_gather_of_an_optimizer_is_no_unit_s():
    """Such as that of a whole matrix over dp_shard: no hook of FSDP2 is around it."""
    times = {"host_unit": 3.0, "host_collective": 5.0, "cores": 1}
    _, update = clock(profile(**times), "dp_shard=2").phases(Trace([Began("step 1"), Began("optimizer"), gather(1.0)]))
    assert update.spent.host.seconds == 5


@pytest.mark.parametrize(("dtensors", "seconds"), [(True, 3.0), (False, 2.0)])
def test_functions_over_dtensors_have_a_time_of_their_own_in_an_update(dtensors, seconds):
    trace = Trace([Began("step 1"), Began("optimizer"), Op("add_", "other", 0, 0, "float32")])
    times = {"host": 1.0, "host_update": 2.0, "host_sharded": 3.0, "cores": 1}
    _, update = clock(profile(**times), "dp_shard=2", dtensors=dtensors).phases(trace)
    assert update.spent.host.seconds == seconds
    _, update = clock(profile(host=1.0, cores=1), "dp_shard=2", dtensors=dtensors).phases(trace)
    assert update.spent.host.seconds == 1


def test_the_functions_of_an_update_take_a_fraction_on_the_device():
    events = [Began("step 1"), Began(Action(0, "F", 0)), Op("add_", "other", 0, 10**9, "float32")]
    trace = Trace([*events, Began("optimizer"), events[-1]])

    def device(**fields):
        return [phase.spent.device.seconds for phase in clock(profile(cores=1, **fields), "tp=1").phases(trace)]

    _, forward, update = device(update_fraction=0.25)
    assert update == pytest.approx(forward / 4) and forward > 0
    assert device()[1] == device()[2] == forward


def test_a_slower_function_takes_so_many_times_its_bytes():
    of = profile(slower={"exp": 8.0})
    assert of.compute(0, 1e18, "float32", "exp").seconds == pytest.approx(
        8 * of.compute(0, 1e18, "float32", "other").seconds
    )
    assert of.compute(0, 1e18, "float32", "tanh").seconds == of.compute(0, 1e18, "float32", "other").seconds


def test_a_backend_may_do_something_else_than_a_ring():
    of = profile(cores=1, node=Link(0.0, 1e9, FLAT, 0.0, kinds={"reduce_scatter": 2.0}))
    plain = forward([reduce(1.0)], kind="B", cores=1)
    trace = Trace([Began("step 1"), Began(Action(0, "B", 0)), reduce(1.0)])
    assert clock(of, "dp_shard=2").phases(trace)[1].spent.total.seconds == 2 * plain.total.seconds


def test_functions_beside_a_collective_take_longer():
    """The second gather runs beside 3 s of functions for all of its second: half of that is added. The first runs alone."""
    events = [gather(1.0), matmul(3.0), gather(1.0), matmul(3.0)]
    spent = forward(events, contention=0.5)
    assert spent.device.seconds == pytest.approx(6.0 + 0.5 * 1.0)
    assert spent.exposed["dp_shard"].seconds == pytest.approx(1.0)
    assert forward(events[:2], contention=0.5).device.seconds == pytest.approx(3.0)
