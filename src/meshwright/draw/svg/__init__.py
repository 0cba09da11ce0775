"""SVG drawings for pages: ``model`` (a model and its ranks), ``schedule`` (a pipeline in time); ``canvas`` draws shapes."""

from meshwright.draw.svg.model import model_svg
from meshwright.draw.svg.schedule import schedule_svg

__all__ = ["model_svg", "schedule_svg"]
