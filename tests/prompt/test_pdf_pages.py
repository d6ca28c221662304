"""PDF documents: their pages become text and images, within limits."""

from __future__ import annotations

import base64
from importlib.util import find_spec
from typing import Any

import pytest

from modelyard.core.errors import InvalidRequest, ModelyardError, Unsupported
from modelyard.core.request import Document, Image, Message, Request, Text, ToolResult
from modelyard.prompt import pdf_pages
from modelyard.prompt.images import Images
from modelyard.prompt.settings import ImageSettings


def pdf(*texts: str) -> bytes:
    """A file with a page for each text."""
    pages = " ".join(f"{4 + 2 * at} 0 R" for at in range(len(texts)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{pages}] /Count {len(texts)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for at, text in enumerate(texts):
        content = f"BT /F1 24 Tf 20 100 Td ({text}) Tj ET" if text else ""
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 200] /Contents {5 + 2 * at} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>",
            f"<< /Length {len(content)} >>\nstream\n{content}\nendstream",
        ]
    out, places = "%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    start, count = len(out), len(objects) + 1
    trailer = f"trailer << /Size {count} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF"
    return f"{out}xref\n0 {count}\n0000000000 65535 f \n{table}{trailer}".encode()


def document(data: bytes, name: str = "") -> Document:
    return Document(f"data:application/pdf;base64,{base64.b64encode(data).decode()}", name)


async def expand(part: Any, *, with_images: bool = True, **settings: Any) -> tuple[Any, ...]:
    request = Request(model="m", messages=(Message("user", (part,)),))
    expanded = await Images(ImageSettings(**settings)).expand_documents(request, with_images=with_images)
    return expanded.messages[0].parts


async def test_each_page_becomes_its_text_and_an_image_of_the_set_size() -> None:
    parts = await expand(document(pdf("First page", "Second page"), "a.pdf"), pdf_pixels=150)
    assert [type(part) for part in parts] == [Text, Image, Text, Image]
    assert parts[0] == Text("[page 1 of a.pdf]\nFirst page")
    assert parts[2] == Text("[page 2 of a.pdf]\nSecond page")
    png = base64.b64decode(parts[1].url.partition(",")[2])
    assert (int.from_bytes(png[16:20]), int.from_bytes(png[20:24])) == (150, 100)


async def test_a_model_that_reads_text_gets_the_text_and_a_scan_is_refused() -> None:
    assert await expand(document(pdf("Words", "")), with_images=False) == (Text("[page 1]\nWords"), Text("[page 2]"))
    with pytest.raises(Unsupported, match="has no text"):
        await expand(document(pdf("")), with_images=False)


@pytest.mark.parametrize(
    ("data", "settings", "reason"),
    [
        (b"\xff\xfe no document", {}, "neither a PDF nor text"),
        (b"PK\x03\x04\x00", {}, "neither a PDF nor text"),
        (b"%PDF-1.4 broken", {}, "is damaged"),
        (pdf("a", "b", "c"), {"pdf_max_pages": 2}, "more than 2 pages"),
        (pdf("a"), {"max_bytes": 100}, "larger than 100 bytes"),
    ],
)
async def test_what_cannot_be_read_is_refused(data: bytes, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelyardError, match=reason):
        await expand(document(data), **settings)


@pytest.mark.parametrize(
    "url", ["data:image/png;base64,AAAA", "data:application/pdf;base64,?", "data:application/pdf,A"]
)
async def test_what_is_no_document_has_a_code_of_its_own(url: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await expand(Document(url))
    assert raised.value.code == "invalid_document"
    assert "data: URL of a document" in raised.value.message


@pytest.mark.parametrize("kind", ["text/plain", "text/markdown; charset=utf-8", "application/json", "application/pdf"])
async def test_a_text_file_is_read_as_its_text_under_its_name(kind: str) -> None:
    encoded = base64.b64encode("\ufeffGrüße\n".encode()).decode()
    url = f"data:{kind};base64,{encoded}"
    assert await expand(Document(url, "notes.md"), with_images=False) == (Text("notes.md:\n\nGrüße\n"),)
    assert await expand(Document(url)) == (Text("Grüße\n"),)


async def test_a_document_of_a_tool_never_ends_the_session() -> None:
    (result,) = await expand(ToolResult("1", (Text("Here:"), document(b"%PDF-1.4 broken"))))
    assert result.content == (Text("Here:"), Text("[document: a PDF is damaged]"))


async def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf_pages, "find_spec", lambda name: None if name == "pypdfium2" else find_spec(name))
    with pytest.raises(InvalidRequest, match=r"pip install 'modelyard\[media\]'"):
        await expand(document(pdf("a")))


async def test_pages_are_kept_for_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = pdf_pages.PdfReader(ImageSettings())
    pages = await reader.read(pdf("a"), with_images=False)
    monkeypatch.setattr(pdf_pages, "pool", None)
    assert await reader.read(pdf("a"), with_images=False) is pages
