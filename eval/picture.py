"""A trade-off plot as a PNG for documents: numbered marks, a legend below. Drawn with Pillow; knows no studies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SCALE = 2
"""Pixels drawn for one of the layout, so that the picture is sharp on fine screens."""
PALETTE = (
    *("#2f6fde", "#e07b1a", "#2a9d6f", "#c2367b", "#8458c9", "#b58900"),
    *("#17a2b8", "#d1495b", "#5b8c2a", "#7a6a58", "#4a6fa5", "#c0544f"),
)
INK, SOFT, GRID, PAPER = "#16202c", "#5b6776", "#e3e9ef", "#ffffff"
RADIUS = 10
WITH_INTERVALS = 15
"""Points up to which intervals are drawn; those of more cover one another."""


@dataclass(frozen=True)
class Point:
    """One variant. `lo` and `hi` are the interval of y, or None."""

    label: str
    x: float
    y: float
    lo: float | None = None
    hi: float | None = None


@dataclass(frozen=True)
class Panel:
    """One plot: numbers start at 1 and follow the order of the points; a missing point is None."""

    points: Sequence[Point | None]
    x_name: str
    y_name: str
    x_text: Callable[[float], str]
    front: Sequence[int] = ()
    """Indices of the points to join, by rising x."""


def draw(panels: Sequence[Panel], labels: Sequence[str], title: str, path: Path) -> None:
    """Write the panels side by side with one legend under them.

    Args:
        labels: of the numbers 1, 2, ...
        path: the PNG; its folder is made.
    """
    width, plot_height, columns = 1080, 400, 3
    lines = -(-len(labels) // columns)
    height = 46 + plot_height + 26 + 22 * lines + 12
    image = Image.new("RGB", (width * SCALE, height * SCALE), PAPER)
    pen = _Pen(ImageDraw.Draw(image))
    pen.text(24, 14, title, 17, INK)
    pen.text(width - 24, 17, "a mark beside its dot would cover another one", 12, SOFT, "ra")
    each = (width - 24) // len(panels)
    for position, panel in enumerate(panels):
        _panel(pen, panel, (position * each + 12, 46, each, plot_height))
    for number, label in enumerate(labels):
        column, row = number // lines, number % lines
        x, y = 34 + column * (width - 40) // columns, 46 + plot_height + 36 + 22 * row
        pen.mark(x, y, number)
        pen.text(x + 17, y - 8, label if len(label) < 42 else label[:40] + "..", 13, INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


class _Pen:
    """Drawing in layout units."""

    def __init__(self, surface: ImageDraw.ImageDraw) -> None:
        self.surface = surface

    def text(self, x: float, y: float, text: str, size: int, colour: str, anchor: str = "la") -> None:
        font = ImageFont.load_default(size * SCALE)
        self.surface.text((x * SCALE, y * SCALE), text, colour, font, anchor)

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1) -> None:
        self.surface.line([(x * SCALE, y * SCALE) for x, y in points], colour, round(width * SCALE))

    def mark(self, x: float, y: float, number: int) -> None:
        box = [(v + side * RADIUS) * SCALE for side in (-1, 1) for v in (x, y)]
        self.surface.ellipse(box, PALETTE[number % len(PALETTE)], PAPER, SCALE)
        self.text(x, y, str(number + 1), 11, PAPER, "mm")

    def dot(self, x: float, y: float, colour: str) -> None:
        self.surface.ellipse([(v + side * 2.5) * SCALE for side in (-1, 1) for v in (x, y)], colour)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values within [low, high]."""
    raw = (high - low or abs(high) or 1.0) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.99)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _axis(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = (high - low or abs(high) * 0.1 or 1.0) * 0.08
    return low - room, high + room


def _x_axis(xs: Sequence[float]) -> tuple[Callable[[float], float], list[float]]:
    """A function from x to 0..1, logarithmic when the largest is over six times the smallest, and its ticks."""
    if min(xs) > 0 and max(xs) / min(xs) > 6:
        low, high = _axis([math.log(x) for x in xs])
        marks = [m * 10.0**p for p in range(-3, 13) for m in (1, 2, 5)]
        return lambda x: (math.log(x) - low) / (high - low), [m for m in marks if low <= math.log(m) <= high]
    low, high = _axis(xs)
    return lambda x: (x - low) / (high - low), ticks(low, high, 4)


def _panel(pen: _Pen, panel: Panel, box: tuple[int, int, int, int]) -> None:
    left, top, width, height = box
    known = [(i, p) for i, p in enumerate(panel.points) if p is not None]
    if not known:
        return
    x0, x1, y0, y1 = left + 58, left + width - 16, top + 26, top + height - 46
    place, x_marks = _x_axis([p.x for _, p in known])
    # Intervals may be far wider than the means are apart: they are cut at the frame, not followed by it.
    low, high = _axis([p.y for _, p in known])

    def x_at(value: float) -> float:
        return x0 + place(value) * (x1 - x0)

    def y_at(value: float) -> float:
        return min(max(y1 - (value - low) / (high - low) * (y1 - y0), y0), y1)

    pen.text((x0 + x1) / 2, top, panel.y_name, 14, INK, "ma")
    for value in ticks(low, high):
        pen.line([(x0, y_at(value)), (x1, y_at(value))], GRID)
        pen.text(x0 - 7, y_at(value), f"{value:.6g}", 12, SOFT, "rm")
    for value in x_marks:
        pen.line([(x_at(value), y0), (x_at(value), y1)], GRID)
        pen.text(x_at(value), y1 + 6, panel.x_text(value), 12, SOFT, "ma")
    pen.text((x0 + x1) / 2, y1 + 24, panel.x_name, 13, SOFT, "ma")
    front = [panel.points[i] for i in panel.front]
    pen.line([(x_at(p.x), y_at(p.y)) for p in front if p is not None], "#9aa7b4", 1.4)
    for number, point in known if len(known) <= WITH_INTERVALS else []:
        if point.lo is not None and point.hi is not None:
            colour = PALETTE[number % len(PALETTE)]
            pen.line([(x_at(point.x), y_at(point.lo)), (x_at(point.x), y_at(point.hi))], colour, 0.8)
    taken: list[tuple[float, float]] = []
    frame = (x0, y0 + RADIUS, x1, y1 - RADIUS)
    spots = {number: _free(x_at(p.x), y_at(p.y), taken, frame) for number, p in known}
    for number, point in known:
        pen.line([(x_at(point.x), y_at(point.y)), spots[number]], PALETTE[number % len(PALETTE)], 1.4)
    for number, point in known:
        if spots[number] != (x_at(point.x), y_at(point.y)):
            pen.dot(x_at(point.x), y_at(point.y), PALETTE[number % len(PALETTE)])
    for number, spot in spots.items():
        pen.mark(*spot, number)


def _free(
    x: float, y: float, taken: list[tuple[float, float]], frame: tuple[float, float, float, float]
) -> tuple[float, float]:
    """The nearest place to (x, y) inside the frame (x0, y0, x1, y1) where no mark lies yet."""
    for ring in range(40):
        for turn in range(8 * ring or 1):
            angle = 2 * math.pi * turn / (8 * ring or 1) + math.pi / 2
            spot = (x + ring * RADIUS * math.cos(angle), y + ring * RADIUS * math.sin(angle))
            inside = frame[0] <= spot[0] <= frame[2] and frame[1] <= spot[1] <= frame[3]
            if inside and all(math.dist(spot, other) >= 2 * RADIUS + 1 for other in taken):
                taken.append(spot)
                return spot
    taken.append((x, y))
    return x, y
