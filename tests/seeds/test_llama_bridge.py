"""Llama-Bridge (seed 1): one model, two caches and routes; its streaming table; its commands.

The configuration is the document's own. Its model is SmolLM2 on llama.cpp at the path that the document names.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from modelyard.library import default_model
from tests.cli_process import DEADLINE, ROOT, environment, run, serve
from tests.cli_process import ServerProcess as Bridge
from tests.e2e.protocols import parse_events
from tests.live_server import LiveServer, demo_config, live_server
from tests.seeds.processes import until

CONFIG = (ROOT / "tests" / "importing" / "sources" / "llama-bridge.toml").read_text()
MODEL = Path("models/unsloth/MiMo-V2-Flash-GGUF/UD-Q6_K_XL")
# The machine of a test is small; the windows of the document are checked without loading them.
SMALL = {"MODELYARD_CACHES__MAIN__N_CTX": "1536", "MODELYARD_CACHES__FAST__N_CTX": "1024"}


def with_model(folder: Path) -> Path:
    (folder / MODEL).mkdir(parents=True)
    (folder / MODEL / "MiMo-V2-Flash.gguf").symlink_to(default_model.fetch())
    return folder


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bridge]:
    """`serve --config` of the imported file: overflows are strict and calls are held, as the seed says."""
    folder = with_model(tmp_path_factory.mktemp("bridge"))
    (folder / "claude-code.toml").write_text(CONFIG)
    assert run("import", "claude-code.toml", cwd=folder).returncode == 0
    with serve(folder, "--config", "modelyard.toml", "--debug", **SMALL) as started:
        started.folder = folder  # type: ignore[attr-defined]
        started.until("mimo")
        yield started


def chat(url: str, model: str, system: str = "Be brief.", **fields: Any) -> httpx.Response:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Say hello to the world, please."}]
    body = {"model": model, "messages": messages, "max_tokens": 4} | fields
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=DEADLINE)


# --- 5.1, 5.2: the configuration --------------------------------------------------------------------------------------


def test_the_configuration_of_the_document_is_accepted_as_it_is_and_where_it_is(tmp_path: Path) -> None:
    (with_model(tmp_path) / "configs").mkdir()
    (tmp_path / "configs" / "claude-code.toml").write_text(CONFIG)
    checked = run("check", "configs/claude-code.toml", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    for text in ("mimo", "32768", "8192", "主对话缓存", "后台任务缓存", "*haiku*"):
        assert text in checked.stdout


@pytest.mark.parametrize(("model", "cache"), [("claude-3-5-haiku", "fast"), ("claude-sonnet-4", "main")])
def test_a_route_leads_to_its_cache(bridge: Bridge, model: str, cache: str) -> None:
    found = httpx.get(f"{bridge.url}/v1/admin/route", params={"model": model}, headers=bridge.owner).json()
    assert (found["model"], found["cache"]) == ("mimo", cache)
    assert chat(bridge.url, model).status_code == 200


def test_a_background_task_leaves_the_main_cache_alone(bridge: Bridge) -> None:
    chat(bridge.url, "claude-sonnet-4")
    chat(bridge.url, "claude-3-5-haiku")
    usage = chat(bridge.url, "claude-sonnet-4").json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 1


# --- 5.3: the clients -------------------------------------------------------------------------------------------------


def test_the_openai_program_of_the_document_gets_a_clear_400(bridge: Bridge) -> None:
    client = openai.OpenAI(base_url=f"{bridge.url}/v1", api_key="sk-dummy", max_retries=0)
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="claude-sonnet-4", messages=[{"role": "user", "content": "..." * 10000}])
    body: Any = error.value.body
    assert body["n_ctx"] == 1536
    assert body["n_prompt_tokens"] > 1536
    assert body["code"] == "context_length_exceeded"


def test_anthropics_client_gets_invalid_request_error(bridge: Bridge) -> None:
    client = anthropic.Anthropic(base_url=bridge.url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.BadRequestError) as error:
        client.messages.create(
            model="claude-sonnet-4", max_tokens=16, messages=[{"role": "user", "content": "... and " * 10000}]
        )
    body: Any = error.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert "1536" in body["error"]["message"]


def test_a_stream_that_would_overflow_is_refused_before_it_begins(bridge: Bridge) -> None:
    messages = [{"role": "user", "content": "... and " * 10000}]
    for path in ("/v1/chat/completions", "/v1/messages"):
        body = {"model": "claude-sonnet-4", "max_tokens": 16, "stream": True, "messages": messages}
        refused = httpx.post(f"{bridge.url}{path}", json=body, timeout=DEADLINE)
        assert refused.status_code == 400
        assert refused.json()["error"]["type"] == "invalid_request_error"
        assert "1536" in refused.json()["error"]["message"]


def test_anthropics_client_streams_an_answer(bridge: Bridge) -> None:
    client = anthropic.Anthropic(base_url=bridge.url, api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "Hello"}]
    with client.messages.stream(model="claude-3-5-haiku", max_tokens=4, messages=messages) as stream:
        assert stream.get_final_message().usage.output_tokens == 4


# --- 1: tools by a grammar, caches on one set of weights --------------------------------------------------------------


def test_a_model_that_was_not_trained_for_tools_calls_one_by_its_grammar(bridge: Bridge) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    reply = chat(
        bridge.url, "claude-sonnet-4", tools=[tool], tool_choice="required", max_tokens=128, temperature=0
    ).json()
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")


def test_two_caches_are_two_contexts_on_one_set_of_weights(bridge: Bridge) -> None:
    def get(path: str) -> Any:
        return httpx.get(f"{bridge.url}/v1/admin/{path}", headers=bridge.owner, timeout=DEADLINE).json()

    windows = {cache["cache"]: cache["window"] for cache in get("caches")["data"]}
    assert windows == {"main": 1536, "fast": 1024}
    (model,) = get("models")["data"]
    assert len(model["replicas"]["items"]) == 1
    assert model["memory"]["estimate"]["weights"] < 1.1 * default_model.fetch().stat().st_size


# --- 3.1: n_prompt + max_tokens > n_ctx is refused --------------------------------------------------------------------


def test_a_prompt_that_fits_alone_but_not_with_max_tokens_is_a_400(bridge: Bridge) -> None:
    refused = chat(bridge.url, "claude-3-5-haiku", max_tokens=1020)
    assert refused.status_code == 400
    assert refused.json()["error"]["n_ctx"] == 1024
    assert chat(bridge.url, "claude-sonnet-4", max_tokens=1020, stop=["e"]).status_code == 200


# --- 1: the fingerprint of the system prompt; 6.3: four files per request ---------------------------------------------


def test_a_changed_system_prompt_is_a_warning_in_the_log(bridge: Bridge) -> None:
    long = "You help with the source code of a program, and you explain each of your steps. " * 8
    for day in ("Monday", "Tuesday"):
        chat(bridge.url, "claude-3-5-haiku", f"{long} Today is {day}.")
    assert bridge.until("the system prompt in cache 'fast' changed")["level"].lower() == "warning"


def test_debug_writes_four_files_for_a_request(bridge: Bridge) -> None:
    trace = chat(bridge.url, "claude-sonnet-4").headers["x-request-id"].rpartition("_")[2]
    folder: Path = bridge.folder / "debug"  # type: ignore[attr-defined]
    until(lambda: {path.name.partition(f"{trace}.")[2][0] for path in folder.glob(f"*{trace}.*")} == set("1234"))


# --- A.3: the streaming table, A.4: the end of the output -------------------------------------------------------------

CALL = '{"name": "look", "arguments": {"at": "the sky"}}'
HARMONY_CALL = '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "the sky"}'
ROWS = {
    "Harmony text": ("harmony", "<|channel|>final<|message|>One two three four.<|return|>"),
    "Harmony reasoning": ("harmony", "<|channel|>analysis<|message|>One two three four.<|end|>"),
    "Harmony tool call": ("harmony", f"{HARMONY_CALL}<|call|>"),
    "XML text": ("hermes", "One two three four."),
    "XML thinking": ("hermes", "<think>One two three four.</think>"),
    "XML tool call": ("hermes", f"<tool_call>{CALL}</tool_call>"),
    "a call in Qwen's XML": (
        "qwen3_coder",
        "<tool_call>\n<function=look>\n<parameter=at>\nthe sky\n</parameter>\n</function>\n</tool_call>",
    ),
    "a call of MiniMax-M2": (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">the sky</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
    ),
    "a tool call that the end of the output cuts off": ("hermes", f"<tool_call>{CALL}"),
    "a Harmony call without its end": ("harmony", HARMONY_CALL),
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}


@pytest.fixture(scope="module")
def formats() -> Iterator[LiveServer]:
    config = demo_config()
    base = config["models"]["demo"] | {"tool_stream": False, "token_delay": 0.002}
    config["models"] = {
        name: base | {"format": kind, "script": [{"steps": [{"raw": raw}]}]} for name, (kind, raw) in ROWS.items()
    }
    config["caches"], config["routes"] = {}, []
    with live_server(config) as server:
        yield server


def deltas(server: LiveServer, row: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": row, "messages": [{"role": "user", "content": "Go"}], "tools": [TOOL], "stream": True} | fields
    text = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=DEADLINE).text
    assert "<|" not in text
    assert "<think" not in text
    assert "tool_call>" not in text
    assert "<function" not in text
    events = [event.data for event in parse_events(text)[:-1]]
    return [choice["delta"] for event in events for choice in event["choices"]]


@pytest.mark.parametrize("row", ["Harmony text", "XML text"])
def test_text_streams(formats: LiveServer, row: str) -> None:
    pieces = [delta["content"] for delta in deltas(formats, row) if delta.get("content")]
    assert len(pieces) > 1
    assert "".join(pieces) == "One two three four."


@pytest.mark.parametrize("row", ["Harmony reasoning", "XML thinking"])
def test_reasoning_streams(formats: LiveServer, row: str) -> None:
    pieces = [delta["reasoning_content"] for delta in deltas(formats, row) if delta.get("reasoning_content")]
    assert len(pieces) > 1
    assert "".join(pieces) == "One two three four."


@pytest.mark.parametrize("row", ["Harmony reasoning", "XML thinking"])
def test_reasoning_is_left_out_where_the_request_says_so(formats: LiveServer, row: str) -> None:
    sent = deltas(formats, row, include_reasoning=False)
    assert not [delta for delta in sent if delta.get("reasoning_content") or delta.get("content")]


@pytest.mark.parametrize("row", [row for row in ROWS if "call" in row])
def test_a_tool_call_is_held_until_it_is_complete(formats: LiveServer, row: str) -> None:
    calls = [call["function"] for delta in deltas(formats, row) for call in delta.get("tool_calls", [])]
    assert [call["name"] for call in calls if call.get("name")] == ["look"]
    (arguments,) = [call["arguments"] for call in calls if call.get("arguments")]
    assert json.loads(arguments) == {"at": "the sky"}


def test_a_prefilled_answer_is_continued_and_not_closed(bridge: Bridge) -> None:
    messages: Any = [{"role": "user", "content": "Count to five."}, {"role": "assistant", "content": "1, 2, 3,"}]
    body = {"model": "claude-sonnet-4", "max_tokens": 4, "temperature": 0, "messages": messages}
    reply = httpx.post(f"{bridge.url}/v1/messages", json=body, timeout=DEADLINE).json()
    assert reply["content"][0]["text"].lstrip().startswith("4")


# --- A.2: the template of the file ------------------------------------------------------------------------------------


def test_the_prompt_is_that_of_the_template_in_the_file(bridge: Bridge) -> None:
    body = {"model": "claude-sonnet-4", "messages": [{"role": "user", "content": "Hello"}]}
    prompt = httpx.post(f"{bridge.url}/apply-template", json=body, timeout=DEADLINE).json()["prompt"]
    assert prompt.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


# --- 3.4, 4: the commands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "says"),
    [("serve", "Run the server"), ("build", "llama.cpp"), ("optimize", "Nothing is written without --apply")],
)
def test_the_commands_of_a_checkout_are_those_of_modelyard(command: str, says: str) -> None:
    """`uv run NAME` installs setup/checkout beside the project; `uv` itself is not needed here."""
    program = f"import modelyard_checkout; modelyard_checkout.{command}()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--help"],
        env=environment(PYTHONPATH=str(ROOT / "setup" / "checkout"), COLUMNS="200"),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
