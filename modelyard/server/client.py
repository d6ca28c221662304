"""A synchronous client of a running server for the commands: its address, its admin API, and errors as sentences.

httpx takes a fifth of a second to import: commands that ask no server do not wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

import msgspec

from modelyard.accounts.owner import OWNER_HEADER
from modelyard.core.errors import Forbidden, InvalidRequest, ModelyardError, Unauthenticated, Unavailable

if TYPE_CHECKING:
    import httpx

Json = dict[str, Any]

_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
_CONNECT_S = 10.0


def find_url(url: str | None, env: Mapping[str, str] = os.environ) -> str:
    """The given URL, else the address in the configuration, whatever else is wrong with it."""
    from modelyard.config.load import read_address
    from modelyard.server.running_servers import server_url

    return (url or server_url(*read_address(env=env))).rstrip("/")


def is_local(url: str) -> bool:
    try:
        return urlsplit(url).hostname in _LOCAL_HOSTS
    except ValueError:
        return False


def no_server(url: str) -> Unavailable:
    """Names another server of this user, if there is one."""
    from modelyard.server.running_servers import running_servers

    others = [server.url for server in running_servers() if server.url != url]
    hint = f"; one runs at {others[0]}: --url {others[0]}" if others else "; start one with: modelyard serve"
    return Unavailable(f"no server answers at {url}{hint}")


class ServerClient:
    """Every method raises a ModelyardError if it fails. To a server of this user it proves that it comes from them."""

    def __init__(self, url: str, key: str | None = None, timeout_s: float | None = 60) -> None:
        import httpx

        from modelyard.server.running_servers import find_server

        self.url, self.key = url.rstrip("/"), key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if (own := find_server(self.url)) is not None and own.token:
            headers[OWNER_HEADER] = own.token
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        # A proxy of the environment is for other machines.
        self._http = httpx.Client(headers=headers, timeout=timeout, trust_env=not is_local(url))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def is_running(self) -> bool:
        """False if nothing listens there. Something that is not a Modelyard server is an error."""
        import httpx

        try:
            urlsplit(self.url).port  # noqa: B018  a number beyond 65535 looks like a server that does not answer
        except ValueError as error:
            raise InvalidRequest(f"{self.url} is not a URL: {error}") from None
        try:
            reply = self._http.get(f"{self.url}/health/live")
        except httpx.ConnectError:
            return False
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._explained(error) from None
        if reply.status_code != 200 or b"alive" not in reply.content:
            raise InvalidRequest(f"the server at {self.url} is not Modelyard: choose another address with --url")
        return True

    def get(self, path: str, **params: Any) -> Json:
        return self._call("GET", path, params)

    def post(self, path: str, **params: Any) -> Json:
        return self._call("POST", path, params)

    def send(self, method: str, path: str, body: Json | None = None) -> Json:
        """With a JSON body."""
        return self._call(method, path, {}, accepted=(200, 201, 202), body=body)

    def health(self) -> Json:
        """Also of an unhealthy server, which answers 503."""
        return self._call("GET", "/health", {}, accepted=(200, 503))

    def model_path(self, name: str, verb: str) -> str:
        return f"/v1/admin/models/{quote(name)}/{verb}"

    def _call(
        self,
        method: str,
        path: str,
        params: Mapping[str, Any],
        accepted: tuple[int, ...] = (200, 202),
        body: Json | None = None,
    ) -> Json:
        import httpx

        from modelyard.protocols import openai_chat

        query = {name: str(value).lower() if isinstance(value, bool) else value for name, value in params.items()}
        try:
            reply = self._http.request(method, self.url + path, params=query, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._explained(error) from None
        if reply.status_code == 401:
            raise Unauthenticated("the server needs an API key: --key or MODELYARD_API_KEY")
        if reply.status_code not in accepted:
            refused = openai_chat.read_error(reply.status_code, reply.headers, reply.content)
            if refused.code == "admin_key_required":
                raise Forbidden("this needs an admin key: --key or MODELYARD_ADMIN_KEY")
            raise refused
        try:
            return msgspec.json.decode(reply.content, type=Json)
        except msgspec.MsgspecError:
            raise InvalidRequest(f"the server at {self.url} is not Modelyard: choose another with --url") from None

    def _explained(self, error: httpx.HTTPError | httpx.InvalidURL) -> ModelyardError:
        import httpx

        match error:
            case httpx.ConnectError():
                return no_server(self.url)
            case httpx.InvalidURL() | httpx.UnsupportedProtocol():
                return InvalidRequest(f"{self.url} is not a URL: {error}")
            case httpx.TimeoutException():
                return Unavailable(f"{self.url} does not answer: it took too long")
        return Unavailable(f"the connection to {self.url} broke: {error}")
