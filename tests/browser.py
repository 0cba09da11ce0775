"""A real browser for tests: this machine's chromium, headless, driven by Playwright's core. Nothing is downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SCREENSHOTS = Path(__file__).parents[1] / "build" / "screenshots"
"""Where `Visit.keep` puts its pictures: ignored by git, for a person to look at."""

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str:
    """Where the browser is; a test that asks is skipped, with the reason, where there is none, or nothing to drive it."""
    pytest.importorskip("playwright.sync_api", reason="no playwright here: pip install playwright (no browser build)")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("no chromium on the PATH: apt-get install chromium")
    return path


@contextmanager
def browser() -> Iterator[Any]:
    path = chromium()
    from playwright.sync_api import sync_playwright

    # In a container of root's there is no sandbox to be had.
    flags = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=flags)
        try:
            yield running
        finally:
            running.close()


class Visit:
    """A page that is open: what it asked for, and what went wrong in it.

    Attributes:
        page: Playwright's.
        requests: addresses that it asked for, the file itself among them.
        errors: of its scripts and its console.
    """

    def __init__(self, running: Any, address: str, **context: Any) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page = running.new_page(viewport=context.pop("viewport", {"width": 1400, "height": 900}), **context)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on(
            "console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(address)
        self.page.wait_for_function("window.meshwright !== undefined")

    def tip(self) -> list[str]:
        """The lines of the tooltip; none, if there is none."""
        lines: list[str] = self.page.evaluate(
            "[...document.querySelectorAll('#tip:not([hidden]) > *')].map((e) => e.textContent)"
        )
        return lines

    def keep(self, name: str, view: str | None = None) -> bytes:
        """Keeps a picture of a view (a CSS selector), or of the whole page, as ``build/screenshots/<name>.png``."""
        file = SCREENSHOTS / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        place = self.page if view is None else self.page.locator(view)
        picture: bytes = place.screenshot(path=file, **({"full_page": True} if view is None else {}))
        return picture

    def print(self, name: str) -> None:
        """Keeps the page as it is printed, on A4, as ``build/screenshots/<name>.pdf``."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.emulate_media(media="print")
        self.page.pdf(path=SCREENSHOTS / f"{name}.pdf", format="A4")

    def blank(self) -> list[str]:
        """The canvases on which nothing is drawn, each by the name of the place that it is in."""
        names: list[str] = self.page.evaluate(
            """[...document.querySelectorAll("main canvas")].filter((canvas) => {
                const { width, height } = canvas;
                const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, width, height).data.buffer);
                return pixels.every((pixel) => pixel === pixels[0]);
            }).map((canvas) => canvas.closest("[id]").id)"""
        )
        return names

    def point(self, picture: str, item: str) -> list[str]:
        """Moves the mouse to an item of a picture, both as the page's scripts name them; gives the tooltip's lines."""
        x, y = self.page.evaluate(
            f"""async () => {{ const {{ {picture}: canvas, drawing, facts }} = window.meshwright;
                canvas.scrollIntoView({{ block: "center" }});
                await new Promise(requestAnimationFrame);
                await new Promise(requestAnimationFrame); // it has been told that it was scrolled
                const box = canvas.getBoundingClientRect();
                const {{ x, y }} = canvas.at({item});
                return [box.left + x, box.top + y]; }}"""
        )
        self.page.mouse.move(x, y)
        return self.tip()
