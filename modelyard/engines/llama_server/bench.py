"""llama-bench, if it is beside llama-server: prompt and generation speed of one stream without a server.

Its numbers are how others report the speed of llama.cpp.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec

from modelyard.core.engine import EngineSpec
from modelyard.core.errors import NotFound, Unavailable
from modelyard.engines.llama_server.options import LlamaServerOptions
from modelyard.engines.llama_server.server import combined_cache, find_binary, flash_attention
from modelyard.library.model_files import locate_model_file

_REPETITIONS = 2


def program(options: LlamaServerOptions) -> Path | None:
    """The path of llama-bench; None if it is not installed."""
    try:
        path = Path(find_binary(options.llama_server_binary)).with_name("llama-bench")
    except NotFound:
        return None
    return path if path.is_file() else None


def bench(spec: EngineSpec, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
    """Prompt tokens and output tokens per second."""
    path = program(spec.options)
    if path is None:
        raise NotFound("there is no llama-bench beside llama-server", code="program_missing")
    argv = [str(path), *arguments(spec, locate_model_file(spec.options.path), prompt_tokens, output_tokens)]
    env = {**os.environ, **spec.options.llama_server_env}
    done = subprocess.run(argv, env=env, capture_output=True, check=False)  # noqa: S603  the user's own program
    if done.returncode != 0:
        reason = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise Unavailable(f"llama-bench ended with exit code {done.returncode}: {' '.join(reason)}")
    return parse_rates(done.stdout)


def arguments(spec: EngineSpec, model: Path, prompt_tokens: int, output_tokens: int) -> list[str]:
    options, cache = spec.options, combined_cache(spec.caches)
    layers = options.llama_server_n_gpu_layers
    flags = {
        "--model": model,
        "--output": "json",
        "--repetitions": _REPETITIONS,
        "--n-prompt": prompt_tokens,
        "--n-gen": output_tokens,
        "--threads": cache.n_threads or options.llama_server_n_threads,
        "--batch-size": cache.n_batch,
        "--ubatch-size": cache.n_ubatch,
        "--cache-type-k": cache.type_k,
        "--cache-type-v": cache.type_v,
        "--flash-attn": flash_attention(options, cache),
        "--n-gpu-layers": "-1" if layers in ("all", "auto") else layers,  # it takes numbers only
    }
    return [text for flag, value in flags.items() if value is not None for text in (flag, str(value))]


def parse_rates(output: bytes) -> tuple[float, float]:
    try:
        rows = msgspec.json.decode(output, type=list[dict[str, object]])
        prefill = next(row for row in rows if row["n_prompt"])["avg_ts"]
        decode = next(row for row in rows if row["n_gen"])["avg_ts"]
    except (msgspec.MsgspecError, StopIteration, KeyError) as error:
        raise Unavailable(f"the output of llama-bench is not as expected: {error}") from error
    return float(str(prefill)), float(str(decode))
