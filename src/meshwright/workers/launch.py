"""``launch``: runs a function on several local ranks, from a notebook or a script, in one line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar, overload

from meshwright.workers import pool

T = TypeVar("T")


@overload
def launch(
    fn: Callable[..., T],
    /,
    *args: Any,
    nprocs: int,
    device: str = ...,
    timeout: float = ...,
    every: Literal[False] = ...,
    **kwargs: Any,
) -> T: ...


@overload
def launch(
    fn: Callable[..., T],
    /,
    *args: Any,
    nprocs: int,
    device: str = ...,
    timeout: float = ...,
    every: Literal[True],
    **kwargs: Any,
) -> list[T]: ...


def launch(
    fn: Callable[..., Any],
    /,
    *args: Any,
    nprocs: int,
    device: str = "cpu",
    timeout: float = pool.TIMEOUT,
    every: bool = False,
    **kwargs: Any,
) -> Any:
    """Calls ``fn(*args, **kwargs)`` on ``nprocs`` local ranks.

    Each rank is a process, in a process group of ``nprocs`` ranks, as under torchrun. So ``fn`` can call ``mw.parallelize``.
    The processes start for this call and end with it; `local_workers` keeps them for several calls. ``fn`` may be a function
    of a notebook, a lambda or a nested function. The output of rank 0 appears here, live; the output of other ranks does not.

    Args:
        fn: called on every rank. Its result must be picklable.
        *args: positional arguments of ``fn``, equal on every rank.
        **kwargs: keyword arguments of ``fn``, equal on every rank.
        nprocs: number of ranks.
        device: ``cpu`` (gloo), or ``cuda`` (rank r on GPU r, NCCL).
        timeout: seconds without an answer from any rank, after which the call ends with an error.
        every: whether to return the results of all ranks.

    Returns:
        The result of rank 0; with ``every``, the list of the results of all ranks in their order.

    Raises:
        PlanError: a plan, a model or a batch that ``fn`` used is wrong. The error lists every problem.
        WorkerError: ``fn`` failed. The error has the first rank that failed, its traceback and its output. All ranks are ended.
        TypeError: ``fn`` or an argument cannot be pickled.
        ValueError: ``nprocs`` is less than 1.
    """
    with pool.local_workers(nprocs, device=device, timeout=timeout) as workers:
        try:
            results = workers.run(partial(fn, *args, **kwargs), ranks=nprocs, echo=True)
        except pool.WorkerError as error:
            if error.plan_error is not None:
                raise error.plan_error from None
            raise
    return results if every else results[0]
