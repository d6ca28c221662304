"""Requests to translation models."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Image, Message, Request, Text
from modelyard.prompt.render import Renderer
from modelyard.prompt.template import ChatTemplate, TemplateRefused
from modelyard.prompt.template_source import builtin
from modelyard.prompt.translation import translated
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from modelyard.tokenizer.shield import unshield


def make_request(text: str = "Ach.", *before: Message, **codes: Any) -> Request:
    kwargs = {f"{name}_lang_code": code for name, code in codes.items()}
    return Request(model="m", messages=(*before, Message("user", (Text(text),))), chat_template_kwargs=kwargs)


def codes_and_text(request: Request) -> tuple[str, str, str]:
    done = translated(request)
    (part,) = done.messages[0].parts
    assert isinstance(part, Text)
    return done.chat_template_kwargs["source_lang_code"], done.chat_template_kwargs["target_lang_code"], part.text


def test_a_known_source_is_unchanged() -> None:
    assert codes_and_text(make_request(source="nl", target="en")) == ("nl", "en", "Ach.")


def test_regions_are_accepted_with_underscore_or_hyphen() -> None:
    assert codes_and_text(make_request(source="pt_BR", target="de-DE"))[:2] == ("pt-BR", "de-DE")


@pytest.mark.parametrize("source", [None, "", "auto", "mixed"])
@pytest.mark.parametrize(("target", "fallback"), [("nl", "en"), ("en", "fr"), ("en-GB", "fr")])
def test_a_mixed_source_gets_a_valid_code_and_a_line_before_the_text(
    source: str | None, target: str, fallback: str
) -> None:
    code, _, text = codes_and_text(make_request(source=source, target=target))
    assert code == fallback
    assert text.endswith("\n\nAch.")
    assert "language of each segment" in text


def test_translation_is_idempotent() -> None:
    done = translated(make_request(target="en"))
    assert translated(done) == done


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (make_request(source="nl"), "target_lang_code_required"),
        (make_request(target="auto"), "target_lang_code_required"),
        (make_request(source="nl", target="<end_of_turn>"), "invalid_language_code"),
        (make_request(source=["nl"], target="en"), "invalid_language_code"),
        (make_request("x", Message("system", (Text("rules"),)), target="en"), "instructions_unsupported"),
        (make_request("x", Message("user", (Text("before"),)), target="en"), "multi_turn_unsupported"),
        (
            Request(
                model="m", messages=(Message("user", (Image("u"),)),), chat_template_kwargs={"target_lang_code": "en"}
            ),
            "modality_unsupported",
        ),
    ],
)
def test_unsupported_requests_are_refused(request_: Request, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        translated(request_)
    assert caught.value.code == code


# --- through the template ---------------------------------------------------------------------------------------------


@pytest.fixture
def renderer(vocab: HuggingFaceTokenizer) -> Renderer:
    return Renderer(ChatTemplate(builtin("translategemma_template"), bos_token="<bos>"), vocab)


def test_the_prompt_names_both_languages_and_ends_with_the_text(renderer: Renderer) -> None:
    prompt = unshield(renderer.text(make_request(source="nl", target="pt_BR")))
    assert prompt.startswith("<bos><start_of_turn>user\n")
    assert "from Dutch (nl) to Portuguese (pt-BR)" in prompt
    assert prompt.endswith("\n\n\nAch.<end_of_turn>\n<start_of_turn>model\n")


def test_an_unknown_language_is_refused_by_the_template(renderer: Renderer) -> None:
    with pytest.raises(TemplateRefused, match="xx"):
        renderer.text(make_request(source="nl", target="xx"))


def test_the_template_of_a_model_gets_one_item_with_both_codes(vocab: HuggingFaceTokenizer) -> None:
    shown = "{{ it.type }} {{ it.source_lang_code }}>{{ it.target_lang_code }} {{ it.text }}"
    renderer = Renderer(ChatTemplate("{% set it = messages[0].content[0] %}" + shown), vocab)
    assert renderer.translates
    assert unshield(renderer.text(make_request(source="nl", target="en"))) == "text nl>en Ach."


def test_other_templates_do_not_translate(vocab: HuggingFaceTokenizer) -> None:
    renderer = Renderer(ChatTemplate(builtin("generic")), vocab)
    assert not renderer.translates
    assert "Ach." in renderer.text(make_request(target="en"))
