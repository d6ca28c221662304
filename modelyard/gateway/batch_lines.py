"""The lines of a batch: found in its file, counted in a process of the pool, read one by one.

A file of 200 MB may have a hundred million lines, or one. So what is done at once is bounded, and the event loop runs
on in between.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from modelyard.core.batch import Batch, BatchLine, BatchRow, LineFault
from modelyard.core.protocol import INLINE_BYTES
from modelyard.gateway.request_work import run_in_request_thread
from modelyard.processes.sandbox import Limits, pool, sandboxed
from modelyard.protocols import openai_batches
from modelyard.protocols.anthropic_messages.batches import read_batch_line

_BLOCK = 8 << 20  # bytes that are counted at once
_AT_ONCE = 256  # lines
TOO_LONG = b"\0"  # stands for a line that is longer than a request may be


async def read_lines(chunks: AsyncIterator[bytes], limit: int) -> AsyncIterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers, counted from 1."""
    number, rest = 0, bytearray()
    async for chunk in chunks:
        *ends, last = chunk.split(b"\n")
        for end in ends:
            number += 1
            line = _joined(rest, end, limit)
            rest = bytearray()
            if line.strip():
                yield number, line
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
        rest = bytearray(_joined(rest, last, limit))
    if rest.strip():
        yield number + 1, bytes(rest)


def _joined(start: bytearray, end: bytes, limit: int) -> bytes:
    if start == TOO_LONG or len(start) + len(end) > limit:
        return TOO_LONG
    return bytes(start + end) if start else end


async def survey(batch: Batch, chunks: AsyncIterator[bytes], most: int, limit: int) -> tuple[int, str | None]:
    """The number of lines, and the model of the first one that can be read. Stops after `most` lines."""
    total, model, block, rest = 0, None, bytearray(), b""

    async def count(data: bytes) -> None:
        nonlocal total, model
        counted, found = await pool.run(count_lines, batch.api, batch.endpoint, data, most - total)
        total, model = total + counted, model or found

    async for chunk in chunks:
        whole, newline, last = chunk.rpartition(b"\n")
        if newline:
            first, newline, others = whole.partition(b"\n")
            block += _joined(bytearray(rest), first, limit) + b"\n" + others + newline
            rest = b""
        rest = _joined(bytearray(rest), last, limit)
        if len(block) >= _BLOCK:
            await count(bytes(block))
            block.clear()
            if total > most:
                return total, model
    await count(bytes(block) + rest)
    return total, model


@sandboxed(Limits(cpu_s=30, wall_s=120, memory=1 << 30))
def count_lines(api: str, endpoint: str, data: bytes, most: int) -> tuple[int, str | None]:
    total, model = 0, None
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        total += 1
        if model is None:
            with contextlib.suppress(LineFault):
                model = openai_batches.read_line_model(_read(api, endpoint, line).body)
        if total > most:
            break
    return total, model


def _read(api: str, endpoint: str, line: bytes) -> BatchLine:
    if line == TOO_LONG:
        raise LineFault("request_too_large", "the line is longer than a request may be (http.max_body_bytes)")
    return openai_batches.read_line(line, endpoint) if api == "openai" else read_batch_line(line)


async def read_line(batch: Batch, line: bytes, number: int, seen: set[str]) -> BatchLine | BatchRow:
    """A line that cannot be run has its result at once. `seen` are the ids of the lines before it."""
    try:
        if len(line) > INLINE_BYTES:
            read = await run_in_request_thread(_read, batch.api, batch.endpoint, line)
        else:
            read = _read(batch.api, batch.endpoint, line)
        if read.custom_id in seen:
            raise LineFault("duplicate_custom_id", f"the custom_id {read.custom_id!r} is used twice", read.custom_id)
    except LineFault as fault:
        message = f"line {number}: {fault.message}"
        return BatchRow(number, fault.custom_id, "errored", code=fault.code, message=message)
    seen.add(read.custom_id)
    return read
