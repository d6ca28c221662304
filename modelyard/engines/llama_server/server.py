"""The llama-server program: its executable, command line and environment, and the reason of its failures.

In Modelyard a window is that of one conversation. llama-server divides its `--ctx-size` among its slots, so it gets
window × parallel. All caches of a model share these slots, each with the largest window of them.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.core.errors import ModelyardError
from modelyard.engines.llama_server.options import SPEC_ALIASES, LlamaServerOptions
from modelyard.engines.managed import ListenAddress, ServerCommand, child_environment, find_program
from modelyard.library import cores
from modelyard.library import llama_server as downloads
from modelyard.library.gguf import Task, read_purpose
from modelyard.library.model_files import locate_model_file

log = logging.getLogger(__name__)

_DEFAULT_TYPE = "f16"


def server_command(spec: EngineSpec) -> ServerCommand:
    options, caches = cast(LlamaServerOptions, spec.options), spec.caches
    if len(caches) > 1:
        log.warning("%s: llama-server has one set of slots for the caches %s", spec.model, ", ".join(caches))
    binary, model = find_binary(options.llama_server_binary), locate_model_file(options.path)
    host, port = options.llama_server_host, options.llama_server_port
    folder = tempfile.TemporaryDirectory(prefix="modelyard-llama-") if host is None and port is None else None
    address = ListenAddress.choose(folder, host, port)
    return ServerCommand(
        name="llama-server",
        model=str(model),
        argv=command_line(binary, model, options, caches, address),
        env=environment(options, address, os.environ),
        address=address.upstream(f"the llama-server of {spec.model!r}", options.llama_server_timeout_s),
        failure_reason=failure_reason,
        folder=folder,
    )


def find_binary(configured: str | None = None) -> str:
    return find_program(
        "llama_server_binary",
        configured,
        ("llama-server", downloads.binary_path()),
        "there is no llama-server on the PATH: set llama_server_binary, or download one with "
        "python setup/llama_server.py",
    )


_TASK_FLAGS: dict[str, Task] = {
    **dict.fromkeys(("--embedding", "--embeddings"), "embedding"),
    **dict.fromkeys(("--rerank", "--reranking"), "reranking"),
}


def server_task(options: LlamaServerOptions, header: Path | None = None) -> Task:
    """What the server is started for: as the extra arguments say, else what the model was trained for. `header` is a
    copy of its header, where the file is on another machine."""
    for argument in options.llama_server_extra_args:
        if argument in _TASK_FLAGS:
            return _TASK_FLAGS[argument]
    try:
        return read_purpose(header or locate_model_file(options.path)).task
    except ModelyardError:
        return "chat"  # llama-server explains what is wrong with the file


def _task_arguments(options: LlamaServerOptions, cache: CacheInfo) -> list[str]:
    """A text is embedded in one micro-batch, so that is as long as the window."""
    task = server_task(options)
    if task not in ("embedding", "reranking"):
        return []
    flags = ["--embeddings"] if task == "embedding" else ["--reranking"]
    for flag, rows in (("--batch-size", cache.n_batch), ("--ubatch-size", cache.n_ubatch)):
        flags += [flag, str(cache.window)] if rows is None else []
    return flags


def combined_cache(caches: Mapping[str, CacheInfo]) -> CacheInfo:
    """The caches of a model as llama-server has them: one, with the slots of all."""
    first = next(iter(caches.values()))
    return CacheInfo(
        max(cache.window for cache in caches.values()),
        sum(cache.parallel for cache in caches.values()),
        first.type_k,
        first.type_v,
        n_batch=first.n_batch,
        n_ubatch=first.n_ubatch,
        n_threads=first.n_threads,
        flash_attn=first.flash_attn,
    )


def flash_attention(options: LlamaServerOptions, cache: CacheInfo) -> str | None:
    if cache.flash_attn is None:
        return options.llama_server_flash_attn
    return "on" if cache.flash_attn else "off"


def command_line(
    binary: str, model: Path, options: LlamaServerOptions, caches: Mapping[str, CacheInfo], address: ListenAddress
) -> list[str]:
    cache = combined_cache(caches)
    argv = [binary, "--model", str(model), "--host", address.host]
    if address.port is not None:
        argv += ["--port", str(address.port)]
    argv += ["--ctx-size", str(cache.window * cache.parallel), "--parallel", str(cache.parallel)]
    argv += ["--jinja", "--no-webui", *_task_arguments(options, cache)]
    if options.spm_infill:
        argv.append("--spm-infill")
    for flag, value in _optional_flags(options, cache):
        if value is not None:
            argv += [flag, str(value)]
    return [*argv, *options.llama_server_extra_args]


def _optional_flags(options: LlamaServerOptions, cache: CacheInfo) -> Iterator[tuple[str, object]]:
    yield "--n-gpu-layers", options.llama_server_n_gpu_layers
    for flag, setting, threads in (
        (
            "--threads",
            "llama_server_n_threads",
            cache.n_threads or options.llama_server_n_threads or cores.physical_if_limited(),
        ),
        ("--threads-batch", "llama_server_n_threads_batch", options.llama_server_n_threads_batch),
    ):
        yield flag, None if threads is None else cores.bounded(threads, setting)
    yield "--batch-size", cache.n_batch
    yield "--ubatch-size", cache.n_ubatch
    yield "--flash-attn", flash_attention(options, cache)
    yield "--cache-type-k", cache.type_k if cache.type_k != _DEFAULT_TYPE else None
    yield "--cache-type-v", cache.type_v if cache.type_v != _DEFAULT_TYPE else None
    yield "--mmproj", _expand(options.llama_server_mmproj_path)
    yield "--image-max-tokens", options.llama_server_image_max_tokens
    yield "--model-draft", _expand(options.llama_server_draft_model_path)
    if (types := options.llama_server_spec_type) is not None:
        yield "--spec-type", ",".join(SPEC_ALIASES.get(type_, type_) for type_ in types.split(","))
    yield "--spec-draft-n-max", options.llama_server_spec_draft_n_max
    yield "--spec-draft-p-min", options.llama_server_spec_draft_p_min
    yield "--spec-draft-ngl", options.llama_server_spec_draft_ngl
    yield "--reasoning", options.llama_server_reasoning
    template = options.chat_template
    if template is not None and ("{" in template or "\n" in template):  # text, not a file
        yield "--chat-template", template
    else:
        yield "--chat-template-file", _expand(template)


def _expand(path: str | None) -> Path | None:
    return None if path is None else Path(path).expanduser()


def environment(options: LlamaServerOptions, address: ListenAddress, inherited: Mapping[str, str]) -> dict[str, str]:
    key = ("LLAMA_API_KEY", address.key)
    return child_environment(inherited, options.llama_server_env, options.llama_server_library_path, key)


# --- failure reasons --------------------------------------------------------------------------------------------------
# 0.00.077.094 E gguf_init_from_file: failed to open GGUF file '/nowhere.gguf' (No such file or directory)

_STAMP = re.compile(r"^\d+\.\d+\.\d+\.\d+ (?P<level>[A-Z]) ")
_ERROR = re.compile(r"error|fail|cannot|couldn't|unable|invalid|abort|assert|out of memory|not found", re.IGNORECASE)
_SUMMARY = re.compile(r"exiting due to|to show complete usage|cleaning up before exit")
_MAX_REASONS = 3


def failure_reason(lines: Sequence[str]) -> str:
    """The first errors in the log, without repetitions; later ones are usually consequences. Empty if a signal killed
    the program."""
    errors = (re.sub(r"\s+", " ", _STAMP.sub("", line)).strip() for line in lines if _is_error(line))
    return "; ".join(list(dict.fromkeys(errors))[:_MAX_REASONS])


def _is_error(line: str) -> bool:
    if not line.strip() or _SUMMARY.search(line):
        return False
    stamp = _STAMP.match(line)
    return stamp["level"] in "EF" if stamp else bool(_ERROR.search(line))
