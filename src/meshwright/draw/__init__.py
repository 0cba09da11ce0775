"""Pictures: facts first (``facts``: plain values that a program can read), then thin renderers (``terminal``)."""
