"""The limit of a request's reasoning as an engine takes it: how the model's output format opens and closes it."""

from __future__ import annotations

from modelyard.core.engine import ReasoningBounds, ReasoningBudget
from modelyard.core.request import Request
from modelyard.gateway.model import TextPipeline
from modelyard.scanner.scanner import Scanner


def reasoning_budget(request: Request, pipeline: TextPipeline, prompt: str) -> ReasoningBudget | None:
    """`prompt` is the rendered text, which may open the reasoning. None: the request has no budget, or the model's
    output format is not known to have reasoning that can be closed."""
    tokens, output_format = request.reasoning.budget, pipeline.format_for(request)
    if tokens is None or tokens < 0 or request.prompts:
        return None
    blocks = output_format.reasoning_blocks
    if not blocks:
        return None
    encode, specials = pipeline.tokenizer.encode, pipeline.tokenizer.specials
    begin = Scanner(output_format, prefill=pipeline.renderer.tail(prompt), new_id=str, specials=specials)
    end = begin.reasoning_end
    opened = next((at for at, block in enumerate(blocks) if end in block.ends), None) if begin.is_thinking else None
    bounds = tuple(ReasoningBounds(block.start, block.ends, tuple(encode(block.closing))) for block in blocks)
    return ReasoningBudget(tokens, bounds, opened)
