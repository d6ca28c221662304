"""A model's definition as the gateway uses it: it works while no engine is loaded."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import force_setattr

from modelyard.core.errors import ModelyardError, Unavailable, Unimplemented
from modelyard.core.output_format import OutputFormat
from modelyard.core.request import Request, Sampling
from modelyard.core.tokenizer import Tokenizer
from modelyard.prompt.render import Renderer


class TextPipeline(Struct, frozen=True):
    """What only a token engine needs of us: template and tokenizer, and how its raw output reads.

    `taught` is how it reads where the prompt has told the model in words how to call tools.
    """

    renderer: Renderer
    vocab: Tokenizer
    format: OutputFormat
    stop_ids: tuple[int, ...]
    taught: OutputFormat | None = None
    stop_strings: tuple[str, ...] = ()  # what ends a turn and is no token of the vocabulary
    specials: frozenset[str] = frozenset()  # the vocabulary's control tokens, hashed once for all answers

    def __post_init__(self) -> None:
        force_setattr(self, "specials", frozenset(self.vocab.specials))

    def format_for(self, request: Request) -> OutputFormat:
        return self.taught if self.taught is not None and request.tools else self.format


class Model(Struct, frozen=True, kw_only=True):
    name: str
    kind: Literal["text", "chat"]
    remote: bool = False
    text: TextPipeline | None = None
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    show_thinking: bool = True
    tool_stream: bool = True
    constrain_calls: bool = False
    modalities: tuple[str, ...] = ("text",)
    translates: bool = False  # it takes one text and two language codes, and nothing else
    fault: ModelyardError | None = None  # why it could not be defined: whoever asks for it is told

    @property
    def parts(self) -> TextPipeline:
        if self.fault is not None:
            raise Unavailable(f"the model {self.name!r} could not be loaded: {self.fault.message}", code="model_failed")
        if self.text is None:
            raise Unimplemented(
                f"the model {self.name!r} runs elsewhere: its tokenizer and template are not known here"
            )
        return self.text
