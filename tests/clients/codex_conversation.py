"""A conversation with Codex over several turns in one process, by the protocol of its editor extensions."""

from __future__ import annotations

import json
import subprocess
import threading
from typing import Any, Self

from modelyard.launch.plan import LaunchTarget
from tests.clients.agent_bench import DEADLINE, AgentBench


class Conversation:
    """JSON, one message a line. The bench ends the process with its server, this block ends it before."""

    def __init__(self, bench: AgentBench, target: LaunchTarget) -> None:
        self._process = bench.start("app-server", target=target, stdin=subprocess.PIPE)
        self._late = threading.Timer(DEADLINE, self._process.kill)
        self._number = 0

    def __enter__(self) -> Self:
        self._late.start()
        try:
            self._call("initialize", clientInfo={"name": "tests", "title": "Tests", "version": "1"})
            self._send({"method": "initialized"})
            self._thread = self._call("thread/start", approvalPolicy="never")["thread"]["id"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._late.cancel()
        self._late.join()
        self._process.kill()
        self._process.communicate()

    def ask(self, text: str) -> dict[str, Any] | None:
        """Returns the error of the turn, if any."""
        self._call("turn/start", threadId=self._thread, input=[{"type": "text", "text": text}])
        return self._fault()

    def compact(self) -> dict[str, Any] | None:
        """The command `/compact`."""
        self._call("thread/compact/start", threadId=self._thread)
        return self._fault()

    def _fault(self) -> dict[str, Any] | None:
        while (message := self._receive()).get("method") != "turn/completed":
            pass
        fault: dict[str, Any] | None = message["params"]["turn"]["error"]
        return fault

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        while (message := self._receive()).get("id") != self._number or "method" in message:
            pass  # a notification or a request
        assert "result" in message, message
        result: dict[str, Any] = message["result"]
        return result

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process has ended, or was killed at the deadline"
        message: dict[str, Any] = json.loads(line)
        return message
