"""Images of a request, brought in: every URL becomes a `data:` URL or an error that names the setting at fault."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from modelyard.core.engine import Media
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Image, Message, Part, Request, ResultPart, ToolResult
from modelyard.prompt.fetch import Fetcher, Picture, too_large
from modelyard.prompt.settings import ImageSettings

_SMALL = 256 * 1024  # characters that are decoded on the loop; more goes to a thread
_AT_ONCE = 8


class Images:
    """`inline` gives the same object back where nothing had to be fetched."""

    def __init__(self, settings: ImageSettings) -> None:
        self._settings = settings
        self._fetcher = Fetcher(settings)

    async def inline(self, request: Request) -> Request:
        urls = dict.fromkeys(_urls(request))
        if not urls:
            return request
        fetched = await self._all([url for url in urls if not await self._is_inline(url)])
        if not fetched:
            return request
        return replace(request, messages=tuple(_with(message, fetched) for message in request.messages))

    async def close(self) -> None:
        await self._fetcher.close()

    async def _is_inline(self, url: str) -> bool:
        """A `data:` URL that is fit to use; an unfit one is an error."""
        if url[:5].lower() != "data:":
            return False
        if len(url) > _SMALL:
            await asyncio.to_thread(check_data, url, self._settings.max_bytes)
        else:
            check_data(url, self._settings.max_bytes)
        return True

    async def _all(self, urls: list[str]) -> dict[str, str]:
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(url: str) -> str:
            async with gate:
                return data_url(await self._fetcher.fetch(url))

        await asyncio.sleep(0)  # a group stands in a task, and a request is one only after it has waited
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {url: group.create_task(one(url)) for url in urls}
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the first refusal is what the client should hear
        return {url: task.result() for url, task in tasks.items()}


def data_url(picture: Picture) -> str:
    return f"data:{picture.media_type};base64,{base64.b64encode(picture.data).decode()}"


def check_data(url: str, max_bytes: int) -> None:
    head, comma, body = url[5:].partition(",")
    media_type, *parameters = head.split(";")
    if not comma or "base64" not in (p.strip().lower() for p in parameters):
        raise _invalid("a data: URL of an image must read data:image/…;base64,…")
    if not media_type.strip().lower().startswith("image/"):
        raise _invalid(f"the data: URL holds {media_type[:80] or 'no media type'!r}, not an image/… type")
    if len(body) // 4 * 3 - 2 > max_bytes:
        raise too_large(max_bytes)
    try:
        data = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise _invalid("the data: URL of an image is not valid base64") from None
    if not data:
        raise _invalid("the data: URL of an image is empty")
    if len(data) > max_bytes:
        raise too_large(max_bytes)


def pictures(request: Request) -> tuple[Media, ...]:
    """The images themselves, in the order in which a template gives each its place; all of them are `data:` URLs. How
    many tokens one takes only the model's own processor knows."""
    return tuple(_media(base64.b64decode(url.partition(",")[2])) for url in _urls(request))


def _media(data: bytes) -> Media:
    return Media("image", hashlib.sha256(data).hexdigest(), data, 0)


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_image", param="messages")


# --- where a request holds images -----------------------------------------------------------------------------------


def _urls(request: Request) -> Iterator[str]:
    for message in request.messages:
        for part in message.parts:
            if isinstance(part, Image):
                yield part.url
            elif isinstance(part, ToolResult):
                yield from (each.url for each in part.content if isinstance(each, Image))


def _with(message: Message, fetched: Mapping[str, str]) -> Message:
    parts = tuple(_part(part, fetched) for part in message.parts)
    return message if parts == message.parts else replace(message, parts=parts)


def _part(part: Part, fetched: Mapping[str, str]) -> Part:
    if isinstance(part, ToolResult):
        return replace(part, content=tuple(_image(each, fetched) for each in part.content))
    return _image(part, fetched) if isinstance(part, Image) else part


def _image(part: ResultPart, fetched: Mapping[str, str]) -> ResultPart:
    if isinstance(part, Image) and part.url in fetched:
        return replace(part, url=fetched[part.url])
    return part
