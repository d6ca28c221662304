"""Takes the screenshots of docs/workbench.md from a real server: `python -m docs.workbench.screenshots`."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from selenium.webdriver.common.keys import Keys

from modelyard.accounts.owner import OWNER_HEADER, OwnerProof
from modelyard.library import default_model
from tests.cli_process import serve
from tests.workbench.browser import BrowserPage, chrome, open_settings

HERE = Path(__file__).parent
MESSAGE = "textarea[aria-label=Message]"
_TRAFFIC_S = 60.0
_CONFIG = '''
[log]
history_texts = true

[models.smollm2]
backend = "llama_cpp"
path = "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
aliases = ["gpt-4o-mini"]
description = "SmolLM2 135M, the built-in default"
n_threads = 1

[models.demo]
backend = "fake"
description = "Scripted answers for demos and tests"
token_delay = 0.02
replica_max = 3
script = [
    { when = "weather", steps = [
        { think = "The user asks about the weather. There is a tool for that, but Rome is always sunny." },
        { text = "It is sunny in Rome, 24 °C. Take a hat." } ] },
    { when = "pendulum", steps = [
        { think = "A small angle: the period does not depend on the amplitude." },
        { text = """For a small angle the period is

$$T = 2\\\\pi \\\\sqrt{\\\\frac{l}{g}}$$

```python
from math import pi, sqrt

def period(length: float, g: float = 9.81) -> float:
    return 2 * pi * sqrt(length / g)
```

| length | period |
|-------:|-------:|
| 0.25 m | 1.00 s |
| 1 m | 2.01 s |
""" } ] },
]

[models.large]
backend = "llama_cpp"
path = "/models/large-70b.Q4_K_M.gguf"
description = "A model whose file is missing"
enabled = false

[caches.main]
model = "smollm2"
n_ctx = 4096
parallel = 2
[caches.fast]
model = "smollm2"
n_ctx = 1024
parallel = 2
[caches.demo]
model = "demo"
n_ctx = 8192
parallel = 8

[[routes]]
match = ["*haiku*", "*mini*"]
cache = "fast"
[[routes]]
match = "demo"
cache = "demo"
[[routes]]
match = "*"
cache = "main"
'''
_TOPICS = ("the sea", "a dragon", "bread", "the moon", "a train", "winter", "chess", "the weather")


def send_traffic(url: str, stop: threading.Event) -> None:
    """Three growing conversations, so that caches have something to reuse."""
    chance = random.Random(7)  # noqa: S311
    conversations: dict[str, list[dict[str, object]]] = {name: [] for name in ("editor", "agent", "notes")}
    with httpx.Client(base_url=url, timeout=60) as client:
        while not stop.is_set():
            session = chance.choice(list(conversations))
            messages = conversations[session]
            messages.append({"role": "user", "content": f"One sentence about {chance.choice(_TOPICS)}."})
            model = chance.choice(["smollm2", "claude-haiku-4-5", "demo", "demo"])
            body = {"model": model, "messages": messages, "max_tokens": 30, "prompt_cache_key": session}
            reply = client.post("/v1/chat/completions", json=body)
            if reply.status_code == 200 and len(messages) < 12:
                messages.append(reply.json()["choices"][0]["message"] | {"annotations": None})
            else:
                conversations[session] = []
            stop.wait(chance.random() * 0.6)


def main() -> None:
    default_model.fetch()
    stop = threading.Event()
    with (
        tempfile.TemporaryDirectory() as folder,
        serve(Path(folder), config=_CONFIG, XDG_DATA_HOME=folder) as running,
        chrome() as driver,
    ):
        running.until("the model smollm2 is ready")
        sender = threading.Thread(target=send_traffic, args=(running.url, stop), daemon=True)
        sender.start()
        time.sleep(_TRAFFIC_S)
        driver.set_window_size(1360, 1040)
        try:
            page = BrowserPage(driver, running.url)
            code = OwnerProof(running.owner[OWNER_HEADER]).new_code(time.time())
            driver.get(f"{running.url}/workbench?code={code}")
            take_all(page, running.owner)
        finally:
            stop.set()
            sender.join()


def take_all(page: BrowserPage, owner: dict[str, str]) -> None:
    """`owner` are the headers of the server's user."""
    models(page)
    for name in ("requests", "memory", "caches", "plots", "logs"):
        page.open(f"/{name}")
        time.sleep(12 if name == "caches" else 5)
        save(page, name)
    optimizer(page, owner)
    chat(page)
    request(page, owner)
    routes(page)
    edit(page)
    save(page, "edit")
    dark_and_phone(page, owner, PAGES)
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    make_keys(page, owner)
    page.open("/keys")
    page.find("[data-key=team-a]")
    time.sleep(3)
    save(page, "keys")
    dark_and_phone(page, owner, ("keys",))


def optimizer(page: BrowserPage, owner: dict[str, str]) -> None:
    """The newest report of `modelyard optimize` on this machine. Without one the screenshot is not taken."""
    if not httpx.get(f"{page.url}/v1/admin/tune", headers=owner).json()["data"]:
        return
    page.open("/plots")
    page.find(".q-expansion-item .q-table")
    page.run("document.querySelector('.q-expansion-item').scrollIntoView(); window.scrollBy(0, -90)")
    time.sleep(2)
    save(page, "optimizer")


def models(page: BrowserPage) -> None:
    page.open("/models")
    page.find("[data-model=demo]", "ready")
    time.sleep(2)
    save(page, "models")
    page.click("[data-model=large] button", "Load")
    page.type(".q-dialog input[aria-label='Threads for answers']", "8")
    time.sleep(2)
    save(page, "load")


def chat(page: BrowserPage) -> None:
    page.open("/chat?model=demo")
    page.find(".model .q-chip", "demo")
    page.type(MESSAGE, "How long does a pendulum swing?", Keys.ENTER)
    page.find(".turn.assistant", "tok/s")
    time.sleep(1)
    save(page, "chat")
    open_settings(page)
    page.type("input[aria-label='Max tokens']", "64", Keys.TAB)
    page.type(".model input", "smollm2", Keys.ENTER)
    page.find(".model .q-chip", "smollm2")
    page.type(MESSAGE, "What is the weather like in Rome?", Keys.ENTER)
    page.wait_until(lambda: len(page.find_all(".round .turn.assistant", "tok/s")) == 2, "both answers")
    time.sleep(1)
    save(page, "sidebyside")


def request(page: BrowserPage, owner: dict[str, str]) -> None:
    """A request to the real model that continued a cached conversation."""
    ended = httpx.get(f"{page.url}/v1/admin/requests", headers=owner).json()["ended"]
    found = next(record for record in ended if record["model"] == "smollm2" and record["divergence"])
    page.open(f"/requests/{found['id']}")
    page.find(".timeline")
    time.sleep(2)
    save(page, "request")


def routes(page: BrowserPage) -> None:
    page.open("/routes")
    page.type("input[aria-label='Model name']", "claude-haiku-4-5")
    page.find(".stats", "fast")
    time.sleep(1)
    save(page, "routes")


def edit(page: BrowserPage) -> None:
    page.open("/models/edit?name=smollm2")
    page.type("input[aria-label=description]", "SmolLM2 135M, for background tasks")
    page.add_setting("flash_attn")
    page.type("input[aria-label=flash_attn]", "sometimes")
    page.find(".diff .added", "flash_attn")
    time.sleep(1)


def make_keys(page: BrowserPage, owner: dict[str, str]) -> None:
    """Three keys, two of them with limits and some use."""
    admin = f"{page.url}/v1/admin/keys"
    secret = httpx.post(admin, json={"name": "owner", "admin": True}, headers=owner).json()["secret"]
    headers = {"authorization": f"Bearer {secret}"}
    team = {"name": "team-a", "models": ["demo", "smollm2"], "token_budget": 2000, "max_concurrent": 4}
    guest = {"name": "guest", "models": ["demo"], "requests_per_minute": 60, "expires": "2030-01-01"}
    for rules, requests in ((team, 9), (guest, 3)):
        secret = httpx.post(admin, json=rules, headers=headers).json()["secret"]
        for number in range(requests):
            body = {
                "model": "demo",
                "messages": [{"role": "user", "content": f"One sentence about {_TOPICS[number % 8]}."}],
            }
            httpx.post(
                f"{page.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {secret}"}, timeout=60
            )


PAGES = ("models", "chat", "requests", "memory", "caches", "plots", "routes", "logs", "edit")


def dark_and_phone(page: BrowserPage, owner: dict[str, str], names: Sequence[str]) -> None:
    """Each page in the dark theme, and on a phone."""
    page.run("localStorage.setItem('modelyard-dark', 'dark')")
    take_each(page, owner, "dark", names)
    page.run("localStorage.setItem('modelyard-dark', 'light')")
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    )
    take_each(page, owner, "phone", names)


def take_each(page: BrowserPage, owner: dict[str, str], prefix: str, names: Sequence[str]) -> None:
    stored = httpx.get(f"{page.url}/v1/admin/chats", headers=owner).json()["data"][0]["id"] if "chat" in names else ""
    for name in names:
        if name == "edit":
            edit(page)
        else:
            page.open({"chat": f"/chat/{stored}"}.get(name, f"/{name}"))
        page.find("[role=heading]", name.capitalize())
        time.sleep(4)
        save(page, prefix + name)


def save(page: BrowserPage, name: str) -> None:
    page.driver.save_screenshot(str(HERE / f"{name}.png"))


if __name__ == "__main__":
    main()
