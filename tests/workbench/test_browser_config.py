"""Models, caches and routes are edited in a real browser: the form, the difference, the file and the running server."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from tests.cli_process import serve
from tests.workbench.browser import BrowserPage, send
from tests.workbench.conftest import CONFIG, RestartableServer

pytestmark = pytest.mark.browser


@pytest.fixture
def file(server: RestartableServer) -> Path:
    return server.file


def test_a_model_is_added_changed_and_removed(page: BrowserPage, server: RestartableServer, file: Path) -> None:
    page.open("/models")
    page.click("button", "Add a model")
    page.find("[role=heading]", "New model")
    page.type("input[aria-label=Name]", "fresh", Keys.TAB)
    page.choose_option("backend", "fake")
    page.find(".diff .added", "[models.fresh]")
    page.find(".written", str(file))
    assert "fresh" not in file.read_text(), "a preview writes nothing"
    page.add_setting("token_delay")
    page.type("input[aria-label=token_delay]", "0.25")
    page.find(".diff .added", "token_delay = 0.25")
    page.click("button", "Save")
    page.find(".q-notification", "The old version is")
    page.find("[data-model=fresh]", "ready")
    assert file.read_text().startswith(CONFIG.rstrip()[:200])
    assert '[models.fresh]\nbackend = "fake"\ntoken_delay = 0.25\n' in file.read_text()

    page.click("[data-model=fresh] button", "Edit")
    page.type("input[aria-label=description]", "For tests")
    page.click("button[aria-label='Unset token_delay']")
    page.find(".diff .removed", "token_delay = 0.25")
    page.click("button", "Save")
    page.find("[data-model=fresh]", "For tests")
    assert server.model("fresh")["definition"].keys() >= {"backend", "description"}

    page.click("[data-model=fresh] button", "Edit")
    page.click("button", "Remove")
    page.find(".q-dialog .diff .removed", "[models.fresh]")
    page.click(".q-dialog button", "Remove")
    page.find("[data-model=demo]")
    page.wait_gone("[data-model=fresh]")
    assert file.read_text() == CONFIG


def test_what_is_wrong_is_shown_at_its_field_and_nothing_can_be_saved(page: BrowserPage, file: Path) -> None:
    page.open("/models/edit?name=smollm2")
    page.type("input[aria-label=path]", "/no/such/model.gguf")
    page.find(".setting:has(input[aria-label=path])", "/no/such/model.gguf")
    page.add_setting("n_gpu_layers")
    page.type("input[aria-label=n_gpu_layers]", "many")
    page.find(".setting:has(input[aria-label=n_gpu_layers]) .error", "must be")
    page.wait_gone("button", "Save")
    assert file.read_text() == CONFIG


def test_only_the_options_of_the_engine_are_offered(page: BrowserPage) -> None:
    page.open("/models/edit?name=smollm2")
    page.find("input[aria-label=n_threads]")
    page.type(".add-setting input", "n_gpu")
    page.find(".q-menu .q-item", "n_gpu_layers: ")
    page.type(".add-setting input", "token_delay")
    page.wait_gone(".q-menu .q-item", "token_delay")
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)


def test_a_cache_is_added_and_a_route_leads_to_it(page: BrowserPage, server: RestartableServer, file: Path) -> None:
    page.open("/caches")
    page.click("button", "Add a cache")
    page.type("input[aria-label=Name]", "small", Keys.TAB)
    page.choose_option("model", "second")
    page.find(".setting .error", "is missing")
    page.type("input[aria-label=n_ctx]", "512")
    page.find(".diff .added", "n_ctx = 512")
    page.click("button", "Save")
    page.find(".card .name", "small")
    page.open("/routes")
    page.click("button", "Add a route")
    page.type("textarea[aria-label=match]", "tiny-*")
    page.choose_option("cache", "small")
    page.find(".diff .added", "[[routes]]")
    page.click("button", "Save")
    page.find(".q-table", "tiny-*")
    assert server.api("GET", "/v1/admin/route?model=tiny-one")["cache"] == "small"
    page.click("button[aria-label='Edit route 2']")
    page.type("input[aria-label=Place]", "1")
    page.find(".diff .added", "tiny-*")
    page.click("button", "Save")
    page.find(".q-table tr:has(button[aria-label='Edit route 1'])", "tiny-*")
    page.click("button[aria-label='Edit route 1']")
    page.click("button", "Remove")
    page.click(".q-dialog button", "Remove")
    page.find("[role=heading]", "Routes")
    page.wait_gone(".q-table", "tiny-*")
    page.open("/caches")
    page.click("button[aria-label='Edit small']")
    page.click("button", "Remove")
    page.click(".q-dialog button", "Remove")
    page.find("[role=heading]", "Caches")
    page.wait_gone(".card .name", "small")
    assert file.read_text() == CONFIG


def test_a_file_that_changes_meanwhile_is_not_overwritten(page: BrowserPage, file: Path) -> None:
    page.open("/models/edit?name=demo")
    page.type("input[aria-label=description]", "Mine")
    page.find(".diff .added", 'description = "Mine"')
    file.write_text(CONFIG + "\n# by hand\n")
    page.click("button", "Save")
    page.find(".error", "another program has changed")
    assert file.read_text() == CONFIG + "\n# by hand\n"
    page.click("button", "Save")
    page.find("[data-model=demo]", "Mine")
    assert file.read_text().endswith("# by hand\n")
    assert 'description = "Mine"' in file.read_text()
    file.write_text(CONFIG)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_is_created_limited_used_and_revoked(page: BrowserPage, server: RestartableServer) -> None:
    page.open("/keys")
    page.find("[data-key=owner]", "from the configuration")
    page.click("button", "Create a key")
    page.click(".q-dialog button", "Create")
    page.find(".q-dialog .error")
    page.type(".q-dialog input[aria-label=Name]", "team")
    page.type(".q-dialog textarea[aria-label=Models]", "demo")
    page.type(".q-dialog input[aria-label='Token budget']", "5000")
    page.click(".q-dialog button", "Create")
    secret = page.text(".q-dialog .secret")
    page.click(".q-dialog button", "Done")
    page.wait_gone(".q-dialog")
    page.find("[data-key=team]", "of 5\u202f000 tokens")
    assert secret not in page.run("return document.body.innerText")

    body = {"model": "demo", "messages": [{"role": "user", "content": "think"}]}
    headers = {"authorization": f"Bearer {secret}"}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code == 200
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=body | {"model": "second"}, headers=headers)
    assert refused.status_code in (403, 404)
    page.open("/keys")
    page.find("[data-key=team] .stats .value")
    page.wait_gone("[data-key=team] .stats", "never")
    page.find(".usage", "team")

    page.click("[data-key=team] button", "Limits")
    page.type(".q-dialog input[aria-label='Requests at a time']", "1")
    page.click(".q-dialog button", "Save")
    page.find("[data-key=team]", "limits: 1 request at a time")
    page.click("[data-key=team] button", "Revoke")
    page.click(".q-dialog button", "Revoke")
    page.wait_gone("[data-key=team]")
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers).status_code == 401
    page.click(".q-toggle", "Show revoked keys")
    page.find("[data-key=team]", "revoked")


def test_a_visitor_is_told_how_to_become_the_owner_who_creates_the_first_key(
    locked: BrowserPage, tmp_path: Path
) -> None:
    fake = '[models.demo]\nbackend = "fake"\n[accounts]\npath = "accounts.sqlite"\n'
    with serve(tmp_path, config=fake) as running:
        page = BrowserPage(locked.driver, running.url)
        page.open("/chat?model=demo")
        page.find(".visitor", "`modelyard workbench` prints")
        send(page, "Hello")
        page.find(".turn.assistant", "tok/s")
        page.find(".row.current", "Hello")  # of the user who opened the page: here the server's own
        page.open("/keys")
        page.find("[role=heading]", "For administrators")
        page.open_as_owner(running)
        page.open("/keys")
        page.find(".muted", "This server has no keys")
        assert not page.find_all(".visitor")
        page.click("button", "Create a key")
        page.type(".q-dialog input[aria-label=Name]", "me")
        page.click(".q-dialog button", "Create")
        page.find(".q-dialog .error", "admin")
        page.choose_option("Role", "Operator")
        page.click(".q-dialog button", "Create")
        page.find(".q-dialog .secret")
        page.click(".q-dialog button", "Done")
        page.find("[data-key=me]", "active")
        assert httpx.get(f"{running.url}/v1/admin/models").status_code == 401
        page.open("/models")
        page.find("[data-model=demo]", "ready")
        page.driver.get("about:blank")
