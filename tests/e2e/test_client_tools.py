"""Tools that a vendor publishes and the client runs: the official SDKs name them by type and run their calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from anthropic.types.beta import BetaToolUnionParam
from openai import OpenAI
from openai.types.responses import Response, ToolParam
from pydantic import TypeAdapter

from modelyard.protocols.anthropic_messages.client_tools import TOOLSETS
from tests.e2e.helpers import demo_config
from tests.live_server import LiveServer, live_server

# What the scripted model calls, by the word of the user.
CALLS: dict[str, dict[str, Any]] = {
    "bash": {"command": "ls"},
    "str_replace_based_edit_tool": {"command": "view", "path": "/a.py", "view_range": [1, -1]},
    "str_replace_editor": {"command": "undo_edit", "path": "/a.py"},
    "memory": {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"},
    "computer": {"action": "left_click", "coordinate": [10, 20]},
    "left_click": {"coordinate": [1, 2]},
    "browser__left_click": {"target": {"type": "ref", "ref": "ref_7"}},
    "local_shell": {"command": ["ls", "-l"], "timeout_ms": 5},
    "shell": {"commands": ["ls", "pwd"]},
    "apply_patch": {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"},
    "computer_use_preview": {"action": {"type": "click", "x": 1, "y": 2, "button": "left"}},
}
BATCH = {"actions": [{"type": "screenshot"}, {"type": "wait"}]}  # OpenAI's newer screen takes several at once
COMMANDS = "a.py\noh\n[exit code 2]"
RESULTS = ("done", "clicked", "patched", '{"stdout": "a.py"}', COMMANDS)
RULES: list[dict[str, Any]] = [
    *({"result": f"^{re.escape(text)}$", "steps": [{"text": f"The result was: {text}"}]} for text in RESULTS),
    {"when": "^actions$", "steps": [{"call": {"name": "computer", "arguments": BATCH}}]},
    *({"when": f"^{name}$", "steps": [{"call": {"name": name, "arguments": a}}]} for name, a in CALLS.items()),
]


@pytest.fixture(scope="module")
def tools_server() -> Iterator[LiveServer]:
    caches = {"main": {"model": "demo", "n_ctx": 16384, "parallel": 2}}  # 48 tools of two sets take 6,000 tokens
    with live_server(demo_config(RULES) | {"caches": caches, "routes": [{"match": "*", "cache": "main"}]}) as running:
        yield running


@pytest.fixture(scope="module")
def anthropic(tools_server: LiveServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=tools_server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def openai(tools_server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=tools_server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


# --- Messages -------------------------------------------------------------------------------------------------------

SCREEN = {"name": "computer", "display_width_px": 1024, "display_height_px": 768}
MESSAGES_TOOLS: list[tuple[str, dict[str, Any]]] = [
    ("bash", {"type": "bash_20241022", "name": "bash"}),
    ("bash", {"type": "bash_20250124", "name": "bash"}),
    ("str_replace_editor", {"type": "text_editor_20250124", "name": "str_replace_editor"}),
    ("str_replace_based_edit_tool", {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}),
    ("memory", {"type": "memory_20250818", "name": "memory"}),
    ("computer", {"type": "computer_20250124", **SCREEN}),
    ("computer", {"type": "computer_20251124", **SCREEN, "enable_zoom": True}),
]


def ask(client: Anthropic, word: str, tools: list[dict[str, Any]], stream: bool, *turns: Any) -> Any:
    messages: Any = [{"role": "user", "content": word}, *turns]
    fields: Any = {"model": "demo", "max_tokens": 500, "messages": messages, "tools": tools}
    if not stream:
        return client.beta.messages.create(**fields)
    with client.beta.messages.stream(**fields) as running:
        return running.get_final_message()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("name", "tool"), MESSAGES_TOOLS, ids=[tool["type"] for _, tool in MESSAGES_TOOLS])
def test_a_tool_of_anthropic_that_the_client_runs_is_called_and_its_result_read(
    anthropic: Anthropic, name: str, tool: dict[str, Any], stream: bool
) -> None:
    reply = ask(anthropic, name, [tool], stream)
    (call,) = reply.content
    assert (reply.stop_reason, call.type, call.name, call.input) == ("tool_use", "tool_use", name, CALLS[name])
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    turns = [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    assert ask(anthropic, name, [tool], stream, *turns).content[0].text == "The result was: done"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_members_of_two_toolsets_with_the_same_name_are_told_apart(anthropic: Anthropic, stream: bool) -> None:
    computer, browser = {"type": "computer_toolset_20260801"}, {"type": "browser_toolset_20260801"}
    (alone,) = ask(anthropic, "left_click", [computer], stream).content
    assert (alone.name, alone.toolset_name, alone.input) == ("left_click", "computer", CALLS["left_click"])
    reply = ask(anthropic, "browser__left_click", [computer, browser], stream)
    (call,) = reply.content
    assert (call.name, call.toolset_name) == ("left_click", "browser")
    turns = [
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "clicked"}]},
    ]
    answer = ask(anthropic, "browser__left_click", [computer, browser], stream, *turns)
    assert answer.content[0].text == "The result was: clicked"


def test_a_member_that_the_client_turns_off_is_not_offered(tools_server: LiveServer) -> None:
    def count(**configs: Any) -> int:
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "computer_toolset_20260801", "configs": configs}],
        }
        found = httpx.post(tools_server.url + "/v1/messages/count_tokens", json=body).json()
        return int(found["input_tokens"])

    assert count(zoom={"enabled": False}) < count()
    assert count(zoom={"defer_loading": True}) == count(zoom={"enabled": False})


def test_every_member_of_anthropics_toolsets_is_known() -> None:
    """By the SDK's own types, so that a new SDK shows what is missing."""
    from anthropic.types.beta import beta_browser_toolset_configs_param, beta_computer_toolset_configs_param

    browser = beta_browser_toolset_configs_param.BetaBrowserToolsetConfigsParam
    computer = beta_computer_toolset_configs_param.BetaComputerToolsetConfigsParam
    assert set(TOOLSETS["browser"]) == set(browser.__annotations__)
    assert set(TOOLSETS["computer"]) == set(computer.__annotations__)
    TypeAdapter(BetaToolUnionParam)  # the union of all tools that a request may name


# --- Responses ------------------------------------------------------------------------------------------------------

LOCAL: dict[str, Any] = {"type": "shell", "environment": {"type": "local"}}
PREVIEW = {"type": "computer_use_preview", "display_width": 800, "display_height": 600, "environment": "linux"}
PICTURE = "data:image/png;base64,iVBORw0KGgo="
RESPONSES_TOOLS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    (
        "local_shell",
        {"type": "local_shell"},
        {"action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 5}},
        {"output": '{"stdout": "a.py"}'},
        '{"stdout": "a.py"}',
    ),
    (
        "shell",
        LOCAL,
        {"action": {"commands": ["ls", "pwd"], "max_output_length": None, "timeout_ms": None}},
        {"output": [{"stdout": "a.py\n", "stderr": "oh", "outcome": {"type": "exit", "exit_code": 2}}]},
        COMMANDS,
    ),
    (
        "apply_patch",
        {"type": "apply_patch"},
        {"operation": {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"}},
        {"output": "patched", "status": "completed"},
        "patched",
    ),
]
TYPED = pytest.mark.parametrize(
    ("name", "tool", "fields", "output", "shown"), RESPONSES_TOOLS, ids=[name for name, *_ in RESPONSES_TOOLS]
)


def respond(client: OpenAI, input: Any, tools: list[Any], stream: bool, **more: Any) -> tuple[Response, list[Any]]:
    fields: Any = {"model": "demo", "input": input, "tools": tools, **more}
    if not stream:
        return client.responses.create(**fields), []
    events = list(client.responses.create(**fields, stream=True))
    return events[-1].response, events


def item_of(response: Response) -> dict[str, Any]:
    (item,) = response.output
    return item.to_dict()


@TYPED
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_tool_of_openai_that_the_client_runs_has_calls_and_outputs_of_its_own(
    openai: OpenAI, name: str, tool: ToolParam, fields: dict[str, Any], output: dict[str, Any], shown: str, stream: bool
) -> None:
    response, events = respond(openai, name, [tool], stream)
    item = item_of(response)
    assert item["type"] == f"{name}_call"
    assert fields.items() <= item.items()
    assert response.tools[0].to_dict() == tool
    if stream:
        (done,) = [event.item for event in events if event.type == "response.output_item.done"]
        assert done.to_dict() == item
        commands = [event.command for event in events if event.type == "response.shell_call_command.done"]
        assert commands == (["ls", "pwd"] if name == "shell" else [])
        assert not [event for event in events if "arguments" in event.type]
    id = {"id": item["call_id"]} if name == "local_shell" else {"call_id": item["call_id"]}
    result = {"type": f"{name}_call_output", **id, **output}
    whole = [{"role": "user", "content": name}, item, result]
    assert respond(openai, whole, [tool], stream)[0].output_text == f"The result was: {shown}"
    stored = respond(openai, [result], [tool], stream, previous_response_id=response.id)[0]
    assert stored.output_text == f"The result was: {shown}"
    listed = [one.to_dict() for one in openai.responses.input_items.list(stored.id, order="asc")]
    assert [one["type"] for one in listed] == ["message", f"{name}_call", f"{name}_call_output"]
    assert fields.items() <= listed[1].items()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("word", "tool"), [("actions", {"type": "computer"}), ("computer_use_preview", PREVIEW)])
def test_a_call_of_the_screen_is_a_computer_call(openai: OpenAI, word: str, tool: Any, stream: bool) -> None:
    item = item_of(respond(openai, word, [tool], stream)[0])
    expected = BATCH if word == "actions" else CALLS[word]
    assert (item["type"], item["pending_safety_checks"]) == ("computer_call", [])
    assert expected.items() <= item.items()


def test_a_client_can_force_a_call_of_its_tool(openai: OpenAI) -> None:
    item = item_of(respond(openai, "anything", [LOCAL], False, tool_choice={"type": "shell"})[0])
    assert item["type"] == "shell_call"


def test_a_shell_in_a_container_of_openai_is_not_offered(openai: OpenAI) -> None:
    tool = {"type": "shell", "environment": {"type": "container_auto"}}
    response, _ = respond(openai, "hello", [tool], False)
    assert [item.type for item in response.output] == ["message"]


def test_a_conversation_keeps_the_calls_and_outputs_of_client_tools(openai: OpenAI) -> None:
    items: Any = [
        {"role": "user", "content": "shell"},
        {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}, "status": "completed"},
        {"type": "shell_call_output", "call_id": "c1", "output": RESPONSES_TOOLS[1][3]["output"]},
    ]
    conversation = openai.conversations.create(items=items)
    response: Any = openai.responses.create(model="demo", conversation=conversation.id, input=[], tools=[LOCAL])
    assert response.output_text == f"The result was: {COMMANDS}"
    kinds = [json.loads(item.to_json())["type"] for item in openai.conversations.items.list(conversation.id)]
    assert sorted(kinds) == ["message", "message", "shell_call", "shell_call_output"]
