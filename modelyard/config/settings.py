"""The root of all settings with one section per package, its JSON Schema, and the options of engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Union, get_args, get_origin

from msgspec import Struct
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from modelyard import plugins
from modelyard.accounts.settings import AccountSettings, KeySettings
from modelyard.accounts.usage import Price
from modelyard.config.library_models import EMBEDDED_SOURCE, LIBRARY_SOURCE, LibraryModel, can_chat, folder_backend
from modelyard.config.problems import ConfigLayer, ConfigPath, ConfigProblem
from modelyard.core.engine import EngineSpec
from modelyard.core.errors import ModelyardError
from modelyard.gateway.batches import BatchSettings
from modelyard.http.settings import HttpSettings
from modelyard.library.model_files import find_model_file, find_model_folder, leads_to_gguf
from modelyard.mcp.settings import McpSettings
from modelyard.prompt.settings import ImageSettings
from modelyard.prompt.template_source import engine_template, prompt_formats
from modelyard.router.router import ModelEntry, Router, build_router
from modelyard.router.settings import CacheSettings, DecodingSettings, ModelSettings, RouteSettings
from modelyard.scheduler.settings import SchedulerSettings
from modelyard.store import StoreSettings
from modelyard.telemetry.log import LogSettings
from modelyard.workers.settings import WorkerSettings


class Config(BaseModel):
    """All settings. Only the composition root and the command line use it; packages get their own section."""

    model_config = ConfigDict(extra="forbid")

    http: HttpSettings = Field(default=HttpSettings(), description="The HTTP server.")
    keys: list[KeySettings] = Field(
        default_factory=list, description="API keys. Without any, and without created ones, authentication is off."
    )
    accounts: AccountSettings = Field(
        default=AccountSettings(), description="Created keys, and the usage and cost of all keys."
    )
    log: LogSettings = Field(default=LogSettings(), description="The log, request capture and the request history.")
    store: StoreSettings = Field(
        default=StoreSettings(), description="Data kept between requests, such as stored responses."
    )
    batches: BatchSettings = Field(default=BatchSettings(), description="Uploaded files and batches of requests.")
    images: ImageSettings = Field(default=ImageSettings(), description="Images that requests name by URL.")
    mcp: McpSettings = Field(
        default=McpSettings(), description="MCP servers, whose tools the gateway calls for a model."
    )
    scheduler: SchedulerSettings = Field(default=SchedulerSettings(), description="The queue in front of the engines.")
    workers: WorkerSettings = Field(
        default=WorkerSettings(), description="Engines in other processes and on other machines."
    )
    decoding: DecodingSettings = Field(default=DecodingSettings(), description="Sampling defaults of all models.")
    models: dict[str, ModelSettings] = Field(default_factory=dict, description="Models by their public ids.")
    caches: dict[str, CacheSettings] = Field(default_factory=dict, description="Isolated KV caches by name.")
    routes: list[RouteSettings] = Field(
        default_factory=list, description="Rules that map requested model names to caches; the first match wins."
    )
    default_model: str | None = Field(
        default=None, description="Model for names that match no route, id or alias; unset answers them with 404."
    )
    library: bool = Field(
        default=True,
        description="Serve every model of the library (modelyard pull) by its name, too; it is loaded at the first "
        "request. Models and routes of the configuration take precedence.",
    )
    watch: bool = Field(
        default=False,
        description="Reload the configuration when one of its files changes. SIGHUP and the admin API reload it, too.",
    )

    # Not settings: found when the sources are loaded.
    _library_models: Mapping[str, LibraryModel] = PrivateAttr(default_factory=dict)
    _is_embedded: bool = PrivateAttr(default=False)
    _unnamed_model: str | None = PrivateAttr(default=None)  # answers requests that name no model

    @property
    def library_models(self) -> Mapping[str, LibraryModel]:
        return self._library_models

    @property
    def is_embedded(self) -> bool:
        return self._is_embedded

    def mark(self, library_models: Mapping[str, LibraryModel], is_embedded: bool) -> None:
        self._library_models, self._is_embedded = library_models, is_embedded
        self._unnamed_model = self._find_unnamed_model()

    def prices(self) -> dict[str, Price]:
        """Of the models that have one."""
        found = {name: model.price for name, model in self.models.items() if model.price is not None}
        return {
            name: Price(p.input, p.input if p.cached_input is None else p.cached_input, p.output)
            for name, p in found.items()
        }

    def router(self) -> Router:
        return build_router(
            self.models, self.caches, self.routes, self.default_model, self.decoding, self._unnamed_model
        )

    def _find_unnamed_model(self) -> str | None:
        """The only model of this machine, or that is loaded at the start; of several such, the only one that can chat.
        None: a request has to name one."""
        local = [name for name, model in self.models.items() if not plugins.is_remote_engine(model.backend)]
        found = [name for name in local if self.models[name].enabled is not False] or local
        if found[1:]:
            found = [name for name in found if can_chat(name, self.models[name])]
        return found[0] if len(found) == 1 else None

    def needed_models(self) -> set[str]:
        """What requests can reach, apart from models that only the library has: a server is ready when it has them."""
        of_library = self._library_models
        return {
            name
            for name, model in self.models.items()
            if model.enabled is not False or (model.autoload and name not in of_library)
        }

    def without_faults(self) -> Config:
        """What is left of a configuration with errors, for checks of each model: without routes, aliases, caches of
        unknown models, and options that the engine refuses."""
        caches = {name: cache for name, cache in self.caches.items() if cache.model in self.models}
        models = {name: _without_faults(model) for name, model in self.models.items()}
        return self.model_copy(update={"models": models, "caches": caches, "routes": [], "default_model": None})


def _without_faults(model: ModelSettings) -> ModelSettings:
    refused = set[Any]()
    try:
        engine_options(model)
    except ValidationError as error:
        refused = {details["loc"][0] for details in error.errors() if details["loc"]}
    except ModelyardError:
        pass
    options = {name: value for name, value in model.options.items() if name not in refused}
    return model.model_copy(update={"aliases": [], "options": options})


class LoadedConfig(Struct):
    """A valid configuration, its sources (lowest priority first), its warnings, and notes about files that are ignored.

    `layers` are the settings of each source, under our names."""

    config: Config
    sources: list[Path | str]
    problems: list[ConfigProblem]
    notes: list[str] = []
    layers: list[ConfigLayer] = []

    @property
    def first_model(self) -> str | None:
        """The model that a command means which names none: of the user's own files, else of the library."""
        own = [layer for layer in self.layers if layer.source not in (LIBRARY_SOURCE, EMBEDDED_SOURCE)]
        written = (name for layer in own for name in layer.data.get("models", {}))
        return next((name for name in (*written, *self.config.models) if name in self.config.models), None)


# Sections of the llm-pool and infer-server styles, and the paths of their keys in our style. None: see
# `normalize.resolve_defaults`.
FOREIGN_SECTIONS: Final[dict[str, dict[str, ConfigPath | None]]] = {
    "service": {"host": ("http", "host"), "port": ("http", "port"), "log_level": ("log", "level")},
    "engine": {"backend": None, "decoding": ("decoding",), "models": ("models",)},
    "model": {"model_name": ("default_model",), "tokenizer_path": None},
}


def without_none(annotation: Any) -> Any:
    """The type without `| None`."""
    if get_origin(annotation) in (Union, UnionType):
        rest = [arg for arg in get_args(annotation) if arg is not NoneType]
        return rest[0] if len(rest) == 1 else annotation
    return annotation


def type_at(path: ConfigPath) -> Any:
    """The type of the setting at `path`; None if there is none."""
    kind: Any = Config
    for key in path:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(str(key))
            kind = without_none(field.annotation) if field else None
        else:
            kind = without_none(get_args(kind)[-1]) if get_origin(kind) in (dict, list) else None
    return kind


def field_aliases(kind: type[BaseModel]) -> dict[str, str]:
    """Field names by their aliases."""
    return {
        str(alias): name
        for name, info in kind.model_fields.items()
        if isinstance(info.validation_alias, AliasChoices)
        for alias in info.validation_alias.choices
        if alias != name
    }


def accepted_keys(kind: Any) -> Iterator[str]:
    """Every key that a section accepts, including aliases."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield from kind.model_fields
        yield from field_aliases(kind)


def keys_by_section() -> dict[str, list[str]]:
    """The keys of each section in all styles. Lists, tables by name and single values have none."""
    ours = {name: list(accepted_keys(without_none(info.annotation))) for name, info in Config.model_fields.items()}
    return ours | {name: list(keys) for name, keys in FOREIGN_SECTIONS.items()}


# --- a model's engine -------------------------------------------------------------------------------------------------


def infer_backend(path: Any) -> str | None:
    """llama_cpp for a GGUF file, a folder or library name with one, or a missing path that contains "gguf"; ct2 for a
    CTranslate2 folder, exllamav3 for EXL3, vLLM for another Hugging Face folder."""
    if not isinstance(path, str):
        return None
    if "gguf" in path.lower() or leads_to_gguf(path):
        return "llama_cpp"
    folder = find_model_folder(path)
    if folder is None:
        return None
    return str(folder_backend(folder.path)["backend"])


def engine_options(model: ModelSettings) -> BaseModel:
    """The engine's `Options`. Common fields that it also declares (such as path) are passed on if they are set."""
    kind: type[BaseModel] = plugins.engine(model.backend or "").Options
    return kind.model_validate(options_input(model))


def options_input(model: ModelSettings) -> dict[str, Any]:
    """What the engine's `Options` are made from, not validated yet."""
    kind: type[BaseModel] = plugins.engine(model.backend or "").Options
    common = (model.model_fields_set & kind.model_fields.keys()) - {"options"}
    values = {name: getattr(model, name) for name in common} | model.options
    if model.prompt_format in prompt_formats() and "chat_template" in kind.model_fields:
        values["chat_template"] = values.get("chat_template") or _built_in_template(model)
    return values


def _built_in_template(model: ModelSettings) -> str | None:
    """An engine that renders by itself takes a built-in format as the text of a template."""
    path = str(model.options.get("vllm_model", "")) if model.path is None else model.path
    folder = find_model_folder(path) if path and not leads_to_gguf(path) else None
    weights = folder.path if folder is not None else find_model_file(path) if path else None
    return engine_template(model.prompt_format or "", weights, force=model.force_prompt_format)


def engine_spec(entry: ModelEntry) -> EngineSpec:
    settings = entry.settings
    modalities = tuple(settings.modalities)
    return EngineSpec(
        entry.name, engine_options(settings), entry.cache_infos, modalities, settings.python, entry.backend
    )


# --- JSON Schema of a configuration file ------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """All keys of all three styles. A model's table also has the fields of every engine in this build."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Modelyard configuration"
    for kind in (ModelSettings, CacheSettings):
        properties = schema["$defs"][kind.__name__]["properties"]
        for alias, name in field_aliases(kind).items():
            properties[alias] = properties[name] | {"description": f"Another name of {name}."}
    _add_engine_fields(schema)
    for section, keys in FOREIGN_SECTIONS.items():
        properties = {key: _property(path, schema) if path else {"type": "string"} for key, path in keys.items()}
        schema["properties"][section] = {"type": "object", "additionalProperties": False, "properties": properties}
    schema["properties"]["$schema"] = {"type": "string"}
    return schema


def _add_engine_fields(schema: dict[str, Any]) -> None:
    table = schema["$defs"]["ModelSettings"]
    table["additionalProperties"] = True  # fields of engines that this build lacks
    properties = table["properties"]
    for backend in plugins.names("engines"):
        try:
            options: type[BaseModel] = plugins.engine(backend).Options
        except plugins.MissingLibrary:
            continue  # its fields are unknown without its library; additional ones are accepted
        own = options.model_json_schema()
        schema["$defs"] |= own.get("$defs", {})
        for name, field in own.get("properties", {}).items():
            if name not in ModelSettings.model_fields:
                other = properties.get(name)  # another engine may use the name with a different type
                properties[name] = field if other in (None, field) else {"anyOf": [other, field]}


def _property(path: ConfigPath, schema: dict[str, Any]) -> dict[str, Any]:
    table = schema["$defs"][type_at(path[:-1]).__name__] if len(path) > 1 else schema
    found: dict[str, Any] = table["properties"][str(path[-1])]
    return found
