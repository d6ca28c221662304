"""Model definitions made from settings, without an engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from modelyard.config.library_models import LibraryModel
from modelyard.config.load import load_config
from modelyard.config.problems import ConfigError
from modelyard.core.errors import Unavailable
from modelyard.core.request import Message, Request, Sampling, Text, Tool, ToolCall, ToolResult
from modelyard.engines.llama_cpp.selftest import write_tiny_model
from modelyard.gateway.model import Model, capability_names, effective_capabilities
from modelyard.library.default_model import fetch
from modelyard.library.model_files import LibraryEntry
from modelyard.server import model_definition
from modelyard.server.model_definition import define_later, define_model
from modelyard.tokenizer.gguf import GgufTokenizer
from tests.engines.llama_cpp import tiny_models
from tests.public_templates import public_templates


def defined(**settings: Any) -> Model:
    overrides = {
        "models": {"demo": {"backend": "fake", **settings}},
        "caches": {"main": {"model": "demo", "n_ctx": 4096, "parallel": 2, "description": "talk"}},
    }
    config = load_config(env={}, overrides=overrides).config
    return define_model(config.router().catalog.models["demo"])


def test_notes_explain_the_origin_of_every_part():
    notes = dict(defined().notes)
    assert notes["cache main"] == "2 × 4096 tokens talk"
    assert notes["tokenizer"].endswith("tokens")
    assert "generic" in notes["template"]
    assert notes["format"]


def test_a_definition_works_while_nothing_is_loaded():
    parts = defined().pipeline
    assert parts.tokenizer.decode(parts.tokenizer.encode("hello")) == "hello"
    assert set(parts.stop_ids) >= parts.tokenizer.eos


@pytest.mark.parametrize(
    ("held", "capabilities"),
    [
        ({"is_chat": True}, ("completion", "chat", "tools")),
        ({"is_chat": True, "switches_thinking": True}, ("completion", "chat", "tools", "thinking")),
        ({"is_chat": False}, ("completion",)),
        ({"is_chat": False, "task": "embedding"}, ("embedding",)),
        ({"is_chat": False, "task": "reranking"}, ()),
    ],
)
def test_a_model_of_the_library_tells_what_it_can_do_before_its_files_are_read(
    held: dict[str, Any], capabilities: tuple[str, ...]
) -> None:
    config = load_config(overrides={"models": {"m": {"backend": "fake"}}}).config
    entry = config.router().catalog.models["m"]
    model = define_later(entry, LibraryModel(LibraryEntry("m", "m.gguf"), **held))
    assert model.define is not None
    assert capability_names(effective_capabilities(model)) == capabilities


def test_a_model_without_a_chat_template_is_defined_for_bare_prompts():
    found = defined(backend="llama_cpp", path=str(tiny_models.base_coder()))
    notes = dict(found.notes)
    assert (found.fault, notes["template"]) == (None, "from nowhere: chat requests are refused")
    assert notes["format"] == "verbatim: without a chat template, everything is text"
    assert "tools" not in notes
    assert model_definition.trial_fault(found) is None
    assert capability_names(effective_capabilities(found)) == ("completion", "insert")
    assert found.pipeline.renderer.raw("def f") == found.pipeline.tokenizer.encode("def f")


def test_a_custom_template_is_compiled_and_named(tmp_path: Path):
    notes = dict(defined(chat_template="{{ messages[0].content }}").notes)
    assert "chat_template" in notes["template"]


def test_the_output_format_setting_wins():
    model = defined(format="harmony")
    assert model.pipeline.format.name == "harmony"


def test_a_chat_engine_has_no_tokenizer():
    model = defined(kind="chat")
    assert (model.kind, model.text, model.fault) == ("chat", None, None)


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"tokenizer_path": "/nowhere/at/all"}, "/nowhere/at/all"), ({"chat_template": "{% if %}"}, "template")],
)
def test_a_broken_definition_keeps_its_fault(settings: dict[str, Any], why: str):
    made = defined(**settings)
    assert made.fault is not None
    assert why in made.fault.message
    assert why in dict(made.notes)["fault"]
    with pytest.raises(Unavailable, match="could not be loaded"):
        _ = made.pipeline


def test_a_native_library_is_verified_before_it_opens_the_vocabulary(monkeypatch: pytest.MonkeyPatch):
    def broken() -> None:
        raise Unavailable("the library died by SIGILL")

    monkeypatch.setattr("modelyard.engines.llama_cpp.selftest.require_working_library", broken)
    made = defined(backend="llama_cpp", path="/nowhere/model.gguf")
    assert made.fault is not None
    assert "SIGILL" in made.fault.message


def test_defaults_of_the_model_reach_the_gateway():
    model = defined(decoding={"temperature": 0.3, "max_tokens": 77})
    assert model.entry.max_tokens == 77
    assert model.sampling.temperature == 0.3


NAIVE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def test_a_model_without_tools_in_its_template_gets_them_in_the_prompt():
    made = defined(chat_template=NAIVE)
    parts = made.pipeline
    assert parts.format.name == "plain"
    assert parts.format_for(Request(model="demo", tools=(Tool("now"),))) is parts.tools_prompt_format
    assert parts.format_for(Request(model="demo")) is parts.format
    assert "described as text" in dict(made.notes)["tools"]


@pytest.mark.parametrize("settings", [{}, {"chat_template": NAIVE, "tools_prompt": "never"}])
def test_without_a_tools_prompt_the_detected_format_is_used(settings: dict[str, Any]):
    made = defined(**settings)
    assert made.pipeline.tools_prompt_format is None
    assert dict(made.notes)["tools"] == "by the template"


def test_streaming_and_constraining_calls_are_settings():
    assert (defined().settings.tool_stream, defined().settings.constrain_calls) == (True, False)
    model = defined(tool_stream=False, constrain_calls=True)
    assert (model.settings.tool_stream, model.settings.constrain_calls) == (False, True)


def test_the_end_of_turn_of_a_named_format_is_a_token_or_a_stop_string():
    own, foreign = (
        defined(prompt_format="generic").pipeline,
        defined(prompt_format="gemma4_template").pipeline,
    )
    assert own.tokenizer.specials["<|im_end|>"] in own.stop_ids
    assert own.stop_strings == ()
    assert foreign.stop_strings == ("<turn|>",)


def test_a_translation_format_works_for_text_and_chat_engines():
    assert defined(prompt_format="translategemma_template").translates
    assert defined(prompt_format="translategemma_template", kind="chat").translates
    assert not defined().translates
    assert not defined(prompt_format="generic", kind="chat").translates


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_an_unknown_format_is_an_error_of_the_configuration(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"models\.demo\.prompt_format: there is no prompt_format 'nonsense'"):
        defined(prompt_format="nonsense", kind=kind)


def native(**settings: Any) -> Model:
    return defined(backend="llama_server", **settings)


def test_tokens_of_a_llama_server_are_counted_in_the_gateway() -> None:
    made = native(path=str(fetch()), prompt_format="gemma4_template")
    assert (made.kind, made.remote, made.fault) == ("chat", False, None)
    assert "<|im_start|>" in made.pipeline.renderer.text(
        Request(model="demo", messages=(Message("user", (Text("Hi"),)),))
    )
    assert dict(made.notes)["template"].startswith("from the model file's metadata"), "the program itself uses it"


def test_a_named_format_rewords_no_template_of_the_file_unless_forced() -> None:
    """The file writes a system prompt of its own, the format does not."""
    settings = {"backend": "llama_cpp", "path": str(fetch()), "prompt_format": "generic"}
    plain, named = (defined(**each).pipeline for each in (settings | {"prompt_format": None}, settings))
    forced = defined(**settings, force_prompt_format=True)
    asked = Request(model="demo", messages=(Message("user", (Text("Hi"),)),))
    assert named.renderer.text(asked) == plain.renderer.text(asked)
    assert forced.pipeline.renderer.text(asked) != plain.renderer.text(asked)
    assert dict(forced.notes)["template"] == "from prompt_format generic, because of force_prompt_format"


def test_a_files_own_variant_for_tools_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {None: "plain {{ messages[0].content }}", "tool_use": "variant {{ tools[0].function.name }}"}
    monkeypatch.setattr(GgufTokenizer, "named_template", lambda _, name: own.get(name))
    renderer = defined(backend="llama_cpp", path=str(fetch())).pipeline.renderer
    asked = Request(model="demo", messages=(Message("user", (Text("Hi"),)),))
    assert renderer.text(asked) == "plain Hi"
    assert renderer.text(replace(asked, tools=(Tool("now"),))) == "variant now"


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("llama.cpp/LFM2-8B-A1B", '<|tool_call_start|>[now(zone="UTC")]<|tool_call_end|>'),
        ("llama.cpp/LFM2.5-Instruct", '<|tool_call_start|>[now(zone="UTC")]<|tool_call_end|>'),
        (
            "llama.cpp/ibm-granite-granite-3.3-2B-Instruct",
            '<|tool_call|>[{"name": "now", "arguments": {"zone": "UTC"}}]',
        ),
    ],
)
def test_calls_that_a_template_cannot_write_are_in_the_models_own_format(template: str, written: str) -> None:
    made = defined(backend="llama_cpp", path=str(fetch()), chat_template=public_templates()[template])
    messages = (
        Message("user", (Text("Hi"),)),
        Message("assistant", (ToolCall("call_1", "now", '{"zone": "UTC"}'),)),
        Message("tool", (ToolResult("call_1", (Text("noon"),)),)),
    )
    text = made.pipeline.renderer.text(Request(model="demo", messages=messages, tools=(Tool("now"),)))
    assert written in text
    assert "<tool_call>" not in text
    assert re.search(r"tool(?:<\|end_of_role\|>|\n(?:<\|tool_response_start\|>)?)noon", text), "results keep their role"
    assert dict(made.notes)["tools"] == "by the template"


def test_described_tools_are_called_in_the_format_of_the_model_if_it_has_one() -> None:
    asked = Request(model="demo", messages=(Message("user", (Text("Hi"),)),), tools=(Tool("now"),))
    shown = {}
    for template in ("trl/cohere2", "trl/llama3"):
        made = defined(backend="llama_cpp", path=str(fetch()), chat_template=public_templates()[template])
        pipeline = made.pipeline
        shown[template] = dict(made.notes)["tools"], pipeline.renderer.text(asked), pipeline.tools_prompt_format
    note, text, format = shown["trl/cohere2"]
    assert note == "described as text, calls in its own format"
    assert '<|START_ACTION|>[{"tool_name": "tool_name", "parameters": {"parameter": "value"}}]<|END_ACTION|>' in text
    assert format is None
    note, text, format = shown["trl/llama3"]
    assert note == "described as text, calls in the hermes format"
    assert "<tool_call>" in text
    assert format is not None


def test_the_name_of_a_format_in_place_of_a_template_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GgufTokenizer, "named_template", lambda _, name: None if name else "mistral-v7-tekken")
    notes = dict(defined(backend="llama_cpp", path=str(fetch()), prompt_format="mistral").notes)
    assert notes["template"].startswith("from prompt_format mistral, because the model has no template")


def test_a_missing_file_is_left_to_the_engine() -> None:
    made = native(path="/nowhere/model.gguf")
    assert (made.text, made.fault) == (None, None)
    assert "/nowhere/model.gguf" in dict(made.notes)["tokenizer"]


def test_a_remote_model_gets_only_explicit_sampling_parameters() -> None:
    remote = {"backend": "openai_remote", "remote_base_url": "https://a.b", "remote_model": "m"}
    made = defined(**remote, decoding={"top_p": 0.5})
    assert made.remote
    assert made.sampling == Sampling(top_p=0.5)
    assert defined(decoding={"top_p": 0.5}).sampling == Sampling(temperature=0.7, top_p=0.5)


@pytest.mark.parametrize(
    ("configured", "asked", "effective"),
    [
        ({}, {}, {"temperature": 0.7, "top_p": 0.9}),
        ({}, {"temperature": 1.0}, {"temperature": 1.0}),
        ({}, {"top_k": 5}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}),
        ({"temperature": 0.3}, {}, {"temperature": 0.3}),
        ({"top_p": 0.5}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}),
    ],
)
def test_a_temperature_of_the_client_or_the_settings_is_not_cut_by_a_hidden_top_p(
    configured: dict[str, float], asked: dict[str, float], effective: dict[str, float]
) -> None:
    model = defined(decoding=configured)
    assert model.sampling_for(Request(model="m", sampling=Sampling(**asked))) == Sampling(**effective)


def test_sampling_values_of_the_file_are_defaults_below_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"temperature": 0.6, "top_k": 20.0}
    monkeypatch.setattr(model_definition, "recommended_sampling", lambda _: found)
    made = defined(decoding={"temperature": 0.2})
    assert made.sampling == Sampling(temperature=0.2, top_k=20)
    assert dict(made.notes)["sampling"] == "temperature 0.6, top_k 20 from its file"


def test_a_file_that_kills_llama_cpp_is_a_fault_of_its_model_only(tmp_path: Path) -> None:
    """A model without a vocabulary: llama.cpp aborts when it is used."""
    write_tiny_model(tmp_path / "tiny.gguf")
    made = defined(backend="llama_cpp", path=str(tmp_path / "tiny.gguf"), enabled=False)
    assert made.fault is not None
    assert "llama.cpp died while" in made.fault.message
