"""The lines of a batch: children of the pool find, count and read them.

A file of 200 MB may have a hundred million lines, or one, and all of it is a client's. So this process cuts it into
blocks of whole lines without looking at them, and gets back as many lines at a time as it can start soon.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from modelyard.core.batch import Batch, BatchLine, BatchRow, LineFault
from modelyard.core.errors import InvalidRequest
from modelyard.processes.sandbox import Limits, Stopped, pool, sandboxed
from modelyard.protocols import openai_batches
from modelyard.protocols.anthropic_messages.batches import read_batch_line, read_batch_requests, write_batch_line

_AT_ONCE = 256  # lines that are read
_TOO_LONG = b"\0"  # stands for a line that is longer than a request may be
_LIMITS = Limits(cpu_s=20, wall_s=60, memory=1 << 30)


async def blocks(chunks: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes]:
    """Whole lines. `limit` is the most bytes of one: of a longer one only a mark is left, so that memory is bounded."""
    rest, is_cut = bytearray(), False
    async for chunk in chunks:
        end = chunk.rfind(b"\n") + 1
        if is_cut and not end:
            continue
        rest += chunk[chunk.find(b"\n") :] if is_cut else chunk
        is_cut = False
        if end:
            left = len(chunk) - end
            yield bytes(rest[: len(rest) - left])
            del rest[: len(rest) - left]
        elif len(rest) > limit:
            rest, is_cut = bytearray(_TOO_LONG), True
    if rest:
        yield bytes(rest)


async def count_lines(chunks: AsyncIterator[bytes], batch: Batch, limit: int, most: int) -> tuple[int, str | None]:
    """How many lines are not empty, up to `most` and one more; and the model of one of the first that can be read."""
    total, model = 0, None
    async for block in blocks(chunks, limit):
        found, named = await pool.run(count_block, block, batch.api, batch.endpoint, most - total, total == 0)
        total, model = total + found, model or named
        if total > most:
            break
    return total, model


async def read_lines(
    chunks: AsyncIterator[bytes], batch: Batch, limit: int
) -> AsyncIterator[tuple[int, BatchLine | BatchRow]]:
    """The lines that are not empty, with their numbers, counted from 1. One that cannot be run has its result."""
    number = 1
    async for block in blocks(chunks, limit):
        left = block
        while left:
            read, used, lines = await pool.run(read_block, left, batch.api, batch.endpoint, limit)
            for at, custom_id, body, code, message in read:
                if body is not None and custom_id is not None:
                    yield number + at, BatchLine(custom_id, body)
                else:
                    problem = f"line {number + at}: {message}"
                    yield number + at, BatchRow(number + at, custom_id, "errored", code=code, message=problem)
            left, number = left[used:], number + lines


async def split_requests(body: bytes, most: int) -> tuple[int, bytes]:
    """How many requests a batch of Messages has, and their lines."""
    try:
        count, lines = await pool.run(split_body, body, most)
    except Stopped as stopped:
        raise InvalidRequest(f"the requests cannot be read: {stopped.why}; send fewer in a batch") from None
    return count, lines


# --- in a child of the pool -------------------------------------------------------------------------------------------


def _lines(block: bytes) -> Iterator[tuple[int, bytes]]:
    """Each with where the next one begins."""
    at = 0
    while at < len(block):
        end = block.find(b"\n", at)
        end = len(block) if end < 0 else end
        yield end + 1, block[at:end]
        at = end + 1


def _read(api: str, endpoint: str, line: bytes) -> BatchLine:
    return openai_batches.read_line(line, endpoint) if api == "openai" else read_batch_line(line)


@sandboxed(_LIMITS)
def count_block(block: bytes, api: str, endpoint: str, most: int, wants_model: bool) -> tuple[int, str | None]:
    count, model = 0, None
    for _, line in _lines(block):
        if not line.strip():
            continue
        if (count := count + 1) > most:
            break
        if wants_model and count <= _AT_ONCE and line != _TOO_LONG:
            try:
                model, wants_model = openai_batches.read_line_model(_read(api, endpoint, line).body), False
            except LineFault:
                continue
    return count, model


@sandboxed(_LIMITS)
def read_block(
    block: bytes, api: str, endpoint: str, limit: int
) -> tuple[list[tuple[int, str | None, bytes | None, str, str]], int, int]:
    """The first lines, each with its place among all, its id, and its body or what is wrong with it; how many bytes of
    the block, and how many lines, were read."""
    read: list[tuple[int, str | None, bytes | None, str, str]] = []
    used = count = 0
    for end, line in _lines(block):
        if line.strip():
            try:
                if line == _TOO_LONG or len(line) > limit:
                    problem = "the line is longer than a request may be (http.max_body_bytes)"
                    raise LineFault("request_too_large", problem)
                found = _read(api, endpoint, line)
                read.append((count, found.custom_id, found.body, "", ""))
            except LineFault as fault:
                read.append((count, fault.custom_id, None, fault.code, fault.message))
        used, count = end, count + 1
        if len(read) == _AT_ONCE:
            break
    return read, used, count


@sandboxed(Limits(cpu_s=30, wall_s=60, memory=2 << 30))
def split_body(body: bytes, most: int) -> tuple[int, bytes]:
    requests = read_batch_requests(body, most)
    return len(requests), b"".join(map(write_batch_line, requests))
