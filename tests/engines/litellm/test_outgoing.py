"""A request as LiteLLM takes it."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.errors import Unsupported
from modelyard.core.request import Constraint, Image, Message, Reasoning, Request, Sampling, Text, Tool
from modelyard.engines.litellm import Options
from modelyard.engines.litellm.outgoing import arguments

OPTIONS = Options(litellm_model="bedrock/claude", litellm_timeout_s=5)
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def sent(**fields: Any) -> dict[str, Any]:
    messages = (Message("user", (Text("Look"), Image(PIXEL))),)
    return arguments(Request(model="any", **{"messages": messages} | fields), OPTIONS, None)


def test_images_tools_schemas_and_effort_pass() -> None:
    got = sent(
        tools=(Tool("look", "looks", {"type": "object"}),),
        constraint=Constraint("json_schema", '{"type":"object"}'),
        reasoning=Reasoning(enabled=True, effort="low", budget=7),
    )
    assert got["messages"][0]["content"][1] == {"type": "image_url", "image_url": {"url": PIXEL}}
    assert got["tools"][0]["function"]["name"] == "look"
    assert got["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert got["reasoning_effort"] == "low"
    assert "chat_template_kwargs" not in got


def test_samplers_that_providers_share_pass_and_the_others_do_not() -> None:
    got = sent(sampling=Sampling(temperature=0.3, top_k=5, min_p=0.1, mirostat=2), session="s", n=4)
    assert (got["temperature"], got["top_k"]) == (0.3, 5)
    assert not got.keys() & {"min_p", "mirostat", "prompt_cache_key", "n"}


@pytest.mark.parametrize("fields", [{"prompts": ("Once",), "messages": ()}, {"constraint": Constraint("regex", "a+")}])
def test_what_it_cannot_do_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        sent(**fields)
