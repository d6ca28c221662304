"""A `vllm serve` of ours, as far as it can be shown without vLLM: a stand-in that echoes, and a real llama-server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from modelyard.engines.vllm_serve.outgoing import body, counting

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
from modelyard.core.events import BlockDelta, Event, Failed, collect_reply
from modelyard.core.request import Constraint, Image, Message, Reasoning, Request, Sampling, Text, Tool, ToolChoice
from modelyard.engines.vllm_serve import Options
from modelyard.engines.vllm_serve.server import find_binary
from tests.engines.vllm_serve import helpers
from tests.engines.vllm_serve.helpers import behaviour, chat_request, engine, read_events, recorded, running_engine

ROOT = Path(__file__).parent.parent.parent.parent


async def test_it_answers_counts_and_tells_its_log_and_its_process(tmp_path: Path) -> None:
    async with running_engine(vllm_serve_env=behaviour("", tmp_path / "notes")) as it:
        assert isinstance(it, ChatEngine)
        pid = it.pid or 0
        reply = collect_reply(await read_events(it, chat_request("What is up?", max_tokens=4)))
        assert reply.text.split() == ["What", "is", "up?", "one"]
        assert reply.finished.usage.prompt == await it.count(chat_request("What is up?"))
        assert (it.stats().reused_tokens, it.stats().evaluated_tokens) == (3, reply.finished.usage.prompt - 3)
        assert any("Starting vLLM" in line for line in it.log_tail())
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)
    assert not it.lost.done(), "a stop is no death"
    (argv,) = recorded(tmp_path / "notes", "argv")
    assert argv[:2] == ["serve", "tests/echo"]
    trial, request = recorded(tmp_path / "notes", "request")
    assert trial["max_tokens"] == 1
    assert request["model"] == trial["model"] == "echo"


async def test_a_port_works_as_well_as_a_socket_and_lets_nobody_else_in(tmp_path: Path) -> None:
    async with running_engine(vllm_serve_host="127.0.0.1", vllm_serve_env=behaviour("", tmp_path / "notes")) as it:
        assert collect_reply(await read_events(it, chat_request())).text
        place = it._running.client.place
        assert place.base_url.startswith("http://127.0.0.1:")
        assert place.headers["authorization"].startswith("Bearer ")
    (argv,) = recorded(tmp_path / "notes", "argv")
    assert not any(place.headers["authorization"].removeprefix("Bearer ") in argument for argument in argv)


async def test_a_real_model_answers_behind_the_same_command_line() -> None:
    async with running_engine(**helpers.real_model()) as it:
        reply = collect_reply(await read_events(it, chat_request("What is the capital of France?", max_tokens=12)))
        assert reply.text
        assert 0 < reply.finished.usage.output <= 12
        generation = it.chat(chat_request("Count to a thousand.", max_tokens=400))
        await until_it_speaks(generation)
        os.kill(it.pid or 0, signal.SIGKILL)
        last = [event async for batch in generation for event in batch][-1]
        assert last == Failed(await it.lost)


async def test_a_prompt_beyond_its_window_is_an_overflow_with_true_numbers() -> None:
    async with running_engine({"main": CacheInfo(64, 1)}) as it:
        (last,) = await read_events(it, chat_request("word " * 100))
        assert isinstance(last, Failed)
        assert isinstance(last.error, ContextOverflow)
        assert (last.error.window, last.error.prompt_tokens) == (64, await it.count(chat_request("word " * 100)))


async def until_it_speaks(generation: object) -> list[Event]:
    got: list[Event] = []
    while not any(isinstance(event, BlockDelta) for event in got):
        got += await anext(generation)  # type: ignore[call-overload]
    return got


async def test_cancelling_ends_the_answer_there_too() -> None:
    async with running_engine({"main": CacheInfo(512, 1)}) as it:
        generation = it.chat(chat_request("Endless words"))
        got = await until_it_speaks(generation)
        generation.cancel()
        got += [event async for batch in generation for event in batch]
        assert isinstance(got[-1], Failed)
        assert isinstance(got[-1].error, Cancelled)
        assert collect_reply(await read_events(it, chat_request())).text


# --- its death --------------------------------------------------------------------------------------------------------


async def test_a_kill_ends_its_streams_and_resolves_lost_with_the_reason() -> None:
    async with running_engine() as it:
        generation = it.chat(chat_request("Endless words"))
        await until_it_speaks(generation)
        os.kill(it.pid or 0, signal.SIGKILL)
        last = [event async for batch in generation for event in batch][-1]
        death = await it.lost
        assert isinstance(death, Unavailable)
        assert "was killed by SIGKILL" in death.message
        assert last == Failed(death)
        assert await read_events(it, chat_request()) == [Failed(death)]


@pytest.mark.parametrize("how", ["dies_at_request", "engine_dies_at_request"])
async def test_one_that_says_it_is_ready_and_dies_at_the_first_request_never_counts_as_loaded(how: str) -> None:
    error = await refused(vllm_serve_env=behaviour(how))
    assert "ValueError: this machine has no such instruction" in error.message
    assert error.code == "load_failed"


@pytest.mark.parametrize("how", ["dies_at_request", "engine_dies_at_request"])
async def test_without_a_trial_the_first_request_reports_the_death_with_its_last_words(how: str) -> None:
    async with running_engine(vllm_serve_env=behaviour(how), vllm_serve_trial=False) as it:
        (last,) = await read_events(it, chat_request())
        assert last == Failed(await it.lost)
        assert "ValueError: this machine has no such instruction" in (await it.lost).message


async def test_what_it_has_forked_ends_with_it_however_it_ends(tmp_path: Path) -> None:
    for how in ("closed", "killed"):
        notes = tmp_path / how
        async with running_engine(vllm_serve_env=behaviour("forks", notes)) as it:
            child = psutil.Process(recorded(notes, "child")[0])
            if how == "killed":
                os.kill(it.pid or 0, signal.SIGKILL)
                await it.lost
        await asyncio.to_thread(child.wait, 60)


# --- what keeps it from loading ---------------------------------------------------------------------------------------


async def refused(**chosen: object) -> ModelyardError:
    it = engine(**chosen)  # type: ignore[arg-type]
    with pytest.raises(ModelyardError) as caught:
        await it.open(lambda *_: None)
    assert it.pid is None or not psutil.pid_exists(it.pid)
    await it.close()
    return caught.value


async def test_a_load_that_fails_is_told_by_its_root_cause() -> None:
    error = await refused(vllm_serve_env=behaviour("fails_to_start"))
    why = "ValueError: this machine has no such instruction"
    assert error.message == f"vllm serve ended with exit code 1: {why} (it was to load tests/echo)"


async def test_an_argument_that_it_does_not_know_is_told() -> None:
    assert "unrecognized arguments: --nonsense" in (await refused(vllm_serve_extra_args=["--nonsense"])).message


async def test_a_load_that_takes_too_long_is_given_up() -> None:
    assert isinstance(await refused(vllm_serve_env=behaviour("slow"), vllm_serve_start_timeout_s=0.001), Timeout)


async def test_a_program_that_is_not_there_is_named() -> None:
    assert "/no/such/program" in (await refused(vllm_serve_binary="/no/such/program")).message


def test_the_program_is_looked_for_on_the_path_and_then_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    unnamed = helpers.options(vllm_serve_binary=None)
    with pytest.raises(NotFound, match="make vllm-env"):
        find_binary(unnamed)
    cached = tmp_path / "vllm-env" / "bin" / "vllm"
    cached.parent.mkdir(parents=True)
    cached.touch(mode=0o755)
    assert find_binary(unnamed) == str(cached)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").touch(mode=0o755)
    assert find_binary(unnamed) == str(tmp_path / "bin" / "vllm")


async def test_opening_tells_how_far_it_is_and_can_be_given_up(tmp_path: Path) -> None:
    it = engine()
    told: list[tuple[float, str]] = []
    await it.open(lambda far, what: told.append((far, what)))
    await it.close()
    assert [far for far, _ in told] == sorted({far for far, _ in told})
    assert told[0] == (0.0, "starting vllm serve")
    assert told[-1] == (1.0, "ready")
    slow, began = engine(vllm_serve_env=behaviour("slow")), asyncio.Event()
    task = asyncio.create_task(slow.open(lambda far, _: began.set() if far else None))
    await began.wait()
    pid = slow.pid or 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not psutil.pid_exists(pid)


async def test_several_caches_are_one_and_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with running_engine({"main": CacheInfo(256, 1), "fast": CacheInfo(128, 1)}) as it:
            assert collect_reply(await read_events(it, chat_request())).text
    assert "one KV cache for the caches main, fast" in caplog.text


GATEWAY = """
import asyncio, sys
from tests.engines.vllm_serve.helpers import engine, mood
from pathlib import Path

async def main():
    it = engine(vllm_serve_env=mood("forks", Path(sys.argv[1])))
    await it.open(lambda *_: None)
    print(it.pid, flush=True)
    await it.lost

asyncio.run(main())
"""


def test_nothing_of_it_outlives_a_gateway_that_is_killed(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", GATEWAY, str(tmp_path / "notes")]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout is not None
        family = [
            psutil.Process(int(gateway.stdout.readline())),
            psutil.Process(recorded(tmp_path / "notes", "child")[0]),
        ]
        gateway.kill()
    _, alive = psutil.wait_procs(family, 60)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []


# A request in the words of vLLM's server.

PIXEL = "data:image/png;base64,iVBORw0KGgo="


def sent(request: Request, **options: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(body(request, Options(vllm_model="m", **options), "served", 4096))
    return decoded


def test_it_is_always_a_stream_that_tells_its_usage_under_the_servers_name_for_the_model() -> None:
    assert sent(chat_request("Hello", sampling=Sampling(), max_tokens=None)) == {
        "model": "served",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_only_samplers_that_it_has_are_sent() -> None:
    sampling = Sampling(temperature=0.5, top_k=3, min_p=0.1, repetition_penalty=1.2, beam_size=4, dry_multiplier=0.8)
    got = sent(chat_request(sampling=sampling))
    assert [got[name] for name in ("temperature", "top_k", "min_p", "repetition_penalty")] == [0.5, 3, 0.1, 1.2]
    assert not got.keys() & {"beam_size", "dry_multiplier"}


def test_what_is_the_gateways_own_stays_here() -> None:
    mine: dict[str, Any] = {"session": "s", "user": "u", "metadata": {"a": 1}, "store": True, "previous": "resp_1"}
    got = sent(chat_request(**mine, priority="background", n=4))
    assert not got.keys() & {"prompt_cache_key", "user", "metadata", "store", "priority", "n"}


@pytest.mark.parametrize(
    ("setting", "wish", "sent_as"), [(None, None, None), (False, None, False), (False, True, True)]
)
def test_the_models_own_switch_holds_where_the_client_has_no_wish(
    setting: bool | None, wish: bool | None, sent_as: bool | None
) -> None:
    got = sent(chat_request(reasoning=Reasoning(enabled=wish)), enable_thinking=setting)
    assert got.get("chat_template_kwargs", {}).get("enable_thinking") == sent_as


def test_images_arrive_as_data() -> None:
    request = Request(model="m", messages=(Message("user", (Text("Look"), Image(PIXEL))),))
    assert sent(request)["messages"][0]["content"][1] == {"type": "image_url", "image_url": {"url": PIXEL}}


@pytest.mark.parametrize(("kind", "field"), [("gbnf", "grammar"), ("lark", "grammar"), ("regex", "regex")])
def test_grammars_go_by_its_own_name(kind: Any, field: str) -> None:
    got = sent(chat_request(constraint=Constraint(kind, "a+")))
    assert got["structured_outputs"] == {field: "a+"}
    assert not got.keys() & {"grammar", "lark", "regex"}


def test_schemas_pass_as_they_do_everywhere() -> None:
    schema = sent(chat_request(constraint=Constraint("json_schema", '{"type":"object"}')))
    assert schema["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert sent(chat_request(constraint=Constraint("json_object")))["response_format"] == {"type": "json_object"}


@pytest.mark.parametrize(
    ("mode", "marks"), [("auto", [None, False]), ("required", [True, False]), ("named", [True, False])]
)
def test_a_call_that_is_demanded_is_held_to_its_schema(mode: Any, marks: list[bool | None]) -> None:
    tools = (Tool("a", parameters={"type": "object"}), Tool("b", strict=False))
    got = sent(chat_request(tools=tools, tool_choice=ToolChoice(mode, "a" if mode == "named" else None)))
    assert [tool["function"].get("strict") for tool in got["tools"]] == marks


def test_an_adapter_is_a_model_of_its_own_there() -> None:
    got = sent(chat_request(lora_adapter="law"), lora={"law": "/l"})
    assert got["model"] == "law"
    assert "lora_adapter" not in got
    with pytest.raises(NotFound, match="'med'"):
        sent(chat_request(lora_adapter="med"), lora={"law": "/l"})


def test_an_answer_that_has_begun_goes_on() -> None:
    messages = (Message("user", (Text("Count"),)), Message("assistant", (Text("One, two,"),)))
    request = Request(model="m", messages=messages)
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert going_on.items() <= sent(request).items()
    counted = json.loads(counting(request, Options(vllm_model="m"), "served"))
    assert going_on.items() <= counted.items()
    assert not going_on.keys() & sent(chat_request()).keys()


def test_a_longest_answer_is_never_longer_than_the_window() -> None:
    assert [sent(chat_request(max_tokens=most))["max_tokens"] for most in (5, 4096, 32000)] == [5, 4096, 4096]


def test_what_is_counted_holds_what_has_tokens_and_no_more() -> None:
    told = json.loads(counting(chat_request("Hello", stop=("x",), logprobs=2), Options(vllm_model="m"), "served"))
    assert told == {"model": "served", "messages": [{"role": "user", "content": "Hello"}]}


def test_bare_prompts_are_refused() -> None:
    with pytest.raises(Unsupported, match="conversations only"):
        sent(Request(model="m", prompts=("Once",)))
