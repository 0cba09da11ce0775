"""Runs of any script, written down and compared: which gradient is wrong, by what factor, and what that usually means.

record      what a person calls: hooks on optimizers, losses
named       parameters by the names of one device, whatever wraps them
layout      which part of a tensor this rank holds, and how it is put together
taken       what was seen of a step, copied to the host
views       which ranks hold the same, from what all of them tell
writing     one tensor at a time, to rank 0, into a folder aside; one rename
folder      a recording as it stands on a disk
alike       when two tensors are the same but for rounding
pattern     what two tensors that differ have to do with each other
joined      what the differing values of several ranks have to do with a whole tensor
values      every gradient and update of a step, judged
before      what the two runs began with: weights, rows, loss, settings
compare     two recordings → a verdict
causes      what a pattern usually means: a table
verdict     what was found, as data
"""
