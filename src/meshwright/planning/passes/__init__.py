"""The passes of planning/resolve.py: each takes a ``Draft`` and returns the next one, with one more fact."""
