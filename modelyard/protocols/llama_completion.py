"""llama-server's own completions: `POST /completion`, a bare prompt in, text and all its settings out.

{"prompt": "Once upon", "n_predict": 4, "temperature": 0, "stream": true, "n_probs": 2, "return_tokens": true}
data: {"index": 0, "content": " a", "tokens": [253], "stop": false, "completion_probabilities": [{"id": 253, …}], …}
data: {"index": 0, "content": "", "stop": true, "stop_type": "limit", "generation_settings": {…}, "timings": {…}, …}

Several prompts make a list of replies; in a stream `index` tells them apart. The server role only: engines speak
OpenAI's completions.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from math import exp
from typing import Any

import msgspec
from msgspec.structs import replace

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.events import BlockDelta, Reply, TokenLogprob
from modelyard.core.request import MEDIA_MARK, Audio, Image, Message, Request, Sampling
from modelyard.protocols.common.extensions import (
    ExtensionFields,
    read_constraint,
    read_priority,
    read_sampling,
    read_slot,
    take_biased_texts,
)
from modelyard.protocols.common.json import decode, encode
from modelyard.protocols.common.llama_reply import LlamaStreamWriter, reply_text, selected, write_last
from modelyard.protocols.common.openai_errors import http_error_writer
from modelyard.protocols.common.openai_fields import (
    DEFAULT_MODEL,
    MAX_PROMPTS,
    MIN_LOGPROB,
    check_range,
    read_session,
    read_stop,
)

NAME = "llama_completion"
PATHS: tuple[str, ...] = ("/completion",)
DIALECT = "llama"

_MAX_PROBS = 20
_RANDOM_SEEDS = (-1, 2**32 - 1)
_NEVER = -1e9  # the bias of a token that must not be generated


# --- the request ------------------------------------------------------------------------------------------------------


class LlamaCompletionBody(ExtensionFields):
    model: limits.Name | None = None
    prompt: limits.LlamaPrompts | None = None
    n_predict: int | None = None
    max_tokens: int | None = None
    repeat_penalty: float | None = None
    stop: limits.StopString | limits.StopStrings | None = None
    stream: bool | None = None
    n_probs: int | None = None
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    response_fields: limits.Words | None = None
    logit_bias: limits.LogitBias | limits.LogitBiasPairs | None = None  # type: ignore[assignment]
    lora: limits.AdapterScales | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    # What no engine here does, or does in its own way: named in the warnings if it is set.
    t_max_predict_ms: int | None = None


_decoder = msgspec.json.Decoder(LlamaCompletionBody)
# Values that change nothing; llama-server's clients send all their settings.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "t_max_predict_ms": (-1, 0),
}


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    """`n_predict` 0 only reads the prompt into the cache, and -1 is no limit."""
    parsed = decode(_decoder, body)
    prompts, mixed = _read_prompts(parsed.prompt)
    limit = parsed.n_predict if parsed.n_predict is not None else parsed.max_tokens
    if limit is not None and limit < -1:
        raise InvalidRequest(f"n_predict must be -1, 0 or more, got {limit}", param="n_predict")
    check_range("n_probs", parsed.n_probs, 0, _MAX_PROBS)
    if any(adapter.get("scale") for adapter in parsed.lora or ()):
        raise InvalidRequest("lora: send lora_adapter with the name of the adapter", param="lora")
    warnings = [
        f"{name}_ignored" for name, neutral in _NEUTRAL.items() if getattr(parsed, name) not in (None, *neutral)
    ]
    parsed.grammar = parsed.grammar or None  # clients send an empty one
    return Request(
        model=parsed.model or DEFAULT_MODEL,
        prompts=prompts,
        mixed_prompts=mixed,
        messages=_read_media(parsed.prompt),
        biased_texts=_take_biased_texts(parsed),
        sampling=_read_sampling(parsed),
        max_tokens=None if limit in (None, -1) else max(1, limit or 0),
        stop=read_stop(parsed.stop, warnings),
        logprobs=parsed.n_probs or (0 if parsed.return_tokens else None),
        post_sampling=parsed.post_sampling_probs is True and bool(parsed.n_probs),
        constraint=read_constraint(parsed),
        stream=parsed.stream is True,
        progress=parsed.return_progress is True and parsed.stream is True,
        timings="all" if parsed.timings_per_token else "last",
        lora_adapter=parsed.lora_adapter,
        priority=read_priority(parsed),
        session=read_session(headers, None),
        slot=read_slot(parsed),
        reply_fields=tuple(parsed.response_fields or ()),
        repeated={"n_probs": parsed.n_probs or 0, "return_tokens": parsed.return_tokens is True},
        dialect=DIALECT,
        warnings=tuple(warnings),
    )


def _read_prompts(
    given: limits.LlamaPrompts | None,
) -> tuple[tuple[str | tuple[int, ...], ...], tuple[tuple[str | int, ...], ...]]:
    """The prompts, and those in which texts stand among token ids. A list with an id in it is one prompt."""
    if given is None or given == []:
        raise InvalidRequest("prompt is required", param="prompt", code="missing_required_parameter")
    items: list[Any] = given if isinstance(given, list) and not any(type(each) is int for each in given) else [given]
    if len(items) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(items)} entries; at most {MAX_PROMPTS} are allowed", param="prompt")
    read = [_read_prompt(each) for each in items]
    if any(isinstance(each, tuple) and any(isinstance(part, str) for part in each) for each in read):
        return (), tuple((each,) if isinstance(each, str) else each for each in read)
    return tuple(read), ()  # type: ignore[arg-type]


def _read_prompt(given: limits.LlamaPrompt) -> str | tuple[str | int, ...]:
    if isinstance(given, dict):
        given = given.get("prompt_string")  # type: ignore[assignment]
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given:
        raise InvalidRequest("prompt: send a text, token ids, or an object with prompt_string", param="prompt")
    for part in given:
        if isinstance(part, int) and not 0 <= part < 2**31:
            raise InvalidRequest(f"prompt: {part} is not a token id", param="prompt")
    return tuple(given)


def _read_media(given: limits.LlamaPrompts | None) -> tuple[Message, ...]:
    """The `multimodal_data` of a prompt: files in base64 for the marks in its text, which nothing describes."""
    if not isinstance(given, dict):
        if isinstance(given, list) and any(isinstance(each, dict) and each.get("multimodal_data") for each in given):
            raise Unsupported("multimodal_data: send one prompt at a time", param="prompt")
        return ()
    text, files = given.get("prompt_string"), given.get("multimodal_data") or []
    if not isinstance(files, list) or not all(isinstance(each, str) for each in files):
        raise InvalidRequest("multimodal_data must be a list of files in base64", param="prompt")
    if isinstance(text, str) and text.count(MEDIA_MARK) != len(files):
        message = f"prompt_string has {text.count(MEDIA_MARK)} times {MEDIA_MARK!r} for {len(files)} files"
        raise InvalidRequest(f"multimodal_data: {message}", param="prompt")
    return (Message("user", tuple(map(_read_media_file, files))),) if files else ()


_SOUNDS = {b"ID3": "audio/mpeg", b"\xff\xfb": "audio/mpeg", b"\xff\xf3": "audio/mpeg", b"fLaC": "audio/flac"}


def _read_media_file(data: str) -> Image | Audio:
    """What its first bytes say it is."""
    try:
        head = base64.b64decode(data[:16])
    except ValueError:
        raise InvalidRequest("multimodal_data must be a list of files in base64", param="prompt") from None
    sound = "audio/wav" if head[:4] == b"RIFF" and head[8:12] == b"WAVE" else None
    sound = sound or next((kind for magic, kind in _SOUNDS.items() if head.startswith(magic)), None)
    return Image(f"data:image/png;base64,{data}") if sound is None else Audio(f"data:{sound};base64,{data}")


def _take_biased_texts(body: LlamaCompletionBody) -> tuple[tuple[str, float], ...]:
    """Also from llama-server's pairs of a text and a number, or false: none of its tokens is generated."""
    if not isinstance(body.logit_bias, list):
        return take_biased_texts(body)
    texts = [pair for pair in body.logit_bias if len(pair) == 2 and isinstance(pair[0], str)]
    body.logit_bias = [pair for pair in body.logit_bias if pair not in texts]
    return tuple((text, _bias(value)) for text, value in texts)


def _bias(value: Any) -> float:
    if isinstance(value, bool | int | float) and value is not True:
        return _NEVER if value is False else float(value)
    raise InvalidRequest("logit_bias must map tokens or texts to numbers", param="logit_bias")


def _read_sampling(body: LlamaCompletionBody) -> Sampling:
    bias, body.logit_bias = body.logit_bias, None
    if body.seed in _RANDOM_SEEDS:
        body.seed = None
    if body.repeat_penalty is not None:
        body.repetition_penalty = body.repeat_penalty
    if body.top_n_sigma is not None and body.top_n_sigma <= 0:  # its clients send all settings
        body.top_n_sigma = None
    sampling = read_sampling(body)
    return replace(sampling, logit_bias=_read_bias(bias)) if bias else sampling


def _read_bias(bias: Mapping[str, float] | list[list[Any]]) -> dict[int, float]:
    """A mapping, or llama-server's pairs of a token id and a number, or false: the token is never generated."""
    found: dict[int, float] = {}
    for pair in bias.items() if isinstance(bias, Mapping) else bias:
        token, value = pair if len(pair) == 2 else (None, None)
        try:
            found[int(token)] = _bias(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            message = "logit_bias must map token ids to numbers; /tokenize has the ids of a text"
            raise InvalidRequest(message, param="logit_bias") from None
    return found


# --- the reply --------------------------------------------------------------------------------------------------------


def write_reply(replies: list[Reply], request: Request) -> bytes:
    written = [_write_whole(reply, request, index) for index, reply in enumerate(replies)]
    return encode(written[0] if len(written) == 1 else written)


def _write_whole(reply: Reply, request: Request, index: int) -> dict[str, Any]:
    text, tokens = reply_text(reply), [token for block in reply.blocks for token in block.logprobs]
    whole = write_last(text, reply.started, reply.finished, index) | _write_settings(request, index)
    whole |= {"has_new_line": "\n" in text} | _write_tokens(tokens, request)
    return selected(whole, request.reply_fields)


def _write_settings(request: Request, index: int) -> dict[str, Any]:
    prompt = (request.prompts or request.mixed_prompts)[index // request.n]
    return {
        "generation_settings": generation_settings(request.sampling)
        | {
            "stop": request.stop,
            "max_tokens": -1 if request.max_tokens is None else request.max_tokens,
            "n_predict": -1 if request.max_tokens is None else request.max_tokens,
            "stream": request.stream,
            "n_probs": (request.repeated or {}).get("n_probs", 0),
            "grammar": request.constraint.text if request.constraint and request.constraint.kind == "gbnf" else "",
            "lora": [{"name": request.lora_adapter, "scale": 1.0}] if request.lora_adapter else [],
        },
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
    }


# Of a field that neither the request nor the model sets: the value with which it changes nothing.
_DEFAULTS: Mapping[str, Any] = {
    "seed": 2**32 - 1, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0,
    "xtc_probability": 0.0, "xtc_threshold": 0.1, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ("\n", ":", '"', "*"), "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
    "top_n_sigma": -1.0, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "adaptive_target": -1.0,
    "adaptive_decay": 0.9, "repeat_last_n": 64,
    "samplers": ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"),
}  # fmt: skip


def generation_settings(sampling: Sampling) -> dict[str, Any]:
    """Under llama-server's names; also the settings that `/props` shows for a model."""
    used = {name: value if (value := getattr(sampling, name)) is not None else _DEFAULTS[name] for name in _DEFAULTS}
    penalty = 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty
    bias = [{"token": token, "bias": value} for token, value in (sampling.logit_bias or {}).items()]
    return used | {"repeat_penalty": penalty, "logit_bias": bias, "ignore_eos": sampling.ignore_eos is True}


def _write_tokens(tokens: Iterable[TokenLogprob], request: Request) -> dict[str, Any]:
    """Ids and probabilities, each if the client asked for it."""
    wanted, out = request.repeated or {}, dict[str, Any]()
    if wanted.get("return_tokens"):
        out["tokens"] = [token.id for token in tokens if token.id is not None]
    if wanted.get("n_probs"):
        after = request.post_sampling
        out["completion_probabilities"] = [
            _write_logprob(token, after)
            | {"top_probs" if after else "top_logprobs": [_write_logprob(other, after) for other in token.top]}
            for token in tokens
        ]
    return out


def _write_logprob(token: TokenLogprob, is_after: bool) -> dict[str, Any]:
    if is_after:
        return {"id": token.id, "token": token.token, "bytes": list(token.bytes), "prob": exp(token.logprob)}
    logprob = max(token.logprob, MIN_LOGPROB)
    return {"id": token.id, "token": token.token, "bytes": list(token.bytes), "logprob": logprob}


class _PieceFields:
    """What a chunk of this endpoint has beside its text. Without the probabilities of the tokens a chunk counts as one,
    which it nearly always is; the last chunk has the exact number."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._counts: dict[int, int] = {}
        self._has_new_line: dict[int, bool] = {}

    def piece(self, event: BlockDelta, choice: int) -> dict[str, Any]:
        self._counts[choice] = self._counts.get(choice, 0) + (len(event.logprobs) or 1)
        self._has_new_line[choice] = self._has_new_line.get(choice, False) or "\n" in event.text
        return {"tokens_predicted": self._counts[choice]} | _write_tokens(event.logprobs, self._request)

    def end(self, choice: int) -> dict[str, Any]:
        has_new_line = self._has_new_line.get(choice, False)
        return _write_settings(self._request, choice) | {"has_new_line": has_new_line}


def writer(request: Request, trace: str) -> LlamaStreamWriter:
    fields = _PieceFields(request)
    return LlamaStreamWriter(request, trace, "prompt", fields.piece, fields.end)


write_error = http_error_writer("prompt", "exceed_context_size_error")
