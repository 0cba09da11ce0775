"""Runs a pipeline: the actions of a schedule, programs for other lengths, a backward in two halves."""
