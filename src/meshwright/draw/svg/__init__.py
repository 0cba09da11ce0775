"""Drawings as SVG, for pages: ``model`` (a model onto its ranks), ``schedule`` (a pipeline in time); ``canvas`` draws."""

from meshwright.draw.svg.model import model_svg
from meshwright.draw.svg.schedule import schedule_svg

__all__ = ["model_svg", "schedule_svg"]
