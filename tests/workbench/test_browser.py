"""The workbench in a real browser, against a real server with the real default model."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from modelyard.library import default_model
from tests.commands import Serving, serve
from tests.workbench.screen import Screen, chrome
from tests.workbench.test_findings import run as found_run

pytestmark = pytest.mark.browser

CONFIG = """
[log]
history_texts = true

[[keys]]
name = "owner"
key = "the-owner"
admin = true

[[keys]]
name = "guest"
key = "a-guest"

[models.demo]
backend = "fake"
token_delay = 0.02
modalities = ["text", "image"]
script = [
    { when = "endless", steps = [{ tokens = 100000 }] },
    { result = "sunny", steps = [{ text = "Take a hat." }] },
    { when = "^tool", steps = [{ call = { name = "weather", arguments = { city = "Rome" } } }] },
    { when = "^think", steps = [{ think = "Let me see." }, { text = "Forty-two." }] },
]

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
OWNER = {"authorization": "Bearer the-owner"}
PAGES = {
    "": "Models",
    "/playground": "Playground",
    "/requests": "Requests",
    "/memory": "Memory",
    "/caches": "Caches",
    "/plots": "Plots",
    "/routes": "Routes",
}
HTML = '<img src=x onerror="window.hacked = 1"><b>bold</b>{{7 * 7}}'
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
MESSAGE = "textarea[aria-label=Message]"


class Server:
    """It can be stopped and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack = folder, ExitStack()
        self._serving = self._begin("0")
        self.url = self._serving.url

    def _begin(self, port: str) -> Serving:
        return self._stack.enter_context(serve(self._folder, "--port", port, config=CONFIG))

    def stop(self) -> None:
        assert self._serving.stop() == 0
        self._stack.close()

    def begin_again(self) -> None:
        self._stack = ExitStack()
        self._serving = self._begin(self.url.rpartition(":")[2])

    def close(self) -> None:
        self._stack.close()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        reply = httpx.request(method, self.url + path, json=body, headers={**OWNER, **headers}, timeout=60)
        assert reply.status_code < 400, reply.text
        return reply.json()

    def model(self, name: str) -> Any:
        return self.ask("GET", f"/v1/admin/models/{name}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    default_model.fetch()
    made = Server(tmp_path_factory.mktemp("workbench"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def locked(server: Server) -> Iterator[Screen]:
    with chrome() as driver:
        yield Screen(driver, server.url)


@pytest.fixture
def screen(locked: Screen, server: Server) -> Iterator[Screen]:
    """Its tab knows the key already."""
    locked.open("/routes")
    locked.run("sessionStorage.setItem('modelyard-key', 'the-owner')")
    yield locked
    locked.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def choose(screen: Screen, model: str) -> None:
    screen.open(f"/playground?model={model}")
    screen.until(lambda: model in screen.see(".model input").get_attribute("value"), f"{model} is chosen")


def say(screen: Screen, text: str) -> None:
    screen.type(MESSAGE, text, Keys.ENTER)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_wrong_key_is_refused_and_the_owners_opens(locked: Screen) -> None:
    locked.open("")
    locked.type("input[type=password]", "wrong", Keys.ENTER)
    locked.see(".trouble", "missing or wrong")
    locked.type("input[type=password]", "a-guest", Keys.ENTER)
    locked.see(".trouble", "admin key")
    assert not locked.all("[data-model]")
    locked.type("input[type=password]", "the-owner", Keys.ENTER)
    locked.see("[data-model=demo]", "ready")
    locked.gone("input[type=password]")


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_model_is_loaded_with_an_override(screen: Screen, server: Server) -> None:
    screen.open("")
    screen.click("[data-model=smollm2] button", "Load")
    screen.see(".q-dialog", "it fits")
    screen.type(".q-dialog input[aria-label=n_ctx]", "1024")
    screen.click(".q-dialog button", "Load")
    screen.see("[data-model=smollm2] .state", "ready")
    screen.see("[data-model=smollm2] .tag", "1\u202f024 tokens")
    assert server.model("smollm2")["overrides"] == {"n_ctx": 1024}


def test_a_load_that_fails_says_why(screen: Screen) -> None:
    screen.open("")
    screen.click("[data-model=missing] button", "Load")
    screen.click(".q-dialog button", "Load")
    screen.see("[data-model=missing] .trouble", "/no/such/file.gguf")
    screen.see("[data-model=missing] .state", "failed")


def test_an_override_out_of_range_is_refused_with_a_sentence(screen: Screen) -> None:
    screen.open("")
    screen.click("[data-model=missing] button", "Load")
    screen.type(".q-dialog input[aria-label=n_threads]", "99999")
    screen.click(".q-dialog .name", "Load")  # leaving the field brings it into its range
    screen.until(
        lambda: screen.see(".q-dialog input[aria-label=n_threads]").get_attribute("value") == "1024", "clipped"
    )


# --- playground -------------------------------------------------------------------------------------------------------


def test_tokens_of_the_real_model_appear_one_after_another(screen: Screen, server: Server) -> None:
    server.ask("POST", "/v1/admin/models/smollm2/load")
    choose(screen, "smollm2")
    screen.type("input[aria-label='Max tokens']", "200", Keys.TAB)
    screen.run(
        "window.lengths = new Set();"
        "new MutationObserver(() => { const said = document.querySelector('.said');"
        " if (said) window.lengths.add(said.textContent.length) })"
        ".observe(document.body, {childList: true, subtree: true, characterData: true})"
    )
    say(screen, "Write a long story about a dragon.")
    screen.see(".turn.assistant", "tok/s")
    assert screen.run("return window.lengths.size") > 1
    assert screen.run("return Math.max(...window.lengths)") > 100


def test_the_stop_button_ends_an_answer_here_and_there(screen: Screen, server: Server) -> None:
    choose(screen, "demo")
    say(screen, "endless")
    screen.until(lambda: len(screen.see(".said").text) > 20, "tokens appear")
    assert server.model("demo")["queue"]["running"] == 1
    screen.click("button", "Stop")
    screen.see(".turn.assistant", "stopped")
    screen.until(lambda: server.model("demo")["queue"]["running"] == 0, "the server stopped, too")
    screen.see("button", "Send")


def test_leaving_the_page_ends_its_answer(screen: Screen, server: Server) -> None:
    choose(screen, "demo")
    say(screen, "endless")
    screen.until(lambda: server.model("demo")["queue"]["running"] == 1, "it runs")
    screen.click(".nav", "Models")
    screen.until(lambda: server.model("demo")["queue"]["running"] == 0, "it was hung up")


@pytest.mark.parametrize("wire", ["OpenAI Chat Completions", "OpenAI Responses", "Anthropic Messages"])
def test_thinking_stands_apart_in_every_protocol(screen: Screen, wire: str) -> None:
    choose(screen, "demo")
    screen.click(".wire")
    screen.click(".q-menu .q-item", wire)
    say(screen, "think")
    screen.see(".turn.assistant", "tok/s")
    assert screen.text(".thought") == "Let me see."
    assert screen.text(".said") == "Forty-two."
    screen.click(".q-tab", "Events")
    screen.see(".sse", "data:")
    screen.click(".q-tab", "curl")
    screen.see(".well", "curl -N http://127.0.0.1")
    assert "the-owner" not in screen.text(".raw")  # a snippet is pasted elsewhere: it names no key


def test_a_picture_goes_along_with_the_next_message(screen: Screen, tmp_path: Path) -> None:
    (tmp_path / "dot.png").write_bytes(base64.b64decode(PICTURE))
    choose(screen, "demo")
    screen.driver.find_element("css selector", "input[type=file]").send_keys(str(tmp_path / "dot.png"))
    screen.see("section .q-img")
    say(screen, "think")
    screen.see(".turn.user .q-img")
    screen.see(".well", "data:image/png;base64")
    screen.see(".turn.assistant", "tok/s")


def test_a_tools_result_goes_back_to_the_model(screen: Screen) -> None:
    choose(screen, "demo")
    screen.click(".settings .q-expansion-item", "Tools")
    screen.type(".settings textarea.q-field__native[aria-label=JSON]", '[{"name": "weather", "parameters": {}}]')
    say(screen, "tool")
    screen.see(".call", '{"city":')
    screen.type("input[aria-label='What weather says']", "sunny")
    screen.click("button", "Send results")
    screen.see(".said", "Take a hat.")


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_requests_page_shows_its_timeline_and_its_texts(screen: Screen) -> None:
    choose(screen, "demo")
    say(screen, "think of the request page")
    screen.click(".turn.assistant a", "see the request")
    screen.see(".timeline")
    screen.see(".card", "decode")
    for name, text in (("RENDERED PROMPT", "think of the request page"), ("RAW OUTPUT", "<think>")):
        assert text in screen.text(".card", name)
    assert "finished" in screen.text(".card", "PARSED EVENTS")
    screen.see(".card", "prompt tokens came from the cache")


def test_a_running_request_is_in_the_table_and_is_cancelled_there(screen: Screen, server: Server) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "endless"}]}
    statuses: list[int] = []

    def ask() -> None:
        reply = httpx.post(server.url + "/v1/chat/completions", json=body, headers=OWNER, timeout=600)
        statuses.append(reply.status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    screen.open("/requests")
    screen.see(".ag-row [col-id=status]", "running")
    screen.click(".ag-row [col-id=act]", "cancel")
    screen.see(".ag-row [col-id=status]", "cancelled")
    asking.join(600)
    assert statuses
    assert statuses[0] >= 400


def test_a_row_opens_with_the_enter_key(screen: Screen, server: Server) -> None:
    server.ask("POST", "/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "think"}]})
    screen.open("/requests")
    screen.see(".ag-row [col-id=model]", "demo")
    screen.run("document.querySelector('.ag-row [col-id=model]').focus()")
    screen.driver.switch_to.active_element.send_keys(Keys.ENTER)
    screen.see("[role=heading]", "Request req_")


def test_nothing_that_somebody_wrote_becomes_html(screen: Screen, server: Server) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": HTML}], "prompt_cache_key": HTML}
    server.ask("POST", "/v1/chat/completions", body)
    screen.open("/requests")
    screen.see(".ag-row [col-id=session]", "<img")
    screen.click(".ag-row [col-id=session]", "<img")
    screen.see(".mono", HTML)
    choose(screen, "demo")
    say(screen, HTML)
    screen.see(".turn.user", HTML)
    screen.see(".turn.assistant", "tok/s")
    assert screen.run("return document.querySelectorAll('main b, .turn b, .ag-row img, .turn img').length") == 0
    assert screen.run("return window.hacked") is None


# --- all of them ------------------------------------------------------------------------------------------------------


def test_every_page_opens_at_phone_width_without_complaint(screen: Screen) -> None:
    screen.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    )
    screen.errors()
    for path, title in PAGES.items():
        screen.open(path)
        screen.see("[role=heading]", title)
        assert screen.run("return document.documentElement.scrollWidth") <= 390, path
    assert screen.errors() == []


def test_the_pages_are_reached_by_keyboard(screen: Screen) -> None:
    screen.open("")
    screen.see(".nav.here", "Models")
    screen.run("[...document.querySelectorAll('a.nav')].find(one => one.innerText.includes('Memory')).focus()")
    screen.driver.switch_to.active_element.send_keys(Keys.ENTER)
    screen.see("[role=heading]", "Memory")
    screen.see(".card", "everything else")
    screen.see(".nav.here", "Memory")


def test_a_name_shows_where_it_leads(screen: Screen) -> None:
    screen.open("/routes")
    screen.type("input[aria-label='Model name']", "smollm2")
    screen.see(".figures", "smollm2")
    screen.type("input[aria-label='Model name']", "no-such-model")
    screen.see(".trouble", "no-such-model")


def test_light_and_dark_are_chosen_and_remembered(screen: Screen) -> None:
    screen.open("")
    screen.see(".nav.here")
    screen.click("button[aria-label='Light or dark']")
    screen.see("body.body--dark")
    screen.open("/memory")
    screen.see("body.body--dark [role=heading]", "Memory")
    screen.run("localStorage.clear()")


def test_a_model_is_unloaded(screen: Screen, server: Server) -> None:
    server.ask("POST", "/v1/admin/models/smollm2/load")
    screen.open("")
    screen.click("[data-model=smollm2] button", "Unload")
    screen.see("[data-model=smollm2] .state", "stopped")
    assert server.model("smollm2")["state"] == "stopped"


def test_the_page_comes_back_by_itself_when_the_server_does(screen: Screen, server: Server) -> None:
    screen.open("")
    screen.see("[data-model=demo]", "ready")
    screen.run("document.querySelector('[data-model=demo]').id = 'before'")
    server.stop()
    screen.see("#popup", "Connection lost")
    server.begin_again()
    screen.gone("#before")
    screen.see("[data-model=demo]", "ready")
    assert not screen.all("input[type=password]")


# --- the optimizer ----------------------------------------------------------------------------------------------------


def test_what_the_optimizer_has_found_is_drawn_and_never_read_as_html(locked: Screen, tmp_path: Path) -> None:
    told = found_run(verdict=HTML, toml="[models.m]\nn_ubatch = 64", left_out=[HTML])
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune" / "20261115T120203-m-chat.json").write_text(json.dumps(told))
    fake = '[models.demo]\nbackend = "fake"\n'
    with serve(tmp_path, config=fake, MODELYARD_CACHE=str(tmp_path)) as running:
        screen = Screen(locked.driver, running.url)
        screen.open("/plots")
        screen.see(".q-expansion-item", "m for chat · 1.50 times as good")
        screen.see(".q-expansion-item canvas")
        screen.see(".q-table", "best: n_ubatch = 64")
        screen.see(".q-expansion-item .well", "n_ubatch = 64")
        screen.see(".q-expansion-item", HTML)
        assert not screen.run("return window.hacked")
        screen.driver.get("about:blank")  # a page whose server is gone complains for ever
