"""Published measurements of training layouts as cases that a predictor can be held to (bench/published.py)."""
