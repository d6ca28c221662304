"""The lines of a batch: found in its file and read one by one.

A file of 200 MB may have a hundred million lines, or one. So what is done at once is bounded, and the event loop runs
on in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from modelyard.core.batch import Batch, BatchLine, BatchRow, LineFault
from modelyard.gateway.request_work import run_sized
from modelyard.protocols import openai_batches
from modelyard.protocols.anthropic_messages.batches import read_batch_line

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


def _read(batch: Batch, line: bytes) -> BatchLine:
    if line == TOO_LONG:
        raise LineFault("request_too_large", "the line is longer than a request may be (http.max_body_bytes)")
    return openai_batches.read_line(line, batch.endpoint) if batch.api == "openai" else read_batch_line(line)


async def read_line(batch: Batch, line: bytes, number: int, seen: set[str]) -> BatchLine | BatchRow:
    """A line that cannot be run has its result at once. `seen` are the ids of the lines before it."""
    try:
        read = await run_sized(len(line), _read, batch, line)
        if read.custom_id in seen:
            raise LineFault("duplicate_custom_id", f"the custom_id {read.custom_id!r} is used twice", read.custom_id)
    except LineFault as fault:
        message = f"line {number}: {fault.message}"
        return BatchRow(number, fault.custom_id, "errored", code=fault.code, message=message)
    seen.add(read.custom_id)
    return read
