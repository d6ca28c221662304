"""The llama-server engine: its requests, and a real server with a real model."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import signal
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
from modelyard.core.request import Audio, Constraint, Image, Infill, Message, Reasoning, Request, Sampling, Text
from modelyard.engines import llama_server
from modelyard.engines.llama_server import Options
from modelyard.engines.llama_server.engine import LlamaServerEngine, ScopedSlots, chat_body
from modelyard.engines.llama_server.server import command_line, find_binary
from modelyard.engines.managed import ListenAddress
from modelyard.library.default_model import fetch
from modelyard.tokenizer.gguf import GgufTokenizer
from tests.engines.llama_cpp import tiny_models
from tests.engines.llama_cpp.media_files import picture, sound
from tests.engines.llama_server.helpers import (
    chat_request,
    engine,
    read_events,
    read_rest,
    read_until_delta,
    running_engine,
)

on_shared_loop = pytest.mark.asyncio(loop_scope="module")
PIXEL = "data:image/png;base64,iVBORw0KGgo="


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[LlamaServerEngine]:
    """A server with one slot of 512 tokens for the tests that leave it running."""
    async with running_engine({"main": CacheInfo(512, 1)}) as made:
        yield made


# --- a running server -------------------------------------------------------------------------------------------------


@on_shared_loop
async def test_answer_has_text_and_usage(shared: LlamaServerEngine) -> None:
    assert isinstance(shared, ChatEngine)
    reply = collect_reply(await read_events(shared, chat_request("What is the capital of France?", max_tokens=12)))
    assert reply.text
    assert reply.finished.usage.prompt == await shared.count(chat_request("What is the capital of France?"))
    assert reply.finished.usage.output <= 12
    assert any("listening" in line for line in shared.log_tail())
    assert len(shared.log_tail(2)) == 2


@on_shared_loop
async def test_server_counts_as_the_tokenizer_of_the_model(shared: LlamaServerEngine) -> None:
    rendered = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert await shared.count(chat_request()) == len(GgufTokenizer(fetch()).encode(rendered))


@on_shared_loop
async def test_answer_follows_a_json_schema(shared: LlamaServerEngine) -> None:
    schema = '{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"],"additionalProperties":false}'
    request = chat_request("Give a number.", constraint=Constraint("json_schema", schema), max_tokens=40)
    reply = collect_reply(await read_events(shared, request))
    assert reply.text.replace(" ", "").replace("\n", "").startswith('{"n":')


@on_shared_loop
async def test_prompt_beyond_the_window_is_an_overflow_with_true_numbers(shared: LlamaServerEngine) -> None:
    (last,) = await read_events(shared, chat_request("word " * 600))
    assert isinstance(last, Failed)
    assert isinstance(last.error, ContextOverflow)
    assert last.error.window == 512
    assert last.error.prompt_tokens == await shared.count(chat_request("word " * 600))


@on_shared_loop
async def test_cancel_frees_the_slot_for_the_next_request(shared: LlamaServerEngine) -> None:
    generation = shared.chat(chat_request("Count to a thousand.", max_tokens=400))
    events = await read_until_delta(generation)
    generation.cancel()
    events += await read_rest(generation)
    assert isinstance(events[-1], Failed)
    assert isinstance(events[-1].error, Cancelled)
    assert collect_reply(await read_events(shared, chat_request())).text


async def test_kv_is_reused_inside_its_scope_only() -> None:
    async def cached(made: LlamaServerEngine, scope: str) -> int:
        request = chat_request("Tell me about whales. " * 4, max_tokens=1, kv_scope=scope)
        return collect_reply(await read_events(made, request)).finished.usage.cached

    async with running_engine({"main": CacheInfo(256, 2)}) as made:
        found = [await cached(made, scope) for scope in ("ann", "bob", "eve", "bob", "ann")]
        assert found[:3] == [0, 0, 0]
        assert found[3] > 30
        assert found[4] == 0, "its slot was given to another"


async def test_server_on_a_port_with_several_caches(caplog: pytest.LogCaptureFixture) -> None:
    caches = {"main": CacheInfo(256, 1), "fast": CacheInfo(128, 1)}
    with caplog.at_level(logging.WARNING):
        async with running_engine(caches, llama_server_host="127.0.0.1") as made:
            pid = made.pid or 0
            assert collect_reply(await read_events(made, chat_request())).text
            (line,) = [line for line in made.log_tail() if "listening" in line]
            assert psutil.pid_exists(pid)
    assert "127.0.0.1" in line
    assert "one set of slots for the caches main, fast" in caplog.text
    assert not psutil.pid_exists(pid)
    assert not made.lost.done(), "closing does not lose the engine"


async def test_killed_server_fails_its_streams_and_resolves_lost() -> None:
    async with running_engine() as made:
        generation = made.chat(chat_request("Count to a thousand.", max_tokens=400))
        await read_until_delta(generation)
        os.kill(made.pid or 0, signal.SIGKILL)
        last = (await read_rest(generation))[-1]
        error = await made.lost
        assert isinstance(error, Unavailable)
        assert "was killed by SIGKILL" in error.message
        assert last == Failed(error)
        assert await read_events(made, chat_request()) == [Failed(error)]


async def test_exit_of_an_idle_server_is_noticed() -> None:
    async with running_engine() as made:
        os.kill(made.pid or 0, signal.SIGKILL)
        assert "SIGKILL" in (await made.lost).message


# --- failed loads -----------------------------------------------------------------------------------------------------


async def load_error(**options: object) -> ModelyardError:
    made = engine(**options)  # type: ignore[arg-type]
    with pytest.raises(ModelyardError) as caught:
        await made.open(lambda *_: None)
    assert made.pid is None or not psutil.pid_exists(made.pid)
    await made.close()
    return caught.value


@pytest.mark.parametrize("size", [0, 100, 1_000_000])
async def test_broken_model_is_named_with_the_reason_of_the_server(tmp_path: Path, size: int) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(fetch().read_bytes()[:size])
    error = await load_error(path=str(broken))
    assert str(broken) in error.message
    assert "fail" in error.message
    assert "exit code 1" in error.message


async def test_missing_model_is_not_found(tmp_path: Path) -> None:
    assert isinstance(await load_error(path=str(tmp_path / "none.gguf")), NotFound)


async def test_unknown_argument_is_reported() -> None:
    assert "invalid argument: --nonsense" in (await load_error(llama_server_extra_args=["--nonsense"])).message


def media_request(part: Image | Audio) -> Request:
    return replace(chat_request(), messages=(Message("user", (part, Text("What is it?"))),))


async def test_images_of_other_formats_are_converted() -> None:
    model, projector = tiny_models.seeing("tiles")
    replies = []
    async with running_engine(path=str(model), llama_server_mmproj_path=str(projector)) as made:
        for format in ("PNG", "TIFF"):
            url = f"data:image/{format.lower()};base64,{base64.b64encode(picture(1, format=format)).decode()}"
            replies.append(collect_reply(await read_events(made, media_request(Image(url)))).text)
    assert replies[0] == replies[1] != ""


async def test_a_sound_with_which_the_server_would_exit_is_refused() -> None:
    model, projector = tiny_models.seeing("audio")
    url = f"data:audio/wav;base64,{base64.b64encode(sound(1, seconds=1 / 16000)).decode()}"
    async with running_engine(path=str(model), llama_server_mmproj_path=str(projector)) as made:
        last = (await read_events(made, media_request(Audio(url))))[-1]
        assert isinstance(last, Failed)
        assert last.error.code == "invalid_audio"
        assert not made.server.has_exited


async def test_invalid_projector_is_reported() -> None:
    assert "CLIP" in (await load_error(llama_server_mmproj_path=str(fetch()))).message


async def test_load_that_takes_too_long_times_out() -> None:
    assert isinstance(await load_error(llama_server_start_timeout_s=0.000001), Timeout)


async def test_missing_program_is_named() -> None:
    assert "/no/such/program" in (await load_error(llama_server_binary="/no/such/program")).message


def test_program_is_searched_on_the_path_and_then_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.library.llama_server.binary_path", lambda: tmp_path / "cached")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(NotFound, match="set llama_server_binary"):
        find_binary()
    (tmp_path / "cached").touch(mode=0o755)
    assert find_binary() == str(tmp_path / "cached")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "llama-server").touch(mode=0o755)
    assert find_binary() == str(tmp_path / "bin" / "llama-server")


async def test_cancelled_load_stops_the_server() -> None:
    made, started = engine(), asyncio.Event()
    task = asyncio.create_task(made.open(lambda *_: started.set()))
    await started.wait()
    while made.pid is None:  # noqa: ASYNC110 - there is no event for the fork
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not psutil.pid_exists(made.pid)


# --- requests ---------------------------------------------------------------------------------------------------------


def body(request: Request, **options: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(chat_body(request, Options(path="m", **options)))
    return decoded


def test_request_is_a_stream_with_usage_and_progress() -> None:
    assert body(chat_request("Hello", sampling=Sampling(), max_tokens=None)) == {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
    }


def test_sampling_fields_have_the_names_of_llama_server() -> None:
    sampling = Sampling(temperature=0.5, top_k=3, min_p=0.1, repetition_penalty=1.2, beam_size=4, dry_multiplier=0.8)
    sent = body(chat_request(sampling=sampling))
    names = ("temperature", "top_k", "min_p", "repeat_penalty", "dry_multiplier")
    assert [sent[name] for name in names] == [0.5, 3, 0.1, 1.2, 0.8]
    assert not sent.keys() & {"repetition_penalty", "beam_size"}


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


def test_the_end_of_the_prompt_is_as_the_client_says() -> None:
    ending = (Message("assistant", (Text("One,"),)),)
    sent = body(Request(model="m", messages=ending, continue_final_message="content"))
    assert (sent["continue_final_message"], sent["add_generation_prompt"]) == ("content", False)
    assert body(chat_request(add_generation_prompt=False))["add_generation_prompt"] is False
    assert not {"continue_final_message", "add_generation_prompt"} & body(Request(model="m", messages=ending)).keys()
    for fields in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        with pytest.raises(Unsupported, match="always continues"):
            body(Request(model="m", messages=ending, **fields))


def test_images_are_sent_as_data_urls() -> None:
    request = Request(model="m", messages=(Message("user", (Text("Look"), Image(PIXEL))),))
    assert body(request)["messages"][0]["content"] == [
        {"type": "text", "text": "Look"},
        {"type": "image_url", "image_url": {"url": PIXEL}},
    ]


def test_schemas_and_gbnf_are_sent_and_other_grammars_refused() -> None:
    assert body(chat_request(constraint=Constraint("gbnf", "root ::= [a]")))["grammar"] == "root ::= [a]"
    schema = body(chat_request(constraint=Constraint("json_schema", '{"type":"object"}')))
    assert schema["response_format"]["json_schema"]["schema"] == {"type": "object"}
    with pytest.raises(Unsupported, match="not lark"):
        body(chat_request(constraint=Constraint("lark", "start: A")))


def test_bare_prompts_and_gaps_are_written_for_llama_server() -> None:
    bare = Request(model="m", prompts=("Once",), max_tokens=3, sampling=Sampling(repetition_penalty=1.5))
    assert (body(bare)["prompt"], body(bare)["repeat_penalty"], body(bare)["stream"]) == ("Once", 1.5, True)
    gap = body(replace(bare, infill=Infill(" end")))
    assert (gap["input_prefix"], gap["input_suffix"], gap["n_predict"]) == ("Once", " end", 3)


@pytest.mark.parametrize(
    ("pooling", "flags", "does"),
    [
        ("mean", [], "embeddings"),
        ("rank", [], "rerank"),
        (None, [], "generates"),
        (None, ["--embeddings"], "embeddings"),
    ],
)
def test_the_file_or_the_flags_say_what_the_server_is_started_for(
    pooling: str | None, flags: list[str], does: str
) -> None:
    file = fetch() if pooling is None else tiny_models.bert(pooling)
    chosen = Options(path=str(file), llama_server_extra_args=flags)
    can = llama_server.capabilities(chosen)
    assert {name for name in ("generates", "embeddings", "rerank") if getattr(can, name)} == {does}
    argv = command_line("x", file, chosen, {"a": CacheInfo(512, 2)}, ListenAddress("s"))
    expected = {"embeddings": "--embeddings", "rerank": "--reranking"}.get(does)
    assert [flag for flag in ("--embeddings", "--reranking") if flag in argv] == [flag for flag in (expected,) if flag]
    assert ("--ubatch-size" in argv) == (does != "generates")


def said(*texts: str) -> tuple[Message, ...]:
    return tuple(Message("user", (Text(text),)) for text in texts)


def run(slots: ScopedSlots, scope: str, *texts: str) -> tuple[int | None, bool | None]:
    """One whole request: the slot, and whether it reuses what the slot holds."""
    slot, fields = slots.take(scope, said(*texts))
    slots.release(slot)
    return fields.get("id_slot"), fields.get("cache_prompt")


def test_the_server_chooses_while_there_is_one_scope() -> None:
    slots = ScopedSlots(2)
    assert slots.take("", said("a")) == (None, {})
    assert run(slots, "ann", "a") == (0, False), "what came before had no scope"
    assert run(slots, "", "a") == (1, True)
    assert run(slots, "", "a") == (1, True)


def test_a_scope_reuses_its_own_slot_and_no_other() -> None:
    slots = ScopedSlots(2)
    assert run(slots, "ann", "a") == (0, False)
    assert run(slots, "bob", "a") == (1, False)
    assert run(slots, "ann", "a", "b") == (0, True)
    assert run(slots, "eve", "a") == (1, False), "the least recently used one"
    assert run(slots, "bob", "a") == (0, False)


def test_a_conversation_continues_where_most_of_it_is() -> None:
    slots = ScopedSlots(3)
    first, _ = slots.take("ann", said("system", "one"))
    second, _ = slots.take("ann", said("system", "two"))
    slots.release(first)
    slots.release(second)
    assert run(slots, "ann", "system", "one", "more") == (0, True)
    assert run(slots, "ann", "system", "two", "more") == (1, True)


def test_a_busy_slot_is_not_taken_and_without_a_slot_nothing_is_reused() -> None:
    slots = ScopedSlots(2)
    first, _ = slots.take("ann", said("a"))
    second, fields = slots.take("ann", said("a"))
    assert fields == {"id_slot": 1, "cache_prompt": False}
    assert slots.take("ann", said("a")) == (None, {"cache_prompt": False})
    slots.release(first)
    slots.release(second)
    assert run(slots, "ann", "a") == (1, True)
    assert run(ScopedSlots(0), "ann", "a") == (None, False)
