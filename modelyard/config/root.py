"""The root of all settings: one section for each package, and what holds when no file is found."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from modelyard.http.settings import HttpSettings, KeySettings
from modelyard.library.default_model import DEFAULT_MODEL
from modelyard.prompt.settings import ImageSettings
from modelyard.router.build import build
from modelyard.router.routes import Router
from modelyard.router.settings import CacheSettings, DecodingSettings, ModelSettings, RouteSettings
from modelyard.scheduler.settings import SchedulerSettings
from modelyard.store.settings import StoreSettings
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
        return build(self.models, self.caches, self.routes, self.default_model, self.decoding)


# The file is fetched when the server starts, not when this is read.
EMBEDDED: Final[dict[str, Any]] = {
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
