"""Constrained output: every kind of constraint, triggers, and grammars that cannot be compiled."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from modelyard.core.engine import CacheInfo
from modelyard.core.errors import InvalidRequest, Unavailable, Unsupported
from modelyard.core.request import Constraint, Sampling
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.engines.llama_cpp.grammar_mask import GrammarMask, GrammarMasks, TriggeredMask
from modelyard.tokenizer.gguf import GgufTokenizer
from tests.engines.llama_cpp.helpers import answer, id_prompt, prompt, running, shared_loop, text_of, vocabulary
from tests.engines.reading import end, ids, logprobs, read
from tests.public_files import LLAMA_CPP, fetch
from tests.real_models import gemma, gemma_vocabulary

DATE = Constraint("regex", "[0-9]{4}-[0-9]{2}")


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = {
    "enum": closed(color={"enum": ["red", "green", "blue"]}, sure={"type": "boolean"}),
    "nested": closed(cat=closed(name={"type": "string", "maxLength": 12}, age={"type": "integer", "maximum": 30})),
    "array": closed(days={"type": "array", "items": {"enum": ["Mon", "Tue"]}, "minItems": 2, "maxItems": 3}),
    "minLength": closed(title={"type": "string", "minLength": 20, "maxLength": 40}),
    "reference": closed(at={"$ref": "#/$defs/p"}) | {"$defs": {"p": closed(x={"type": "number", "multipleOf": 0.5})}},
    "union": {"anyOf": [{"type": "null"}, closed(a={"const": 1})]},
}


# --- the kinds ------------------------------------------------------------------------------------------------------


@shared_loop
async def test_answers_match_their_schemas(engine: LlamaCppEngine) -> None:
    for schema in SCHEMAS.values():
        constraint = Constraint("json_schema", json.dumps(schema))
        got = await answer(engine, "Describe a cat as JSON.", constraint=constraint, max_tokens=64)
        assert end(got).reason == "stop"
        jsonschema.validate(json.loads(text_of(got)), schema)


async def test_schemas_hold_on_a_real_vocabulary_with_tags_and_line_breaks_among_its_262144_tokens() -> None:
    tokens = gemma_vocabulary()
    start = [tokens.bos, *tokens.encode("A cat as JSON:\n")]
    (tag,) = tokens.encode("<b>")
    exact = {"const": {"<b>": ["\t<b>Größe</b>\n\n", "猫🐈  </think>"]}}

    async def constrained(schema: dict[str, Any], **sampling: Any) -> tuple[Any, list[int]]:
        chosen = {"temperature": 0, "logit_bias": {tag: 100.0}} | sampling  # a tag wherever one is allowed
        held = {"constraint": Constraint("json_schema", json.dumps(schema)), "sampling": Sampling(**chosen)}
        got = await read(engine.generate(id_prompt(start, max_tokens=64, stop_ids=tuple(tokens.eos), **held)))
        assert (end(got).reason, end(got).error) == ("stop", None)
        jsonschema.validate(found := json.loads(tokens.decode(ids(got))), schema)
        return found, ids(got)

    async with running({"main": CacheInfo(256, 1)}, path=str(gemma())) as engine:
        await constrained(SCHEMAS["array"], logit_bias={})
        await constrained(SCHEMAS["nested"], temperature=2.0, seed=1)
        tagged, written = await constrained(SCHEMAS["minLength"])
        assert tagged["title"].startswith("<b>" * 10)
        assert written.count(tag) >= 10  # as the model writes it, not in pieces
        assert (await constrained(exact))[0] == exact["const"]


@shared_loop
@pytest.mark.parametrize(
    ("constraint", "wanted"),
    [
        (DATE, r"\d{4}-\d\d"),
        (Constraint("gbnf", 'root ::= answer "!"\nanswer ::= "yes" | "no" # or so'), "(yes|no)!"),
        (Constraint("lark", 'start: "N" NUMBER "."\nNUMBER: /[0-9]{1,3}/'), r"N\d{1,3}\."),
        (Constraint("lark", 'start: "猫" /[é🐈]{2}/'), "猫[é🐈]{2}"),
        (Constraint("tools", 'start: "now()"', tools=("now",)), r"now\(\)"),
    ],
)
async def test_answers_match_their_grammars(engine: LlamaCppEngine, constraint: Constraint, wanted: str) -> None:
    got = await answer(engine, "Well?", constraint=constraint, max_tokens=24)
    assert end(got).reason == "stop"
    assert re.fullmatch(wanted, text_of(got))


@shared_loop
async def test_a_json_object_constraint_gives_a_json_object(engine: LlamaCppEngine) -> None:
    question = "Give me a JSON object with a name and an age."
    got = await answer(engine, question, constraint=Constraint("json_object"), max_tokens=48)
    assert isinstance(json.loads(text_of(got)), dict)


@shared_loop
async def test_an_answer_may_end_or_continue_if_the_grammar_allows_both(engine: LlamaCppEngine) -> None:
    stops = tuple(vocabulary().eos)
    got = await answer(engine, "Say yes.", constraint=Constraint("regex", "[Yy]es.*"), stop_ids=stops, max_tokens=4)
    ended = await answer(engine, "Say a.", constraint=Constraint("regex", "a(xyz)?"), stop_ids=stops, max_tokens=4)
    assert text_of(got).lower().startswith("yes")
    assert text_of(ended) in ("a", "axyz")


# --- beside everything else -----------------------------------------------------------------------------------------


@shared_loop
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=2.0, seed=1),
        Sampling(typical_p=0.5, seed=1),
        Sampling(top_p=0.5, top_k=20, min_p=0.1, seed=1),
        Sampling(mirostat=1, seed=1),
        Sampling(mirostat=2, seed=1),
        Sampling(xtc_probability=1.0, xtc_threshold=0.05, seed=1),
        Sampling(repetition_penalty=1.5, dry_multiplier=1.0, logit_bias={30: 100.0}, seed=1),
    ],
)
async def test_every_sampler_follows_the_grammar(engine: LlamaCppEngine, sampling: Sampling) -> None:
    got = await answer(engine, "When?", constraint=DATE, sampling=sampling, max_tokens=12)
    assert re.fullmatch(r"\d{4}-\d\d", text_of(got))


@shared_loop
async def test_logprobs_are_those_before_the_mask(engine: LlamaCppEngine) -> None:
    (free,) = logprobs(await answer(engine, "Say hello.", max_tokens=1, logprobs=3))
    held, *_ = logprobs(await answer(engine, "Say hello.", constraint=DATE, max_tokens=1, logprobs=3))
    assert [id for id, _ in held.top] == [id for id, _ in free.top]
    assert held.id not in dict(held.top)
    assert held.logprob < free.logprob


async def test_a_constraint_does_not_affect_other_streams() -> None:
    async with running({"main": CacheInfo(256, 2)}) as engine:
        alone = ids(await answer(engine, "Name a colour.", max_tokens=6))
        stream = engine.generate(prompt("Name a colour.", max_tokens=6))
        held = engine.generate(prompt("When?", constraint=DATE, max_tokens=12))
        assert ids(await read(stream))[:2] == alone[:2]
        assert re.fullmatch(r"\d{4}-\d\d", text_of(await read(held)))


@shared_loop
async def test_a_compiled_grammar_is_reused_from_its_start(engine: LlamaCppEngine) -> None:
    first, second = [text_of(await answer(engine, "When?", constraint=DATE, max_tokens=12)) for _ in range(2)]
    assert first == second


# --- triggers -------------------------------------------------------------------------------------------------------


@shared_loop
async def test_a_trigger_constrains_what_follows_until_the_grammar_is_complete(engine: LlamaCppEngine) -> None:
    constraint = Constraint("lark", 'start: " is a " ("city" | "town") "!"', trigger="Paris")
    (paris,) = vocabulary().encode_plain(" Paris")
    nothing_else = Sampling(temperature=0, logit_bias={paris: 100.0})  # wherever the choice is free
    got = await answer(engine, "Hello!", constraint=constraint, max_tokens=18, sampling=nothing_else)
    assert re.fullmatch("( Paris is a (city|town)!){2,}( Paris.*)?", text_of(got))


@shared_loop
async def test_a_triggered_grammar_that_cannot_be_compiled_is_dropped(
    engine: LlamaCppEngine, caplog: pytest.LogCaptureFixture
) -> None:
    constraint = Constraint("lark", 'start: "(', trigger="Hello", tools=("look_at",))
    with caplog.at_level(logging.WARNING):
        got = await answer(engine, constraint=constraint, max_tokens=2)
    assert ids(got) == ids(await answer(engine, max_tokens=2))
    assert "calls of look_at are unconstrained" in caplog.text


@cache
def masks() -> GrammarMasks:
    """Reading the vocabulary takes a second."""
    return GrammarMasks(vocabulary()._vocab, vocabulary().size)


@pytest.fixture(autouse=True, scope="module")
def closed_masks() -> Iterator[None]:
    yield
    masks().close()


def compiled(constraint: Constraint) -> Any:
    mask = masks().create(constraint)
    assert mask is not None
    return mask


def write(mask: GrammarMask | TriggeredMask, *wanted: int) -> int:
    """Samples greedily; the logits prefer `wanted`, in order."""
    logits = np.zeros(vocabulary().size, np.float32)
    for rank, token in enumerate(wanted):
        logits[token] = len(wanted) - rank
    choose: Callable[[], int] = lambda: int(logits.argmax())  # noqa: E731
    return mask.sample(logits, choose)


def token(text: str) -> int:
    (id,) = vocabulary().encode(text)
    return id


def test_a_token_may_complete_the_trigger_and_begin_the_grammar() -> None:
    mask = compiled(Constraint("regex", ":[0-9]", trigger="go:"))
    assert write(mask, token("go")) == token("go")
    assert write(mask, token("::")) == token("::")
    assert write(mask, token("x"), token("7")) == token("7")
    assert write(mask, token("x")) == token("x")


def test_a_token_that_completes_the_trigger_with_forbidden_text_is_skipped() -> None:
    mask = compiled(Constraint("regex", "[0-9]", trigger="go:"))
    write(mask, token("go"))
    assert write(mask, token("::"), token(":")) == token(":")
    assert write(mask, token("x"), token("7")) == token("7")


def test_a_trigger_may_be_a_control_token() -> None:
    start = vocabulary().specials["<|im_start|>"]
    mask = compiled(Constraint("regex", "[0-9]", trigger="<|im_start|>"))
    assert write(mask, start) == start
    assert write(mask, token("x"), token("7")) == token("7")
    assert write(mask, start) == start
    assert write(mask, token("x"), token("7")) == token("7")


def test_strings_of_a_grammar_never_match_control_tokens() -> None:
    start = vocabulary().specials["<|im_start|>"]
    assert write(compiled(Constraint("regex", "(?s:.+)")), start, token("x")) == token("x")
    assert write(compiled(Constraint("lark", f"start: <[{start}]>")), token("x"), start) == start
    assert write(compiled(Constraint("lark", "start: <|im_start|>")), token("x"), start) == start


def test_accented_letters_among_the_added_tokens_are_text_and_padding_is_not() -> None:
    files = fetch(LLAMA_CPP) / "vendor/llama.cpp/models"
    for name, text, other in (
        ("deepseek-llm", "ö", "<｜begin▁of▁sentence｜>"),
        ("command-r", "<", "[PAD255029]"),
    ):
        tokens = GgufTokenizer(files / f"ggml-vocab-{name}.gguf")
        made = GrammarMasks(tokens._vocab, tokens.size)
        try:
            mask = made.create(Constraint("regex", "(?s:.+)"))
            assert isinstance(mask, GrammarMask)
            (letter,) = tokens.encode_plain(text)
            hidden = (tokens.specials | tokens.added)[other]
            assert mask.count_valid([letter]) == 1
            assert mask.count_valid([hidden]) == 0
        finally:
            made.close()


# --- what cannot be done --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "words", "param"),
    [
        (Constraint("regex", "(a"), "unclosed group", "regex"),
        (Constraint("gbnf", "root ::= ("), "Expected '\\)'", "grammar"),
        (Constraint("gbnf", "root ::= other"), "Rule 'other' not found", "grammar"),
        (Constraint("gbnf", ""), "No 'root' rule", "grammar"),
        (Constraint("lark", "start: other"), "unknown name", "lark"),
        (Constraint("json_schema", "{"), "EOF", "response_format"),
        (Constraint("json_schema", '{"type": "integer", "minimum": 2, "maximum": 1}'), "minimum", "response_format"),
        (Constraint("lark", 'start: "', tools=("now",)), "lexer error", "tools"),
    ],
)
def test_a_bad_grammar_is_refused_with_the_compilers_reason(constraint: Constraint, words: str, param: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        compiled(constraint)
    assert (caught.value.code, caught.value.param) == ("bad_grammar", param)


def chain(length: int) -> Constraint:
    """A schema of definitions that each refer to the next."""
    defs: dict[str, Any] = {f"a{i}": closed(x={"$ref": f"#/$defs/a{i + 1}"}) for i in range(length)}
    return Constraint("json_schema", json.dumps({"$ref": "#/$defs/a0", "$defs": {**defs, f"a{length}": {}}}))


def test_the_deepest_allowed_grammar_does_not_exhaust_the_stack() -> None:
    masks = GrammarMasks(vocabulary()._vocab, vocabulary().size)
    try:
        mask = masks.submit(lambda: masks.create(chain(1500))).result()
        assert mask is not None
        assert write(mask, token("x"), token('{"')) == token('{"')
    finally:
        masks.close()


@pytest.mark.parametrize("constraint", [chain(5000), Constraint("gbnf", 'root ::= "a"' + "\n" * 40_000)])
def test_a_grammar_that_is_too_long_is_refused(constraint: Constraint) -> None:
    with pytest.raises(InvalidRequest, match="is longer than"):
        compiled(constraint)


def test_a_required_tool_call_without_a_grammar_is_refused() -> None:
    with pytest.raises(Unsupported, match="has no grammar"):
        compiled(Constraint("tools", tools=("now",)))


@shared_loop
async def test_a_bad_grammar_fails_only_its_job(engine: LlamaCppEngine) -> None:
    got = await answer(engine, constraint=Constraint("regex", "(a"))
    assert isinstance(end(got).error, InvalidRequest)
    assert ids(await answer(engine, max_tokens=1))


async def test_jobs_fail_if_the_engine_closes_while_their_grammar_compiles() -> None:
    async with running() as engine:
        waiting = [engine.generate(prompt(constraint=DATE)) for _ in range(3)]
        await engine.close()
        for one in waiting:
            assert isinstance(end(await read(one)).error, Unavailable)


@shared_loop
async def test_a_job_cancelled_while_its_grammar_compiles_is_not_started(engine: LlamaCppEngine) -> None:
    job = engine.generate(prompt(constraint=DATE))
    job.cancel()
    assert end(await read(job)).reason == "cancelled"
    assert engine.stats().running == 0


@shared_loop
async def test_the_engine_reports_structured_output(engine: LlamaCppEngine) -> None:
    assert engine.info.capabilities.structured
