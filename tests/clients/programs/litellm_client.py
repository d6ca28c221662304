"""What LiteLLM does with one provider, against a server; prints what came back as JSON.

litellm_client.py PROVIDER BASE-URL IMAGE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import litellm
from litellm import completion

litellm.suppress_debug_info = True
litellm.drop_params = True
provider, base, image = sys.argv[1:]
# It sends a schema to a Gemini model that it does not know only if it is told that the model takes one.
known = {"litellm_provider": provider, "mode": "chat", "supports_response_schema": True}
litellm.register_model({f"{provider}/demo": known})
SERVER: dict[str, Any] = {"model": f"{provider}/demo", "api_base": base, "api_key": "any", "max_retries": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["name", "people"],
    "additionalProperties": False,
}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def streamed(messages: list[Any], **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"text": "", "thinking": "", "calls": [], "pieces": 0}
    arguments: dict[int, list[str]] = {}
    for chunk in completion(**(SERVER | more), messages=messages, stream=True):
        delta = chunk.choices[0].delta
        found["pieces"] += 1
        found["text"] += delta.content or ""
        found["thinking"] += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            name, text = arguments.setdefault(call.index, ["", ""])
            arguments[call.index] = [name or call.function.name or "", text + (call.function.arguments or "")]
    found["calls"] = [[name, json.loads(text)] for name, text in arguments.values()]
    return found


def failure(work: Callable[[], Any]) -> dict[str, Any] | None:
    try:
        work()
    except Exception as error:
        return {"status": getattr(error, "status_code", None), "message": str(error), "kind": type(error).__name__}
    return None


question = user("one tool")
asked = completion(**SERVER, messages=question, tools=[TOOL]).choices[0].message
result = {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "name": "get_weather", "content": "sunny"}
answered = completion(**SERVER, messages=[*question, asked, result], tools=[TOOL]).choices[0].message
schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
typed = completion(**SERVER, messages=user("Rome, please"), response_format=schema).choices[0].message
picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
seen = completion(**SERVER, messages=user([{"type": "text", "text": "text"}, picture])).choices[0].message
print(
    json.dumps(
        {
            "stream": streamed(user("text")),
            "thinking": streamed(user("thinking"), reasoning_effort="low"),
            "tools": streamed(question, tools=[TOOL]),
            "answer": answered.content,
            "schema": json.loads(typed.content),
            "image": seen.content,
            "missing": failure(lambda: completion(**(SERVER | {"model": f"{provider}/nobody"}), messages=user("text"))),
            "broken": failure(lambda: completion(**SERVER, messages=user("error before"))),
            "interrupted": failure(lambda: streamed(user("error during"))),
        }
    )
)
