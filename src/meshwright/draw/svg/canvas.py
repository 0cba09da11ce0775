"""``Canvas``: writes shapes as SVG text, equal on every machine; with the colours of ranks, and a light and a dark style."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

RANK_COLOURS = ("#4C8BF5", "#18A999", "#8B6CF0", "#5AB04B", "#F2913D", "#E0527A", "#C9A40E", "#A9694A")
"""The colours of ranks, repeated after eight. Middle tones, so that neighbours are distinct on white and on black."""

_STYLE = """
text{font-family:ui-sans-serif,system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#1f2430}
.mono{font-family:ui-monospace,SFMono-Regular,Menlo,'DejaVu Sans Mono',monospace}
.page{fill:#ffffff;stroke:#d5d9e2}.card{fill:#f5f6f9;stroke:#d5d9e2}.ghost{fill:#e3e6ed}.dim{fill:#646c7d}
.fall{fill:#8b93a5;fill-opacity:.13}.pill{fill:#1f2430}.pill-text{fill:#ffffff}.on{fill:#ffffff;paint-order:stroke;stroke:#000000;stroke-opacity:.35;stroke-width:2px}.shade{fill:#000000;fill-opacity:.28}
@media(prefers-color-scheme:dark){text{fill:#e8eaf0}
.page{fill:#12151c;stroke:#2e3440}.card{fill:#1b1f29;stroke:#323947}.ghost{fill:#2b313d}.dim{fill:#9aa3b5}
.fall{fill:#9aa3b5;fill-opacity:.12}.pill{fill:#e8eaf0}.pill-text{fill:#12151c}.on{fill:#ffffff}}
"""

# Font sizes in pixels, each one step smaller than the one before, so that a page has four levels of text.
TITLE, TEXT, LABEL, DETAIL = 17.0, 12.0, 11.0, 10.0
_REGULAR, BOLD, _TITLE_WEIGHT = 400, 600, 650  # font weights of CSS; 400 is the default, and is not written
_PAGE_RADIUS = 12  # of the corners of a page; of the boxes within it smaller ones
_TITLE_LINE = 34  # pixels from the top of a page to the baseline of its title
_STRIPE = 3.0  # width of a stripe in pixels: it is still visible in the smallest part
_STRIPE_LENGTH = 8  # height of a pattern's tile in pixels
_LETTER = 0.56  # mean width of a letter, relative to the font size


class Box(NamedTuple):
    """A rectangle: its upper left corner, width and height, in pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    def inner(self, by: float) -> Box:
        """The rectangle without a margin of ``by`` on each side."""
        return Box(self.x + by, self.y + by, self.width - 2 * by, self.height - 2 * by)


class Drawing(str):
    """The text of an SVG file. A notebook shows it as a picture."""

    def _repr_svg_(self) -> str:
        return str(self)


class Canvas:
    """Collects shapes in the order of drawing. `svg` returns the file."""

    def __init__(self) -> None:
        self._shapes: list[str] = []
        self._patterns: dict[tuple[int, ...], str] = {}

    def box(self, box: Box, kind: str = "", fill: str = "", radius: float = 0, about: str = "") -> None:
        """Draws a rectangle.

        Args:
            kind: a class of the style.
            fill: a colour in place of the class.
            about: text that is shown on hover.
        """
        look = f'fill="{fill}"' if fill else f'class="{kind}"'
        corner = f' rx="{_n(radius)}"' if radius else ""
        size = f'x="{_n(box.x)}" y="{_n(box.y)}" width="{_n(box.width)}" height="{_n(box.height)}"'
        tip = f"><title>{escape(about)}</title></rect>" if about else "/>"
        self._shapes.append(f"<rect {size}{corner} {look}{tip}")

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = TEXT,
        kind: str = "",
        anchor: str = "start",
        weight: int = _REGULAR,
    ) -> None:
        """Draws text with its baseline at the point. ``anchor``: ``start``, ``middle`` or ``end`` of the text is there."""
        look = f' class="{kind}"' if kind else ""
        look += f' text-anchor="{anchor}"' if anchor != "start" else ""
        look += f' font-weight="{weight}"' if weight != _REGULAR else ""
        self._shapes.append(f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}"{look}>{escape(words)}</text>')

    def page(self, width: float, height: float, margin: float, title: str, note: str) -> None:
        """Draws the background of a page, with a title on the left of its head and a note on the right."""
        self.box(Box(0.5, 0.5, width - 1, height - 1), "page", radius=_PAGE_RADIUS)  # the border is one pixel wide
        self.text(margin, _TITLE_LINE, title, TITLE, weight=_TITLE_WEIGHT)
        self.text(width - margin, _TITLE_LINE, note, TEXT, "dim", "end")

    def polygon(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        corners = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._shapes.append(f'<polygon points="{corners}" class="{kind}"/>')

    def colour(self, ranks: Sequence[int]) -> str:
        """The fill for a part that these ranks hold: a colour, or stripes of several."""
        tones = tuple(dict.fromkeys(rank % len(RANK_COLOURS) for rank in ranks))
        if len(tones) == 1:
            return RANK_COLOURS[tones[0]]
        name = self._patterns.setdefault(tones, f"held-{'-'.join(map(str, tones))}")
        return f"url(#{name})"

    def absorb(self, other: Canvas) -> None:
        """Adds the shapes of another canvas, on top of those of this one."""
        self._shapes += other._shapes
        self._patterns |= other._patterns

    def svg(self, width: float, height: float, title: str, about: str) -> Drawing:
        """The SVG file. Screen readers read ``title`` and ``about``."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" '
            f'height="{_n(height)}" role="img" aria-labelledby="title about">'
        )
        words = f'<title id="title">{escape(title)}</title>\n<desc id="about">{escape(about)}</desc>'
        stripes = [_stripes(name, tones) for tones, name in self._patterns.items()]
        defs = ["<defs>", *stripes, "</defs>"] if stripes else []
        return Drawing("\n".join([head, words, f"<style>{_STYLE}</style>", *defs, *self._shapes, "</svg>", ""]))


def text_width(words: str, size: float) -> float:
    """The approximate width of a text in pixels."""
    return len(words) * size * _LETTER


def _stripes(name: str, tones: Sequence[int]) -> str:
    bars = "".join(
        f'<rect x="{_n(i * _STRIPE)}" width="{_n(_STRIPE)}" height="{_STRIPE_LENGTH}" fill="{RANK_COLOURS[tone]}"/>'
        for i, tone in enumerate(tones)
    )
    size = f'width="{_n(_STRIPE * len(tones))}" height="{_STRIPE_LENGTH}"'
    return f'<pattern id="{name}" patternUnits="userSpaceOnUse" {size} patternTransform="rotate(45)">{bars}</pattern>'


def _n(value: float) -> str:
    """A length with one decimal, without a trailing zero."""
    return f"{value:.1f}".rstrip("0").rstrip(".")
