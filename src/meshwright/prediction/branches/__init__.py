"""Does it pay to run branches beside each other? By the seconds that every prediction has (``Profile``, ``collective``).

    work        seconds of a part of a forward and its backward, whole or cut
    traffic     calls and bytes of collectives; those of forks and joins as a job's ledger counts them
    ways        the ways to run a region of branches
    comparison  ``Comparison``: table and verdict
    compare     ``compare_branches``: from a model and a plan to a comparison

The split of ranks between branches is ``planning.split``, which ``branches: auto`` uses too.
"""
