"""The command line and environment of a llama-server, worked out of a model's fields. Pure.

A window is ONE conversation's here, and llama-server divides its `--ctx-size` among its slots: it is told window ×
parallel. All caches of a model share its slots, which have the widest window of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from modelyard.core.engine import CacheInfo
from modelyard.engines.llama_server.options import Options
from modelyard.engines.managed.listening import Listening

_SPEC_TYPES = {"draft": "draft-simple", "mtp": "draft-mtp", "eagle3": "draft-eagle3"}
_DEFAULT_TYPE = "f16"


def command(binary: str, model: Path, options: Options, caches: Mapping[str, CacheInfo], at: Listening) -> list[str]:
    return [binary, *_arguments(model, options, caches, at), *options.llama_server_extra_args]


def shared(caches: Mapping[str, CacheInfo]) -> CacheInfo:
    """The caches of a model as llama-server has them: one, of so many slots."""
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


def _arguments(model: Path, options: Options, caches: Mapping[str, CacheInfo], at: Listening) -> Iterator[str]:
    cache = shared(caches)
    yield from ("--model", str(model), "--host", at.host)
    if at.port is not None:
        yield from ("--port", str(at.port))
    yield from ("--ctx-size", str(cache.window * cache.parallel), "--parallel", str(cache.parallel))
    yield from ("--jinja", "--no-webui")
    for flag, value in _valued(options, cache):
        if value is not None:
            yield from (flag, str(value))


def _valued(options: Options, cache: CacheInfo) -> Iterator[tuple[str, object]]:
    yield "--n-gpu-layers", options.llama_server_n_gpu_layers
    yield "--threads", cache.n_threads or options.llama_server_n_threads
    yield "--threads-batch", options.llama_server_n_threads_batch
    yield "--batch-size", cache.n_batch
    yield "--ubatch-size", cache.n_ubatch
    yield "--flash-attn", _flash_attn(options, cache)
    yield "--cache-type-k", cache.type_k if cache.type_k != _DEFAULT_TYPE else None
    yield "--cache-type-v", cache.type_v if cache.type_v != _DEFAULT_TYPE else None
    yield "--mmproj", _file(options.llama_server_mmproj_path)
    yield "--image-max-tokens", options.llama_server_image_max_tokens
    yield "--model-draft", _file(options.llama_server_draft_model_path)
    yield "--spec-type", _spec_type(options.llama_server_spec_type)
    yield "--spec-draft-n-max", options.llama_server_spec_draft_n_max
    yield "--spec-draft-p-min", options.llama_server_spec_draft_p_min
    yield "--spec-draft-ngl", options.llama_server_spec_draft_ngl
    yield "--reasoning", options.llama_server_reasoning
    yield _template(options.chat_template)


def _flash_attn(options: Options, cache: CacheInfo) -> str | None:
    if cache.flash_attn is None:
        return options.llama_server_flash_attn
    return "on" if cache.flash_attn else "off"


def _file(path: str | None) -> Path | None:
    return None if path is None else Path(path).expanduser()


def _spec_type(told: str | None) -> str | None:
    return None if told is None else ",".join(_SPEC_TYPES.get(one, one) for one in told.split(","))


def _template(told: str | None) -> tuple[str, object]:
    """A text or a file, told apart as everywhere: a template has braces."""
    is_text = told is not None and ("{" in told or "\n" in told)
    return ("--chat-template", told) if is_text else ("--chat-template-file", _file(told))


def environment(options: Options, at: Listening, inherited: Mapping[str, str]) -> dict[str, str]:
    """The key travels here and not on the command line, where every user of the machine could read it."""
    env = {**inherited, **options.llama_server_env}
    if at.key:
        env["LLAMA_API_KEY"] = at.key
    else:
        env.pop("LLAMA_API_KEY", None)
    if options.llama_server_library_path:
        before = [str(Path(folder).expanduser()) for folder in options.llama_server_library_path]
        env["LD_LIBRARY_PATH"] = ":".join([*before, *filter(None, [env.get("LD_LIBRARY_PATH")])])
    return env
