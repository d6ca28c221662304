"""The API documentation: the page, and the routes that FastAPI does not see, from the route table."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from modelyard.core.errors import NotFound
from modelyard.http.routes import ADMIN_PATH, ROWS, Row

ROLE_FIELD = "x-role"  # in the description of the API

# --- the page ---------------------------------------------------------------------------------------------------------

_ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}


def page_routes() -> list[Route]:
    """`/docs` with all its files from this server: FastAPI's own page loads them from a CDN."""
    html = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="Modelyard API",
        swagger_js_url="/docs/swagger-ui-bundle.js",
        swagger_css_url="/docs/swagger-ui.css",
        swagger_favicon_url="/docs/favicon-32x32.png",
        # The validator is a service of swagger.io. "Try it out" is open, and a key is kept while the page is open.
        swagger_ui_parameters={"validatorUrl": None, "tryItOutEnabled": True, "displayRequestDuration": True},
    )

    async def page(_request: HttpRequest) -> Response:
        return html

    async def asset(request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name not in _ASSETS:
            raise NotFound(f"there is no /docs/{name} here; /docs lists the paths", code="path_not_found")
        return Response(_asset(name), media_type=_ASSETS[name], headers={"cache-control": "private, max-age=86400"})

    return [Route("/docs", page), Route("/docs/{name}", asset)]


@cache
def _asset(name: str) -> bytes:
    return resources.files("fastapi_swagger.resources").joinpath(name).read_bytes()


# --- the schema -------------------------------------------------------------------------------------------------------


class DescribedApp(FastAPI):
    """Its schema has every route in it, also those that FastAPI does not read; made at the first look, then kept."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = get_openapi(title=self.title, version=self.version, routes=self.routes)
            _add(self.openapi_schema)
        return self.openapi_schema


def _add(schema: dict[str, Any]) -> None:
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{}, {"key": []}]  # a server without keys needs none
    paths = schema.setdefault("paths", {})
    for row in ROWS:
        if row.summary and not row.path.startswith(ADMIN_PATH):  # FastAPI describes what it serves itself
            paths.setdefault(row.label, {})[row.method.lower()] = _operation(row, components)


def _operation(row: Row, components: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": row.summary, "responses": {"200": {"description": "OK"}}}
    if row.role != "member":
        found[ROLE_FIELD] = row.role
    bodies: list[dict[str, Any]] = []
    for body in row.body:
        name = body.__module__.removeprefix("modelyard.")
        inner, defined = msgspec.json.schema_components([body], ref_template=f"#/components/schemas/{name}.{{name}}")
        components |= {f"{name}.{key}": value for key, value in defined.items()}
        bodies += inner
    if bodies:  # a path that speaks two dialects takes either body
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    kind = {"in": "path", "required": True, "schema": {"type": "string"}}
    if names := re.findall(r"{(\w+)}", row.label):
        found["parameters"] = [{"name": name} | kind for name in names]
    return found
