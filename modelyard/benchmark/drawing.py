"""A drawing of lines, dots and words, written as SVG, or as PNG where Pillow is installed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.plugins import MissingLibrary

Point = tuple[float, float]
_PLAIN = str.maketrans({"×": "x", "–": "-", "·": "-", "…": "..."})  # signs that Pillow's own font draws as boxes
_FINER = 3  # lines are drawn larger and made smaller: Pillow does not smooth them


class Stroke(Struct, frozen=True):
    points: tuple[Point, ...]
    colour: str
    width: float = 1.0


class Dot(Struct, frozen=True):
    at: Point
    colour: str
    radius: float = 3.5


class Words(Struct, frozen=True):
    at: Point
    text: str
    anchor: Literal["start", "middle", "end"] = "start"
    size: float = 12.0
    colour: str = "#222222"


Shape = Stroke | Dot | Words


class Drawing(Struct, frozen=True):
    width: int
    height: int
    shapes: tuple[Shape, ...]


def check(file: Path) -> None:
    """Whether a drawing could be written there: asked before a long run, not after it."""
    if file.suffix.lower() not in (".svg", ".png"):
        raise InvalidRequest(f"{file} must end in .svg or .png")
    if file.suffix.lower() == ".png":
        _pillow()
    if not file.absolute().parent.is_dir():
        raise InvalidRequest(f"the folder of {file} is not there")


def save(drawing: Drawing, file: Path) -> None:
    """By the file's ending."""
    check(file)
    data = png(drawing) if file.suffix.lower() == ".png" else svg(drawing).encode()
    try:
        file.write_bytes(data)
    except OSError as error:
        raise Unavailable(f"{file} cannot be written: {error.strerror}") from error


def svg(drawing: Drawing) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{drawing.width}" height="{drawing.height}" '
        f'viewBox="0 0 {drawing.width} {drawing.height}" font-family="sans-serif">'
    )
    return "\n".join((head, '<rect width="100%" height="100%" fill="white"/>', *map(_svg, drawing.shapes), "</svg>\n"))


def _svg(shape: Shape) -> str:
    if isinstance(shape, Stroke):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        return f'<polyline points="{points}" fill="none" stroke="{shape.colour}" stroke-width="{shape.width:g}"/>'
    x, y = shape.at
    if isinstance(shape, Dot):
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{shape.radius:g}" fill="{shape.colour}"/>'
    style = f'font-size="{shape.size:g}" fill="{shape.colour}" text-anchor="{shape.anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(shape.text)}</text>'


def _pillow() -> tuple[Any, Any, Any]:
    try:
        images, draw, fonts = (import_module(f"PIL.{name}") for name in ("Image", "ImageDraw", "ImageFont"))
    except ModuleNotFoundError:
        raise MissingLibrary(
            "a PNG needs Pillow: install it with pip install 'modelyard[plots]', or write an .svg, which needs nothing"
        ) from None
    return images, draw, fonts


def png(drawing: Drawing) -> bytes:
    images, draw, fonts = _pillow()
    image = images.new("RGB", (drawing.width * _FINER, drawing.height * _FINER), "white")
    pen = draw.Draw(image)
    for shape in drawing.shapes:
        paint(pen, fonts, shape)
    out = io.BytesIO()
    image.resize((drawing.width, drawing.height), images.Resampling.LANCZOS).save(out, "PNG")
    return out.getvalue()


def paint(pen: Any, fonts: Any, shape: Shape) -> None:
    if isinstance(shape, Stroke):
        pen.line(_scaled(shape.points), shape.colour, max(1, round(shape.width * _FINER)))
        return
    ((x, y),) = _scaled([shape.at])
    if isinstance(shape, Dot):
        reach = shape.radius * _FINER
        pen.ellipse((x - reach, y - reach, x + reach, y + reach), shape.colour)
    else:
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
        pen.text((x, y), shape.text.translate(_PLAIN), shape.colour, fonts.load_default(shape.size * _FINER), anchor)


def _scaled(points: Sequence[Point]) -> list[Point]:
    return [(x * _FINER, y * _FINER) for x, y in points]
