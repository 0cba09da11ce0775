"""Draws a pipeline's schedule in time: a line for each rank, a box for each action, a colour for each stage."""

from __future__ import annotations

from meshwright.draw.svg.canvas import RANK_COLOURS, Box, Canvas, Drawing
from meshwright.schedule import Schedule, idle, timeline

WIDTH, MARGIN, LABEL, LINE = (
    1000.0,
    22.0,
    58.0,
    30.0,
)  # pixels: the page, its margin, room for "rank 12", a line's height
_KINDS = {"F": "forward", "B": "backward", "I": "backward, gradients of inputs", "W": "backward, gradients of weights"}


def schedule_svg(schedule: Schedule, title: str) -> Drawing:
    """The drawing of a schedule, as the text of an SVG file. A backward takes as long as two forwards."""
    canvas, spans = Canvas(), timeline(schedule)
    unit = (WIDTH - 2 * MARGIN - LABEL) / max(span.stop for span in spans)
    height = 64 + LINE * len(schedule.ranks) + 34
    canvas.box(Box(0.5, 0.5, WIDTH - 1, height - 1), "page", radius=12)
    canvas.text(MARGIN, 34, title, 17, weight=650)
    rest = f"ranks rest for {100 * idle(spans):.1f} % of the time"
    canvas.text(WIDTH - MARGIN, 34, rest, 12, "dim", "end")
    for rank in range(len(schedule.ranks)):
        y = 54 + LINE * rank
        canvas.text(MARGIN, y + 18, f"rank {rank}", 11, weight=600)
        canvas.box(Box(MARGIN + LABEL, y, WIDTH - 2 * MARGIN - LABEL, LINE - 4), "ghost", radius=3)
    for rank, start, stop, action in spans:
        box = Box(MARGIN + LABEL + start * unit, 54 + LINE * rank, (stop - start) * unit, LINE - 4)
        tooltip = f"stage {action.stage}, microbatch {action.microbatch}, {_KINDS[action.kind]}"
        canvas.box(box.inner(0.7), fill=RANK_COLOURS[action.stage % 8], radius=3, about=tooltip)
        if action.kind != "F":
            canvas.box(box.inner(0.7), "shade", radius=3)
        if box.width > 13:
            canvas.text(box.x + box.width / 2, box.y + 17.5, str(action.microbatch), 11, "on", "middle", 600)
    legend = "A box is one microbatch in one stage: a forward, or, darker, a backward of twice the time. A colour is a stage."
    canvas.text(MARGIN, height - 14, legend, 11, "dim")
    about = "; ".join(
        f"rank {rank}: {' '.join(str(span.action) for span in spans if span.rank == rank)}"
        for rank in range(len(schedule.ranks))
    )
    return canvas.svg(WIDTH, height, title, f"{rest}. {about}")
