"""Memory and time of a training step: predicted before it runs, or measured. Both results are a ``Prediction``.

    rehearsal   runs a step of one rank with the run's own code, without values and other ranks (world, tracker)
    trace       what that rank did, in order: functions, collectives, memory
    memory      the peak memory of a trace, by kind
    clock       seconds of each action, from a profile of the hardware (``meshwright.hardware``)
    play        seconds of a step, from the actions of all stages of the pipeline
    predict     ``predict`` and ``measure``
    result      ``Prediction``
    measure     measures a run on this machine
    branches/   ``compare_branches``: whether it pays to run branches at the same time
    analytic    the memory of a GPT in closed form, for comparison

Each equation is in the docstring of the function that computes it. `clock`, `play` and ``hardware.collectives`` begin with a
table of their equations.
"""
