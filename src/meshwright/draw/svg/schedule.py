"""Draws a pipeline's schedule in time: a line for each rank, a box for each action, a colour for each stage."""

from __future__ import annotations

from meshwright.draw.svg.canvas import BOLD, LABEL, RANK_COLOURS, Box, Canvas, Drawing
from meshwright.schedule import Schedule, idle, timeline

# In pixels:
WIDTH, MARGIN = 1000.0, 22.0  # of the page
NAME, LINE = 58.0, 30.0  # room for "rank 12"; from one line to the next
_TOP, _BOTTOM = 54.0, 44.0  # the head of the page, with the title; its foot, with the legend
_BETWEEN_LINES = 4  # of the distance from line to line
_BASELINE = 18.0  # of text in a line, from the line's top
_LEGEND = 14  # the baseline of the legend, from the bottom
_INSET, _RADIUS = 0.7, 3  # of a box in its time, so that neighbours are apart; of its corners
_ROOM = 13  # width of a box from which on it shows the number of its microbatch
_KINDS = {"F": "forward", "B": "backward", "I": "backward, gradients of inputs", "W": "backward, gradients of weights"}


def schedule_svg(schedule: Schedule, title: str) -> Drawing:
    """The drawing of a schedule, as the text of an SVG file. A backward takes as long as two forwards."""
    canvas, spans = Canvas(), timeline(schedule)
    unit = (WIDTH - 2 * MARGIN - NAME) / max(span.stop for span in spans)
    height = _TOP + LINE * len(schedule.ranks) + _BOTTOM
    rest = f"ranks rest for {100 * idle(spans):.1f} % of the time"
    canvas.page(WIDTH, height, MARGIN, title, rest)
    for rank in range(len(schedule.ranks)):
        y = _TOP + LINE * rank
        canvas.text(MARGIN, y + _BASELINE, f"rank {rank}", LABEL, weight=BOLD)
        canvas.box(Box(MARGIN + NAME, y, WIDTH - 2 * MARGIN - NAME, LINE - _BETWEEN_LINES), "ghost", radius=_RADIUS)
    for rank, start, stop, action in spans:
        box = Box(MARGIN + NAME + start * unit, _TOP + LINE * rank, (stop - start) * unit, LINE - _BETWEEN_LINES)
        tooltip = f"stage {action.stage}, microbatch {action.microbatch}, {_KINDS[action.kind]}"
        colour = RANK_COLOURS[action.stage % len(RANK_COLOURS)]
        canvas.box(box.inner(_INSET), fill=colour, radius=_RADIUS, about=tooltip)
        if action.kind != "F":
            canvas.box(box.inner(_INSET), "shade", radius=_RADIUS)
        if box.width > _ROOM:
            middle, baseline = box.x + box.width / 2, box.y + _BASELINE - 0.5  # half a pixel: its text has an outline
            canvas.text(middle, baseline, str(action.microbatch), LABEL, "on", "middle", BOLD)
    legend = "A box is one microbatch in one stage: a forward, or, darker, a backward of twice the time. A colour is a stage."
    canvas.text(MARGIN, height - _LEGEND, legend, LABEL, "dim")
    about = "; ".join(
        f"rank {rank}: {' '.join(str(span.action) for span in spans if span.rank == rank)}"
        for rank in range(len(schedule.ranks))
    )
    return canvas.svg(WIDTH, height, title, f"{rest}. {about}")
