"""A job as vLLM's arguments: sampling, structured output, images and LoRA adapters."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from
from msgspec.structs import fields

from modelyard.core.engine import Media, Prompt, TokenRun
from modelyard.core.errors import InvalidRequest, NotFound, Unsupported
from modelyard.core.request import Constraint, Sampling
from modelyard_vllm.request import (
    IGNORED,
    PRIORITIES,
    VllmAdapters,
    multi_modal_data,
    sampling_arguments,
    structured_output_arguments,
    token_ranges,
)
from tests.engines.reading import end, read
from tests.engines.vllm.helpers import adapter, prompt, running

VOCABULARY = 1000


def arguments(sampling: Sampling = Sampling(), **more: Any) -> dict[str, Any]:
    return sampling_arguments(Prompt(parts=(TokenRun([1]),), sampling=sampling, **more), 7, VOCABULARY)


def test_default_sampling_is_neutral() -> None:
    assert arguments() == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": 7,
        "stop_token_ids": [],
        "ignore_eos": True,
        "logprobs": None,
        "detokenize": False,
    }


def test_no_token_ends_an_answer_before_its_minimum() -> None:
    assert arguments(Sampling(min_tokens=3))["min_tokens"] == 3
    assert arguments(Sampling(ignore_eos=True))["min_tokens"] == 7
    schema = Constraint("json_schema", "{}")
    assert "min_tokens" not in arguments(Sampling(min_tokens=3), constraint=schema)


def test_sampling_fields_are_passed_on() -> None:
    result = arguments(
        Sampling(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            seed=7,
            logit_bias={5: 2.0},
        ),
        stop_ids=(3, 4),
        logprobs=2,
    )
    assert (result["temperature"], result["top_p"], result["top_k"], result["min_p"]) == (0.5, 0.9, 40, 0.05)
    assert (result["repetition_penalty"], result["presence_penalty"], result["frequency_penalty"]) == (1.1, 0.2, 0.3)
    assert (result["seed"], result["logit_bias"], result["stop_token_ids"], result["logprobs"]) == (
        7,
        {5: 2.0},
        [3, 4],
        2,
    )


def test_every_sampling_field_is_either_passed_on_or_listed_as_ignored() -> None:
    result = set(arguments(Sampling(seed=1, logit_bias={1: 1.0}, min_tokens=1)))
    assert {field.name for field in fields(Sampling)} == (result & {f.name for f in fields(Sampling)}) | set(IGNORED)


def test_values_that_mean_off_elsewhere_are_neutral() -> None:
    result = arguments(Sampling(top_p=0.0, top_k=-1, temperature=-1.0))
    assert (result["top_p"], result["top_k"], result["temperature"]) == (1.0, 0, 0.0)


def test_logit_bias_of_unknown_tokens_is_dropped() -> None:
    assert arguments(Sampling(logit_bias={-1: 1.0, 999: 1.0, 1000: 1.0}))["logit_bias"] == {999: 1.0}
    assert "logit_bias" not in arguments(Sampling(logit_bias={1000: 1.0}))


def test_any_seed_is_mapped_to_a_valid_one() -> None:
    """To vLLM -1 means none, and a number of more bits is an error."""
    assert arguments(Sampling(seed=-1))["seed"] == (1 << 63) - 1
    assert arguments(Sampling(seed=1 << 70))["seed"] == 0


def test_complete_grammar_may_end_the_answer() -> None:
    assert arguments(constraint=Constraint("json_object"))["ignore_eos"] is False


def test_background_requests_have_lower_priority() -> None:
    assert PRIORITIES["main"] < PRIORITIES["background"]


# --- structured output ----------------------------------------------------------------------------------------------
# Grammars are compiled like in vLLM's guidance backend, on a vocabulary of bytes.

CALL = 'start: "{" r0 "}"\nr0: NUMBER\nNUMBER: /[0-9]+/\n'
BYTES = LLTokenizer("byte")


def matches(lark: str, text: str) -> bool:
    """Whether the grammar accepts this text as a whole answer."""
    matcher = LLMatcher(BYTES, grammar_from("grammar", lark), log_level=0)
    assert not matcher.get_error()
    ids = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_schema_fixes_the_spacing() -> None:
    schema = json.loads(structured_output_arguments(Constraint("json_schema", '{"type": "object"}'))["json"])
    assert schema["type"] == "object"
    assert schema["x-guidance"] == {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def test_json_object_becomes_a_schema() -> None:
    assert json.loads(structured_output_arguments(Constraint("json_object"))["json"])["type"] == "object"


def test_boolean_schema_stays_unchanged() -> None:
    assert structured_output_arguments(Constraint("json_schema", "true")) == {"json": "true"}


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (Constraint("regex", "[a-c]+"), {"regex": "[a-c]+"}),
        (Constraint("lark", 'start: "a"'), {"grammar": 'start: "a"'}),
        (Constraint("gbnf", 'root ::= "a"'), {"grammar": 'root ::= "a"'}),
        (Constraint("tools", 'start: "a"', tools=("t",)), {"grammar": 'start: "a"'}),
    ],
)
def test_other_constraints_are_passed_on(constraint: Constraint, expected: dict[str, Any]) -> None:
    assert structured_output_arguments(constraint) == expected


def test_tool_call_without_a_grammar_cannot_be_required() -> None:
    with pytest.raises(Unsupported, match="no grammar"):
        structured_output_arguments(Constraint("tools", tools=("t",)))


def test_schema_that_is_not_json_is_refused_with_its_field() -> None:
    with pytest.raises(InvalidRequest) as caught:
        structured_output_arguments(Constraint("json_schema", "{"))
    assert (caught.value.code, caught.value.param) == ("bad_grammar", "response_format")


def test_grammar_that_could_overflow_the_compilers_stack_is_refused() -> None:
    rules = "\n".join(f"r{n}: r{n + 1}" for n in range(4000))
    with pytest.raises(InvalidRequest, match="longer than"):
        structured_output_arguments(Constraint("lark", f"start: r0\n{rules}"))


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("just words", True),
        ("", True),
        ("a <tool>{12} and on", True),
        ("a <tool>{12}<tool>{3}", True),
        ("half a <too", True),
        ("a <tool>{x}", False),
        ("a <tool>", False),
        ("a <tool>{12", False),
    ],
)
def test_only_the_text_after_each_trigger_is_constrained(text: str, allowed: bool) -> None:
    lark = structured_output_arguments(Constraint("lark", CALL, trigger="<tool>", tools=("t",)))["grammar"]
    assert matches(lark, text) is allowed


def test_control_token_triggers_by_its_id() -> None:
    id = BYTES.tokenize_str("~")[0]
    lark = structured_output_arguments(Constraint("lark", CALL, trigger="<call>", tools=("t",)), {"<call>": id})[
        "grammar"
    ]
    assert matches(lark, "a ~{12} b")
    assert matches(lark, "no call")
    assert not matches(lark, "a ~{x}")
    assert not matches(lark, "a ~")


def test_control_tokens_may_occur_in_unconstrained_text() -> None:
    """Such as the markers of reasoning."""
    lark = structured_output_arguments(
        Constraint("lark", CALL, trigger="<tool>", tools=("t",)), {"<a>": 256, "<b>": 9}
    )["grammar"]
    assert "<[9,256]>" in lark
    assert token_ranges((3, 4, 5, 9)) == "3-5,9"


def test_only_the_rule_start_is_renamed() -> None:
    lark = structured_output_arguments(Constraint("lark", 'start: starter\nstarter: "start: no"', trigger="!"))[
        "grammar"
    ]
    assert 'starter: "start: no"' in lark
    assert matches(lark, "go!start: no")


# --- images -----------------------------------------------------------------------------------------------------------
# Opened by a fake Pillow: the real one comes with vLLM.


class Bomb(Exception):
    pass


def open_image(stream: BytesIO) -> Any:
    data = stream.read()
    if not data.startswith(b"IMG"):
        raise OSError("cannot identify image file")
    side = 100_000 if b"huge" in data else 10
    return SimpleNamespace(width=side, height=side, convert=lambda mode: (mode, data))


@pytest.fixture(autouse=True)
def pillow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("PIL.Image")
    module.open, module.DecompressionBombError = open_image, Bomb  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "PIL", ModuleType("PIL"))
    monkeypatch.setitem(sys.modules, "PIL.Image", module)
    return


def image(data: bytes = b"IMG", hash: str = "ab") -> Media:
    return Media("image", hash, data, 0)


def test_text_prompt_has_no_multi_modal_data() -> None:
    assert multi_modal_data([]) == {}


def test_images_are_passed_in_order_with_their_hashes() -> None:
    assert multi_modal_data([image(b"IMG1", "aa"), image(b"IMG2", "bb")]) == {
        "multi_modal_data": {"image": [("RGB", b"IMG1"), ("RGB", b"IMG2")]},
        "multi_modal_uuids": {"image": ["aa", "bb"]},
    }


@pytest.mark.parametrize(("data", "message"), [(b"GIF", "cannot be read"), (b"IMGhuge", "too large")])
def test_unusable_image_is_an_invalid_request(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        multi_modal_data([image(data)])
    assert caught.value.code == "invalid_image"


def test_audio_is_refused() -> None:
    with pytest.raises(Unsupported):
        multi_modal_data([Media("audio", "ab", b"", 0)])


async def test_prompt_with_an_image_is_a_tokens_prompt() -> None:
    async with running(modalities=("text", "image")) as engine:
        assert engine.info.capabilities.modalities == ("text", "image")
        request = prompt(parts=(TokenRun(prompt().ids), image()))
        assert end(await read(engine.generate(request))).error is None
        assert engine._runner is not None
        sent = engine._runner._llm.requests[-1]["prompt"]
        assert type(sent).__name__ == "TokensPrompt"
        assert sent["multi_modal_data"] == {"image": [("RGB", b"IMG")]}
        assert sent["cache_salt"]


async def test_unreadable_image_fails_only_its_job() -> None:
    async with running(modalities=("text", "image")) as engine:
        bad = prompt(parts=(TokenRun(prompt().ids), image(b"GIF")))
        assert isinstance(end(await read(engine.generate(bad))).error, InvalidRequest)
        assert end(await read(engine.generate(prompt()))).error is None


# --- LoRA adapters ----------------------------------------------------------------------------------------------------


@pytest.fixture
def adapters(tmp_path: Path) -> VllmAdapters:
    return VllmAdapters({"law": str(adapter(tmp_path / "law"))})


def test_adapter_is_selected_by_its_name(adapters: VllmAdapters) -> None:
    selected = adapters.select((("law", 1.0),))
    assert selected is not None
    assert (selected.name, selected.id) == ("law", 1)
    assert adapters.select(()) is None


def test_replaced_adapter_has_another_identity_in_vllm(adapters: VllmAdapters, tmp_path: Path) -> None:
    """Otherwise it would reuse the KV of the adapter before it."""
    first = adapters.select((("law", 1.0),))
    adapters.load(f"law={adapter(tmp_path / 'other')}")
    second = adapters.select((("law", 1.0),))
    assert first is not None
    assert second is not None
    assert first.unique_name != second.unique_name
    assert first.id != second.id


def test_unloaded_adapter_is_unknown(adapters: VllmAdapters) -> None:
    adapters.unload("law")
    with pytest.raises(NotFound, match="law"):
        adapters.select((("law", 1.0),))
    with pytest.raises(NotFound):
        adapters.unload("law")


def test_several_adapters_and_partial_strength_are_refused(adapters: VllmAdapters) -> None:
    with pytest.raises(Unsupported, match="one adapter"):
        adapters.select((("law", 1.0), ("law", 1.0)))
    with pytest.raises(Unsupported, match="full strength"):
        adapters.select((("law", 0.5),))


def test_folder_without_an_adapter_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=str(tmp_path)):
        VllmAdapters({"law": str(tmp_path)})


def test_model_without_configured_adapters_refuses_them(tmp_path: Path) -> None:
    none = VllmAdapters({})
    for act in (lambda: none.select((("law", 1.0),)), lambda: none.load(f"law={adapter(tmp_path / 'law')}")):
        with pytest.raises(Unsupported, match="lora setting"):
            act()


def test_load_argument_without_a_name_is_refused(adapters: VllmAdapters) -> None:
    with pytest.raises(InvalidRequest, match="name=folder"):
        adapters.load("law")
