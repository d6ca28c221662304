"""Hypothesis strategies for the core values, shared by every protocol's tests.

Everything drawn is in the normal form of `core/request.py`. The switches turn on what only some protocols can carry; a
test that wants «expressible» values leaves them off, or normalises what it drew with `msgspec.structs.replace`.
"""

from tests.strategies.messages import conversations, images, thinkings, tool_calls, tool_results
from tests.strategies.replies_ import blocks, chunkings, cut_calls, events, merged, replies, token_logprobs, usages
from tests.strategies.requests_ import constraints, offered_tools, reasonings, requests, samplings, tool_choices
from tests.strategies.values import arguments, broken_arguments, ids, json_objects, json_values, names, texts

__all__ = [
    "arguments",
    "blocks",
    "broken_arguments",
    "chunkings",
    "constraints",
    "conversations",
    "cut_calls",
    "events",
    "ids",
    "images",
    "json_objects",
    "json_values",
    "merged",
    "names",
    "offered_tools",
    "reasonings",
    "replies",
    "requests",
    "samplings",
    "texts",
    "thinkings",
    "token_logprobs",
    "tool_calls",
    "tool_choices",
    "tool_results",
    "usages",
]
