"""LoRA adapters by name: vLLM loads one when the first request asks for it, and knows it by a number."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from msgspec import Struct

from modelyard.core.engine import Media, Prompt
from modelyard.core.errors import InvalidRequest, NotFound, Unsupported
from modelyard.core.request import Constraint, Sampling


class LoraAdapter(Struct, frozen=True):
    """`known_as` is for vLLM alone: KV that was computed with one adapter must never be found by a later namesake."""

    name: str
    known_as: str
    number: int
    path: str


class LoraAdapters:
    def __init__(self, configured: Mapping[str, str]) -> None:
        self.enabled = bool(configured)
        self._numbers = 0
        self._known: dict[str, LoraAdapter] = {}
        for name, path in configured.items():
            self._add(name, path)

    def _add(self, name: str, path: str) -> LoraAdapter:
        folder = Path(path).expanduser()
        if not (folder / "adapter_config.json").is_file():
            raise NotFound(f"the LoRA adapter {name!r} is not at {folder}: a folder with an adapter_config.json is")
        self._numbers += 1
        self._known[name] = adapter = LoraAdapter(name, f"{name}#{self._numbers}", self._numbers, str(folder))
        return adapter

    def load(self, argument: str | None) -> None:
        """`name=folder`; one of the same name is replaced."""
        name, found, path = (argument or "").partition("=")
        if not (name and found and path):
            raise InvalidRequest("an adapter is loaded as name=folder")
        if not self.enabled:
            raise _none()
        self._add(name, path)

    def unload(self, argument: str | None) -> LoraAdapter:
        known = self._known.pop(argument or "", None)
        if known is None:
            raise NotFound(f"there is no adapter {argument!r}; there are {', '.join(self._known) or 'none'}")
        return known

    def worn(self, asked: Sequence[tuple[str, float]]) -> LoraAdapter | None:
        if not asked:
            return None
        if not self.enabled:
            raise _none()
        if len(asked) > 1:
            raise Unsupported("vLLM takes one adapter for a request", code="lora_unsupported")
        (name, scale), *_ = asked
        if scale != 1.0:
            raise Unsupported("vLLM takes adapters at their full strength only", code="lora_unsupported")
        if name not in self._known:
            raise NotFound(f"there is no adapter {name!r}; there are {', '.join(self._known) or 'none'}")
        return self._known[name]


def _none() -> Unsupported:
    return Unsupported(
        "the model was loaded without room for LoRA adapters: name at least one in its lora setting",
        code="lora_unsupported",
    )


# A job's sampling settings as the arguments of vLLM's `SamplingParams`. Pure.

IGNORED = (
    "typical_p",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "xtc_probability",
    "xtc_threshold",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "beam_size",
)
PRIORITIES = {"main": 0, "background": 1}  # vLLM takes the smallest number first

Call = dict[str, Any]


def sampling_arguments(prompt: Prompt, most: int, n_vocab: int) -> Call:
    """`most`: how many tokens the job may say. Its text is nobody's business here: vLLM does not detokenize."""
    return {
        **_sampling(prompt.sampling, n_vocab),
        "max_tokens": most,
        "stop_token_ids": list(prompt.stop_ids),
        # What ends an answer is the gateway's word. But a grammar that is complete allows nothing else than vLLM's own.
        "ignore_eos": prompt.constraint is None,
        "logprobs": prompt.logprobs,
        "detokenize": False,
    }


def _sampling(s: Sampling, n_vocab: int) -> Call:
    told: Call = {
        "temperature": 1.0 if s.temperature is None else max(0.0, s.temperature),
        "top_p": 1.0 if s.top_p is None or s.top_p <= 0 else min(1.0, s.top_p),
        "top_k": max(0, s.top_k or 0),  # 0: all of them
        "min_p": s.min_p or 0.0,
        "repetition_penalty": s.repetition_penalty or 1.0,
        "presence_penalty": s.presence_penalty or 0.0,
        "frequency_penalty": s.frequency_penalty or 0.0,
    }
    if s.seed is not None:
        told["seed"] = s.seed % (1 << 63)  # -1 would mean none, and torch takes no more bits
    if s.logit_bias and (known := {id: bias for id, bias in s.logit_bias.items() if 0 <= id < n_vocab}):
        told["logit_bias"] = known
    return told


# What an answer is held to, as the arguments of vLLM's `StructuredOutputsParams`. Pure.
#
# Grammars are in llguidance's dialect of Lark, as the rest of the program writes them, so vLLM is asked for its guidance
# backend. A constraint that begins with a trigger becomes one grammar of the whole answer: anything up to the trigger,
# then what must follow it, and so on.

STRUCTURED_OUTPUTS_CONFIG = {"backend": "guidance"}
# One way to write it: small models that may put white space anywhere never stop doing so.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# The compiler goes as deep as rules refer to each other, and takes the whole process along where its stack ends.
_LONGEST, _LONGEST_WRITTEN = 1 << 18, 1 << 13
_FIELDS = {"gbnf": "grammar", "regex": "regex", "lark": "lark", "json_schema": "response_format"}
_START = re.compile(r"^start(?=\s*[:\[])", re.MULTILINE)


class ControlTokens(Struct, frozen=True):
    """Tokens that no text of a grammar matches, by what they read."""

    ids: dict[str, int] = {}

    def others(self, id: int | None = None) -> str:
        """All of them but one, as llguidance writes sets of tokens; empty where there are none."""
        return ",".join(_ranges(sorted(set(self.ids.values()) - {id})))


def structured_output_arguments(constraint: Constraint, markers: ControlTokens = ControlTokens()) -> dict[str, Any]:
    _check(constraint)
    if constraint.trigger:
        return {"grammar": _triggered(constraint.text, constraint.trigger, markers)}
    match constraint.kind:
        case "json_object":
            return {"json": _schema({"type": "object"})}
        case "json_schema":
            return {"json": _schema(_decoded(constraint))}
        case "regex":
            return {"regex": constraint.text}
    return {"grammar": constraint.text}


def _check(constraint: Constraint) -> None:
    longest = _LONGEST if constraint.tools or constraint.kind == "json_schema" else _LONGEST_WRITTEN
    if len(constraint.text) > longest:
        raise bad_grammar(constraint, f"it is longer than {longest} characters")
    if not constraint.text and constraint.kind in ("tools", "lark"):
        raise Unsupported(
            "this model's way to call tools has no grammar: a call cannot be required", param="tool_choice"
        )


def bad_grammar(constraint: Constraint, words: str) -> InvalidRequest:
    param = "tools" if constraint.tools else _FIELDS.get(constraint.kind)
    return InvalidRequest(f"the {constraint.kind} cannot be compiled: {words.strip()}", code="bad_grammar", param=param)


def _decoded(constraint: Constraint) -> Any:
    try:
        return json.loads(constraint.text or "{}")
    except ValueError as error:
        raise bad_grammar(constraint, str(error)) from error


def _schema(schema: Any) -> str:
    """A schema that is only true or false can say nothing of its spacing."""
    return json.dumps({**schema, "x-guidance": _SPACING} if isinstance(schema, dict) else schema, ensure_ascii=False)


def _triggered(lark: str, trigger: str, markers: ControlTokens) -> str:
    call = _START.sub("triggered", lark)
    id = markers.ids.get(trigger)
    if id is not None:
        return f"start: (free <[{id}]> triggered)* free\nfree: <[^{id}]>*\n{call}"
    others = markers.others()
    marker = f"WORDS? <[{others}]> | " if others else ""
    rules = (
        f"start: ({marker}until triggered)* WORDS?",
        f"until[suffix={json.dumps(trigger, ensure_ascii=False)}]: WORDS",
        "WORDS: /(?s:.*)/",
    )
    return "\n".join((*rules, call))


def _ranges(ids: Sequence[int]) -> list[str]:
    """3, 4, 5, 9 → 3-5, 9"""
    found: list[list[int]] = []
    for id in ids:
        if found and id == found[-1][-1] + 1:
            found[-1] = [found[-1][0], id]
        else:
            found.append([id, id])
    return [f"{first}" if first == last else f"{first}-{last}" for first, last in found]


# Pictures of a prompt as vLLM takes them: opened here, known by their hash, so that each is looked at once.

_MOST_PIXELS = 1 << 26  # a small file may unpack to more than the machine has


def multi_modal_data(media: Sequence[Media]) -> dict[str, Any]:
    """What stands beside the token ids in a prompt."""
    if not media:
        return {}
    if any(each.kind != "image" for each in media):
        raise Unsupported("this engine reads text and images", code="modality_unsupported")
    return {
        "multi_modal_data": {"image": [_opened(each.data) for each in media]},
        "multi_modal_uuids": {"image": [each.sha256 for each in media]},
    }


def _opened(data: bytes) -> Any:
    pil = import_module("PIL.Image")
    try:
        image = pil.open(BytesIO(data))
        if image.width * image.height > _MOST_PIXELS:
            raise InvalidRequest(f"an image of {image.width}x{image.height} is too large", code="invalid_image")
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, pil.DecompressionBombError) as error:
        raise InvalidRequest(f"an image cannot be read: {error}", code="invalid_image") from error
