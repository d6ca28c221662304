"""The extension fields that every protocol accepts under the same names, and their checks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, get_type_hints

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
    ebnf: limits.Grammar | None = None  # SGLang's name of `grammar`; the next ones are vLLM's
    guided_json: limits.Grammar | limits.JsonObject | None = None
    guided_regex: limits.Grammar | None = None
    guided_choice: limits.Choices | None = None
    guided_grammar: limits.Grammar | None = None
    structured_outputs: limits.JsonObject | None = None
    chat_template_kwargs: limits.JsonObject | None = None
    documents: limits.Documents | None = None
    priority: limits.Word | None = None
    id_slot: int | None = None  # llama-server's
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
    top_n_sigma: Number = None
    dynatemp_range: Number = None
    dynatemp_exponent: Number = None
    adaptive_target: Number = None
    adaptive_decay: Number = None
    repeat_last_n: int | None = None
    samplers: limits.Samplers | limits.Name | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None


Ignored = Annotated[Any, "without effect"]  # the type of a field that is accepted and reported; docs/api.md lists them


@cache
def ignored_names(body: type[Struct]) -> tuple[str, ...]:
    return tuple(name for name, hint in get_type_hints(body, include_extras=True).items() if hint == Ignored)


def ignored_fields(body: Struct, prefix: str = "") -> list[str]:
    """Warnings about the fields without effect that the client sent; the reply has their names in a header."""
    names = ignored_names(type(body))
    return [f"field_ignored:{prefix}{name}" for name in names if getattr(body, name) not in (None, "")]


# name → (lowest, highest). Outside the range the value has no meaning for any sampler.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
    "dry_allowed_length": (0, 2**31 - 1),
    "dry_penalty_last_n": (-1, 2**31 - 1),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "mirostat": (0, 2),
    "beam_size": (1, 1024),
    "seed": (-(2**63), 2**64 - 1),
    "top_n_sigma": (-1.0, 100.0),
    "dynatemp_range": (0.0, 100.0),
    "dynatemp_exponent": (0.0, 100.0),
    "adaptive_target": (-1.0, 1.0),
    "adaptive_decay": (0.0, 0.99),
    "repeat_last_n": (-1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
}
MAX_TEMPERATURE = 2.0  # of OpenAI's protocols
_SAMPLING_FIELDS = tuple(f.name for f in fields(Sampling) if f.name != "logit_bias")
_sampling_values = attrgetter(*_SAMPLING_FIELDS)  # one call for all fields: this runs for every request
_UNSET = (None,) * len(_SAMPLING_FIELDS)


def check_temperature(request: Request, highest: float, owner: str) -> None:
    """For the client role: an upstream of `owner`'s protocol takes no higher temperature than this."""
    temperature = request.sampling.temperature
    if temperature is not None and temperature > highest:
        raise InvalidRequest(
            f"temperature must be between 0 and {highest:g} for this model, which {owner}'s API serves, "
            f"not {temperature:g}",
            param="temperature",
        )


def read_sampling(body: ExtensionFields, max_temperature: float = 100.0) -> Sampling:
    """`max_temperature` of the protocol; samplers have none."""
    values = _sampling_values(body)
    if values == _UNSET and not body.logit_bias:
        return DEFAULT_SAMPLING
    given = {name: value for name, value in zip(_SAMPLING_FIELDS, values, strict=True) if value is not None}
    for name in given.keys() & RANGES.keys():
        low, high = RANGES[name] if name != "temperature" else (0.0, max_temperature)
        if not low <= given[name] <= high:
            got = str(given[name])[:40]
            raise InvalidRequest(f"{name} must be between {low:g} and {high:g}, got {got}", param=name)
    if body.samplers is not None:
        given["samplers"] = read_samplers(body.samplers)
    if body.logit_bias:
        try:
            given["logit_bias"] = {int(token): value for token, value in body.logit_bias.items()}
        except ValueError:
            raise InvalidRequest("logit_bias must map token ids to numbers", param="logit_bias") from None
    return Sampling(**given)


def take_biased_texts(body: ExtensionFields) -> tuple[tuple[str, float], ...]:
    """The texts among the keys of `logit_bias`, as llama-server takes them; ids stay there."""
    given = body.logit_bias or {}
    texts = {text: value for text, value in given.items() if not text.lstrip("-").isdecimal()}
    body.logit_bias = {token: value for token, value in given.items() if token not in texts} or None
    return tuple(texts.items())


# llama.cpp's letter → the name
_SAMPLER_LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
    "a": "adaptive_p",
}
_SAMPLER_NAMES = {name: name for name in _SAMPLER_LETTERS.values()} | {"typical_p": "typ_p", "typical": "typ_p"}


def read_samplers(given: Sequence[str] | str) -> tuple[str, ...]:
    """Names in their order, or llama.cpp's letters in one text."""
    known = _SAMPLER_LETTERS if isinstance(given, str) else _SAMPLER_NAMES
    for name in given:
        if name not in known:
            message = f"samplers has {name[:40]!r}, which is none of {', '.join(known)}"
            raise InvalidRequest(message, param="samplers")
    return tuple(known[name] for name in given)


# --- constraints ------------------------------------------------------------------------------------------------------

_CONSTRAINT_FIELDS = (
    *("json_schema", "grammar", "regex", "lark", "ebnf"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
)
_constraint_values = attrgetter(*_CONSTRAINT_FIELDS)
_NO_CONSTRAINTS = (None,) * len(_CONSTRAINT_FIELDS)
# Options of vLLM that choose how an output is constrained, not what it must match.
_HOW_FIELDS = frozenset({"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "backend"})
_METACHARACTER = re.compile(r"[\\.^$*+?()\[\]{}|]")


def read_constraint(body: ExtensionFields, own: tuple[str, Constraint | None] = ("", None)) -> Constraint | None:
    """The constraint of the output. `own` is the protocol's field (`response_format` and the like) and its constraint.
    Two constraints would have to be met at once, which no engine can do: they are refused."""
    values = _constraint_values(body)
    if values == _NO_CONSTRAINTS:
        return own[1]
    found = [own] if own[1] is not None else []
    for name, value in zip(_CONSTRAINT_FIELDS, values, strict=True):
        if value is not None and (constraint := _read_constraint(name, value)) is not None:
            found.append((name, constraint))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidRequest(f"{names} constrain the same output: send one of them", param=found[1][0])
    return found[0][1] if found else None


def _read_constraint(name: str, value: Any) -> Constraint | None:
    if name == "structured_outputs":
        return _read_structured_outputs(value)
    if name in ("json_schema", "guided_json"):
        return _read_schema(name, value)
    if name == "guided_choice":
        return _read_choice(name, value)
    if name == "guided_grammar":
        return _read_grammar(value)
    return Constraint("gbnf" if name in ("grammar", "ebnf") else "lark" if name == "lark" else "regex", value)


def _read_structured_outputs(fields: dict[str, Any]) -> Constraint | None:
    """vLLM's object: one of `json`, `regex`, `choice`, `grammar` and `json_object`."""
    given = {name: value for name, value in fields.items() if value is not None and value is not False}
    found = [name for name in given if name not in _HOW_FIELDS]
    if not found:
        return None
    name, path = found[0], f"structured_outputs.{found[0]}"
    if len(found) > 1:
        raise InvalidRequest(f"structured_outputs has {' and '.join(found)}: send one of them", param=path)
    value = given[name]
    if name == "json_object" and value is True:
        return Constraint("json_object")
    if name == "json" and isinstance(value, str | dict):
        return _read_schema(path, value)
    if name == "choice" and isinstance(value, list):
        return _read_choice(path, value)
    if name in ("regex", "grammar") and isinstance(value, str):
        limits.check_length(path, value, limits.MAX_GRAMMAR)
        return Constraint("regex", value) if name == "regex" else _read_grammar(value)
    kinds = "json, json_object, regex, choice or grammar"
    raise InvalidRequest(f"{path} cannot be enforced: send {kinds} with a value of its type", param=path)


def _read_schema(path: str, value: str | dict[str, Any]) -> Constraint:
    text = value if isinstance(value, str) else dumps(value)
    if not text.lstrip().startswith("{"):
        raise InvalidRequest(f"{path} must be a JSON schema, which is an object", param=path)
    return Constraint("json_schema", limits.check_length(path, text, limits.MAX_SCHEMA))


def _read_choice(path: str, texts: list[Any]) -> Constraint:
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequest(f"{path} must list the texts that the output may be; none of them is empty", param=path)
    pattern = "|".join(_METACHARACTER.sub(lambda found: "\\" + found.group(), text) for text in texts)
    return Constraint("regex", limits.check_length(path, f"({pattern})", limits.MAX_GRAMMAR))


def _read_grammar(text: str) -> Constraint:
    """vLLM takes both languages under one name; only the rules of EBNF have this sign."""
    return Constraint("gbnf" if "::=" in text else "lark", text)


def check_option(path: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise InvalidRequest(f"{path} {value[:40]!r} is unknown; send one of {', '.join(allowed)}", param=path)


def read_priority(body: ExtensionFields) -> Priority | None:
    """Clients send words and service tiers; everything that does not mean «background» is «main»."""
    if body.priority is None:
        return None
    return "background" if body.priority in ("background", "low", "batch") else "main"


def read_slot(body: ExtensionFields) -> int | None:
    """llama-server's clients send -1 for any."""
    return body.id_slot if body.id_slot is not None and body.id_slot >= 0 else None


def read_whole(name: str, value: Any) -> int | None:
    """A whole number that a client may write with a fraction of zero, as JavaScript and protocol buffers do."""
    if value is None or type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise InvalidRequest(f"{name} must be a whole number, got {str(value)[:40]}", param=name)


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
