"""Settings of API keys, of the file that keeps created keys and usage, and of prices."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from modelyard.core.request import LOCAL_USER

_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_NAME = 64
_MAX_MODELS, _MAX_PATTERN = 100, 256

BudgetPeriod = Literal["day", "month", "total"]
KeyRole = Literal["member", "operator", "owner"]


def _as_unix_time(value: Any) -> Any:
    """A date and time of TOML or ISO 8601, in UTC unless it says otherwise. A bare date is its midnight."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError("a time is written 2026-12-31 or 2026-12-31T18:00:00Z, or as seconds since 1970") from None
    if hasattr(value, "isoformat") and not isinstance(value, datetime):  # a date of TOML
        value = datetime(value.year, value.month, value.day)
    if isinstance(value, datetime):
        return (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()
    return value


UnixTime = Annotated[
    float,
    BeforeValidator(_as_unix_time),
    Field(gt=0, allow_inf_nan=False),
    WithJsonSchema({"anyOf": [{"type": "string", "format": "date-time"}, {"type": "number"}]}),
]


class KeyRules(BaseModel):
    """What an API key may do: the same for keys of the configuration and for created ones."""

    model_config = ConfigDict(extra="forbid")

    admin: bool = Field(
        default=False, description='Whether this key may also manage models and keys: the same as role = "operator".'
    )
    role: KeyRole = Field(
        default="member",
        description="What this key may do: use models (member), also manage models and keys and read logs (operator), "
        "or also change the configuration, which names programs and files (owner).",
    )
    allow_remote: bool | None = Field(
        default=None,
        description="Whether this key may use models that send data to another server: true allows it, false forbids "
        "it on every route, unset allows it on routes with allow_remote only. No request can change it.",
    )
    models: list[str] = Field(
        default_factory=list,
        max_length=_MAX_MODELS,
        description="What this key may use: globs on the names of models and caches, or the match of a route as it is "
        "written there. Empty: everything.",
    )
    requests_per_minute: int | None = Field(
        default=None, gt=0, description="Requests a minute; more are answered 429 with when to come back."
    )
    tokens_per_minute: int | None = Field(
        default=None, gt=0, description="Tokens a minute, of prompts and answers together."
    )
    max_concurrent: int | None = Field(
        default=None, gt=0, description="Requests that may wait or run at a time with this key."
    )
    token_budget: int | None = Field(
        default=None, gt=0, description="Tokens in one budget_period, of prompts and answers together."
    )
    cost_budget: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Cost in one budget_period, by the prices of the models, in accounts.currency.",
    )
    budget_period: BudgetPeriod = Field(
        default="month", description="When a budget starts anew: each day or month (UTC), or never (total)."
    )
    expires: UnixTime | None = Field(
        default=None,
        description="When the key stops working: a date and time (UTC unless it names a zone), or seconds since 1970.",
    )

    @model_validator(mode="after")
    def _admin_and_role_agree(self) -> Self:
        """Each gives the other, also in a change that names one of them."""
        if given := self.model_fields_set & {"admin", "role"}:
            role = self.role if "role" in given else "operator" if self.admin else "member"
            if "admin" in given and self.admin != (role != "member"):
                raise ValueError(f"admin contradicts the role {role}")
            self.admin, self.role = role != "member", role
        return self

    @field_validator("models")
    @classmethod
    def _models_are_names(cls, value: list[str]) -> list[str]:
        if any(not 0 < len(name) <= _MAX_PATTERN for name in value):
            raise ValueError(f"a name has 1 to {_MAX_PATTERN} characters")
        return value


class NewKey(KeyRules):
    """A key to create."""

    name: str = Field(
        min_length=1,
        max_length=_MAX_NAME,
        description="What logs, metrics and stored responses call the owner of this key.",
    )

    @field_validator("name")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable() or value != value.strip():
            raise ValueError("a name has printable characters, and no spaces at its ends")
        if value.startswith(LOCAL_USER):
            raise ValueError(f"names that begin with {LOCAL_USER} are those of the machine's users")
        return value


class KeySecret(BaseModel):
    """Exactly one of `hash`, `env` and `key` says what the secret is."""

    name: str = Field(min_length=1, description="What logs, metrics and stored responses call the owner of this key.")
    hash: str | None = Field(
        default=None, description='The SHA-256 of the key as "sha256:<64 hex digits>": the file then holds no secret.'
    )
    env: str | None = Field(default=None, description="Name of the environment variable that holds the key.")
    key: str | None = Field(
        default=None,
        min_length=1,
        repr=False,
        description="The key itself, in plain text. Prefer hash or env.",
    )

    @field_validator("hash")
    @classmethod
    def _hash_is_sha256(cls, value: str | None) -> str | None:
        if value is not None and not _HASH.fullmatch(value.lower()):
            raise ValueError('a hash is written "sha256:" and 64 hex digits')
        return value.lower() if value else value

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        given = [name for name in ("hash", "env", "key") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"a key needs exactly one of hash, env and key; found {found}")
        return self


class KeySettings(KeyRules, KeySecret):
    """One API key of the configuration."""


class AccountSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    path: Path | None = Field(
        default=None,
        description="The file of created keys and of the usage of all keys; by default accounts.sqlite in the user's "
        "folder for data. Servers with the same file share both.",
    )
    currency: str = Field(
        default="USD", min_length=1, max_length=16, description="The currency of all prices and budgets: a label."
    )


class PriceSettings(BaseModel):
    """What a model's tokens cost, per million."""

    model_config = ConfigDict(extra="forbid")

    input: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="Of prompt tokens that were not cached.")
    cached_input: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="Of cached prompt tokens; unset: as input."
    )
    output: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="Of output tokens, reasoning included.")
