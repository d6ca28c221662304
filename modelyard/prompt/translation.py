"""Translation models (TranslateGemma): one text, its language and the target language, nothing else.

The codes are `chat_template_kwargs`, so every protocol can set them; the pool dialect has fields for them. If the
source is missing, "auto" or "mixed", the text may have several languages. The template must name one all the
same, so it gets a valid code, and the text a first line that asks for detection.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.request import Message, Request, Text

SOURCE, TARGET = "source_lang_code", "target_lang_code"
_REQUIRED = "target_lang_code_required"
_UNKNOWN = (None, "", "auto", "mixed")
_CODE = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]{2,8}){0,3}")
_FALLBACK, _FALLBACK_FOR_ENGLISH = "en", "fr"  # the source must differ from the target
_MIXED = (
    "Several languages may be mixed below. Detect the language of each segment by yourself, translate every segment, "
    "and keep their order and numbering.\n\n"
)


def translated(request: Request) -> Request:
    """The request in the only form that such a template takes. Idempotent."""
    text = _text(request)
    source, target = (request.chat_template_kwargs.get(name) for name in (SOURCE, TARGET))
    if target in _UNKNOWN:
        raise InvalidRequest(
            f"{TARGET} is required: it is the language to translate into",
            param=TARGET,
            code=_REQUIRED,
        )
    target = _code(TARGET, target)
    if source in _UNKNOWN:
        english = target.lower().split("-")[0] == _FALLBACK
        source, text = _FALLBACK_FOR_ENGLISH if english else _FALLBACK, _MIXED + text
    codes = {SOURCE: _code(SOURCE, source), TARGET: target}
    kwargs = {**request.chat_template_kwargs, **codes}
    return replace(request, messages=(Message("user", (Text(text),)),), chat_template_kwargs=kwargs)


def _code(name: str, value: object) -> str:
    if not isinstance(value, str) or not _CODE.fullmatch(value):
        shown = str(value)[:40]
        raise InvalidRequest(
            f"{name}: {shown!r} is not a language code such as nl or pt-BR", param=name, code="invalid_language_code"
        )
    return value.replace("_", "-")


def _text(request: Request) -> str:
    if any(message.role in ("system", "developer") for message in request.messages):
        reason = "this model takes a text to translate and no instructions; remove them"
        raise Unsupported(reason, param="instructions", code="instructions_unsupported")
    if len(request.messages) != 1 or request.messages[0].role != "user":
        reason = "this model translates one text at a time; send it without the earlier turns"
        raise Unsupported(reason, param="messages", code="multi_turn_unsupported")
    parts = request.messages[0].parts
    if not all(isinstance(part, Text) for part in parts):
        raise Unsupported("this model translates text only", param="input", code="modality_unsupported")
    return "".join(part.text for part in parts if isinstance(part, Text))
