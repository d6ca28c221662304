"""Uploaded files with the SDKs of Anthropic and Google; OpenAI's are in test_batches.py. All three share them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from google import genai
from google.genai import errors, types

from tests.e2e.helpers import SCRIPT, config
from tests.engines.llama_cpp.media_files import picture
from tests.live_server import LiveServer, live_server

KEYS = [{"name": "ada", "key": "sk-ada"}, {"name": "bob", "key": "sk-bob"}]
NOTES = b"the secret is teal"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tmp_path_factory.mktemp("objects") / "objects.sqlite"
    settings = config(keys=KEYS, store={"objects": str(path)}, batches={"max_file_bytes": 100_000})
    settings["models"]["demo"] |= {"modalities": ["text", "image"]}
    settings["models"]["demo"]["script"] = [{"when": "the secret is teal", "steps": [{"text": "Teal."}]}, *SCRIPT]
    with live_server(settings) as running:
        yield running


def anthropic_sdk(server: LiveServer, key: str = "sk-ada") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def google_sdk(server: LiveServer, key: str = "sk-ada", version: str = "v1beta") -> genai.Client:
    once = types.HttpRetryOptions(attempts=1)
    options = types.HttpOptions(base_url=server.url, retry_options=once, api_version=version)
    return genai.Client(api_key=key, http_options=options)


@pytest.fixture(scope="module")
def sdk(server: LiveServer) -> Iterator[genai.Client]:
    client = google_sdk(server)
    yield client
    client.close()


# --- Anthropic's ------------------------------------------------------------------------------------------------------


def test_anthropics_sdk_uploads_reads_lists_and_deletes_files(server: LiveServer) -> None:
    files = anthropic_sdk(server, "sk-bob").beta.files
    made = [files.upload(file=(f"{n}.txt", io.BytesIO(NOTES), "text/plain")) for n in range(3)]
    first = made[0]
    assert (first.type, first.filename, first.mime_type, first.size_bytes) == (
        "file",
        "0.txt",
        "text/plain",
        len(NOTES),
    )
    assert files.retrieve_metadata(first.id) == first
    assert files.download(first.id).read() == NOTES
    assert [file.id for file in files.list(limit=2)] == [file.id for file in reversed(made)]
    assert [file.id for file in files.list(ids=[first.id, "file-0"])] == [first.id]
    for file in made:
        assert files.delete(file.id).type == "file_deleted"
    assert list(files.list()) == []
    with pytest.raises(anthropic.NotFoundError) as error:
        files.retrieve_metadata(first.id)
    assert error.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


def test_a_document_or_an_image_of_a_message_is_an_uploaded_file(server: LiveServer) -> None:
    sdk = anthropic_sdk(server)
    notes = sdk.beta.files.upload(file=("notes.txt", NOTES, "text/plain")).id
    image = sdk.beta.files.upload(file=("p.png", picture(1), "image/png")).id

    def ask(client: anthropic.Anthropic, *blocks: Any) -> str:
        asked: Any = [{"role": "user", "content": [*blocks, {"type": "text", "text": "text?"}]}]
        (block,) = client.messages.create(model="demo", max_tokens=64, messages=asked).content
        return block.text if block.type == "text" else ""

    document = {"type": "document", "source": {"type": "file", "file_id": notes}, "title": "Notes"}
    assert ask(sdk, document) == "Teal."
    assert ask(sdk, {"type": "image", "source": {"type": "file", "file_id": image}})
    with pytest.raises(anthropic.BadRequestError, match="no file"):
        ask(anthropic_sdk(server, "sk-bob"), document)


def test_a_bad_upload_of_anthropics_sdk_is_refused_in_its_form(server: LiveServer) -> None:
    headers = {"x-api-key": "sk-ada", "anthropic-version": "2023-06-01"}
    reply = httpx.post(server.url + "/v1/files", files={"other": ("", b"")}, headers=headers)
    assert (reply.status_code, reply.json()["type"]) == (400, "error")
    assert "file is required" in reply.json()["error"]["message"]


# --- Google's ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v1beta", "v1"])
def test_googles_sdk_uploads_reads_lists_and_deletes_files(server: LiveServer, version: str) -> None:
    sdk = google_sdk(server, "sk-bob", version)
    files = sdk.files
    made = [files.upload(file=io.BytesIO(NOTES), config={"mime_type": "text/plain"}) for _ in range(3)]
    named = files.upload(file=io.BytesIO(b"x"), config={"mime_type": "text/plain", "display_name": "Notes"})
    assert named.display_name == "Notes"
    first = made[0]
    assert first.name
    assert (first.mime_type, first.size_bytes, first.state) == ("text/plain", len(NOTES), types.FileState.ACTIVE)
    assert files.get(name=first.name).uri == first.uri
    assert [file.name for file in files.list(config={"page_size": 2})] == [f.name for f in (named, *reversed(made))]
    for file in (named, *made):
        files.delete(name=file.name or "")
    assert list(files.list()) == []
    with pytest.raises(errors.ClientError) as error:
        files.get(name=first.name)
    assert (error.value.code, error.value.status) == (404, "NOT_FOUND")


def test_a_part_of_googles_sdk_is_an_uploaded_file(server: LiveServer, sdk: genai.Client) -> None:
    notes: Any = sdk.files.upload(file=io.BytesIO(NOTES), config={"mime_type": "text/markdown"})
    assert sdk.models.generate_content(model="demo", contents=[notes, "text?"]).text == "Teal."
    image: Any = sdk.files.upload(file=io.BytesIO(picture(1)), config={"mime_type": "image/png"})
    assert sdk.models.generate_content(model="demo", contents=[image, "text?"]).text
    other = google_sdk(server, "sk-bob")
    with pytest.raises(errors.ClientError, match="no file"):
        other.models.generate_content(model="demo", contents=[notes, "text?"])


def test_a_file_of_one_sdk_is_one_of_the_others(server: LiveServer, sdk: genai.Client) -> None:
    made = sdk.files.upload(file=io.BytesIO(NOTES), config={"mime_type": "text/plain"})
    id = (made.name or "").removeprefix("files/")
    assert anthropic_sdk(server).beta.files.retrieve_metadata(id).mime_type == "text/plain"
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="sk-ada", max_retries=0)
    assert client.files.content(id).content == NOTES
    assert client.files.retrieve(id).purpose == "user_data"


def test_a_large_file_arrives_in_pieces(server: LiveServer, sdk: genai.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("google.genai._api_client.CHUNK_SIZE", 10_000)  # 8 MiB
    data = bytes(range(256)) * 100
    made = sdk.files.upload(file=io.BytesIO(data), config={"mime_type": "application/octet-stream"})
    assert made.size_bytes == len(data)
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="sk-ada", max_retries=0)
    assert client.files.content((made.name or "").removeprefix("files/")).content == data


def _start(server: LiveServer, **headers: str) -> httpx.Response:
    fields = {"x-goog-api-key": "sk-ada", "x-goog-upload-protocol": "resumable", "x-goog-upload-command": "start"}
    return httpx.post(server.url + "/upload/v1beta/files", json={"file": {}}, headers=fields | headers)


def _send(url: str, data: bytes, command: str, offset: int) -> httpx.Response:
    return httpx.post(
        url, content=data, headers={"x-goog-upload-command": command, "x-goog-upload-offset": str(offset)}
    )


def test_an_upload_continues_where_it_was_interrupted(server: LiveServer) -> None:
    url = _start(server).headers["x-goog-upload-url"]
    assert _send(url, b"half ", "upload", 0).headers["x-goog-upload-status"] == "active"
    again = _send(url, b"half ", "upload", 0)
    assert (again.status_code, again.headers["x-goog-upload-status"]) == (409, "active")
    assert "5 bytes" in again.json()["error"]["message"]
    assert _send(url, b"", "query", 0).headers["x-goog-upload-size-received"] == "5"
    ended = _send(url, b"a file", "upload, finalize", 5)
    assert (ended.headers["x-goog-upload-status"], ended.json()["file"]["sizeBytes"]) == ("final", "11")
    assert _send(url, b"more", "upload", 11).status_code == 404


def test_a_cancelled_upload_leaves_nothing(server: LiveServer) -> None:
    url = _start(server).headers["x-goog-upload-url"]
    _send(url, b"half", "upload", 0)
    assert _send(url, b"", "cancel", 0).headers["x-goog-upload-status"] == "cancelled"
    assert _send(url, b" more", "upload, finalize", 4).status_code == 404


def test_an_upload_is_refused_in_googles_form(server: LiveServer) -> None:
    for headers, words in (
        ({"x-goog-upload-protocol": "multipart"}, "resumable"),
        ({"x-goog-upload-header-content-length": "300000"}, "max_file_bytes"),
        ({"x-goog-api-key": "wrong"}, "API key"),
    ):
        error = _start(server, **headers).json()["error"]
        assert words in error["message"]
        assert error["status"]
    url = _start(server).headers["x-goog-upload-url"]
    assert _send(url, bytes(100_001), "upload, finalize", 0).status_code == 413
    assert _send(url.replace("sk-ada", "sk-bob"), b"x", "upload, finalize", 0).status_code == 404


def test_what_is_not_served_of_googles_api_is_refused_in_its_form(server: LiveServer) -> None:
    sdk = google_sdk(server, version="v1")
    requests: Any = [{"contents": [{"parts": [{"text": "text"}]}]}]
    for call in (
        lambda: sdk.caches.create(model="demo", config={"contents": "text"}),
        lambda: sdk.batches.create(model="demo", src=requests),
    ):
        with pytest.raises(errors.ClientError) as error:
            call()
        assert (error.value.code, error.value.status) == (404, "NOT_FOUND")
        assert "here" in (error.value.message or "")
