"""A block's *local program*: what its forward does on this rank, recorded once and run again without wrappers.

A forward under the SPMD mode costs the host a decision, a look-up and a wrapper for each torch function. What they come to
is plain torch functions and collectives on local tensors, in a fixed order. Here that order is written down:

    recorder    a function mode below the SPMD mode: it sees what is left of a call when the mode has answered it
    nodes       what it writes down: functions, collectives, and where each tensor comes from
    state       the Python state that a forward may have read: compared before each replay
    functions   those that ran: what they are closed over, and what their arguments default to
    recording   one call under the recorder, and the program that comes of it
    program     the nodes as an ``fx`` graph, compiled to one function of local tensors
    inductor    the same by ``torch.compile``, if the plan says ``compile: true``: then equal to rounding
    replayed    the blocks of a model: two recordings of a call are compared, then it is replayed

A program holds for one *key*: the tree of arguments, their layouts, shapes, strides, types and ``requires_grad``, constants,
which moves of an argument have been made already, grad and autocast mode. What a key cannot hold (a value that Python reads,
a size that follows from values, a write to an argument or to an attribute, random numbers of the host) is refused: the block
stays eager, and a note says why. A replay makes the same calls of torch as an eager forward, in the same order: results,
gradients, random numbers and collectives are those of an eager forward, bit for bit.
"""
