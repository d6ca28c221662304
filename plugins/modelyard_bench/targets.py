"""The targets of a run, made from the command's options: an engine in this process, a server of our own, or a URL."""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct, field

from modelyard.config.settings import Config, LoadedConfig
from modelyard.core.engine import TextEngine
from modelyard.core.errors import InvalidRequest, NotFound, Timeout, Unavailable
from modelyard.library import default_model
from modelyard.processes.child_process import ChildProcess, describe_exit
from modelyard.protocols import openai_chat
from modelyard.router.router import CacheEntry
from modelyard.server.engine_factory import create_engine, model_spec
from modelyard.server.model_definition import define_model
from modelyard_bench.http_client import HttpClient
from modelyard_bench.load import ChatTarget, EngineTarget, LoadTarget, UrlTarget
from modelyard_bench.results import BenchmarkResults, Plan, TargetInfo, parse_duration
from modelyard_bench.workload import Workload, get_workload

T = TypeVar("T")

Status = Callable[[str], None]
LoadConfig = Callable[[Path | None], LoadedConfig]

_LABELS = "ABCDEFGH"
_ROUNDS, _ROUNDS_COMPARED = 3, 6
_LISTENING = re.compile(r"listening on (https?)://[^\s:]+:(\d+)")
_START_S, _LOAD_S, _POLL_S = 120.0, 900.0, 0.05
_LOG_LINES = 5  # of a server's output that explain why it ended


class TargetSpec(Struct, frozen=True, kw_only=True):
    """A target that is not opened yet. `max_streams` is how many requests it runs at once; None: it queues them."""

    name: str
    model: str
    open: Callable[[Status], AbstractAsyncContextManager[LoadTarget]]
    max_streams: int | None = None


class Access(Struct, frozen=True, kw_only=True):
    """How to call a server: its API key, extra fields for every request, and the time limit of a response."""

    key: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = 600.0


def url_target(url: str, model: str | None, access: Access) -> TargetSpec:
    target = lambda _: UrlTarget(url, model, key=access.key, extra=access.extra, limit_s=access.limit_s)  # noqa: E731
    return TargetSpec(name=url, model=model or "", open=target)


def engine_target(config: Config, name: str, cache: CacheEntry, workload: Workload, limit_s: float) -> TargetSpec:
    """The engine itself, as the pool would create it, without a server."""
    if workload.context_tokens > cache.info.window:
        raise InvalidRequest(
            f"a conversation of this workload takes {workload.context_tokens} tokens and the cache {cache.name} has "
            f"{cache.info.window}: set --prompt-tokens, --output-tokens or --turns lower, or its n_ctx higher"
        )

    @asynccontextmanager
    async def opened(status: Status) -> AsyncIterator[LoadTarget]:
        entry = config.router().catalog.models[cache.model]
        _fetch_default(config, cache.model, status)
        model = define_model(entry)
        engine = create_engine(model_spec(config, entry, model.fault))
        try:
            await engine.open(lambda done, what: status(f"{what} {done:.0%}"))
            if isinstance(engine, TextEngine):
                yield EngineTarget(engine, model.pipeline.tokenizer, name=name, cache=cache.name, limit_s=limit_s)
            else:
                yield ChatTarget(engine, model.name, name=name, limit_s=limit_s)
        finally:
            await engine.close()

    return TargetSpec(name=name, model=cache.model, open=opened, max_streams=cache.info.parallel)


def server_target(config: Config, path: Path | None, name: str, cache: CacheEntry, access: Access) -> TargetSpec:
    """A server that runs for the time of the measurement, in a child process."""
    model = model_name(config, cache)

    @asynccontextmanager
    async def opened(status: Status) -> AsyncIterator[LoadTarget]:
        _fetch_default(config, cache.model, status)
        async with (
            running_server(path, model, access.key, status) as url,
            UrlTarget(url, model, key=access.key, extra=access.extra, limit_s=access.limit_s, name=name) as target,
        ):
            yield target

    return TargetSpec(name=name, model=cache.model, open=opened)


def find_cache(config: Config, model: str | None, cache: str | None) -> CacheEntry:
    """The named cache, else the model's default; without a model, the first model's."""
    catalog = config.router().catalog
    if not catalog.models:
        raise NotFound("the configuration has no models")
    found = catalog.find(model or next(iter(catalog.models)))
    if found is None:
        raise NotFound(f"no model {model!r}; there are {', '.join(catalog.names())}")
    caches = catalog.models[found.model].caches
    if cache is not None and cache not in caches:
        raise NotFound(f"the model {found.model} has no cache {cache!r}; it has {', '.join(caches)}")
    return found if cache is None else caches[cache]


def model_name(config: Config, cache: CacheEntry) -> str:
    """A model name that requests can use to reach this cache."""
    router = config.router()
    entry = router.catalog.models[cache.model]
    for name in (entry.name, *entry.settings.aliases, cache.name):
        if router.resolve(name, "/v1/chat/completions").cache == cache.name:
            return name
    raise InvalidRequest(
        f"no route or name leads to the cache {cache.name} of {cache.model}: measure it in process, without --http"
    )


def _fetch_default(config: Config, model: str, status: Status) -> None:
    if default_model.is_default(config.models[model].path) and not default_model.is_fetched():
        status("fetching the default model")
        default_model.fetch()


# --- a server of our own ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def running_server(config: Path | None, model: str, key: str | None, status: Status) -> AsyncIterator[str]:
    """`modelyard serve` in a child process on a free port; its URL, once the model is loaded."""
    file = () if config is None else ("--config", str(config))
    argv = [sys.executable, "-m", "modelyard", "serve", "--host", "127.0.0.1", "--port", "0", *file]
    child = await ChildProcess.start(argv, dict(os.environ))
    try:
        status("starting a server")
        url = await _within(_START_S, "listen", _listening_url(child))
        status("loading the model")
        await _within(_LOAD_S, "load the model", _wait_until_ready(child, url, model, key))
        yield url
    finally:
        await child.stop()


async def _within(seconds: float, what: str, wait: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await wait
    except TimeoutError:
        raise Timeout(f"the server did not {what} within {seconds:g} s") from None


async def _listening_url(child: ChildProcess) -> str:
    while True:
        for line in child.log.lines():
            if found := _LISTENING.search(line):
                return f"{found.group(1)}://127.0.0.1:{found.group(2)}"
        await _poll(child)


async def _wait_until_ready(child: ChildProcess, url: str, model: str, key: str | None) -> None:
    async with aclosing(HttpClient(url, key=key)) as http:
        while True:
            reply = await http.send("GET", f"/v1/models/{quote(model)}", b"", 60.0)
            if reply.error is not None:
                raise Unavailable(f"the server does not respond: {reply.error}")
            if reply.status != 200:
                raise openai_chat.read_error(reply.status, reply.headers, reply.body)
            state = msgspec.json.decode(reply.body)["state"]
            if state == "failed":
                raise Unavailable(f"the server could not load {model!r}: {child.log.tail(_LOG_LINES)}")
            if state not in ("loading", "starting"):
                return  # ready, or loaded by the first request
            await _poll(child)


async def _poll(child: ChildProcess) -> None:
    await asyncio.wait({child.ended}, timeout=_POLL_S)
    if child.ended.done():
        output = child.log.tail(_LOG_LINES) or "it printed nothing"
        raise Unavailable(f"the server {describe_exit(child.ended.result())}: {output}")


# --- the command's options --------------------------------------------------------------------------------------------


class BenchOptions(Struct, frozen=True, kw_only=True):
    """The options of `modelyard bench` as typed; None: not given."""

    urls: tuple[str, ...] = ()
    configs: tuple[Path, ...] = ()
    models: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    cache: str | None = None
    http: bool = False
    workload: str = "chat"
    streams: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    turns: int | None = None
    requests: int | None = None
    duration: str | None = None
    rounds: int | None = None
    warmup: int = 1
    seed: int | None = None
    limit: str = "10m"
    body: str | None = None


class TargetOptions(Struct, frozen=True):
    """The options of one target: a URL, else a configuration file (None: the one that `serve` uses)."""

    url: str | None
    config: Path | None
    model: str | None
    key: str | None


def prepare(options: BenchOptions, load_config: LoadConfig) -> tuple[list[TargetSpec], BenchmarkResults]:
    """Check the options before anything is opened; the targets, and empty results with the plan."""
    workload = _workload(options)
    specs = [_target(one, options, workload, load_config) for one in target_options(options)]
    plan, notes = _plan(options, workload, specs)
    infos = [TargetInfo(label, spec.name, spec.model) for label, spec in zip(_LABELS, specs, strict=False)]
    results = BenchmarkResults(plan, infos)
    results.notes += notes
    return specs, results


def target_options(options: BenchOptions) -> list[TargetOptions]:
    """One model applies to all sources; several models need one source, or one source each."""
    sources: list[tuple[str | None, Path | None]] = [(url, None) for url in options.urls]
    sources += [(None, config) for config in options.configs]
    sources = sources or [(None, None)]
    count = max(len(sources), len(options.models))
    if count > len(_LABELS):
        raise InvalidRequest(f"one run measures at most {len(_LABELS)} targets")
    models = _one_for_each("--model", options.models, count)
    keys = _one_for_each("--key", options.keys, count)
    repeated = sources * count if len(sources) == 1 else sources
    if len(repeated) != count:
        raise InvalidRequest(f"{len(sources)} targets and {count} models: give one --model for all, or one for each")
    return [TargetOptions(*source, model, key) for source, model, key in zip(repeated, models, keys, strict=True)]


def _one_for_each(option: str, given: Sequence[str], count: int) -> list[str | None]:
    if len(given) <= 1:
        return [given[0] if given else None] * count
    if len(given) != count:
        raise InvalidRequest(f"give {option} once for all {count}, or once for each of them")
    return list(given)


def _target(one: TargetOptions, options: BenchOptions, workload: Workload, load_config: LoadConfig) -> TargetSpec:
    limit_s = parse_duration(options.limit)
    try:
        extra = msgspec.json.decode(options.body, type=dict[str, Any]) if options.body else {}
    except msgspec.MsgspecError:
        raise InvalidRequest("--body must be a JSON object, such as '{\"ignore_eos\": true}'") from None
    access = Access(key=one.key, extra=extra, limit_s=limit_s)
    if one.url is not None:
        return url_target(one.url, one.model, access)
    loaded = load_config(one.config)
    config, name = loaded.config, ", ".join(map(str, loaded.sources))
    cache = find_cache(config, one.model or loaded.first_model, options.cache)
    if options.http:
        return server_target(config, one.config, name, cache, access)
    return engine_target(config, name, cache, workload, limit_s)


def _workload(options: BenchOptions) -> Workload:
    changes = {name: getattr(options, name) for name in ("prompt_tokens", "output_tokens", "turns")}
    workload = get_workload(options.workload, **changes)
    if workload.turns > 1 and not workload.turn_tokens:
        workload = msgspec.structs.replace(workload, turn_tokens=workload.prompt_tokens)
    return workload


def _plan(options: BenchOptions, workload: Workload, specs: Sequence[TargetSpec]) -> tuple[Plan, list[str]]:
    if options.requests is not None and options.duration is not None:
        raise InvalidRequest("give --requests or --duration, not both")
    streams, notes = _streams(options.streams, workload, specs)
    plan = Plan(
        workload=workload,
        streams=streams,
        rounds=options.rounds or (_ROUNDS if len(specs) == 1 else _ROUNDS_COMPARED),
        requests=options.requests,
        seconds=None if options.duration is None else parse_duration(options.duration),
        warmup=options.warmup,
        seed=options.seed if options.seed is not None else random.randrange(10**9),  # noqa: S311  prompts, not secrets
    )
    return plan, notes


def _streams(given: str | None, workload: Workload, specs: Sequence[TargetSpec]) -> tuple[tuple[int, ...], list[str]]:
    """An engine in process does not queue: no more streams than it runs at once."""
    wanted = _parse_streams(given) if given is not None else (workload.streams,)
    limits = [(spec.max_streams, spec.model) for spec in specs if spec.max_streams is not None]
    limit, model = min(limits, default=(max(wanted), ""))
    if max(wanted) <= limit:
        return wanted, []
    short = f"the cache of {model} has {limit} slot{'' if limit == 1 else 's'}"
    if given is not None:
        most = max(wanted)
        raise InvalidRequest(f"{short} and -c asks for {most}: set its parallel to {most}, or let them queue: --http")
    return (limit,), [f"{short}: measured with {limit} streams instead of {workload.streams}"]


def _parse_streams(text: str) -> tuple[int, ...]:
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise InvalidRequest(f"-c {text!r} is not a list of numbers such as 1,4,8")
    return found
