"""PDF documents of a request: each page becomes its text and, for a model that sees, an image. A child process of the
pool reads them: a damaged file may hang or crash the library, or take all memory."""

from __future__ import annotations

import io
from collections import OrderedDict
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec

from msgspec import Struct

from modelyard.core.errors import InvalidRequest
from modelyard.processes.sandbox import Limits, Stopped, pool, sandboxed
from modelyard.prompt.settings import ImageSettings

_KEPT_BYTES = 64 << 20  # an agent sends its documents again with each turn


class PdfPage(Struct, frozen=True):
    """`image` is a PNG file; empty if none was wanted."""

    text: str
    image: bytes = b""


class PdfReader:
    """Keeps the pages of the last documents."""

    def __init__(self, settings: ImageSettings) -> None:
        self._settings = settings
        self._kept: OrderedDict[tuple[bytes, bool], list[PdfPage]] = OrderedDict()

    async def read(self, data: bytes, *, with_images: bool) -> list[PdfPage]:
        key = sha256(data).digest(), with_images
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        pages = await self._read(data, with_images)
        self._kept[key] = pages
        while self._kept and sum(map(_size, self._kept.values())) > _KEPT_BYTES:
            self._kept.popitem(last=False)
        return pages

    async def _read(self, data: bytes, with_images: bool) -> list[PdfPage]:
        for module in ("pypdfium2", "PIL"):
            if find_spec(module) is None:
                raise InvalidRequest(
                    "a PDF cannot be read here yet: install the extra on the server (pip install 'modelyard[media]')",
                    code="pdf_unsupported",
                    param="messages",
                )
        limit, side = self._settings.pdf_max_pages, self._settings.pdf_pixels if with_images else 0
        try:
            pages = await pool.run(read_pages, data, limit, side)
        except Stopped as stopped:
            raise _invalid(f"a PDF is damaged, or too large: {stopped.why}") from None
        return [PdfPage(text, image) for text, image in pages]


def _size(pages: list[PdfPage]) -> int:
    return sum(len(page.image) + len(page.text) for page in pages)


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_document", param="messages")


# --- in a child of the pool -------------------------------------------------------------------------------------------


def _load_library() -> None:
    for module in ("pypdfium2", "encodings.utf_16_le"):
        import_module(module)
    import_module("PIL.Image").init()


@sandboxed(Limits(cpu_s=30, wall_s=90, memory=768 << 20), _load_library)
def read_pages(data: bytes, limit: int, side: int) -> list[tuple[str, bytes]]:
    """Text and image of each page; `side` is the longest one of the images in pixels, 0 for no images."""
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        raise _invalid("a PDF needs a password" if "password" in str(error).lower() else "a PDF is damaged") from None
    if len(document) > limit:
        raise _invalid(f"a PDF has more than {limit} pages (the setting images.pdf_max_pages)")
    pages = []
    for page in document:
        text = page.get_textpage().get_text_bounded().replace("\r\n", "\n").replace("\x00", "").strip()
        image = io.BytesIO()
        if side:
            scale = side / max(1.0, *page.get_size())
            page.render(scale=scale).to_pil().convert("RGB").save(image, "PNG", compress_level=1)
        pages.append((text, image.getvalue()))
    return pages
