"""Images and documents of a request: every URL becomes a `data:` URL, or an error that names the setting at fault.

Images are fetched only from allowed hosts and folders, because a request could otherwise make the gateway read its
owner's network or disk; `modelyard.outbound` says how hosts are checked. A file is checked after its symbolic links are
resolved.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.engine import Media
from modelyard.core.errors import InvalidRequest, ModelyardError, Unsupported
from modelyard.core.request import Audio, Document, Image, Message, Part, Request, ResultPart, Text, ToolResult
from modelyard.outbound import AddressGuard, PrivateAddress, host_name
from modelyard.prompt.media import MediaPart, media_parts
from modelyard.prompt.pdf_pages import PdfReader
from modelyard.prompt.settings import ImageSettings

if TYPE_CHECKING:
    import httpx

PDF, PDF_START = "application/pdf", b"%PDF-"
_REDIRECTS = 3
_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
    (PDF_START, PDF),
)


class FetchedImage(Struct, frozen=True):
    media_type: str
    data: bytes


class ImageFetcher:
    def __init__(self, settings: ImageSettings) -> None:
        self._settings = settings
        hosts = [allowed for allowed in settings.allow if not allowed.startswith("file://")]
        self._guard = AddressGuard(hosts, allow_private=settings.allow_private)
        self._folders = [Path(unquote(urlsplit(a).path)) for a in settings.allow if a.startswith("file://")]
        self._client: httpx.AsyncClient | None = None

    async def fetch(self, url: str) -> FetchedImage:
        scheme = url.partition(":")[0].lower()
        if scheme == "file":
            return await asyncio.to_thread(self._read, url)
        if scheme not in ("http", "https"):
            raise refused(f"an image URL begins with data:, http:, https: or file:, not {url[:40]!r}")
        return await self._get(url)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    # --- http -------------------------------------------------------------------------------------------------------

    async def _get(self, url: str) -> FetchedImage:
        import httpx

        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await self._follow(httpx.URL(url))
        except TimeoutError:
            raise unreachable(
                f"{url[:200]} did not arrive within {self._settings.timeout_s:g} s (the setting images.timeout_s)"
            ) from None
        except httpx.InvalidURL as error:
            raise unreachable(f"{url[:200]!r} is not a URL: {error}") from None
        except httpx.HTTPError as error:
            raise unreachable(f"{url[:200]} cannot be fetched: {error or type(error).__name__}") from None

    async def _follow(self, url: httpx.URL) -> FetchedImage:
        for _ in range(_REDIRECTS + 1):
            found = await self._request(url)
            if isinstance(found, FetchedImage):
                return found
            url = url.join(found)
            if url.scheme not in ("http", "https"):
                raise refused(f"the image's host redirects to {str(url)[:80]!r}: only http(s) is followed")
        raise unreachable(f"the image's host redirects more than {_REDIRECTS} times")

    async def _request(self, url: httpx.URL) -> FetchedImage | str:
        """One request: the image, or the redirect's location. Tries each address until one accepts."""
        import httpx

        host = host_name(url.raw_host)
        self._check_host(host)
        *others, last = await self._resolve(host)
        for address in others:
            try:
                return await self._request_address(url, host, address)
            except httpx.ConnectError:
                continue
        return await self._request_address(url, host, last)

    async def _request_address(self, url: httpx.URL, host: str, address: str) -> FetchedImage | str:
        async with self._connect().stream(
            "GET",
            url.copy_with(host=address),
            headers={"host": url.netloc.decode("ascii"), "accept": f"image/*, {PDF}", "accept-encoding": "identity"},
            extensions={"sni_hostname": host},
        ) as response:
            if response.is_redirect:
                return str(response.headers.get("location", ""))
            return await self._body(response, host)

    def _connect(self) -> httpx.AsyncClient:
        """No proxy: it would resolve the name again. No keep-alive: the connection might serve another name."""
        import httpx

        if self._client is None:
            limits = httpx.Limits(max_keepalive_connections=0)
            self._client = httpx.AsyncClient(
                trust_env=False, follow_redirects=False, limits=limits, timeout=self._settings.timeout_s
            )
        return self._client

    def _check_host(self, host: str) -> None:
        if not self._guard.allows(host):
            raise refused(f"images from {host!r} are not allowed; the setting images.allow lists the hosts that are")

    async def _resolve(self, host: str) -> list[str]:
        try:
            return await self._guard.resolve(host)
        except PrivateAddress:
            raise refused(
                f"the image's host {host!r} has a private address; the setting images.allow_private permits that"
            ) from None
        except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot be encoded
            raise unreachable(f"the image's host {host[:100]!r} has no address: {error}") from None

    async def _body(self, response: httpx.Response, host: str) -> FetchedImage:
        limit = self._settings.max_bytes
        if response.status_code != 200:
            raise unreachable(f"the image's host {host!r} answered with status {response.status_code}")
        media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_known = media_type.startswith("image/") or media_type == PDF
        if not is_known or response.headers.get("content-encoding", "identity") != "identity":
            raise unreachable(f"the image's host {host!r} sent {media_type or 'no content type'!r}, not a plain image")
        data = bytearray()
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > limit:
                raise too_large(limit)
        return FetchedImage(media_type, bytes(data))

    # --- files ------------------------------------------------------------------------------------------------------

    def _read(self, url: str) -> FetchedImage:
        """Check the path before accessing it, so that a refusal reveals nothing."""
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise unreachable(f"{url[:200]!r} is not a URL: {error}") from None
        path = Path(os.path.realpath(unquote(parts.path).replace("\0", "")))
        folders = [Path(os.path.realpath(folder)) for folder in self._folders]
        if parts.netloc not in ("", "localhost") or not any(path.is_relative_to(folder) for folder in folders):
            raise refused('that file is not allowed; the setting images.allow lists folders as "file:///folder/"')
        try:
            data = _read_regular_file(path, self._settings.max_bytes)
        except OSError as error:
            raise unreachable(f"the image {path.name!r} cannot be read: {error.strerror}") from None
        media_type = sniff(data)
        if media_type is None:
            raise unreachable(f"{path.name!r} is not an image of a known type (PNG, JPEG, GIF, WebP, BMP, TIFF)")
        return FetchedImage(media_type, data)


def _read_regular_file(path: Path, limit: int) -> bytes:
    """Read a regular file; a pipe or device could block for ever."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise unreachable(f"the image {path.name!r} is not a regular file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise too_large(limit)
    return data


def sniff(data: bytes) -> str | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _MAGIC if data.startswith(magic)), None)


_NAMES = {"image": "an image", "audio": "a sound", "document": "a document"}


# --- errors ---------------------------------------------------------------------------------------------------------


def refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="image_not_allowed", param="messages")


def unreachable(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="image_unreachable", param="messages")


def too_large(limit: int, kind: str = "image") -> InvalidRequest:
    return InvalidRequest(
        f"{_NAMES[kind]} is larger than {limit} bytes (the setting images.max_bytes)",
        code=f"{kind}_too_large",
        param="messages",
    )


_INLINE_CHARS = 256 * 1024  # decoded on the event loop; more in a thread
_MAX_CONCURRENT = 8


class Images:
    """`inline` returns the same object if nothing had to be fetched."""

    def __init__(self, settings: ImageSettings) -> None:
        self._settings = settings
        self._fetcher = ImageFetcher(settings)
        self._pdf = PdfReader(settings)

    @property
    def max_bytes(self) -> int:
        return self._settings.max_bytes

    async def inline(self, request: Request) -> Request:
        """With all images and sounds as `data:` URLs. What a tool returned and cannot be read becomes a note: a refusal
        would end an agent's session, because it stays in its history."""
        parts = list(dict.fromkeys(media_parts(request)))
        if not parts:
            return request
        sent = {part for message in request.messages for part in message.parts if isinstance(part, MediaPart)}
        gate = asyncio.Semaphore(_MAX_CONCURRENT)

        async def one(part: MediaPart) -> MediaPart | Text:
            try:
                async with gate:
                    url = await self._inline_url(part)
            except ModelyardError as error:
                if part in sent:
                    raise
                return Text(f"[{'image' if isinstance(part, Image) else 'audio'}: {error.message}]")
            return part if url == part.url else replace(part, url=url)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = {part: group.create_task(one(part)) for part in parts}
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        inlined = {part: task.result() for part, task in tasks.items() if task.result() is not part}
        if not inlined:
            return request
        return replace(request, messages=tuple(_with_inlined(message, inlined) for message in request.messages))

    async def _inline_url(self, part: MediaPart) -> str:
        url, limit = part.url, self._settings.max_bytes
        kind = "image" if isinstance(part, Image) else "audio"
        if kind == "image" and url[:5].lower() != "data:":
            return data_url(await self._fetcher.fetch(url))
        if len(url) > _INLINE_CHARS:
            return await asyncio.to_thread(check_data, url, limit, kind)
        return check_data(url, limit, kind)

    async def expand_documents(self, request: Request, *, with_images: bool) -> Request:
        """With the text of its documents instead of them, and an image of each page if the model sees."""
        documents: dict[Document, tuple[Text | Image, ...]] = {}
        for part, is_result in _documents(request):
            try:
                documents[part] = await self._pages(part, with_images)
            except ModelyardError as error:
                if not is_result:
                    raise
                # A refusal would end an agent's session, because the document stays in its history.
                documents[part] = (Text(f"[document: {error.message}]"),)
        messages = tuple(_with_pages(message, documents) for message in request.messages)
        return replace(request, messages=messages)

    async def _pages(self, document: Document, with_images: bool) -> tuple[Text | Image, ...]:
        """Each page: a line that says which one, its text, and its image. A document that is no PDF is text."""
        data = await self._document_data(document.url)
        if not data[:1024].lstrip().startswith(PDF_START):
            return (Text(f"{document.name}:\n\n{_decoded(data)}" if document.name else _decoded(data)),)
        pages = await self._pdf.read(data, with_images=with_images)
        if not with_images and not any(page.text for page in pages):
            raise Unsupported(
                "a PDF has no text, and the model does not see images of its pages; send it to a model that does",
                code="modality_unsupported",
                param="messages",
            )
        name = f" of {document.name}" if document.name else ""
        parts: list[Text | Image] = []
        for number, page in enumerate(pages, 1):
            parts.append(Text(f"[page {number}{name}]\n{page.text}".rstrip()))
            if page.image:
                parts.append(Image(data_url(FetchedImage("image/png", page.image))))
        return tuple(parts)

    async def _document_data(self, url: str) -> bytes:
        limit = self._settings.max_bytes
        if url[:5].lower() != "data:":
            return (await self._fetcher.fetch(url)).data
        clean = await asyncio.to_thread(check_data, url, limit, "document")
        return base64.b64decode(clean.partition(",")[2])

    async def close(self) -> None:
        await self._fetcher.close()


def _decoded(data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise _invalid("a document is neither a PDF nor text in UTF-8", "document")
    return text


def data_url(image: FetchedImage) -> str:
    return f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"


_TOP_TYPES = {"image": ("image/",), "audio": ("audio/",), "document": ("application/", "text/")}
_BREAKS = {ord(each): None for each in "\r\n\t "}


def check_data(url: str, max_bytes: int, kind: str = "image") -> str:
    """The `data:` URL of an image, audio or document, without the line breaks that programs put into base64."""
    head, comma, body = url[5:].partition(",")
    media_type, *parameters = head.split(";")
    what, types = _NAMES[kind], _TOP_TYPES[kind]
    if not comma or "base64" not in (p.strip().lower() for p in parameters):
        raise _invalid(f"a data: URL of {what} must read data:{types[0]}…;base64,…", kind)
    if not media_type.strip().lower().startswith(types):
        held = repr(media_type[:80]) if media_type else "no media type"
        raise _invalid(f"the data: URL of {what} holds {held}, not {_EXPECTED[kind]}", kind)
    if len(body) // 4 * 3 - 2 > max_bytes and len(body := body.translate(_BREAKS)) // 4 * 3 - 2 > max_bytes:
        raise too_large(max_bytes, kind)
    try:
        data = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        body = body.translate(_BREAKS)
        try:
            data = base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError):
            raise _invalid(f"the data: URL of {what} is not valid base64", kind) from None
    if not data:
        raise _invalid(f"the data: URL of {what} is empty", kind)
    if len(data) > max_bytes:
        raise too_large(max_bytes, kind)
    return url if len(body) == len(url) - len(head) - 6 else f"data:{head},{body}"


_EXPECTED = {"image": "an image/… type", "audio": "an audio/… type", "document": "a PDF or text"}


def request_media(request: Request) -> tuple[Media, ...]:
    """Images and audio in the order of the conversation; all are `data:` URLs. Only the model's processor knows how
    many tokens each one takes."""
    return tuple(_media(part) for part in media_parts(request))


def _media(part: Image | Audio) -> Media:
    data = base64.b64decode(part.url.partition(",")[2])
    return Media("image" if isinstance(part, Image) else "audio", hashlib.sha256(data).hexdigest(), data, 0)


def _invalid(message: str, kind: str = "image") -> InvalidRequest:
    return InvalidRequest(message, code=f"invalid_{kind}", param="messages")


# --- the images of a request ----------------------------------------------------------------------------------------


def _documents(request: Request) -> Iterator[tuple[Document, bool]]:
    """Each document, and whether a tool returned it."""
    for message in request.messages:
        for part in message.parts:
            is_result = isinstance(part, ToolResult)
            inner = part.content if isinstance(part, ToolResult) else (part,)
            yield from ((each, is_result) for each in inner if isinstance(each, Document))


def _with_pages(message: Message, documents: Mapping[Document, tuple[Text | Image, ...]]) -> Message:
    parts: list[Part] = []
    for part in message.parts:
        if isinstance(part, Document):
            parts += documents[part]
        elif isinstance(part, ToolResult):
            content: list[ResultPart] = []
            for each in part.content:
                content += documents[each] if isinstance(each, Document) else (each,)
            parts.append(replace(part, content=tuple(content)))
        else:
            parts.append(part)
    return replace(message, parts=tuple(parts))


def _with_inlined(message: Message, inlined: Mapping[MediaPart, MediaPart | Text]) -> Message:
    parts: list[Part] = []
    for part in message.parts:
        if isinstance(part, MediaPart):
            parts.append(inlined.get(part, part))
        elif isinstance(part, ToolResult):
            content = tuple(inlined.get(each, each) if isinstance(each, MediaPart) else each for each in part.content)
            parts.append(replace(part, content=content))
        else:
            parts.append(part)
    return replace(message, parts=tuple(parts))
