"""The clients of Ollama's and Google's protocols that run in environments of their own, and the AI SDK with a provider
for each protocol: each streams, thinks, calls a tool, keeps a schema, sends an image and reports errors.
`make test-recipes` installs and runs them.

The Python clients of both are in tests/e2e; the frameworks' programs of docs/clients.md in tests/docs.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelyard.core.request import Request
from tests.clients.agent_bench import count_images, record_requests, red_png
from tests.docs.recipe_programs import DEADLINE, environment_of, link_modules, wait_for
from tests.e2e.helpers import config
from tests.launch.test_launch import free_port
from tests.live_server import LiveServer, live_server

pytestmark = pytest.mark.recipes
PROGRAMS = Path(__file__).parent / "programs"
IMAGE = base64.b64encode(red_png()).decode()
TEXT = "Hello there, friend."


class RecordingServer:
    def __init__(self, server: LiveServer) -> None:
        self.url = server.url
        self.requests: list[Request] = []
        record_requests(server.app.gateway, self.requests)


@pytest.fixture(scope="module")
def served() -> Iterator[RecordingServer]:
    settings = config(routes=[{"match": "demo", "cache": "main"}])
    settings["models"]["demo"]["modalities"] = ["text", "image"]
    with live_server(settings) as running:
        yield RecordingServer(running)


@pytest.mark.parametrize(
    ("recipe", "command"),
    [
        ("ollama-js", ("node", "ollama.mjs", "{url}")),
        ("google-genai-js", ("node", "gemini.mjs", "{url}")),
        ("litellm", ("python", "litellm_client.py", "ollama_chat", "{url}")),
        ("litellm", ("python", "litellm_client.py", "gemini", "{url}/v1beta")),
        ("ai-sdk", ("node", "aisdk.mjs", "responses", "{url}")),
        ("ai-sdk", ("node", "aisdk.mjs", "chat", "{url}")),
        ("ai-sdk", ("node", "aisdk.mjs", "messages", "{url}")),
        ("ai-sdk", ("node", "aisdk.mjs", "gemini", "{url}")),
        ("ai-sdk", ("node", "aisdk.mjs", "compatible", "{url}")),
    ],
    ids=[
        *("ollama-js", "google-genai-js", "litellm-ollama", "litellm-gemini"),
        *("ai-sdk-responses", "ai-sdk-chat", "ai-sdk-messages", "ai-sdk-gemini", "ai-sdk-compatible"),
    ],
)
def test_a_client_does_everything(
    recipe: str, command: tuple[str, ...], served: RecordingServer, tmp_path: Path
) -> None:
    shutil.copytree(PROGRAMS, tmp_path, dirs_exist_ok=True)
    link_modules(recipe, tmp_path)
    words = [word.format(url=served.url) for word in command]
    done = subprocess.run(
        ["env", *words, IMAGE],  # finds the program in the PATH of `env`
        cwd=tmp_path,
        env=environment_of(recipe, tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (found["stream"]["text"], found["stream"]["pieces"] > 1) == (TEXT, True)
    reads_thinking = "chat" not in command  # the SDK's own Chat provider knows no reasoning
    assert found["thinking"]["thinking"] == ("Let me see." if reads_thinking else "")
    assert found["thinking"]["text"] == "Forty-two."
    assert found["tools"]["calls"] == [["get_weather", {"city": "Rome"}]]
    assert found["tools"]["text"] == "I look."
    assert found["answer"] == "Take a hat: it is sunny."
    assert found.get("last", TEXT) == TEXT  # a third turn in the same conversation
    assert (type(found["schema"]["name"]), type(found["schema"]["people"])) == (str, int)
    assert found["image"] == TEXT
    assert sum(map(count_images, served.requests)) == 1
    served.requests.clear()
    assert (found["missing"]["status"], found["broken"]["status"]) == (404, 500)
    assert "The model 'nobody' does not exist here" in found["missing"]["message"]
    assert "out of memory" in found["broken"]["message"]
    assert "out of memory" in found["interrupted"]["message"]


# --- Open WebUI in its Ollama mode ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def open_webui(served: RecordingServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder, port = tmp_path_factory.mktemp("open-webui"), free_port()
    env = environment_of("open-webui", folder) | {
        "ENABLE_OLLAMA_API": "true",
        "ENABLE_OPENAI_API": "false",
        "OLLAMA_BASE_URL": served.url,
        "WEBUI_AUTH": "false",
        "DATA_DIR": str(folder / "data"),
    }
    command = ["env", "open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, folder / "log")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE) as client:
            token = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
            client.headers["authorization"] = f"Bearer {token}"
            client.get("/api/models").raise_for_status()
            yield client
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ask(client: httpx.Client, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
    body = {"model": "demo:latest", "stream": False, "messages": messages, **more}
    return client.post("/api/chat/completions", json=body)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def message(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()["choices"][0]["message"]
    return found


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_open_webui_streams_text_and_thoughts(open_webui: httpx.Client) -> None:
    reply = ask(open_webui, user("thinking"), stream=True, think=True)
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events if event.get("choices")]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Let me see."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Forty-two."


def test_open_webui_calls_a_tool_and_uses_its_result(open_webui: httpx.Client) -> None:
    question = user("one tool")
    asked = message(ask(open_webui, question, tools=[TOOL]))
    (call,) = asked["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": "Rome"})
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    assert message(ask(open_webui, [*question, asked, result], tools=[TOOL]))["content"] == "Take a hat: it is sunny."


def test_open_webui_keeps_a_schema(open_webui: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"people": {"type": "integer"}}, "required": ["people"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    found = json.loads(message(ask(open_webui, user("Rome, please"), response_format=wanted))["content"])
    assert type(found["people"]) is int


def test_open_webui_sends_an_image(open_webui: httpx.Client, served: RecordingServer) -> None:
    served.requests.clear()
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}}
    assert message(ask(open_webui, user([{"type": "text", "text": "text"}, picture])))["content"] == TEXT
    assert sum(map(count_images, served.requests)) == 1


def test_open_webui_shows_the_servers_error(open_webui: httpx.Client) -> None:
    reply = ask(open_webui, user("error before"))
    assert reply.status_code >= 400
    assert "out of memory" in reply.text
