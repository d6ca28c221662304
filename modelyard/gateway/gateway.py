"""READ FIRST. The life of a request, from top to bottom:

    Gateway.read          bytes → Request; `previous_response_id` and `conversation` are resolved
    Gateway.prepare       resolve the route; then `prepare.py`: check capabilities → restore replayed turns
                          → fetch images → render → tokenize → check the window → build the constraint
    Gateway.start         open the stream of the request (`stream.py`), from the outermost to the innermost:
      FallbackStream        the first model of the route that answers          (only if the route has several)
      CompactingStream      summarise a long conversation, then answer         (only if the request or route says so)
      ToolRounds            generate, call tools of MCP servers, generate …    (only if there are such tools)
      SharedReader          join an identical running request                  (only if both get the same reply)
      MultiChoiceStream     several replies on one lease                       (only if several are wanted)
      ChoiceStream          wait for the lease → start the engine → pass its output on, batch by batch
        TextOutput            token ids → detokenize → scan → events           (an engine that generates tokens)
        ChatOutput            events → events                                  (an engine that speaks a chat protocol)

`http` reads the body, calls the first three and iterates over the stream; the protocol writes its events.
`read` and `prepare` need no engine and raise before a byte is sent. Every stream ends in one Finished or Failed.

Beside it: `lookup.py` finds a request's model, `running.py` knows the requests that run, `inputs.py` answers those that
generate nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from modelyard.accounts.accounts import Accounts
from modelyard.core.errors import TooLarge, Unsupported
from modelyard.core.events import Finished, Reply, Started, Usage
from modelyard.core.pool import LeaseProvider, LeaseRequest, Ticket
from modelyard.core.protocol import INLINE_BYTES, WireProtocol
from modelyard.core.request import Caller, Request
from modelyard.gateway.cache_diagnostics import CacheDiagnostics
from modelyard.gateway.choices import MultiChoiceStream
from modelyard.gateway.compaction import CompactingStream, Compactor
from modelyard.gateway.fallbacks import FallbackStream, prepare_first
from modelyard.gateway.files import Files
from modelyard.gateway.inputs import InputReader
from modelyard.gateway.lookup import ModelLookup
from modelyard.gateway.model import Model
from modelyard.gateway.prepare import Preparer
from modelyard.gateway.prepared_request import CHARS_PER_TOKEN, PreparedRequest, estimated_tokens
from modelyard.gateway.replay_memory import ReplayMemory
from modelyard.gateway.request_work import BackgroundTasks, RequestWork
from modelyard.gateway.running import RunningRequests
from modelyard.gateway.stored_responses import StoredResponses
from modelyard.gateway.stream import ChoiceStream, NewestStarts, Stream, StreamServices
from modelyard.gateway.tool_rounds import ToolRounds
from modelyard.mcp.servers import McpServers
from modelyard.prompt.images import Images
from modelyard.router.router import Router
from modelyard.telemetry.history import History
from modelyard.telemetry.metrics import Metrics
from modelyard.telemetry.request_capture import RequestCapture
from modelyard.tokenizer.shield import unshield

_HISTORY_REQUESTS = 1000
_MAX_EARLIER = 32 << 20  # characters of stored turns that a request continues


class Gateway:
    def __init__(
        self,
        *,
        router: Router,
        models: Mapping[str, Model],
        leases: LeaseProvider,
        images: Images,
        metrics: Metrics,
        history: History | None = None,
        replay: ReplayMemory | None = None,
        stored: StoredResponses | None = None,
        files: Files | None = None,
        mcp: McpServers | None = None,
        accounts: Accounts | None = None,
    ) -> None:
        self.accounts = accounts or Accounts()
        self.leases, self.metrics, self.stored = leases, metrics, stored
        self.history, replay = history or History(_HISTORY_REQUESTS), replay or ReplayMemory()
        self.draining = False  # the server is ending: it lets requests finish and takes no new ones
        self.lookup, self.running = ModelLookup(router, models, leases), RunningRequests()
        self.preparer = Preparer(self.lookup, images, metrics, self.accounts, replay, files, mcp)
        self._compactor = Compactor(self.preparer)
        self._services = StreamServices(
            leases=leases,
            metrics=metrics,
            history=self.history,
            accounts=self.accounts,
            capabilities=self.lookup.capabilities,
            diagnostics=CacheDiagnostics(),
            replay=replay,
            newest_starts=NewestStarts(),
            background=BackgroundTasks(),
        )
        self.inputs = InputReader(self.lookup, self.preparer, self._services)

    async def read(
        self,
        protocol: WireProtocol,
        body: bytes,
        headers: Mapping[str, str],
        key: str,
        work: RequestWork | None = None,
        stored: StoredResponses | None = None,
    ) -> Request:
        """`work` can be cancelled, here and in the next steps, if the request is large. `stored` are the responses that
        the request may continue, if they are not the gateway's."""
        if len(body) > INLINE_BYTES:
            request = await (work or RequestWork()).run(protocol.read_request, body, headers)
        else:
            request = protocol.read_request(body, headers)
        continues = request.previous is not None or request.conversation is not None or request.has_references
        if not continues:
            return request
        if (stored := stored or self.stored) is None:
            raise Unsupported("responses are not stored here: send the whole conversation as input", param="input")
        request = await stored.resume(request, key)
        size = estimated_tokens(request) * CHARS_PER_TOKEN - len(body)
        if size > _MAX_EARLIER:
            raise TooLarge(f"the stored turns of this conversation have {size} characters; at most {_MAX_EARLIER} fit")
        if work is not None and work.reservation is not None:
            work.reservation.grow(max(0, size))
        return request

    async def prepare(self, request: Request, caller: Caller, work: RequestWork | None = None) -> PreparedRequest:
        prepared = None
        while prepared is None:  # a reload may replace the route and its model meanwhile
            target = self.lookup.router.resolve(request.model, caller.endpoint)
            named = [(self.lookup.router.resolve(each.model, caller.endpoint), each) for each in request.fallbacks]
            if target.fallbacks or named:
                return await prepare_first(self._compactor, request, caller, work, target, named)
            prepared = await self._compactor.attempt(request, caller, target, work)
        return prepared

    def start(self, prepared: PreparedRequest, capture: RequestCapture | None = None) -> Stream:
        """Raise at once where waiting would be in vain: a full queue, a rate limit, a model that is not loaded."""
        if prepared.plan is None:
            return self._start_model(prepared, capture)
        return FallbackStream(prepared, prepared.plan, self._compactor, partial(self._start_model, capture=capture))

    def _start_model(self, prepared: PreparedRequest, capture: RequestCapture | None) -> Stream:
        """The request on the model that was chosen."""
        if prepared.compaction is not None:
            start = partial(self._start_model, capture=capture)
            return CompactingStream(prepared, prepared.compaction, self._compactor, start)
        if prepared.server_tools is None:
            return self._generate(prepared, capture)
        generate = partial(self._generate, capture=capture)
        streams, services = self.running.streams, self._services
        rounds = ToolRounds(prepared, prepared.server_tools, self.preparer, generate, services, streams.discard)
        streams.add(rounds)
        return rounds

    def _generate(self, prepared: PreparedRequest, capture: RequestCapture | None) -> Stream:
        """One generation, without the calls of servers' tools."""
        if capture is not None and prepared.model.kind == "text":
            capture.prompt("\n\n".join(unshield(prompt.text) for prompt in prepared.prompts))
        streams, dedup, services = self.running.streams, self.running.dedup, self._services
        is_shareable = prepared.is_shareable()
        if is_shareable and (shared := dedup.find(prepared)) is not None:
            self.metrics.joined.add((prepared.model.name,))
            self.accounts.add(prepared.caller.key, prepared.model.name, Usage())
            return shared
        ticket = self.leases.request(prepared.lease_request())
        if not ticket.granted:
            self.history.add_queue_length(time.time(), ticket.position)
        stream: ChoiceStream | MultiChoiceStream
        if prepared.choices == 1:
            stream = ChoiceStream(prepared, 0, ticket, services, capture, streams.discard)
        else:

            def open_choice(choice: int, part: Ticket) -> ChoiceStream:
                return ChoiceStream(prepared, choice, part, services, capture, retry=False)

            stream = MultiChoiceStream(prepared, ticket, open_choice, streams.discard)
        streams.add(stream)
        return dedup.share(stream) if is_shareable else stream

    async def load(self, request: Request, caller: Caller) -> Reply:
        """An empty reply when the model is loaded, as any request would load it. With `keep_alive` 0 a loaded model is
        unloaded as soon as it is idle."""
        target, _, engine = self.lookup.find(request.model, caller, request.allow_remote)
        if engine is not None or request.keep_alive != 0:
            ticket = self.leases.request(
                LeaseRequest(
                    model=target.model,
                    cache=target.cache,
                    key=caller.key,
                    deadline=caller.deadline,
                    trace=caller.trace,
                    keep_alive=request.keep_alive,
                )
            )
            try:
                await ticket.lease()
            finally:
                ticket.cancel()
        return Reply(Started(caller.trace, request.model, int(time.time())), (), Finished("end", Usage()))

    async def close(self) -> None:
        await self._services.background.close()
        await self.preparer.images.close()
        if self.preparer.mcp is not None:
            await self.preparer.mcp.close()
