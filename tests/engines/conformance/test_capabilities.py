"""Every text engine does what it declares and refuses the rest: LoRA adapters and constrained answers."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from modelyard.core.engine import Chunk, Control, Generation
from modelyard.core.errors import ModelyardError, Unsupported
from modelyard.core.request import Constraint
from tests.engines.conformance.conftest import Open
from tests.engines.conformance.subjects import Subject, assert_declared, prompt, reusable_tokens
from tests.engines.reading import accepted, assert_alike, end, ids, logprobs, read

pytestmark = pytest.mark.asyncio(loop_scope="package")

ADAPTERS = (("law", 1.0),)
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["color", "sure"],
    "additionalProperties": False,
}
CONSTRAINT = Constraint("json_schema", json.dumps(SCHEMA))


async def test_adapter_changes_only_the_jobs_that_use_it(subject: Subject, opened: Open, tmp_path: Path) -> None:
    engine = await opened(parallel=1)
    if not engine.info.capabilities.lora:
        await _assert_unsupported(engine.generate(prompt(subject, adapters=ADAPTERS)))
        return
    file = subject.write_adapter(tmp_path)
    if subject.is_behind_worker:
        with pytest.raises(Unsupported, match="own configuration"):
            await engine.control(Control("load_adapter", argument=f"law={file}"))
        return
    before = await read(engine.generate(prompt(subject)))
    await engine.control(Control("load_adapter", argument=f"law={file}"))
    adapted = await read(engine.generate(prompt(subject, adapters=ADAPTERS)))
    after = await read(engine.generate(prompt(subject)))
    await engine.control(Control("unload_adapter", argument="law"))
    assert_alike(before, after, subject.tolerance)
    assert_alike(before, await read(engine.generate(prompt(subject))), subject.tolerance)
    if file is not None:
        assert _differ(before, adapted, subject.tolerance)
        # A block cache still has the KV of `before`.
        cached = reusable_tokens(subject, prompt(subject).n_tokens) if subject.block else 0
        assert (accepted(adapted).cached_tokens, accepted(after).cached_tokens) == (0, cached), "adapters share no KV"


def _differ(one: list[Chunk], other: list[Chunk], tolerance: float) -> bool:
    return ids(one) != ids(other) or abs(logprobs(one)[0].logprob - logprobs(other)[0].logprob) > tolerance


@pytest.mark.parametrize("text", ["Which color do you like best?", "Say nothing at all."])
async def test_answer_satisfies_its_json_schema(subject: Subject, opened: Open, text: str) -> None:
    engine = await opened()
    constrained = prompt(subject, text, constraint=CONSTRAINT, max_tokens=64)
    if not engine.info.capabilities.structured:
        await _assert_unsupported(engine.generate(constrained))
        return
    chunks = await read(engine.generate(constrained))
    assert end(chunks).reason == "stop"
    jsonschema.validate(json.loads(subject.tokenizer.decode(ids(chunks))), SCHEMA)


async def test_constraint_of_one_job_does_not_affect_another(subject: Subject, opened: Open) -> None:
    engine = await opened(parallel=2)
    if not engine.info.capabilities.structured:
        await _assert_unsupported(engine.generate(prompt(subject, constraint=CONSTRAINT)))
        return
    alone = await read(engine.generate(prompt(subject, session="a")))
    jobs = [engine.generate(prompt(subject, session="b", constraint=CONSTRAINT, max_tokens=64))]
    jobs.append(engine.generate(prompt(subject, session="a")))
    constrained, free = [await read(job) for job in jobs]
    jsonschema.validate(json.loads(subject.tokenizer.decode(ids(constrained))), SCHEMA)
    assert_alike(alone, free, subject.tolerance)


async def _assert_unsupported(job: Generation[Chunk]) -> None:
    error: ModelyardError | None = end(await read(job)).error
    assert isinstance(error, Unsupported)


async def test_engine_claims_no_more_than_its_module_declares(opened: Open) -> None:
    assert_declared((await opened()).info)
