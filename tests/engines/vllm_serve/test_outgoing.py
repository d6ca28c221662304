"""A request in the words of vLLM's server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelyard.core.errors import NotFound, Unsupported
from modelyard.core.request import Constraint, Image, Message, Reasoning, Request, Sampling, Text, Tool, ToolChoice
from modelyard.engines.vllm_serve import Options
from modelyard.engines.vllm_serve.outgoing import body, counting
from tests.engines.vllm_serve.stage import asked

PIXEL = "data:image/png;base64,iVBORw0KGgo="


def sent(request: Request, **options: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(body(request, Options(vllm_model="m", **options), "served", 4096))
    return decoded


def test_it_is_always_a_stream_that_tells_its_usage_under_the_servers_name_for_the_model() -> None:
    assert sent(asked("Hello", sampling=Sampling(), max_tokens=None)) == {
        "model": "served",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_only_samplers_that_it_has_are_sent() -> None:
    sampling = Sampling(temperature=0.5, top_k=3, min_p=0.1, repetition_penalty=1.2, beam_size=4, dry_multiplier=0.8)
    got = sent(asked(sampling=sampling))
    assert [got[name] for name in ("temperature", "top_k", "min_p", "repetition_penalty")] == [0.5, 3, 0.1, 1.2]
    assert not got.keys() & {"beam_size", "dry_multiplier"}


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
    assert sent(request)["messages"][0]["content"][1] == {"type": "image_url", "image_url": {"url": PIXEL}}


@pytest.mark.parametrize(("kind", "field"), [("gbnf", "grammar"), ("lark", "grammar"), ("regex", "regex")])
def test_grammars_go_by_its_own_name(kind: Any, field: str) -> None:
    got = sent(asked(constraint=Constraint(kind, "a+")))
    assert got["structured_outputs"] == {field: "a+"}
    assert not got.keys() & {"grammar", "lark", "regex"}


def test_schemas_pass_as_they_do_everywhere() -> None:
    schema = sent(asked(constraint=Constraint("json_schema", '{"type":"object"}')))
    assert schema["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert sent(asked(constraint=Constraint("json_object")))["response_format"] == {"type": "json_object"}


@pytest.mark.parametrize(
    ("mode", "marks"), [("auto", [None, False]), ("required", [True, False]), ("named", [True, False])]
)
def test_a_call_that_is_demanded_is_held_to_its_schema(mode: Any, marks: list[bool | None]) -> None:
    tools = (Tool("a", parameters={"type": "object"}), Tool("b", strict=False))
    got = sent(asked(tools=tools, tool_choice=ToolChoice(mode, "a" if mode == "named" else None)))
    assert [tool["function"].get("strict") for tool in got["tools"]] == marks


def test_an_adapter_is_a_model_of_its_own_there() -> None:
    got = sent(asked(lora_adapter="law"), lora={"law": "/l"})
    assert got["model"] == "law"
    assert "lora_adapter" not in got
    with pytest.raises(NotFound, match="'med'"):
        sent(asked(lora_adapter="med"), lora={"law": "/l"})


def test_an_answer_that_has_begun_goes_on() -> None:
    messages = (Message("user", (Text("Count"),)), Message("assistant", (Text("One, two,"),)))
    request = Request(model="m", messages=messages)
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert going_on.items() <= sent(request).items()
    counted = json.loads(counting(request, Options(vllm_model="m"), "served"))
    assert going_on.items() <= counted.items()
    assert not going_on.keys() & sent(asked()).keys()


def test_a_longest_answer_is_never_longer_than_the_window() -> None:
    assert [sent(asked(max_tokens=most))["max_tokens"] for most in (5, 4096, 32000)] == [5, 4096, 4096]


def test_what_is_counted_holds_what_has_tokens_and_no_more() -> None:
    told = json.loads(counting(asked("Hello", stop=("x",), logprobs=2), Options(vllm_model="m"), "served"))
    assert told == {"model": "served", "messages": [{"role": "user", "content": "Hello"}]}


def test_bare_prompts_are_refused() -> None:
    with pytest.raises(Unsupported, match="conversations only"):
        sent(Request(model="m", prompts=("Once",)))
