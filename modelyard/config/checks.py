"""Checks of a valid configuration: engine options, and names that must exist, be unique and be reachable."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel, ValidationError

from modelyard import plugins
from modelyard.config.problems import ConfigPath, ProblemLevel, Table, errors_by_setting, suggest, validation_messages
from modelyard.config.settings import FOREIGN_SECTIONS, Config, engine_options, keys_by_section, options_input
from modelyard.core.errors import InvalidRequest
from modelyard.prompt import template_source
from modelyard.router.router import Route, Router, build_catalog, glob_covers
from modelyard.router.settings import MODEL_KEYS, CacheSettings, ModelSettings
from modelyard.scanner import formats
from modelyard.workers import interpreter
from modelyard.workers.transport import endpoint_error, scheduler_address

ConfigFinding = tuple[ConfigPath, str, ProblemLevel]
_NAMES_SHOWN = 3


def check_config(config: Config, merged: Table, env: Mapping[str, str]) -> Iterator[ConfigFinding]:
    """`merged` is the configuration before validation: names are looked up and checked in entries that `config` lacks,
    because another value of them is invalid."""
    models, caches = _named_tables(merged, "models"), _named_tables(merged, "caches")
    public = [*models, *(alias for model in config.models.values() for alias in model.aliases)]
    for name, model in config.models.items():
        yield from _check_model(("models", name), model)
        yield from _check_kv_types(name, model, config.caches)
    yield from _check_caches(config, models, caches)
    yield from _check_routes(config, merged.get("routes"), public, caches)
    yield from _check_mcp(config, merged, env)
    yield from _check_fallbacks(config, public, caches)
    yield from _check_shadows(config)
    yield from _check_aliases(config)
    yield from _check_keys(config, env)
    for field in ("ssl_certfile", "ssl_keyfile"):
        file = getattr(config.http, field)
        if file is not None and not file.is_file():
            yield ("http", field), f"there is no file {str(file)!r}.", "error"
    if config.default_model is not None and config.default_model not in public:
        yield ("default_model",), _unknown("model", config.default_model, public), "error"
    endpoint = config.scheduler.endpoint
    if endpoint and (message := endpoint_error(scheduler_address(endpoint))) is not None:
        yield ("scheduler", "endpoint"), message, "error"


def _named_tables(merged: Table, section: str) -> Table:
    return table if isinstance(table := merged.get(section), dict) else {}


def _unknown(what: str, name: str, known: Collection[str]) -> str:
    return f"there is no {what} {name!r}; known: {', '.join(known) or 'none'}.{suggest(name, known)}"


def _check_model(path: ConfigPath, model: ModelSettings) -> Iterator[ConfigFinding]:
    try:
        interpreter.interpreter_path(model.python)
    except InvalidRequest as error:
        yield (*path, "python"), error.message, "unavailable"
    for field, value, known in (
        ("format", model.format, formats.names()),
        ("prompt_format", model.prompt_format, template_source.prompt_formats()),
    ):
        if value is not None and value not in known:
            hint = suggest(value, known) or f" Choose one of {', '.join(known)}."
            yield (*path, field), f"there is no {field} {value!r}.{hint}", "error"
    if model.force_prompt_format:
        yield (*path, "force_prompt_format"), _forced_format(model), "warning"
    engines, backend = plugins.names("engines"), model.backend
    if backend is None:
        return
    if backend not in engines:
        message = f"{backend!r} is not one of the engines of this build: {', '.join(engines) or 'none'}."
        yield (*path, "backend"), message + suggest(backend, engines), "unavailable"
        return
    try:
        yield from _check_known_names(path, backend, engine_options(model))
    except plugins.MissingLibrary as error:
        yield (*path, "backend"), error.message, "unavailable"
    except InvalidRequest as error:  # an option that names an unreadable file
        yield path, error.message, "error"
    except ValidationError as error:
        accepted = MODEL_KEYS | plugins.engine(backend).Options.model_fields.keys()
        for loc, errors in errors_by_setting(error.errors(), options_input(model)).items():
            if errors[0]["type"] == "extra_forbidden" and len(loc) == 1:
                message = f"unknown key; it is neither common to all models nor an option of {backend}."
                message += _owner_hint(str(loc[0])) or suggest(str(loc[0]), accepted)
            else:
                message = validation_messages(errors)
            yield (*path, *loc), message, "error"


def _forced_format(model: ModelSettings) -> str:
    if model.chat_template is not None:
        return "is not used: chat_template is set."
    if model.prompt_format is None:
        return "is not used: prompt_format is not set."
    return (
        f"prompt_format {model.prompt_format} replaces the model's own template, and its wording is not the one that "
        "the model was trained on. Remove it unless the file's template is missing or wrong."
    )


def _owner_hint(key: str) -> str:
    """Where a key that a model does not have belongs."""
    sections = [name for name, keys in keys_by_section().items() if key in keys and name not in FOREIGN_SECTIONS]
    if sections:
        return f" It belongs into [{sections[0]}]."
    owners = [name for name in plugins.names("engines") if key in _option_names(name)]
    return f" It is an option of {' and '.join(owners)}." if owners else ""


def _option_names(engine: str) -> Collection[str]:
    try:
        options: type[BaseModel] = plugins.engine(engine).Options
    except plugins.MissingLibrary:
        return ()
    return options.model_fields.keys()


def _check_known_names(path: ConfigPath, backend: str, options: BaseModel) -> Iterator[ConfigFinding]:
    """Names that another program defines: its version decides, so an unknown one is a warning."""
    known_names = plugins.engine(backend).known_names
    for option, known in known_names.items():
        value = getattr(options, option, None)
        if value is not None and value.lower() not in known:
            hint = suggest(value, known) or f" Known: {', '.join(known)}."
            yield (*path, option), f"the versions of {backend} that we know have no {value!r}.{hint}", "warning"


def _check_kv_types(name: str, model: ModelSettings, caches: Mapping[str, CacheSettings]) -> Iterator[ConfigFinding]:
    """Data types of the KV cache are names of the engine; some engines have their own setting for them."""
    backend = model.backend or ""
    if backend not in plugins.names("engines"):
        return
    try:
        types: Collection[str] | None = plugins.engine(backend).kv_types
    except plugins.MissingLibrary:
        return  # reported with the model
    own = {cache_name: cache for cache_name, cache in caches.items() if cache.model == name}
    settings = {("models", name): model, **{("caches", cache_name): cache for cache_name, cache in own.items()}}
    for path, section in settings.items():
        for field in ("type_k", "type_v"):
            value = getattr(section, field)
            if value is not None and types is None:
                yield (*path, field), f"is not used: {backend} does not have this setting.", "warning"
            elif value is not None and value not in (types or ()):
                message = f"must be one of {', '.join(types or ())}, got {value!r}.{suggest(value, types or ())}"
                yield (*path, field), message, "error"


def _check_caches(config: Config, models: Collection[str], caches: Table) -> Iterator[ConfigFinding]:
    for name, cache in caches.items():
        model = cache.get("model") if isinstance(cache, dict) else None
        if not isinstance(model, str):
            continue  # reported by the validation
        if model not in models:
            yield ("caches", name, "model"), _unknown("model", model, models), "error"
        elif name in models and name != model:
            message = f"has the name of a model but is a cache of {model!r}; rename one of them."
            yield ("caches", name), message, "error"
    for name, model in config.models.items():
        if model.n_ctx is not None and any(cache.model == name for cache in config.caches.values()):
            yield ("models", name, "n_ctx"), "is not used: the model's caches set their own windows.", "warning"


def _check_routes(
    config: Config, routes: Any, public: Collection[str], caches: Collection[str]
) -> Iterator[ConfigFinding]:
    with_caches = {cache.model for cache in config.caches.values()}
    known = [*caches, *(name for name in config.models if name not in with_caches)]
    for number, route in enumerate(routes if isinstance(routes, list) else ()):
        wanted, target = (route.get("model"), route.get("cache")) if isinstance(route, dict) else (None, None)
        if isinstance(wanted, str) and wanted not in public:
            yield ("routes", number, "model"), _unknown("model", wanted, public), "error"
        if isinstance(target, str) and target not in known:
            yield ("routes", number, "cache"), _unknown("cache", target, known), "error"
        cache = config.caches.get(target) if isinstance(target, str) else None
        model = config.models.get(cache.model) if cache else None
        if cache and model and isinstance(wanted, str) and wanted not in {cache.model, *model.aliases}:
            message = f"cache {target!r} belongs to {cache.model!r}, not to {wanted!r}; leave model out."
            yield ("routes", number, "model"), message, "error"


def _check_fallbacks(config: Config, public: Collection[str], caches: Collection[str]) -> Iterator[ConfigFinding]:
    """Each place is tried once: a second time would be a loop."""
    known = {*public, *caches}
    catalog = build_catalog(config.models, config.caches, config.decoding)
    for number, route in enumerate(config.routes):
        own = catalog.caches.get(route.cache) if route.cache is not None else catalog.find(route.model or "")
        seen = {} if own is None else {own.name: "the route's own target"}
        for at, name in enumerate(route.fallback):
            if name not in known:
                yield ("routes", number, "fallback"), _unknown("model or cache", name, [*public, *caches]), "error"
            elif (cache := catalog.find(name)) is not None:
                if cache.name in seen:
                    message = f"{name!r} is {seen[cache.name]} already; a route cannot fall back to what has failed."
                    yield ("routes", number, "fallback"), message, "error"
                seen.setdefault(cache.name, f"fallback {at + 1}")
        if route.fallback_wait_s is not None and not route.fallback:
            yield ("routes", number, "fallback_wait_s"), "is not used: the route has no fallback.", "warning"


def _check_mcp(config: Config, merged: Table, env: Mapping[str, str]) -> Iterator[ConfigFinding]:
    servers = _named_tables(_named_tables(merged, "mcp"), "servers")
    for number, route in enumerate(config.routes):
        for name in route.mcp:
            if name not in servers:
                yield ("routes", number, "mcp"), _unknown("MCP server", name, servers), "error"
    for name, server in config.mcp.servers.items():
        for variable in (*server.env_from, *filter(None, [server.token_env])):
            if not env.get(variable):
                setting = "token_env" if variable == server.token_env else "env_from"
                message = f"the environment variable {variable!r} is not set."
                yield ("mcp", "servers", name, setting), message, "warning"
    if config.mcp.is_on and find_spec("mcp") is None:
        message = "MCP servers need the Python package 'mcp': install it with pip install 'modelyard[mcp]'."
        yield ("mcp",), message, "unavailable"


def _check_shadows(config: Config) -> Iterator[ConfigFinding]:
    """Routes that take the names of other models, those that may be meant to, and those that nothing reaches."""
    try:
        router = config.router()
    except InvalidRequest:
        return  # a name that does not exist is reported by the other checks
    for number, route in enumerate(router.routes):
        found = list(router.shadowed(number))
        for name, cache, is_taken in found:
            if is_taken:
                message = f"takes {name!r}, a name of the model {cache.model}: {route.target.model} answers to it."
                yield ("routes", number), message, "warning"
        kept = [name for name, _, is_taken in found if not is_taken]
        if kept and "*" not in route.match:
            names = ", ".join(kept[:_NAMES_SHOWN]) + (" and others" if kept[_NAMES_SHOWN:] else "")
            message = f"does not apply to {names}: a pattern leaves the names of other models alone, unless override"
            yield ("routes", number), f"{message} is true.", "warning"
        for earlier, other in enumerate(router.routes[:number]):
            if _covers(other, route) and not _has_own_names(router, route, other):
                message = f"is never reached: routes[{earlier}] matches everything that it matches."
                yield ("routes", number), message, "warning"
                break


def _covers(earlier: Route, later: Route) -> bool:
    """An exact name comes before every pattern, and only `override` takes the names of other models."""
    if not glob_covers(earlier.endpoint or "*", later.endpoint or "*") or later.override > earlier.override:
        return False
    return all(
        narrow in earlier.exact if narrow in later.exact else any(glob_covers(wide, narrow) for wide in earlier.match)
        for narrow in later.match
    )


def _has_own_names(router: Router, route: Route, earlier: Route) -> bool:
    """Whether a pattern matches names of its own model, which the earlier one for another model leaves alone."""
    model = router.catalog.models[route.target.model]
    if earlier.override or earlier.target.model == model.name:
        return False
    return any(route.matches(name.lower()) for name in (model.name, *model.settings.aliases, route.target.cache))


def _check_aliases(config: Config) -> Iterator[ConfigFinding]:
    taken = dict.fromkeys(config.models, "the id of a model")
    for name, model in config.models.items():
        for number, alias in enumerate(model.aliases):
            cache = config.caches.get(alias)
            if cache is not None and cache.model != name:
                yield ("models", name, "aliases", number), f"{alias!r} is a cache of {cache.model!r}.", "error"
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
