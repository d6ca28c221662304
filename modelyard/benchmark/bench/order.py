"""What the user has ordered, checked and made into subjects and a plan. Nothing is opened yet."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from modelyard.benchmark.bench import subjects
from modelyard.benchmark.bench.book import Book, Subject
from modelyard.benchmark.bench.plan import Plan
from modelyard.benchmark.bench.subjects import Access, Candidate
from modelyard.benchmark.durations import seconds
from modelyard.benchmark.workload import Workload, named
from modelyard.config.load import LoadedConfig
from modelyard.core.errors import InvalidRequest

Load = Callable[[Path | None], LoadedConfig]
_LABELS = "ABCDEFGH"
_ROUNDS, _ROUNDS_COMPARED = 3, 6


class Order(Struct, frozen=True, kw_only=True):
    """As it was typed; None is what nobody has said."""

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


class Place(Struct, frozen=True):
    """Where a subject is: at a URL, else in a configuration's file; None is the one that `serve` would take."""

    url: str | None
    config: Path | None
    model: str | None
    key: str | None


def prepare(order: Order, load: Load) -> tuple[list[Candidate], Book]:
    workload = _workload(order)
    candidates = [_candidate(place, order, workload, load) for place in places(order)]
    plan, said = _plan(order, workload, candidates)
    told = zip(_LABELS, candidates, strict=False)
    book = Book(plan, [Subject(label, candidate.name, candidate.model) for label, candidate in told])
    book.notes += said
    return candidates, book


def places(order: Order) -> list[Place]:
    """One model is meant for every place, several places for one model each; else nobody could tell who is who."""
    where: list[tuple[str | None, Path | None]] = [(url, None) for url in order.urls]
    where += [(None, config) for config in order.configs]
    where = where or [(None, None)]
    count = max(len(where), len(order.models))
    if count > len(_LABELS):
        raise InvalidRequest(f"at most {len(_LABELS)} can be measured in one run")
    models = _spread("--model", order.models, count)
    keys = _spread("--key", order.keys, count)
    spots = where * count if len(where) == 1 else where
    if len(spots) != count:
        raise InvalidRequest(f"{len(where)} places and {count} models: give one --model for all, or one for each")
    return [Place(url, config, model, key) for (url, config), model, key in zip(spots, models, keys, strict=True)]


def _spread(option: str, given: Sequence[str], count: int) -> list[str | None]:
    if len(given) <= 1:
        return [given[0] if given else None] * count
    if len(given) != count:
        raise InvalidRequest(f"give {option} once for all {count}, or once for each of them")
    return list(given)


def _candidate(place: Place, order: Order, workload: Workload, load: Load) -> Candidate:
    limit = seconds(order.limit)
    access = Access(key=place.key, extra=_body(order.body), limit_s=limit)
    if place.url is not None:
        return subjects.at_url(place.url, place.model, access)
    loaded = load(place.config)
    config, name = loaded.config, ", ".join(map(str, loaded.source))
    cache = subjects.find(config, place.model, order.cache)
    if order.http:
        return subjects.over_http(config, place.config, name, cache, access)
    return subjects.in_process(config, name, cache, workload, limit)


def _body(text: str | None) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any]) if text else {}
    except msgspec.MsgspecError:
        raise InvalidRequest("--body must be a JSON object, such as '{\"ignore_eos\": true}'") from None


def _workload(order: Order) -> Workload:
    changes = {name: getattr(order, name) for name in ("prompt_tokens", "output_tokens", "turns")}
    found = named(order.workload, **changes)
    if found.turns > 1 and not found.turn_tokens:
        found = msgspec.structs.replace(found, turn_tokens=found.prompt_tokens)
    return found


def _plan(order: Order, workload: Workload, candidates: Sequence[Candidate]) -> tuple[Plan, list[str]]:
    if order.requests is not None and order.duration is not None:
        raise InvalidRequest("a round is measured by --requests or by --duration, not by both")
    streams, said = _streams(order.streams, workload, candidates)
    plan = Plan(
        workload=workload,
        streams=streams,
        rounds=order.rounds or (_ROUNDS if len(candidates) == 1 else _ROUNDS_COMPARED),
        requests=order.requests,
        seconds=None if order.duration is None else seconds(order.duration),
        warmup=order.warmup,
        seed=order.seed if order.seed is not None else random.randrange(10**9),  # noqa: S311  texts, not secrets
    )
    return plan, said


def _streams(
    asked: str | None, workload: Workload, candidates: Sequence[Candidate]
) -> tuple[tuple[int, ...], list[str]]:
    """An engine never queues: no more streams than it has places."""
    tightest = min((c for c in candidates if c.places is not None), key=lambda c: c.places or 0, default=None)
    wanted = _numbers(asked) if asked is not None else (workload.streams,)
    if tightest is None or tightest.places is None or max(wanted) <= tightest.places:
        return wanted, []
    many = "place" if tightest.places == 1 else "places"
    short = f"the cache of {tightest.model} has {tightest.places} {many}"
    if asked is not None:
        most = max(wanted)
        raise InvalidRequest(f"{short} and -c asks for {most}: set its parallel to {most}, or let them queue: --http")
    return (tightest.places,), [f"{short}: measured with {tightest.places} streams instead of {workload.streams}"]


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise InvalidRequest(f"-c {text!r} is no list of numbers such as 1,4,8")
    return found
