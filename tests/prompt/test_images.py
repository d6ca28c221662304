"""Images that a request names by URL."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Audio, Image, Message, Part, Request, Text, ToolResult
from modelyard.prompt.images import Images, request_media, sniff
from modelyard.prompt.settings import ImageSettings
from tests.prompt.image_server import PNG, ImageServer, serve

DATA = "data:image/png;base64," + base64.b64encode(PNG).decode()


@pytest.fixture
async def server() -> AsyncIterator[ImageServer]:
    async with serve() as running:
        yield running


def request_with(*parts: Part) -> Request:
    return Request(model="m", messages=(Message("user", (Text("look"), *parts)),))


async def inline(request: Request, **settings: Any) -> Request:
    images = Images(ImageSettings(**settings))
    try:
        return await images.inline(request)
    finally:
        await images.close()


async def refusal(url: str, **settings: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await inline(request_with(Image(url)), **settings)
    assert caught.value.param == "messages"
    return caught.value


def local_images(**settings: Any) -> dict[str, Any]:
    return {"allow": ["127.0.0.1"], "allow_private": True} | settings


# --- data: ----------------------------------------------------------------------------------------------------------


async def test_request_without_images_is_the_same_object() -> None:
    request = request_with(ToolResult("1", (Text("x"),)))
    assert await inline(request) is request


async def test_data_urls_are_accepted_unchanged() -> None:
    request = request_with(Image(DATA), Image("DATA:image/jpeg;charset=x;base64,AAAA"))
    assert await inline(request) is request


@pytest.mark.parametrize(
    ("url", "code", "complaint"),
    [
        ("data:image/png,abc", "invalid_image", "base64"),
        ("data:image/png;base64", "invalid_image", "base64"),
        ("data:image/png;base64,", "invalid_image", "empty"),
        ("data:image/png;base64,a b!", "invalid_image", "not valid base64"),
        ("data:image/png;base64,äöü", "invalid_image", "not valid base64"),
        ("data:text/html;base64,AAAA", "invalid_image", "text/html"),
        ("data:;base64,AAAA", "invalid_image", "no media type"),
        ("data:image/png;base64," + "A" * 1000, "image_too_large", "images.max_bytes"),
        ("data:image/png;base64," + "A" * 500_000, "image_too_large", "images.max_bytes"),
    ],
)
async def test_an_invalid_data_url_is_refused(url: str, code: str, complaint: str) -> None:
    error = await refusal(url, max_bytes=700)
    assert error.code == code
    assert complaint in error.message


async def test_line_breaks_in_base64_are_removed() -> None:
    head, _, body = DATA.partition(",")
    broken = f"{head},{body[:8]}\r\n{body[8:]}\n"
    assert await inline(request_with(Image(broken)), max_bytes=len(PNG)) == request_with(Image(DATA))
    sound = "data:audio/wav;base64,AAAA"
    assert await inline(request_with(Audio(f"{sound}\n"))) == request_with(Audio(sound))


async def test_what_a_tool_returned_and_cannot_be_read_becomes_a_note() -> None:
    unread = Image("https://example.com/a.png"), Audio("data:audio/wav;base64,?"), Image(DATA)
    noted = await inline(request_with(ToolResult("c", unread)))
    result = noted.messages[0].parts[-1]
    assert isinstance(result, ToolResult)
    host = "images from 'example.com' are not allowed; the setting images.allow lists the hosts that are"
    assert result.content == (
        Text(f"[image: {host}]"),
        Text("[audio: the data: URL of a sound is not valid base64]"),
        Image(DATA),
    )
    with pytest.raises(InvalidRequest, match="not allowed"):
        await inline(request_with(ToolResult("c", unread[:1]), unread[0]))


@pytest.mark.parametrize(
    ("part", "code", "complaint"),
    [
        (Audio("data:audio/wav;base64," + "A" * 1000), "audio_too_large", "a sound is larger than 700 bytes"),
        (Audio("data:text/plain;base64,AAAA"), "invalid_audio", "holds 'text/plain', not an audio/… type"),
        (Audio("data:audio/wav,AAAA"), "invalid_audio", "must read data:audio/…;base64,…"),
    ],
)
async def test_an_invalid_sound_is_refused_in_its_own_words(part: Audio, code: str, complaint: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await inline(request_with(part), max_bytes=700)
    assert raised.value.code == code
    assert complaint in raised.value.message


async def test_data_of_exactly_the_limit_is_accepted() -> None:
    request = request_with(Image(DATA))
    assert await inline(request, max_bytes=len(PNG)) is request
    assert (await refusal(DATA, max_bytes=len(PNG) - 1)).code == "image_too_large"


# --- http -----------------------------------------------------------------------------------------------------------


async def test_an_allowed_image_is_inlined_everywhere_and_fetched_once(server: ImageServer) -> None:
    image = Image(server.url("/ok"), "high")
    request = request_with(image, ToolResult("1", (Text("t"), image)), Image(DATA))
    got = await inline(request, **local_images())
    inlined = Image(DATA, "high")
    assert got.messages[0].parts == (Text("look"), inlined, ToolResult("1", (Text("t"), inlined)), Image(DATA))
    assert server.paths == ["/ok"]


async def test_a_host_that_is_not_allowed_is_not_resolved(server: ImageServer) -> None:
    error = await refusal(server.url("/ok"), allow=["*.example.com"], allow_private=True)
    assert error.code == "image_not_allowed"
    assert "images.allow" in error.message
    assert server.paths == []


async def test_private_address_is_refused_unless_allowed(server: ImageServer) -> None:
    error = await refusal(server.url("/ok"), allow=["*"])
    assert error.code == "image_not_allowed"
    assert "images.allow_private" in error.message
    assert server.paths == []


async def test_connection_goes_to_the_address_that_was_checked(
    server: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.name("pictures.test", monkeypatch, "127.0.0.1")
    url = server.url("/ok").replace("127.0.0.1", "Pictures.test")
    got = await inline(request_with(Image(url)), allow=["*.TEST"], allow_private=True)
    assert got.messages[0].parts[1] == Image(DATA)
    assert server.hosts == [f"pictures.test:{server.port}"]
    assert server.lookups == ["pictures.test"]


async def test_next_address_is_tried_when_one_does_not_answer(
    server: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.name("pictures.test", monkeypatch, "127.0.0.2", "127.0.0.1")
    url = server.url("/ok").replace("127.0.0.1", "pictures.test")
    got = await inline(request_with(Image(url)), allow=["*"], allow_private=True)
    assert got.messages[0].parts[1] == Image(DATA)


@pytest.mark.parametrize("hidden", ["10.0.0.1", "::1", "::ffff:192.168.0.1", "64:ff9b::7f00:1", "169.254.169.254"])
async def test_one_private_address_among_public_ones_is_enough_to_refuse(
    server: ImageServer, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    server.name("pictures.test", monkeypatch, "93.184.215.14", hidden)
    assert (await refusal("http://pictures.test/", allow=["*"])).code == "image_not_allowed"


async def test_redirects_are_followed_and_checked_again(server: ImageServer) -> None:
    got = await inline(request_with(Image(server.url("/hop/3"))), **local_images())
    assert got.messages[0].parts[1] == Image(DATA)
    assert (await refusal(server.url("/hop/4"), **local_images())).code == "image_unreachable"
    for path in ("/to-localhost", "/to-file"):
        assert (await refusal(server.url(path), **local_images())).code == "image_not_allowed"


@pytest.mark.parametrize(
    ("path", "code", "complaint"),
    [
        ("/missing", "image_unreachable", "404"),
        ("/page", "image_unreachable", "text/html"),
        ("/untyped", "image_unreachable", "no content type"),
        ("/packed", "image_unreachable", "plain image"),
        ("/large", "image_too_large", "images.max_bytes"),
        ("/broken", "image_unreachable", "cannot be fetched"),
        ("/silent", "image_unreachable", "images.timeout_s"),
    ],
)
async def test_an_invalid_reply_is_an_error_with_a_reason(
    server: ImageServer, path: str, code: str, complaint: str
) -> None:
    error = await refusal(server.url(path), **local_images(max_bytes=5000, timeout_s=0.2 if path == "/silent" else 10))
    assert error.code == code
    assert complaint in error.message


async def test_closed_port_and_unknown_host_are_unreachable(
    server: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.close()
    assert (await refusal(server.url("/ok"), **local_images())).code == "image_unreachable"
    server.name("pictures.test", monkeypatch, "127.0.0.1")
    assert "no address" in (await refusal("http://other.test/", allow=["*"])).message


@pytest.mark.parametrize("url", ["ftp://example.com/x.png", "javascript:alert(1)", "x.png", "", "blob:abc"])
async def test_other_schemes_are_refused(url: str) -> None:
    assert (await refusal(url, allow=["*", "file:///"])).code == "image_not_allowed"


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://exa mple/",
        "http://[::1",
        "https://a:port/",
        "http://\x00/",
        f"http://{'a' * 70}.de/",
        "file://[/x",
    ],
)
async def test_an_invalid_url_is_an_error(url: str) -> None:
    assert (await refusal(url, allow=["*"])).code in ("image_unreachable", "image_not_allowed")


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "a b.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    return allowed


async def test_file_under_an_allowed_folder_is_inlined(folder: Path) -> None:
    for url in (f"file://{folder}/a%20b.png", f"file://localhost{folder}/x/../a%20b.png"):
        got = await inline(request_with(Image(url)), allow=[f"file://{folder}/"])
        assert got.messages[0].parts[1] == Image(DATA)


async def test_file_is_refused_where_no_folder_is_allowed(folder: Path) -> None:
    error = await refusal(f"file://{folder}/a%20b.png", allow=["*"])
    assert error.code == "image_not_allowed"
    assert "images.allow" in error.message


async def test_paths_cannot_escape_the_folder(folder: Path) -> None:
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    paths = ("link.png", "../secret.png", "%2e%2e/secret.png", "../allowed-not/x.png", "../nothing-there.png")
    messages = set()
    for path in paths:
        error = await refusal(f"file://{folder}/{path}", allow=[f"file://{folder}/"])
        assert error.code == "image_not_allowed"
        messages.add(error.message)
    assert len(messages) == 1, "a refusal must not tell what is there"
    assert (await refusal(f"file://host{folder}/a%20b.png", allow=[f"file://{folder}/"])).code == "image_not_allowed"


async def test_an_invalid_file_is_an_error_with_a_reason(folder: Path) -> None:
    allow = [f"file://{folder}/"]
    (folder / "text.png").write_text("hello")
    os.mkfifo(folder / "pipe.png")
    assert "not an image" in (await refusal(f"file://{folder}/text.png", allow=allow)).message
    assert "regular file" in (await refusal(f"file://{folder}/pipe.png", allow=allow)).message
    assert "cannot be read" in (await refusal(f"file://{folder}/gone.png", allow=allow)).message
    assert (await refusal(f"file://{folder}/a%20b.png", allow=allow, max_bytes=10)).code == "image_too_large"


# --- as an engine takes them ----------------------------------------------------------------------------------------


def test_images_are_listed_in_order_with_their_hashes() -> None:
    other = "data:image/png;base64," + base64.b64encode(b"other").decode()
    found = request_media(request_with(Image(DATA), ToolResult("1", (Text("x"), Image(other))), Image(DATA)))
    assert [each.data for each in found] == [PNG, b"other", PNG]
    assert found[0] == found[2]
    assert found[0].sha256 != found[1].sha256


# What a file is.


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\x89PNG\r\n\x1a\n...", "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image/webp"),
        (b"RIFF\0\0\0\0WAVE", None),
        (b"<svg>", None),
        (b"", None),
    ],
)
def test_the_media_type_is_detected_from_the_first_bytes(data: bytes, kind: str | None) -> None:
    assert sniff(data) == kind


# Settings of images.


def test_nothing_is_allowed_by_default() -> None:
    assert (ImageSettings().allow, ImageSettings().allow_private) == ([], False)


def test_hosts_and_folders_are_parsed() -> None:
    allow = ["*.example.com", "localhost", "file:///pictures/"]
    assert ImageSettings(allow=allow).allow == allow


@pytest.mark.parametrize("entry", ["https://example.com", "file://pictures/", "file:///pictures", "a/b", ""])
def test_invalid_entries_are_refused_with_an_explanation(entry: str) -> None:
    with pytest.raises(ValidationError, match=r"host glob|written file:///"):
        ImageSettings(allow=[entry])
