"""The vllm serve engine without vLLM: its requests, a fake server that echoes, and a real llama-server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from msgspec.structs import replace

from modelyard.core.engine import CacheInfo, ChatEngine
from modelyard.core.errors import (
    Cancelled,
    ContextOverflow,
    ModelyardError,
    NotFound,
    Timeout,
    Unavailable,
    Unsupported,
)
from modelyard.core.events import Failed, collect_reply
from modelyard.core.request import (
    Constraint,
    EmbeddingRequest,
    Image,
    Message,
    Reasoning,
    Request,
    RerankRequest,
    Sampling,
    Text,
    Tool,
    ToolChoice,
)
from modelyard_vllm.serve import Options
from modelyard_vllm.serve.engine import VllmServeEngine, chat_body, tokenize_body
from modelyard_vllm.serve.server import find_binary
from tests.engines.llama_server.helpers import read_rest, read_until_delta
from tests.engines.vllm_serve import helpers
from tests.engines.vllm_serve.helpers import (
    behaviour,
    chat_request,
    engine,
    read_events,
    recorded,
    running_engine,
    wait_exited,
)

on_shared_loop = pytest.mark.asyncio(loop_scope="module")
ROOT = Path(__file__).parent.parent.parent.parent
PIXEL = "data:image/png;base64,iVBORw0KGgo="


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[VllmServeEngine]:
    """A server with one slot of 64 tokens for the tests that leave it running."""
    async with running_engine({"main": CacheInfo(64, 1)}) as made:
        yield made


# --- a running server -------------------------------------------------------------------------------------------------


async def test_answer_has_text_and_usage(tmp_path: Path) -> None:
    async with running_engine(vllm_serve_env=behaviour("", tmp_path / "notes")) as made:
        assert isinstance(made, ChatEngine)
        pid = made.pid or 0
        reply = collect_reply(await read_events(made, chat_request("What is up?", max_tokens=4)))
        assert reply.text.split() == ["What", "is", "up?", "one"]
        assert reply.finished.usage.prompt == await made.count(chat_request("What is up?"))
        assert (made.stats().reused_tokens, made.stats().evaluated_tokens) == (3, reply.finished.usage.prompt - 3)
        assert any("Starting vLLM" in line for line in made.log_tail())
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)
    assert not made.lost.done(), "closing does not lose the engine"
    (argv,) = recorded(tmp_path / "notes", "argv")
    assert argv[:2] == ["serve", "tests/echo"]
    trial, request = recorded(tmp_path / "notes", "request")
    assert trial["max_tokens"] == 1
    assert request["model"] == trial["model"] == "echo"


async def test_server_on_a_port_needs_a_key_that_is_not_on_its_command_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caches = {"main": CacheInfo(256, 1), "fast": CacheInfo(128, 1)}
    env = behaviour("", tmp_path / "notes")
    with caplog.at_level(logging.WARNING):
        async with running_engine(caches, vllm_serve_host="127.0.0.1", vllm_serve_env=env) as made:
            assert collect_reply(await read_events(made, chat_request())).text
            address = made.server.upstream.address
    assert address.base_url.startswith("http://127.0.0.1:")
    scheme, _, key = address.headers["authorization"].partition(" ")
    assert scheme == "Bearer"
    (argv,) = recorded(tmp_path / "notes", "argv")
    assert not any(key in argument for argument in argv)
    assert "one KV cache for the caches main, fast" in caplog.text


async def test_real_model_answers_behind_the_same_command_line() -> None:
    async with running_engine(**helpers.real_model()) as made:
        reply = collect_reply(await read_events(made, chat_request("What is the capital of France?", max_tokens=12)))
        assert reply.text
        assert 0 < reply.finished.usage.output <= 12
        generation = made.chat(chat_request("Count to a thousand.", max_tokens=400))
        await read_until_delta(generation)
        os.kill(made.pid or 0, signal.SIGKILL)
        assert (await read_rest(generation))[-1] == Failed(await made.lost)


@on_shared_loop
async def test_prompt_beyond_the_window_is_an_overflow_with_true_numbers(shared: VllmServeEngine) -> None:
    (last,) = await read_events(shared, chat_request("word " * 100))
    assert isinstance(last, Failed)
    assert isinstance(last.error, ContextOverflow)
    assert (last.error.window, last.error.prompt_tokens) == (64, await shared.count(chat_request("word " * 100)))


@on_shared_loop
async def test_cancel_ends_the_answer_of_the_server(shared: VllmServeEngine) -> None:
    generation = shared.chat(chat_request("Endless words"))
    events = await read_until_delta(generation)
    generation.cancel()
    events += await read_rest(generation)
    assert isinstance(events[-1], Failed)
    assert isinstance(events[-1].error, Cancelled)
    assert collect_reply(await read_events(shared, chat_request())).text


# --- exits ------------------------------------------------------------------------------------------------------------


async def test_killed_server_fails_its_streams_and_resolves_lost() -> None:
    async with running_engine() as made:
        generation = made.chat(chat_request("Endless words"))
        await read_until_delta(generation)
        os.kill(made.pid or 0, signal.SIGKILL)
        last = (await read_rest(generation))[-1]
        error = await made.lost
        assert isinstance(error, Unavailable)
        assert "was killed by SIGKILL" in error.message
        assert last == Failed(error)
        assert await read_events(made, chat_request()) == [Failed(error)]


@pytest.mark.parametrize("how", ["dies_at_request", "engine_dies_at_request"])
async def test_server_that_dies_at_the_first_request_is_never_ready(how: str) -> None:
    error = await load_error(vllm_serve_env=behaviour(how))
    assert "ValueError: this machine has no such instruction" in error.message
    assert error.code == "load_failed"


@pytest.mark.parametrize("how", ["dies_at_request", "engine_dies_at_request"])
async def test_without_a_trial_the_first_request_reports_the_exit(how: str) -> None:
    async with running_engine(vllm_serve_env=behaviour(how), vllm_serve_trial=False) as made:
        (last,) = await read_events(made, chat_request())
        assert last == Failed(await made.lost)
        assert "ValueError: this machine has no such instruction" in (await made.lost).message


async def test_children_of_the_server_end_with_it(tmp_path: Path) -> None:
    for how in ("closed", "killed"):
        notes = tmp_path / how
        async with running_engine(vllm_serve_env=behaviour("forks", notes)) as made:
            child = psutil.Process(recorded(notes, "child")[0])
            if how == "killed":
                os.kill(made.pid or 0, signal.SIGKILL)
                await made.lost
        await asyncio.to_thread(wait_exited, [child])


GATEWAY = """
import asyncio, sys
from tests.engines.vllm_serve.helpers import behaviour, engine
from pathlib import Path

async def main():
    made = engine(vllm_serve_env=behaviour("forks", Path(sys.argv[1])))
    await made.open(lambda *_: None)
    print(made.pid, flush=True)
    await made.lost

asyncio.run(main())
"""


def test_no_process_outlives_a_killed_gateway(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", GATEWAY, str(tmp_path / "notes")]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout is not None
        pids = [int(gateway.stdout.readline()), recorded(tmp_path / "notes", "child")[0]]
        processes = [psutil.Process(pid) for pid in pids]
        gateway.kill()
    wait_exited(processes)


# --- loads ------------------------------------------------------------------------------------------------------------


async def load_error(**chosen: object) -> ModelyardError:
    made = engine(**chosen)  # type: ignore[arg-type]
    with pytest.raises(ModelyardError) as caught:
        await made.open(lambda *_: None)
    assert made.pid is None or not psutil.pid_exists(made.pid)
    await made.close()
    return caught.value


async def test_failed_load_is_reported_with_its_root_cause() -> None:
    error = await load_error(vllm_serve_env=behaviour("fails_to_start"))
    reason = "ValueError: this machine has no such instruction"
    assert error.message == f"vllm serve ended with exit code 1: {reason} (while loading tests/echo)"


async def test_unknown_argument_is_reported() -> None:
    assert "unrecognized arguments: --nonsense" in (await load_error(vllm_serve_extra_args=["--nonsense"])).message


async def test_load_that_takes_too_long_times_out() -> None:
    assert isinstance(await load_error(vllm_serve_env=behaviour("slow"), vllm_serve_start_timeout_s=0.001), Timeout)


async def test_missing_program_is_named() -> None:
    assert "/no/such/program" in (await load_error(vllm_serve_binary="/no/such/program")).message


def test_program_is_searched_on_the_path_and_then_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(NotFound, match="make vllm-env"):
        find_binary()
    cached = tmp_path / "vllm-env" / "bin" / "vllm"
    cached.parent.mkdir(parents=True)
    cached.touch(mode=0o755)
    assert find_binary() == str(cached)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").touch(mode=0o755)
    assert find_binary() == str(tmp_path / "bin" / "vllm")


async def test_load_reports_increasing_progress() -> None:
    made, reports = engine(), list[tuple[float, str]]()
    await made.open(lambda done, stage: reports.append((done, stage)))
    await made.close()
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert reports[0] == (0.0, "starting vllm serve")
    assert reports[-1] == (1.0, "ready")


async def test_cancelled_load_stops_the_server() -> None:
    made, started = engine(vllm_serve_env=behaviour("slow")), asyncio.Event()
    task = asyncio.create_task(made.open(lambda done, _: started.set() if done else None))
    await started.wait()
    pid = made.pid or 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not psutil.pid_exists(pid)


# --- requests ---------------------------------------------------------------------------------------------------------


def body(request: Request, **options: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(chat_body(request, Options(vllm_model="m", **options), "served", 4096))
    return decoded


def test_request_is_a_stream_with_usage_for_the_served_model() -> None:
    assert body(chat_request("Hello", sampling=Sampling(), max_tokens=None)) == {
        "model": "served",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_only_sampling_fields_of_vllm_are_sent() -> None:
    sampling = Sampling(temperature=0.5, top_k=3, min_p=0.1, repetition_penalty=1.2, beam_size=4, dry_multiplier=0.8)
    sent = body(chat_request(sampling=sampling))
    assert [sent[name] for name in ("temperature", "top_k", "min_p", "repetition_penalty")] == [0.5, 3, 0.1, 1.2]
    assert not sent.keys() & {"beam_size", "dry_multiplier"}


def test_prefixes_are_reused_inside_a_scope_only() -> None:
    assert body(chat_request(kv_scope="ann"))["cache_salt"] == "ann"
    assert "cache_salt" not in body(chat_request())


def test_fields_of_the_gateway_are_not_sent() -> None:
    own: dict[str, Any] = {"session": "s", "user": "u", "metadata": {"a": 1}, "store": True, "previous": "resp_1"}
    sent = body(chat_request(**own, priority="background", n=4))
    assert not sent.keys() & {"prompt_cache_key", "user", "metadata", "store", "priority", "n"}


@pytest.mark.parametrize(
    ("default", "requested", "sent"), [(None, None, None), (False, None, False), (False, True, True)]
)
def test_default_of_the_model_holds_if_the_request_does_not_say(
    default: bool | None, requested: bool | None, sent: bool | None
) -> None:
    made = body(chat_request(reasoning=Reasoning(enabled=requested)), enable_thinking=default)
    assert made.get("chat_template_kwargs", {}).get("enable_thinking") == sent


def test_images_are_sent_as_data_urls() -> None:
    request = Request(model="m", messages=(Message("user", (Text("Look"), Image(PIXEL))),))
    assert body(request)["messages"][0]["content"][1] == {"type": "image_url", "image_url": {"url": PIXEL}}


@pytest.mark.parametrize(("kind", "field"), [("gbnf", "grammar"), ("lark", "grammar"), ("regex", "regex")])
def test_grammars_are_structured_outputs(kind: Any, field: str) -> None:
    sent = body(chat_request(constraint=Constraint(kind, "a+")))
    assert sent["structured_outputs"] == {field: "a+"}
    assert not sent.keys() & {"grammar", "lark", "regex"}


def test_schemas_are_response_formats() -> None:
    schema = body(chat_request(constraint=Constraint("json_schema", '{"type":"object"}')))
    assert schema["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert body(chat_request(constraint=Constraint("json_object")))["response_format"] == {"type": "json_object"}


@pytest.mark.parametrize(
    ("mode", "strict"), [("auto", [None, False]), ("required", [True, False]), ("named", [True, False])]
)
def test_forced_calls_are_strict(mode: Any, strict: list[bool | None]) -> None:
    tools = (Tool("a", parameters={"type": "object"}), Tool("b", strict=False))
    sent = body(chat_request(tools=tools, tool_choice=ToolChoice(mode, "a" if mode == "named" else None)))
    assert [tool["function"].get("strict") for tool in sent["tools"]] == strict


def test_adapter_is_sent_as_the_model() -> None:
    sent = body(chat_request(lora_adapter="law"), lora={"law": "/l"})
    assert sent["model"] == "law"
    assert "lora_adapter" not in sent
    with pytest.raises(NotFound, match="'med'"):
        body(chat_request(lora_adapter="med"), lora={"law": "/l"})


def test_final_assistant_message_is_continued() -> None:
    messages = (Message("user", (Text("Count"),)), Message("assistant", (Text("One, two,"),)))
    request = Request(model="m", messages=messages)
    continuation = {"continue_final_message": True, "add_generation_prompt": False}
    assert continuation.items() <= body(request).items()
    counted = json.loads(tokenize_body(request, Options(vllm_model="m"), "served"))
    assert continuation.items() <= counted.items()
    assert not continuation.keys() & body(chat_request()).keys()


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({"continue_final_message": "content"}, {"continue_final_message": True, "add_generation_prompt": False}),
        ({"continue_final_message": False}, {"continue_final_message": False}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    ],
)
def test_the_end_of_the_prompt_is_as_the_client_says(fields: dict[str, Any], sent: dict[str, bool]) -> None:
    request = Request(model="m", messages=(Message("assistant", (Text("One,"),)),), **fields)
    names = {"continue_final_message", "add_generation_prompt"}
    counted = json.loads(tokenize_body(request, Options(vllm_model="m"), "served"))
    for made in (body(request), counted):
        assert {name: made[name] for name in names & made.keys()} == sent


def test_max_tokens_is_limited_to_the_window() -> None:
    assert [body(chat_request(max_tokens=count))["max_tokens"] for count in (5, 4096, 32000)] == [5, 4096, 4096]


def test_tokenize_body_has_only_fields_with_tokens() -> None:
    request = chat_request("Hello", stop=("x",), logprobs=2)
    sent = json.loads(tokenize_body(request, Options(vllm_model="m"), "served"))
    assert sent == {"model": "served", "messages": [{"role": "user", "content": "Hello"}]}


def test_bare_prompts_are_sent_to_completions_with_vllms_fields() -> None:
    bare = Request(
        model="m", prompts=((1, 2),), max_tokens=9000, kv_scope="k", constraint=Constraint("json_schema", "{}")
    )
    assert body(bare) == {
        "model": "served",
        "prompt": [1, 2],
        "max_tokens": 4096,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "k",
        "structured_outputs": {"json": {}},
    }
    assert body(replace(bare, constraint=Constraint("regex", "a+")))["structured_outputs"] == {"regex": "a+"}


@on_shared_loop
async def test_a_server_of_a_generating_model_neither_embeds_nor_ranks(shared: VllmServeEngine) -> None:
    with pytest.raises(Unsupported) as caught:
        await shared.embed_inputs(EmbeddingRequest(model="m", inputs=("a",)))
    assert caught.value.code == "embeddings_unsupported"
    with pytest.raises(Unsupported) as caught:
        await shared.rerank(RerankRequest(model="m", query="q", documents=("a",)))
    assert caught.value.code == "rerank_unsupported"
