"""Each family's grammar takes what the family writes and nothing else, and whatever it lets through is a call."""

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
from modelyard.scanner.grammar import Lark, after_reasoning
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

# format → (its tokens, reasoning, how two calls follow each other, the trigger)
SPOKEN: dict[str, tuple[list[str], tuple[str, str], list[str], str]] = {
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
        [
            '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 3, "spots": [{"x": 1.5}]}',
            "[TOOL_CALLS]now[ARGS]{}",
        ],
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
# Mistral's older generations have no token before the arguments, and a list of objects instead.
OLD_MISTRAL = (
    '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}, {"name": "now", "arguments": {}}]'
)


class Letters:
    """A vocabulary of bytes, further texts, and the tokens of a family, which no text spells."""

    def __init__(self, tokens: list[str], texts: tuple[str, ...] = (), letters: bytes = bytes(range(256))) -> None:
        ordinary = [*(bytes([byte]) for byte in letters), *(text.encode() for text in texts)]
        self.tokens = [*ordinary, *(token.encode() for token in tokens), b"<eos>"]
        self.special_token_ids = list(range(len(ordinary), len(self.tokens)))
        self.eos_token_id, self.bos_token_id = len(self.tokens) - 1, None
        self.specials = {token: len(ordinary) + at for at, token in enumerate(tokens)}
        self._ids = {bytes([byte]): at for at, byte in enumerate(letters)}

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


def takes(format: str, text: str, *, tokens: list[str], choice: ToolChoice = REQUIRED, **place: Any) -> bool:
    letters = Letters(tokens)
    made = load(format).grammar
    constraint = made(TOOLS, choice, GrammarContext(letters.specials, **place)) if made else None
    assert constraint is not None
    ids, matcher = letters.ids(text), letters.matcher(constraint)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


# Mistral's generations are told apart by their tokens: spelled out, they would be one.
SPELLINGS = [(name, by_token) for name in sorted(SPOKEN) for by_token in (True, False) if by_token or name != "mistral"]


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
    return SPOKEN[name][0] if by_token else []


def test_the_families_that_people_run_most_have_a_grammar() -> None:
    assert {name for name in names() if load(name).grammar} >= set(SPOKEN)


def test_it_takes_what_the_family_writes_and_the_scanner_reads(format: str, tokens: list[str]) -> None:
    raw = "".join(SPOKEN[format][2])
    assert takes(format, raw, tokens=tokens)
    calls = [(call.name, json.loads(call.arguments)) for call in parse(raw, format=format, tools=TOOLS).tool_calls]
    assert calls == WANTED[: len(calls)]
    assert calls


def test_reasoning_may_come_first(format: str, tokens: list[str]) -> None:
    _, (opening, closing), calls, _ = SPOKEN[format]
    assert takes(format, f"{opening}Let me see.{closing}{''.join(calls)}", tokens=tokens)
    assert not takes(format, f"Let me see.{closing}{''.join(calls)}", tokens=tokens)


def test_reasoning_that_the_prompt_opened_is_closed_first(format: str, tokens: list[str]) -> None:
    _, (_, closing), calls, _ = SPOKEN[format]
    assert takes(format, f"Let me see.{closing}{''.join(calls)}", tokens=tokens, thinking=True)
    assert not takes(format, "".join(calls), tokens=tokens, thinking=True)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("get_weather", "get_wether"), ("3", "true"), ("3", "30"), ("1.5", "null"), ("city", "town"), ("days", "dayz")],
)
def test_arguments_fit_the_schema(format: str, tokens: list[str], right: str, wrong: str) -> None:
    raw = "".join(SPOKEN[format][2])
    assert right in raw
    assert not takes(format, raw.replace(right, wrong, 1), tokens=tokens)


def test_text_is_no_call(format: str, tokens: list[str]) -> None:
    assert not takes(format, "It is sunny.", tokens=tokens)
    assert not takes(format, "", tokens=tokens)


def test_a_named_tool_is_the_only_one(format: str, tokens: list[str]) -> None:
    raw = "".join(SPOKEN[format][2])
    assert not takes(format, raw, tokens=tokens, choice=ToolChoice("named", "now"))


def test_one_call_is_one_where_parallel_ones_are_unwanted(format: str, tokens: list[str]) -> None:
    first, *more = SPOKEN[format][2]
    end = more[1] if len(more) > 1 else ""
    assert takes(format, first + end, tokens=tokens, parallel=False)
    if more:
        assert not takes(format, "".join([first, *more]), tokens=tokens, parallel=False)


def test_a_triggered_grammar_begins_after_its_trigger(format: str, tokens: list[str]) -> None:
    *_, calls, trigger = SPOKEN[format]
    grammar = load(format).grammar
    assert grammar
    made = grammar(TOOLS, AUTO)
    if not trigger:
        assert made is None
        return
    assert made
    assert made.trigger == trigger
    raw = "".join(calls) if len(calls) == 3 else calls[0]
    assert takes(format, raw.removeprefix(trigger), tokens=tokens, choice=AUTO)
    assert not takes(format, raw, tokens=tokens, choice=AUTO)


def test_older_mistral_writes_a_list() -> None:
    tokens = ["[TOOL_CALLS]", "[THINK]", "[/THINK]"]
    assert takes("mistral", OLD_MISTRAL, tokens=tokens)
    assert takes("mistral", OLD_MISTRAL.removeprefix("[TOOL_CALLS]"), tokens=tokens, choice=AUTO)


def test_nothing_to_call_needs_no_grammar(format: str) -> None:
    grammar = load(format).grammar
    assert grammar
    assert grammar(TOOLS[2:], REQUIRED) is None
    assert grammar(TOOLS, ToolChoice("named", "missing")) is None
    assert grammar(TOOLS, ToolChoice("none")) is None


def test_the_constraint_names_its_tools(format: str) -> None:
    grammar = load(format).grammar
    assert grammar
    made = grammar(TOOLS, REQUIRED)
    assert made
    assert (made.kind, made.trigger, made.tools) == ("lark", None, ("get_weather", "now"))


def test_a_custom_tool_gets_one_string() -> None:
    grammar = load("hermes").grammar
    made = grammar([Tool("patch", kind="custom")], REQUIRED) if grammar else None
    raw = '<tool_call>\n{"name": "patch", "arguments": {"input": "x"}}\n</tool_call>'
    assert made
    ids = Letters([]).ids(raw)
    assert Letters([]).matcher(made).try_consume_tokens(ids) == len(ids)


def test_names_that_need_quotes_are_quoted() -> None:
    odd = Tool('say "hi"\\', parameters={"type": "object", "properties": {'a"b': {"type": "integer"}}})
    for format in sorted(SPOKEN):
        grammar = load(format).grammar
        made = grammar([odd], REQUIRED) if grammar else None
        assert made
        Letters([]).matcher(made)


def test_a_text_with_tokens_is_spelled_with_them() -> None:
    lark = Lark(GrammarContext({"<a>": 7, "<a>b": 8}))
    assert lark.spelled('x<a>b"<a>') == '"x" <[8]> "\\"" <[7]>'
    assert lark.spelled("") == ""


# --- whatever it lets through -----------------------------------------------------------------------------------------

CLOSERS = ("\n</parameter>", "</parameter>", "</arg_value>", "</think>")


@pytest.mark.parametrize("tokens", [["<think>", "</think>"], []], ids=["tokens", "spellings"])
def test_an_answers_schema_holds_from_the_end_of_open_reasoning(tokens: list[str]) -> None:
    letters = Letters(tokens)
    made = after_reasoning(Constraint("json_object"), {"type": "object"}, "</think>", GrammarContext(letters.specials))

    def takes(text: str) -> bool:
        ids, matcher = letters.ids(text), letters.matcher(made)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    assert takes('Let me see {x.</think>\n\n{"a": 1}')
    assert takes('</think>{"a": [1, {}]}')
    assert not takes('{"a": 1}')
    assert not takes('Hm.</think>Here: {"a": 1}')


@pytest.mark.parametrize("seed", range(8))
def test_every_walk_through_the_grammar_is_a_valid_call(format: str, seed: int) -> None:
    chance = random.Random(f"{format} {seed}")
    tokens = SPOKEN[format][0]
    letters = Letters(tokens, tuple(text for text in CLOSERS if text not in tokens), bytes(range(32, 127)) + b"\n")
    grammar = load(format).grammar
    made = grammar(TOOLS, REQUIRED, GrammarContext(letters.specials)) if grammar else None
    assert made
    raw = _walk(letters, letters.matcher(made), chance)
    for call in (calls := parse(raw, format=format, tools=TOOLS).tool_calls):
        (tool,) = [tool for tool in TOOLS if tool.name == call.name]
        jsonschema.validate(json.loads(call.arguments), tool.parameters)
    assert calls, raw


@pytest.mark.parametrize("seed", range(3))
def test_every_walk_through_a_custom_tools_grammar_is_an_input_of_that_form(format: str, seed: int) -> None:
    chance = random.Random(f"{format} {seed}")
    tokens = SPOKEN[format][0]
    shortcuts = ("*** End Patch", "*** Add File: a", "@@", "\\n", *(text for text in CLOSERS if text not in tokens))
    letters = Letters(tokens, shortcuts, bytes(range(32, 127)) + b"\n")
    grammar = load(format).grammar
    made = grammar([APPLY_PATCH], REQUIRED, GrammarContext(letters.specials, False, False)) if grammar else None
    assert made
    raw = _walk(letters, letters.matcher(made), chance, "\n", "\\n", "*** End Patch")
    (call,) = parse(raw, format=format, tools=[APPLY_PATCH]).tool_calls
    assert is_patch(call.arguments), raw


def test_a_patch_is_taken_in_every_family(format: str, tokens: list[str]) -> None:
    """Written as the family writes it, in a JSON string or as it is."""
    letters = Letters(tokens)
    grammar = load(format).grammar
    made = grammar([APPLY_PATCH], REQUIRED, GrammarContext(letters.specials)) if grammar else None
    assert made
    for patch, right in ((PATCH, True), (PATCH.replace("@@ f()", "f()"), False)):
        ids = letters.ids(_called(format, patch))
        matcher = letters.matcher(made)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == right


def _called(format: str, patch: str) -> str:
    """The family's first call with another tool's name and arguments in it."""
    first, *more = SPOKEN[format][2]
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


def _walk(letters: Letters, matcher: Any, chance: random.Random, *closers: str) -> str:
    """Any token that the mask allows; those that close something more often, so that it ends."""
    said, ends = b"", [closer.encode() for closer in closers]
    for _ in range(3000):
        allowed = [at for at, bias in enumerate(matcher.compute_logit_bias()) if bias]
        if not allowed or (matcher.is_accepting() and chance.random() < 0.5):
            return said.decode()
        closing = [at for at in allowed if len(letters.tokens[at]) > 1 or letters.tokens[at] in (b'"', b"}", b"]")]
        closing = [at for at in allowed if letters.tokens[at] in ends] or closing if chance.random() < 0.7 else closing
        chosen = chance.choice(closing if closing and chance.random() < 0.5 else allowed)
        if chosen == letters.eos_token_id:
            return said.decode()
        assert matcher.consume_token(chosen), matcher.get_error()
        said += letters.tokens[chosen]
    raise AssertionError(f"the walk does not end: {said[-200:]!r}")
