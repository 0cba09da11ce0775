"""Progress of training: a live panel on a terminal, lines of text otherwise.

╭─ hf:gpt2 over dp_shard=2 × tp=2 ────────────────────────────╮
│ ━━━━━━━━━━━━━━━╺━━━━━━━━  120/200  0:01:02, 0:00:41 to go    │
│ loss     2.3102  ▇▆▅▄▃▃▂▂▁▁                                  │
│ rate     5.2 k tokens/s     waiting  4 %                     │
│ memory   rank 0  1.2 GiB ████████   rank 1  1.1 GiB ███████  │
╰──────────────────────────────────────────────────────────────╯
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.live import Live as RichLive
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meshwright.amounts import count_text, size_text
from meshwright.draw.console import console
from meshwright.draw.text import sparkline

if TYPE_CHECKING:
    from meshwright.train import loop

_RECENT = 10  # last steps, whose mean duration estimates the remaining time
_LOSSES = 40  # last losses, which the curve shows: one character each
_ONE_BY_ONE = 8  # most ranks that get a line of memory each; with more, only the least and the most are shown
_CELLS = 12  # characters of the longest memory bar
_BAR = 32  # characters of the bar of steps
_REFRESHES = 4  # of the panel in a second: clocks count smoothly, and a terminal over ssh keeps up
_LINES = 10  # lines in a whole run, if there is no panel: about one for each tenth of the steps


class Live:
    """The progress display. Used as a context manager, in which ``tell`` is called after each step.

    Args:
        steps: total number of optimizer steps of the run.
        title: the model and the mesh.
        shown: True on rank 0. On other ranks nothing is printed but notes.
    """

    def __init__(self, steps: int, title: str = "", *, shown: bool) -> None:
        self.steps, self.title, self.shown, self.console = steps, title, shown, console()
        self._step: loop.Progress | None = None
        self._memories: tuple[int, ...] = ()
        self._losses, self._seconds = deque[float](maxlen=_LOSSES), deque[float](maxlen=_RECENT)
        self._started = time.monotonic()
        self._panel: RichLive | None = None

    def __enter__(self) -> Live:
        if self.shown and self.console.is_terminal:
            self._panel = RichLive(get_renderable=self.drawn, console=self.console, refresh_per_second=_REFRESHES)
            self._panel.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._panel is not None:
            self._panel.stop()

    def tell(self, step: loop.Progress | str) -> None:
        """Shows the progress after a step, or prints a note."""
        if isinstance(step, str):
            self.console.print(step, highlight=False, soft_wrap=True)
            return
        self._step, self._memories = step, step.memories or self._memories
        self._losses.append(step.loss)
        self._seconds.append(step.seconds)
        every = max(1, self.steps // _LINES)
        if self.shown and self._panel is None and (step.step in (1, self.steps) or step.step % every == 0):
            self.console.print(f"step {step.step}/{self.steps}  {self.line(step)}", highlight=False)

    def line(self, step: loop.Progress) -> str:
        """One line of text about a step: loss, rate, memory, waiting time, remaining time."""
        parts = [
            f"loss {step.loss:.4f}",
            f"{count_text(step.rate)} {step.unit}/s",
            self._memory_text() or size_text(step.memory),
            f"waiting {100 * step.waiting:.0f} %",
        ]
        if step.skipped:
            parts.append(f"{step.skipped} skipped")
        if step.step < self.steps:
            parts.append(f"{clock(self.seconds_left)} to go")
        return "  ".join(parts)

    @property
    def seconds_left(self) -> float:
        """Estimate of the remaining seconds: the remaining steps times the mean duration of the last ones."""
        done = self._step.step if self._step is not None else 0
        return (self.steps - done) * sum(self._seconds) / max(1, len(self._seconds))

    def _memory_text(self) -> str:
        """The least and the most memory of a rank, such as ``1.1 GiB to 1.2 GiB``; empty if not known yet."""
        if not self._memories:
            return ""
        least, most = size_text(min(self._memories)), size_text(max(self._memories))
        return least if least == most else f"{least} to {most}"

    def drawn(self) -> RenderableType:
        """The panel, as rich prints it."""
        step = self._step
        bar = Table.grid(padding=(0, 2))
        elapsed = clock(time.monotonic() - self._started)
        done = step.step if step is not None else 0
        to_go = f", {clock(self.seconds_left)} to go" if step is not None and done < self.steps else ""
        bar.add_row(ProgressBar(self.steps, done, width=_BAR), f"{done}/{self.steps}", f"{elapsed}{to_go}")
        body: list[RenderableType] = [bar]
        if step is None:
            body.append(Text("starting", style="dim"))
        else:
            body += [self._numbers(step), self._ranks()]
        return Panel(Group(*body), title=self.title or None, title_align="left", expand=False)

    def _numbers(self, step: loop.Progress) -> Table:
        """The lines of loss, rate and waiting."""
        grid = Table.grid(padding=(0, 2))
        finite = [loss for loss in self._losses if loss == loss]
        least = min(finite, default=0.0)
        most = max(finite, default=1.0)
        curve = sparkline([loss - least for loss in finite], (most - least) or 1.0, _LOSSES)
        grid.add_row(Text("loss", style="dim"), f"{step.loss:.4f}", curve)
        skipped = f", {step.skipped} skipped" if step.skipped else ""
        grid.add_row(Text("rate", style="dim"), f"{count_text(step.rate)} {step.unit}/s{skipped}", "")
        share = f"{100 * step.waiting:.0f} %"
        grid.add_row(Text("waiting", style="dim"), share, Text("of the time, ranks for each other", style="dim"))
        return grid

    def _ranks(self) -> Table:
        """The lines of memory."""
        grid = Table.grid(padding=(0, 2))
        memories = self._memories
        if len(memories) > _ONE_BY_ONE:
            least, most = min(memories), max(memories)
            text = (
                f"{size_text(least)} (rank {memories.index(least)}) to {size_text(most)} (rank {memories.index(most)})"
            )
            grid.add_row(Text("memory", style="dim"), text)
            return grid
        for rank, nbytes in enumerate(memories):
            bar = "█" * max(1, round(_CELLS * nbytes / max(memories)))
            grid.add_row(Text("memory" if not rank else "", style="dim"), f"rank {rank}", size_text(nbytes), bar)
        return grid


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds, or hours, minutes and seconds.

    >>> clock(3), clock(75.4), clock(7384)
    ('0:03', '1:15', '2:03:04')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
