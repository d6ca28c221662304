"""The quality loss of a quantized KV cache with vLLM: the same text, evaluated with two number formats.

    text ─→ vLLM with the format in question ─→ log probabilities ─┐
         └→ vLLM with the reference's format ─→ log probabilities ─┴→ perplexities and divergence

Each vLLM runs in its own process with the interpreter of the model, and ends before the next one starts.
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
from modelyard.processes.child_process import ChildProcess, describe_exit
from modelyard_vllm.async_llm import ENVIRONMENT_DEFAULTS
from modelyard_vllm.errors import failure_reason
from modelyard_vllm.model_folder import resolve_companions, resolve_model
from modelyard_vllm.options import engine_arguments

PromptLogprobs = Sequence[Mapping[int, float]]  # by token, for each token of the text except the first

TOP_LOGPROBS = 100  # the likeliest tokens per position; all others count as one
_BATCHED_TOKENS = 128  # per step: what comes before them is read from the cache, with its rounding
_WINDOW_SLACK = 8
_MIN_PROBABILITY = 1e-6  # smaller remainders are rounding errors
_SCRIPT = str(Path(__file__).with_name("prompt_logprobs.py"))


def loss(spec: EngineSpec, reference: EngineSpec, ids: Sequence[int]) -> Loss:
    ours, theirs = (asyncio.run(_evaluate(evaluation_spec(each, len(ids)), ids)) for each in (spec, reference))
    return compare(ours, theirs, ids)


def evaluation_spec(spec: EngineSpec, n_tokens: int) -> EngineSpec:
    """The model set up to read one text and nothing else."""
    options = spec.options.model_copy(
        update={
            "vllm_max_num_seqs": 1,
            "vllm_max_num_batched_tokens": _BATCHED_TOKENS,
            "vllm_enable_prefix_caching": False,
            "vllm_enforce_eager": True,
            "vllm_speculative_method": "off",
            "lora": {},
            "vllm_engine_args": spec.options.vllm_engine_args
            | {"max_logprobs": TOP_LOGPROBS, "enable_chunked_prefill": True},
        }
    )
    return EngineSpec(spec.model, options, {"text": CacheInfo(n_tokens + _WINDOW_SLACK)}, python=spec.python)


async def _evaluate(spec: EngineSpec, ids: Sequence[int]) -> PromptLogprobs:
    arguments = engine_arguments(resolve_companions(spec.options), spec.caches, resolve_model(spec.options))
    content: dict[str, Any] = {"arguments": arguments, "ids": list(ids), "top": TOP_LOGPROBS}
    with tempfile.TemporaryDirectory(prefix="modelyard-loss-") as folder:
        request, result = Path(folder) / "request.json", Path(folder) / "result.json"
        request.write_bytes(msgspec.json.encode(content))
        child = await ChildProcess.start(
            _command(spec.python, request, result), ENVIRONMENT_DEFAULTS | dict(os.environ)
        )
        try:
            code = await asyncio.shield(child.ended)
        finally:
            await child.stop(0.0)
        if not result.is_file():
            reason = failure_reason(child.log.lines()) or f"it {describe_exit(code)}"
            raise InvalidRequest(f"vLLM could not read the text: {reason}")
        return msgspec.json.decode(result.read_bytes(), type=list[dict[int, float]])


def _command(python: str | None, request: Path, result: Path) -> list[str]:
    """-P: the script's folder must not be on the path, because its modules have common names."""
    return [os.path.expanduser(python or sys.executable), "-P", _SCRIPT, str(request), str(result)]


def compare(ours: PromptLogprobs, theirs: PromptLogprobs, ids: Sequence[int]) -> Loss:
    count = len(ids) - 1
    if not count == len(ours) == len(theirs):
        raise InvalidRequest(f"vLLM gave the log probabilities of {len(ours)} and {len(theirs)} tokens of {count}")
    nll, reference_nll = (-sum(row[id] for row, id in zip(rows, ids[1:], strict=True)) for rows in (ours, theirs))
    total = sum(divergence(mine, reference) for mine, reference in zip(ours, theirs, strict=True))
    return Loss(math.exp(nll / count), math.exp(reference_nll / count), max(0.0, total / count))


def divergence(mine: Mapping[int, float], reference: Mapping[int, float]) -> float:
    """Kullback-Leibler over the tokens that both rows have; all others count as one. It is a lower bound, and close,
    because those others are unlikely."""
    common = mine.keys() & reference.keys()
    total = sum(math.exp(reference[id]) * (reference[id] - mine[id]) for id in common)
    rest = 1 - sum(math.exp(reference[id]) for id in common)
    if rest < _MIN_PROBABILITY:
        return total
    return total + rest * math.log(rest / max(_MIN_PROBABILITY, 1 - sum(math.exp(mine[id]) for id in common)))
