"""The objects of OpenAI's Decisions, as the SDK's types have them. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from math import exp
from typing import Any, Literal

import msgspec
from msgspec import Struct

from modelyard.core.errors import InvalidRequest
from modelyard.core.events import Usage
from modelyard.core.limits import JsonObject, Name, Text, check_length
from modelyard.core.request import Message, Reasoning, Request
from modelyard.core.request import Text as TextPart
from modelyard.protocols.common.json import decode, dumps, encode
from modelyard.protocols.openai_responses.request import ResponsesBody, read_body

MAX_QUESTIONS, MAX_OPTIONS, MAX_TEXTS = 400, 255, 4096  # of a request; of a question; options of all its questions
_MAX_TEXT, _MAX_LABEL = 1 << 16, 512
MARK = f"[question {secrets.token_hex(16)}]"  # where a question stands in the prompt; no client can write it
_INSTRUCTIONS = "Answer the question about the input. Answer with one of the given options and nothing else."


class Question(Struct):
    """`texts` are what the model may answer, `values` what the client calls them."""

    type: Literal["predicate", "choice", "score"]
    name: str | None
    prompt: str
    texts: tuple[str, ...]
    values: tuple[Any, ...]


class DecisionBody(Struct):
    model: Name
    input: Text | list[JsonObject]
    questions: list[JsonObject]
    prompt_cache_key: Name | None = None
    prompt_cache_options: JsonObject | None = None
    safety_identifier: Name | None = None


_decoder = msgspec.json.Decoder(DecisionBody)
_responses_decoder = msgspec.json.Decoder(ResponsesBody)


class DecisionRequest(Struct):
    """`request` is a conversation with `MARK` in the place of the question."""

    request: Request
    questions: list[Question]


def read_decisions(body: bytes, headers: Mapping[str, str]) -> DecisionRequest:
    parsed = decode(_decoder, body)
    if not 1 <= len(parsed.questions) <= MAX_QUESTIONS:
        message = f"questions: send 1 to {MAX_QUESTIONS} questions, not {len(parsed.questions)}"
        raise InvalidRequest(message, param="questions")
    questions = [_read_question(each, f"questions[{at}]") for at, each in enumerate(parsed.questions)]
    if (count := sum(len(question.texts) for question in questions)) > MAX_TEXTS:
        message = f"questions: they have {count} options together; at most {MAX_TEXTS} are answered at once"
        raise InvalidRequest(message, param="questions")
    given = parsed.input if isinstance(parsed.input, str) else [_with_json_as_text(item) for item in parsed.input]
    whole = encode({"model": parsed.model, "input": given, "instructions": _INSTRUCTIONS, "store": False})
    read = read_body(decode(_responses_decoder, whole), headers)
    messages = _with_question(read.messages)
    return DecisionRequest(
        msgspec.structs.replace(read, messages=messages, reasoning=Reasoning(enabled=False)), questions
    )


def _with_json_as_text(item: JsonObject) -> JsonObject:
    """`input_json` parts of a message are text to the model."""
    content = item.get("content")
    if not isinstance(content, list):
        return item
    return item | {"content": [_json_as_text(part) for part in content]}


def _json_as_text(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") == "input_json":
        return {"type": "input_text", "text": dumps(part.get("data"))}
    return part


def _with_question(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Behind the input, in the same turn: many templates refuse two turns of a user."""
    *before, last = messages
    if last.role == "user":
        return (*before, msgspec.structs.replace(last, parts=(*last.parts, TextPart(f"\n\n{MARK}"))))
    return (*messages, Message("user", (TextPart(MARK),)))


def _read_question(given: JsonObject, path: str) -> Question:
    kind, name = given.get("type"), given.get("name")
    if name is not None and not isinstance(name, str):
        raise InvalidRequest(f"{path}.name must be a text", param=f"{path}.name")
    text = _read_instructions(given.get("instructions"), f"{path}.instructions")
    if kind == "predicate":
        prompt = f"Statement: {text}\nIs the statement true of the input?\nOptions: yes, no\nAnswer:"
        return Question("predicate", name, prompt, ("yes", "no"), (True, False))
    if kind == "choice":
        options = _read_options(given.get("choices"), f"{path}.choices", "value")
        return _with_options("choice", name, text, options)
    if kind == "score":
        return _with_options("score", name, text, _read_options(given.get("levels"), f"{path}.levels", "label"))
    raise InvalidRequest(f"{path}.type must be predicate, choice or score", param=f"{path}.type")


def _read_instructions(given: Any, path: str) -> str:
    parts = [{"type": "input_text", "text": given}] if isinstance(given, str) else given
    if not isinstance(parts, list) or not parts:
        raise InvalidRequest(f"{path}: a text, or a list of parts", param=path)
    texts = []
    for part in map(_json_as_text, parts):
        if not isinstance(part, dict) or not isinstance(text := part.get("text"), str):
            raise InvalidRequest(f"{path}: only texts and JSON; send images in input", param=path)
        texts.append(text)
    return check_length(path, "\n".join(texts), _MAX_TEXT)


Options = list[tuple[str | bool, str]]  # with their descriptions


def _read_options(given: Any, path: str, field: str) -> Options:
    if not isinstance(given, list) or not 2 <= len(given) <= MAX_OPTIONS:
        raise InvalidRequest(f"{path}: send 2 to {MAX_OPTIONS} of them", param=path)
    found: Options = []
    for at, each in enumerate(given):
        value = each.get(field) if isinstance(each, dict) else None
        if not isinstance(value, str | bool if field == "value" else str) or value == "":
            raise InvalidRequest(f"{path}[{at}].{field} is required", param=f"{path}[{at}].{field}")
        description = each.get("description")
        found.append((value, description if isinstance(description, str) else ""))
        check_length(f"{path}[{at}]", f"{value}{description or ''}", _MAX_LABEL if not description else _MAX_TEXT)
    if len({_option(each) for each in found}) < len(found):
        raise InvalidRequest(f"{path}: two of them are the same text to the model", param=path)
    return found


def _option(option: tuple[str | bool, str]) -> str:
    value = option[0]
    return value if isinstance(value, str) else str(value).lower()


def _with_options(kind: Literal["choice", "score"], name: str | None, text: str, options: Options) -> Question:
    lines = [f"- {_option(each)}" + (f": {each[1]}" if each[1] else "") for each in options]
    prompt = "\n".join([text, "Options:", *lines, "Answer:"])
    return Question(kind, name, prompt, tuple(map(_option, options)), tuple(value for value, _ in options))


# --- the reply --------------------------------------------------------------------------------------------------------


def probabilities(logprobs: Sequence[float]) -> list[float]:
    best = max(logprobs)
    weights = [exp(value - best) for value in logprobs]
    return [weight / sum(weights) for weight in weights]


def write_reply(model: str, questions: Sequence[Question], logprobs: Iterable[Sequence[float]], usage: Usage) -> bytes:
    answers = [_answer(question, probabilities(each)) for question, each in zip(questions, logprobs, strict=True)]
    details = {"cached_tokens": usage.cached, "cache_write_tokens": usage.prompt - usage.cached}
    written = {
        "input_tokens": usage.prompt,
        "input_tokens_details": details,
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt,
    }
    return encode({"model": model, "answers": answers, "usage": written})


def _answer(question: Question, found: Sequence[float]) -> dict[str, Any]:
    answer: dict[str, Any] = {"type": question.type, "name": question.name}
    if question.type == "predicate":
        return answer | {"probability": found[0]}
    if question.type == "choice":
        best = max(range(len(found)), key=found.__getitem__)
        listed = [{"value": value, "probability": p} for value, p in zip(question.values, found, strict=True)]
        return answer | {"choice": question.values[best], "confidence": found[best], "probabilities": listed}
    levels = [
        {"value": at, "label": label, "probability": p}
        for at, (label, p) in enumerate(zip(question.values, found, strict=True))
    ]
    expected = sum(at * p for at, p in enumerate(found))
    return answer | {"score": expected, "confidence": max(found), "probabilities": levels}
