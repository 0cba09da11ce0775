"""Branches: the places that the plan names, and where they part and meet in the forward."""

from __future__ import annotations

from dataclasses import replace

from meshwright.errors import Findings
from meshwright.planning.branch import find_branches
from meshwright.planning.draft import Draft
from meshwright.planning.places import read_places


def read_branches(draft: Draft) -> Draft:
    """The places that the plan names, and what stands there."""
    findings = Findings()
    branches = read_places(draft.model, draft.plan, draft.entries, findings)
    return replace(draft, branches=branches).wrong(findings)


def place_branches(draft: Draft) -> Draft:
    """The branches as the forward has them."""
    if draft.graph is None:
        return draft
    findings = Findings()
    branches, notes = find_branches(draft.model, draft.plan, draft.branches, draft.graph, findings)
    return replace(draft, branches=branches).noted(notes).wrong(findings)
