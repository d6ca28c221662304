"""Asks the service on this machine for its models, where its settings say that it listens: exit code 0 if it answers.

python deploy/systemd/health.py             once
python deploy/systemd/health.py --wait 60   until it answers, at most so many seconds
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import ssl
import sys
import time
from collections.abc import Mapping

from modelyard.config.load import load_config
from modelyard.config.problems import ConfigError
from modelyard.http.settings import HttpSettings

PATH = "/v1/models"
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # an address to listen on is none to call
_TIMEOUT_S = 5.0
_PAUSE_S = 0.2


class Silent(Exception):
    """No answer, or not that of a healthy server."""


def ask(settings: HttpSettings, env: Mapping[str, str]) -> str:
    """What the server says, in a sentence. One that only wants a key is well."""
    key = env.get("MODELYARD_API_KEY")
    connection = _connect(settings)
    try:
        connection.request("GET", PATH, headers={"authorization": f"Bearer {key}"} if key else {})
        reply = connection.getresponse()
        body = reply.read()
    except (OSError, http.client.HTTPException) as error:
        raise Silent(f"{settings.host}:{settings.port} does not answer: {error}") from error
    finally:
        connection.close()
    if reply.status == 401:
        return "it answers, and wants a key (set MODELYARD_API_KEY to see more)"
    if reply.status != 200:
        raise Silent(f"{PATH} answers with status {reply.status}")
    return "it answers; models: " + (", ".join(model["id"] for model in json.loads(body)["data"]) or "none")


def _connect(settings: HttpSettings) -> http.client.HTTPConnection:
    host = _EVERYWHERE.get(settings.host, settings.host)
    if settings.ssl_certfile is None:
        return http.client.HTTPConnection(host, settings.port, timeout=_TIMEOUT_S)
    # It is our own machine, and the certificate need not name it.
    trusting = ssl._create_unverified_context()  # noqa: S323
    return http.client.HTTPSConnection(host, settings.port, timeout=_TIMEOUT_S, context=trusting)


def wait(settings: HttpSettings, env: Mapping[str, str], seconds: float) -> str:
    until = time.monotonic() + seconds
    while True:
        try:
            return ask(settings, env)
        except Silent:
            if time.monotonic() >= until:
                raise
        time.sleep(_PAUSE_S)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Is the service on this machine well?")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="how long it may take to answer")
    seconds = parser.parse_args(arguments).wait
    try:
        print(wait(load_config().config.http, os.environ, seconds))
    except (Silent, ConfigError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
