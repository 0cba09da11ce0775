"""Branches: the places that the plan names, and where branches part and join in the forward."""

from __future__ import annotations

from dataclasses import replace

from meshwright.errors import Findings
from meshwright.planning.branch import find_branches
from meshwright.planning.draft import Draft
from meshwright.planning.places import read_places


def read_branches(draft: Draft) -> Draft:
    """Adds the places that the plan names, with their modules."""
    findings = Findings()
    branches = read_places(draft.model, draft.plan, draft.entries, findings)
    return replace(draft, branches=branches).wrong(findings)


def place_branches(draft: Draft) -> Draft:
    """Completes the branches from the recorded forward."""
    if draft.graph is None:
        return draft
    findings = Findings()
    branches, notes = find_branches(draft.model, draft.plan, draft.branches, draft.graph, findings)
    return replace(draft, branches=branches).noted(notes).wrong(findings)
