"""The lines of a batch are found, counted and read by children of the pool, however the file is cut into chunks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from modelyard.core.batch import Batch, BatchLine, BatchRow
from modelyard.core.errors import InvalidRequest
from modelyard.gateway import batch_lines
from modelyard.gateway.batch_lines import blocks, count_lines, read_lines, split_requests

CHAT = "/v1/chat/completions"
BATCH = Batch(id="b", api="openai", endpoint=CHAT, created=0, expires=0)
LIMIT = 300


def line(id: str, **fields: object) -> bytes:
    return json.dumps({"custom_id": id, "method": "POST", "url": CHAT, "body": {"model": "m"} | fields}).encode()


async def chunks(data: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


FILE = b"\n".join([line("a"), b"", line("b", text="x" * 500), b"  ", b"no json", line("c"), b"\n", line("d")])


@pytest.mark.parametrize("size", [1, 7, 64, 301, 10_000])
async def test_lines_are_the_same_however_the_file_is_cut(size: int) -> None:
    read = [found async for found in read_lines(chunks(FILE, size), BATCH, LIMIT)]
    ends = [(number, one.custom_id, one.code if isinstance(one, BatchRow) else "") for number, one in read]
    assert ends == [
        (1, "a", ""),
        (3, None, "request_too_large"),
        (5, None, "invalid_json_line"),
        (6, "c", ""),
        (9, "d", ""),
    ]
    assert isinstance(read[0][1], BatchLine)
    assert json.loads(read[0][1].body) == {"model": "m"}
    assert await count_lines(chunks(FILE, size), BATCH, LIMIT, 100) == (5, "m")


async def test_more_lines_than_are_read_at_once_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\n".join(line(str(n)) for n in range(600))
    read = [(number, one.custom_id) async for number, one in read_lines(chunks(data, 1 << 20), BATCH, LIMIT)]
    assert read == [(n + 1, str(n)) for n in range(600)]


async def test_counting_ends_soon_after_the_most() -> None:
    seen = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal seen
        while True:
            seen += 1
            yield b"x\n" * 1000

    assert await count_lines(endless(), BATCH, LIMIT, 1500) == (1501, None)
    assert seen == 2


async def test_a_line_without_end_takes_no_memory() -> None:
    found = [block async for block in blocks(chunks(b"x" * 100_000 + b"\n" + line("a"), 1000), LIMIT)]
    assert sum(map(len, found)) < 3000
    assert found[-1].endswith(line("a"))


async def test_a_batch_of_messages_is_split_into_lines_and_says_what_is_wrong() -> None:
    body = json.dumps({"requests": [{"custom_id": "a", "params": {"model": "m"}}]}, indent=2).encode()
    assert await split_requests(body, 10) == (1, b'{"custom_id":"a","params":{"model":"m"}}\n')
    with pytest.raises(InvalidRequest, match="the most are 0"):
        await split_requests(body, 0)


async def test_a_child_that_takes_too_long_is_an_error_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines.split_body, "limits", batch_lines.Limits(wall_s=0.001))
    with pytest.raises(InvalidRequest, match="send fewer in a batch"):
        await split_requests(b'{"requests": []}', 1)
