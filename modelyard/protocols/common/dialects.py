"""The dialects of a path that has several: which one a request is read and answered in.

A request chooses with the header x-modelyard-dialect. Otherwise the server's setting applies, which protocols find
among the headers under a name that no client can send.
"""

from __future__ import annotations

from collections.abc import Mapping

from modelyard.core.errors import InvalidRequest

DIALECT_HEADER = "x-modelyard-dialect"
DEFAULT_DIALECT = ":dialect"  # a colon is in no header's name
INFER_SERVER = "infer_server"


def read_dialect(headers: Mapping[str, str], known: tuple[str, ...]) -> str | None:
    """The dialect that the request asks for, in lower case: `auto` or one of `known`; None without the header."""
    if (asked := headers.get(DIALECT_HEADER)) is None:
        return None
    if (name := asked.strip().lower().replace("-", "_")) in ("auto", *known):
        return name
    choices = ", ".join(("auto", *known))
    raise InvalidRequest(f"{DIALECT_HEADER} is {asked[:40]!r}; the dialects here are {choices}", param=DIALECT_HEADER)


def is_openai_client(headers: Mapping[str, str]) -> bool:
    """Whether the client is one of OpenAI's or is built on its SDKs: they expect OpenAI's shapes and defaults."""
    agent = headers.get("user-agent", "").lower()
    return (
        "openai" in agent or "codex" in agent or any(name.startswith(("x-stainless-", "openai-")) for name in headers)
    )
