"""Progress of training, as it is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from meshwright.amounts import count_text, size_text
from meshwright.draw.console import console

if TYPE_CHECKING:
    from meshwright.train import loop


class Bar:
    """Progress: a bar on a terminal, else a line now and then."""

    def __init__(self, steps: int, *, shown: bool) -> None:
        self.steps, self.shown, self.console = steps, shown, console()
        told = TextColumn("{task.fields[told]}")
        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), told, TimeElapsedColumn())
        self.progress = Progress(*columns, console=self.console, disable=not (shown and self.console.is_terminal))

    def __enter__(self) -> Bar:
        self.progress.start()
        self.task = self.progress.add_task("", total=self.steps, told="starting")
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def tell(self, step: loop.Progress | str) -> None:
        """Show a step, or a note."""
        if isinstance(step, str):
            self.console.print(step, highlight=False, soft_wrap=True)
            return
        told = f"loss {step.loss:.4f}  {count_text(step.rate)} {step.unit}/s  {size_text(step.memory)}"
        if step.skipped:
            told += f"  {step.skipped} skipped"
        self.progress.update(self.task, completed=step.step, told=told)
        every = max(1, self.steps // 10)
        if self.shown and not self.console.is_terminal and (step.step in (1, self.steps) or step.step % every == 0):
            self.console.print(f"step {step.step}/{self.steps}  {told}", highlight=False)
