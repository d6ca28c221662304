"""What the gateway can measure of an answer, laid around what the engine told of itself. Pure."""

from __future__ import annotations

from msgspec import Struct

from modelyard.core.events import Timings


class Moments(Struct):
    """When things happened to one answer, on one clock. None: not (yet), or nobody noted it.

    `given` is when the engine was given its job, `spoke` when its first token was seen here.
    """

    asked: float
    arrived: float | None = None
    given: float | None = None
    spoke: float | None = None
    waited: float = 0.0  # seconds in the queue


def around(told: Timings, at: Moments, tokenize: float, now: float, *, remote: bool) -> Timings:
    """An engine's own figures win. A remote one's first token is the network's, too: not taken for the model's."""
    seen = None if remote or at.given is None or at.spoke is None else (at.spoke - at.given, now - at.spoke)
    engine = now - at.asked + tokenize
    return Timings(
        queue=at.waited,
        tokenize=tokenize,
        prefill=told.prefill,
        first_token=told.first_token if told.first_token is not None or seen is None else seen[0],
        decode=told.decode if told.decode is not None or seen is None else seen[1],
        backend=now - at.given if at.given is not None else None,
        engine=engine,
        total=engine if at.arrived is None else now - at.arrived,
    )
