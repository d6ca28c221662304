"""llama-bench, where it lies beside llama-server: the same settings measured without a server around them.

It knows one stream only, and no conversations: prompts read and tokens made a second, which is also how others tell
the speed of llama.cpp.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

from modelyard.core.engine import EngineSpec
from modelyard.core.errors import NotFound, Unavailable
from modelyard.engines.llama_server.command import shared
from modelyard.engines.llama_server.options import Options
from modelyard.engines.llama_server.server import find_binary
from modelyard.library.model_files import locate_model_file

_REPEATS = 2


def program(options: Options) -> Path | None:
    """None where there is no llama-bench beside the llama-server."""
    try:
        beside = Path(find_binary(options)).with_name("llama-bench")
    except NotFound:
        return None
    return beside if beside.is_file() else None


def bench(spec: EngineSpec, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
    """Prompt tokens read and tokens made a second."""
    found = program(spec.options)
    if found is None:
        raise NotFound("there is no llama-bench beside the llama-server", code="program_missing")
    argv = [str(found), *arguments(spec, locate_model_file(spec.options.path), prompt_tokens, output_tokens)]
    env = {**os.environ, **spec.options.llama_server_env}
    done = subprocess.run(argv, env=env, capture_output=True, check=False)  # noqa: S603  the user's own program
    if done.returncode != 0:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise Unavailable(f"llama-bench ended with exit code {done.returncode}: {' '.join(words)}")
    return rates(done.stdout)


def arguments(spec: EngineSpec, model: Path, prompt_tokens: int, output_tokens: int) -> Iterator[str]:
    options, cache = spec.options, shared(spec.caches)
    yield from ("--model", str(model), "--output", "json", "--repetitions", str(_REPEATS))
    yield from ("--n-prompt", str(prompt_tokens), "--n-gen", str(output_tokens))
    told = {
        "--threads": cache.n_threads or options.llama_server_n_threads,
        "--batch-size": cache.n_batch,
        "--ubatch-size": cache.n_ubatch,
        "--cache-type-k": cache.type_k,
        "--cache-type-v": cache.type_v,
        "--flash-attn": _flash(options, cache.flash_attn),
        "--n-gpu-layers": _layers(options.llama_server_n_gpu_layers),
    }
    for flag, value in told.items():
        if value is not None:
            yield from (flag, str(value))


def _flash(options: Options, own: bool | None) -> str | None:
    return options.llama_server_flash_attn if own is None else ("on" if own else "off")


def _layers(asked: str | None) -> str | None:
    """It knows numbers only: -1 is its word for as many as there are."""
    return "-1" if asked in ("all", "auto") else asked


def rates(output: bytes) -> tuple[float, float]:
    try:
        rows = msgspec.json.decode(output, type=list[dict[str, object]])
        prefill = next(row for row in rows if row["n_prompt"])["avg_ts"]
        decode = next(row for row in rows if row["n_gen"])["avg_ts"]
    except (msgspec.MsgspecError, StopIteration, KeyError) as error:
        raise Unavailable(f"llama-bench said something else than was expected: {error}") from error
    return float(str(prefill)), float(str(decode))
