"""Checks of a plan and a model before the forward runs; and the pass that ends planning if there are problems."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from meshwright.calls.structure import is_scripted
from meshwright.errors import Finding, Findings
from meshwright.names import few, fold_names
from meshwright.planning.draft import Draft
from meshwright.planning.rows import rows_of
from meshwright.private import awaits_gradient, hooked


def stop_if_wrong(draft: Draft) -> Draft:
    """Raises a PlanError with all problems so far; else returns the draft unchanged."""
    findings = Findings()
    findings.extend(draft.findings)
    findings.raise_if_any()
    return draft


_IN_BUILD = "in build(): model = Model(); model(sample); return model"


def refuse_lazy(model: nn.Module) -> None:
    """Raises a PlanError if parameters or buffers have no shapes yet, as those of ``nn.LazyLinear``."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    lazy = [name for name, t in tensors if nn.parameter.is_lazy(t)]
    findings = Findings()
    if lazy:
        findings.add(
            where=f"the model's {few(lazy)}",
            given="lazy: without a shape until a forward has run",
            required="a model whose parameters and buffers have shapes",
            fix=_IN_BUILD,
        )
    findings.raise_if_any()


def refuse_hidden(model: nn.Module) -> None:
    """Raises a PlanError if methods of the model's own leave out some of its parameters, buffers or modules."""
    findings = Findings()
    for method in ("named_parameters", "named_buffers", "named_modules", "parameters", "buffers", "modules"):
        own, of_torch = getattr(model, method), getattr(nn.Module, method)
        if getattr(own, "__func__", None) is of_torch:
            continue
        kind = method.removeprefix("named_")
        there = getattr(nn.Module, f"named_{kind}")(model)
        shown = {id(x) for x in own()} if method == kind else {(name, id(x)) for name, x in own()}
        if hidden := [name for name, x in there if (id(x) if method == kind else (name, id(x))) not in shown]:
            findings.add(
                where=f"the model's {method}()",
                given=f"a method of {type(model).__name__} that leaves out {few(hidden)}, or gives it another name",
                required=f"all {kind}: each rank holds its part of them",
                fix=f"leave {method} as nn.Module has it; p.requires_grad_(False) for what no optimizer is to train",
            )
    findings.raise_if_any()


def check_made(draft: Draft) -> Draft:
    """A problem if a forward has made parameters, or has put others in their place: the next one would find them, unsharded
    and unknown to the optimizer."""
    known = {name: p for first, (p, others) in draft.names.parameters.items() for name in (first, *others)}
    now = dict(draft.model.named_parameters(remove_duplicate=False))
    made = [name for name in now if name not in known]
    replaced = [name for name, p in now.items() if known.get(name, p) is not p]
    findings = [
        *_of_constructor(
            made, "parameters that the first forward makes",
            "parameters that are there before it: they are sharded then", "make them",
        ),
        *_of_constructor(
            replaced, "parameters in whose place the first forward puts others",
            "those that were there before it: an optimizer trains those", "put the others there",
        ),
    ]  # fmt: skip
    return draft.wrong(findings)


def _of_constructor(names: Sequence[str], given: str, required: str, fix: str) -> Iterator[Finding]:
    """A problem with these parameters, if there are any. ``fix``: what the constructor should do."""
    if names:
        fix = f"{fix} in the constructor; or, {_IN_BUILD}"
        yield Finding(where=f"the model's {few(names)}", given=given, required=required, fix=fix)


def check_rows(draft: Draft) -> Draft:
    """A problem if a data rank does not get a row for each microbatch."""
    rows, ranks, microbatches = rows_of(draft.batch), draft.plan.mesh.data_size, draft.plan.microbatches or 1
    if not draft.whole_batch or rows is None or rows >= ranks * microbatches:
        return draft
    finding = Finding(
        where="batch",
        given=f"{rows} rows",
        required=f"at least one row for each of {ranks} data ranks × {microbatches} microbatches",
        fix=f"a batch of {ranks * microbatches} rows or a multiple",
    )
    return draft.wrong([finding])


def check_tp(draft: Draft) -> Draft:
    """A problem if tp is larger than the largest dim of every parameter."""
    mesh, size = draft.plan.mesh, draft.plan.mesh.axis_size("tp")
    largest = max((max(p.shape, default=0) for p, _ in draft.names.parameters.values()), default=0)
    if size <= max(largest, 1):
        return draft
    finding = Finding(
        where="mesh.tp",
        given=f"tp={size}, larger than every dim that could be sharded: the largest dim of a parameter is {largest}",
        required=f"tp of at most {largest}",
        fix=f"mesh: {{dp_shard: {mesh.size}}}",
    )
    return draft.wrong([finding])


def check_scripted(draft: Draft) -> Draft:
    """A problem for each scripted module with parameters, which cannot be replaced by shards; over pp also with buffers, since
    its uses of them are not seen."""
    refused = ("parameters", "buffers") if draft.plan.mesh.axis_size("pp") > 1 else ("parameters",)
    scripted = [(name, module) for name, module in draft.model.named_modules() if is_scripted(module)]
    return draft.wrong(
        Finding(
            where=f"the model's {name or 'root'}",
            given=f"a module of torch.jit.script or trace, with {kind} of its own",
            required="a module in Python",
            fix="build the model without torch.jit",
        )
        for name, module in scripted
        for kind, of in (("parameters", module.parameters), ("buffers", module.buffers))
        if kind in refused and next(of(recurse=False), None) is not None
    )


def check_hooks(draft: Draft) -> Draft:
    """A note on parameters with gradient hooks, which get whole gradients; a problem for each hook of
    ``register_post_accumulate_grad_hook``, which gets the parameter, and no rank has the whole one."""
    parameters = draft.names.parameters.items()
    with_hooks = [name for name, (p, _) in parameters if hooked(p)]
    note = (
        f"{', '.join(map(str, fold_names(with_hooks)))}: hooks get the whole gradient, gathered at the end of each step"
    )
    return draft.noted([note] if with_hooks else []).wrong(
        Finding(
            where=name,
            given="a hook of register_post_accumulate_grad_hook",
            required="none: it would be given a part of the parameter, with a part of its gradient",
            fix="register_hook, which gets the whole gradient; or act after job.step",
        )
        for name, (p, _) in parameters
        if awaits_gradient(p)
    )


def check_classes(draft: Draft) -> Draft:
    """A problem for each parameter of a class with methods of its own: the tensors that replace it do not have them."""
    return draft.wrong(
        Finding(
            where=name,
            given=f"a parameter of the class {type(p).__name__}, which has {few(methods)}",
            required="a class without methods: a part of the parameter stands in its place, of another class",
            fix="an nn.Parameter; put what the class computes into the module",
        )
        for name, (p, _) in draft.names.parameters.items()
        if (methods := _own_methods(type(p)))
    )


def _own_methods(kind: type) -> list[str]:
    """The names that a subclass of ``Parameter`` adds."""
    classes = (c for c in kind.__mro__ if not c.__module__.startswith("torch") and c is not object)
    return [k for c in classes for k in vars(c) if not k.startswith("__")]


def tell_dense(draft: Draft) -> Draft:
    """A note on embeddings with ``sparse=True``: their gradients are dense here."""
    modules = draft.model.named_modules()
    sparse = [name for name, m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
    names = ", ".join(map(str, fold_names(sparse)))
    return draft.noted([f"{names}: gradients are dense, as sparse ones cannot be sharded"] if sparse else [])
