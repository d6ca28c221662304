"""The server and the browser of the tests in a real browser. Each file of tests has its own of both, so that files can
run at the same time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelyard.accounts.owner import OWNER_HEADER, OwnerProof
from modelyard.library import default_model
from tests.cli_process import ServerProcess, serve
from tests.mcp import tool_server
from tests.workbench.browser import OWNER, BrowserPage, chrome

CONFIG = """
[log]
history_texts = true

[store]
chats = "chats.sqlite"

[accounts]
path = "accounts.sqlite"

[[keys]]
name = "owner"
key = "the-owner"
admin = true

[[keys]]
name = "guest"
key = "a-guest"

[models.demo]
backend = "fake"
token_delay = 0.01
modalities = ["text", "image", "audio"]
script = [
    { result = "^42$", steps = [{ text = "The sum is 42." }] },
    { when = "^add", steps = [{ call = { name = "add", arguments = { a = 40, b = 2 } } }] },
    { when = "^page", steps = [{ text = "HTML" }] },
    { when = "^slowly", steps = [{ prefill = 3.0, progress = 60 }, { text = "Read." }] },
    { when = "endless", steps = [{ tokens = 100000 }] },
    { result = "sunny", steps = [{ text = "Take a hat." }] },
    { when = "^tool", steps = [{ call = { name = "weather", arguments = { city = "Rome" } } }] },
    { when = "^think", steps = [{ think = "Let me see." }, { text = "Forty-two." }] },
    { when = "^markdown", steps = [
        { text = "# Title\\n\\n|a|b|\\n|-|-|\\n|1|2|\\n\\n```python\\nreturn 1\\n```\\n\\n$x^2$" },
    ] },
    { when = "^hostile", steps = [
        { text = "<img src=x onerror='hacked = 1'><script>window.hacked = 1</script> [x](javascript:hack())" },
    ] },
    { when = "^pause", steps = [{ text = "One" }, { delay = 2 }, { text = " two." }] },
    { when = "^long", steps = [{ text = "PARAGRAPHS" }] },
    { when = "^fail", steps = [{ text = "so far" }, { fail = "out of memory" }] },
]

[mcp.servers.sums]
command = "PYTHON"
args = ["TOOLS"]

[[routes]]
match = "claude-*"
model = "demo"

[models.second]
backend = "fake"
script = [{ steps = [{ text = "From the second." }] }]

[models.smollm2]
backend = "llama_cpp"
path = "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
enabled = false
n_ctx = 2048
n_threads = 1

[models.missing]
backend = "llama_cpp"
path = "/no/such/file.gguf"
enabled = false
"""
HTML = """```html
<h1>Hi</h1><img src="/v1/models"><script>
document.title = "ran"; document.body.append("ran"); fetch("/v1/models").catch(() => document.body.append(" alone"));
try { parent.document.title = "hacked"; parent.hacked = 1 } catch { document.body.append(" apart") }
</script>
```"""
CONFIG = CONFIG.replace("PARAGRAPHS", r"word\n\n" * 60)  # more than a page shows
CONFIG = (
    CONFIG.replace('"HTML"', json.dumps(HTML)).replace("PYTHON", sys.executable).replace("TOOLS", tool_server.__file__)
)


class RestartableServer:
    """A server that can be stopped and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._stack = folder, ExitStack()
        self._serving = self._start("0")
        self.url = self._serving.url
        self.file = folder / "modelyard.toml"

    def _start(self, port: str) -> ServerProcess:
        return self._stack.enter_context(serve(self.folder, "--port", port, config=CONFIG))

    def stop(self) -> None:
        assert self._serving.stop() == 0
        self._stack.close()

    def restart(self) -> None:
        self._stack = ExitStack()
        self._serving = self._start(self.url.rpartition(":")[2])

    def close(self) -> None:
        self._stack.close()

    def api(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        reply = httpx.request(method, self.url + path, json=body, headers={**OWNER, **headers}, timeout=60)
        assert reply.status_code < 400, reply.text
        return reply.json()

    @property
    def link(self) -> str:
        """Opens the workbench as the owner, once."""
        return f"{self.url}/workbench?code={OwnerProof(self.token).new_code(time.time())}"

    @property
    def token(self) -> str:
        return self._serving.owner[OWNER_HEADER]

    def model(self, name: str) -> Any:
        return self.api("GET", f"/v1/admin/models/{name}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestartableServer]:
    default_model.fetch()
    made = RestartableServer(tmp_path_factory.mktemp("workbench"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def locked(server: RestartableServer) -> Iterator[BrowserPage]:
    with chrome() as driver:
        yield BrowserPage(driver, server.url)


@pytest.fixture
def page(locked: BrowserPage, server: RestartableServer) -> Iterator[BrowserPage]:
    """A page of the owner, whose browser has a key besides."""
    if locked.token != server.token:
        locked.driver.get(server.link)
        locked.token = server.token
    if not locked.driver.current_url.startswith(server.url):
        locked.open("/routes")
    if locked.key != "the-owner":
        locked.log_in("the-owner")
    yield locked
    locked.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
