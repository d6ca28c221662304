"""Settings for one load of a model: which fields an engine lets an administrator change, and the changed definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, TypeAdapter, ValidationError

from modelyard import plugins
from modelyard.config.settings import Config
from modelyard.core.errors import InvalidRequest
from modelyard.router.settings import ModelSettings

# A field of all models may go by an engine's own name for it.
_CANON = {
    str(alias): name
    for name, info in ModelSettings.model_fields.items()
    if isinstance(info.validation_alias, AliasChoices)
    for alias in info.validation_alias.choices
}


def allowed(settings: ModelSettings) -> Mapping[str, Any]:
    """Each field's type with its range; none for an engine that has no such fields or is not in this build."""
    if settings.backend not in plugins.names("engines"):
        return {}
    fields: Mapping[str, Any] = getattr(plugins.load("engines", settings.backend), "LIVE_OVERRIDES", {})
    return fields


def schemas(settings: ModelSettings) -> dict[str, Any]:
    """The same as JSON Schemas, for forms."""
    return {name: TypeAdapter(kind).json_schema() for name, kind in allowed(settings).items()}


def altered(config: Config, name: str, overrides: Mapping[str, Any]) -> Config:
    """The configuration with this one model changed, for as long as it stays loaded."""
    settings, fields = config.models[name], allowed(config.models[name])
    checked = {_CANON.get(field, field): _checked(field, value, fields, name) for field, value in overrides.items()}
    if "n_ctx" in checked and any(cache.model == name for cache in config.caches.values()):
        raise InvalidRequest(f"the windows of {name!r} are set by its caches, not by a load", param="n_ctx")
    changed = ModelSettings.model_validate(settings.model_dump(exclude_unset=True) | checked)
    return config.model_copy(update={"models": {**config.models, name: changed}})


def _checked(field: str, value: Any, fields: Mapping[str, Any], name: str) -> Any:
    if field not in fields:
        known = f"those that one may are {', '.join(fields)}" if fields else "its engine has none that one may"
        raise InvalidRequest(
            f"{field} cannot be set for one load of {name!r}; {known}", code="override_not_allowed", param=field
        )
    try:
        return TypeAdapter(fields[field]).validate_python(value)
    except ValidationError as error:
        raise InvalidRequest(f"{field}: {error.errors()[0]['msg']}, got {value!r}", param=field) from None
