"""What a template writes around texts that it never looks at is what it renders; whoever looks is found out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.request import Message, Request, Text
from modelyard.prompt.render import Renderer
from modelyard.prompt.shapes import MAX_MESSAGES, Looked, Shapes, Unread, shape_of, text_at
from modelyard.prompt.source import builtin
from modelyard.prompt.template import ChatTemplate
from modelyard.tokenizer.hf import HuggingFaceTokenizer
from tests.tokenizer import tokenizers_made as made

VOCAB = HuggingFaceTokenizer.from_text(made.byte_level())
LOOP = "{% for message in messages %}BODY{% endfor %}{{ '<|im_start|>assistant\n' }}"
CHATML = LOOP.replace("BODY", "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}")
BUILT_IN = ("generic", "llama3_template", "mistral_template", "qwen3_template", "gemma4_template")

PASSED_ON = {
    "joined": CHATML,
    "printed": LOOP.replace("BODY", "[{{ message.role }}] {{ message.content }}\n"),
    "twice": LOOP.replace("BODY", "{{ message.content }}{% set said = '(' + message.content + ')' %}{{ said }}"),
    "by role": LOOP.replace(
        "BODY", "{% if message.role == 'user' and loop.index0 % 2 == 1 %}>{% endif %}{{ message.content }}"
    ),
    "kept": "{% set ns = namespace(last='') %}"
    + LOOP.replace("BODY", "{% set ns.last = ns.last + message.content %}")
    + "{{ ns.last }}",
    "asked its type": LOOP.replace("BODY", "{% if message.content is string %}{{ message.content }}{% endif %}"),
}
LOOKED_AT = {
    "its truth": "{% if message.content %}{{ message.content }}{% endif %}",
    "its length": "{{ message.content }}{% if message.content | length > 3 %}!{% endif %}",
    "its letters": "{% for letter in message.content %}{{ letter }}-{% endfor %}",
    "a letter": "{{ message.content[0] }}",
    "a method": "{{ message.content.strip() }}",
    "a filter": "{{ message.content | trim }}",
    "as JSON": "{{ message.content | tojson }}",
    "its words": "{% if 'x' in message.content %}x{% endif %}{{ message.content }}",
    "inside a text": "{% if message.content in 'x and y' %}x{% endif %}{{ message.content }}",
    "inside a chain": "{% if '' in message.content in 'x and y' %}x{% endif %}{{ message.content }}",
    "compared": "{% if 'x' == message.content %}x{% endif %}{{ message.content }}",
    "as a whole": "{% set all = 'a' ~ message.content %}{% if all == 'ax' %}x{% endif %}{{ message.content }}",
    "added up": "{% set all = 'a' + message.content %}{% if all == 'ax' %}x{% endif %}{{ message.content }}",
    "formatted": "{{ '%s!' % message.content }}{{ '%5s' % message.content }}",
    "given away": "{{ '-'.join([message.content, 'x']).upper() }}",
    "in a block": "{% set all %}{{ message.content }}{% endset %}{{ all | upper }}",
    "in a macro": "{% macro m(t) %}{{ t }}{% endmacro %}{{ m(message.content) | upper }}",
    "with the time": "{{ strftime_now('%Y') }}{{ message.content }}",
    "in a list": "{{ [message.content] }}",
}

words = st.lists(
    st.sampled_from([*made.CONTROLS, "x", "y", " ", "\n", "{{ x }}", "\ufdd0", "\ufdd2", "\ufdd20\ufdd2", "é", "%s"]),
    max_size=5,
).map("".join)
turns = st.lists(st.tuples(st.sampled_from(["system", "developer", "user", "assistant"]), words), max_size=6)


def renderer(source: str, *, is_quick: bool = True) -> Renderer:
    made_ = Renderer(ChatTemplate(source, bos_token="<s>", eos_token="</s>"), VOCAB)
    if not is_quick:
        made_._shapes = None
    return made_


def asked(*said: tuple[str, str], **more: Any) -> Request:
    return Request(model="m", messages=tuple(Message(role, (Text(text),)) for role, text in said), **more)  # type: ignore[arg-type]


def outcome(render: Callable[[], str]) -> str:
    try:
        return render()
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize("source", [*PASSED_ON.values(), *map(builtin, BUILT_IN)])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(said=turns, last=words)
def test_both_ways_write_the_same(source: str, said: list[tuple[str, str]], last: str) -> None:
    quick, slow = _pair(source)
    request = asked(*said, ("user", last))
    assert outcome(lambda: quick.text(request)) == outcome(lambda: slow.text(request))


THINKING = CHATML.replace("<|im_end|>", "</think><|im_end|>")
ASKED = (*PASSED_ON.values(), builtin("generic"), THINKING)
said_before = st.sampled_from(["<|im_", "end|>", "</think>", "One lamp, dark. ", "It is ", "7", *made.CONTROLS, "é"])
more = st.lists(said_before, max_size=5).map("".join)


@pytest.mark.parametrize("source", ASKED)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(first=more, reply=more, last=more)
def test_both_ways_read_the_same(source: str, first: str, reply: str, last: str) -> None:
    quick, slow = _pair(source)
    for said in (
        (("user", last),),
        (("system", first), ("user", last)),
        (("user", first), ("assistant", reply), ("user", last)),
    ):
        text = quick.text(asked(*said))
        assert quick.tokens(text) == slow.tokens(slow.text(asked(*said)))


def test_texts_are_framed_unless_a_reply_may_hold_a_control_token_that_is_cut_at() -> None:
    for source, framed in ((CHATML, True), (THINKING, False)):
        made_ = renderer(source)
        assert made_._shapes is not None
        alone, answered = made_._shapes.find(("user",)), made_._shapes.find(("user", "assistant", "user"))
        assert alone is not None
        assert answered is not None
        assert alone.frame is not None
        assert (answered.frame is not None) is framed


def test_tokens_are_those_of_the_text_that_is_asked_for() -> None:
    made_ = renderer(CHATML)
    one, other = made_.text(asked(("user", "One"))), made_.text(asked(("user", "Other")))
    assert VOCAB.decode(made_.tokens(one)) == one
    assert VOCAB.decode(made_.tokens(other)) == other
    assert made_.tokens("".join([one[:-1], "\n"])) == made_.tokens(one)


_pairs: dict[str, tuple[Renderer, Renderer]] = {}


def _pair(source: str) -> tuple[Renderer, Renderer]:
    if source not in _pairs:
        _pairs[source] = (renderer(source), renderer(source, is_quick=False))
    return _pairs[source]


@pytest.mark.parametrize("name", PASSED_ON)
def test_a_template_that_passes_texts_on_is_not_rendered_twice(name: str) -> None:
    made_ = renderer(PASSED_ON[name])
    first = made_._shaped(asked(("system", "Be brief."), ("user", "Hi")))
    assert first == renderer(PASSED_ON[name], is_quick=False).text(asked(("system", "Be brief."), ("user", "Hi")))


@pytest.mark.parametrize("name", LOOKED_AT)
def test_whoever_looks_is_found_out(name: str) -> None:
    made_ = renderer(LOOP.replace("BODY", LOOKED_AT[name]))
    assert made_._shaped(asked(("user", "x"))) is None


@pytest.mark.parametrize(
    "request_",
    [
        asked(("user", "Hi"), ("assistant", "I")),
        asked(("user", "Hi"), documents=({"text": "a"},)),
        asked(("user", "Hi"), chat_template_kwargs={"a": 1}),
        asked(*[("user", "Hi")] * (MAX_MESSAGES + 1)),
        Request(model="m", messages=(Message("user", (Text("Hi"), Text("there"))),)),
        Request(model="m", messages=(Message("user", (Text("Hi"),), "Ann"),)),
        Request(model="m"),
    ],
)
def test_what_is_not_plain_is_rendered(request_: Request) -> None:
    assert renderer(CHATML)._shaped(request_) is None


def test_a_text_that_is_not_read_answers_nothing() -> None:
    text = text_at(0)
    looks: tuple[Callable[[], Any], ...] = (
        lambda: bool(text),
        lambda: len(text),
        lambda: text == "x",
        lambda: "x" == text,  # noqa: SIM300  the other way round is another question
        lambda: hash(text),
        lambda: f"{text}",
        lambda: repr(text),
        lambda: text[0],
        lambda: list(text),
        lambda: "x" in text,
        lambda: text.split(),
        lambda: text * 2,
        lambda: text % 2,
        lambda: text.encode(),
    )
    for look in looks:
        with pytest.raises(Looked):
            look()
    assert (type("a" + text), type(text + "a"), type(text + text)) == (Unread, Unread, Unread)


def test_clients_cannot_make_it_learn_without_end() -> None:
    learned: list[int] = []

    def render(turns: list[tuple[str, Unread]]) -> str:
        learned.append(len(turns))
        return "".join(["<", *(text for _, text in turns)])

    def frame(*_: object) -> None:
        return None

    shapes = Shapes(render, frame)
    for number in range(600):
        shapes.find(tuple("user" if number >> bit & 1 else "system" for bit in range(10)))
    assert len(learned) == 512
    assert shapes.find(("user",) * (MAX_MESSAGES + 1)) is None


def test_texts_stand_where_their_marks_stood() -> None:
    shape = shape_of("".join(["a", text_at(1), "b", text_at(0), text_at(1)]))
    assert shape.around(["one", "two"]) == "atwobonetwo"
