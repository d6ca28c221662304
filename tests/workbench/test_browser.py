"""The workbench in a real browser, with a real server and the default model."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from modelyard.library import default_model
from tests.cli_process import ServerProcess, serve
from tests.library.web import serve_hub
from tests.workbench.browser import TIMEOUT_S, BrowserPage, chrome
from tests.workbench.pages.test_plots import optimizer_run

pytestmark = pytest.mark.browser

CONFIG = """
[log]
history_texts = true

[store]
chats = "chats.sqlite"

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
    { when = "^markdown", steps = [
        { text = "# Title\\n\\n|a|b|\\n|-|-|\\n|1|2|\\n\\n```python\\nreturn 1\\n```\\n\\n$x^2$" },
    ] },
    { when = "^hostile", steps = [
        { text = "<img src=x onerror='hacked = 1'><script>window.hacked = 1</script> [x](javascript:hack())" },
    ] },
    { when = "^long", steps = [{ tokens = 400 }] },
    { when = "^fail", steps = [{ text = "so far" }, { fail = "out of memory" }] },
]

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
OWNER = {"authorization": "Bearer the-owner"}
PAGES = {
    "": "Models",
    "/chat": "Chat",
    "/requests": "Requests",
    "/memory": "Memory",
    "/caches": "Caches",
    "/plots": "Plots",
    "/routes": "Routes",
    "/logs": "Logs",
}
HTML = '<img src=x onerror="window.hacked = 1"><b>bold</b>{{7 * 7}}'
IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
MESSAGE = "textarea[aria-label=Message]"
IN_VIEW = (
    "const box = document.querySelector('{css}').getBoundingClientRect();"
    "const view = document.querySelector('.messages').getBoundingClientRect();"
    "return box.top >= view.top - 1 && box.bottom <= view.bottom + 1"
)
KEY_ITEM = "sessionStorage['modelyard-key']"


class RestartableServer:
    """A server that can be stopped and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack = folder, ExitStack()
        self._serving = self._start("0")
        self.url = self._serving.url

    def _start(self, port: str) -> ServerProcess:
        return self._stack.enter_context(serve(self._folder, "--port", port, config=CONFIG))

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
    """A page whose tab has the key."""
    if not (locked.driver.current_url.startswith(server.url) and locked.run(f"return {KEY_ITEM}") == "the-owner"):
        locked.open("/routes")
        locked.run(f"{KEY_ITEM} = 'the-owner'")
    yield locked
    locked.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def choose(page: BrowserPage, model: str) -> None:
    """A new chat with this model."""
    page.open(f"/chat?model={model}")
    page.find(".model .q-chip", model)


def send(page: BrowserPage, text: str) -> None:
    page.type(MESSAGE, text, Keys.ENTER)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_only_an_admin_key_unlocks_the_page(locked: BrowserPage) -> None:
    locked.open("")
    locked.type("input[type=password]", "wrong", Keys.ENTER)
    locked.find(".error", "missing or wrong")
    locked.type("input[type=password]", "a-guest", Keys.ENTER)
    locked.find(".error", "admin key")
    assert not locked.find_all("[data-model]")
    locked.type("input[type=password]", "the-owner", Keys.ENTER)
    locked.find("[data-model=demo]", "ready")
    locked.wait_gone("input[type=password]")


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_model_is_loaded_with_an_override(page: BrowserPage, server: RestartableServer) -> None:
    page.open("")
    page.click("[data-model=smollm2] button", "Load")
    page.find(".q-dialog", "it fits")
    page.type(".q-dialog input[aria-label=n_ctx]", "1024")
    page.click(".q-dialog button", "Load")
    page.find("[data-model=smollm2] .state", "ready")
    page.find("[data-model=smollm2] .tag", "1\u202f024 tokens")
    assert server.model("smollm2")["overrides"] == {"n_ctx": 1024}


def test_a_failed_load_shows_the_reason(page: BrowserPage) -> None:
    page.open("")
    page.click("[data-model=missing] button", "Load")
    page.click(".q-dialog button", "Load")
    page.find("[data-model=missing] .error", "/no/such/file.gguf")
    page.find("[data-model=missing] .state", "failed")


def test_an_override_is_clipped_to_its_range(page: BrowserPage) -> None:
    page.open("")
    page.click("[data-model=missing] button", "Load")
    page.type(".q-dialog input[aria-label=n_threads]", "99999")
    page.click(".q-dialog .name", "Load")  # leaving the field clips its value
    page.wait_until(
        lambda: page.find(".q-dialog input[aria-label=n_threads]").get_attribute("value") == "1024", "clipped"
    )


# --- chat -------------------------------------------------------------------------------------------------------------


def test_tokens_of_a_real_model_are_streamed(page: BrowserPage, server: RestartableServer) -> None:
    server.api("POST", "/v1/admin/models/smollm2/load")
    choose(page, "smollm2")
    page.type("input[aria-label='Max tokens']", "64", Keys.TAB)
    page.run(
        "window.lengths = new Set();"
        "new MutationObserver(() => { const answer = document.querySelector('.answer');"
        " if (answer) window.lengths.add(answer.textContent.length) })"
        ".observe(document.body, {childList: true, subtree: true, characterData: true})"
    )
    send(page, "Write a long story about a dragon.")
    page.find(".turn.assistant", "tok/s")
    assert page.run("return window.lengths.size") > 1
    assert page.run("return Math.max(...window.lengths)") > 100


def test_markdown_is_drawn_and_hostile_output_does_nothing(page: BrowserPage) -> None:
    choose(page, "demo")
    send(page, "markdown")
    page.find(".turn.assistant", "tok/s")
    for css in ("h1", "td", "math msup", "pre .k"):
        assert page.run(f"return document.querySelectorAll('.answer {css}').length") > 0, css
    send(page, "hostile")
    page.wait_until(lambda: len(page.find_all(".turn.assistant", "tok/s")) == 2, "the second answer")
    assert page.run("return document.querySelectorAll('.turn img, .turn script, .turn [onerror]').length") == 0
    assert page.run("return window.hacked") is None


def test_the_stop_button_cancels_the_request_on_the_server(page: BrowserPage, server: RestartableServer) -> None:
    choose(page, "demo")
    send(page, "endless")
    page.wait_until(lambda: len(page.find(".answer").text) > 20, "tokens appear")
    assert server.model("demo")["queue"]["running"] == 1
    page.click("button", "Stop")
    page.find(".turn.assistant", "stopped")
    page.wait_until(lambda: server.model("demo")["queue"]["running"] == 0, "the server stopped as well")
    page.find("button", "Send")


def test_leaving_the_page_cancels_the_request_and_keeps_what_was_said(
    page: BrowserPage, server: RestartableServer
) -> None:
    choose(page, "demo")
    send(page, "endless story")
    page.wait_until(lambda: len(page.find(".answer").text) > 20, "tokens appear")
    page.click(".nav", "Models")
    page.wait_until(lambda: server.model("demo")["queue"]["running"] == 0, "the request was cancelled")

    def answer() -> str:
        (listed,) = server.api("GET", "/v1/admin/chats?search=endless%20story")["data"]
        parts = server.api("GET", f"/v1/admin/chats/{listed['id']}")["turns"][-1]["parts"]
        return str(parts[0]["text"]) if parts else ""

    page.wait_until(lambda: len(answer()) > 20, "the partial answer is stored")


def test_reasoning_is_shown_separately_in_every_protocol(page: BrowserPage) -> None:
    for protocol in ("OpenAI Chat Completions", "OpenAI Responses", "Anthropic Messages"):
        choose(page, "demo")
        page.click(".protocol")
        page.click(".q-menu .q-item", protocol)
        page.wait_gone(".q-menu")
        send(page, "think")
        page.find(".turn.assistant", "tok/s")
        assert not page.find_all(".reasoning"), "thoughts are folded away"
        page.click(".thinking .q-item", "Thoughts")
        assert page.text(".reasoning") == "Let me see.", protocol
        assert page.text(".answer") == "Forty-two.", protocol
        page.click(".q-tab", "Events")
        page.find(".sse", "data:")
        page.click(".q-tab", "curl")
        page.find(".code-block", "curl -N http://127.0.0.1")
        assert "the-owner" not in page.text(".chat-side")  # snippets are pasted elsewhere


def test_an_image_is_sent_with_the_next_message(page: BrowserPage, tmp_path: Path) -> None:
    (tmp_path / "dot.png").write_bytes(base64.b64decode(IMAGE))
    choose(page, "demo")
    page.driver.find_element("css selector", "input[type=file]").send_keys(str(tmp_path / "dot.png"))
    page.find(".attachment .q-img")
    send(page, "think")
    page.find(".turn.user .q-img")
    page.click(".q-tab", "Request")
    page.find(".code-block", "data:image/png;base64")
    page.find(".turn.assistant", "tok/s")
    assert not page.find_all(".attachment")


def test_a_pasted_image_is_attached(page: BrowserPage) -> None:
    choose(page, "demo")
    page.find(MESSAGE)
    page.run(
        f"const bytes = Uint8Array.from(atob('{IMAGE}'), letter => letter.charCodeAt(0));"
        "const data = new DataTransfer(); data.items.add(new File([bytes], 'dot.png', {type: 'image/png'}));"
        f"document.querySelector('{MESSAGE}').dispatchEvent("
        "new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true}))"
    )
    page.find(".attachment .q-img")
    page.click(".attachment button[aria-label=Remove]")
    page.wait_gone(".attachment")


def test_a_tool_call_is_a_card_whose_result_is_sent_to_the_model(page: BrowserPage) -> None:
    choose(page, "demo")
    page.click(".chat-side .q-expansion-item", "Tools")
    page.type(".chat-side textarea[aria-label=JSON]", '[{"name": "weather", "parameters": {}}]')
    send(page, "tool")
    page.find(".call", "weather")
    page.find(".call", "Rome")
    page.type("textarea[aria-label='Result of weather']", "sunny")
    page.click("button", "Send results")
    page.find(".answer", "Take a hat.")
    assert "sunny" in page.text(".call", "weather")


def test_an_edited_message_and_a_new_answer_are_versions_that_can_be_shown_again(page: BrowserPage) -> None:
    choose(page, "demo")
    send(page, "think of one")
    page.find(".turn.assistant", "tok/s")
    page.click("button[aria-label='Edit and send again']")
    page.type("textarea[aria-label='Edited message']", "markdown instead", Keys.ENTER)
    page.find(".answer h1", "Title")
    page.find(".turn.assistant", "tok/s")
    assert "2 / 2" in page.text(".turn.user", "markdown instead")
    page.click(".turn.user button[aria-label='Previous version']")
    page.find(".turn.user", "think of one")
    page.find(".answer", "Forty-two.")
    page.click("button[aria-label='Answer again']")
    page.find(".turn.assistant .versions", "2 / 2")
    page.find(".turn.assistant", "tok/s")


def test_several_models_answer_side_by_side_and_one_is_continued(page: BrowserPage, server: RestartableServer) -> None:
    choose(page, "demo")
    page.type(".model input", "second", Keys.ENTER)
    page.find(".model .q-chip", "second")
    page.find(MESSAGE).click()
    send(page, "think of both")
    page.wait_until(lambda: len(page.find_all(".round .turn.assistant", "tok/s")) == 2, "both answers")
    assert "Forty-two." in page.text(".round .turn.assistant", "demo")
    assert "From the second." in page.text(".round .turn.assistant", "second")
    page.click(".round .turn.assistant button", "Continue with this")
    page.wait_until(lambda: len(page.find_all("button", "Continue with this")) == 1, "the other can be chosen")
    (listed,) = server.api("GET", "/v1/admin/chats?search=think%20of%20both")["data"]
    chat = server.api("GET", f"/v1/admin/chats/{listed['id']}")
    assert next(turn for turn in chat["turns"] if turn["id"] == chat["head"])["model"] == "second"


def test_a_chat_is_found_by_its_text_opened_renamed_exported_and_deleted(
    page: BrowserPage, server: RestartableServer, tmp_path: Path
) -> None:
    choose(page, "demo")
    send(page, "think of walruses")
    page.find(".turn.assistant", "tok/s")
    page.find(".row.current", "think of walruses")
    page.open("/chat")
    page.type("input[aria-label='Search in chats']", "walrus")
    page.click(".chat-list .row", "think of walruses")
    page.find(".turn.user", "think of walruses")
    page.find(".answer", "Forty-two.")
    page.click(".row.current button[aria-label=More]")
    page.click(".q-menu .q-item", "Rename")
    page.type("input[aria-label='Name of the chat']", "Sea mammals", Keys.ENTER)
    page.find(".row.current", "Sea mammals")
    page.driver.execute_cdp_cmd("Page.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.click(".row.current button[aria-label=More]")
    page.click(".q-menu .q-item", "Export as Markdown")
    exported = tmp_path / "Sea-mammals.md"
    page.wait_until(exported.exists, "the download")
    assert "Forty-two." in exported.read_text()
    page.click(".row.current button[aria-label=More]")
    page.click(".q-menu .q-item", "Delete")
    page.click(".q-dialog button", "Delete")
    page.wait_gone(".chat-list .row", "Sea mammals")
    page.wait_gone(".turn")
    assert server.api("GET", "/v1/admin/chats?search=walrus")["data"] == []


def test_an_error_is_shown_in_the_chat_and_the_answer_can_be_tried_again(page: BrowserPage) -> None:
    choose(page, "demo")
    send(page, "fail please")
    page.find(".turn.assistant [role=alert]", "out of memory")
    page.find(".answer", "so far")
    assert page.run(IN_VIEW.format(css=".turn.assistant [role=alert]"))
    page.find("button[aria-label='Answer again']")


def test_streaming_keeps_the_end_in_view_unless_the_user_scrolls_up(page: BrowserPage) -> None:
    choose(page, "demo")
    send(page, "long text")
    page.find(".turn.assistant", "tok/s")
    send(page, "endless")
    page.wait_until(lambda: len(page.find_all(".answer")) == 2 and len(page.find_all(".answer")[1].text) > 200, "text")
    assert (
        page.run("const e = document.querySelector('.messages'); return e.scrollHeight - e.scrollTop - e.clientHeight")
        < 60
    )
    page.run(
        "const e = document.querySelector('.messages');"
        "e.dispatchEvent(new WheelEvent('wheel', {deltaY: -500})); e.scrollTop = 0;"
        "e.dispatchEvent(new Event('scroll'))"
    )
    length = len(page.find_all(".answer")[1].text)
    page.wait_until(lambda: len(page.find_all(".answer")[1].text) > length + 100, "more text")
    assert page.run("return document.querySelector('.messages').scrollTop") == 0
    page.click("button[aria-label='Jump to the end']")
    page.wait_until(
        lambda: (
            page.run(
                "const e = document.querySelector('.messages'); return e.scrollHeight - e.scrollTop - e.clientHeight"
            )
            < 60
        ),
        "it follows again",
    )
    page.click("button", "Stop")
    page.find(".turn.assistant", "stopped")


def test_the_window_fills_while_a_message_is_typed(page: BrowserPage) -> None:
    choose(page, "demo")
    page.type(MESSAGE, "few words")
    page.find(".context-meter", "of 4\u202f096 tokens")
    before = page.text(".context-meter", "tokens")
    page.type(MESSAGE, "many more words in this message")
    page.wait_until(lambda: page.text(".context-meter", "tokens") != before, "the count changes")


# --- requests ---------------------------------------------------------------------------------------------------------


def test_the_page_of_a_request_shows_its_timeline_and_texts(page: BrowserPage) -> None:
    choose(page, "demo")
    send(page, "think of the request page")
    page.click(".turn.assistant a", "view request")
    page.find(".timeline")
    page.find(".card", "decode")
    for name, text in (("RENDERED PROMPT", "think of the request page"), ("RAW OUTPUT", "<think>")):
        assert text in page.text(".card", name)
    assert "finished" in page.text(".card", "PARSED EVENTS")
    page.find(".card", "prompt tokens came from the cache")


def test_a_running_request_can_be_cancelled_in_the_table(page: BrowserPage, server: RestartableServer) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "endless"}]}
    statuses: list[int] = []

    def ask() -> None:
        reply = httpx.post(server.url + "/v1/chat/completions", json=body, headers=OWNER, timeout=600)
        statuses.append(reply.status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    page.open("/requests")
    page.find(".ag-row [col-id=status]", "running")
    page.click(".ag-row [col-id=act]", "cancel")
    page.find(".ag-row [col-id=status]", "cancelled")
    asking.join(600)
    assert statuses
    assert statuses[0] >= 400


def test_a_row_opens_with_the_enter_key(page: BrowserPage, server: RestartableServer) -> None:
    server.api("POST", "/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "think"}]})
    page.open("/requests")
    page.find(".ag-row [col-id=model]", "demo")
    page.run("document.querySelector('.ag-row [col-id=model]').focus()")
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    page.find("[role=heading]", "Request req_")


def test_user_text_is_never_rendered_as_html(page: BrowserPage, server: RestartableServer) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": HTML}], "prompt_cache_key": HTML}
    server.api("POST", "/v1/chat/completions", body)
    page.open("/requests")
    page.find(".ag-row [col-id=session]", "<img")
    page.click(".ag-row [col-id=session]", "<img")
    page.find(".mono", HTML)
    choose(page, "demo")
    send(page, HTML)
    page.find(".turn.user", HTML)
    page.find(".turn.assistant", "tok/s")
    assert page.run("return document.querySelectorAll('main b, .turn b, .ag-row img, .turn img').length") == 0
    assert page.run("return window.hacked") is None


# --- every page -------------------------------------------------------------------------------------------------------


def test_every_page_fits_a_phone_without_errors(page: BrowserPage) -> None:
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    )
    page.errors()
    for path, title in PAGES.items():
        page.open(path)
        page.find("[role=heading]", title)
        assert page.run("return document.documentElement.scrollWidth") <= 390, path
    assert page.errors() == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_core_finds_no_serious_barrier(page: BrowserPage, theme: str, request: pytest.FixtureRequest) -> None:
    script = resources.files("axe_core_python").joinpath("axe.min.js").read_text()
    page.driver.set_script_timeout(TIMEOUT_S)
    page.open("/routes")
    page.run(f"localStorage['modelyard-dark'] = '{theme}'")
    request.addfinalizer(lambda: page.run("localStorage.clear()"))
    choose(page, "demo")
    send(page, "markdown")
    page.find(".turn.assistant", "tok/s")
    for path, title in {"/chat": "Chat", **PAGES}.items():
        if path != "/chat":
            page.open(path)
        page.find(f"body.body--{theme} [role=heading]", title)
        page.driver.execute_script(script)
        found = page.driver.execute_async_script("axe.run(document, {resultTypes: ['violations']}).then(arguments[0])")
        serious = [rule for rule in found["violations"] if rule["impact"] in ("serious", "critical")]
        assert [(rule["id"], rule["nodes"][0]["html"][:200]) for rule in serious] == [], path
        assert page.driver.title == f"{title} · Modelyard"
        assert page.run("return document.documentElement.lang") == "en"


def test_pages_can_be_opened_by_keyboard(page: BrowserPage) -> None:
    page.open("")
    page.find(".nav.active", "Models")
    page.run("[...document.querySelectorAll('a.nav')].find(one => one.innerText.includes('Memory')).focus()")
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    page.find("[role=heading]", "Memory")
    page.find(".card", "everything else")
    page.find(".nav.active", "Memory")


def test_the_routes_page_resolves_a_name(page: BrowserPage) -> None:
    page.open("/routes")
    page.type("input[aria-label='Model name']", "smollm2")
    page.find(".stats", "smollm2")
    page.type("input[aria-label='Model name']", "no-such-model")
    page.find(".error", "no-such-model")
    page.find(".q-table", "claude-*")


def test_log_lines_are_filtered_by_level_and_text(page: BrowserPage, server: RestartableServer) -> None:
    server.api("GET", "/v1/models")
    page.open("/logs")
    page.find(".log-lines div", "path=/v1/models")
    page.type("input[aria-label=Contains]", "no such text")
    page.wait_gone(".log-lines div")
    page.type("input[aria-label=Contains]", "/v1/models")
    page.find(".log-lines div", "path=/v1/models")


def test_the_theme_is_remembered(page: BrowserPage) -> None:
    page.open("")
    page.find(".nav.active")
    page.click("button[aria-label='Light or dark']")
    page.find("body.body--dark")
    page.open("/memory")
    page.find("body.body--dark [role=heading]", "Memory")
    page.run("localStorage.clear()")


def test_a_model_is_unloaded(page: BrowserPage, server: RestartableServer) -> None:
    server.api("POST", "/v1/admin/models/smollm2/load")
    page.open("")
    page.click("[data-model=smollm2] button", "Unload")
    page.find("[data-model=smollm2] .state", "stopped")
    assert server.model("smollm2")["state"] == "stopped"


def test_the_page_reconnects_when_the_server_is_back(page: BrowserPage, server: RestartableServer) -> None:
    page.open("")
    page.find("[data-model=demo]", "ready")
    page.run("document.querySelector('[data-model=demo]').id = 'before'")
    server.stop()
    page.find("#popup", "Connection lost")
    server.restart()
    page.wait_gone("#before")
    page.find("[data-model=demo]", "ready")
    assert not page.find_all("input[type=password]")


# --- the optimizer ----------------------------------------------------------------------------------------------------


def test_optimizer_runs_are_shown_and_never_rendered_as_html(locked: BrowserPage, tmp_path: Path) -> None:
    run = optimizer_run(verdict=HTML, toml="[models.m]\nn_ubatch = 64", left_out=[HTML])
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune" / "20261115T120203-m-chat.json").write_text(json.dumps(run))
    fake = '[models.demo]\nbackend = "fake"\n'
    with serve(tmp_path, config=fake, MODELYARD_CACHE=str(tmp_path)) as running:
        page = BrowserPage(locked.driver, running.url)
        page.open("/plots")
        page.find(".q-expansion-item", "m for chat · 1.50 times as good")
        page.find(".q-expansion-item canvas")
        page.find(".q-table", "best: n_ubatch = 64")
        page.find(".q-expansion-item .code-block", "n_ubatch = 64")
        page.find(".q-expansion-item", HTML)
        assert not page.run("return window.hacked")
        page.driver.get("about:blank")  # a page without its server reports errors for ever


# --- /docs ------------------------------------------------------------------------------------------------------------


def test_the_api_documentation_works_and_loads_nothing_from_outside(page: BrowserPage) -> None:
    """It is here because it needs the browser, which takes seconds to start."""
    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.setExtraHTTPHeaders", {"headers": OWNER})
    try:
        page.driver.get("about:blank")  # ends the connections of the page before, whose server may be gone
        page.errors()
        page.driver.get(f"{page.url}/docs")
        page.click(".opblock-summary", "/health/ready")
        page.click("button.execute")
        assert page.text(".live-responses-table .response-col_status", "200")
        loaded = page.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
        assert len(loaded) >= 4  # script, style, schema, and the request
        assert [url for url in loaded if not url.startswith((page.url, "data:"))] == []
        assert page.errors() == []
    finally:
        page.driver.execute_cdp_cmd("Network.setExtraHTTPHeaders", {"headers": {}})


# --- the first model --------------------------------------------------------------------------------------------------


def test_a_new_server_leads_to_its_first_model_in_three_clicks(locked: BrowserPage, tmp_path: Path) -> None:
    model = default_model.fetch().read_bytes()
    with serve_hub() as hub:
        hub.repos["unsloth/Qwen3-1.7B-GGUF"] = {"m-Q4_1.gguf": model, "m-F16.gguf": model + bytes(1 << 20)}
        environment = {"MODELYARD_CACHE": str(tmp_path), "MODELYARD_LIBRARY": "true", "HF_ENDPOINT": hub.url}
        unused = '[models.unused]\nbackend = "fake"\nenabled = false\n'
        with serve(tmp_path, config=unused, **environment) as running:
            page = BrowserPage(locked.driver, running.url)
            page.open("")
            page.click("button", "Small and quick")
            page.find(".result-row", "fits")
            hub.held.add("m-Q4_1.gguf")
            page.click(".result-row button", "Get")
            page.find(".download", "MiB of")
            page.click(".download button", "Cancel")
            page.find(".download", "cancelled at")
            hub.held.clear()
            hub.gate.set()
            page.click(".download button", "Resume")
            page.find(".download", "in the library as")
            page.click(".download button", "Chat")
            page.find(".model .q-chip", "Qwen3-1.7B")
            send(page, "Hello")
            page.find(".turn.assistant", "tok/s")
            page.driver.get("about:blank")
        assert [range for range in hub.ranges if range and not range.startswith("bytes=0-")], "it was continued"
