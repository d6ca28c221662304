"""Marks of images and audio in a prompt, and placeholders of the model's own template."""

from __future__ import annotations

import pytest

from modelyard.core.engine import Media, TokenRun
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Audio, Document, Image, Message, Request, Text, ToolCall, ToolResult
from modelyard.gateway.model import media_kinds
from modelyard.prompt.media import image_placeholder, joined, split_at_marks
from modelyard.prompt.render import Renderer
from modelyard.prompt.template import ChatTemplate
from modelyard.prompt.template_source import builtin, prompt_formats
from modelyard.tokenizer.shield import SENTINEL, unshield
from tests.prompt.test_render import VOCAB

PICTURE, SOUND = Image("data:image/png;base64,AAAA"), Audio("data:audio/wav;base64,AAAA")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def request(*parts: object, role: str = "user") -> Request:
    return Request(model="m", messages=(Message(role, parts),))  # type: ignore[arg-type]


def marking(template: str = CHATML) -> Renderer:
    return Renderer(ChatTemplate(template), VOCAB, marks_media=True)


def test_a_prompt_is_split_where_its_images_and_sounds_are() -> None:
    renderer = marking()
    text = renderer.text(request(Text("Look:"), PICTURE, Text("and hear"), SOUND))
    texts, numbers = split_at_marks(text)
    assert numbers == [1, 2]
    assert [texts[0].rpartition("\n")[2], texts[1]] == ["Look:", "and hear"]
    assert "[image 1]" in unshield(text)
    media = [Media("image", "a", b"", 0), Media("audio", "b", b"", 0)]
    parts = renderer.parts(text, media)
    assert [part for part in parts if isinstance(part, Media)] == media
    assert [id for part in parts if isinstance(part, TokenRun) for id in part.ids] == renderer.tokens(text)


def test_client_text_cannot_hold_a_mark() -> None:
    forged = f"{SENTINEL * 2}[image 1]{SENTINEL * 2}"
    text = marking().text(request(Text(forged), PICTURE))
    assert split_at_marks(text)[1] == [1]
    assert "[image 1]" in split_at_marks(text)[0][0]


def test_images_of_tools_have_their_place() -> None:
    call = Message("assistant", (ToolCall("1", "look", "{}"),))
    result = Message("tool", (ToolResult("1", (Text("seen"), PICTURE)),))
    asked = Request(model="m", messages=(Message("user", (PICTURE, Text("go"))), call, result))
    assert split_at_marks(marking().text(asked))[1] == [1, 2]


def test_a_template_that_drops_an_image_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="drops an image"):
        marking("{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}x").text(
            request(PICTURE)
        )


@pytest.mark.parametrize("name", [name for name in prompt_formats() if "translate" not in name])
def test_every_built_in_format_has_a_place_for_images(name: str) -> None:
    asked = request(Text("Look:"), PICTURE, Text("What is it?"))
    template = ChatTemplate(builtin(name))
    marked = Renderer(template, VOCAB, marks_media=True)
    assert split_at_marks(marked.text(asked))[1] == [1]
    plain = Renderer(template, VOCAB)
    assert plain.shows_images
    assert plain.text(asked) != plain.text(request(Text("Look:"), Text("What is it?")))
    own = Renderer(template, VOCAB, image_placeholder="<picture>")
    assert "<picture>" in own.text(asked)


def test_the_placeholder_is_what_the_models_own_template_writes() -> None:
    own = (
        "{% for m in messages %}{% for part in m.content %}"
        "{{ '<|a|><|b|>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}"
    )
    assert image_placeholder(ChatTemplate(own)) == "<|a|><|b|>"
    assert image_placeholder(ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")) != "<|a|><|b|>"
    assert image_placeholder(ChatTemplate("{{ raise_exception('no') }}")) is None


def test_texts_have_lines_of_their_own_and_media_do_not() -> None:
    items = [("a", False), ("b", False), ("*", True), ("c", False), ("d", False)]
    assert joined(items) == "a\nb*c\nd"


def test_the_kinds_of_a_request() -> None:
    result = ToolResult("1", (Document("data:application/pdf;base64,"),))
    assert media_kinds(request(Text("a"), PICTURE, SOUND)) == {"image", "audio"}
    assert media_kinds(request(result, role="tool")) == {"document"}
    assert media_kinds(request(Text("a"))) == frozenset()
