"""The pages of the workbench in a real browser, but for the chat and the forms, with a real server."""

from __future__ import annotations

import json
import threading
from importlib import resources
from pathlib import Path

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from modelyard.library import default_model
from tests.cli_process import serve
from tests.library.web import serve_hub
from tests.workbench.browser import OWNER, TIMEOUT_S, WIDTHS, BrowserPage, choose, open_settings, send
from tests.workbench.conftest import RestartableServer
from tests.workbench.pages.test_plots import optimizer_run

pytestmark = pytest.mark.browser

PAGES = {
    "": "Chat",
    "/models": "Models",
    "/requests": "Requests",
    "/memory": "Memory",
    "/caches": "Caches",
    "/plots": "Plots",
    "/routes": "Routes",
    "/keys": "Keys",
    "/logs": "Logs",
    "/models/edit?name=demo": "Edit demo",
    "/caches/edit": "New cache",
    "/routes/edit?index=0": "Edit route 1",
    "/usage": "Usage",
}
# The dark theme differs in its colours only.
AXE_OPTIONS = {
    "light": "{resultTypes: ['violations']}",
    "dark": "{resultTypes: ['violations'], runOnly: {type: 'rule', values: ['color-contrast']}}",
}
# Cells and labels whose text is cut off without a way to see it: neither a tooltip nor a scrollable box around them.
CUT_OFF = """
const isWider = (each) => each.scrollWidth > each.clientWidth;
const scrolls = (each) => Boolean(each) && (scrolls(each.parentElement)
  || (/auto|scroll/.test(getComputedStyle(each).overflowX) && isWider(each)));
return [...document.querySelectorAll('.q-table td, .q-table th, .ag-cell, .ag-header-cell-text, .value, .tag, .name')]
  .filter(each => each.offsetParent && isWider(each) && !each.closest('[title]'))
  .filter(each => each.closest('.ag-root') || !scrolls(each))
  .map(each => each.className + ': ' + each.innerText)
"""
HTML = '<img src=x onerror="window.hacked = 1"><b>bold</b>{{7 * 7}}'


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_logs_a_browser_in_for_all_its_tabs_and_restarts_and_ends_with_the_key(
    locked: BrowserPage, server: RestartableServer
) -> None:
    made = server.api("POST", "/v1/admin/keys", {"name": "reader"})
    locked.log_out()
    locked.open("")
    locked.type("input[type=password]", "wrong", Keys.ENTER)
    locked.find(".error", "missing or wrong")
    assert not locked.find_all(".chat-page")
    locked.type("input[type=password]", made["secret"], Keys.ENTER)
    locked.find(".account", "reader")
    (cookie,) = locked.driver.get_cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/workbench")
    assert made["secret"] not in cookie["value"]
    first = locked.driver.current_window_handle
    locked.driver.switch_to.new_window("tab")
    server.stop()
    server.restart()
    locked.open("")
    locked.find(".account", "reader")
    assert [text.split("\n")[-1] for text in locked.texts(".nav")] == ["Chat", "Usage"]
    server.api("DELETE", f"/v1/admin/keys/{made['id']}")
    locked.open("")
    locked.find("input[type=password]")
    locked.driver.close()
    locked.driver.switch_to.window(first)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_member_chats_and_sees_its_usage_and_no_page_of_administrators(
    locked: BrowserPage, server: RestartableServer, width: int
) -> None:
    locked.resize(width)
    locked.log_out()
    locked.open("")
    locked.type("input[type=password]", "a-guest", Keys.ENTER)
    locked.find(".account", "guest")
    choose(locked, "second")
    send(locked, f"a word of the guest at {width}")
    locked.find(".turn.assistant", "From the second.")
    assert not locked.find_all("a", "view request")
    locked.open("/usage")
    locked.find("[data-key=guest] .stats")
    locked.click(".q-btn", "Model")
    locked.find(".usage td", "second")
    assert not locked.find_all("[data-key=owner]")
    for path in ("/models", "/requests", "/memory", "/caches", "/plots", "/routes", "/keys", "/logs", "/models/edit"):
        locked.open(path)
        locked.find("[role=heading]", "For administrators")
    locked.open("")
    locked.click(".account")
    locked.click(".q-menu .q-item", "Log out")
    locked.find("input[type=password]")
    assert [one["title"] for one in server.api("GET", "/v1/admin/chats?search=guest")["data"]] == []


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_model_is_loaded_with_an_override(page: BrowserPage, server: RestartableServer) -> None:
    page.open("/models")
    page.click("[data-model=smollm2] button", "Load")
    page.find(".q-dialog", "It fits")
    page.type(".q-dialog input[aria-label='Tokens of a conversation']", "1024")
    page.click(".q-dialog button", "Load")
    page.find("[data-model=smollm2] .state", "ready")
    page.find("[data-model=smollm2] .tag", "1\u202f024 tokens")
    assert server.model("smollm2")["overrides"] == {"n_ctx": 1024}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_verdict_and_the_button_of_a_load_are_in_view(page: BrowserPage, width: int) -> None:
    page.resize(width)
    page.open("/models")
    page.click("[data-model=missing] button", "Load")
    page.find(".q-dialog input[aria-label='Tokens of a conversation']")
    page.type(".q-dialog input[aria-label='Tokens of a conversation']", "1024")
    page.find(".load-foot")
    assert page.is_in_view(".load-foot button")
    assert page.is_in_view(".load-foot")
    page.click(".q-dialog button", "Cancel")
    page.wait_gone(".q-dialog")


@pytest.mark.parametrize("width", WIDTHS)
def test_plots_span_the_whole_hour(page: BrowserPage, server: RestartableServer, width: int) -> None:
    page.resize(width)
    server.api("POST", "/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "think"}]})
    page.open("/plots")
    page.find(".grid-cards canvas")
    found = "const id = document.querySelector('.grid-cards canvas').closest('[id^=c]').id.slice(1);"
    found += "const axis = getElement(id).chart.getOption().xAxis[0]; return axis.max - axis.min"
    page.wait_until(lambda: page.run(found) == pytest.approx(3_600_000), "an hour")
    assert page.is_in_view(".grid-cards canvas")


def test_a_failed_load_shows_the_reason(page: BrowserPage) -> None:
    page.open("/models")
    page.click("[data-model=missing] button", "Load")
    page.click(".q-dialog button", "Load")
    page.find("[data-model=missing] .error", "/no/such/file.gguf")
    page.find("[data-model=missing] .state", "failed")


def test_an_override_is_clipped_to_its_range(page: BrowserPage) -> None:
    page.open("/models")
    page.click("[data-model=missing] button", "Load")
    page.type(".q-dialog input[aria-label='Threads for answers']", "99999")
    page.click(".q-dialog .name", "Load")  # leaving the field clips its value
    page.wait_until(
        lambda: page.find(".q-dialog input[aria-label='Threads for answers']").get_attribute("value") == "1024",
        "clipped",
    )


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


@pytest.mark.parametrize("width", [1440, 390])
def test_nothing_in_a_table_is_cut_off_without_a_way_to_see_it(
    page: BrowserPage, server: RestartableServer, width: int
) -> None:
    long_name = "a-session-with-a-name-that-no-column-is-wide-enough-for"
    body = {"model": "demo", "messages": [{"role": "user", "content": "think"}], "prompt_cache_key": long_name}
    server.api("POST", "/v1/chat/completions", body)
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    for path, css in (
        ("/requests", ".ag-row [col-id=session]"),
        ("/routes", "td"),
        ("/keys", ".usage td"),
        ("/models", ".tag"),
    ):
        page.open(path)
        page.find(css)
        assert page.run(CUT_OFF) == [], path
    if width == 1440:
        page.open("/requests")
        page.find(".ag-row")
        grid = "document.querySelector('.ag-center-cols-viewport')"
        assert page.run(f"return {grid}.scrollWidth - {grid}.clientWidth") <= 0, "all columns fit"


def test_axe_core_finds_no_serious_barrier(page: BrowserPage, request: pytest.FixtureRequest) -> None:
    script = resources.files("axe_core_python").joinpath("axe.min.js").read_text()
    page.driver.set_script_timeout(TIMEOUT_S)
    page.open("/routes")
    page.run("localStorage.clear()")
    request.addfinalizer(lambda: page.run("localStorage.clear()"))
    choose(page, "demo")
    send(page, "markdown")
    page.find(".turn.assistant", "tok/s")
    for path, title in {"/chat": "Chat", **PAGES}.items():
        if path != "/chat":
            page.open(path)
        page.find("body.body--light [role=heading]", title)
        page.wait_until(lambda title=title: page.driver.title == f"{title} · Modelyard", f"the title of {path}")
        assert page.run("return document.documentElement.lang") == "en"
        has_icons = "return document.fonts.check('24px \"Material Icons\"')"  # else they are text
        page.wait_until(lambda script=has_icons: page.run(script), "the icons")
        page.run(script)
        for theme, options in AXE_OPTIONS.items():
            if theme == "dark":
                page.run("document.querySelector('button[aria-label=\"Light or dark\"]').click()")
                page.find("body.body--dark")
            found = page.driver.execute_async_script(f"axe.run(document, {options}).then(arguments[0])")
            serious = [rule for rule in found["violations"] if rule["impact"] in ("serious", "critical")]
            assert [(rule["id"], rule["nodes"][0]["html"][:200]) for rule in serious] == [], (path, theme)
        page.run("localStorage.clear()")


def test_pages_can_be_opened_by_keyboard(page: BrowserPage) -> None:
    page.open("/models")
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
    page.open("/models")
    page.find(".nav.active")
    page.click("button[aria-label='Light or dark']")
    page.find("body.body--dark")
    page.open("/memory")
    page.find("body.body--dark [role=heading]", "Memory")
    page.run("localStorage.clear()")


def test_a_model_is_unloaded(page: BrowserPage, server: RestartableServer) -> None:
    server.api("POST", "/v1/admin/models/smollm2/load")
    page.open("/models")
    page.click("[data-model=smollm2] button", "Unload")
    page.find("[data-model=smollm2] .state", "stopped")
    assert server.model("smollm2")["state"] == "stopped"


def test_the_page_reconnects_when_the_server_is_back(page: BrowserPage, server: RestartableServer) -> None:
    page.open("/models")
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
        assert page.run(CUT_OFF) == []
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
            page.open_as_owner(running)
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
            open_settings(page)
            page.type("input[aria-label='Max tokens']", "8", Keys.TAB)
            send(page, "Hello")
            page.find(".turn.assistant", "tok/s")
            page.driver.get("about:blank")
        assert [range for range in hub.ranges if range and not range.startswith("bytes=0-")], "it was continued"
