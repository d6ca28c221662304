"""A trial from the inside: `python -m modelyard.tune.child ORDER ANSWER` loads one model, measures it, and ends.

It is a process of its own because settings can kill: whatever happens in here costs one trial. Its answer is a file
that is there whole or not at all.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import msgspec

from modelyard import plugins
from modelyard.benchmark.load import ChatTarget, EngineTarget, LoadGenerator, LoadTarget, Round, RoundLength
from modelyard.benchmark.workload import Workload
from modelyard.config.engine_options import engine_spec
from modelyard.config.settings import Config
from modelyard.core.engine import Engine, TextEngine
from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.core.knobs import Loss
from modelyard.gateway.model import Model
from modelyard.router.catalog import ModelEntry
from modelyard.server.engine_factory import blueprint
from modelyard.server.model_definition import define
from modelyard.telemetry.system import read_memory
from modelyard.tune.order import Benched, Failure, FailureKind, Figures, Judged, Order, Outcome
from modelyard.tune.text import TEXT

_WARM = 16  # tokens of an answer that nobody measures


def main(argv: Sequence[str]) -> None:
    order = msgspec.json.decode(Path(argv[0]).read_bytes(), type=Order)
    answer, unfinished = Path(argv[1]), Path(argv[1] + ".part")
    unfinished.write_bytes(msgspec.json.encode(carried_out(order)))
    unfinished.rename(answer)


def carried_out(order: Order) -> Outcome:
    try:
        if order.bench:
            return _benched(order)
        return asyncio.run(_measured(order)) if order.reference is None else Judged(_loss(order, order.reference))
    except MemoryError:
        return Failure("memory", "Python could not get what it asked for")
    except ModelyardError as error:
        return Failure(_kind(error), error.message)


def _kind(error: ModelyardError) -> FailureKind:
    said = error.message.lower()
    short = error.code == "model_too_large" or ("alloc" in said and ("fail" in said or "unable" in said))
    return "memory" if short or "out of memory" in said else "refused"


# --- speed ------------------------------------------------------------------------------------------------------------


async def _measured(order: Order) -> Outcome:
    entry, engine, model = _made(order)
    began = time.perf_counter()
    gpus = sum(gpu.used for gpu in read_memory().gpus)
    try:
        await engine.open(lambda *_: None)
        load_s = time.perf_counter() - began
        one = await _loaded(order, entry, _load(order, entry, engine, model))
        memory = read_memory()
        taken = memory.ram_used_here + max(0, sum(gpu.used for gpu in memory.gpus) - gpus)
    finally:
        await engine.close()
    return figures(one, taken, load_s)


def _made(order: Order) -> tuple[ModelEntry, Engine, Model]:
    config = Config.model_validate(order.config)
    entry, settings = config.router().catalog.models[order.model], config.models[order.model]
    model = define(entry, settings).model
    if model.fault is not None:
        raise model.fault
    return entry, blueprint(config, entry).make(), model


def _load(order: Order, entry: ModelEntry, engine: Engine, model: Model) -> LoadTarget:
    if isinstance(engine, TextEngine):
        vocab = model.pipeline.tokenizer
        return EngineTarget(engine, vocab, cache=entry.default_cache, limit_s=order.answer_s)
    return ChatTarget(engine, entry.name, limit_s=order.answer_s)


async def _loaded(order: Order, entry: ModelEntry, load: LoadTarget) -> Round:
    """The same answers for every setting: where fewer fit at a time, more come one after the other."""
    info = entry.caches[entry.default_cache].info
    workload = fitted(order.workload, info.window)
    streams = min(workload.streams, info.parallel)
    warm = msgspec.structs.replace(workload, prompt_tokens=_WARM, output_tokens=_WARM, turns=1)
    await LoadGenerator(load, warm, streams=streams, seed=order.seed, key=f"warm {order.key}").run()
    rounds = max(1, order.conversations * workload.streams // streams)
    return await LoadGenerator(
        load, workload, RoundLength(conversations=rounds), streams=streams, seed=order.seed, key=order.key
    ).run()


def fitted(workload: Workload, window: int) -> Workload:
    """With a shorter prompt where the window is small; one that cannot hold even that says so."""
    over = workload.context_tokens - (window - 1)
    if over <= 0:
        return workload
    if workload.prompt_tokens - over < _WARM:
        raise Unavailable(f"a window of {window} tokens is too small for the workload {workload.name!r}")
    return msgspec.structs.replace(workload, prompt_tokens=workload.prompt_tokens - over)


def figures(one: Round, memory: int, load_s: float) -> Figures | Failure:
    """The medians of single answers: one that another program got in the way of does not count."""
    good = [sample for sample in one.succeeded if sample.ttft_s is not None]
    if errors := [sample.error for sample in one.samples if sample.error is not None]:
        return Failure("errors", f"{len(errors)} of {len(one.samples)} answers failed, the first with: {errors[0]}")
    if not good:
        return Failure("errors", "no answer had a single token")
    rates = [rate for sample in good if (rate := sample.rate) is not None]
    alone = median(rates) if rates else one.tokens_per_s
    return Figures(
        speed=one.tokens_per_s if one.streams > 1 else alone,
        ttft_s=fmean(sample.ttft_s or 0.0 for sample in good),
        answer_s=median(sample.total_s for sample in good),
        memory=memory,
        load_s=load_s,
        wall_s=one.wall_s,
    )


def _benched(order: Order) -> Benched:
    config = Config.model_validate(order.config)
    entry, settings = config.router().catalog.models[order.model], config.models[order.model]
    own = importlib.import_module(f"modelyard.engines.{entry.backend}.bench")
    workload = order.workload
    return Benched(*own.bench(engine_spec(entry, settings), workload.prompt_tokens, workload.output_tokens))


# --- quality ----------------------------------------------------------------------------------------------------------


def _loss(order: Order, reference: dict[str, object]) -> Loss:
    """What the numbers of these settings lose on our own text beside those of the reference."""
    specs = []
    for raw in (order.config, reference):
        config = Config.model_validate(raw)
        entry, settings = config.router().catalog.models[order.model], config.models[order.model]
        specs.append(engine_spec(entry, settings))
    model = define(entry, settings).model
    if model.fault is not None:
        raise model.fault
    vocab = model.pipeline.tokenizer
    ids = [*([] if vocab.bos is None else [vocab.bos]), *vocab.encode_plain(TEXT)]
    plugins.verify(plugins.load("engines", entry.backend))
    judge = importlib.import_module(f"modelyard.engines.{entry.backend}.loss")
    found: Loss = judge.loss(*specs, ids)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
