"""A drawing of lines, circles and labels, written as SVG, or as PNG if Pillow is installed."""

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
_PLAIN = str.maketrans({"×": "x", "–": "-", "·": "-", "…": "..."})  # characters that Pillow's default font lacks
_SCALE = 3  # drawn larger and scaled down: Pillow does not smooth lines


class Polyline(Struct, frozen=True):
    points: tuple[Point, ...]
    colour: str
    width: float = 1.0


class Circle(Struct, frozen=True):
    at: Point
    colour: str
    radius: float = 3.5


class Label(Struct, frozen=True):
    at: Point
    text: str
    anchor: Literal["start", "middle", "end"] = "start"
    size: float = 12.0
    colour: str = "#222222"


DrawingShape = Polyline | Circle | Label


class Drawing(Struct, frozen=True):
    width: int
    height: int
    shapes: tuple[DrawingShape, ...]


def check_file(file: Path) -> None:
    """Raise if a drawing could not be written there; called before a long run."""
    if file.suffix.lower() not in (".svg", ".png"):
        raise InvalidRequest(f"{file} must end in .svg or .png")
    if file.suffix.lower() == ".png":
        _pillow()
    if not file.absolute().parent.is_dir():
        raise InvalidRequest(f"the folder of {file} does not exist")


def save(drawing: Drawing, file: Path) -> None:
    """The file's suffix chooses the format."""
    check_file(file)
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


def _svg(shape: DrawingShape) -> str:
    if isinstance(shape, Polyline):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        return f'<polyline points="{points}" fill="none" stroke="{shape.colour}" stroke-width="{shape.width:g}"/>'
    x, y = shape.at
    if isinstance(shape, Circle):
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
    image = images.new("RGB", (drawing.width * _SCALE, drawing.height * _SCALE), "white")
    pen = draw.Draw(image)
    for shape in drawing.shapes:
        paint(pen, fonts, shape)
    out = io.BytesIO()
    image.resize((drawing.width, drawing.height), images.Resampling.LANCZOS).save(out, "PNG")
    return out.getvalue()


def paint(pen: Any, fonts: Any, shape: DrawingShape) -> None:
    if isinstance(shape, Polyline):
        pen.line(_scaled(shape.points), shape.colour, max(1, round(shape.width * _SCALE)))
        return
    ((x, y),) = _scaled([shape.at])
    if isinstance(shape, Circle):
        radius = shape.radius * _SCALE
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), shape.colour)
    else:
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
        pen.text((x, y), shape.text.translate(_PLAIN), shape.colour, fonts.load_default(shape.size * _SCALE), anchor)


def _scaled(points: Sequence[Point]) -> list[Point]:
    return [(x * _SCALE, y * _SCALE) for x, y in points]
