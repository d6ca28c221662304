"""Drawings as SVG, and as PNG if Pillow is installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.plugins import MissingLibrary
from modelyard_bench.drawing import Circle, Drawing, Label, Polyline, check_file, paint, save, svg

DRAWING = Drawing(
    80, 40, (Polyline(((1, 2), (30, 4)), "#112233", 2), Circle((5, 6), "#445566"), Label((7, 8), "a < b & c", "end"))
)


def test_svg_has_every_shape_and_escapes_text() -> None:
    root = ElementTree.fromstring(svg(DRAWING))
    tags = [child.tag.rpartition("}")[2] for child in root]
    assert tags == ["rect", "polyline", "circle", "text"]
    assert root[3].text == "a < b & c"
    assert root[1].attrib["points"] == "1.0,2.0 30.0,4.0"


def test_the_suffix_chooses_the_format(tmp_path: Path) -> None:
    save(DRAWING, tmp_path / "a.SVG")
    assert (tmp_path / "a.SVG").read_text() == svg(DRAWING)


def test_png_is_drawn_or_its_library_is_named(tmp_path: Path) -> None:
    if find_spec("PIL") is None:
        with pytest.raises(MissingLibrary, match="pip install 'modelyard"):
            save(DRAWING, tmp_path / "a.png")
        return
    save(DRAWING, tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (80, 40)


class FakePen:
    """Replaces Pillow's pen and fonts."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def load_default(self, size: float) -> float:
        return size

    def text(self, at: object, text: str, *how: object) -> None:
        self.written.append(text)


@pytest.mark.parametrize(("text", "plain"), [("1.5×", "1.5x"), ("a · b", "a - b"), ("plain", "plain")])
def test_characters_that_the_png_font_lacks_are_replaced(text: str, plain: str) -> None:
    pen = FakePen()
    paint(pen, pen, Label((5, 20), text))
    assert pen.written == [plain]


def test_a_png_without_pillow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIL", "PIL.Image", "PIL.ImageDraw", "PIL.ImageFont"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingLibrary, match=r"modelyard\[plots\].*or write an \.svg"):
        check_file(Path("a.png"))


@pytest.mark.parametrize(
    ("file", "error"), [("a.gif", "must end in .svg or .png"), ("no/such/a.svg", "does not exist")]
)
def test_an_impossible_file_is_refused_before_anything_runs(file: str, error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        check_file(Path(file))


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.svg").mkdir()
    with pytest.raises(Unavailable, match="cannot be written"):
        save(DRAWING, tmp_path / "a.svg")
