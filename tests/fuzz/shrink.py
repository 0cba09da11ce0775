"""A smaller case that fails alike.

Greedy: of all ways to make a case smaller by one step, the largest steps first, the first that still fails is taken, until
none does. Steps that one device itself refuses are passed over without a pool.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from judge import ERROR, Verdict, one_device
from program import Case, Class, Program, Run, Statement


def shrink(
    case: Case, verdict: Verdict, judge: Callable[[Run], Verdict], *, seconds: float = 120.0
) -> tuple[Case, Verdict]:
    """The smallest case that was found in this time, and what is wrong with it."""
    end, seen = time.monotonic() + seconds, {case.run.printed()}
    while time.monotonic() < end:
        for smaller in steps(case):
            printed = smaller.run.printed()
            if printed in seen or time.monotonic() > end:
                continue
            seen.add(printed)
            if not runs_alone(smaller.run):
                continue
            found = judge(smaller.run)
            if found.failed and found.kind == verdict.kind and (found.sort == verdict.sort or verdict.kind != ERROR):
                case, verdict = smaller, found
                break
        else:
            break
    return case, verdict


def runs_alone(run: Run) -> bool:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if run.precise else torch.float32)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one_device(run)
    except Exception:
        return False
    finally:
        torch.set_default_dtype(default)
    return True


def steps(case: Case) -> Iterator[Case]:
    """Cases that are smaller by one step."""
    yield from _smaller_runs(case)
    yield from _smaller_plans(case)
    yield from _smaller_programs(case)


def _smaller_runs(case: Case) -> Iterator[Case]:
    if case.lengths > 1:
        yield replace(case, lengths=1)
    for rows in (
        ((4,),),
        ((4,), (4,)),
        ((4, 4),),
        case.rows[:-1],
        tuple(step[:1] for step in case.rows),
        ((4, 4), (4,)),
    ):
        if rows and sum(map(sum, rows)) < sum(map(sum, case.rows)):
            yield replace(case, rows=rows)


def _smaller_plans(case: Case) -> Iterator[Case]:
    plan = dict(case.plan)
    for key in plan.keys() - {"mesh"}:
        yield replace(case, plan={k: v for k, v in plan.items() if k != key})
    if len(plan["mesh"]) > 1:
        for axis in plan["mesh"]:
            yield replace(case, plan={**plan, "mesh": {k: v for k, v in plan["mesh"].items() if k != axis}})
    if plan["mesh"].get("tp", 0) > 2:
        yield replace(case, plan={**plan, "mesh": {**plan["mesh"], "tp": 2}})
    for section in ("modules", "parameters"):
        for name in plan.get(section, {}):
            yield replace(case, plan={**plan, section: {k: v for k, v in plan[section].items() if k != name}})


def _smaller_programs(case: Case) -> Iterator[Case]:
    classes = case.program.classes
    for i in reversed(range(len(classes))):
        for smaller in _smaller_classes(classes[i]):
            yield replace(case, program=replace(case.program, classes=(*classes[:i], smaller, *classes[i + 1 :])))


def _smaller_classes(made: Class) -> Iterator[Class]:
    body, size = made.body, len(made.body)
    while size:
        for start in range(0, len(body), size):
            yield _without(made, start, min(start + size, len(body)))
        size //= 2
    for i, statement in enumerate(body):
        if statement.within:
            yield replace(made, body=(*body[:i], *statement.within, *body[i + 1 :]))
            for j in range(len(statement.within)):
                inner = (*statement.within[:j], *statement.within[j + 1 :])
                if inner:
                    yield replace(made, body=(*body[:i], replace(statement, within=inner), *body[i + 1 :]))
        for text in ("{0} * 1.0", "{0}.square().mean()", "{0}.sum()"):
            if statement.of and statement.out and statement.text != text:
                yield replace(made, body=(*body[:i], replace(statement, text=text), *body[i + 1 :]))
        earlier = [n for n in (*made.inputs, *(s.out for s in body[:i])) if n]
        for place, name in enumerate(statement.of):
            for other in earlier[: earlier.index(name)] if name in earlier else ():
                of = (*statement.of[:place], other, *statement.of[place + 1 :])
                yield replace(made, body=(*body[:i], replace(statement, of=of), *body[i + 1 :]))
    for name in re.findall(r"\bv\d+\b|\bh\b", made.result):
        if not made.result.startswith("{") and made.result != name:
            yield replace(made, result=name)


def _without(made: Class, start: int, stop: int) -> Class:
    """Without these statements; what they made is replaced by what they were given."""
    instead: dict[str, str] = {}
    for statement in made.body[start:stop]:
        for s in _all(statement):
            if s.out and s.of and s.out not in s.of:
                instead[s.out] = instead.get(s.of[0], s.of[0])
    body = tuple(_renamed(s, instead) for s in (*made.body[:start], *made.body[stop:]))
    result = re.sub(r"\b\w+\b", lambda m: instead.get(m.group(), m.group()), made.result)
    return replace(made, body=body, result=result)


def _all(statement: Statement) -> Iterator[Statement]:
    yield statement
    for inner in statement.within:
        yield from _all(inner)


def _renamed(s: Statement, names: dict[str, str]) -> Statement:
    return replace(s, of=tuple(names.get(n, n) for n in s.of), within=tuple(_renamed(t, names) for t in s.within))


__all__ = ["Program", "shrink"]
