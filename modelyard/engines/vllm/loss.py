"""What a KV cache of coarser numbers costs with vLLM: the same text read through two of them, one after the other.

    the text ─→ a vLLM with the numbers in question ─→ log probabilities ─┐
             └→ a vLLM with the reference's         ─→ log probabilities ─┴→ perplexities, and how far the odds moved

Each runs in a process of its own, with the interpreter that the model names, and is gone before the next one starts.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.core.errors import InvalidRequest
from modelyard.core.knobs import Loss
from modelyard.engines.vllm import async_llm, model_folder
from modelyard.engines.vllm.options import engine_arguments
from modelyard.engines.vllm_serve.log_parser import failure_reason
from modelyard.processes.child_process import ChildProcess, describe_exit

PromptLogprobs = Sequence[Mapping[int, float]]  # log probabilities by token, for each token of the text but the first

TOP_LOGPROBS = 100  # the likeliest tokens that are told at each place; all others count as one
_AT_ONCE = 128  # tokens read at a time: what stands before them comes out of the cache, however it rounds
_ROOM = 8
_LEAST = 1e-6  # odds below it are the rounding of a sum
_SCRIPT = str(Path(__file__).with_name("prompt_logprobs.py"))


def loss(spec: EngineSpec, reference: EngineSpec, ids: Sequence[int]) -> Loss:
    ours, theirs = (asyncio.run(_odds(evaluation_spec(each, len(ids)), ids)) for each in (spec, reference))
    return compare(ours, theirs, ids)


def evaluation_spec(spec: EngineSpec, count: int) -> EngineSpec:
    """The model made to read one text of so many tokens, and nothing beside it."""
    more = spec.options.vllm_engine_args | {"max_logprobs": TOP_LOGPROBS, "enable_chunked_prefill": True}
    changes: dict[str, Any] = {
        "vllm_max_num_seqs": 1,
        "vllm_max_num_batched_tokens": _AT_ONCE,
        "vllm_enable_prefix_caching": False,
        "vllm_enforce_eager": True,
        "vllm_speculative_method": "off",
        "lora": {},
        "vllm_engine_args": more,
    }
    options = spec.options.model_copy(update=changes)
    return EngineSpec(spec.model, options, {"text": CacheInfo(count + _ROOM)}, python=spec.python)


async def _odds(spec: EngineSpec, ids: Sequence[int]) -> PromptLogprobs:
    arguments = engine_arguments(
        model_folder.resolve_companions(spec.options), spec.caches, model_folder.resolve_model(spec.options)
    )
    with tempfile.TemporaryDirectory(prefix="modelyard-odds-") as place:
        order, answer = Path(place) / "order.json", Path(place) / "answer.json"
        order.write_bytes(msgspec.json.encode({"arguments": arguments, "ids": list(ids), "rivals": TOP_LOGPROBS}))
        child = await ChildProcess.start(
            _command(spec.python, order, answer), async_llm.ENVIRONMENT_DEFAULTS | dict(os.environ)
        )
        try:
            code = await asyncio.shield(child.ended)
        finally:
            await child.stop(0.0)
        if not answer.is_file():
            raise InvalidRequest(
                f"vLLM could not read the text: {failure_reason(child.log.lines()) or f'it {describe_exit(code)}'}"
            )
        return msgspec.json.decode(answer.read_bytes(), type=list[dict[int, float]])


def _command(python: str | None, order: Path, answer: Path) -> list[str]:
    """-P: the script's own folder is no place to look for modules, since its neighbours have common names."""
    return [os.path.expanduser(python or sys.executable), "-P", _SCRIPT, str(order), str(answer)]


def compare(ours: PromptLogprobs, theirs: PromptLogprobs, ids: Sequence[int]) -> Loss:
    count = len(ids) - 1
    if not count == len(ours) == len(theirs):
        raise InvalidRequest(f"vLLM told the odds of {len(ours)} and {len(theirs)} tokens of {count}")
    surprise, before = (-sum(row[id] for row, id in zip(told, ids[1:], strict=True)) for told in (ours, theirs))
    apart = sum(divergence(mine, reference) for mine, reference in zip(ours, theirs, strict=True))
    return Loss(math.exp(surprise / count), math.exp(before / count), max(0.0, apart / count))


def divergence(mine: Mapping[int, float], reference: Mapping[int, float]) -> float:
    """Kullback-Leibler over the tokens that both have told, all others taken as one: no more than the whole one, and
    near it, since those others are unlikely."""
    known = mine.keys() & reference.keys()
    told = sum(math.exp(reference[id]) * (reference[id] - mine[id]) for id in known)
    rest = 1 - sum(math.exp(reference[id]) for id in known)
    if rest < _LEAST:
        return told
    return told + rest * math.log(rest / max(_LEAST, 1 - sum(math.exp(mine[id]) for id in known)))
