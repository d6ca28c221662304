"""Checks across sections: names that must exist, must be unique, or can never be reached."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from modelyard.config.engine_options import ConfigFinding
from modelyard.config.problems import suggest
from modelyard.config.settings import Config
from modelyard.core.errors import InvalidRequest
from modelyard.router.routes import glob_covers
from modelyard.router.settings import RouteSettings
from modelyard.workers import interpreter
from modelyard.workers.transport import endpoint_error


def check_config(
    config: Config, models: Collection[str], caches: Collection[str], env: Mapping[str, str]
) -> Iterator[ConfigFinding]:
    """`models` and `caches` are all names that were written, also of entries too broken to be in `config`."""
    public = [*models, *(alias for model in config.models.values() for alias in model.aliases)]
    yield from _caches(config, models)
    yield from _routes(config, public, caches)
    yield from _shadowed(config.routes)
    yield from _aliases(config)
    yield from _keys(config, env)
    yield from _files(config)
    yield from _interpreters(config)
    if config.default_model is not None and config.default_model not in public:
        yield ("default_model",), _no("model", config.default_model, public), "error"
    if config.scheduler.endpoint and (told := endpoint_error(config.scheduler.endpoint)) is not None:
        yield ("scheduler", "endpoint"), told, "error"


def _interpreters(config: Config) -> Iterator[ConfigFinding]:
    for name, model in config.models.items():
        try:
            interpreter.interpreter_path(model.python)
        except InvalidRequest as error:
            yield ("models", name, "python"), error.message, "unavailable"


def _no(what: str, name: str, known: Collection[str]) -> str:
    return f"there is no {what} {name!r}; known: {', '.join(known) or 'none'}.{suggest(name, known)}"


def _caches(config: Config, models: Collection[str]) -> Iterator[ConfigFinding]:
    for name, cache in config.caches.items():
        if cache.model not in models:
            yield ("caches", name, "model"), _no("model", cache.model, models), "error"
        elif name in models and name != cache.model:
            message = f"has the name of a model but is a cache of {cache.model!r}; rename one of them."
            yield ("caches", name), message, "error"
    for name, model in config.models.items():
        if model.n_ctx is not None and any(cache.model == name for cache in config.caches.values()):
            yield ("models", name, "n_ctx"), "is not used: the model's caches have windows of their own.", "warning"


def _routes(config: Config, public: Collection[str], caches: Collection[str]) -> Iterator[ConfigFinding]:
    with_caches = {cache.model for cache in config.caches.values()}
    known = [*caches, *(name for name in config.models if name not in with_caches)]
    for number, route in enumerate(config.routes):
        if route.model is not None and route.model not in public:
            yield ("routes", number, "model"), _no("model", route.model, public), "error"
        if route.cache is not None and route.cache not in known:
            yield ("routes", number, "cache"), _no("cache", route.cache, known), "error"
        yield from _disagreement(config, number, route)


def _disagreement(config: Config, number: int, route: RouteSettings) -> Iterator[ConfigFinding]:
    cache = config.caches.get(route.cache or "")
    model = config.models.get(cache.model) if cache else None
    if cache and model and route.model is not None and route.model not in {cache.model, *model.aliases}:
        message = f"cache {route.cache!r} belongs to {cache.model!r}, not to {route.model!r}; leave model out."
        yield ("routes", number, "model"), message, "error"


def _shadowed(routes: list[RouteSettings]) -> Iterator[ConfigFinding]:
    for number, route in enumerate(routes):
        for earlier in range(number):
            if _takes_all(routes[earlier], route):
                yield ("routes", number), f"is never reached: routes[{earlier}] takes all that it matches.", "warning"
                break


def _takes_all(earlier: RouteSettings, later: RouteSettings) -> bool:
    if not glob_covers(earlier.endpoint or "*", later.endpoint or "*"):
        return False
    return all(any(glob_covers(wide.lower(), narrow.lower()) for wide in earlier.match) for narrow in later.match)


def _aliases(config: Config) -> Iterator[ConfigFinding]:
    taken = dict.fromkeys(config.models, "the id of a model")
    for name, model in config.models.items():
        for number, alias in enumerate(model.aliases):
            if alias in taken:
                yield ("models", name, "aliases", number), f"{alias!r} is already {taken[alias]}.", "error"
            taken.setdefault(alias, f"an alias of {name!r}")


def _keys(config: Config, env: Mapping[str, str]) -> Iterator[ConfigFinding]:
    seen: set[str] = set()
    for number, key in enumerate(config.keys):
        if key.name in seen:
            yield ("keys", number, "name"), f"two keys are named {key.name!r}; names keep their owners apart.", "error"
        seen.add(key.name)
        if key.env is not None and not env.get(key.env):
            yield ("keys", number, "env"), f"the environment variable {key.env!r} is not set.", "error"
        if key.key is not None:
            message = "stands in the file in plain text. Write its hash (printf %s KEY | sha256sum) or use env."
            yield ("keys", number, "key"), message, "warning"


def _files(config: Config) -> Iterator[ConfigFinding]:
    for field in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(config.http, field)
        if path is not None and not path.is_file():
            yield ("http", field), f"there is no file {str(path)!r}.", "error"
