"""What `/api/chat` and `/api/generate` share: options, format, thinking, images, `keep_alive`, times."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from msgspec import Meta, Raw, field
from msgspec.structs import replace

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest
from modelyard.core.events import Finished, StopReason, TokenLogprob
from modelyard.core.request import Constraint, Image, Reasoning, Sampling
from modelyard.protocols.common.extensions import ExtensionFields, Ignored, ignored_fields, read_sampling, read_whole
from modelyard.protocols.common.openai_fields import MIN_LOGPROB, check_range

NDJSON = b"application/x-ndjson"
DONE_REASONS: Mapping[StopReason, str] = {
    "end": "stop",
    "tool_calls": "stop",
    "stop_string": "stop",
    "max_tokens": "length",
    "window": "length",
    "repetition": "length",
    "content_filter": "stop",
    "compaction": "stop",
}
Images = Annotated[list[limits.Text], Meta(max_length=10_000)]
KeepAlive = float | limits.Word | None


class OllamaOptions(ExtensionFields):
    """Sampling under Ollama's names, and under ours. Options of a load are the configuration's here. Ollama reads whole
    numbers that are written with a fraction."""

    num_predict: Any = None
    num_ctx: Ignored = None
    top_k: Any = None
    seed: Any = None
    mirostat: Any = None
    repeat_penalty: float | None = None
    stop: limits.StopString | limits.StopStrings | None = None
    # Without effect: what a model is loaded with, which the configuration has, and a sampler that is gone.
    embedding_only: Ignored = None
    f16_kv: Ignored = None
    logits_all: Ignored = None
    low_vram: Ignored = None
    main_gpu: Ignored = None
    num_batch: Ignored = None
    num_gpu: Ignored = None
    num_keep: Ignored = None
    num_thread: Ignored = None
    numa: Ignored = None
    penalize_newline: Ignored = None
    tfs_z: Ignored = None
    use_mlock: Ignored = None
    use_mmap: Ignored = None
    vocab_only: Ignored = None


class OllamaBody(ExtensionFields):
    """The fields of both endpoints."""

    model: limits.Name | None = None
    stream: bool | None = None
    options: OllamaOptions | None = None
    format: Raw = field(default_factory=Raw)
    think: bool | limits.Word | None = None
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


_NO_OPTIONS = OllamaOptions()
_WHOLE = ("num_predict", "num_ctx", "top_k", "seed", "mirostat")
_MAX_TOP_LOGPROBS = 20


def read_options(body: OllamaBody, warnings: list[str]) -> tuple[Sampling, int | None, OllamaOptions]:
    """Sampling, the limit of the reply, and the options for what else is in them. -1, -2 and 0 are no limit."""
    options = body.options or _NO_OPTIONS
    for name in _WHOLE if options is not _NO_OPTIONS else ():
        setattr(options, name, read_whole(f"options.{name}", getattr(options, name)))
    sampling = read_sampling(options).over(read_sampling(body))
    if options.repeat_penalty is not None:
        if not 0 <= options.repeat_penalty <= 100:
            raise InvalidRequest("repeat_penalty must be between 0 and 100", param="options.repeat_penalty")
        sampling = replace(sampling, repetition_penalty=options.repeat_penalty)
    if sampling.seed is not None and sampling.seed < 0:
        sampling = replace(sampling, seed=None)  # a random one
    warnings += ignored_fields(options, "options.")
    limit = options.num_predict
    return sampling, limit if limit is not None and limit > 0 else None, options


def read_format(value: Raw) -> Constraint | None:
    """ "json", a schema, or nothing. A schema keeps its text."""
    text = bytes(value).decode()
    if text in ("", "null", '""'):
        return None
    if text == '"json"':
        return Constraint("json_object")
    if not text.startswith("{"):
        raise InvalidRequest('format must be "json" or a JSON schema, which is an object', param="format")
    return Constraint("json_schema", limits.check_length("format", text, limits.MAX_SCHEMA))


def read_think(think: bool | str | None) -> Reasoning:
    """A word is an effort: low, medium or high."""
    if think is None or think == "":
        return Reasoning()
    if isinstance(think, bool):
        return Reasoning(enabled=think)
    if think in ("true", "false"):
        return Reasoning(enabled=think == "true")
    return Reasoning(enabled=think != "none", effort=think)


def read_logprobs(body: OllamaBody) -> int | None:
    check_range("top_logprobs", body.top_logprobs, 0, _MAX_TOP_LOGPROBS)
    return (body.top_logprobs or 0) if body.logprobs else None


# --- keep_alive -------------------------------------------------------------------------------------------------------

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PIECE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


def read_keep_alive(value: KeepAlive) -> float | None:
    """Seconds, from a number or a duration such as "1h30m"; anything below 0 is for ever."""
    if value is None or value == "":
        return None
    seconds = _duration(value.strip()) if isinstance(value, str) else float(value)
    if seconds is None or seconds != seconds:
        raise InvalidRequest(
            f'keep_alive {str(value)[:40]!r} is no duration; send seconds, or a text such as "5m"', param="keep_alive"
        )
    return seconds if seconds >= 0 else float("inf")


def _duration(text: str) -> float | None:
    sign, digits = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    try:
        return sign * float(digits)
    except ValueError:
        pass
    if not digits or _PIECE.sub("", digits):
        return None
    return sign * sum(float(number) * _UNITS[unit] for number, unit in _PIECE.findall(digits))


# --- images -----------------------------------------------------------------------------------------------------------

# The first characters of the base64 text of a file.
_TYPES = {"iVBOR": "image/png", "/9j/": "image/jpeg", "R0lGOD": "image/gif", "UklGR": "image/webp", "Qk": "image/bmp"}


def read_images(images: Sequence[str] | None) -> tuple[Image, ...]:
    return tuple(Image(_data_url(image)) for image in images or ())


def _data_url(image: str) -> str:
    """Ollama takes base64 without a type; some clients send a whole data URL."""
    if image.startswith("data:"):
        return image
    kind = next((kind for start, kind in _TYPES.items() if image.startswith(start)), "image/png")
    return f"data:{kind};base64,{image}"


# --- times and probabilities ------------------------------------------------------------------------------------------


def write_time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def nanoseconds(seconds: float | None) -> int:
    return 0 if seconds is None else round(seconds * 1e9)


def write_counts(finished: Finished) -> dict[str, Any]:
    """`load_duration` is the time before the engine began: tokenizing, loading and the queue."""
    usage, times = finished.usage, finished.timings
    return {
        "total_duration": nanoseconds(times.total),
        "load_duration": nanoseconds((times.queue or 0.0) + (times.tokenize or 0.0)),
        "prompt_eval_count": usage.prompt,
        "prompt_eval_duration": nanoseconds(times.first_token if times.prefill is None else times.prefill),
        "eval_count": usage.output,
        "eval_duration": nanoseconds(times.decode),
    }


def write_logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    def written(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.token, "logprob": max(token.logprob, MIN_LOGPROB), "bytes": list(token.bytes)}

    return [
        written(token) | ({"top_logprobs": [written(t) for t in token.top]} if token.top else {}) for token in tokens
    ]
