"""Which requests run in the background: an agent's side requests, told from its conversation by their shape. Pure.

Some of them come under the main model's name and in its session, so neither tells. In this order:

    1. what the request says itself
    2. it offers tools                            main: a conversation, or a sub-agent's
    3. it is named for the small tier             background
    4. calls in its history, and no tools         background: a summary, so that the conversation can be cut
    5. only tools that somebody else runs         background: a search on behalf of a conversation
    6. one exchange of a session, and it wants    background: a title, a verdict on a command
       JSON of a schema, a short answer up to a
       stop string, or says that it is about one

Everything else is main. A wrong «background» costs little: such a request waits behind others, for a bounded number of
turns, and its KV goes first. A wrong «main» may cost a conversation its KV, which is what this is about.
"""

from __future__ import annotations

import re
import zlib

from modelyard.core.request import Message, Priority, Request, Text, ToolCall

_SMALL_TIER = re.compile(r"(?:^|[^a-z])haiku(?:[^a-z]|$)")
_ERRAND = re.compile(r"\b(?:titles?|topic|summar(?:y|ies|i[sz]e\w*)|classif\w+|commit message)\b", re.IGNORECASE)
_HEAD = 400  # characters of the instructions in which an errand says what it is
_SHORT = 8192  # tokens: no verdict asks for more
_MARKED = 4096  # characters of the instructions by which errands are told apart


def priority(request: Request, *, is_text: bool = False) -> Priority:
    """`is_text`: it is known that its messages hold nothing else."""
    if request.priority is not None:
        return request.priority
    if request.tools and any(tool.kind != "server" for tool in request.tools):
        return "main"
    is_errand = (
        _is_small_tier(request.model)
        or (not is_text and _has_calls(request))
        or bool(request.tools)
        or (request.session is not None and _is_one_exchange(request) and _wants_little(request))
    )
    return "background" if is_errand else "main"


def background_task_id(request: Request) -> str:
    """Tells a session's errands from each other: each kind has instructions of its own, and its KV is worth keeping."""
    return f"{zlib.crc32(_instructions(request)[:_MARKED].encode('utf-8', 'surrogatepass')):08x}"


def _is_small_tier(model: str) -> bool:
    name = model.lower()
    return "haiku" in name and _SMALL_TIER.search(name) is not None


def _has_calls(request: Request) -> bool:
    return any(type(part) is ToolCall for message in request.messages for part in message.parts)


def _is_one_exchange(request: Request) -> bool:
    """An answer may have been begun for the model: that is no second exchange."""
    said = [message.role for message in request.messages if message.role in ("user", "assistant")]
    return "assistant" not in said[:-1] and said.count("user") <= 2


def _wants_little(request: Request) -> bool:
    if request.constraint is not None and request.constraint.kind == "json_schema":
        return True
    if request.stop and request.max_tokens is not None and request.max_tokens <= _SHORT and not request.stream:
        return True
    return _ERRAND.search(_instructions(request)[:_HEAD]) is not None


def _instructions(request: Request) -> str:
    first = request.messages[0] if request.messages else Message("user")
    if first.role not in ("system", "developer"):
        return ""
    return "\n".join(part.text for part in first.parts if isinstance(part, Text))
