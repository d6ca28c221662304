"""Writes of one iteration of the event loop are one write of the transport."""

from __future__ import annotations

import asyncio
from typing import cast

from modelyard.write_coalescing import CoalescingTransport, WriteCoalescer


class FakeTransport:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def write_eof(self) -> None:
        self.sent.append(b"EOF")

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def coalescing(coalescer: WriteCoalescer | None = None) -> tuple[FakeTransport, CoalescingTransport]:
    transport = FakeTransport()
    return transport, CoalescingTransport(
        cast(asyncio.Transport, transport), asyncio.get_running_loop(), coalescer or WriteCoalescer()
    )


async def test_writes_of_one_loop_iteration_are_sent_as_one() -> None:
    transport, connection = coalescing()
    connection.write(b"a")
    connection.write(b"b")
    assert transport.sent == []
    await asyncio.sleep(0)
    connection.write(b"c")
    assert transport.sent == [b"ab"]
    connection.close()
    assert (transport.sent, transport.closed) == ([b"ab", b"c"], True)


async def test_lines_and_the_end_come_after_what_was_written_before() -> None:
    transport, connection = coalescing()
    connection.write(b"a")
    connection.writelines([b"b", b"c"])
    connection.write_eof()
    assert transport.sent == [b"abc", b"EOF"]


async def test_nothing_is_written_to_a_connection_that_closes() -> None:
    transport, connection = coalescing()
    connection.close()
    connection.write(b"late")
    await asyncio.sleep(0)
    assert (transport.sent, transport.closed) == ([], True)


async def test_a_broken_connection_does_not_block_the_others() -> None:
    coalescer, errors = WriteCoalescer(), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(str(context["exception"])))
    (first, one), (broken, two), (last, three) = (coalescing(coalescer) for _ in range(3))
    broken.write = _break  # type: ignore[method-assign]
    for connection in (one, two, three):
        connection.write(b"a")
    await asyncio.sleep(0)
    assert (first.sent, last.sent, errors) == ([b"a"], [b"a"], ["broken pipe"])


def _break(data: bytes) -> None:
    raise OSError("broken pipe")
