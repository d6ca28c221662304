"""A real vLLM on the CPU, in its own environment: what only the real one can show."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest

from modelyard.core.engine import CacheInfo, Chunk, EngineStats, Prompt, TokenRun, Tokens
from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.core.request import Sampling
from modelyard.workers.process_engine import ProcessTextEngine
from modelyard_vllm import env as vllm_env
from tests.engines.fake import helpers as fake_helpers
from tests.engines.reading import assert_alike, end, read, until
from tests.engines.vllm import real_vllm
from tests.engines.vllm.real_vllm import SharedVllmEngine, running
from tests.live_server import LiveServer, live_server

pytestmark = pytest.mark.vllm
WAIT_S, LOAD_S = 120.0, 600.0
MODEL = "tiny"  # not the name of the default model, which has its own caches
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def prompt(text: str, **fields: Any) -> Prompt:
    tokens = real_vllm.tokenizer().encode(fake_helpers.chatml(("user", text)))
    return Prompt(
        **{"parts": (TokenRun(tokens),), "sampling": Sampling(temperature=0), "max_tokens": 8, "cache": "main"} | fields
    )


def descendants(pid: int | None) -> list[psutil.Process]:
    return psutil.Process(pid or 0).children(recursive=True)


async def have_exited(processes: Sequence[psutil.Process]) -> bool:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, WAIT_S)
    return not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


# --- processes ------------------------------------------------------------------------------------------------------


async def test_death_of_vllms_process_during_a_stream_is_reported_and_leaves_no_processes() -> None:
    async with running() as engine, asyncio.timeout(WAIT_S * 2):
        processes = descendants(engine.pid)
        (core,) = [each for each in processes if "EngineCore" in " ".join([each.name(), *each.cmdline()])]
        job = engine.generate(prompt("Count to a thousand.", max_tokens=1500))
        seen = await until(job, Tokens)
        core.kill()
        last, lost = end(seen + await read(job)), await asyncio.shield(engine.lost)
        assert isinstance(last.error, Unavailable)
        assert "SIGKILL" in lost.message
    assert await have_exited(processes)


async def test_kill_of_the_worker_during_a_stream_leaves_no_processes() -> None:
    async with running() as engine, asyncio.timeout(WAIT_S * 2):
        processes = descendants(engine.pid)
        job = engine.generate(prompt("Count to a thousand.", max_tokens=1500))
        await until(job, Tokens)
        psutil.Process(engine.pid or 0).kill()
        assert isinstance(end(await read(job)).error, Unavailable)
        assert await have_exited(processes)


async def test_failed_load_is_reported_with_vllms_message() -> None:
    engine = real_vllm.create_process_engine(
        real_vllm.spec({"main": CacheInfo(2048, 2)}, vllm_kv_cache_memory_bytes=1 << 20)
    )
    try:
        with pytest.raises(InvalidRequest, match=r"memory for the cache blocks|KV cache"):
            await engine.open(lambda *_: None)
    finally:
        await engine.close()


# --- through a server -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """Two replicas: about 8 GB."""
    model = {
        "backend": "vllm",
        "python": real_vllm.python(),
        "n_ctx": 2048,
        "parallel": 4,
        "replicas": 2,
        **real_vllm.fields(),
    }
    with live_server({"models": {MODEL: model}}, ready=False) as served:
        deadline = time.monotonic() + LOAD_S
        while len(served.app.scheduler.engines(MODEL)) < 2:
            assert time.monotonic() < deadline, served.status(MODEL)
            time.sleep(0.5)
        yield served


def chat(served: LiveServer, text: str = "What is the capital of France?", **more: Any) -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24}
    reply = httpx.post(f"{served.url}/v1/chat/completions", json=body | more, timeout=WAIT_S * 2)
    return reply.raise_for_status().json() if "error" not in reply.json() else reply.json()


def test_two_replicas_share_the_work(server: LiveServer) -> None:
    assert len(server.app.scheduler.engines(MODEL)) == 2
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda n: chat(server, f"What is the capital of France? ({n})"), range(8)))
    assert all(reply["choices"][0]["message"]["content"] for reply in replies)
    assert all(engine.stats().evaluated_tokens > 0 for engine in server.app.scheduler.engines(MODEL))


def test_required_tool_call_has_arguments_of_its_schema(server: LiveServer) -> None:
    reply = chat(server, "How is the weather in Rome?", tools=[WEATHER], tool_choice="required", max_tokens=200)
    (call,) = reply["choices"][0]["message"]["tool_calls"][:1]
    assert call["function"]["name"] == "get_weather"
    assert isinstance(json.loads(call["function"]["arguments"])["city"], str)
    assert reply["choices"][0]["finish_reason"] == "tool_calls"


def test_strict_tool_does_not_constrain_text_before_a_call(server: LiveServer) -> None:
    """The grammar of the whole answer starts with any text."""
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    reply = chat(server, "What is the capital of France?", tools=[strict], max_tokens=60)
    message = reply["choices"][0]["message"]
    for call in message.get("tool_calls") or ():
        assert isinstance(json.loads(call["function"]["arguments"])["city"], str)
    assert message.get("tool_calls") or message["content"]


def test_answer_matches_its_schema(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema | {"additionalProperties": False}}}
    reply = chat(server, "Give a number.", response_format=form, max_tokens=60)
    assert isinstance(json.loads(reply["choices"][0]["message"]["content"])["n"], int)


def test_bad_grammar_is_an_invalid_request(server: LiveServer) -> None:
    assert chat(server, grammar="root ::= nowhere")["error"]["code"] == "bad_grammar"


def test_too_long_prompt_is_refused(server: LiveServer) -> None:
    assert chat(server, "word " * 3000)["error"]["code"] == "context_length_exceeded"


def test_abort_under_load_frees_the_slots_at_once(server: LiveServer) -> None:
    """Long answers take all eight slots of both replicas; then their clients disconnect."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Count to a thousand."}], "stream": True}
    more = {"max_tokens": 1900, "logit_bias": {"0": -100, "2": -100}}
    with httpx.Client(base_url=server.url, timeout=WAIT_S * 2) as client:
        for _ in range(8):
            with client.stream("POST", "/v1/chat/completions", json=body | more) as reply:
                assert next(reply.iter_lines()).startswith("data:")
    assert "Paris" in chat(server)["choices"][0]["message"]["content"]


def test_repeated_prompt_is_read_from_the_cache(server: LiveServer) -> None:
    long = "The river runs through the old town. " * 20 + "What is the capital of France?"
    usages = [chat(server, long, max_tokens=4)["usage"] for _ in range(3)]
    assert usages[-1]["prompt_tokens_details"]["cached_tokens"] > usages[-1]["prompt_tokens"] // 2


def test_dead_replica_is_replaced_without_failed_requests(server: LiveServer) -> None:
    victim = server.app.scheduler.engines(MODEL)[0]
    psutil.Process(victim.pid).kill()  # type: ignore[union-attr]
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda n: chat(server, f"Capital of France, please. ({n})"), range(4)))
    assert all("choices" in reply for reply in replies)


# --- images ---------------------------------------------------------------------------------------------------------


def png(color: tuple[int, int, int], side: int = 40) -> str:
    """A square of one colour as a `data:` URL."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes(color) * side) * side
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    whole = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(whole).decode()}"


def anthropic_source(colour: tuple[int, int, int]) -> dict[str, str]:
    return {"type": "base64", "media_type": "image/png", "data": png(colour).partition(",")[2]}


@pytest.fixture(scope="module")
def vision_server() -> Iterator[LiveServer]:
    values = real_vllm.fields(vllm_model=str(real_vllm.vision_folder()), vllm_limit_mm_per_prompt={"image": 2})
    model = {"backend": "vllm", "python": real_vllm.python(), "n_ctx": 512, "modalities": ["text", "image"], **values}
    with loaded(model) as served:
        yield served


@contextmanager
def loaded(model: dict[str, Any]) -> Iterator[LiveServer]:
    with live_server({"models": {MODEL: model}}, ready=False) as served:
        deadline = time.monotonic() + LOAD_S
        while served.status(MODEL).state != "ready":
            assert time.monotonic() < deadline, served.status(MODEL)
            assert served.status(MODEL).state != "failed", served.status(MODEL).reason
            time.sleep(0.5)
        yield served


def describe(served: LiveServer, *images: str) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    content = [{"type": "text", "text": "What do you see?"}, *parts]
    return chat(served, messages=[{"role": "user", "content": content}], logprobs=True, max_tokens=4)


def logprobs(reply: Any) -> list[float]:
    return [each["logprob"] for each in reply["choices"][0]["logprobs"]["content"]]


def test_answer_depends_on_the_image(vision_server: LiveServer) -> None:
    """A random model writes nonsense, but the same for the same image and something else for another."""
    red, blue, again = (describe(vision_server, png(colour)) for colour in ((255, 0, 0), (0, 0, 255), (255, 0, 0)))
    assert logprobs(red) == pytest.approx(logprobs(again), abs=1e-3)
    assert logprobs(red) != pytest.approx(logprobs(blue), abs=1e-3)


def test_tensor_parallel_server_gives_the_same_logprobs(vision_server: LiveServer) -> None:
    """vllm serve renders the chat template and the images itself; the prompt must be the same."""
    red = png((255, 0, 0))
    cores = sorted(os.sched_getaffinity(0))
    bound = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}  # by default it wants a NUMA node for each rank
    values = real_vllm.fields(vllm_model=str(real_vllm.vision_folder()), vllm_limit_mm_per_prompt={"image": 2})
    ranks = {"vllm_tensor_parallel_size": 2, "vllm_serve_env": bound, "vllm_serve_binary": str(vllm_env.program())}
    model = {"backend": "vllm_serve", "n_ctx": 512, "modalities": ["text", "image"], **values, **ranks}
    with loaded(model) as two:
        one, other = describe(vision_server, red), describe(two, red)
    assert logprobs(other) == pytest.approx(logprobs(one), abs=1e-3)
    assert other["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]


def test_each_image_counts_as_its_patches(vision_server: LiveServer) -> None:
    """32 by 32 pixels in patches of 8, four patches per token, and three markers."""
    one, two = describe(vision_server, png((9, 9, 9))), describe(vision_server, png((9, 9, 9)), png((8, 8, 8)))
    assert two["usage"]["prompt_tokens"] - one["usage"]["prompt_tokens"] == 7


def test_images_are_counted_as_they_are_read(vision_server: LiveServer) -> None:
    content = [{"type": "text", "text": "What do you see?"}, {"type": "image", "source": anthropic_source((7, 7, 7))}]
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    counted = httpx.post(f"{vision_server.url}/v1/messages/count_tokens", json=body, timeout=WAIT_S).json()[
        "input_tokens"
    ]
    assert counted == describe(vision_server, png((7, 7, 7)))["usage"]["prompt_tokens"]


@pytest.mark.parametrize("backend", ["vllm", "vllm_serve"])
def test_images_are_counted_before_the_model_is_loaded(vision_server: LiveServer, backend: str) -> None:
    colours = (7, 7, 7), (8, 8, 8)
    images = [{"type": "image", "source": anthropic_source(colour)} for colour in colours]
    body = {
        "model": MODEL,
        "max_tokens": 1,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What do you see?"}, *images]}],
    }
    own = {"python": real_vllm.python()} if backend == "vllm" else {"vllm_serve_binary": str(vllm_env.program())}
    values = real_vllm.fields(vllm_model=str(real_vllm.vision_folder()), vllm_limit_mm_per_prompt={"image": 2})
    model = {"backend": backend, "n_ctx": 512, "modalities": ["text", "image"], **values, **own}
    with live_server({"models": {MODEL: model | {"enabled": False, "autoload": True}}}, ready=False) as served:
        url = f"{served.url}/v1/messages/count_tokens"
        counted = httpx.post(url, json=body, timeout=WAIT_S).json()
        assert served.status(MODEL).state != "ready"
        images[1]["source"] = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
        broken = httpx.post(url, json=body, timeout=WAIT_S)
    described = describe(vision_server, *(png(colour) for colour in colours))
    assert counted == {"input_tokens": described["usage"]["prompt_tokens"]}
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_forced_prompt_format_writes_the_models_own_placeholder() -> None:
    values = real_vllm.fields(vllm_model=str(real_vllm.vision_folder()), vllm_limit_mm_per_prompt={"image": 2})
    model = {"backend": "vllm", "python": real_vllm.python(), "n_ctx": 512, "modalities": ["text", "image"], **values}
    with loaded(model | {"prompt_format": "generic", "force_prompt_format": True}) as served:
        red, blue = describe(served, png((255, 0, 0))), describe(served, png((0, 0, 255)))
        assert logprobs(red) != pytest.approx(logprobs(blue), abs=1e-3)


def test_more_images_than_the_limit_are_refused(vision_server: LiveServer) -> None:
    reply = describe(vision_server, *(png((n, n, n)) for n in range(3)))
    assert reply["error"]["code"] == "refused_by_engine"


# --- speculation ----------------------------------------------------------------------------------------------------

SPECULATION_S = 240.0
REPEATED = "Say three times: the river runs through the old town and under the old bridge."
SPECULATION: dict[str, dict[str, Any]] = {
    "ngram": {"vllm_speculative_method": "ngram", "vllm_num_speculative_tokens": 4},
    "draft_model": {
        "vllm_speculative_method": "draft_model",
        "vllm_speculative_model": "smollm2-hf",
        "vllm_num_speculative_tokens": 3,
    },
}


async def answer(engine: ProcessTextEngine | SharedVllmEngine) -> list[Chunk]:
    async with asyncio.timeout(SPECULATION_S):
        return await read(engine.generate(prompt(REPEATED, max_tokens=40, logprobs=2)))


async def plain() -> list[Chunk]:
    engine = SharedVllmEngine(real_vllm.spec())
    try:
        await engine.open(lambda *_: None)
        return await answer(engine)
    finally:
        await engine.close()


async def counted(engine: ProcessTextEngine) -> EngineStats:
    """Waits until the engine's process has reported speculated tokens."""
    async with asyncio.timeout(SPECULATION_S):
        while not engine.stats().guessed_tokens:  # noqa: ASYNC110  another process reports them
            await asyncio.sleep(0.05)
    return engine.stats()


@pytest.mark.parametrize("method", SPECULATION)
async def test_speculation_does_not_change_the_answer(method: str) -> None:
    async with running(**SPECULATION[method]) as engine:
        assert_alike(await plain(), await answer(engine))
        stats = await counted(engine)
        assert 0 < stats.accepted_tokens <= stats.guessed_tokens
