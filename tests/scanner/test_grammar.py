"""The grammar of each family accepts what the family writes and nothing else, and whatever it accepts is a call."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from modelyard.core.output_format import GrammarContext
from modelyard.core.request import Constraint, Tool, ToolChoice
from modelyard.scanner import parse
from modelyard.scanner.formats import load, names
from modelyard.scanner.grammar import LarkBuilder, after_reasoning
from tests.scanner.patches import APPLY_PATCH, PATCH, is_patch

llguidance = pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "spots": {"type": "array", "items": {"$ref": "#/$defs/spot"}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "$defs": {"spot": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TOOLS = (
    Tool("get_weather", parameters=SCHEMA),
    Tool("now", parameters={"type": "object", "properties": {}}),
    Tool("search", kind="server"),
)
REQUIRED, AUTO = ToolChoice("required"), ToolChoice()

# format → (its tokens, its reasoning tags, two calls in sequence, the trigger)
EXAMPLES: dict[str, tuple[list[str], tuple[str, str], list[str], str]] = {
    "hermes": (
        ["<think>", "</think>", "<tool_call>", "</tool_call>"],
        ("<think>", "</think>\n\n"),
        [
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3, "spots": [{"x": 1.5}]}}'
            "\n</tool_call>",
            '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        ],
        "<tool_call>",
    ),
    "qwen3_coder": (
        ["<think>", "</think>", "<tool_call>", "</tool_call>"],
        ("<think>", "</think>\n\n"),
        [
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
            '</parameter>\n<parameter=spots>\n[{"x": 1.5}]\n</parameter>\n</function>\n</tool_call>',
            "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        ],
        "<tool_call>",
    ),
    "seed_oss": (
        ["<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"],
        ("<seed:think>", "</seed:think>\n"),
        [
            "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome</parameter>\n<parameter=days>3"
            '</parameter>\n<parameter=spots>[{"x": 1.5}]</parameter>\n</function>\n</seed:tool_call>',
            "\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        ],
        "<seed:tool_call>",
    ),
    "minimax_m2": (
        ["<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"],
        ("<think>", "</think>\n\n"),
        [
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n'
            '<parameter name="days">3</parameter>\n<parameter name="spots">[{"x": 1.5}]</parameter>\n</invoke>\n',
            '<invoke name="now">\n</invoke>\n',
            "</minimax:tool_call>",
        ],
        "<minimax:tool_call>",
    ),
    "glm45": (
        [
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ],
        ("<think>", "</think>\n"),
        [
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
            '<arg_value>3</arg_value>\n<arg_key>spots</arg_key>\n<arg_value>[{"x": 1.5}]</arg_value>\n</tool_call>',
            "\n<tool_call>now\n</tool_call>",
        ],
        "<tool_call>",
    ),
    "glm47": (
        [
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ],
        ("<think>", "</think>"),
        [
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key>"
            '<arg_value>3</arg_value><arg_key>spots</arg_key><arg_value>[{"x": 1.5}]</arg_value></tool_call>',
            "<tool_call>now</tool_call>",
        ],
        "<tool_call>",
    ),
    "deepseek_v31": (
        [
            "<think>",
            "</think>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ],
        ("<think>", "</think>"),
        [
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome", "days": 3, "spots": '
            '[{"x": 1.5}]}<｜tool▁call▁end｜>',
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ],
        "<｜tool▁calls▁begin｜>",
    ),
    "mistral": (
        ["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"],
        ("[THINK]", "[/THINK]"),
        ['[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 3, "spots": [{"x": 1.5}]}', "[TOOL_CALLS]now[ARGS]{}"],
        "[TOOL_CALLS]",
    ),
    "llama3_json": (
        ["<|python_tag|>", "<|eot_id|>"],
        ("<think>", "</think>\n"),
        [
            '{"name": "get_weather", "parameters": {"city": "Rome", "days": 3, "spots": [{"x": 1.5}]}}',
            '; {"name": "now", "parameters": {}}',
        ],
        "",
    ),
    "harmony": (
        ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"],
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        [
            '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome", "days": 3, '
            '"spots": [{"x": 1.5}]}<|call|>'
        ],
        "<|channel|>commentary to=functions.",
    ),
}
WANTED = [("get_weather", {"city": "Rome", "days": 3, "spots": [{"x": 1.5}]}), ("now", {})]
# The older generations of Mistral have no token before the arguments and write a list of objects.
OLD_MISTRAL = (
    '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}, {"name": "now", "arguments": {}}]'
)


class ByteVocabulary:
    """A vocabulary of bytes, further texts, and the special tokens of a family."""

    def __init__(self, tokens: list[str], texts: tuple[str, ...] = (), single_bytes: bytes = bytes(range(256))) -> None:
        ordinary = [*(bytes([byte]) for byte in single_bytes), *(text.encode() for text in texts)]
        self.tokens = [*ordinary, *(token.encode() for token in tokens), b"<eos>"]
        self.special_token_ids = list(range(len(ordinary), len(self.tokens)))
        self.eos_token_id, self.bos_token_id = len(self.tokens) - 1, None
        self.specials = {token: len(ordinary) + at for at, token in enumerate(tokens)}
        self._ids = {bytes([byte]): at for at, byte in enumerate(single_bytes)}

    def __call__(self, text: bytes | str) -> list[int]:
        raw = text if isinstance(text, bytes) else text.encode()
        return [self._ids[bytes([byte])] for byte in raw if bytes([byte]) in self._ids]

    def ids(self, text: str) -> list[int]:
        parts = re.split(f"({'|'.join(map(re.escape, self.specials))})", text) if self.specials else [text]
        return [i for p in parts for i in ([self.specials[p]] if p in self.specials else self(p))]

    def matcher(self, constraint: Constraint) -> Any:
        tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))
        matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(constraint.text))
        assert not matcher.is_error(), matcher.get_error()
        return matcher


def accepts(format: str, text: str, *, tokens: list[str], choice: ToolChoice = REQUIRED, **context: Any) -> bool:
    vocabulary = ByteVocabulary(tokens)
    made = load(format).grammar
    constraint = made(TOOLS, choice, GrammarContext(vocabulary.specials, **context)) if made else None
    assert constraint is not None
    ids, matcher = vocabulary.ids(text), vocabulary.matcher(constraint)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


# The generations of Mistral differ in their tokens: without them they would be the same.
SPELLINGS = [
    (name, by_token) for name in sorted(EXAMPLES) for by_token in (True, False) if by_token or name != "mistral"
]


@pytest.fixture(params=SPELLINGS, ids=[f"{name}-{'tokens' if by else 'spellings'}" for name, by in SPELLINGS])
def spelling(request: pytest.FixtureRequest) -> tuple[str, bool]:
    name, by_token = request.param
    return str(name), bool(by_token)


@pytest.fixture
def format(spelling: tuple[str, bool]) -> str:
    return spelling[0]


@pytest.fixture
def tokens(spelling: tuple[str, bool]) -> list[str]:
    name, by_token = spelling
    return EXAMPLES[name][0] if by_token else []


def test_the_most_used_families_have_a_grammar() -> None:
    assert {name for name in names() if load(name).grammar} >= set(EXAMPLES)


def test_it_accepts_what_the_family_writes_and_the_scanner_reads(format: str, tokens: list[str]) -> None:
    raw = "".join(EXAMPLES[format][2])
    assert accepts(format, raw, tokens=tokens)
    calls = [(call.name, json.loads(call.arguments)) for call in parse(raw, format=format, tools=TOOLS).tool_calls]
    assert calls == WANTED[: len(calls)]
    assert calls


def test_reasoning_may_come_first(format: str, tokens: list[str]) -> None:
    _, (opening, closing), calls, _ = EXAMPLES[format]
    assert accepts(format, f"{opening}Let me see.{closing}{''.join(calls)}", tokens=tokens)
    assert not accepts(format, f"Let me see.{closing}{''.join(calls)}", tokens=tokens)


def test_open_reasoning_is_closed_first(format: str, tokens: list[str]) -> None:
    _, (_, closing), calls, _ = EXAMPLES[format]
    assert accepts(format, f"Let me see.{closing}{''.join(calls)}", tokens=tokens, thinking=True)
    assert not accepts(format, "".join(calls), tokens=tokens, thinking=True)


def test_arguments_must_fit_the_schema(format: str, tokens: list[str]) -> None:
    raw = "".join(EXAMPLES[format][2])
    errors = {"get_weather": ["get_wether"], "3": ["true", "30"], "1.5": ["null"], "city": ["town"], "days": ["dayz"]}
    for right, wrongs in errors.items():
        assert right in raw
        for wrong in wrongs:
            assert not accepts(format, raw.replace(right, wrong, 1), tokens=tokens), wrong


def test_text_is_not_a_call(format: str, tokens: list[str]) -> None:
    assert not accepts(format, "It is sunny.", tokens=tokens)
    assert not accepts(format, "", tokens=tokens)


def test_only_the_named_tool_can_be_called(format: str, tokens: list[str]) -> None:
    raw = "".join(EXAMPLES[format][2])
    assert not accepts(format, raw, tokens=tokens, choice=ToolChoice("named", "now"))


def test_only_one_call_is_accepted_without_parallel_calls(format: str, tokens: list[str]) -> None:
    first, *more = EXAMPLES[format][2]
    end = more[1] if len(more) > 1 else ""
    assert accepts(format, first + end, tokens=tokens, parallel=False)
    if more:
        assert not accepts(format, "".join([first, *more]), tokens=tokens, parallel=False)


def test_a_triggered_grammar_begins_after_its_trigger(format: str, tokens: list[str]) -> None:
    *_, calls, trigger = EXAMPLES[format]
    grammar = load(format).grammar
    assert grammar
    made = grammar(TOOLS, AUTO)
    if not trigger:
        assert made is None
        return
    assert made
    assert made.trigger == trigger
    raw = "".join(calls) if len(calls) == 3 else calls[0]
    assert accepts(format, raw.removeprefix(trigger), tokens=tokens, choice=AUTO)
    assert not accepts(format, raw, tokens=tokens, choice=AUTO)


def test_with_a_response_schema_the_output_is_calls_or_a_text_that_matches_it(format: str, tokens: list[str]) -> None:
    vocabulary, grammar = ByteVocabulary(tokens), load(format).grammar
    hat = {"type": "object", "properties": {"hat": {"type": "boolean"}}, "required": ["hat"]}
    assert grammar
    made = grammar(TOOLS, AUTO, GrammarContext(vocabulary.specials, schema={**hat, "additionalProperties": False}))
    assert made
    assert (made.trigger, made.tools, json.loads(made.schema)["required"]) == (None, ("get_weather", "now"), ["hat"])

    def matches(text: str) -> bool:
        ids, matcher = vocabulary.ids(text), vocabulary.matcher(made)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    before = "<|channel|>final<|message|>" if format == "harmony" else ""
    _, (opening, closing), calls, _ = EXAMPLES[format]
    assert matches("".join(calls))
    assert matches(before + '{"hat": true}')
    assert matches(f'{opening}Let me see.{closing}{before}{{"hat": true}}')
    assert not matches(before + '{"hat": 3}')
    assert not matches(before + "Take a hat.")
    assert not parse(before + '{"hat": true}', format=format, tools=TOOLS).tool_calls


def test_older_mistral_writes_a_list() -> None:
    tokens = ["[TOOL_CALLS]", "[THINK]", "[/THINK]"]
    assert accepts("mistral", OLD_MISTRAL, tokens=tokens)
    assert accepts("mistral", OLD_MISTRAL.removeprefix("[TOOL_CALLS]"), tokens=tokens, choice=AUTO)


def test_there_is_no_grammar_without_a_callable_tool(format: str) -> None:
    grammar = load(format).grammar
    assert grammar
    assert grammar(TOOLS[2:], REQUIRED) is None
    assert grammar(TOOLS, ToolChoice("named", "missing")) is None
    assert grammar(TOOLS, ToolChoice("none")) is None


def test_the_constraint_lists_its_tools(format: str) -> None:
    grammar = load(format).grammar
    assert grammar
    made = grammar(TOOLS, REQUIRED)
    assert made
    assert (made.kind, made.trigger, made.tools) == ("lark", None, ("get_weather", "now"))


def test_a_custom_tool_has_one_string_argument() -> None:
    grammar = load("hermes").grammar
    made = grammar([Tool("patch", kind="custom")], REQUIRED) if grammar else None
    raw = '<tool_call>\n{"name": "patch", "arguments": {"input": "x"}}\n</tool_call>'
    assert made
    ids = ByteVocabulary([]).ids(raw)
    assert ByteVocabulary([]).matcher(made).try_consume_tokens(ids) == len(ids)


def test_names_with_quotes_are_escaped() -> None:
    odd = Tool('say "hi"\\', parameters={"type": "object", "properties": {'a"b': {"type": "integer"}}})
    for format in sorted(EXAMPLES):
        grammar = load(format).grammar
        made = grammar([odd], REQUIRED) if grammar else None
        assert made
        ByteVocabulary([]).matcher(made)


def test_a_literal_contains_the_ids_of_its_tokens() -> None:
    lark = LarkBuilder(GrammarContext({"<a>": 7, "<a>b": 8}))
    assert lark.literal('x<a>b"<a>') == '"x" <[8]> "\\"" <[7]>'
    assert lark.literal("") == ""


# --- random walks -----------------------------------------------------------------------------------------------------

CLOSERS = ("\n</parameter>", "</parameter>", "</arg_value>", "</think>")


@pytest.mark.parametrize("tokens", [["<think>", "</think>"], []], ids=["tokens", "spellings"])
def test_a_response_schema_applies_after_open_reasoning(tokens: list[str]) -> None:
    vocabulary = ByteVocabulary(tokens)
    made = after_reasoning(
        Constraint("json_object"), {"type": "object"}, "</think>", GrammarContext(vocabulary.specials)
    )

    def accepts(text: str) -> bool:
        ids, matcher = vocabulary.ids(text), vocabulary.matcher(made)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    assert accepts('Let me see {x.</think>\n\n{"a": 1}')
    assert accepts('</think>{"a": [1, {}]}')
    assert not accepts('{"a": 1}')
    assert not accepts('Hm.</think>Here: {"a": 1}')


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_walk_through_the_grammar_is_a_valid_call(name: str) -> None:
    tokens, form = EXAMPLES[name][0], load(name)
    others = tuple(text for text in CLOSERS if text not in tokens)
    vocabulary = ByteVocabulary(tokens, others, bytes(range(32, 127)) + b"\n")
    made = form.grammar(TOOLS, REQUIRED, GrammarContext(vocabulary.specials)) if form.grammar else None
    assert made
    for seed in range(8):
        raw = _walk(vocabulary, vocabulary.matcher(made), random.Random(f"{name} {seed}"))
        for call in (calls := parse(raw, format=form, tools=TOOLS).tool_calls):
            (tool,) = [tool for tool in TOOLS if tool.name == call.name]
            jsonschema.validate(json.loads(call.arguments), tool.parameters)
        assert calls, raw


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_walk_through_the_grammar_of_a_custom_tool_matches_it(name: str) -> None:
    tokens, form = EXAMPLES[name][0], load(name)
    shortcuts = ("*** End Patch", "*** Add File: a", "@@", "\\n", *(text for text in CLOSERS if text not in tokens))
    vocabulary = ByteVocabulary(tokens, shortcuts, bytes(range(32, 127)) + b"\n")
    context = GrammarContext(vocabulary.specials, parallel=False)
    made = form.grammar([APPLY_PATCH], REQUIRED, context) if form.grammar else None
    assert made
    for seed in range(3):
        matcher = vocabulary.matcher(made)
        raw = _walk(vocabulary, matcher, random.Random(f"{name} {seed}"), "\n", "\\n", "*** End Patch")
        (call,) = parse(raw, format=form, tools=[APPLY_PATCH]).tool_calls
        assert is_patch(call.arguments), raw


def test_every_family_accepts_a_patch(format: str, tokens: list[str]) -> None:
    """In a JSON string or unchanged, as the family writes it."""
    vocabulary = ByteVocabulary(tokens)
    grammar = load(format).grammar
    made = grammar([APPLY_PATCH], REQUIRED, GrammarContext(vocabulary.specials)) if grammar else None
    assert made
    for patch, right in ((PATCH, True), (PATCH.replace("@@ f()", "f()"), False)):
        ids = vocabulary.ids(_called(format, patch))
        matcher = vocabulary.matcher(made)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == right


def _called(format: str, patch: str) -> str:
    """The first call of the family with the name and arguments of another tool."""
    first, *more = EXAMPLES[format][2]
    arguments = json.dumps({"input": patch}, ensure_ascii=False)
    text = (first + (more[1] if len(more) > 1 else "")).replace("get_weather", "apply_patch")
    if "city" in text and '{"city"' in text:
        return re.sub(r'\{"city.*?\}\]\}', lambda _: arguments, text)
    tag = re.sub(r"Rome(.*?)(?=<parameter|<arg_key).*", r"", text, flags=re.DOTALL).replace("city", "input")
    closing = re.search(r"Rome(.*?)(?=<parameter|<arg_key)", text, re.DOTALL)
    end = re.search(r"\}\](.*)", text, re.DOTALL)
    assert closing
    assert end
    return f"{tag}{patch}{end[1]}"


def _walk(vocabulary: ByteVocabulary, matcher: Any, rng: random.Random, *closers: str) -> str:
    """Choose any token that the mask allows. Closing tokens are preferred, so that the walk ends."""
    text, ends = b"", [closer.encode() for closer in closers]
    for _ in range(3000):
        allowed = [at for at, bias in enumerate(matcher.compute_logit_bias()) if bias]
        if not allowed or (matcher.is_accepting() and rng.random() < 0.5):
            return text.decode()
        closing = [
            at for at in allowed if len(vocabulary.tokens[at]) > 1 or vocabulary.tokens[at] in (b'"', b"}", b"]")
        ]
        closing = [at for at in allowed if vocabulary.tokens[at] in ends] or closing if rng.random() < 0.7 else closing
        chosen = rng.choice(closing if closing and rng.random() < 0.5 else allowed)
        if chosen == vocabulary.eos_token_id:
            return text.decode()
        assert matcher.consume_token(chosen), matcher.get_error()
        text += vocabulary.tokens[chosen]
    raise AssertionError(f"the walk does not end: {text[-200:]!r}")
