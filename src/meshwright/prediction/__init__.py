"""Memory and time of a training step, before it runs; or measured, in the same shape.

    rehearsal   a step of one rank by the run's own code, without values and without other ranks   world, tracker
    trace       what the rank did, in order: functions, collectives, memory
    memory      the most bytes that live at once, itemised
    clock       seconds of each action, from a profile of the hardware (``meshwright.hardware``)
    play        the pipeline: actions of all stages, and what they wait for
    predict     ``predict`` and ``measure``
    result      ``Prediction``
    measure     what a run on this machine takes
    branches/   ``compare_branches``: does it pay to run branches beside each other?
    analytic    a GPT's memory in closed form, to compare with

Where an equation enters, it stands in the docstring of the function that computes it; `clock`, `play` and
``hardware.collectives`` begin with a table of them.
"""
