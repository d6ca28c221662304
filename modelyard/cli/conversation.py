"""A conversation with a model of a server: messages, settings, images, and replies as events. No terminal here."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from msgspec import Struct, field
from pydantic import ValidationError

from modelyard.config.problems import suggest, validation_message
from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound, Unavailable
from modelyard.core.events import BlockDelta, BlockStart, Event, Reply, ReplyBuilder
from modelyard.core.request import Image, Message, Part, Reasoning, Request, Text
from modelyard.protocols import openai_chat
from modelyard.router.settings import DecodingSettings
from modelyard.server.client import is_local, no_server


class ConversationSettings(Struct, kw_only=True):
    """What `/set` and the options change. `decoding` holds only what was set."""

    system: str = ""
    decoding: dict[str, Any] = field(default_factory=dict)
    think: bool | None = None  # None: as the model does by itself


class ReplyTimes(Struct, kw_only=True):
    """Seconds since the request was sent."""

    first: float = 0.0
    total: float = 0.0


class Conversation:
    """`ask` sends a message with everything before it. A message whose request failed is dropped, so that it can be
    sent again; the reply that an interruption cuts off is kept as far as it came."""

    def __init__(
        self, url: str, model: str, *, key: str | None = None, settings: ConversationSettings | None = None
    ) -> None:
        self.url, self.model, self.key = url.rstrip("/"), model, key
        self.settings = settings or ConversationSettings()
        self.messages: list[Message] = []
        self.times = ReplyTimes()

    def request(self) -> Request:
        settings = self.settings
        decoding = DecodingSettings.model_validate(settings.decoding)
        system = (Message("system", (Text(settings.system),)),) if settings.system else ()
        return Request(
            model=self.model,
            messages=(*system, *self.messages),
            sampling=decoding.sampling(),
            max_tokens=decoding.max_tokens,
            stop=tuple(decoding.stop),
            reasoning=Reasoning(enabled=settings.think),
            stream=True,
            include_usage=True,
        )

    async def ask(self, parts: tuple[Part, ...], on_event: Callable[[Event], None]) -> Reply | None:
        """The reply; None if it was interrupted before it began. Raises the error of the request."""
        self.messages.append(Message("user", parts))
        builder, text, kind, sent = ReplyBuilder(), "", "", time.perf_counter()
        self.times = ReplyTimes()
        try:
            async for event in self._events():
                builder.feed([event])  # raises the error of a Failed
                if isinstance(event, BlockStart):
                    kind = event.kind
                elif isinstance(event, BlockDelta):
                    self.times.first = self.times.first or time.perf_counter() - sent
                    text += event.text if kind == "text" else ""
                on_event(event)
        except ModelyardError:
            self.messages.pop()
            raise
        finally:
            self.times.total = time.perf_counter() - sent
            if not builder.finished and self.messages and self.messages[-1].role == "user":
                if text:
                    self.messages.append(Message("assistant", (Text(text),)))
                else:
                    self.messages.pop()
        reply = builder.reply()
        self.messages.append(Message("assistant", tuple(block.part for block in reply.blocks)))
        return reply

    def take_back(self) -> tuple[Part, ...]:
        """Remove the last question with its reply, and return the question."""
        while self.messages:
            if (last := self.messages.pop()).role == "user":
                return last.parts
        raise InvalidRequest("there is nothing to repeat yet")

    async def _events(self) -> AsyncIterator[Event]:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        body, reader = openai_chat.write_request(self.request()), openai_chat.reader()
        timeout, trust_env = httpx.Timeout(10, read=None), not is_local(self.url)
        with self._explained_errors():
            async with (
                httpx.AsyncClient(timeout=timeout, headers=headers, trust_env=trust_env) as client,
                client.stream("POST", f"{self.url}/v1/chat/completions", content=body) as reply,
            ):
                if reply.status_code != 200:
                    raise openai_chat.read_error(reply.status_code, reply.headers, await reply.aread())
                async for data in reply.aiter_bytes():
                    for event in reader.feed(data):
                        yield event
                for event in reader.finish():
                    yield event

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError:
            raise no_server(self.url) from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise InvalidRequest(f"{self.url} is not a URL: {error}") from None
        except httpx.HTTPError as error:
            raise Unavailable(f"the connection to {self.url} broke: {error}") from None

    # --- files --------------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        saved = SavedConversation(model=self.model, settings=self.settings, messages=self.messages)
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=2))
        except OSError as error:
            raise Unavailable(f"cannot write {path}: {error.strerror}") from None

    def load(self, path: Path) -> None:
        try:
            saved = msgspec.json.decode(path.read_bytes(), type=SavedConversation)
        except OSError as error:
            raise NotFound(f"cannot read {path}: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"{path} is not a saved conversation: {error}") from None
        self.settings, self.messages = saved.settings, saved.messages


class SavedConversation(Struct, kw_only=True):
    """The file of `/save` and `/load`."""

    model: str
    settings: ConversationSettings
    messages: list[Message]


# --- settings ---------------------------------------------------------------------------------------------------------

PARAMETERS = tuple(DecodingSettings.model_fields)


def set_parameter(settings: ConversationSettings, name: str, value: str) -> None:
    """`value` as it was typed; an empty one means that the model's default applies again."""
    if name not in PARAMETERS:
        raise InvalidRequest(f"there is no parameter {name!r}.{suggest(name, PARAMETERS)}")
    if not value:
        settings.decoding.pop(name, None)
        return
    try:
        parsed = DecodingSettings.model_validate({name: value})
    except ValidationError as error:
        raise InvalidRequest(f"{name} {validation_message(error.errors()[0])}") from None
    settings.decoding[name] = getattr(parsed, name)


# --- images -----------------------------------------------------------------------------------------------------------

_IMAGE_PATH = re.compile(
    r"""(?P<quote>["'])(?P<quoted>[^"']+\.(?:png|jpe?g|webp|gif|bmp))(?P=quote)|"""
    r"""(?P<bare>(?:\\.|[^\s"'\\])+\.(?:png|jpe?g|webp|gif|bmp))(?=$|[\s,;:!?)\]])""",
    re.IGNORECASE,
)
_SIGNATURES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"BM": "bmp"}


def image_type(data: bytes) -> str | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((kind for start, kind in _SIGNATURES.items() if data.startswith(start)), None)


def image_part(data: bytes, name: str) -> Image:
    if (kind := image_type(data)) is None:
        raise InvalidRequest(f"{name} is not a PNG, JPEG, WebP, GIF or BMP image")
    return Image(f"data:image/{kind};base64,{base64.b64encode(data).decode()}")


def read_image(path: Path) -> Image:
    try:
        return image_part(path.expanduser().read_bytes(), str(path))
    except OSError as error:
        raise NotFound(f"cannot read {path}: {error.strerror}") from None


def message_parts(text: str, images: tuple[Image, ...] = ()) -> tuple[Part, ...]:
    """The text with its images. A path of an existing image file in the text becomes that image."""
    found = [*images]

    def take(match: re.Match[str]) -> str:
        path = match["quoted"] or re.sub(r"\\(.)", r"\1", match["bare"])
        if not Path(path).expanduser().is_file():
            return match[0]
        found.append(read_image(Path(path)))
        return ""

    rest = _IMAGE_PATH.sub(take, text).strip()
    return (*found, *((Text(rest),) if rest or not found else ()))
