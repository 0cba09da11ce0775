"""Records steps of any training script, and compares two recordings: which gradient is wrong, by what factor, and why.

record           the interface for a person: hooks on optimizers, losses
parameter_names  parameters by their names on one device, without the prefixes of wrappers
layout           the part of a tensor that this rank holds; gathers the full tensor
copies           copies of a step's gradients and parameters on the host
views            which ranks hold the same values
writing          sends one tensor at a time to rank 0, which writes a temporary folder; one rename
manifest         the facts of all ranks beside the tensors
folder           a recording on disk
tolerance        the tolerance for rounding
pattern          the relation between two tensors that differ: a factor, another order of blocks, …
assembly         the relation between the values of several ranks and the full tensor that they should make
pairs            two recordings side by side: which name of one is which name of the other
values           compares every weight, gradient and update
inputs           compares names, rows, loss and settings
compare          two recordings → a verdict
diagnosis        rules: pattern → cause
causes           a table: what a pattern usually means
verdict          the result, as data
"""
