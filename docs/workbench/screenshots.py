"""Takes the pictures of docs/workbench.md anew, of a real server: `python -m docs.workbench.shots`."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from pathlib import Path

import httpx
from selenium.webdriver.common.keys import Keys

from modelyard.library import default_model
from tests.commands import serve
from tests.workbench.screen import Screen, chrome

HERE = Path(__file__).parent
_TRAFFIC_S = 150.0
_CONFIG = """
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
]

[models.large]
backend = "llama_cpp"
path = "/models/large-70b.Q4_K_M.gguf"
description = "Its file is not here"
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
"""
_TOPICS = ("the sea", "a dragon", "bread", "the moon", "a train", "winter", "chess", "the weather")


def traffic(url: str, over: threading.Event) -> None:
    """Conversations that grow, in three sessions, so that caches have something to reuse."""
    chance = random.Random(7)  # noqa: S311
    talks: dict[str, list[dict[str, object]]] = {name: [] for name in ("editor", "agent", "notes")}
    with httpx.Client(base_url=url, timeout=60) as client:
        while not over.is_set():
            session = chance.choice(list(talks))
            talk = talks[session]
            talk.append({"role": "user", "content": f"One sentence about {chance.choice(_TOPICS)}."})
            model = chance.choice(["smollm2", "claude-haiku-4-5", "demo", "demo"])
            body = {"model": model, "messages": talk, "max_tokens": 30, "prompt_cache_key": session}
            reply = client.post("/v1/chat/completions", json=body)
            if reply.status_code == 200 and len(talk) < 12:
                talk.append(reply.json()["choices"][0]["message"] | {"annotations": None})
            else:
                talks[session] = []
            over.wait(chance.random() * 0.6)


def main() -> None:
    default_model.fetch()
    over = threading.Event()
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder), config=_CONFIG) as running, chrome() as driver:
        running.until("the model smollm2 is ready")
        asking = threading.Thread(target=traffic, args=(running.url, over), daemon=True)
        asking.start()
        time.sleep(_TRAFFIC_S)
        driver.set_window_size(1360, 1040)
        try:
            take(Screen(driver, running.url))
        finally:
            over.set()
            asking.join()


def take(screen: Screen) -> None:
    models(screen)
    for name in ("requests", "memory", "caches", "plots"):
        screen.open(f"/{name}")
        time.sleep(12 if name == "caches" else 5)
        keep(screen, name)
    optimizer(screen)
    playground(screen)
    request(screen)
    routes(screen)
    night_and_phone(screen)


def optimizer(screen: Screen) -> None:
    """The newest run that `modelyard optimize` has left on this machine."""
    screen.open("/plots")
    screen.see(".q-expansion-item .q-table")
    screen.run("document.querySelector('.q-expansion-item').scrollIntoView(); window.scrollBy(0, -90)")
    time.sleep(2)
    keep(screen, "optimizer")


def models(screen: Screen) -> None:
    screen.open("")
    screen.see("[data-model=demo]", "ready")
    time.sleep(2)
    keep(screen, "models")
    screen.click("[data-model=large] button", "Load")
    screen.type(".q-dialog input[aria-label=n_threads]", "8")
    time.sleep(2)
    keep(screen, "load")


def playground(screen: Screen) -> None:
    screen.open("/playground?model=demo")
    screen.type("textarea[aria-label=Message]", "What is the weather like in Rome?", Keys.ENTER)
    screen.see(".turn.assistant", "tok/s")
    screen.click(".q-tab", "Events")
    time.sleep(1)
    keep(screen, "playground")


def request(screen: Screen) -> None:
    """One of the real model that went on from a cached conversation."""
    ended = httpx.get(f"{screen.url}/v1/admin/requests").json()["ended"]
    found = next(one for one in ended if one["model"] == "smollm2" and one["divergence"])
    screen.open(f"/requests/{found['id']}")
    screen.see(".timeline")
    time.sleep(2)
    keep(screen, "request")


def routes(screen: Screen) -> None:
    screen.open("/routes")
    screen.type("input[aria-label='Model name']", "claude-haiku-4-5")
    screen.see(".figures", "fast")
    time.sleep(1)
    keep(screen, "routes")


def night_and_phone(screen: Screen) -> None:
    screen.run("localStorage.setItem('modelyard-dark', 'dark')")
    screen.open("/plots")
    screen.see("body.body--dark")
    time.sleep(4)
    keep(screen, "dark")
    screen.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    )
    screen.open("")
    screen.see("[data-model=demo]", "ready")
    time.sleep(2)
    keep(screen, "phone")


def keep(screen: Screen, name: str) -> None:
    screen.driver.save_screenshot(str(HERE / f"{name}.png"))


if __name__ == "__main__":
    main()
