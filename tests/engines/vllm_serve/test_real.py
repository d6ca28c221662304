"""A real `vllm serve` on the CPU."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil
import pytest
from msgspec.structs import replace

from modelyard.core.engine import CacheInfo
from modelyard.core.errors import Cancelled, ContextOverflow, ModelyardError, Unavailable
from modelyard.core.events import BlockDelta, Event, Failed, Finished, collect_reply
from modelyard.core.request import Constraint, Request, RerankRequest, Sampling
from modelyard_vllm import env as vllm_env
from modelyard_vllm.serve.engine import VllmServeEngine
from tests.engines.conformance.test_chat_engines import NO_END
from tests.engines.vllm.real_vllm import write_adapter
from tests.engines.vllm_serve import real_server
from tests.engines.vllm_serve.helpers import chat_request, read_events, wait_exited
from tests.engines.vllm_serve.real_server import running_engine

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parent.parent.parent.parent


def descendants(pid: int | None) -> list[psutil.Process]:
    return psutil.Process(pid or 0).children(recursive=True)


def unlimited() -> Request:
    return chat_request("Count to one thousand in words.", max_tokens=1900, sampling=NO_END)


async def started_answer(served: VllmServeEngine, request: Request) -> object:
    generation = served.chat(request)
    got: list[Event] = []
    while not any(isinstance(event, BlockDelta) for event in got):
        got += await anext(generation)
    return generation


async def last_event(generation: object) -> Event:
    return [event async for batch in generation for event in batch][-1]  # type: ignore[attr-defined]


async def active_requests(served: VllmServeEngine) -> int:
    """The number of running and waiting requests by the metrics of vLLM."""
    address = served.server.upstream.address
    transport = httpx.AsyncHTTPTransport(uds=address.socket)
    async with httpx.AsyncClient(transport=transport, headers=dict(address.headers)) as client:
        reply = (await client.get(f"{address.base_url}/metrics")).text
    found = re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)", reply, re.MULTILINE)
    assert len(found) >= 2, reply[:500]
    return int(sum(map(float, found)))


async def test_answers_adapters_constraints_overflows_and_aborts(tmp_path: Path) -> None:
    async with running_engine(lora={"law": str(write_adapter(tmp_path / "law", strength=1.0))}) as served:
        reply = collect_reply(await read_events(served, chat_request("What is the capital of France?", max_tokens=16)))
        assert "Paris" in reply.text
        assert reply.finished.usage.prompt == await served.count(chat_request("What is the capital of France?"))
        await _check_adapter(served, reply.text)
        await _check_constraints(served)
        await _check_overflows(served)
        await _check_aborts(served)
        children = descendants(served.pid)
    await asyncio.to_thread(wait_exited, children)


async def _check_adapter(served: VllmServeEngine, plain: str) -> None:
    question = chat_request("What is the capital of France?", max_tokens=16)
    worn = collect_reply(await read_events(served, replace(question, lora_adapter="law")))
    assert worn.text != plain
    assert collect_reply(await read_events(served, question)).text == plain


async def _check_constraints(served: VllmServeEngine) -> None:
    schema = '{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"],"additionalProperties":false}'
    form = Constraint("json_schema", schema)
    reply = collect_reply(await read_events(served, chat_request("Give a number.", constraint=form, max_tokens=60)))
    assert isinstance(json.loads(reply.text)["n"], int)
    for kind, text in (("regex", "(red|green|blue)"), ("gbnf", 'root ::= "red" | "green" | "blue"')):
        reply = collect_reply(
            await read_events(served, chat_request("Which color?", constraint=Constraint(kind, text), max_tokens=8))
        )  # type: ignore[arg-type]
        assert reply.text in ("red", "green", "blue")


async def _check_overflows(served: VllmServeEngine) -> None:
    for words in (2100, 40_000):
        (last,) = await read_events(served, chat_request("word " * words))
        assert isinstance(last, Failed)
        assert isinstance(last.error, ContextOverflow)
        assert last.error.window == 2048
        assert last.error.prompt_tokens == await served.count(chat_request("word " * words)) > words
    assert isinstance((await read_events(served, chat_request("Say hello.", max_tokens=32_000)))[-1], Finished)


async def _check_aborts(served: VllmServeEngine) -> None:
    generations = [await started_answer(served, unlimited()) for _ in range(8)]
    for generation in generations[::2]:
        generation.cancel()  # type: ignore[attr-defined]
    for generation in generations[::2]:
        last = await last_event(generation)
        assert isinstance(last, Failed)
        assert isinstance(last.error, Cancelled)
    assert collect_reply(await read_events(served, chat_request("Say hello."))).text
    async with asyncio.timeout(60):
        while await active_requests(served) != 4:  # noqa: ASYNC110  it is another program
            await asyncio.sleep(0.05)
        for generation in generations[1::2]:
            generation.cancel()  # type: ignore[attr-defined]
            await last_event(generation)
        while await active_requests(served) != 0:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("who", ["the server", "the engine behind it"])
async def test_kill_during_a_stream_is_reported_and_leaves_no_process(who: str) -> None:
    async with running_engine() as served:
        processes = descendants(served.pid)
        generation = await started_answer(served, unlimited())
        victim = psutil.Process(served.pid or 0) if who == "the server" else _core(processes)
        victim.kill()
        last, death = await last_event(generation), await asyncio.wait_for(served.lost, 120)
        assert isinstance(death, Unavailable)
        assert "the vllm serve of 'smollm2'" in death.message
        assert isinstance(last, Failed)
        await asyncio.to_thread(wait_exited, processes)


def _core(processes: Sequence[psutil.Process]) -> psutil.Process:
    (core,) = [each for each in processes if "EngineCore" in " ".join([each.name(), *each.cmdline()])]
    return core


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"vllm_serve_extra_args": ["--nonsense"]}, "unrecognized arguments: --nonsense"),
        ({"vllm_kv_cache_memory_bytes": 1 << 20}, "No available memory for the cache blocks"),
        ({"vllm_model": "/no/such/model"}, "/no/such/model"),
        ({"vllm_serve_sleep_s": 60.0}, "Sleep mode is not supported"),
    ],
)
async def test_failed_load_is_reported_with_its_reason(chosen: dict[str, object], message: str) -> None:
    served = real_server.engine({"main": CacheInfo(2048, 2)}, **chosen)
    with pytest.raises(ModelyardError) as caught:
        await served.open(lambda *_: None)
    await served.close()
    assert message in caught.value.message
    assert len(caught.value.message) < 2000


ORPHANS = """
import asyncio, sys
from tests.engines.vllm.real_vllm import write_adapter
from tests.engines.vllm_serve import real_server
from tests.engines.vllm_serve.test_real import descendants

async def main():
    it = real_server.engine()
    await it.open(lambda *_: None)
    print(*(each.pid for each in descendants(it.pid)), it.pid, flush=True)
    await it.lost

asyncio.run(main())
"""


async def test_no_process_outlives_a_killed_gateway() -> None:
    real_server.fields()
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", ORPHANS, cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    try:
        pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
        processes = [psutil.Process(pid) for pid in pids]
        assert len(processes) >= 3
    finally:
        parent.kill()
        await parent.wait()
    await asyncio.to_thread(wait_exited, processes)


async def test_sampling_with_a_seed_is_repeatable_and_has_logprobs() -> None:
    async with running_engine() as served:
        sampling = Sampling(temperature=1.0, seed=7, top_k=20, min_p=0.01, repetition_penalty=1.1)
        one, two = [
            collect_reply(await read_events(served, chat_request("Tell a story.", sampling=sampling, logprobs=2)))
            for _ in range(2)
        ]
        assert one.text == two.text


# Writes a tiny cross-encoder with random weights, and prints the scores that Transformers gives two pairs.
_CROSS_ENCODER = """
import json, sys
from pathlib import Path
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast
folder, query, documents = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
folder.mkdir()
letters = "abcdefghijklmnopqrstuvwxyz"
vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters)]
(folder / "vocab.txt").write_text("\\n".join(vocab))
tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=128)
tokenizer.save_pretrained(folder)
torch.manual_seed(1)
sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
sizes |= dict(vocab_size=len(vocab), max_position_embeddings=128)
config = BertConfig(**sizes, num_labels=1, initializer_range=0.5)
model = BertForSequenceClassification(config).eval()
model.save_pretrained(folder)
pairs = tokenizer([query] * len(documents), documents, return_tensors="pt", padding=True)
print(json.dumps(torch.sigmoid(model(**pairs).logits)[:, 0].tolist()))
"""


async def test_a_cross_encoder_ranks_documents_by_the_scores_of_its_library(tmp_path: Path) -> None:
    folder, query, documents = (
        str(tmp_path / "ranker"),
        "where is rome",
        ("rome is in italy", "a cat", "zebras run fast"),
    )
    command = [str(vllm_env.python()), "-c", _CROSS_ENCODER, folder, query, *documents]
    made = await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, text=True)
    scores = json.loads(made.stdout.splitlines()[-1])
    async with running_engine({"main": CacheInfo(128, 8)}, vllm_model=folder) as served:
        ranking = await served.rerank(RerankRequest(model="smollm2", query=query, documents=documents))
        assert [score for _, score in sorted(ranking.scores)] == pytest.approx(scores, abs=1e-4)
        assert isinstance((await read_events(served, chat_request("Hi", max_tokens=4)))[-1], Failed)
