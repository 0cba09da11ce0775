"""Checks whether rows can run apart: a trial before the first step, and a watch on paths in each step."""
