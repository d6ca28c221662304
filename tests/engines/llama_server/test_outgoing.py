"""A request in llama-server's own words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelyard.core.errors import Unsupported
from modelyard.core.request import Constraint, Image, Message, Reasoning, Request, Sampling, Text
from modelyard.engines.llama_server import Options
from modelyard.engines.llama_server.outgoing import body
from tests.engines.llama_server.stage import asked

PIXEL = "data:image/png;base64,iVBORw0KGgo="


def sent(request: Request, **options: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(body(request, Options(path="m", **options)))
    return decoded


def test_it_is_always_a_stream_that_tells_its_usage_and_how_far_it_has_read() -> None:
    assert sent(asked("Hello", sampling=Sampling(), max_tokens=None)) == {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
    }


def test_samplers_have_its_names() -> None:
    sampling = Sampling(temperature=0.5, top_k=3, min_p=0.1, repetition_penalty=1.2, beam_size=4, dry_multiplier=0.8)
    got = sent(asked(sampling=sampling))
    names = ("temperature", "top_k", "min_p", "repeat_penalty", "dry_multiplier")
    assert [got[name] for name in names] == [0.5, 3, 0.1, 1.2, 0.8]
    assert not got.keys() & {"repetition_penalty", "beam_size"}


def test_what_is_the_gateways_own_stays_here() -> None:
    mine: dict[str, Any] = {"session": "s", "user": "u", "metadata": {"a": 1}, "store": True, "previous": "resp_1"}
    got = sent(asked(**mine, priority="background", n=4))
    assert not got.keys() & {"prompt_cache_key", "user", "metadata", "store", "priority", "n"}


@pytest.mark.parametrize(
    ("setting", "wish", "sent_as"), [(None, None, None), (False, None, False), (False, True, True)]
)
def test_the_models_own_switch_holds_where_the_client_has_no_wish(
    setting: bool | None, wish: bool | None, sent_as: bool | None
) -> None:
    got = sent(asked(reasoning=Reasoning(enabled=wish)), enable_thinking=setting)
    assert got.get("chat_template_kwargs", {}).get("enable_thinking") == sent_as


def test_images_arrive_as_data() -> None:
    request = Request(model="m", messages=(Message("user", (Text("Look"), Image(PIXEL))),))
    assert sent(request)["messages"][0]["content"] == [
        {"type": "text", "text": "Look"},
        {"type": "image_url", "image_url": {"url": PIXEL}},
    ]


def test_schemas_and_gbnf_pass_and_other_grammars_are_refused() -> None:
    assert sent(asked(constraint=Constraint("gbnf", "root ::= [a]")))["grammar"] == "root ::= [a]"
    schema = sent(asked(constraint=Constraint("json_schema", '{"type":"object"}')))
    assert schema["response_format"]["json_schema"]["schema"] == {"type": "object"}
    with pytest.raises(Unsupported, match="not lark"):
        sent(asked(constraint=Constraint("lark", "start: A")))


def test_bare_prompts_are_refused() -> None:
    with pytest.raises(Unsupported, match="conversations only"):
        sent(Request(model="m", prompts=("Once",)))
