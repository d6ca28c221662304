"""PDF documents of a request: each page becomes its text and, for a model that sees, an image.

`PdfReader` runs this module in a child process: a damaged file may hang or crash the library that reads it. The child
takes the file on its standard input and writes the pages to its standard output.
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections import OrderedDict
from contextlib import suppress
from hashlib import sha256
from importlib.util import find_spec

import msgspec
from msgspec import Struct

from modelyard.core.errors import InvalidRequest
from modelyard.prompt.settings import ImageSettings

_SECONDS = 60.0
_KEPT_BYTES = 64 << 20  # an agent sends its documents again with each turn
_TOO_MANY, _ENCRYPTED, _DAMAGED = 3, 4, 5  # exit codes of the child


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
        command = (sys.executable, "-P", "-m", __name__, str(limit), str(side))
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        try:
            async with asyncio.timeout(_SECONDS):
                output, _ = await process.communicate(data)
        except TimeoutError:
            raise _invalid(f"a PDF took longer than {_SECONDS:g} s to read") from None
        finally:
            with suppress(ProcessLookupError):
                process.kill()
        if process.returncode:
            raise _invalid(
                {
                    _TOO_MANY: f"a PDF has more than {limit} pages (the setting images.pdf_max_pages)",
                    _ENCRYPTED: "a PDF needs a password",
                }.get(process.returncode, "a PDF is damaged")
            )
        return msgspec.msgpack.decode(output, type=list[PdfPage])


def _size(pages: list[PdfPage]) -> int:
    return sum(len(page.image) + len(page.text) for page in pages)


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_document", param="messages")


# --- the child --------------------------------------------------------------------------------------------------------


def read_pages(data: bytes, limit: int, side: int) -> list[PdfPage]:
    """All pages; `side` is the longest one of their images in pixels, 0 for no images."""
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        sys.exit(_ENCRYPTED if "password" in str(error).lower() else _DAMAGED)
    if len(document) > limit:
        sys.exit(_TOO_MANY)
    pages = []
    for page in document:
        text = page.get_textpage().get_text_bounded().replace("\r\n", "\n").replace("\x00", "").strip()
        image = io.BytesIO()
        if side:
            scale = side / max(1.0, *page.get_size())
            page.render(scale=scale).to_pil().convert("RGB").save(image, "PNG", compress_level=1)
        pages.append(PdfPage(text, image.getvalue()))
    return pages


def main() -> None:
    limit, side = int(sys.argv[1]), int(sys.argv[2])
    sys.stdout.buffer.write(msgspec.msgpack.encode(read_pages(sys.stdin.buffer.read(), limit, side)))


if __name__ == "__main__":
    main()
