"""The quality loss of a quantized KV cache with `vllm serve`: two servers read one text, one after the other."""

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
from modelyard.engines.managed import ManagedServer
from modelyard_vllm.loss import TOP_LOGPROBS, PromptLogprobs, compare, evaluation_spec
from modelyard_vllm.serve.server import lists_models, server_command


class _Logprob(Struct):
    logprob: float


class _Choice(Struct):
    prompt_logprobs: list[dict[int, _Logprob] | None]


class _Reply(Struct):
    choices: list[_Choice]


def loss(spec: EngineSpec, reference: EngineSpec, ids: Sequence[int]) -> Loss:
    ours, theirs = (asyncio.run(_read_logprobs(each, ids)) for each in (spec, reference))
    return compare(ours, theirs, ids)


async def _read_logprobs(spec: EngineSpec, ids: Sequence[int]) -> PromptLogprobs:
    spec = evaluation_spec(spec, len(ids))
    # A sleeping server would outlive the measurement.
    spec = replace(spec, options=spec.options.model_copy(update={"vllm_serve_sleep_s": 0.0}))
    body = {
        "model": spec.model,
        "prompt": list(ids),
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": TOP_LOGPROBS,
    }
    server = await ManagedServer.start(server_command(spec))
    try:
        await server.wait_ready(lambda: lists_models(server), spec.options.vllm_serve_start_timeout_s)
        status, reply = await server.upstream.request_json("POST", "/v1/completions", msgspec.json.encode(body))
    finally:
        await server.stop()
    if status != 200:
        raise InvalidRequest(f"vllm serve did not read the text: it answered {status}, {_error_message(reply)}")
    (choice,) = msgspec.convert(reply, _Reply, strict=False).choices
    return [{token: entry.logprob for token, entry in row.items()} for row in choice.prompt_logprobs if row]


def _error_message(reply: Any) -> str:
    error = reply.get("error") if isinstance(reply, Mapping) else None
    return str(error.get("message")) if isinstance(error, Mapping) else "without a message"
