"""What is wrong with a plan before the forward runs; and the pass that ends planning if something is."""

from __future__ import annotations

from torch import nn

from meshwright.calls.structure import is_scripted
from meshwright.errors import Finding, Findings
from meshwright.names import few, fold_names
from meshwright.planning.draft import Draft
from meshwright.planning.rows import rows_of
from meshwright.private import awaits_gradient, hooked


def stop_if_wrong(draft: Draft) -> Draft:
    """Raises a PlanError with all that was found until here."""
    findings = Findings()
    findings.extend(draft.findings)
    findings.raise_if_any()
    return draft


def check_rows(draft: Draft) -> Draft:
    """Each data rank needs a row for each microbatch."""
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
    """No dim has shards for more ranks than it has elements."""
    mesh, size = draft.plan.mesh, draft.plan.mesh.axis_size("tp")
    largest = max((max(p.shape, default=0) for p, _ in draft.names.parameters.values()), default=0)
    if size <= max(largest, 1):
        return draft
    finding = Finding(
        where="mesh.tp",
        given=f"tp={size}, larger than every dim that could be cut: the largest dim of a parameter is {largest}",
        required=f"tp of at most {largest}",
        fix=f"mesh: {{dp_shard: {mesh.size}}}",
    )
    return draft.wrong([finding])


def check_scripted(draft: Draft) -> Draft:
    """A scripted module's parameters cannot be replaced by parts of them, and nobody sees which stage uses its buffers."""
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
    """Hooks of parameters get whole gradients. What waits for a gradient would get the parameter, which no rank has whole."""
    parameters = draft.names.parameters.items()
    told = [name for name, (p, _) in parameters if hooked(p)]
    note = f"{', '.join(map(str, fold_names(told)))}: hooks get the whole gradient, gathered at the end of each step"
    return draft.noted([note] if told else []).wrong(
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
    """Parameters of a class with methods of its own: what stands in their place has none."""
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
    """What a class of parameters adds to torch's."""
    classes = (c for c in kind.__mro__ if not c.__module__.startswith("torch") and c is not object)
    return [k for c in classes for k in vars(c) if not k.startswith("__")]


def tell_dense(draft: Draft) -> Draft:
    """Sparse gradients cannot be sharded."""
    modules = draft.model.named_modules()
    sparse = [name for name, m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
    names = ", ".join(map(str, fold_names(sparse)))
    return draft.noted([f"{names}: gradients are dense, as sparse ones cannot be sharded"] if sparse else [])
