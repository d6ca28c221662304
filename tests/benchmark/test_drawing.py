"""Drawings as SVG, and as PNG where Pillow is installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

from modelyard.benchmark.drawing import Dot, Drawing, Stroke, Words, check, paint, save, svg
from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.plugins import MissingLibrary

DRAWING = Drawing(
    80, 40, (Stroke(((1, 2), (30, 4)), "#112233", 2), Dot((5, 6), "#445566"), Words((7, 8), "a < b & c", "end"))
)


def test_svg_holds_every_shape_and_no_text_breaks_it() -> None:
    root = ElementTree.fromstring(svg(DRAWING))
    tags = [child.tag.rpartition("}")[2] for child in root]
    assert tags == ["rect", "polyline", "circle", "text"]
    assert root[3].text == "a < b & c"
    assert root[1].attrib["points"] == "1.0,2.0 30.0,4.0"


def test_a_file_is_written_by_its_ending(tmp_path: Path) -> None:
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


class Pen:
    """Stands in for Pillow's, and for its fonts."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def load_default(self, size: float) -> float:
        return size

    def text(self, at: object, text: str, *how: object) -> None:
        self.written.append(text)


@pytest.mark.parametrize(("odd", "plain"), [("1.5×", "1.5x"), ("a · b", "a - b"), ("plain", "plain")])
def test_signs_that_the_font_of_a_png_lacks_are_written_plainly(odd: str, plain: str) -> None:
    pen = Pen()
    paint(pen, pen, Words((5, 20), odd))
    assert pen.written == [plain]


def test_without_pillow_a_png_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIL", "PIL.Image", "PIL.ImageDraw", "PIL.ImageFont"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingLibrary, match=r"modelyard\[plots\].*or write an \.svg"):
        check(Path("a.png"))


@pytest.mark.parametrize(("file", "said"), [("a.gif", "must end in .svg or .png"), ("no/such/a.svg", "is not there")])
def test_a_file_that_cannot_be_is_refused_before_anything_runs(file: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        check(Path(file))


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.svg").mkdir()
    with pytest.raises(Unavailable, match="cannot be written"):
        save(DRAWING, tmp_path / "a.svg")
