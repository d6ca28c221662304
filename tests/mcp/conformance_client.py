"""The client under test of the suite @modelcontextprotocol/conformance: it connects to the server of a scenario, lists
its tools and calls them, as the gateway does. Its person logs in at once, wherever the suite's browser is sent.

python conformance_client.py URL, with MCP_CONFORMANCE_SCENARIO and MCP_CONFORMANCE_CONTEXT in the environment
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
from mcp.client.auth import AuthorizationCodeResult

from modelyard.mcp.connection import McpTool
from modelyard.mcp.servers import McpServers
from modelyard.mcp.settings import McpSettings


class Browser:
    """Logs in without a person: the suite's authorization server redirects at once."""

    async def show(self, url: str) -> None:
        async with httpx2.AsyncClient() as client:
            answer = await client.get(url, follow_redirects=False)
        found = parse_qs(urlsplit(answer.headers["location"]).query)
        self._found = {name: values[0] for name, values in found.items()}

    async def wait(self) -> AuthorizationCodeResult:
        return AuthorizationCodeResult.model_validate(self._found)


VALUES: dict[str, Any] = {"string": "x", "number": 5, "integer": 3, "boolean": True, "array": []}


def arguments(schema: dict[str, Any], tools: Sequence[McpTool]) -> dict[str, Any]:
    """Something of each type; an object is what the gateway read as the schema of a tool, which a scenario compares."""
    schemas = [tool.schema for tool in tools if "$schema" in tool.schema]
    fields = schema.get("properties", {})
    return {name: VALUES.get(field.get("type")) or (schemas or [{}])[0] for name, field in fields.items()}


def settings(url: str, context: dict[str, Any], scenario: str) -> McpSettings:
    oauth: dict[str, Any] = {"scope": None}
    if "client_id" in context:
        oauth |= {"client_id": context["client_id"]}
        if "client_secret" in context:
            os.environ["CONFORMANCE_SECRET"] = context["client_secret"]
            oauth["client_secret_env"] = "CONFORMANCE_SECRET"
    elif scenario == "auth/basic-cimd":
        oauth["client_id"] = "https://conformance-test.local/client-metadata.json"
    if scenario == "auth/client-credentials-basic":
        oauth |= {"grant": "client_credentials", "issuer": context.get("issuer") or url}
    server = {"url": url, "elicitation": "defaults", "resources": True, "prompts": True}
    if scenario.startswith("auth/"):
        server["oauth"] = oauth
    return McpSettings.model_validate({"servers": {"suite": server}, "timeout_s": 20})


async def main(url: str) -> int:
    scenario = os.environ.get("MCP_CONFORMANCE_SCENARIO", "")
    context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT") or "{}")
    with tempfile.TemporaryDirectory() as folder:
        servers = McpServers(settings(url, context, scenario), os.environ | {"XDG_DATA_HOME": folder}, Browser())
        connection = servers.named("suite")
        try:
            tools = await connection.tools()
            planned = context.get("toolCalls")
            calls = (
                [(call["name"], call.get("arguments") or {}) for call in planned]
                if planned
                else [(tool.name, arguments(tool.schema, tools)) for tool in tools]
            )
            for name, values in calls:
                print(name, await connection.call(name, values))
        finally:
            await servers.close()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
