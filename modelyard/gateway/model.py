"""A model as the gateway uses it. It works while no engine is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import force_setattr

from modelyard.core.engine import Capabilities, Media, ReasoningBounds, ReasoningBudget
from modelyard.core.errors import ModelyardError, Unavailable, Unimplemented
from modelyard.core.output_format import OutputFormat
from modelyard.core.request import DEFAULT_SAMPLING, Request, Sampling
from modelyard.core.tokenizer import Tokenizer
from modelyard.prompt.render import Renderer
from modelyard.scanner.scanner import Scanner


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
    specials: frozenset[str] = frozenset()  # the tokenizer's control tokens, hashed once
    rerank_template: str | None = None  # the file's prompt for a query and a document

    def __post_init__(self) -> None:
        force_setattr(self, "specials", frozenset(self.tokenizer.specials))

    def format_for(self, request: Request) -> OutputFormat:
        return self.tools_prompt_format if self.tools_prompt_format is not None and request.tools else self.format

    def reasoning_budget(self, request: Request, prompt: str) -> ReasoningBudget | None:
        """The limit of the reasoning as an engine takes it. `prompt` is the rendered text, which may open the
        reasoning. None: the request has no budget, or the format has no reasoning that can be closed."""
        tokens, blocks = request.reasoning.budget, self.format_for(request).reasoning_blocks
        if tokens is None or tokens < 0 or request.prompts or not blocks:
            return None
        tail = self.renderer.tail(prompt)
        begin = Scanner(self.format_for(request), prefill=tail, new_id=str, specials=self.tokenizer.specials)
        end = begin.reasoning_end
        opened = next((at for at, block in enumerate(blocks) if end in block.ends), None) if begin.is_thinking else None
        encode = self.tokenizer.encode
        bounds = tuple(ReasoningBounds(block.start, block.ends, tuple(encode(block.closing))) for block in blocks)
        return ReasoningBudget(tokens, bounds, opened)


class Model(Struct, frozen=True, kw_only=True):
    name: str
    kind: Literal["text", "chat"]
    remote: bool = False
    text: TextPipeline | None = None
    sampling: Sampling = Sampling()
    configured_sampling: Sampling | None = None  # without the built-in defaults; None: the same
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    show_thinking: bool = True
    system_prompt: str | None = None  # of conversations that have none
    lora_adapter: str | None = None  # of requests that name none
    tool_stream: bool = True
    constrain_calls: bool = False
    modalities: tuple[str, ...] = ("text",)
    translates: bool = False  # takes one text and two language codes, nothing else
    spm_infill: bool = False  # fills a gap with the text after it before the text before it
    capabilities: Capabilities | None = None  # as far as they are known before it is loaded
    count_media: Callable[[Sequence[Media]], list[int]] | None = None  # their tokens, without a loaded engine
    fault: ModelyardError | None = None  # why it could not be defined; requests for it fail with this
    define: Callable[[], Model] | None = None  # it is not defined yet: reads its files, at the first request

    def sampling_for(self, request: Request) -> Sampling:
        """A request with its own temperature is not cut by the built-in `top_p`, which belongs to the built-in one."""
        own = request.sampling
        if own is DEFAULT_SAMPLING:
            return self.sampling
        if own.temperature is None or self.configured_sampling is None:
            return own.over(self.sampling)
        return own.over(self.configured_sampling)

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
