"""The extension fields that every protocol accepts under the same names, and their checks."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from msgspec import Struct
from msgspec.structs import fields

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import DEFAULT_SAMPLING, Constraint, Priority, Request, Sampling
from modelyard.protocols.common.json import dumps

Number = float | None


class ExtensionFields(Struct, kw_only=True, gc=False):
    """Base class of the request bodies. `null` and a missing field mean the same: not set."""

    lora_adapter: limits.Name | None = None
    grammar: limits.Grammar | None = None
    regex: limits.Grammar | None = None
    lark: limits.Grammar | None = None
    json_schema: limits.JsonObject | None = None
    chat_template_kwargs: limits.JsonObject | None = None
    documents: limits.Documents | None = None
    priority: limits.Word | None = None
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
    dry_sequence_breakers: limits.SequenceBreakers | None = None
    xtc_probability: Number = None
    xtc_threshold: Number = None
    mirostat: int | None = None
    mirostat_tau: Number = None
    mirostat_eta: Number = None
    beam_size: int | None = None
    seed: int | None = None
    logit_bias: limits.LogitBias | None = None


# name → (lowest, highest). Outside the range the value has no meaning for any sampler.
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
_SAMPLING_FIELDS = tuple(f.name for f in fields(Sampling) if f.name != "logit_bias")
_sampling_values = attrgetter(*_SAMPLING_FIELDS)  # one call for all fields: this runs for every request
_UNSET = (None,) * len(_SAMPLING_FIELDS)


def read_sampling(body: ExtensionFields) -> Sampling:
    values = _sampling_values(body)
    if values == _UNSET and not body.logit_bias:
        return DEFAULT_SAMPLING
    given = {name: value for name, value in zip(_SAMPLING_FIELDS, values, strict=True) if value is not None}
    for name in given.keys() & _RANGES.keys():
        low, high = _RANGES[name]
        if not low <= given[name] <= high:
            got = str(given[name])[:40]
            raise InvalidRequest(f"{name} must be between {low:g} and {high:g}, got {got}", param=name)
    if body.logit_bias:
        try:
            given["logit_bias"] = {int(token): value for token, value in body.logit_bias.items()}
        except ValueError:
            raise InvalidRequest("logit_bias must map token ids to numbers", param="logit_bias") from None
    return Sampling(**given)


def read_constraint(body: ExtensionFields) -> Constraint | None:
    """The extension constraints. A protocol's own field (`response_format` and the like) takes precedence."""
    if body.json_schema is not None:
        return Constraint("json_schema", limits.check_length("json_schema", dumps(body.json_schema), limits.MAX_SCHEMA))
    if body.grammar is not None:
        return Constraint("gbnf", body.grammar)
    if body.regex is not None:
        return Constraint("regex", body.regex)
    if body.lark is not None:
        return Constraint("lark", body.lark)
    return None


def read_priority(body: ExtensionFields) -> Priority | None:
    """Clients send words and service tiers; everything that does not mean «background» is «main»."""
    if body.priority is None:
        return None
    return "background" if body.priority in ("background", "low", "batch") else "main"


def check_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InvalidRequest(f"{name} must be at least 1, got {value}", param=name)


_GRAMMAR_FIELDS = {"gbnf": "grammar", "regex": "regex", "lark": "lark"}


def write_extensions(request: Request) -> dict[str, Any]:
    """The extension fields of an outgoing request body: those that are set, and grammar constraints."""
    sampling, constraint = request.sampling, request.constraint
    out: dict[str, Any] = {name: value for name in _SAMPLING_FIELDS if (value := getattr(sampling, name)) is not None}
    if sampling.logit_bias:
        out["logit_bias"] = {str(token): value for token, value in sampling.logit_bias.items()}
    if constraint is not None and constraint.kind in _GRAMMAR_FIELDS:
        out[_GRAMMAR_FIELDS[constraint.kind]] = constraint.text
    out |= present(
        lora_adapter=request.lora_adapter,
        chat_template_kwargs=request.chat_template_kwargs or None,
        documents=request.documents or None,
        priority=request.priority,
    )
    return out


def present(**values: Any) -> dict[str, Any]:
    """Only the fields that are not None."""
    return {name: value for name, value in values.items() if value is not None}
