"""Something for the engine's thread to do between two steps, and how its sender hears what came of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from msgspec import Struct

from modelyard.core.errors import Internal, ModelyardError

log = logging.getLogger(__name__)


class Order(Struct, frozen=True):
    """`done` hears of it on the loop."""

    deed: Callable[[], None]
    done: asyncio.Future[None]


def tried(deed: Callable[[], None]) -> ModelyardError | None:
    """What went wrong with it: that is its sender's trouble, not the engine's end."""
    try:
        deed()
    except Exception as error:
        return fault_of(error)
    return None


def obeyed(done: asyncio.Future[None], fault: ModelyardError | None) -> None:
    if done.done():
        return
    if fault is None:
        done.set_result(None)
    else:
        done.set_exception(fault)


def fault_of(error: BaseException) -> ModelyardError:
    if isinstance(error, ModelyardError):
        return error
    internal = Internal("the llama.cpp engine cannot take this job")
    log.exception("job refused (id %s)", internal.id, exc_info=error)
    return internal
