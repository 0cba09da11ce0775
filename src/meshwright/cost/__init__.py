"""What a layout costs, before it runs: time, and what ranks exchange.

    work        seconds of a part of a forward and its backward, whole or cut
    traffic     calls and bytes of collectives; those of forks and joins as a job's ledger counts them
    split       ranks for each branch, exact
    branches    the ways to run a region of branches
    comparison  ``Comparison``: table and verdict
    compare     ``compare_branches``: from a model and a plan to a comparison

Planning uses ``split``; ``compare`` uses planning. Rates of machines are in ``meshwright.hardware``.
"""
