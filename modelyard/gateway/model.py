"""A model's definition as the gateway uses it: it works while no engine is loaded."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from modelyard.core.errors import Unimplemented
from modelyard.core.format import Format
from modelyard.core.request import Sampling
from modelyard.core.vocab import Vocabulary
from modelyard.prompt.render import Renderer


class TextParts(Struct, frozen=True):
    """What only a token engine needs of us: template and tokenizer, and how its raw output reads."""

    renderer: Renderer
    vocab: Vocabulary
    format: Format
    stop_ids: tuple[int, ...]


class Model(Struct, frozen=True, kw_only=True):
    name: str
    kind: Literal["text", "chat"]
    remote: bool = False
    text: TextParts | None = None
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    show_thinking: bool = True
    modalities: tuple[str, ...] = ("text",)

    @property
    def parts(self) -> TextParts:
        if self.text is None:
            raise Unimplemented(
                f"the model {self.name!r} runs elsewhere: its tokenizer and template are not known here"
            )
        return self.text
