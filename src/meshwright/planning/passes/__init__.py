"""The passes of planning/resolve.py: each takes a ``Draft`` and gives the next one, with one more thing known."""
