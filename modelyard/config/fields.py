"""The fields of a model, a cache or a route as a form needs them: type, default, description, choices. Made from the
settings classes and the options of one engine, so a form offers nothing that the engine does not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct
from pydantic import BaseModel

from modelyard import plugins
from modelyard.config.settings import Config, field_aliases
from modelyard.prompt import template_source
from modelyard.router.settings import CacheSettings, ModelSettings, RouteSettings
from modelyard.scanner import formats
from modelyard.telemetry.masking import is_secret_name

Section = Literal["models", "caches", "routes"]
FieldKind = Literal["text", "integer", "number", "boolean", "choice", "list", "value"]
FieldGroup = Literal["basic", "engine", "sampling", "more"]
Json = dict[str, Any]

_PLAIN_KINDS: dict[str, FieldKind] = {
    "boolean": "boolean",
    "integer": "integer",
    "number": "number",
    "string": "text",
}
_BASIC = ("backend", "path", "description", "aliases", "enabled", "autoload", "n_ctx", "parallel")


class SettingField(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`name` has a dot for a field of a table, such as `decoding.temperature`. A `list` has texts or numbers; a `value`
    is any JSON, or a text. `choices` are all that is accepted, `suggestions` some of it."""

    name: str
    kind: FieldKind
    description: str
    group: FieldGroup
    default: Any = None
    required: bool = False
    choices: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    is_secret: bool = False


class SectionFields(Struct, frozen=True):
    """`note` says why the options of the engine are missing."""

    fields: tuple[SettingField, ...]
    backend: str = ""
    note: str = ""


def section_fields(section: Section, config: Config, backend: str | None = None) -> SectionFields:
    """`backend` is the engine of a model, or of the model that a cache belongs to."""
    if section == "routes":
        return SectionFields(tuple(_fields(RouteSettings, "basic", _route_choices(config))))
    options, note = _engine_options(backend) if backend else (None, "Choose an engine or a path to see its options.")
    if section == "caches":
        choices = {"model": list(config.models), **_kv_types(backend)}
        return SectionFields(tuple(_fields(CacheSettings, "basic", choices)), backend or "")
    choices = {
        "backend": plugins.names("engines"),
        "format": formats.names(),
        "prompt_format": template_source.prompt_formats(),
        **_kv_types(backend),
    }
    fields = list(_fields(ModelSettings, "more", choices, leave_out=("options",)))
    if options is not None:
        known = {field.name for field in fields}
        own = _fields(options, "engine", {}, known_names=_known_names(backend))
        fields += [field for field in own if field.name not in known]
    order = {name: number for number, name in enumerate(_BASIC)}
    return SectionFields(
        tuple(sorted(fields, key=lambda field: order.get(field.name, len(order)))), backend or "", note
    )


def _route_choices(config: Config) -> Mapping[str, Sequence[str]]:
    aliases = [alias for model in config.models.values() for alias in model.aliases]
    with_caches = {cache.model for cache in config.caches.values()}
    caches = [*config.caches, *(name for name in config.models if name not in with_caches)]
    return {"model": [*config.models, *aliases], "cache": caches}


def _engine_options(backend: str) -> tuple[type[BaseModel] | None, str]:
    if backend not in plugins.names("engines"):
        return None, f"{backend!r} is not one of the engines of this build"
    try:
        options: type[BaseModel] = plugins.engine(backend).Options
    except plugins.MissingLibrary as error:
        return None, error.message
    return options, ""


def _kv_types(backend: str | None) -> Mapping[str, Sequence[str]]:
    if not backend or _engine_options(backend)[0] is None:
        return {}
    types = plugins.engine(backend).kv_types or ()
    return {"type_k": list(types), "type_v": list(types)} if types else {}


def _known_names(backend: str | None) -> Mapping[str, Sequence[str]]:
    return plugins.engine(backend or "").known_names


def option_names(backend: str | None) -> dict[str, str]:
    """The names of an engine's options by every name that a file may use."""
    if not backend or (options := _engine_options(backend)[0]) is None:
        return {}
    return {name: name for name in options.model_fields} | field_aliases(options)


def _fields(
    kind: type[BaseModel],
    group: FieldGroup,
    choices: Mapping[str, Sequence[str]],
    *,
    known_names: Mapping[str, Sequence[str]] | None = None,
    leave_out: Sequence[str] = (),
) -> Iterator[SettingField]:
    schema = kind.model_json_schema(by_alias=False)
    definitions, required = schema.get("$defs", {}), schema.get("required", ())
    for name, found in schema["properties"].items():
        if name in leave_out:
            continue
        if name == "decoding" and "$ref" in found:
            inner = _resolved(found, definitions)
            for each, described in inner["properties"].items():
                yield _field(f"{name}.{each}", described, definitions, "sampling")
            continue
        yield _field(
            name,
            found,
            definitions,
            "basic" if name in _BASIC else group,
            choices=tuple(choices.get(name, ())),
            suggestions=tuple((known_names or {}).get(name, ())),
            required=name in required,
        )


def _field(
    name: str,
    schema: Json,
    definitions: Json,
    group: FieldGroup,
    *,
    choices: tuple[str, ...] = (),
    suggestions: tuple[str, ...] = (),
    required: bool = False,
) -> SettingField:
    described, types = _resolved(schema, definitions), _alternatives(schema, definitions)
    kind, words = _kind(types)
    bounds = next((each for each in types if each.get("type") in ("integer", "number")), {})
    if kind in ("value", "list") and words:
        suggestions = (*words, *suggestions)
    return SettingField(
        name=name,
        kind="choice" if choices else kind,
        description=str(described.get("description") or schema.get("description") or ""),
        group=group,
        default=described.get("default"),
        required=required,
        choices=choices or (words if kind == "choice" else ()),
        suggestions=suggestions,
        minimum=_bound(bounds, "inimum", 1),
        maximum=_bound(bounds, "aximum", -1),
        is_secret=is_secret_name(name) and not name.endswith("_env"),
    )


def _bound(schema: Json, name: str, step: int) -> float | None:
    """Of whole numbers, the last one that is allowed."""
    if (excluded := schema.get(f"exclusiveM{name}")) is not None:
        return float(excluded) + (step if schema["type"] == "integer" else 0)
    return schema.get(f"m{name}")


def _resolved(schema: Json, definitions: Json) -> Json:
    reference = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    return {**definitions[reference], **schema} if reference else schema


def _alternatives(schema: Json, definitions: Json) -> list[Json]:
    """The types of a value, without null."""
    found = [_resolved(each, definitions) for each in schema.get("anyOf", [schema])]
    return [each for each in found if each.get("type") != "null"]


def _kind(types: Sequence[Json]) -> tuple[FieldKind, tuple[str, ...]]:
    """The widget, and the words that the value may be."""
    words = tuple(str(word) for each in types for word in _words(each))
    kinds = {"choice" if tuple(_words(each)) else str(each.get("type", "")) for each in types}
    if kinds == {"choice"}:
        return "choice", words
    plain = _PLAIN_KINDS.get(next(iter(kinds))) if len(kinds) == 1 else None
    if plain is not None:
        return plain, ()
    items = next((each.get("items", {}) for each in types if each.get("type") == "array"), None)
    if items is not None and kinds <= {"array", "string"} and items.get("type") in ("string", "integer", "number"):
        return "list", tuple(map(str, items.get("enum", ())))
    return "value", words


def _words(schema: Json) -> Iterator[Any]:
    if "const" in schema:
        yield schema["const"]
    yield from schema.get("enum", ())
