"""The ollama client, sync and async, against a live server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from pydantic import BaseModel

from tests.clients.agent_bench import red_png
from tests.e2e.helpers import config
from tests.engines.llama_cpp.lora_files import write_lora
from tests.library.convert.tiny_models import LAYERS, WIDTH, write_model
from tests.library.web import serve_hub
from tests.live_server import LiveServer, live_server

TEXT = "Hello there, friend."


class City(BaseModel):
    name: str
    people: int


def get_weather(city: str) -> str:
    """The weather.

    Args:
      city: where
    """
    return f"sunny in {city}"


def user(text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text, **more}]


@pytest.fixture(scope="module")
def sdk(server: LiveServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as client:
        yield client


def test_chat(sdk: ollama.Client) -> None:
    reply = sdk.chat("demo", user("text"))
    assert (reply.message.content, reply.done, reply.done_reason) == (TEXT, True, "stop")
    assert (reply.prompt_eval_count or 0) > 0
    assert (reply.total_duration or 0) >= (reply.eval_duration or 0) > 0


def test_streamed_chat_with_thinking(sdk: ollama.Client) -> None:
    parts = [*sdk.chat("demo", user("thinking"), stream=True, think=True)]
    assert "".join(part.message.thinking or "" for part in parts) == "Let me see."
    assert "".join(part.message.content or "" for part in parts) == "Forty-two."
    assert [part.done for part in parts][-2:] == [False, True]


def test_every_line_of_a_stream_has_its_own_time(sdk: ollama.Client) -> None:
    before = datetime.now(UTC)
    parts = [*sdk.chat("demo", user("slow prefill"), stream=True), *sdk.generate("demo", "thinking", stream=True)]
    times = [datetime.fromisoformat(part.created_at or "") for part in parts]
    assert sorted(set(times)) == times
    assert before < times[0] < times[-1] < datetime.now(UTC)
    whole = sdk.chat("demo", user("text"))
    assert datetime.fromisoformat(whole.created_at or "").microsecond


def test_thinking_can_be_switched_off(sdk: ollama.Client) -> None:
    reply = sdk.chat("demo", user("text"), think=False)
    assert reply.message.thinking is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_used(sdk: ollama.Client, stream: bool) -> None:
    messages: list[Any] = user("one tool")
    chat: Any = sdk.chat
    reply = chat("demo", messages, tools=[get_weather], stream=stream)
    found = next(part.message for part in reply if part.message.tool_calls) if stream else reply.message
    (called,) = found.tool_calls
    assert (called.function.name, called.function.arguments) == ("get_weather", {"city": "Rome"})
    messages += [found, {"role": "tool", "tool_name": "get_weather", "content": get_weather("Rome")}]
    assert sdk.chat("demo", messages, tools=[get_weather]).message.content == "Take a hat: it is sunny."


def test_a_schema_is_kept(sdk: ollama.Client) -> None:
    reply = sdk.chat("demo", user("Rome, please"), format=City.model_json_schema())
    assert isinstance(City.model_validate_json(reply.message.content or ""), City)
    assert (sdk.generate("demo", "Rome, please", format="json").response or "").startswith("{")


def test_generate_continues_from_its_context(sdk: ollama.Client) -> None:
    first = sdk.generate("demo", "text", system="Be brief.")
    assert first.response == TEXT
    again = sdk.generate("demo", "thinking", context=first.context)
    assert again.response == "Forty-two."
    assert (again.prompt_eval_count or 0) > (first.prompt_eval_count or 0)
    streamed = [*sdk.generate("demo", "text", stream=True)]
    assert "".join(part.response or "" for part in streamed) == TEXT
    assert streamed[-1].context


def test_a_bare_prompt_and_a_gap(sdk: ollama.Client) -> None:
    bare = sdk.generate("demo", "text", raw=True, options={"num_predict": 3})
    assert (bare.done_reason, bare.eval_count, bare.context) == ("length", 3, None)
    assert sdk.generate("demo", "def f():", suffix="return x").response


def test_embeddings(sdk: ollama.Client) -> None:
    found = sdk.embed("demo", ["a b", "c"], dimensions=8)
    assert [len(vector) for vector in found.embeddings] == [8, 8]
    assert (found.prompt_eval_count or 0) > 0
    assert len(sdk.embeddings("demo", "a b").embedding) > 8
    assert len(sdk.embed("demo", "a b " * 5000).embeddings) == 1  # truncated
    with pytest.raises(ollama.ResponseError, match="exceeds the context length"):
        sdk.embed("demo", "a b " * 5000, truncate=False)


def test_lists_and_descriptions(sdk: ollama.Client) -> None:
    assert [model.model for model in sdk.list().models] == ["demo:latest"]
    (loaded,) = sdk.ps().models
    assert (loaded.name, loaded.context_length) == ("demo:latest", 4096)
    shown = sdk.show("demo:latest")
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities or ())
    assert (shown.modelinfo or {})["fake.context_length"] == 4096


def test_images_reach_a_model_that_sees() -> None:
    settings = config()
    settings["models"]["demo"]["modalities"] = ["text", "image"]
    with live_server(settings) as server, ollama.Client(host=server.url) as sdk:
        assert "vision" in (sdk.show("demo").capabilities or ())
        assert sdk.chat("demo", user("text", images=[red_png()])).message.content == TEXT
        assert sdk.generate("demo", "text", images=[red_png()]).response == TEXT


def test_images_are_refused_by_a_model_that_does_not_see(sdk: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as raised:
        sdk.chat("demo", user("text", images=[red_png()]))
    assert raised.value.status_code == 400


@pytest.mark.parametrize(("text", "status"), [("error before", 500), ("busy before", 503)])
def test_errors_have_their_status(sdk: ollama.Client, text: str, status: int) -> None:
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError) as raised:
            list(sdk.chat("demo", user(text), stream=stream))
        assert raised.value.status_code == status


def test_an_error_within_a_stream_is_raised(sdk: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="out of memory"):
        list(sdk.chat("demo", user("error during"), stream=True))


async def test_the_async_client(server: LiveServer) -> None:
    async with ollama.AsyncClient(host=server.url) as sdk:
        assert (await sdk.chat("demo", user("text"))).message.content == TEXT
        assert (
            "".join([part.message.content or "" async for part in await sdk.chat("demo", user("text"), stream=True)])
            == TEXT
        )


# --- changes of the library -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with the library of an empty cache folder, whose configuration can be read again."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELYARD_CACHE", str(folder))
        settings = {name: value for name, value in config().items() if name != "routes"}  # one takes every name
        with live_server(settings, {"MODELYARD_CACHE": str(folder)}, library=True) as running:
            yield running


@pytest.fixture
def librarian(library_server: LiveServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=library_server.url, timeout=120, headers=library_server.owner) as client:
        yield client


def test_a_model_is_uploaded_created_copied_and_deleted(
    library_server: LiveServer, librarian: ollama.Client, tmp_path: Path
) -> None:
    sdk = librarian
    write_model(tmp_path / "tiny.gguf")
    digest = sdk.create_blob(tmp_path / "tiny.gguf")
    assert httpx.head(f"{library_server.url}/api/blobs/{digest}", headers=library_server.owner).status_code == 200
    statuses = [part.status for part in sdk.create("base", files={"tiny.gguf": digest}, stream=True)]
    assert statuses[-1] == "success"
    sdk.create(
        "brief", from_="base", system="Be brief.", parameters={"temperature": 0.0, "stop": ["END"], "num_ctx": 256}
    )
    shown = sdk.show("brief")
    assert "Be brief." in (shown.modelfile or "")
    assert "temperature" in (shown.parameters or "")
    spoken = sdk.chat("brief", user("Hello"), options={"num_predict": 3})
    plain = sdk.chat("base", user("Hello"), options={"num_predict": 3})
    assert (spoken.prompt_eval_count or 0) > (plain.prompt_eval_count or 0)  # it has the system prompt
    sdk.copy("brief", "short")
    names = {model.model for model in sdk.list().models}
    assert {"base:latest", "brief:latest", "short:latest"} <= names
    for name in ("short", "brief", "base"):
        sdk.delete(name)
    assert not {"base:latest", "brief:latest", "short:latest"} & {model.model for model in sdk.list().models}
    with pytest.raises(ollama.ResponseError) as raised:
        sdk.delete("base")
    assert raised.value.status_code == 404


def test_a_model_is_created_with_a_lora_adapter(librarian: ollama.Client, tmp_path: Path) -> None:
    """Its answers differ from those of its base, and a file that is no adapter of this model is refused in one line."""
    sdk = librarian
    base = sdk.create_blob(write_model(tmp_path / "tiny.gguf"))
    law = sdk.create_blob(write_lora(tmp_path / "law.gguf", width=WIDTH, layers=LAYERS, seed=1))
    other = sdk.create_blob(write_lora(tmp_path / "wide.gguf", width=2 * WIDTH, layers=LAYERS, seed=1))
    sdk.create("base", files={"tiny.gguf": base})
    sdk.create("law", from_="base", adapters={"law.gguf": law})
    sdk.create("wide", from_="base", adapters={"wide.gguf": other})
    greedy = {"num_predict": 12, "temperature": 0.0}
    said = {name: sdk.generate(name, "Hello", raw=True, options=greedy).response for name in ("base", "law")}
    again = sdk.generate("law", "Hello", raw=True, options=greedy).response
    assert said["law"] != said["base"]
    assert said["law"] == again
    with pytest.raises(ollama.ResponseError) as raised:
        sdk.generate("wide", "Hello", raw=True, options=greedy)
    assert "adapter" in str(raised.value)
    for name in ("wide", "law", "base"):
        sdk.delete(name)


def test_a_model_is_pulled_with_progress(
    librarian: ollama.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_model(tmp_path / "tiny.gguf").read_bytes()
    with serve_hub() as hub:
        hub.repos["maker/Small-GGUF"] = {"Small-Q4_1.gguf": data}
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        parts = [*librarian.pull("hf.co/maker/Small-GGUF:Q4_1", stream=True)]
        assert librarian.pull("Small").status == "success"  # it is here already
    assert [parts[0].status, parts[-1].status] == ["pulling manifest", "success"]
    assert [(part.completed, part.total) for part in parts if part.total][-1] == (len(data), len(data))
    assert "Small:latest" in {model.model for model in librarian.list().models}
    librarian.delete("Small")


def test_what_cannot_be_changed_is_said(librarian: ollama.Client) -> None:
    sdk = librarian
    refused: list[tuple[Callable[[], Any], int]] = [
        (lambda: sdk.delete("demo"), 409),
        (lambda: sdk.copy("none", "other"), 404),
        (lambda: sdk.create("x", from_="demo"), 400),
        (lambda: sdk.create("x", files={"a": "sha256:" + "0" * 64}), 400),
        (lambda: sdk.pull("no-such-model"), 404),
    ]
    for call, status in refused:
        with pytest.raises(ollama.ResponseError) as raised:
            call()
        assert raised.value.status_code == status


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"num_ctx": -5}, "num_ctx"),
        ({"num_ctx": "many"}, "num_ctx"),
        ({"num_predict": "many"}, "num_predict"),
        ({"num_predict": -7}, "num_predict"),
        ({"temperature": "hot"}, "temperature"),
        ({"repeat_penalty": -1}, "repeat_penalty"),
        ({"stop": [5]}, "stop"),
    ],
)
def test_a_model_is_not_created_with_values_that_the_configuration_refuses(
    librarian: ollama.Client, tmp_path: Path, parameters: dict[str, Any], named: str
) -> None:
    digest = librarian.create_blob(write_model(tmp_path / "tiny.gguf"))
    with pytest.raises(ollama.ResponseError, match=rf"parameters\.{named}: ") as raised:
        librarian.create("unusable", files={"tiny.gguf": digest}, parameters=parameters)
    assert raised.value.status_code == 400
    assert "unusable:latest" not in {model.model for model in librarian.list().models}


def test_a_damaged_upload_is_refused(library_server: LiveServer) -> None:
    url, owner = f"{library_server.url}/api/blobs/sha256:{'0' * 64}", library_server.owner
    assert httpx.post(url, content=b"other", headers=owner).status_code == 400
    assert httpx.head(url, headers=owner).status_code == 404
