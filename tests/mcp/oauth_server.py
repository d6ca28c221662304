"""The tools behind OAuth: an MCP server over HTTP that is its own authorization server."""

from __future__ import annotations

import base64
import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route

from tests.e2e.helpers import wait_until
from tests.mcp import tool_server


class OAuthServer:
    """`requests` are the grants of the token endpoint. Tokens end when they are taken out of `tokens`."""

    def __init__(self, url: str) -> None:
        self.url, self.tokens, self.requests, self.clients = url, set[str](), list[dict[str, Any]](), list[Any]()
        self.expires_in: int | None = 3600
        self._numbers = itertools.count()
        self._tools = tool_server.server.streamable_http_app()
        self.app = Starlette(
            routes=[
                Route("/.well-known/oauth-protected-resource/mcp", self.resource),
                Route("/.well-known/oauth-authorization-server", self.metadata),
                Route("/register", self.register, methods=["POST"]),
                Route("/authorize", self.authorize),
                Route("/token", self.token, methods=["POST"]),
                Mount("/", self.guarded),
            ],
            lifespan=lambda _app: self._tools.router.lifespan_context(self._tools),
        )

    async def resource(self, _request: Request) -> Response:
        return JSONResponse({"resource": f"{self.url}/mcp", "authorization_servers": [self.url]})

    async def metadata(self, _request: Request) -> Response:
        names = {"registration_endpoint": "register", "authorization_endpoint": "authorize", "token_endpoint": "token"}
        fields: dict[str, Any] = {name: f"{self.url}/{path}" for name, path in names.items()}
        methods = ["client_secret_basic", "client_secret_post", "none"]
        return JSONResponse(
            fields
            | {
                "issuer": self.url,
                "response_types_supported": ["code"],
                "code_challenge_methods_supported": ["S256"],
                "token_endpoint_auth_methods_supported": methods,
            }
        )

    async def register(self, request: Request) -> Response:
        self.clients.append(await request.json())
        return JSONResponse(self.clients[-1] | {"client_id": f"client-{len(self.clients)}"}, 201)

    async def authorize(self, request: Request) -> Response:
        asked = request.query_params
        if asked["client_id"] == "banned":
            return RedirectResponse(f"{asked['redirect_uri']}?error=access_denied&state={asked['state']}")
        return RedirectResponse(f"{asked['redirect_uri']}?code=c1&state={asked['state']}")

    async def token(self, request: Request) -> Response:
        form: dict[str, Any] = dict(await request.form())
        if basic := request.headers.get("authorization"):
            form["basic"] = base64.b64decode(basic.removeprefix("Basic ")).decode()
        self.requests.append(form)
        number = next(self._numbers)
        self.tokens.add(f"t{number}")
        tokens: dict[str, Any] = {"access_token": f"t{number}", "token_type": "Bearer", "expires_in": self.expires_in}
        return JSONResponse(tokens | {"refresh_token": f"r{number}"})

    async def guarded(self, scope: Any, receive: Any, send: Any) -> None:
        token = Request(scope).headers.get("authorization", "").removeprefix("Bearer ")
        if token in self.tokens:
            await self._tools(scope, receive, send)
            return
        where = f'Bearer resource_metadata="{self.url}/.well-known/oauth-protected-resource/mcp"'
        await Response(status_code=401, headers={"www-authenticate": where})(scope, receive, send)


@contextmanager
def oauth_server() -> Iterator[OAuthServer]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        made = OAuthServer(f"http://127.0.0.1:{listener.getsockname()[1]}")
        server = uvicorn.Server(uvicorn.Config(made.app, log_level="error", lifespan="on"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        wait_until(lambda: server.started, "the authorization server started")
        yield made
        server.should_exit = True
        thread.join(60)
