"""What a KV cache of coarser numbers costs with `vllm serve`: one text read by two servers, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.engine import EngineSpec
from modelyard.core.errors import InvalidRequest
from modelyard.core.knobs import Loss
from modelyard.engines.managed.server import Server
from modelyard.engines.vllm.loss import RIVALS, Odds, compared, reading
from modelyard.engines.vllm_serve.server import lists_models, program


class _Logprob(Struct):
    logprob: float


class _Choice(Struct):
    prompt_logprobs: list[dict[int, _Logprob] | None]


class _Reply(Struct):
    choices: list[_Choice]


def loss(spec: EngineSpec, reference: EngineSpec, ids: Sequence[int]) -> Loss:
    ours, theirs = (asyncio.run(_odds(_reading(each, len(ids)), ids)) for each in (spec, reference))
    return compared(ours, theirs, ids)


def _reading(spec: EngineSpec, count: int) -> EngineSpec:
    """A server that sleeps would outlive the question."""
    told = reading(spec, count)
    return replace(told, options=told.options.model_copy(update={"vllm_serve_sleep_s": 0.0}))


async def _odds(spec: EngineSpec, ids: Sequence[int]) -> Odds:
    server = await Server.start(program(spec))
    try:
        await server.until(lambda: lists_models(server), spec.options.vllm_serve_start_timeout_s)
        status, told = await server.client.ask("POST", "/v1/completions", msgspec.json.encode(_body(spec.model, ids)))
    finally:
        await server.stop()
    if status != 200:
        raise InvalidRequest(f"vllm serve did not read the text: it answered {status}, {_words(told)}")
    (choice,) = msgspec.convert(told, _Reply, strict=False).choices
    return [{token: one.logprob for token, one in row.items()} for row in choice.prompt_logprobs if row]


def _body(model: str, ids: Sequence[int]) -> dict[str, Any]:
    return {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": RIVALS}


def _words(told: Any) -> str:
    error = told.get("error") if isinstance(told, Mapping) else None
    return str(error.get("message")) if isinstance(error, Mapping) else "and said nothing"
