"""Tools of MCP servers through a whole server: real servers of the official SDK, real SDKs as clients."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pytest
import uvicorn

from tests.e2e.helpers import wait_until
from tests.live_server import LiveServer, live_server
from tests.mcp import tool_server

PROGRAM = str(Path(tool_server.__file__))
SCRIPT: list[dict[str, Any]] = [
    {"when": "^loop", "steps": [{"call": {"name": "add", "arguments": {"a": 1, "b": 1}}}]},
    {"result": "Rome", "steps": [{"text": "It is sunny."}]},
    {"result": "3\\s+5", "steps": [{"text": "Three and five."}]},
    {
        "when": "^both",
        "steps": [
            {
                "call": [
                    {"name": "add", "arguments": {"a": 1, "b": 2}},
                    {"name": "add", "arguments": {"a": 2, "b": 3}},
                ]
            }
        ],
    },
    {
        "when": "^mixed",
        "steps": [
            {
                "call": [
                    {"name": "add", "arguments": {"a": 1, "b": 2}},
                    {"name": "get_weather", "arguments": {"city": "Rome"}},
                ]
            }
        ],
    },
]
WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


class HttpToolServer:
    """The tools over streamable HTTP, in a thread. It can be stopped and started again on its port."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        config = uvicorn.Config(
            tool_server.server.streamable_http_app(), "127.0.0.1", self.port, log_level="error", lifespan="on"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started, "the tool server started")
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(60)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"


def config(**mcp: Any) -> dict[str, Any]:
    program = {"command": sys.executable, "args": [PROGRAM], "env_from": ["TOKEN"]}
    servers = {
        "tools": program,
        "private": program | {"by_request": False},
        "gone": {"url": "http://127.0.0.1:1/mcp"},
    }
    return {
        "models": {"demo": {"backend": "fake", "token_delay": 0, "script": SCRIPT, "n_ctx": 16384}},
        "routes": [
            {"match": "with-tools", "model": "demo", "mcp": ["tools", "gone"]},
        ],
        "mcp": {"servers": servers | mcp.pop("servers", {}), "max_rounds": 3, "max_output_chars": 200, **mcp},
    }


@pytest.fixture(scope="module")
def http_tools() -> Iterator[HttpToolServer]:
    server = HttpToolServer()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def server(http_tools: HttpToolServer) -> Iterator[LiveServer]:
    remote = {"remote": {"url": http_tools.url, "timeout_s": 1.0}}
    with live_server(config(servers=remote), {"TOKEN": "t-123"}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def messages_client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def mcp(label: str = "tools", **more: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": label, "require_approval": "never", **more}


def post(server: LiveServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def last_record(server: LiveServer) -> dict[str, Any]:
    newest: dict[str, Any] = _requests(server)["ended"][0]
    return newest


def live_requests(server: LiveServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _requests(server)["live"]
    return found


def _requests(server: LiveServer) -> Any:
    return httpx.get(f"{server.url}/v1/admin/requests", headers=server.owner, timeout=60).json()


# --- Responses ------------------------------------------------------------------------------------------------------


def test_a_response_lists_the_tools_calls_one_and_answers(server: LiveServer, client: openai.OpenAI) -> None:
    made = client.responses.create(model="demo", input='call add {"a":1,"b":2}', tools=[mcp()])  # type: ignore[list-item]
    assert [item.type for item in made.output] == ["mcp_list_tools", "message", "mcp_call", "message"]
    listed, _, call, _ = made.output
    assert listed.server_label == "tools"  # type: ignore[union-attr]
    assert "add" in [tool.name for tool in listed.tools]  # type: ignore[union-attr]
    assert (call.name, call.output, call.error, call.status) == ("add", "3", None, "completed")  # type: ignore[union-attr]
    assert made.output_text == "I call add for you. The tool answered: 3"
    record = last_record(server)
    assert record["usage"]["prompt"] == made.usage.input_tokens  # type: ignore[union-attr]
    (run,) = record["calls"]
    assert (run["server"], run["tool"], run["status"], run["chars"]) == ("tools", "add", "ok", 1)


def test_a_streamed_response_has_the_events_of_its_calls(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input='call add {"a":1,"b":2}', tools=[mcp()]) as stream:  # type: ignore[list-item]
        events = list(stream)
        final = stream.get_final_response()
    types = [event.type for event in events if "mcp" in event.type]
    assert types[:2] == ["response.mcp_list_tools.in_progress", "response.mcp_list_tools.completed"]
    assert types[2] == "response.mcp_call.in_progress"
    assert set(types[3:-2]) == {"response.mcp_call_arguments.delta"}
    assert types[-2:] == ["response.mcp_call_arguments.done", "response.mcp_call.completed"]
    assert [item.type for item in final.output] == ["mcp_list_tools", "message", "mcp_call", "message"]
    assert final.output[2].output == "3"  # type: ignore[union-attr]
    added = {event.output_index: event.item.id for event in events if event.type == "response.output_item.added"}
    assert added == {index: item.id for index, item in enumerate(final.output)}


def test_calls_of_one_turn_run_together_and_lead_to_the_same_prompt_when_they_are_sent_back(
    server: LiveServer, client: openai.OpenAI
) -> None:
    made = client.responses.create(model="demo", input="both", tools=[mcp()])  # type: ignore[list-item]
    calls = [item for item in made.output if item.type == "mcp_call"]
    assert [call.output for call in calls] == ["3", "5"]
    assert made.output_text == "Three and five."
    history = [{"role": "user", "content": "both"}, *(item.to_dict() for item in made.output)]
    again = client.responses.create(
        model="demo",
        input=[*history, {"role": "user", "content": "thanks"}],
        tools=[mcp()],  # type: ignore[list-item]
    )
    assert [item.type for item in again.output] == ["message"]  # the tools are listed in the input
    details = again.usage.input_tokens_details  # type: ignore[union-attr]
    assert again.usage.input_tokens - details.cached_tokens < 60  # type: ignore[union-attr]


def test_a_call_that_needs_approval_waits_for_it(server: LiveServer, client: openai.OpenAI) -> None:
    tools: Any = [mcp(require_approval={"never": {"tool_names": ["secret"]}})]
    asked = client.responses.create(model="demo", input='call add {"a":4,"b":2}', tools=tools)
    request = asked.output[-1]
    assert (request.type, request.name) == ("mcp_approval_request", "add")
    assert last_record(server)["calls"][0]["status"] == "asked"
    answer: Any = [{"type": "mcp_approval_response", "approval_request_id": request.id, "approve": True}]
    done = client.responses.create(model="demo", input=answer, tools=tools, previous_response_id=asked.id)
    assert [item.type for item in done.output] == ["mcp_call", "message"]
    assert (done.output[0].output, done.output[0].approval_request_id) == ("6", request.id)  # type: ignore[union-attr]
    assert done.output_text == "The tool answered: 6"
    more = client.responses.create(model="demo", input="thanks", tools=tools, previous_response_id=done.id)
    assert [item.type for item in more.output] == ["message"]
    free = client.responses.create(model="demo", input="call secret {}", tools=tools)
    assert free.output[-1].type == "message"


def test_an_approval_works_without_stored_responses_and_streamed(client: openai.OpenAI) -> None:
    tools: Any = [mcp(require_approval="always")]
    asked = client.responses.create(model="demo", input='call add {"a":4,"b":2}', tools=tools, store=False)
    history: list[Any] = [{"role": "user", "content": 'call add {"a":4,"b":2}'}, *(i.to_dict() for i in asked.output)]
    id = asked.output[-1].id
    history.append({"type": "mcp_approval_response", "approval_request_id": id, "approve": True})
    with client.responses.stream(model="demo", input=history, tools=tools, store=False) as stream:
        kinds = [event.type for event in stream]
        done = stream.get_final_response()
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert [item.type for item in done.output] == ["mcp_call", "message"]
    history += [item.to_dict() for item in done.output]
    more = client.responses.create(
        model="demo", input=[*history, {"role": "user", "content": "thanks"}], tools=tools, store=False
    )
    assert [item.type for item in more.output] == ["message"]


def test_a_refused_call_is_not_run_and_the_model_reads_why(client: openai.OpenAI) -> None:
    tools: Any = [mcp(require_approval="always")]
    asked = client.responses.create(model="demo", input='call add {"a":4,"b":2}', tools=tools)
    answer: Any = {"type": "mcp_approval_response", "approval_request_id": asked.output[-1].id, "approve": False}
    done = client.responses.create(
        model="demo", input=[answer | {"reason": "too dear"}], tools=tools, previous_response_id=asked.id
    )
    assert [item.type for item in done.output] == ["message"]
    assert "did not approve this call: too dear" in done.output_text


def test_an_approval_of_nothing_is_refused(client: openai.OpenAI) -> None:
    answer: Any = [{"type": "mcp_approval_response", "approval_request_id": "mcpr_call_x", "approve": True}]
    with pytest.raises(openai.BadRequestError, match="approved call 'call_x' is unknown"):
        client.responses.create(model="demo", input=answer, tools=[mcp()])  # type: ignore[list-item]


def test_the_clients_own_call_in_the_same_turn_goes_to_the_client(client: openai.OpenAI) -> None:
    tools: Any = [mcp(), {"type": "function", **WEATHER}]
    made = client.responses.create(model="demo", input="mixed", tools=tools)
    assert [item.type for item in made.output] == ["mcp_list_tools", "mcp_call", "function_call"]
    assert made.output[1].output == "3"  # type: ignore[union-attr]
    call_id = made.output[2].call_id  # type: ignore[union-attr]
    result: Any = [{"type": "function_call_output", "call_id": call_id, "output": "Rome: sun"}]
    done = client.responses.create(model="demo", input=result, tools=tools, previous_response_id=made.id)
    assert done.output_text == "It is sunny."


def test_a_conversation_keeps_the_calls_and_their_approval(client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    ask: Any = {"model": "demo", "conversation": conversation.id, "tools": [mcp(require_approval="always")]}
    asked = client.responses.create(input='call add {"a":4,"b":2}', **ask)
    answer: Any = {"type": "mcp_approval_response", "approval_request_id": asked.output[-1].id, "approve": True}
    done = client.responses.create(input=[answer], **ask)
    assert done.output_text == "The tool answered: 6"
    more = client.responses.create(input="thanks", **ask)
    assert [item.type for item in more.output] == ["message"]
    kinds = [item.type for item in client.conversations.items.list(conversation.id, order="asc", limit=100)]
    assert kinds.count("mcp_call") == 1
    assert kinds.count("mcp_list_tools") == 1


def test_a_response_in_the_background_calls_tools(client: openai.OpenAI) -> None:
    made = client.responses.create(model="demo", input='call add {"a":1,"b":2}', tools=[mcp()], background=True)  # type: ignore[list-item]
    wait_until(lambda: client.responses.retrieve(made.id).status == "completed", "the response")
    assert client.responses.retrieve(made.id).output_text.endswith("The tool answered: 3")


def test_a_tool_can_be_forced(client: openai.OpenAI) -> None:
    choice: Any = {"type": "mcp", "server_label": "tools", "name": "add"}
    made = client.responses.create(model="demo", input="hello", tools=[mcp()], tool_choice=choice)  # type: ignore[list-item]
    assert [item.name for item in made.output if item.type == "mcp_call"] == ["add"]
    assert made.output[-1].type == "message"


def test_a_response_repeats_no_credentials(server: LiveServer, http_tools: HttpToolServer) -> None:
    with live_server(config(allow_urls=["127.0.0.1"], allow_private=True)) as open_server:
        tool = mcp("mine", server_url=http_tools.url, headers={"x-key": "k-1"}, authorization="t-1")
        reply = post(
            open_server, "/v1/responses", {"model": "demo", "input": 'call add {"a":1,"b":1}', "tools": [tool]}
        )
        assert reply.json()["output"][2]["output"] == "2"
        assert "k-1" not in reply.text
        assert "t-1" not in reply.text


# --- what goes wrong with a tool ------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_that_hangs_is_a_result(server: LiveServer, tmp_path: Path, streamed: bool) -> None:
    marker = tmp_path / "marker"
    body = {"model": "demo", "tools": [mcp("remote")], "stream": streamed}
    reply = post(server, "/v1/responses", body | {"input": f'call hang {{"marker":"{marker}"}}'})
    assert reply.status_code == 200
    assert "did not answer within 1 s" in reply.text
    wait_until(lambda: marker.read_text() == "cancelled", "the server was told")
    record = last_record(server)
    assert (record["status"], record["calls"][0]["status"]) == ("end", "timeout")


def test_a_server_that_dies_is_a_result_and_works_again(server: LiveServer) -> None:
    ask = {"model": "demo", "tools": [mcp()]}
    died = post(server, "/v1/responses", ask | {"input": "call die {}"}).json()
    assert died["output"][2]["status"] == "failed"
    assert "was lost during the call" in died["output_text"]
    again = post(server, "/v1/responses", ask | {"input": 'call add {"a":1,"b":2}'}).json()
    assert again["output_text"].endswith("The tool answered: 3")


def test_a_restarted_http_server_is_used_again(server: LiveServer, http_tools: HttpToolServer) -> None:
    ask = {"model": "demo", "tools": [mcp("remote")], "input": 'call add {"a":1,"b":2}'}
    assert post(server, "/v1/responses", ask).json()["output"][2]["output"] == "3"
    http_tools.stop()
    lost = post(server, "/v1/responses", ask).json()
    assert lost["output"][2]["status"] == "failed"
    http_tools.start()
    assert post(server, "/v1/responses", ask).json()["output"][2]["output"] == "3"


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("call fail {}", "the disk is full"),
        ('call add {"a":"x"}', "validation error"),
        ('call big {"count":5000}', "[4800 more characters were left out]"),
        ("call picture {}", "a dot"),
        ("call odd_name_x {}", "odd"),
        ("call secret {}", "t-123"),
    ],
)
def test_whatever_a_tool_returns_the_model_reads(server: LiveServer, prompt: str, answer: str) -> None:
    reply = post(server, "/v1/responses", {"model": "demo", "input": prompt, "tools": [mcp()]}).json()
    call = next(item for item in reply["output"] if item["type"] == "mcp_call")
    assert answer in json.dumps(call)
    assert reply["status"] == "completed"


def test_a_tool_with_a_wrong_schema_is_offered_without_it(server: LiveServer) -> None:
    body = {"model": "demo", "input": 'call misdescribed {"a":1}', "tools": [mcp()]}
    reply = post(server, "/v1/responses", body).json()
    assert reply["output_text"].endswith("The tool answered: 1")
    forced = body | {"tool_choice": {"type": "mcp", "server_label": "tools", "name": "misdescribed"}}
    assert post(server, "/v1/responses", forced).status_code == 200


def test_a_model_that_never_stops_calling_must_answer(server: LiveServer) -> None:
    reply = post(server, "/v1/responses", {"model": "demo", "input": "loop", "tools": [mcp()]}).json()
    assert [item["type"] for item in reply["output"]].count("mcp_call") == 3
    assert reply["output"][-1]["type"] == "message"
    body = {"model": "demo", "input": "loop", "tools": [mcp()], "max_tool_calls": 1}
    limited = post(server, "/v1/responses", body).json()
    statuses = [item["status"] for item in limited["output"] if item["type"] == "mcp_call"]
    assert statuses == ["completed", "failed", "failed"]
    assert [run["status"] for run in last_record(server)["calls"]] == ["ok", "limit", "limit"]


def test_a_client_that_leaves_cancels_the_call(server: LiveServer, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    body = {"model": "demo", "input": f'call hang {{"marker":"{marker}"}}', "tools": [mcp()], "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/responses", json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        while "mcp_call_arguments.done" not in next(lines):
            pass
        wait_until(marker.exists, "the tool runs")
        assert [one["progress"]["tools"] for one in live_requests(server)] == [["tools.hang"]]
    wait_until(lambda: marker.read_text() == "cancelled", "the server was told")
    wait_until(lambda: last_record(server)["status"] == "cancelled", "the record")
    assert last_record(server)["calls"][0]["status"] == "cancelled"


def test_an_administrator_cancels_a_request_whose_tool_runs(server: LiveServer, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    body = {"model": "demo", "input": f'call hang {{"marker":"{marker}"}}', "tools": [mcp()]}
    replies: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: replies.append(post(server, "/v1/responses", body)))
    thread.start()
    wait_until(marker.exists, "the tool runs")
    (id,) = [one["id"] for one in live_requests(server)]
    cancel = f"{server.url}/v1/admin/requests/{id}/cancel"
    assert httpx.post(cancel, headers=server.owner, timeout=60).status_code == 200
    thread.join(60)
    assert replies[0].status_code == 499
    wait_until(lambda: marker.read_text() == "cancelled", "the server was told")


# --- which servers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "status", "words"),
    [
        (mcp("nobody"), 404, "there is no MCP server 'nobody' here"),
        (mcp("private"), 404, "there is no MCP server 'private' here"),
        (mcp("gone"), 400, "the MCP server 'gone' cannot be reached"),
        (mcp("x", server_url="http://169.254.169.254/mcp"), 403, "mcp.allow_urls"),
        (mcp("x", server_url="file:///etc/passwd"), 400, "is not the http(s) URL"),
        (mcp("tools", authorization="t"), 400, "its own credentials"),
        (mcp(""), 400, "server_label"),
    ],
)
def test_a_server_that_cannot_be_used_is_an_error_of_the_protocol(
    server: LiveServer, tool: dict[str, Any], status: int, words: str
) -> None:
    for streamed in (False, True):
        reply = post(server, "/v1/responses", {"model": "demo", "input": "hi", "tools": [tool], "stream": streamed})
        assert reply.status_code == status
        assert words in reply.json()["error"]["message"]


def test_a_private_address_behind_an_allowed_name_is_refused(http_tools: HttpToolServer) -> None:
    url = http_tools.url.replace("127.0.0.1", "localhost")
    with live_server(config(allow_urls=["localhost"])) as guarded:
        tool = mcp("x", server_url=url)
        reply = post(guarded, "/v1/responses", {"model": "demo", "input": "hi", "tools": [tool]})
    assert reply.status_code == 400
    assert "private address" in reply.json()["error"]["message"]


def test_without_servers_a_request_that_names_one_is_refused() -> None:
    off = config() | {"mcp": {}, "routes": []}
    with live_server(off) as server:
        reply = post(server, "/v1/responses", {"model": "demo", "input": "hi", "tools": [mcp()]})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (400, "mcp_off", "tools")
        body = {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        servers = {"mcp_servers": [{"type": "url", "name": "tools", "url": "https://example.com/mcp"}]}
        error = post(server, "/v1/messages", body | servers).json()["error"]
        assert (error["code"], error["param"]) == ("mcp_off", "mcp_servers")


# --- Messages -------------------------------------------------------------------------------------------------------

SERVERS: Any = [{"type": "url", "name": "tools", "url": "mcp://tools"}]


def test_a_message_has_the_blocks_of_its_calls(messages_client: anthropic.Anthropic) -> None:
    user: Any = {"role": "user", "content": 'call add {"a":1,"b":2}'}
    made = messages_client.beta.messages.create(
        model="demo", max_tokens=500, messages=[user], mcp_servers=SERVERS, betas=["mcp-client-2025-04-04"]
    )
    assert [block.type for block in made.content] == ["text", "mcp_tool_use", "mcp_tool_result", "text"]
    _, use, result, _ = made.content
    assert (use.server_name, use.input) == ("tools", {"a": 1, "b": 2})  # type: ignore[union-attr]
    assert (result.tool_use_id, result.content[0].text, result.is_error) == (use.id, "3", False)  # type: ignore[union-attr, index]
    assert made.stop_reason == "end_turn"
    more = messages_client.beta.messages.create(
        model="demo",
        max_tokens=500,
        messages=[user, {"role": "assistant", "content": made.content}, {"role": "user", "content": "thanks"}],
        mcp_servers=SERVERS,
    )
    assert more.usage.input_tokens < 60  # the rest is cached: it is the same prompt


def test_a_streamed_message_has_the_blocks_of_its_calls(messages_client: anthropic.Anthropic) -> None:
    toolset: Any = {
        "type": "mcp_toolset",
        "mcp_server_name": "tools",
        "default_config": {"enabled": False},
        "configs": {"add": {"enabled": True}},
    }
    with messages_client.beta.messages.stream(
        model="demo",
        max_tokens=500,
        messages=[{"role": "user", "content": "both"}],
        mcp_servers=SERVERS,
        tools=[toolset],
        betas=["mcp-client-2025-11-20"],
    ) as stream:
        events = list(stream)
        made = stream.get_final_message()
    kinds = ["mcp_tool_use", "mcp_tool_use", "mcp_tool_result", "mcp_tool_result", "text"]
    assert [block.type for block in made.content] == kinds
    assert [event.index for event in events if event.type == "content_block_start"] == [0, 1, 2, 3, 4]
    assert made.content[1].input == {"a": 2, "b": 3}  # type: ignore[union-attr]
    hidden = messages_client.beta.messages.create(
        model="demo",
        max_tokens=500,
        messages=[{"role": "user", "content": "call secret {}"}],
        mcp_servers=SERVERS,
        tools=[toolset],
    )
    assert [block.type for block in hidden.content] == ["text"]


def test_a_message_counts_the_tokens_of_the_servers_tools(messages_client: anthropic.Anthropic) -> None:
    ask: Any = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    without = messages_client.beta.messages.count_tokens(**ask)
    with_tools = messages_client.beta.messages.count_tokens(**ask, mcp_servers=SERVERS)
    assert with_tools.input_tokens > without.input_tokens + 50


def test_a_server_that_a_message_cannot_use_is_an_error_of_anthropics(messages_client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no MCP server 'nobody' here"):
        messages_client.beta.messages.create(
            model="demo",
            max_tokens=9,
            messages=[{"role": "user", "content": "hi"}],
            mcp_servers=[{"type": "url", "name": "nobody", "url": "mcp://nobody"}],
        )


# --- a route's servers ----------------------------------------------------------------------------------------------

ANSWER = "I call add for you. \n\nThe tool answered: 3"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_chat_client_of_the_route_sees_only_the_answer(client: openai.OpenAI, streamed: bool) -> None:
    ask: Any = {"model": "with-tools", "messages": [{"role": "user", "content": 'call add {"a":1,"b":2}'}]}
    if streamed:
        chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks if chunk.choices)
        usage: Any = chunks[-1].usage
    else:
        made = client.chat.completions.create(**ask)
        text, usage = made.choices[0].message.content or "", made.usage
        assert made.choices[0].finish_reason == "stop"
        assert made.choices[0].message.tool_calls is None
    assert text == ANSWER
    assert usage.completion_tokens > 20


def test_every_other_protocol_gets_the_route_s_tools_too(server: LiveServer) -> None:
    prompt = 'call add {"a":1,"b":2}'
    turns = [{"role": "user", "content": prompt}]
    ollama = post(server, "/api/chat", {"model": "with-tools", "messages": turns, "stream": False}).json()
    assert ollama["message"]["content"] == ANSWER
    contents = [{"role": "user", "parts": [{"text": prompt}]}]
    gemini = post(server, "/v1beta/models/with-tools:generateContent", {"contents": contents}).json()
    assert "".join(part["text"] for part in gemini["candidates"][0]["content"]["parts"]) == ANSWER
    message = post(server, "/v1/messages", {"model": "with-tools", "max_tokens": 500, "messages": turns}).json()
    assert {block["type"] for block in message["content"]} == {"text"}
    response = post(server, "/v1/responses", {"model": "with-tools", "input": prompt}).json()
    assert [item["type"] for item in response["output"]] == ["message", "message"]


def test_a_chat_client_gets_its_own_call_and_the_servers_call_is_left(
    server: LiveServer, client: openai.OpenAI
) -> None:
    tools: Any = [{"type": "function", "function": WEATHER}]
    turns: list[Any] = [{"role": "user", "content": "mixed"}]
    made = client.chat.completions.create(model="with-tools", messages=turns, tools=tools).choices[0]
    assert [call.function.name for call in made.message.tool_calls or ()] == ["get_weather"]  # type: ignore[union-attr]
    assert made.finish_reason == "tool_calls"
    assert [run["status"] for run in last_record(server)["calls"]] == ["left_to_client"]
    turns += [made.message, {"role": "tool", "tool_call_id": made.message.tool_calls[0].id, "content": "Rome: sun"}]  # type: ignore[index]
    done = client.chat.completions.create(model="with-tools", messages=turns, tools=tools)
    assert done.choices[0].message.content == "It is sunny."


def test_no_other_model_repeats_a_request_whose_tool_has_run(http_tools: HttpToolServer) -> None:
    call = {"call": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    fails = [
        {"result": "3", "steps": [{"fail": "out of memory", "kind": "overloaded"}]},
        {"when": "^quiet", "steps": [call]},
        {"steps": [{"fail": "out of memory", "kind": "overloaded"}]},
    ]
    route = {"match": "two", "model": "shaky", "fallback": "demo", "mcp": "remote"}
    both = {
        "models": {"shaky": {"backend": "fake", "token_delay": 0, "script": fails}, "demo": {"backend": "fake"}},
        "routes": [route],
        "mcp": {"servers": {"remote": {"url": http_tools.url}}},
    }
    with live_server(both) as server:
        ask = {"model": "two", "messages": [{"role": "user", "content": "quiet"}]}
        assert post(server, "/v1/chat/completions", ask).status_code == 503
        assert [run["status"] for run in last_record(server)["calls"]] == ["ok"]
        ask = {"model": "two", "messages": [{"role": "user", "content": 'call add {"a":1,"b":2}'}]}
        reply = post(server, "/v1/chat/completions", ask)  # no tool has run: the other model answers
        assert reply.json()["choices"][0]["message"]["content"] == ANSWER


def test_several_replies_get_no_tools_of_the_route(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="with-tools", messages=[{"role": "user", "content": "call add {}"}], n=2
    )
    assert len(made.choices) == 2


# --- the record, and the end ----------------------------------------------------------------------------------------


def test_calls_are_counted_and_timed(server: LiveServer, client: openai.OpenAI) -> None:
    client.responses.create(model="demo", input='call add {"a":1,"b":2}', tools=[mcp()])  # type: ignore[list-item]
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert 'modelyard_tool_calls_total{server="tools",status="ok"}' in text
    assert 'modelyard_tool_call_seconds_count{server="tools"}' in text


def children() -> set[psutil.Process]:
    return set(psutil.Process(os.getpid()).children(recursive=True))


def test_a_servers_program_ends_with_the_gateway() -> None:
    before = children()
    with live_server(config()) as server:
        post(server, "/v1/responses", {"model": "demo", "input": "hi", "tools": [mcp()]})
        started = children() - before
        assert any(PROGRAM in process.cmdline() for process in started)
    wait_until(lambda: not any(process.is_running() for process in started), "the program ended")
