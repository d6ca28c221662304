"""Conversations as clients send them to /v1/chat/completions. Every `WORD-…` in a message must be in the prompt."""

from __future__ import annotations

import json
from typing import Any

Body = dict[str, Any]

_ID, _OTHER_ID = "abcdef123", "abcdef124"  # an id that every template takes
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


def _function(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more, "parameters": parameters}}


TOOLS = [
    _function(
        "find_city",
        {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A name"},
                "limit": {"type": "integer", "description": "At most"},
            },
            "required": ["place"],
        },
        description="Finds a city.",
    ),
    _function(
        "get_time",
        {"type": "object", "properties": {"zone": {"type": "string", "description": "A zone"}}, "required": ["zone"]},
        description="Tells the time.",
    ),
]
# What agents offer, too: no descriptions, several types, references, no parameters.
ODD_TOOLS = [
    _function(
        "find_city",
        {
            "type": "object",
            "properties": {
                "place": {"type": ["string", "null"]},
                "near": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/point"}]},
                "sort": {"enum": ["name", 1, None]},
                "filter": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "number"}}},
            },
            "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}}},
        },
        description="",
    ),
    _function("get_time", {"type": "object", "properties": {}}, description="Tells the time."),
]


def _user(text: str) -> Body:
    return {"role": "user", "content": text}


def _system(text: str) -> Body:
    return {"role": "system", "content": text}


def _assistant(text: str, *calls: Body, **more: Any) -> Body:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {}), **more}


def _call(id: str = _ID, name: str = "find_city", **arguments: Any) -> Body:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _result(text: str, id: str = _ID, name: str = "find_city") -> Body:
    return {"role": "tool", "tool_call_id": id, "name": name, "content": text}


_LOOKED = [_user("WORD-ONE"), _assistant("", _call(place="WORD-ARGUMENT", limit=3)), _result("WORD-RESULT")]
_OTHER_CALL = _call(_OTHER_ID, "get_time", zone="WORD-ZONE")
_OTHER_RESULT = _result("WORD-OTHER", _OTHER_ID, "get_time")
_GOES_ON = [_assistant("WORD-TWO"), _user("WORD-THREE")]


def _chat(*messages: Body, **more: Any) -> Body:
    return {"messages": list(messages), **more}


CONVERSATIONS: dict[str, Body] = {
    "a question": _chat(_user("WORD-ONE")),
    "a system prompt": _chat(_system("WORD-RULE"), _user("WORD-ONE")),
    "several turns": _chat(_system("WORD-RULE"), _user("WORD-ONE"), *_GOES_ON, _assistant("WORD-4"), _user("WORD-5")),
    "a late system message": _chat(_user("WORD-ONE"), _assistant("WORD-TWO"), _system("WORD-RULE"), _user("WORD-5")),
    "two questions": _chat(_user("WORD-ONE"), _user("WORD-TWO")),
    "tools": _chat(_user("WORD-ONE"), tools=TOOLS),
    "tools and a system prompt": _chat(_system("WORD-RULE"), _user("WORD-ONE"), *_GOES_ON, tools=TOOLS),
    "odd tools": _chat(_system("WORD-RULE"), *_LOOKED, tools=ODD_TOOLS),
    "a result": _chat(*_LOOKED, tools=TOOLS),
    "a result and a system prompt": _chat(_system("WORD-RULE"), *_LOOKED, tools=TOOLS),
    "an earlier result": _chat(_system("WORD-RULE"), *_LOOKED, *_GOES_ON, tools=TOOLS),
    "text before a call": _chat(
        _user("WORD-ONE"), _assistant("WORD-LOOK", *_LOOKED[1]["tool_calls"]), _LOOKED[2], tools=TOOLS
    ),
    "text before an earlier call": _chat(
        _user("WORD-ONE"), _assistant("WORD-LOOK", *_LOOKED[1]["tool_calls"]), _LOOKED[2], *_GOES_ON, tools=TOOLS
    ),
    "parallel calls": _chat(
        _user("WORD-ONE"),
        _assistant("", *_LOOKED[1]["tool_calls"], _OTHER_CALL),
        _LOOKED[2],
        _OTHER_RESULT,
        *_GOES_ON,
        tools=TOOLS,
    ),
    "text before parallel calls": _chat(
        _user("WORD-ONE"),
        _assistant("WORD-LOOK", *_LOOKED[1]["tool_calls"], _OTHER_CALL),
        _LOOKED[2],
        _OTHER_RESULT,
        tools=TOOLS,
    ),
    "one call after another": _chat(*_LOOKED, _assistant("", _OTHER_CALL), _OTHER_RESULT, *_GOES_ON, tools=TOOLS),
    "calls without tools": _chat(*_LOOKED, *_GOES_ON),
    "reasoning": _chat(_user("WORD-ONE"), _assistant("WORD-TWO", reasoning_content="Hm."), _user("WORD-THREE")),
    "reasoning before a call": _chat(_LOOKED[0], _LOOKED[1] | {"reasoning_content": "Hm."}, _LOOKED[2], tools=TOOLS),
    "thinking off": _chat(_user("WORD-ONE"), chat_template_kwargs={"enable_thinking": False}),
    "an image": _chat({"role": "user", "content": [_IMAGE, {"type": "text", "text": "WORD-ONE"}]}),
    "a reply to continue": _chat(_system("WORD-RULE"), _user("WORD-ONE"), _assistant("WORD-TWO and")),
}
