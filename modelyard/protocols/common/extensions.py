"""The extension fields that every protocol takes under the same names, and their checks."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from msgspec import Struct
from msgspec.structs import fields

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import DEFAULT_SAMPLING, Constraint, Priority, Request, Sampling
from modelyard.protocols.common.json import dumps

Number = float | None


class ExtensionFields(Struct, kw_only=True, gc=False):
    """Base of each protocol's body: `null` and absence mean the same, «not asked for». The sampling stands last."""

    lora_adapter: str | None = None
    grammar: str | None = None
    regex: str | None = None
    lark: str | None = None
    json_schema: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: tuple[dict[str, Any], ...] | None = None
    priority: str | None = None
    temperature: Number = None
    top_p: Number = None
    top_k: int | None = None
    min_p: Number = None
    typical_p: Number = None
    repetition_penalty: Number = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    dry_multiplier: Number = None
    dry_base: Number = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: tuple[str, ...] | None = None
    xtc_probability: Number = None
    xtc_threshold: Number = None
    mirostat: int | None = None
    mirostat_tau: Number = None
    mirostat_eta: Number = None
    beam_size: int | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None


# name → (lowest, highest): outside it no sampler has a meaning, so the client hears about it.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "mirostat": (0, 2),
}
_KNOBS = tuple(f.name for f in fields(Sampling) if f.name != "logit_bias")
_knobs = attrgetter(*_KNOBS)  # all in one call: this runs for every request
_UNSET = (None,) * len(_KNOBS)


def read_sampling(body: ExtensionFields) -> Sampling:
    values = _knobs(body)
    if values == _UNSET and not body.logit_bias:
        return DEFAULT_SAMPLING
    asked = {name: value for name, value in zip(_KNOBS, values, strict=True) if value is not None}
    for name in asked.keys() & _RANGES.keys():
        low, high = _RANGES[name]
        if not low <= asked[name] <= high:
            got = str(asked[name])[:40]
            raise InvalidRequest(f"{name} must lie between {low:g} and {high:g}, got {got}", param=name)
    if body.logit_bias:
        asked["logit_bias"] = _read_bias(body.logit_bias)
    return Sampling(**asked) if asked else DEFAULT_SAMPLING


def _read_bias(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise InvalidRequest("logit_bias maps token ids to numbers", param="logit_bias") from None


def read_constraint(body: ExtensionFields) -> Constraint | None:
    """The extension constraints; a protocol's own `response_format` or the like goes before them."""
    if body.json_schema is not None:
        return Constraint("json_schema", dumps(body.json_schema))
    if body.grammar is not None:
        return Constraint("gbnf", body.grammar)
    if body.regex is not None:
        return Constraint("regex", body.regex)
    if body.lark is not None:
        return Constraint("lark", body.lark)
    return None


def read_priority(body: ExtensionFields) -> Priority | None:
    """Seen in the wild as words and as tiers; everything but «background» is the main road."""
    if body.priority is None:
        return None
    return "background" if body.priority in ("background", "low", "batch") else "main"


def check_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InvalidRequest(f"{name} must be at least 1, got {value}", param=name)


def write_extensions(request: Request) -> dict[str, Any]:
    """The extension fields of an outgoing request body; what was not asked for is not written."""
    sampling = request.sampling
    out: dict[str, Any] = {name: value for name in _KNOBS if (value := getattr(sampling, name)) is not None}
    if sampling.logit_bias:
        out["logit_bias"] = {str(token): value for token, value in sampling.logit_bias.items()}
    out |= {
        name: value
        for name, value in (
            ("lora_adapter", request.lora_adapter),
            ("chat_template_kwargs", request.chat_template_kwargs or None),
            ("documents", request.documents or None),
            ("priority", request.priority),
        )
        if value is not None
    }
    return out
