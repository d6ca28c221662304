"""A model as the gateway uses it, which works while no engine is loaded; what it can do; and the refusal of a request
that needs more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from modelyard.core.engine import Capabilities, Media, ReasoningBounds, ReasoningBudget
from modelyard.core.errors import ModelyardError, Unavailable, Unimplemented, Unsupported
from modelyard.core.output_format import OutputFormat, Region
from modelyard.core.request import (
    DEFAULT_SAMPLING,
    Audio,
    Document,
    Image,
    Message,
    Request,
    ResultPart,
    Sampling,
    Text,
    ToolResult,
)
from modelyard.core.tokenizer import Tokenizer
from modelyard.prompt.render import Renderer
from modelyard.router.router import ModelEntry
from modelyard.router.settings import ModelSettings
from modelyard.scanner.scanner import Scanner

# The answer to a bare prompt whose log probabilities are wanted, or of a model without a chat template: all is text.
VERBATIM = OutputFormat(name="verbatim", regions={"text": Region("text", {})}, trims_newlines=False)
_ANY_BUDGET = 2**31 - 1  # tokens; a larger number does not fit into a message to an engine's process


class TextPipeline(Struct, frozen=True):
    """Everything between messages and token ids, in both directions: renderer, tokenizer and output format.

    `tools_prompt_format` reads the output when the prompt explained the tools in words.
    """

    renderer: Renderer
    tokenizer: Tokenizer
    format: OutputFormat
    stop_ids: tuple[int, ...]
    tools_prompt_format: OutputFormat | None = None
    stop_strings: tuple[str, ...] = ()  # end-of-turn texts that are not tokens of the vocabulary
    specials: frozenset[str] = frozenset()  # the texts of all control and added tokens, hashed once
    rerank_template: str | None = None  # the file's prompt for a query and a document

    def __post_init__(self) -> None:
        force_setattr(self, "specials", frozenset((*self.tokenizer.specials, *self.tokenizer.added)))

    def format_for(self, request: Request) -> OutputFormat:
        return self.tools_prompt_format if self.tools_prompt_format is not None and request.tools else self.format

    def reasoning_budget(self, request: Request, prompt: str) -> ReasoningBudget | None:
        """The limit of the reasoning as an engine takes it. `prompt` is the rendered text, which may open the
        reasoning. None: the request has no budget, or the format has no reasoning that can be closed."""
        tokens, blocks = request.reasoning.budget, self.format_for(request).reasoning_blocks
        if tokens is None or tokens < 0 or request.prompts or not blocks:
            return None
        tail = self.renderer.tail(prompt)
        begin = Scanner(self.format_for(request), prefill=tail, new_id=str, specials=self.specials)
        end = begin.reasoning_end
        opened = next((at for at, block in enumerate(blocks) if end in block.ends), None) if begin.is_thinking else None
        encode = self.tokenizer.encode
        bounds = tuple(ReasoningBounds(block.start, block.ends, tuple(encode(block.closing))) for block in blocks)
        return ReasoningBudget(min(tokens, _ANY_BUDGET), bounds, opened)


class Model(Struct, frozen=True, kw_only=True):
    """A model as requests need it: its entry, and what its files say. It needs no loaded engine."""

    entry: ModelEntry
    kind: Literal["text", "chat"]
    remote: bool = False
    text: TextPipeline | None = None
    sampling: Sampling = Sampling()
    configured_sampling: Sampling | None = None  # without the built-in defaults; None: the same
    modalities: tuple[str, ...] = ("text",)
    translates: bool = False  # takes one text and two language codes, nothing else
    capabilities: Capabilities | None = None  # as far as they are known before it is loaded
    count_media: Callable[[Sequence[Media]], list[int]] | None = None  # their tokens, without a loaded engine
    fault: ModelyardError | None = None  # why it could not be defined; requests for it fail with this
    define: Callable[[], Model] | None = None  # it is not defined yet: reads its files, at the first request
    notes: tuple[tuple[str, str], ...] = ()  # where its parts come from, as rows for `modelyard models explain`

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def settings(self) -> ModelSettings:
        return self.entry.settings

    def sampling_for(self, request: Request) -> Sampling:
        """A request with its own temperature is not cut by the built-in `top_p`, which belongs to the built-in one."""
        own = request.sampling
        if own is DEFAULT_SAMPLING:
            return self.sampling
        if own.temperature is None or self.configured_sampling is None:
            return own.over(self.sampling)
        return own.over(self.configured_sampling)

    @property
    def talks(self) -> bool:
        """Whether it takes conversations. An engine that renders by itself does; others need a chat template."""
        return self.kind == "chat" or self.text is None or self.text.renderer.missing is None

    @property
    def pipeline(self) -> TextPipeline:
        """`text`, or the error that explains why there is none."""
        if self.fault is not None:
            raise self.failed()
        if self.text is None:
            raise Unimplemented(
                f"the model {self.name!r} runs on another server; its tokenizer and template are not available here"
            )
        return self.text

    def failed(self) -> Unavailable:
        """The error of requests for a model that could not be defined."""
        why = self.fault.message if self.fault is not None else "it has no definition"
        return Unavailable(f"the model {self.name!r} could not be loaded: {why}", code="model_failed")


# --- what a model can do ----------------------------------------------------------------------------------------------

_IMAGE_PLACEHOLDER = Text("[image: this model reads text only]")
_IMAGE_DROPPED = "image_dropped: a tool returned a picture and the model reads text only"
_AUDIO_PLACEHOLDER = Text("[audio: this model takes no audio]")
_AUDIO_DROPPED = "audio_dropped: a tool returned a sound and the model takes no audio"
THINKING_MODES = ("default", "enabled", "disabled")
# While an engine is not loaded, assume that it can do everything. The request is checked again when it is.
UNKNOWN_ENGINE = Capabilities(
    modalities=("text", "image", "audio"),
    structured=True,
    logprobs=True,
    prompt_logprobs=True,
    reasoning_budget=True,
    lora=True,
    embeddings=True,
    rerank=True,
    thinking_modes=THINKING_MODES,
    infill=True,
)


def effective_capabilities(model: Model, engine: Capabilities | None = None) -> Capabilities:
    """The definition decides modalities, turns, thinking and infill; the engine decides everything that it computes."""
    engine = engine or model.capabilities or UNKNOWN_ENGINE
    fills_gaps = model.text is not None and model.text.tokenizer.fim is not None
    chat = engine.generates and engine.chat and model.talks
    return msgspec.structs.replace(
        engine,
        modalities=tuple(modality for modality in model.modalities if modality in engine.modalities),
        chat=chat,
        multi_turn=engine.multi_turn and not model.translates,
        tools=engine.tools and chat and not model.translates,
        thinking_modes=engine.thinking_modes if model.text is None else model.text.renderer.thinking_modes,
        infill=fills_gaps or (model.text is None and engine.infill),
    )


def capability_names(can: Capabilities) -> tuple[str, ...]:
    """What a model can do, in the words that Ollama introduced and other servers took over, and `chat`: a model without
    a chat template only continues a text."""
    found = {
        "completion": can.generates,
        "chat": can.chat,
        "embedding": can.embeddings and not can.generates,
        "tools": can.chat and can.tools,
        "insert": can.generates and can.infill,
        "vision": "image" in can.modalities,
        "thinking": len(can.thinking_modes) > 1,
    }
    return tuple(name for name, has in found.items() if has)


class CapabilityCache:
    """`effective_capabilities` of every model, computed when its definition or its engine has changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Model, Capabilities | None, Capabilities]] = {}

    def effective(self, model: Model, engine: Capabilities | None) -> Capabilities:
        known = self._known.get(model.name)
        if known is None or known[0] is not model or (known[1] is not engine and known[1] != engine):
            known = self._known[model.name] = (model, engine, effective_capabilities(model, engine))
        return known[2]


def check_capabilities(request: Request, can: Capabilities, name: str, *, media: Collection[str] = ()) -> None:
    """Raise Unsupported with the missing capability. `media` are the request's `media_kinds`."""
    if not can.generates:
        raise no_chat(can, name)
    if request.infill is not None and not can.infill:
        reason = "has no tokens to fill a gap between two texts; send the prompt without a suffix, or use a code model"
        field = "suffix" if request.infill.files is None else "input_suffix"
        raise Unsupported(f"the model {name!r} {reason}", code="suffix_unsupported", param=field)
    if request.prompt_logprobs is not None and not can.prompt_logprobs:
        reason = "does not report the log probabilities of a prompt; send the request without echo or without logprobs"
        raise Unsupported(
            f"the engine of {name!r} {reason}",
            code="prompt_logprobs_unsupported",
            param="echo" if request.echo else "prompt_logprobs",
        )
    for kind in media:
        if kind not in can.modalities:
            words = {"image": "images", "audio": "audio"}[kind]
            reason = f"takes {' and '.join(can.modalities)} only; send the request without {words} or to another model"
            reason = f"{reason}. {can.modalities_need}" if can.modalities_need else reason
            raise Unsupported(f"the model {name!r} {reason}", code="modality_unsupported", param="messages")
    if not can.multi_turn and any(message.role in ("assistant", "tool") for message in request.messages):
        reason = "answers one question at a time; send it without the earlier turns"
        raise Unsupported(f"the model {name!r} {reason}", code="multi_turn_unsupported", param="messages")
    if request.reasoning.strict:
        mode = {None: "default", True: "enabled", False: "disabled"}[request.reasoning.enabled]
        if mode not in can.thinking_modes:
            reason = f"has no thinking mode {mode!r}; it has {', '.join(can.thinking_modes)}"
            raise Unsupported(f"the model {name!r} {reason}", code="thinking_unsupported", param="thinking")
    if request.tools and not can.tools:
        raise Unsupported(f"the model {name!r} cannot call tools", code="tools_unsupported", param="tools")
    if request.constraint is not None and not can.structured:
        # Grammars have one field name on every protocol; schemas do not.
        param = {"gbnf": "grammar", "regex": "regex", "lark": "lark"}.get(request.constraint.kind)
        reason = "cannot enforce a schema or grammar; ask for the form in the prompt, or use another model"
        raise Unsupported(f"the model {name!r} {reason}", code="structured_unsupported", param=param)
    if request.stream and not can.streaming:
        reason = "does not stream; send the request with stream: false"
        raise Unsupported(f"the model {name!r} {reason}", code="streaming_unsupported", param="stream")
    if request.lora_adapter is not None and not can.lora:
        raise Unsupported(f"the model {name!r} takes no LoRA adapters", code="lora_unsupported", param="lora_adapter")


def no_chat(can: Capabilities, name: str) -> Unsupported:
    use = "it runs by diffusion, which this engine does not do; use another model"
    if can.embeddings or can.rerank:
        use = "send texts to /v1/embeddings" if can.embeddings else "send a query and documents to /v1/rerank"
    return Unsupported(f"the model {name!r} does not generate text: {use}", code="model_has_no_chat", param="model")


def check_embeddings(can: Capabilities, name: str) -> None:
    if not can.embeddings:
        how = " or set embeddings = true for this model" if can.embeddings_optional else ""
        raise Unsupported(
            f"the model {name!r} makes no embeddings; use an embedding model{how}",
            code="embeddings_unsupported",
            param="model",
        )


def check_rerank(can: Capabilities, name: str) -> None:
    if not can.rerank:
        raise Unsupported(
            f"the model {name!r} ranks no documents; use a reranking model", code="rerank_unsupported", param="model"
        )


def ignored_parameters(request: Request, can: Capabilities) -> tuple[str, ...]:
    """The sampling parameters that the client set and the engine does not support, and a budget for reasoning."""
    sampling, budget = request.sampling, request.reasoning.budget
    ignored: tuple[str, ...] = ()
    if can.ignored and sampling is not DEFAULT_SAMPLING:
        ignored = tuple(name for name in can.ignored if getattr(sampling, name, None) is not None)
    return ignored if budget is None or can.reasoning_budget else (*ignored, "reasoning_budget")


_NO_MEDIA: frozenset[str] = frozenset()
_MEDIA: dict[type, str] = {Image: "image", Audio: "audio", Document: "document"}


def media_kinds(request: Request) -> frozenset[str]:
    """Which of image, audio and document the request has. Every request asks, so it is a plain loop."""
    found = _NO_MEDIA
    for message in request.messages:
        for part in message.parts:
            kind = type(part)
            if kind is Text:
                continue
            if kind in _MEDIA:
                found |= {_MEDIA[kind]}
            elif isinstance(part, ToolResult):
                found |= {_MEDIA[type(each)] for each in part.content if type(each) in _MEDIA}
    return found


def without_tool_media(request: Request, modalities: Collection[str]) -> Request:
    """Replace the images and sounds in tool results that the model does not take.

    A refusal would end an agent's session for good, because they stay in its history. What a user sends is refused.
    """
    notes: dict[type, Text] = {}
    if "image" not in modalities:
        notes[Image] = _IMAGE_PLACEHOLDER
    if "audio" not in modalities:
        notes[Audio] = _AUDIO_PLACEHOLDER
    kinds = {type(part) for message in request.messages for part in _tool_parts(message)} & notes.keys()
    if not kinds:
        return request
    messages = tuple(_with_notes(m, notes) if m.role == "tool" else m for m in request.messages)
    dropped = tuple(text for kind, text in ((Image, _IMAGE_DROPPED), (Audio, _AUDIO_DROPPED)) if kind in kinds)
    return msgspec.structs.replace(request, messages=messages, warnings=(*request.warnings, *dropped))


def _tool_parts(message: Message) -> Iterator[ResultPart]:
    if message.role == "tool":
        for part in message.parts:
            if isinstance(part, ToolResult):
                yield from part.content


def _with_notes(message: Message, notes: Mapping[type, Text]) -> Message:
    def replaced(result: ToolResult) -> ToolResult:
        return msgspec.structs.replace(result, content=tuple(notes.get(type(part), part) for part in result.content))

    parts = tuple(replaced(part) if isinstance(part, ToolResult) else part for part in message.parts)
    return msgspec.structs.replace(message, parts=parts)


def require_place_for_images(model: Model) -> None:
    """Raise if the prompt's template would drop them."""
    renderer = model.pipeline.renderer
    if not (renderer.marks_media or renderer.shows_images):
        raise Unsupported(
            f"the chat template of {model.name!r} has no place for images; remove prompt_format and chat_template from "
            "its settings, or set a chat_template that writes them",
            code="modality_unsupported",
            param="messages",
        )
