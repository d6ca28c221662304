"""What an engine says that it can do it does, and what it cannot it refuses: adapters, and answers of a given form."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from modelyard.core.engine import Chunk, Control, Generation
from modelyard.core.errors import ModelyardError, Unsupported
from modelyard.core.request import Constraint
from tests.engines.conformance.abilities import assert_declared
from tests.engines.conformance.conftest import Open
from tests.engines.conformance.subjects import Subject, keeps_blocks, prompt, reread
from tests.engines.reading import accepted, assert_alike, end, ids, logprobs, read

LAW = (("law", 1.0),)
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["color", "sure"],
    "additionalProperties": False,
}
FORM = Constraint("json_schema", json.dumps(SCHEMA))


async def test_adapter_is_heard_while_it_is_worn_and_at_no_other_time(
    subject: Subject, opened: Open, tmp_path: Path
) -> None:
    engine = await opened(parallel=1)
    if not engine.info.capabilities.lora:
        await _refused(engine.generate(prompt(subject, adapters=LAW)))
        return
    file = subject.adapter(tmp_path)
    before = await read(engine.generate(prompt(subject)))
    await engine.control(Control("load_adapter", argument=f"law={file}"))
    worn = await read(engine.generate(prompt(subject, adapters=LAW)))
    after = await read(engine.generate(prompt(subject)))
    await engine.control(Control("unload_adapter", argument="law"))
    assert_alike(before, after, subject.tolerance)
    assert_alike(before, await read(engine.generate(prompt(subject))), subject.tolerance)
    if file is not None:
        assert _differ(before, worn, subject.tolerance)
        own = reread(subject, prompt(subject).n_tokens) if keeps_blocks(subject) else 0  # of `before`, beside the other
        assert (accepted(worn).cached_tokens, accepted(after).cached_tokens) == (0, own), "KV is of one adapter"


def _differ(one: list[Chunk], other: list[Chunk], tolerance: float) -> bool:
    return ids(one) != ids(other) or abs(logprobs(one)[0].logprob - logprobs(other)[0].logprob) > tolerance


@pytest.mark.parametrize("text", ["Which color do you like best?", "Say nothing at all."])
async def test_answer_has_the_form_that_was_asked_for(subject: Subject, opened: Open, text: str) -> None:
    engine = await opened()
    asked = prompt(subject, text, constraint=FORM, max_tokens=64)
    if not engine.info.capabilities.structured:
        await _refused(engine.generate(asked))
        return
    chunks = await read(engine.generate(asked))
    assert end(chunks).reason == "stop"
    jsonschema.validate(json.loads(subject.vocabulary.decode(ids(chunks))), SCHEMA)


async def test_form_of_one_answer_does_not_bind_another(subject: Subject, opened: Open) -> None:
    engine = await opened(parallel=2)
    if not engine.info.capabilities.structured:
        await _refused(engine.generate(prompt(subject, constraint=FORM)))
        return
    alone = await read(engine.generate(prompt(subject, session="a")))
    jobs = [engine.generate(prompt(subject, session="b", constraint=FORM, max_tokens=64))]
    jobs.append(engine.generate(prompt(subject, session="a")))
    bound, free = [await read(job) for job in jobs]
    jsonschema.validate(json.loads(subject.vocabulary.decode(ids(bound))), SCHEMA)
    assert_alike(alone, free, subject.tolerance)


async def _refused(job: Generation[Chunk]) -> None:
    error: ModelyardError | None = end(await read(job)).error
    assert isinstance(error, Unsupported)


async def test_it_promises_no_more_than_its_module_declares(opened: Open) -> None:
    assert_declared((await opened(window=64)).info)
