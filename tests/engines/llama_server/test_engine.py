"""A real llama-server with a real model: started, asked, killed, stopped."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from modelyard.engines.llama_server.outgoing import body

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
from modelyard.core.request import Constraint, Image, Message, Reasoning, Request, Sampling, Text
from modelyard.engines.llama_server import Options
from modelyard.engines.llama_server.server import find_binary
from modelyard.library.default_model import fetch
from modelyard.tokenizer.gguf import GgufTokenizer
from tests.engines.llama_server import helpers
from tests.engines.llama_server.helpers import chat_request, engine, read_events, running_engine


async def test_it_answers_counts_and_tells_its_log_and_its_process() -> None:
    async with running_engine() as it:
        assert isinstance(it, ChatEngine)
        reply = collect_reply(await read_events(it, chat_request("What is the capital of France?", max_tokens=12)))
        assert reply.text
        assert reply.finished.usage.prompt == await it.count(chat_request("What is the capital of France?"))
        assert reply.finished.usage.output <= 12
        assert any("listening" in line for line in it.log_tail())
        assert len(it.log_tail(2)) == 2
        assert psutil.pid_exists(it.pid or 0)
    assert not psutil.pid_exists(it.pid or 0)
    assert not it.lost.done(), "a stop is no death"


async def test_it_counts_as_the_models_own_vocabulary_does() -> None:
    async with running_engine() as it:
        rendered = (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"
        )
        assert await it.count(chat_request()) == len(GgufTokenizer(fetch()).encode(rendered))


async def test_a_port_works_as_well_as_a_socket_and_lets_nobody_else_in() -> None:
    async with running_engine(llama_server_host="127.0.0.1") as it:
        assert collect_reply(await read_events(it, chat_request())).text
        (told,) = [line for line in it.log_tail() if "listening" in line]
    assert "127.0.0.1" in told


async def test_a_schema_is_kept() -> None:
    async with running_engine() as it:
        schema = '{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"],"additionalProperties":false}'
        reply = collect_reply(
            await read_events(
                it, chat_request("Give a number.", constraint=Constraint("json_schema", schema), max_tokens=40)
            )
        )
    assert reply.text.replace(" ", "").replace("\n", "").startswith('{"n":')


async def test_a_prompt_beyond_its_window_is_an_overflow_with_true_numbers() -> None:
    async with running_engine({"main": CacheInfo(256, 2)}) as it:
        (last,) = await read_events(it, chat_request("word " * 400))
        assert isinstance(last, Failed)
        assert isinstance(last.error, ContextOverflow)
        assert last.error.window == 256
        assert last.error.prompt_tokens == await it.count(chat_request("word " * 400))


async def until_it_speaks(generation: object) -> list[Event]:
    got: list[Event] = []
    while not any(isinstance(event, BlockDelta) for event in got):
        got += await anext(generation)  # type: ignore[call-overload]
    return got


async def test_cancelling_stops_it_and_frees_its_slot_for_the_next() -> None:
    async with running_engine({"main": CacheInfo(512, 1)}) as it:
        generation = it.chat(chat_request("Count to a thousand.", max_tokens=400))
        got = await until_it_speaks(generation)
        generation.cancel()
        got += [event async for batch in generation for event in batch]
        assert isinstance(got[-1], Failed)
        assert isinstance(got[-1].error, Cancelled)
        assert collect_reply(await read_events(it, chat_request())).text


async def test_a_kill_ends_its_streams_and_resolves_lost_with_the_reason() -> None:
    async with running_engine() as it:
        generation = it.chat(chat_request("Count to a thousand.", max_tokens=400))
        await until_it_speaks(generation)
        os.kill(it.pid or 0, signal.SIGKILL)
        last = [event async for batch in generation for event in batch][-1]
        death = await it.lost
        assert isinstance(death, Unavailable)
        assert "was killed by SIGKILL" in death.message
        assert last == Failed(death)
        assert await read_events(it, chat_request()) == [Failed(death)]


async def test_a_kill_while_nothing_runs_is_noticed_without_asking() -> None:
    async with running_engine() as it:
        os.kill(it.pid or 0, signal.SIGKILL)
        assert "SIGKILL" in (await it.lost).message


# --- what keeps it from loading ---------------------------------------------------------------------------------------


async def refused(**options: object) -> ModelyardError:
    it = engine(**options)  # type: ignore[arg-type]
    with pytest.raises(ModelyardError) as caught:
        await it.open(lambda *_: None)
    assert it.pid is None or not psutil.pid_exists(it.pid)
    await it.close()
    return caught.value


@pytest.mark.parametrize("kept", [0, 100, 1_000_000])
async def test_a_broken_model_is_named_with_the_programs_own_reason(tmp_path: Path, kept: int) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(fetch().read_bytes()[:kept])
    error = await refused(path=str(broken))
    assert str(broken) in error.message
    assert "fail" in error.message
    assert "exit code 1" in error.message


async def test_a_missing_model_is_named(tmp_path: Path) -> None:
    assert isinstance(await refused(path=str(tmp_path / "none.gguf")), NotFound)


async def test_an_argument_that_it_does_not_know_is_told() -> None:
    assert "invalid argument: --nonsense" in (await refused(llama_server_extra_args=["--nonsense"])).message


async def test_a_projector_that_is_none_is_told() -> None:
    assert "CLIP" in (await refused(llama_server_mmproj_path=str(fetch()))).message


async def test_a_load_that_takes_too_long_is_given_up() -> None:
    assert isinstance(await refused(llama_server_start_timeout_s=0.000001), Timeout)


async def test_a_program_that_is_not_there_is_named() -> None:
    assert "/no/such/program" in (await refused(llama_server_binary="/no/such/program")).message


def test_the_program_is_looked_for_on_the_path_and_then_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelyard.library.llama_server.binary_path", lambda: tmp_path / "cached")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    unnamed = helpers.options(llama_server_binary=None)
    with pytest.raises(NotFound, match="name yours in llama_server_binary"):
        find_binary(unnamed)
    (tmp_path / "cached").touch(mode=0o755)
    assert find_binary(unnamed) == str(tmp_path / "cached")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "llama-server").touch(mode=0o755)
    assert find_binary(unnamed) == str(tmp_path / "bin" / "llama-server")


async def test_opening_can_be_given_up() -> None:
    it = engine()
    told: list[str] = []
    began = asyncio.Event()
    task = asyncio.create_task(it.open(lambda _, what: (told.append(what), began.set())))  # type: ignore[func-returns-value]
    await began.wait()
    while it.pid is None:  # noqa: ASYNC110  nobody else has to know when it was forked
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not psutil.pid_exists(it.pid)


async def test_several_caches_are_one_set_of_slots_and_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with running_engine({"main": CacheInfo(256, 1), "fast": CacheInfo(128, 1)}) as it:
            assert collect_reply(await read_events(it, chat_request())).text
    assert "one set of slots for the caches main, fast" in caplog.text


# A request in llama-server's own words.

PIXEL = "data:image/png;base64,iVBORw0KGgo="


def sent(request: Request, **options: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(body(request, Options(path="m", **options)))
    return decoded


def test_it_is_always_a_stream_that_tells_its_usage_and_how_far_it_has_read() -> None:
    assert sent(chat_request("Hello", sampling=Sampling(), max_tokens=None)) == {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
    }


def test_samplers_have_its_names() -> None:
    sampling = Sampling(temperature=0.5, top_k=3, min_p=0.1, repetition_penalty=1.2, beam_size=4, dry_multiplier=0.8)
    got = sent(chat_request(sampling=sampling))
    names = ("temperature", "top_k", "min_p", "repeat_penalty", "dry_multiplier")
    assert [got[name] for name in names] == [0.5, 3, 0.1, 1.2, 0.8]
    assert not got.keys() & {"repetition_penalty", "beam_size"}


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
    assert sent(request)["messages"][0]["content"] == [
        {"type": "text", "text": "Look"},
        {"type": "image_url", "image_url": {"url": PIXEL}},
    ]


def test_schemas_and_gbnf_pass_and_other_grammars_are_refused() -> None:
    assert sent(chat_request(constraint=Constraint("gbnf", "root ::= [a]")))["grammar"] == "root ::= [a]"
    schema = sent(chat_request(constraint=Constraint("json_schema", '{"type":"object"}')))
    assert schema["response_format"]["json_schema"]["schema"] == {"type": "object"}
    with pytest.raises(Unsupported, match="not lark"):
        sent(chat_request(constraint=Constraint("lark", "start: A")))


def test_bare_prompts_are_refused() -> None:
    with pytest.raises(Unsupported, match="conversations only"):
        sent(Request(model="m", prompts=("Once",)))
