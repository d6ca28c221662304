"""What a model's settings come to, without any engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelyard.config import load
from modelyard.core.errors import Unavailable
from modelyard.core.request import Request, Tool
from modelyard.definition import Definition, define


def defined(**settings: Any) -> Definition:
    overrides = {
        "models": {"demo": {"backend": "fake", **settings}},
        "caches": {"main": {"model": "demo", "n_ctx": 4096, "parallel": 2, "description": "talk"}},
    }
    config = load(env={}, overrides=overrides).config
    return define(config.router().catalog.models["demo"], config.models["demo"])


def test_the_notes_say_where_everything_comes_from():
    notes = dict(defined().notes)
    assert notes["cache main"] == "2 × 4096 tokens talk"
    assert notes["tokenizer"].endswith("tokens")
    assert "generic" in notes["template"]
    assert notes["format"]


def test_a_definition_works_while_nothing_is_loaded():
    parts = defined().model.parts
    assert parts.vocab.decode(parts.vocab.encode("hello")) == "hello"
    assert set(parts.stop_ids) >= parts.vocab.eos


def test_a_template_of_ones_own_is_compiled_and_named(tmp_path: Path):
    notes = dict(defined(chat_template="{{ messages[0].content }}").notes)
    assert "chat_template" in notes["template"]


def test_the_output_format_of_the_settings_wins():
    model = defined(format="harmony").model
    assert model.parts.format.name == "harmony"


def test_a_chat_engine_has_no_tokenizer_of_ours():
    model = defined(kind="chat").model
    assert (model.kind, model.text, model.fault) == ("chat", None, None)


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"tokenizer_path": "/nowhere/at/all"}, "/nowhere/at/all"), ({"chat_template": "{% if %}"}, "template")],
)
def test_what_cannot_be_made_keeps_its_fault_and_tells_it_to_whoever_asks(settings: dict[str, Any], why: str):
    made = defined(**settings)
    assert made.model.fault is not None
    assert why in made.model.fault.message
    assert why in dict(made.notes)["fault"]
    with pytest.raises(Unavailable, match="could not be loaded"):
        _ = made.model.parts


def test_a_native_library_is_verified_before_the_vocabulary_is_opened_by_it(monkeypatch: pytest.MonkeyPatch):
    def broken() -> None:
        raise Unavailable("the library died by SIGILL")

    monkeypatch.setattr("modelyard.engines.llama_cpp.verdict.require", broken)
    made = defined(backend="llama_cpp", path="/nowhere/model.gguf")
    assert made.model.fault is not None
    assert "SIGILL" in made.model.fault.message


def test_defaults_of_the_model_reach_the_gateway():
    model = defined(decoding={"temperature": 0.3, "max_tokens": 77}).model
    assert model.max_tokens == 77
    assert model.sampling.temperature == 0.3


NAIVE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def test_a_model_whose_template_knows_no_tools_is_told_them_and_understood():
    made = defined(chat_template=NAIVE)
    parts = made.model.parts
    assert parts.format.name == "plain"
    assert parts.format_for(Request(model="demo", tools=(Tool("now"),))) is parts.taught
    assert parts.format_for(Request(model="demo")) is parts.format
    assert "in words" in dict(made.notes)["tools"]


@pytest.mark.parametrize("settings", [{}, {"chat_template": NAIVE, "tools_prompt": "never"}])
def test_a_model_that_is_told_nothing_is_read_as_it_is(settings: dict[str, Any]):
    made = defined(**settings)
    assert made.model.parts.taught is None
    assert dict(made.notes)["tools"] == "by the template"


def test_how_calls_are_sent_and_held_is_a_setting():
    assert (defined().model.tool_stream, defined().model.constrain_calls) == (True, False)
    model = defined(tool_stream=False, constrain_calls=True).model
    assert (model.tool_stream, model.constrain_calls) == (False, True)
