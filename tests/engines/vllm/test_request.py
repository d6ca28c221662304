"""Sampling settings in vLLM's words."""

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
from modelyard.engines.vllm.request import (
    IGNORED,
    PRIORITIES,
    ControlTokens,
    LoraAdapters,
    multi_modal_data,
    sampling_arguments,
    structured_output_arguments,
)
from tests.engines.reading import end, read
from tests.engines.vllm.helpers import adapter, prompt, running

VOCABULARY = 1000


def asked(sampling: Sampling = Sampling(), **more: Any) -> dict[str, Any]:
    return sampling_arguments(Prompt(parts=(TokenRun([1]),), sampling=sampling, **more), 7, VOCABULARY)


def test_what_nobody_asked_for_changes_nothing() -> None:
    assert asked() == {
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


def test_every_knob_that_vllm_has_is_turned() -> None:
    told = asked(
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
    assert (told["temperature"], told["top_p"], told["top_k"], told["min_p"]) == (0.5, 0.9, 40, 0.05)
    assert (told["repetition_penalty"], told["presence_penalty"], told["frequency_penalty"]) == (1.1, 0.2, 0.3)
    assert (told["seed"], told["logit_bias"], told["stop_token_ids"], told["logprobs"]) == (7, {5: 2.0}, [3, 4], 2)


def test_each_knob_is_either_turned_or_named_as_one_that_is_not() -> None:
    told = set(asked(Sampling(seed=1, logit_bias={1: 1.0})))
    assert {field.name for field in fields(Sampling)} == (told & {f.name for f in fields(Sampling)}) | set(IGNORED)


def test_values_that_others_take_for_off_are_off() -> None:
    told = asked(Sampling(top_p=0.0, top_k=-1, temperature=-1.0))
    assert (told["top_p"], told["top_k"], told["temperature"]) == (1.0, 0, 0.0)


def test_bias_on_tokens_that_do_not_exist_is_left_out() -> None:
    assert asked(Sampling(logit_bias={-1: 1.0, 999: 1.0, 1000: 1.0}))["logit_bias"] == {999: 1.0}
    assert "logit_bias" not in asked(Sampling(logit_bias={1000: 1.0}))


def test_any_seed_is_a_seed() -> None:
    """To vLLM -1 means none, and a number of more bits is an error."""
    assert asked(Sampling(seed=-1))["seed"] == (1 << 63) - 1
    assert asked(Sampling(seed=1 << 70))["seed"] == 0


def test_complete_form_may_end_the_answer() -> None:
    assert asked(constraint=Constraint("json_object"))["ignore_eos"] is False


def test_background_work_comes_after_the_rest() -> None:
    assert PRIORITIES["main"] < PRIORITIES["background"]


# Constraints in vLLM's words; grammars are compiled as its guidance backend does it, on a vocabulary of bytes.

CALL = 'start: "{" r0 "}"\nr0: NUMBER\nNUMBER: /[0-9]+/\n'
BYTES = LLTokenizer("byte")


def fits(lark: str, text: str) -> bool:
    """Whether an answer may be this text, and end there."""
    matcher = LLMatcher(BYTES, grammar_from("grammar", lark), log_level=0)
    assert not matcher.get_error()
    ids = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_schema_is_written_in_one_way() -> None:
    told = json.loads(structured_output_arguments(Constraint("json_schema", '{"type": "object"}'))["json"])
    assert told["type"] == "object"
    assert told["x-guidance"] == {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def test_any_object_is_an_object() -> None:
    assert json.loads(structured_output_arguments(Constraint("json_object"))["json"])["type"] == "object"


def test_schema_that_allows_everything_stays_as_it_is() -> None:
    assert structured_output_arguments(Constraint("json_schema", "true")) == {"json": "true"}


@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        (Constraint("regex", "[a-c]+"), {"regex": "[a-c]+"}),
        (Constraint("lark", 'start: "a"'), {"grammar": 'start: "a"'}),
        (Constraint("gbnf", 'root ::= "a"'), {"grammar": 'root ::= "a"'}),
        (Constraint("tools", 'start: "a"', tools=("t",)), {"grammar": 'start: "a"'}),
    ],
)
def test_other_forms_are_told_as_they_are(constraint: Constraint, told: dict[str, Any]) -> None:
    assert structured_output_arguments(constraint) == told


def test_call_that_has_no_grammar_cannot_be_required() -> None:
    with pytest.raises(Unsupported, match="no grammar"):
        structured_output_arguments(Constraint("tools", tools=("t",)))


def test_schema_that_is_no_json_is_refused_with_its_field() -> None:
    with pytest.raises(InvalidRequest) as caught:
        structured_output_arguments(Constraint("json_schema", "{"))
    assert (caught.value.code, caught.value.param) == ("bad_grammar", "response_format")


def test_grammar_that_could_break_the_compiler_is_refused() -> None:
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
def test_answer_is_free_until_the_trigger_and_after_what_follows_it(text: str, allowed: bool) -> None:
    lark = structured_output_arguments(Constraint("lark", CALL, trigger="<tool>", tools=("t",)))["grammar"]
    assert fits(lark, text) is allowed


def test_marker_of_the_vocabulary_triggers_by_its_number() -> None:
    mark = BYTES.tokenize_str("~")[0]
    lark = structured_output_arguments(
        Constraint("lark", CALL, trigger="<call>", tools=("t",)), ControlTokens({"<call>": mark})
    )["grammar"]
    assert fits(lark, "a ~{12} b")
    assert fits(lark, "no call")
    assert not fits(lark, "a ~{x}")
    assert not fits(lark, "a ~")


def test_markers_may_stand_in_free_text() -> None:
    """Reasoning, say, which some families put between markers."""
    lark = structured_output_arguments(
        Constraint("lark", CALL, trigger="<tool>", tools=("t",)), ControlTokens({"<a>": 256, "<b>": 9})
    )["grammar"]
    assert "<[9,256]>" in lark
    assert ControlTokens({"a": 3, "b": 4, "c": 5, "d": 9}).others() == "3-5,9"


def test_only_the_rule_start_is_renamed() -> None:
    lark = structured_output_arguments(Constraint("lark", 'start: starter\nstarter: "start: no"', trigger="!"))[
        "grammar"
    ]
    assert 'starter: "start: no"' in lark
    assert fits(lark, "go!start: no")


# Pictures on their way to vLLM, opened by a stand-in for Pillow: the real one comes with vLLM.


class Bomb(Exception):
    pass


def opened(stream: BytesIO) -> Any:
    data = stream.read()
    if not data.startswith(b"IMG"):
        raise OSError("cannot identify image file")
    side = 100_000 if b"huge" in data else 10
    return SimpleNamespace(width=side, height=side, convert=lambda mode: (mode, data))


@pytest.fixture(autouse=True)
def pillow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    image = ModuleType("PIL.Image")
    image.open, image.DecompressionBombError = opened, Bomb  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "PIL", ModuleType("PIL"))
    monkeypatch.setitem(sys.modules, "PIL.Image", image)
    return


def picture(data: bytes = b"IMG", hash: str = "ab") -> Media:
    return Media("image", hash, data, 0)


def test_text_alone_has_nothing_beside_it() -> None:
    assert multi_modal_data([]) == {}


def test_pictures_go_along_in_order_and_known_by_their_hashes() -> None:
    assert multi_modal_data([picture(b"IMG1", "aa"), picture(b"IMG2", "bb")]) == {
        "multi_modal_data": {"image": [("RGB", b"IMG1"), ("RGB", b"IMG2")]},
        "multi_modal_uuids": {"image": ["aa", "bb"]},
    }


@pytest.mark.parametrize(("data", "words"), [(b"GIF", "cannot be read"), (b"IMGhuge", "too large")])
def test_picture_that_cannot_be_used_is_the_clients_fault(data: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        multi_modal_data([picture(data)])
    assert caught.value.code == "invalid_image"


def test_sound_is_refused() -> None:
    with pytest.raises(Unsupported):
        multi_modal_data([Media("audio", "ab", b"", 0)])


async def test_prompt_with_a_picture_is_vllms_to_prepare() -> None:
    async with running(modalities=("text", "image")) as engine:
        assert engine.info.capabilities.modalities == ("text", "image")
        asked = prompt(parts=(TokenRun(prompt().ids), picture()))
        assert end(await read(engine.generate(asked))).error is None
        assert engine._core is not None
        told = engine._core._llm.asked[-1]["prompt"]
        assert type(told).__name__ == "TokensPrompt"
        assert told["multi_modal_data"] == {"image": [("RGB", b"IMG")]}
        assert told["cache_salt"]


async def test_unreadable_picture_fails_its_job_alone() -> None:
    async with running(modalities=("text", "image")) as engine:
        bad = prompt(parts=(TokenRun(prompt().ids), picture(b"GIF")))
        assert isinstance(end(await read(engine.generate(bad))).error, InvalidRequest)
        assert end(await read(engine.generate(prompt()))).error is None


# LoRA adapters by name.


@pytest.fixture
def adapters(tmp_path: Path) -> LoraAdapters:
    return LoraAdapters({"law": str(adapter(tmp_path / "law"))})


def test_adapter_is_known_by_its_name(adapters: LoraAdapters) -> None:
    worn = adapters.worn((("law", 1.0),))
    assert worn is not None
    assert (worn.name, worn.number) == ("law", 1)
    assert adapters.worn(()) is None


def test_namesake_is_another_to_vllm(adapters: LoraAdapters, tmp_path: Path) -> None:
    """Else it would be given the KV of the one before it."""
    first = adapters.worn((("law", 1.0),))
    adapters.load(f"law={adapter(tmp_path / 'other')}")
    second = adapters.worn((("law", 1.0),))
    assert first is not None
    assert second is not None
    assert first.known_as != second.known_as
    assert first.number != second.number


def test_unloaded_adapter_is_unknown(adapters: LoraAdapters) -> None:
    adapters.unload("law")
    with pytest.raises(NotFound, match="law"):
        adapters.worn((("law", 1.0),))
    with pytest.raises(NotFound):
        adapters.unload("law")


def test_several_at_once_and_half_strengths_are_refused(adapters: LoraAdapters) -> None:
    with pytest.raises(Unsupported, match="one adapter"):
        adapters.worn((("law", 1.0), ("law", 1.0)))
    with pytest.raises(Unsupported, match="full strength"):
        adapters.worn((("law", 0.5),))


def test_folder_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=str(tmp_path)):
        LoraAdapters({"law": str(tmp_path)})


def test_model_that_was_loaded_without_room_for_adapters_says_so(tmp_path: Path) -> None:
    none = LoraAdapters({})
    for act in (lambda: none.worn((("law", 1.0),)), lambda: none.load(f"law={adapter(tmp_path / 'law')}")):
        with pytest.raises(Unsupported, match="lora setting"):
            act()


def test_order_without_a_name_is_refused(adapters: LoraAdapters) -> None:
    with pytest.raises(InvalidRequest, match="name=folder"):
        adapters.load("law")
