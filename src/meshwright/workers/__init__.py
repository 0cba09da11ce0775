"""A pool of processes on this machine, started once, that run functions in process groups."""
