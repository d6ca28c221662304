"""What a Messages request says about its conversation as a whole: `thread`, `compaction`, `context_management`,
`fallbacks`, and the changes of tools within it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import ClearToolUses, ContextManagement, Fallback, Reasoning


class AnthropicThread(Struct):
    type: Literal["create", "continue"]
    previous_message_id: limits.Id | None = None


class AnthropicCompaction(Struct):
    type: Literal["summarize"]
    instructions: limits.Text | None = None


class Amount(Struct):
    """A trigger, or how much is kept."""

    type: limits.Word
    value: Annotated[int, Meta(ge=0)] = 0


class AnthropicEdit(Struct):
    type: limits.Word
    keep: Amount | limits.Word | None = None
    trigger: Amount | None = None
    clear_at_least: Amount | None = None
    clear_tool_inputs: bool | Annotated[list[limits.Name], limits.Tools] | None = None
    exclude_tools: Annotated[list[limits.Name], limits.Tools] | None = None
    instructions: limits.Text | None = None
    pause_after_compaction: bool | None = None


class AnthropicContext(Struct):
    edits: Annotated[list[AnthropicEdit], Meta(max_length=16)] | None = None


class AnthropicFallback(Struct):
    model: limits.Name
    max_tokens: int | None = None
    thinking: limits.JsonObject | None = None
    output_config: Any = None
    speed: Any = None


Fallbacks = Annotated[list[AnthropicFallback], Meta(max_length=8)] | Literal["default"] | None
_COMPACT_ABOVE = 150_000  # tokens, if an edit has no trigger


def read_context(
    compaction: AnthropicCompaction | None, context: AnthropicContext | None, ignore: Callable[[str], None]
) -> ContextManagement | None:
    if compaction is not None:
        if context is not None and context.edits:
            raise InvalidRequest("send compaction or context_management, not both", param="compaction")
        return ContextManagement(compact_now=True, instructions=(compaction.instructions or "").strip())
    found = ContextManagement()
    for edit in (context.edits if context is not None else None) or ():
        found = _with_edit(found, edit, ignore)
    return None if found == ContextManagement() else found


def _with_edit(context: ContextManagement, edit: AnthropicEdit, ignore: Callable[[str], None]) -> ContextManagement:
    trigger, keep = edit.trigger, edit.keep
    above, thinking, tool_uses = context.compact_above, context.keep_thinking, context.clear_tool_uses
    pause, instructions = context.pause, context.instructions
    if edit.type == "clear_thinking_20251015":
        is_all = keep == "all" or (isinstance(keep, Amount) and keep.type == "all")
        thinking = None if is_all else keep.value if isinstance(keep, Amount) else 1
    elif edit.type == "clear_tool_uses_20250919":
        by_uses = trigger is not None and trigger.type == "tool_uses"
        inputs = edit.clear_tool_inputs
        tool_uses = ClearToolUses(
            keep=keep.value if isinstance(keep, Amount) else 3,
            above_tokens=0 if by_uses else 100_000 if trigger is None else trigger.value,
            above_uses=trigger.value if by_uses and trigger is not None else 0,
            at_least=0 if edit.clear_at_least is None else edit.clear_at_least.value,
            exclude=tuple(edit.exclude_tools or ()),
            inputs=tuple(inputs) if isinstance(inputs, list) else bool(inputs),
        )
    elif edit.type == "compact_20260112":
        above = _COMPACT_ABOVE if trigger is None else trigger.value
        pause, instructions = edit.pause_after_compaction is True, (edit.instructions or "").strip()
    else:
        ignore(f"context_management.{edit.type}")
    return ContextManagement(tool_uses, thinking, above, False, pause, instructions)


def read_fallbacks(
    fallbacks: Sequence[AnthropicFallback] | str, read_thinking: Callable[[Any], Reasoning]
) -> tuple[Fallback, ...]:
    """`default` are those of the route, which apply in any case."""
    if isinstance(fallbacks, str):
        return ()
    return tuple(
        Fallback(each.model, each.max_tokens, None if each.thinking is None else read_thinking(each.thinking))
        for each in fallbacks
    )
