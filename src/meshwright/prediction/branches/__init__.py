"""``compare_branches``: whether it pays to run branches at the same time, on different ranks.

Seconds are computed as in every prediction (``Profile``, ``collective``).

    work        seconds of some events of a forward and their backward, on one device or sharded over tp
    traffic     calls and bytes of collectives; forks and joins are counted as a job's ledger counts them
    ways        the ways to run a region of branches, and their costs
    comparison  ``Comparison``: table and verdict
    compare     ``compare_branches``: makes a comparison from a model and a plan

``planning.split`` divides ranks between branches, also for ``branches: auto``.
"""
