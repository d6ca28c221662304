"""A job as the arguments of vLLM's calls: sampling, structured output, images and LoRA adapters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from msgspec import Struct

from modelyard.core.engine import Media, Prompt
from modelyard.core.errors import InvalidRequest, NotFound, Unsupported
from modelyard.core.request import Constraint, Sampling
from modelyard.engines.grammar_check import JSON_SPACING
from modelyard.engines.grammars import bad_grammar, no_tool_grammar

IGNORED = (
    *("typical_p", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    *("xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau", "mirostat_eta", "beam_size"),
    *("top_n_sigma", "dynatemp_range", "dynatemp_exponent", "adaptive_target", "adaptive_decay", "repeat_last_n"),
    "samplers",
)
PRIORITIES = {"main": 0, "background": 1}  # vLLM runs the smallest number first


class VllmAdapter(Struct, frozen=True):
    """`unique_name` is for vLLM: KV computed with one adapter must not be reused by a later one of the same name."""

    name: str
    unique_name: str
    id: int
    path: str


class VllmRequest(Struct, frozen=True):
    """The arguments of vLLM's prompt, `SamplingParams`, `StructuredOutputsParams` and `LoRARequest`."""

    prompt: dict[str, Any]
    sampling: dict[str, Any]
    structured_outputs: dict[str, Any] | None = None
    adapter: VllmAdapter | None = None


# --- sampling -------------------------------------------------------------------------------------------------------


def sampling_arguments(prompt: Prompt, max_output: int, n_vocab: int) -> dict[str, Any]:
    least = _min_tokens(prompt, max_output)
    return {
        **_sampling(prompt.sampling, n_vocab),
        **({"min_tokens": least} if least else {}),
        "max_tokens": max_output,
        "stop_token_ids": list(prompt.stop_ids),
        # The gateway decides what ends an answer. But a complete grammar allows nothing except vLLM's own EOS.
        "ignore_eos": prompt.constraint is None,
        "logprobs": prompt.logprobs,
        "detokenize": False,
    }


def _min_tokens(prompt: Prompt, max_output: int) -> int:
    """A constraint without a trigger decides alone when the output ends: where it allows the end only, vLLM would have
    no token left."""
    is_bound = prompt.constraint is not None and not prompt.constraint.trigger
    return 0 if is_bound else prompt.sampling.min_output(max_output)


def _sampling(s: Sampling, n_vocab: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "temperature": 1.0 if s.temperature is None else max(0.0, s.temperature),
        "top_p": 1.0 if s.top_p is None or s.top_p <= 0 else min(1.0, s.top_p),
        "top_k": max(0, s.top_k or 0),  # 0: all tokens
        "min_p": s.min_p or 0.0,
        "repetition_penalty": s.repetition_penalty or 1.0,
        "presence_penalty": s.presence_penalty or 0.0,
        "frequency_penalty": s.frequency_penalty or 0.0,
    }
    if s.seed is not None:
        arguments["seed"] = s.seed % (1 << 63)  # to vLLM -1 means none, and torch takes no more bits
    if s.logit_bias and (known := {id: bias for id, bias in s.logit_bias.items() if 0 <= id < n_vocab}):
        arguments["logit_bias"] = known
    return arguments


# --- structured output ----------------------------------------------------------------------------------------------
# Grammars are in llguidance's Lark dialect, so vLLM must use its guidance backend. A constraint with a trigger becomes
# one grammar of the whole answer: any text up to the trigger, then the constrained text, and so on.

STRUCTURED_OUTPUTS_CONFIG = {"backend": "guidance"}
# The compiler recurses as deep as rules refer to each other, and an overflow of its stack kills the process.
_MAX_GENERATED, _MAX_WRITTEN = 1 << 18, 1 << 13  # characters: schemas and tools; a client's own grammar
_START_RULE = re.compile(r"^start(?=\s*[:\[])", re.MULTILINE)


ControlTokens = Mapping[str, int]  # text → id of the tokens that a grammar's strings never match
_NO_TOKENS: ControlTokens = {}


def token_ranges(ids: Iterable[int]) -> str:
    """A set of ids in llguidance's notation: 3, 4, 5, 9 → 3-5,9."""
    ranges: list[list[int]] = []
    for id in sorted(set(ids)):
        if ranges and id == ranges[-1][1] + 1:
            ranges[-1][1] = id
        else:
            ranges.append([id, id])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


def structured_output_arguments(constraint: Constraint, control_tokens: ControlTokens = _NO_TOKENS) -> dict[str, Any]:
    limit = _MAX_GENERATED if constraint.tools or constraint.kind == "json_schema" else _MAX_WRITTEN
    if len(constraint.text) > limit:
        raise bad_grammar(constraint, f"it is longer than {limit} characters")
    if not constraint.text and constraint.kind in ("tools", "lark"):
        raise no_tool_grammar()
    if constraint.trigger:
        return {"grammar": _triggered_grammar(constraint.text, constraint.trigger, control_tokens)}
    match constraint.kind:
        case "json_object":
            return {"json": _json_schema({"type": "object"})}
        case "json_schema":
            try:
                return {"json": _json_schema(json.loads(constraint.text or "{}"))}
            except ValueError as error:
                raise bad_grammar(constraint, str(error)) from error
        case "regex":
            return {"regex": constraint.text}
    return {"grammar": constraint.text}


def _json_schema(schema: Any) -> str:
    """The schemas true and false cannot hold a spacing."""
    return json.dumps(
        {**schema, "x-guidance": JSON_SPACING} if isinstance(schema, dict) else schema, ensure_ascii=False
    )


def _triggered_grammar(lark: str, trigger: str, control_tokens: ControlTokens) -> str:
    call = _START_RULE.sub("triggered", lark)
    id = control_tokens.get(trigger)
    if id is not None:
        return f"start: (free <[{id}]> triggered)* free\nfree: <[^{id}]>*\n{call}"
    control = token_ranges(control_tokens.values())
    control_or = f"TEXT? <[{control}]> | " if control else ""
    rules = (
        f"start: ({control_or}until triggered)* TEXT?",
        f"until[suffix={json.dumps(trigger, ensure_ascii=False)}]: TEXT",
        "TEXT: /(?s:.*)/",
    )
    return "\n".join((*rules, call))


# --- images ---------------------------------------------------------------------------------------------------------

_MAX_PIXELS = 1 << 26  # a small file may decompress to more than the machine's memory


def multi_modal_data(media: Sequence[Media]) -> dict[str, Any]:
    """The fields of a prompt beside the token ids. The hashes let vLLM process each image once."""
    if not media:
        return {}
    if any(each.kind != "image" for each in media):
        raise Unsupported("this engine reads text and images", code="modality_unsupported")
    return {
        "multi_modal_data": {"image": [_open_image(each.data) for each in media]},
        "multi_modal_uuids": {"image": [each.sha256 for each in media]},
    }


def _open_image(data: bytes) -> Any:
    pil = import_module("PIL.Image")
    try:
        image = pil.open(BytesIO(data))
        if image.width * image.height > _MAX_PIXELS:
            raise InvalidRequest(f"an image of {image.width}x{image.height} is too large", code="invalid_image")
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, pil.DecompressionBombError) as error:
        raise InvalidRequest(f"an image cannot be read: {error}", code="invalid_image") from error


# --- LoRA adapters --------------------------------------------------------------------------------------------------


class VllmAdapters:
    """Adapters by name. vLLM loads one when the first request uses it, and identifies it by a number."""

    def __init__(self, configured: Mapping[str, str]) -> None:
        self.enabled = bool(configured)
        self._last_id = 0
        self._adapters: dict[str, VllmAdapter] = {}
        for name, path in configured.items():
            self._add(name, path)

    def _add(self, name: str, path: str) -> None:
        folder = Path(path).expanduser()
        if not (folder / "adapter_config.json").is_file():
            raise NotFound(f"the LoRA adapter {name!r} is not at {folder}: there is no adapter_config.json")
        self._last_id += 1
        self._adapters[name] = VllmAdapter(name, f"{name}#{self._last_id}", self._last_id, str(folder))

    def load(self, argument: str | None) -> None:
        """`name=folder`; replaces an adapter of the same name."""
        name, _, path = (argument or "").partition("=")
        if not (name and path):
            raise InvalidRequest("write the adapter to load as name=folder")
        self._require_enabled()
        self._add(name, path)

    def unload(self, name: str | None) -> VllmAdapter:
        adapter = self._get(name or "")
        del self._adapters[adapter.name]
        return adapter

    def select(self, requested: Sequence[tuple[str, float]]) -> VllmAdapter | None:
        """`requested`: names and scales."""
        if not requested:
            return None
        self._require_enabled()
        if len(requested) > 1:
            raise Unsupported("vLLM takes one adapter for a request", code="lora_unsupported")
        ((name, scale),) = requested
        if scale != 1.0:
            raise Unsupported("vLLM applies adapters at full strength only", code="lora_unsupported")
        return self._get(name)

    def _get(self, name: str) -> VllmAdapter:
        if name not in self._adapters:
            raise NotFound(f"there is no adapter {name!r}; there are {', '.join(self._adapters) or 'none'}")
        return self._adapters[name]

    def _require_enabled(self) -> None:
        if not self.enabled:
            raise Unsupported(
                "the model was loaded without support for LoRA adapters: name at least one in its lora setting",
                code="lora_unsupported",
            )
