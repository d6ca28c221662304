"""The endpoints of the configuration files: what they say, the fields of a section, and changes with a preview."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response

from modelyard.core.errors import Conflict, Forbidden, InvalidRequest
from modelyard.http.admin.context import AdminContext, ConfigChange, ConfigEditing
from modelyard.http.request_context import RequestContext, read_body
from modelyard.http.settings import HttpSettings
from modelyard.telemetry.masking import mask_secret_values

T = TypeVar("T")


class FieldsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`values` are those of the form: the engine may depend on them."""

    section: Literal["models", "caches", "routes"]
    name: str = ""
    values: dict[str, Any] = {}


class ConfigRoutes:
    def __init__(self, context: AdminContext, settings: HttpSettings) -> None:
        self._context, self._settings = context, settings

    def endpoints(self) -> tuple[tuple[str, str, Callable[..., Awaitable[Response]], str], ...]:
        return (
            ("GET", "/config", self.overview, "Models, caches and routes of the configuration files, without secrets"),
            ("POST", "/config/fields", self.fields, "The fields of a model, cache or route: type, default, choices"),
            ("POST", "/config/preview", self.preview, "What a change would write, and what is wrong with it"),
            ("POST", "/config/apply", self.apply, "Write a change with a backup, and reload the configuration"),
        )

    async def overview(self) -> Response:
        return _json({**await self._editor().overview(), "editable": self._settings.edit_config})

    async def fields(self, request: StarletteRequest) -> Response:
        query = await self._read(request, FieldsQuery)
        return _json(await self._editor().fields(query.section, query.name, query.values))

    async def preview(self, request: StarletteRequest) -> Response:
        return _json(await self._editor().preview(await self._read(request, ConfigChange)))

    async def apply(self, request: StarletteRequest) -> Response:
        if not self._settings.edit_config:
            raise Forbidden(
                "this server's files are not changed over HTTP (http.edit_config = false)", code="read_only"
            )
        done = await self._editor().apply(await self._read(request, ConfigChange))
        if not self._context.shares_scheduler:
            await self._context.peers.request("POST", "reload", request.headers)
        return _json(done)

    def _editor(self) -> ConfigEditing:
        if self._context.editor is None:
            raise Conflict("this server's configuration does not come from a file", code="no_file")
        return self._context.editor

    async def _read(self, request: StarletteRequest, kind: type[T]) -> T:
        body = await read_body(request.receive, RequestContext.of(request.scope), self._settings)
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"the body is not a {kind.__name__}: {error}", code="invalid_body") from None


def _json(value: Any) -> Response:
    """A difference may show lines with secrets beside the change."""
    content = msgspec.json.encode(mask_secret_values(msgspec.to_builtins(value)))
    return Response(content, headers={"cache-control": "no-store"}, media_type="application/json")
