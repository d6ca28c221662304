"""What a model can, of its definition and its engine together, and the coded refusal of a request that wants more."""

from __future__ import annotations

import msgspec

from modelyard.core.engine import Capabilities
from modelyard.core.errors import Unsupported
from modelyard.core.request import Image, Message, Request, Text, ToolResult
from modelyard.gateway.model import Model

_PICTURE = Text("[image: this model reads text only]")
_UNSEEN = "image_dropped: a tool returned a picture and the model reads text only"
THINKING_MODES = ("default", "enabled", "disabled")
# An engine that is not up yet is given the benefit of the doubt: it is asked again when it is.
_ANYTHING = Capabilities(
    modalities=("text", "image", "audio"),
    structured=True,
    logprobs=True,
    lora=True,
    embeddings=True,
    thinking_modes=THINKING_MODES,
)


def capabilities(model: Model, told: Capabilities | None = None) -> Capabilities:
    """The definition's word where it knows (modalities, turns, thinking), the engine's for all that it computes.

    `told` is what the engine says of itself; None while it is not up.
    """
    told = told or _ANYTHING
    return msgspec.structs.replace(
        told,
        modalities=tuple(modality for modality in model.modalities if modality in told.modalities),
        multi_turn=told.multi_turn and not model.translates,
        tools=told.tools and not model.translates,
        thinking_modes=told.thinking_modes if model.text is None else model.text.renderer.thinking_modes,
    )


class CapabilityCache:
    """`capabilities` of every model, worked out anew only when its definition or its engine has changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Model, Capabilities | None, Capabilities]] = {}

    def of(self, model: Model, told: Capabilities | None) -> Capabilities:
        known = self._known.get(model.name)
        if known is None or known[0] is not model or (known[1] is not told and known[1] != told):
            known = self._known[model.name] = (model, told, capabilities(model, told))
        return known[2]


def check(request: Request, can: Capabilities, name: str, *, images: bool) -> None:
    """Raises Unsupported with the capability at fault. `images`: the request holds some."""
    if images and "image" not in can.modalities:
        told = "takes text only; send the request without images or to another model"
        raise Unsupported(f"the model {name!r} {told}", code="modality_unsupported", param="messages")
    if not can.multi_turn and _is_multi_turn(request):
        told = "answers one question at a time; send it alone, without what was said before"
        raise Unsupported(f"the model {name!r} {told}", code="multi_turn_unsupported", param="messages")
    if request.reasoning.strict and (mode := _mode(request)) not in can.thinking_modes:
        told = f"has no thinking mode {mode!r}; it has {', '.join(can.thinking_modes)}"
        raise Unsupported(f"the model {name!r} {told}", code="thinking_unsupported", param="thinking")
    _check_engine(request, can, name)


def _check_engine(request: Request, can: Capabilities, name: str) -> None:
    if request.tools and not can.tools:
        raise Unsupported(f"the model {name!r} cannot call tools", code="tools_unsupported", param="tools")
    if request.constraint is not None and not can.structured:
        told = "cannot be held to a schema or grammar; ask for the form in words, or another model"
        raise Unsupported(f"the model {name!r} {told}", code="structured_unsupported", param=_form(request))
    if request.stream and not can.streaming:
        told = "does not stream; send the request with stream: false"
        raise Unsupported(f"the model {name!r} {told}", code="streaming_unsupported", param="stream")
    if request.lora_adapter is not None and not can.lora:
        raise Unsupported(f"the model {name!r} takes no LoRA adapters", code="lora_unsupported", param="lora_adapter")


def _form(request: Request) -> str | None:
    constraint = request.constraint
    own = {"gbnf": "grammar", "regex": "regex", "lark": "lark"}  # the same on every protocol; a schema's name is not
    return own.get(constraint.kind) if constraint is not None else None


def _mode(request: Request) -> str:
    return {None: "default", True: "enabled", False: "disabled"}[request.reasoning.enabled]


def _is_multi_turn(request: Request) -> bool:
    return any(message.role in ("assistant", "tool") for message in request.messages)


def without_results_pictures(request: Request) -> Request:
    """For a model that reads only text: a word where a tool has returned a picture. A refusal would end an agent's
    session for good, because the picture stays in its history; one that a user sends is still refused."""
    messages = tuple(_worded(message) if message.role == "tool" else message for message in request.messages)
    if messages == request.messages:
        return request
    return msgspec.structs.replace(request, messages=messages, warnings=(*request.warnings, _UNSEEN))


def _worded(message: Message) -> Message:
    return msgspec.structs.replace(
        message, parts=tuple(_result_in_words(p) if isinstance(p, ToolResult) else p for p in message.parts)
    )


def _result_in_words(result: ToolResult) -> ToolResult:
    content = tuple(_PICTURE if isinstance(part, Image) else part for part in result.content)
    return msgspec.structs.replace(result, content=content)


def holds_only_text(request: Request) -> bool:
    """No pictures, then, and no calls. Loops, not generators: this looks at every part of a plain request."""
    for message in request.messages:
        for part in message.parts:
            if type(part) is not Text:
                return False
    return True


def has_images(request: Request) -> bool:
    for message in request.messages:
        for part in message.parts:
            if type(part) is Image:
                return True
            if type(part) is ToolResult and any(type(inside) is Image for inside in part.content):
                return True
    return False
