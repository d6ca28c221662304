"""What the gateway can measure of an answer, laid around what the engine told of itself. Pure."""

from __future__ import annotations

from msgspec import Struct

from modelyard.core.events import Timings


class Moments(Struct, frozen=True, gc=False):
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
    first_token, decode, given = told.first_token, told.decode, at.given
    if given is not None and at.spoke is not None and not remote:
        first_token = at.spoke - given if first_token is None else first_token
        decode = now - at.spoke if decode is None else decode
    engine = now - at.asked + tokenize
    return Timings(
        queue=at.waited,
        tokenize=tokenize,
        prefill=told.prefill,
        first_token=first_token,
        decode=decode,
        backend=None if given is None else now - given,
        engine=engine,
        total=engine if at.arrived is None else now - at.arrived,
    )
