"""Orders to engines and questions that need no place: what a worker does with them."""

from __future__ import annotations

from collections.abc import Callable

from modelyard.core.engine import EmbeddingEngine, Engine, TextEngine
from modelyard.core.errors import Unsupported
from modelyard.workers.hosted import Hosted
from modelyard.workers.messages import Count, Done, Embed, Order, Study
from modelyard.workers.packing import pack_vector, unpack_ids
from modelyard.workers.tokenizer import name_of

Question = Order | Embed | Count | Study
Read = tuple[Question, list[list[int]]]


def read_question(question: Question) -> Read:
    """Raises Malformed, in the same breath as it was heard."""
    return question, [unpack_ids(ids) for ids in question.batch] if isinstance(question, Embed) else []


async def answered(read: Read, find: Callable[[str], tuple[Hosted, Engine]]) -> Done:
    question, batch = read
    (hosted, engine), id = find(question.engine), question.request_id
    if isinstance(question, Study):
        files = await hosted.tokenizer()
        name = name_of(files)
        return Done(id, tokenizer=name, files={} if name in question.have else files)
    if isinstance(question, Order):
        if not isinstance(engine, TextEngine):
            raise Unsupported(f"the engine {question.engine!r} takes no orders")
        await engine.control(question.control)
        return Done(id, stats={question.engine: engine.stats()})
    if isinstance(question, Embed):
        if not isinstance(engine, EmbeddingEngine):
            raise Unsupported(f"the engine {question.engine!r} makes no embeddings", code="embeddings_unsupported")
        made = await engine.embed(batch)
        return Done(id, None, [pack_vector(vector) for vector in made.vectors], made.prompt_tokens)
    if isinstance(engine, TextEngine):
        raise Unsupported(f"the engine {question.engine!r} takes tokens: there is nothing to count")
    return Done(id, tokens=await engine.count(question.request))
