"""Questions that a gateway has put to the scheduler, until they are answered or the link to it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from modelyard.core.errors import ModelyardError
from modelyard.workers.messages import Message
from modelyard.workers.scheduling import Answer


class Inquiries:
    """`send` gets each question under the next number of `number`."""

    def __init__(self, send: Callable[[Message], None], number: Callable[[], int]) -> None:
        self._send, self._number = send, number
        self._asked: dict[int, asyncio.Future[bytes | None]] = {}

    async def put(self, message: Callable[[int], Message]) -> bytes | None:
        id = self._number()
        waiting: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._asked[id] = waiting
        self._send(message(id))
        try:
            return await waiting
        finally:
            self._asked.pop(id, None)

    def answered(self, answer: Answer) -> None:
        if (waiting := self._asked.pop(answer.id, None)) is not None and not waiting.done():
            if answer.error is not None:
                waiting.set_exception(answer.error)
            else:
                waiting.set_result(answer.value)

    def fail(self, error: ModelyardError) -> None:
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # marks it seen: nobody may be waiting
        self._asked.clear()
