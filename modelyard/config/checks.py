"""Checks of a valid configuration: engine options, and names that must exist, be unique and be reachable."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from pydantic import ValidationError

from modelyard import plugins
from modelyard.config.problems import ConfigPath, ProblemLevel, suggest, validation_message
from modelyard.config.settings import Config, engine_options
from modelyard.core.errors import InvalidRequest
from modelyard.router.router import glob_covers
from modelyard.router.settings import MODEL_KEYS, ModelSettings, RouteSettings
from modelyard.workers import interpreter
from modelyard.workers.transport import endpoint_error

ConfigFinding = tuple[ConfigPath, str, ProblemLevel]


def check_config(
    config: Config, models: Collection[str], caches: Collection[str], env: Mapping[str, str]
) -> Iterator[ConfigFinding]:
    """`models` and `caches` are all names in the sources, including invalid entries that `config` lacks."""
    public = [*models, *(alias for model in config.models.values() for alias in model.aliases)]
    for name, model in config.models.items():
        yield from _check_model(("models", name), model)
    yield from _check_caches(config, models)
    yield from _check_routes(config, public, caches)
    yield from _check_unreachable_routes(config.routes)
    yield from _check_aliases(config)
    yield from _check_keys(config, env)
    for field in ("ssl_certfile", "ssl_keyfile"):
        file = getattr(config.http, field)
        if file is not None and not file.is_file():
            yield ("http", field), f"there is no file {str(file)!r}.", "error"
    if config.default_model is not None and config.default_model not in public:
        yield ("default_model",), _unknown("model", config.default_model, public), "error"
    if config.scheduler.endpoint and (message := endpoint_error(config.scheduler.endpoint)) is not None:
        yield ("scheduler", "endpoint"), message, "error"


def _unknown(what: str, name: str, known: Collection[str]) -> str:
    return f"there is no {what} {name!r}; known: {', '.join(known) or 'none'}.{suggest(name, known)}"


def _check_model(path: ConfigPath, model: ModelSettings) -> Iterator[ConfigFinding]:
    try:
        interpreter.interpreter_path(model.python)
    except InvalidRequest as error:
        yield (*path, "python"), error.message, "unavailable"
    engines, backend = plugins.names("engines"), model.backend
    if backend is None:
        return
    if backend not in engines:
        message = f"{backend!r} is not one of the engines of this build: {', '.join(engines) or 'none'}."
        yield (*path, "backend"), message + suggest(backend, engines), "unavailable"
        return
    try:
        engine_options(model)
    except plugins.MissingLibrary as error:
        yield (*path, "backend"), error.message, "unavailable"
    except InvalidRequest as error:  # an option that names an unreadable file
        yield path, error.message, "error"
    except ValidationError as error:
        known = MODEL_KEYS | plugins.load("engines", backend).Options.model_fields.keys()
        for details in error.errors():
            if details["type"] == "extra_forbidden" and len(details["loc"]) == 1:
                message = f"unknown key; it is neither common to all models nor an option of {backend}."
                message += suggest(str(details["loc"][0]), known)
            else:
                message = validation_message(details)
            yield (*path, *details["loc"]), message, "error"


def _check_caches(config: Config, models: Collection[str]) -> Iterator[ConfigFinding]:
    for name, cache in config.caches.items():
        if cache.model not in models:
            yield ("caches", name, "model"), _unknown("model", cache.model, models), "error"
        elif name in models and name != cache.model:
            message = f"has the name of a model but is a cache of {cache.model!r}; rename one of them."
            yield ("caches", name), message, "error"
    for name, model in config.models.items():
        if model.n_ctx is not None and any(cache.model == name for cache in config.caches.values()):
            yield ("models", name, "n_ctx"), "is not used: the model's caches set their own windows.", "warning"


def _check_routes(config: Config, public: Collection[str], caches: Collection[str]) -> Iterator[ConfigFinding]:
    with_caches = {cache.model for cache in config.caches.values()}
    known = [*caches, *(name for name in config.models if name not in with_caches)]
    for number, route in enumerate(config.routes):
        if route.model is not None and route.model not in public:
            yield ("routes", number, "model"), _unknown("model", route.model, public), "error"
        if route.cache is not None and route.cache not in known:
            yield ("routes", number, "cache"), _unknown("cache", route.cache, known), "error"
        cache = config.caches.get(route.cache or "")
        model = config.models.get(cache.model) if cache else None
        if cache and model and route.model is not None and route.model not in {cache.model, *model.aliases}:
            message = f"cache {route.cache!r} belongs to {cache.model!r}, not to {route.model!r}; leave model out."
            yield ("routes", number, "model"), message, "error"


def _check_unreachable_routes(routes: list[RouteSettings]) -> Iterator[ConfigFinding]:
    for number, route in enumerate(routes):
        for earlier in range(number):
            if _covers(routes[earlier], route):
                message = f"is never reached: routes[{earlier}] matches everything that it matches."
                yield ("routes", number), message, "warning"
                break


def _covers(earlier: RouteSettings, later: RouteSettings) -> bool:
    if not glob_covers(earlier.endpoint or "*", later.endpoint or "*"):
        return False
    return all(any(glob_covers(wide.lower(), narrow.lower()) for wide in earlier.match) for narrow in later.match)


def _check_aliases(config: Config) -> Iterator[ConfigFinding]:
    taken = dict.fromkeys(config.models, "the id of a model")
    for name, model in config.models.items():
        for number, alias in enumerate(model.aliases):
            if alias in taken:
                yield ("models", name, "aliases", number), f"{alias!r} is already {taken[alias]}.", "error"
            taken.setdefault(alias, f"an alias of {name!r}")


def _check_keys(config: Config, env: Mapping[str, str]) -> Iterator[ConfigFinding]:
    seen: set[str] = set()
    for number, key in enumerate(config.keys):
        if key.name in seen:
            yield ("keys", number, "name"), f"two keys are named {key.name!r}; key names must be unique.", "error"
        seen.add(key.name)
        if key.env is not None and not env.get(key.env):
            yield ("keys", number, "env"), f"the environment variable {key.env!r} is not set.", "error"
        if key.key is not None:
            message = "is plain text in the file. Write its hash (printf %s KEY | sha256sum) or use env."
            yield ("keys", number, "key"), message, "warning"
