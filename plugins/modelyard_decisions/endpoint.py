"""The plug-in: the row of the route table, and its endpoint."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.types import ASGIApp

from modelyard.core.protocol import INLINE_BYTES
from modelyard.gateway.request_work import RequestWork
from modelyard.http.errors import load_protocol
from modelyard.http.request_context import RequestContext
from modelyard.http.routes import Row
from modelyard.http.server import HttpContext
from modelyard.http.tokens import JsonEndpoint
from modelyard_decisions import scoring, wire


def endpoints(context: HttpContext) -> Iterator[tuple[Row, ASGIApp]]:
    app = Decisions(load_protocol("openai_chat"), context.gateway, context.settings, context.captures)
    yield Row("POST", "/v1/decisions", "decisions", protocol="openai_chat"), app


class Decisions(JsonEndpoint):
    is_long = True

    async def handle(self, body: bytes, context: RequestContext, work: RequestWork) -> bytes:
        if len(body) > INLINE_BYTES:
            decision = await work.run(wire.read_decisions, body, context.headers)
        else:
            decision = wire.read_decisions(body, context.headers)
        caller = self.caller(decision.request.model, context)
        scored = await scoring.decide(self._gateway, decision, caller, work)
        return wire.write_reply(decision.request.model, decision.questions, scored.logprobs, scored.usage)
