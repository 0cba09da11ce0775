"""The watchdog: heartbeats of all ranks, a report if they stop, and an exit code on which a launcher restarts them."""
