"""The root of all settings: one section for each package, and what holds when no file is found."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Final, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from modelyard.config.problems import ConfigPath
from modelyard.http.settings import HttpSettings, KeySettings
from modelyard.library.default_model import DEFAULT_MODEL
from modelyard.prompt.settings import ImageSettings
from modelyard.router.routes import Router, build_router
from modelyard.router.settings import CacheSettings, DecodingSettings, ModelSettings, RouteSettings
from modelyard.scheduler.settings import SchedulerSettings
from modelyard.store import StoreSettings
from modelyard.telemetry.settings import LogSettings
from modelyard.workers.settings import WorkerSettings


class Config(BaseModel):
    """Everything that can be set. Only the composition root and the command line see the whole of it."""

    model_config = ConfigDict(extra="forbid")

    http: HttpSettings = Field(default=HttpSettings(), description="The front door.")
    keys: list[KeySettings] = Field(
        default_factory=list, description="API keys; none means that nobody is asked for one."
    )
    log: LogSettings = Field(default=LogSettings(), description="The log and the debug journal.")
    store: StoreSettings = Field(default=StoreSettings(), description="Memory between requests.")
    images: ImageSettings = Field(default=ImageSettings(), description="Images that requests name by URL.")
    scheduler: SchedulerSettings = Field(default=SchedulerSettings(), description="The queue in front of the engines.")
    workers: WorkerSettings = Field(
        default=WorkerSettings(), description="Engines in other processes and on other machines."
    )
    decoding: DecodingSettings = Field(default=DecodingSettings(), description="Sampling defaults of all models.")
    models: dict[str, ModelSettings] = Field(default_factory=dict, description="Models by their public ids.")
    caches: dict[str, CacheSettings] = Field(default_factory=dict, description="Isolated KV caches by name.")
    routes: list[RouteSettings] = Field(default_factory=list, description="Rules from asked names to caches, in order.")
    default_model: str | None = Field(
        default=None, description="Model for names that no route, id or alias knows; unset answers them with 404."
    )

    watch: bool = Field(
        default=False,
        description="Read the configuration anew when one of its files changes. SIGHUP and the admin API do it, too.",
    )

    def router(self) -> Router:
        return build_router(self.models, self.caches, self.routes, self.default_model, self.decoding)


# The file is fetched when the server starts, not when this is read.
EMBEDDED_DEFAULTS: Final[dict[str, Any]] = {
    "models": {
        "smollm2": {
            "backend": "llama_cpp",
            "path": DEFAULT_MODEL.path,
            "description": "A small model that runs anywhere",
        }
    },
    "caches": {
        "main": {"model": "smollm2", "n_ctx": 8192, "parallel": 2, "description": "Conversations"},
        "fast": {"model": "smollm2", "n_ctx": 4096, "parallel": 2, "description": "Background tasks"},
    },
    "routes": [{"match": "*haiku*", "cache": "fast"}, {"match": "*", "cache": "main"}],
}


# The shape of the settings as data: which keys exist where, under which other names.

# Sections of the two other styles, and where their keys live with us. A target of None is settled after merging.
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


def field_type(annotation: Any, key: str | int) -> Any:
    """The type of what lies under `key`, or None where nothing does."""
    kind = without_none(annotation)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        found = kind.model_fields.get(str(key))
        return found.annotation if found else None
    if get_origin(kind) in (dict, list):
        return get_args(kind)[-1]
    return None


def type_at(loc: ConfigPath) -> Any:
    kind: Any = Config
    for key in loc:
        kind = field_type(kind, key)
    return without_none(kind)


def field_aliases(kind: type[BaseModel]) -> dict[str, str]:
    """Other names of its fields, each with the field's own."""
    return {
        str(other): name
        for name, info in kind.model_fields.items()
        if isinstance(info.validation_alias, AliasChoices)
        for other in info.validation_alias.choices
        if other != name
    }


def accepted_keys(kind: Any) -> Iterator[str]:
    """Every key that a section takes, aliases included."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield from kind.model_fields
        yield from field_aliases(kind)


def keys_by_section() -> dict[str, list[str]]:
    """Fields by section, of every style; what has no fields of its own (lists, tables by name) has none here."""
    ours = {name: list(accepted_keys(without_none(info.annotation))) for name, info in Config.model_fields.items()}
    return ours | {name: list(moves) for name, moves in FOREIGN_SECTIONS.items()}
