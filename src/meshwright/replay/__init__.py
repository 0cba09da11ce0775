"""A block's *local program*: the functions that its forward runs on this rank, recorded once and run again without wrappers.

A forward under the SPMD mode costs the host a decision, a look-up and a wrapper for each torch function. In the end it runs
plain torch functions and collectives on local tensors, in a fixed order. This package records that order:

    recorder    a function mode below the SPMD mode: it sees the functions on local tensors that the mode calls
    nodes       the entries of a recording: functions, collectives, and where each input tensor comes from
    state       the Python state that a forward may have read: compared before each replay
    functions   the functions that ran: their closures and the defaults of their arguments
    recording   one call under the recorder, and the program made from it
    program     the nodes as an ``fx`` graph, compiled to one Python function of local tensors
    inductor    the graph compiled by ``torch.compile``, if the plan says ``compile: true``: then equal up to rounding
    replayed    the blocks of a model: compares two recordings of a call, then replays it

A program holds for one *key*: the tree of arguments, their layouts, shapes, strides, dtypes and ``requires_grad``, constants,
which moves of an argument have been made already, grad and autocast mode. Some things cannot be in a key: a value that Python
reads, a size that depends on values, a write to an argument or an attribute, random numbers of the host. A block that does one
of them stays eager, and a note says why. A replay makes the same calls of torch as an eager forward, in the same order, so
results, gradients, random numbers and collectives are equal bit for bit.
"""
