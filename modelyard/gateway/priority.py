"""Which requests run in the background: an agent's side requests, recognised by their shape. Pure.

Some of them use the main model's name and session, so neither tells them apart. In this order:

    1. the request's own `priority`
    2. it offers tools                            main: a conversation, or a sub-agent's
    3. its model name is of the small tier        background
    4. calls in its history, and no tools         background: a summary for a conversation that is compacted
    5. only server-side tools                     background: a search on behalf of a conversation
    6. a single exchange of a session that asks   background: a title, a classification of a command
       for JSON of a schema, or for a short
       answer with a stop string, or whose
       instructions name such a task

Everything else is main. A wrong "background" costs little: the request waits behind others for a bounded number of
turns, and its KV is evicted first. A wrong "main" may evict a conversation's KV, which this module exists to prevent.
"""

from __future__ import annotations

import re
import zlib

from modelyard.core.request import Message, Priority, Request, Text, ToolCall

_SMALL_TIER = re.compile(r"(?:^|[^a-z])haiku(?:[^a-z]|$)")
_SIDE_TASK = re.compile(r"\b(?:titles?|topic|summar(?:y|ies|i[sz]e\w*)|classif\w+|commit message)\b", re.IGNORECASE)
_TASK_CHARS = 400  # of the instructions that are searched for the task
_SHORT_ANSWER_TOKENS = 8192
_ID_CHARS = 4096  # of the instructions that identify a background task


def priority(request: Request) -> Priority:
    if request.priority is not None:
        return request.priority
    if request.tools:
        return "main" if any(tool.kind != "server" for tool in request.tools) else "background"
    name = request.model.lower()
    if "haiku" in name and _SMALL_TIER.search(name) is not None:
        return "background"
    for message in request.messages:
        for part in message.parts:
            if type(part) is ToolCall:
                return "background"
    if request.session is not None and _is_single_exchange(request) and _is_small_task(request):
        return "background"
    return "main"


def background_task_id(request: Request) -> str:
    """Tell a session's background tasks apart by their instructions: the KV of each is worth keeping."""
    return f"{zlib.crc32(_instructions(request)[:_ID_CHARS].encode('utf-8', 'surrogatepass')):08x}"


def _is_single_exchange(request: Request) -> bool:
    """A prefilled reply at the end is not a second exchange."""
    roles = [message.role for message in request.messages if message.role in ("user", "assistant")]
    return "assistant" not in roles[:-1] and roles.count("user") <= 2


def _is_small_task(request: Request) -> bool:
    if request.constraint is not None and request.constraint.kind == "json_schema":
        return True
    is_short = request.max_tokens is not None and request.max_tokens <= _SHORT_ANSWER_TOKENS
    if request.stop and is_short and not request.stream:
        return True
    return _SIDE_TASK.search(_instructions(request)[:_TASK_CHARS]) is not None


def _instructions(request: Request) -> str:
    first = request.messages[0] if request.messages else Message("user")
    if first.role not in ("system", "developer"):
        return ""
    return "\n".join(part.text for part in first.parts if isinstance(part, Text))
