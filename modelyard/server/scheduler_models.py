"""Models that a gateway's configuration only names: the scheduler's configuration defines them.

The scheduler sends the definitions of its models without their secrets. A gateway needs them to read a model's template
and tokenizer, to count its window, and to say what it can do; engines and weights stay where they are.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from msgspec import Struct
from pydantic import ValidationError

from modelyard.config.problems import validation_message
from modelyard.config.secrets import public_settings
from modelyard.config.settings import Config
from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound
from modelyard.router.settings import CacheSettings, ModelSettings
from modelyard.workers.remote_pool import RemotePool

log = logging.getLogger(__name__)


class SchedulerModel(Struct, frozen=True):
    """A model and its caches, as settings."""

    model: dict[str, Any]
    caches: dict[str, dict[str, Any]] = {}


def describe_models(config: Config) -> bytes:
    caches = {name: cache.model_dump(mode="json", exclude_unset=True) for name, cache in config.caches.items()}
    return msgspec.msgpack.encode(
        {
            name: SchedulerModel(
                public_settings(model),
                {cache: table for cache, table in caches.items() if config.caches[cache].model == name},
            )
            for name, model in config.models.items()
        }
    )


def named_only(config: Config) -> list[str]:
    """The models without an engine."""
    return [name for name, model in config.models.items() if model.backend is None]


async def with_scheduler_models(config: Config, pool: RemotePool) -> Config:
    """The configuration with the definitions of the models that it only names. What the gateway itself sets of a model,
    such as its tokenizer, stays. A model without a definition waits for a scheduler that has one."""
    names = named_only(config)
    if not names:
        return config
    models, caches = dict(config.models), dict(config.caches)
    try:
        known = msgspec.msgpack.decode(await pool.definitions(), type=dict[str, SchedulerModel])
        for name in names:
            models[name], own = _defined(name, models[name], known)
            if not any(cache.model == name for cache in caches.values()):
                caches |= own
    except ModelyardError as error:
        log.warning("%s", error.message)
    completed = config.model_copy(update={"models": models, "caches": caches})
    completed.mark(config.library_models, config.is_embedded)
    return completed


def _defined(
    name: str, own: ModelSettings, known: dict[str, SchedulerModel]
) -> tuple[ModelSettings, dict[str, CacheSettings]]:
    if name not in known:
        raise NotFound(f"the scheduler has no model {name!r}; it has {', '.join(known) or 'none'}")
    given = {key: value for key, value in own.model_dump(exclude_unset=True).items() if value is not None}
    try:
        model = ModelSettings.model_validate(known[name].model | given)
        return model, {cache: CacheSettings.model_validate(table) for cache, table in known[name].caches.items()}
    except ValidationError as error:
        reason = validation_message(error.errors()[0])
        raise InvalidRequest(f"the scheduler's definition of {name!r} is not valid here: {reason}") from None
