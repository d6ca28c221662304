"""Sampling in llama.cpp's graph, as on an NVIDIA GPU: forced here on a CPU."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ctypes import c_int32, c_uint32, c_void_p
from typing import Any

import pytest

from modelyard.core.engine import CacheInfo, Chunk, Generation, Prompt, Tokens
from modelyard.core.request import Sampling
from modelyard.engines.llama_cpp import context, graph_sampler, loading
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.engines.llama_cpp.graph_sampler import GraphSampler
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.options import Options
from modelyard.libllama import GpuDevice
from tests.engines.llama_cpp.exact_models import VOCAB, exact_model, repetitive_model
from tests.engines.llama_cpp.helpers import Tap, id_prompt, running
from tests.engines.llama_cpp.test_sequence_manager import SYSTEM, words
from tests.engines.reading import end, ids, logprobs, read

LONE = Sampling(temperature=0.8)
GREEDY = Sampling(temperature=0)
TOP_K = Sampling(temperature=0.9, top_k=50, seed=5)
OPEN = Sampling(temperature=0.9, top_p=0.9)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that come from the graph: of the second request in a row, and of all after it."""
    found: list[int] = []
    plain = GraphSampler.sample

    def sample(sampler: GraphSampler, sequence: int, row: int) -> int:
        found.append(plain(sampler, sequence, row))
        return found[-1]

    monkeypatch.setattr(context.lib, "llama_supports_gpu_offload", lambda: True)
    monkeypatch.setattr(loading, "samples_in_graph", lambda *_: True)
    monkeypatch.setattr(GraphSampler, "sample", sample)
    monkeypatch.setattr(graph_sampler, "_FEWEST", 2)
    return found


@asynccontextmanager
async def exact(parallel: int = 4, **options: Any) -> AsyncIterator[LlamaCppEngine]:
    async with running({"main": CacheInfo(256, parallel)}, **({"path": str(exact_model())} | options)) as engine:
        yield engine


def lone(run: list[int], **fields: Any) -> Prompt:
    return id_prompt(run, **({"sampling": LONE, "logprobs": None, "session": "a"} | fields))


async def generated(engine: LlamaCppEngine, prompt: Prompt) -> list[int]:
    chunks = await read(engine.generate(prompt))
    assert end(chunks).error is None
    return ids(chunks)


async def test_requests_that_are_alike_are_sampled_in_the_graph(
    drawn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_sampler, "_FEWEST", 3)
    async with exact() as engine:
        for number in range(2):
            await generated(engine, lone(SYSTEM, session=str(number)))
        assert not drawn
        for _ in range(3):
            drawn.clear()
            assert await generated(engine, lone(SYSTEM, max_tokens=12)) == drawn
            assert len(drawn) == 12


async def test_no_row_crosses_to_the_cpu(drawn: list[int]) -> None:
    async with exact(1) as engine:
        for _ in range(2):
            await generated(engine, lone(SYSTEM))
        raw, counts = engine._contexts[0]._raw, []
        for name in ("logits", "probs", "candidates"):
            count = lib.raw[f"llama_get_sampled_{name}_count_ith"]
            count.restype, count.argtypes = c_uint32, [c_void_p, c_int32]
            counts.append(count(raw, 0))
    assert drawn
    assert counts == [0, 0, 0]


async def test_alternating_requests_never_set_a_sampler(drawn: list[int]) -> None:
    async with exact() as engine:
        for sampling in (LONE, GREEDY, LONE, Sampling(temperature=1.5), LONE, OPEN):
            await generated(engine, lone(SYSTEM, sampling=sampling))
    assert not drawn


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": GREEDY},
        {"sampling": Sampling(temperature=0.8, seed=7)},
        {"sampling": TOP_K},
        {"sampling": Sampling(temperature=0.8, seed=7, logit_bias={3: 2.0})},
        {"sampling": Sampling(temperature=0.8, seed=7, repetition_penalty=1.2)},
        {"sampling": Sampling(temperature=0.8, seed=7, typical_p=0.8)},
    ],
)
async def test_any_other_request_is_sampled_as_without_a_graph(drawn: list[int], fields: dict[str, Any]) -> None:
    async with exact(1) as engine:
        expected = await generated(engine, lone(SYSTEM, **fields))
        for _ in range(2):
            await generated(engine, lone(SYSTEM))
        drawn.clear()
        assert await generated(engine, lone(SYSTEM, **fields)) == expected
    assert not drawn


@pytest.mark.parametrize("fields", [{"logprobs": 3}, {"prompt_logprobs": 2}, {"sampling": OPEN}], ids=str)
async def test_a_request_that_needs_logits_gets_them(drawn: list[int], fields: dict[str, Any]) -> None:
    async with exact(1) as engine:
        for _ in range(2):
            await generated(engine, lone(SYSTEM))
        assert drawn
        drawn.clear()
        chunks = await read(engine.generate(lone(SYSTEM, **fields)))
        assert end(chunks).error is None
        assert len(logprobs(chunks)) == (8 if "logprobs" in fields else 0)
        assert not drawn


@pytest.mark.parametrize("speculation", ["off", "ngram"])
async def test_tokens_are_drawn_by_their_probabilities(drawn: list[int], speculation: str) -> None:
    async with exact(speculation=speculation) as engine:
        (first,) = logprobs(await read(engine.generate(lone(SYSTEM, max_tokens=1, logprobs=VOCAB))))
        weights = {token: math.exp(logprob / 0.8) for token, logprob in first.top}
        total = sum(weights.values())
        for _ in range(110):
            await asyncio.gather(
                *(generated(engine, lone(SYSTEM, max_tokens=1, session=str(number))) for number in range(4))
            )
    assert len(drawn) >= 400
    counts = Counter(drawn)
    likely = [token for token in weights if weights[token] / total * len(drawn) >= 5]
    assert len(likely) >= 3
    for token in likely:
        expected = weights[token] / total * len(drawn)
        assert abs(counts[token] - expected) < 5 * math.sqrt(expected)


class Meanwhile(Tap):
    """After the fifth token of the first job of a session, prompts are sent, and the engine's thread waits for it."""

    def __init__(self, engine: LlamaCppEngine, session: str, *prompts: Prompt) -> None:
        super().__init__(engine)
        self._engine, self._session, self._prompts, self._count = engine, session, prompts, 0
        self._loop, self.sent = asyncio.get_running_loop(), list[Generation[Chunk]]()

    def on_chunk(self, job: LlamaCppJob, chunk: Chunk) -> None:
        if job.prompt.session != self._session or not isinstance(chunk, Tokens):
            return
        self._count += 1
        if self._count == 5:
            done = threading.Event()
            self._loop.call_soon_threadsafe(self._send, done)
            assert done.wait(60)

    def _send(self, done: threading.Event) -> None:
        self.sent = [self._engine.generate(prompt) for prompt in self._prompts]
        done.set()


async def test_another_request_ends_it_for_all_and_their_streams_go_on(drawn: list[int]) -> None:
    other = lone(words(2), max_tokens=20, session="c", sampling=GREEDY)
    async with exact() as engine:
        expected = await generated(engine, other)
        for _ in range(2):
            await generated(engine, lone(SYSTEM))
        drawn.clear()
        meanwhile = Meanwhile(engine, "b", other)
        found = await generated(engine, lone(words(1), max_tokens=40, session="b"))
        assert ids(await read(meanwhile.sent[0])) == expected
    assert len(found) == 40
    assert found[: len(drawn)] == drawn
    assert len(drawn) in (5, 6), "one more if a decode was in flight"


async def test_it_does_not_begin_while_another_request_runs(drawn: list[int]) -> None:
    async with exact() as engine:
        meanwhile = Meanwhile(engine, "b", *(lone(SYSTEM, max_tokens=4, session=str(at)) for at in range(3)))
        await generated(engine, lone(words(1), max_tokens=40, session="b", sampling=GREEDY))
        assert [len(ids(await read(one))) for one in meanwhile.sent] == [4, 4, 4]
        assert not drawn
        await generated(engine, lone(SYSTEM))
    assert len(drawn) == 8


async def test_running_requests_join_it(drawn: list[int]) -> None:
    async with exact() as engine:
        meanwhile = Meanwhile(engine, "b", lone(SYSTEM, max_tokens=4))
        found = await generated(engine, lone(words(2), max_tokens=40, session="b"))
        assert len(ids(await read(meanwhile.sent[0]))) == 4
    assert found[-1] == drawn[-1]
    assert len(drawn) in (40 - 5 + 4, 40 - 6 + 4)


def test_requests_that_differ_soon_delay_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphSampler, "_attach", lambda *_: True)
    monkeypatch.setattr(graph_sampler.short, "set_sampler", lambda *_: True)
    samplers = GraphSampler(None, 2, accepts=False, has_memory=lambda: True)

    def alike_until_it_begins() -> int:
        for count in range(1, 5000):
            samplers.admit(0.8, [0.8])
            if samplers.is_active:
                return count
        raise AssertionError("it never begins")

    waited = []
    for more in (0, 0, 0, 100, 0):
        waited.append(alike_until_it_begins())
        for _ in range(more):
            samplers.admit(0.8, [0.8])
        samplers.admit(1.0, [0.8])
        assert not samplers.is_active
    assert waited == [16, 32, 64, 128, 16]
    samplers.close()


async def test_drafts_are_accepted(drawn: list[int]) -> None:
    nearly_greedy = Sampling(temperature=1e-3)
    async with exact(1, path=str(repetitive_model()), speculation="ngram") as engine:
        expected = await generated(engine, lone(SYSTEM, max_tokens=60, sampling=GREEDY))
        for _ in range(2):  # the second in the graph
            before = engine.stats().accepted_tokens
            assert await generated(engine, lone(SYSTEM, max_tokens=60, sampling=nearly_greedy)) == expected
            assert engine.stats().accepted_tokens > before
    assert drawn == expected


async def test_a_device_that_cannot_draw_leaves_it_to_the_cpu(
    drawn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_sampler.short, "set_sampler", lambda *_: True)  # it does not ask our sampler
    async with exact(1) as engine:
        for _ in range(3):
            assert len(await generated(engine, lone(SYSTEM))) == 8
    assert not drawn


async def test_a_full_gpu_leaves_it_to_the_cpu(drawn: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "has_memory_left", lambda _: False)
    async with exact(1) as engine:
        for _ in range(3):
            assert len(await generated(engine, lone(SYSTEM))) == 8
    assert not drawn


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        (("CUDA0",), {}, True),
        (("CUDA0", "CUDA1"), {"n_gpu_layers": 33}, True),
        (("CUDA0",), {"n_gpu_layers": 32}, False),  # the output layer is on the CPU
        (("CUDA0",), {"n_gpu_layers": 0}, False),
        (("CUDA0",), {"split_mode": "tensor"}, False),
        (("CUDA0", "Vulkan0"), {}, False),
        (("CUDA0", "Vulkan0"), {"devices": ["CUDA0"]}, True),
        (("Metal",), {}, False),
        ((), {}, False),
    ],
)
def test_the_graph_samples_on_nvidia_gpus_that_have_the_output_layer(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], options: dict[str, Any], expected: bool
) -> None:
    monkeypatch.setattr(lib, "llama_supports_gpu_offload", lambda: True)
    monkeypatch.setattr(lib, "llama_model_n_layer", lambda _: 32)
    monkeypatch.setattr(lib, "gpu_devices", lambda: [GpuDevice(name, "", 1 << 33, 1 << 33) for name in gpus])
    assert loading.samples_in_graph(None, Options(path="x", **options)) == expected
