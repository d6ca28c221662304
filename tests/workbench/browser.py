"""A headless browser for tests: find elements by their text, click, type. Every wait has a deadline."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException, WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from setup import browser as setup_browser
from tests.cli_process import ServerProcess

ROOT = Path(__file__).parents[2]
OWNER = {"authorization": "Bearer the-owner"}
WIDTHS = (1440, 1024, 390)
_HEIGHTS = {1440: 900, 1024: 768, 390: 844}
_LOG_IN = """
const [key, done] = arguments;
const headers = {authorization: 'Bearer ' + key};
fetch('/workbench/login', {method: 'POST', headers}).then(reply => done(reply.status));
"""
MESSAGE = "textarea[aria-label=Message]"
TIMEOUT_S = 120  # for a busy machine
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # not available in containers, and only our own pages are opened
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-default-apps",
    "--disable-breakpad",
    "--disable-features=Translate,OptimizationHints,MediaRouter,InterestFeedContentSuggestions",
    "--mute-audio",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    "--force-prefers-reduced-motion",
    "--window-size=1440,1000",
)
_POLL_S = 0.05
_IN_VIEW = """
const found = [...document.querySelectorAll(arguments[0])].find(each => each.checkVisibility());
const box = found.getBoundingClientRect();
return box.top >= 0 && box.left >= 0 && box.bottom <= innerHeight + 1 && box.right <= innerWidth + 1;
"""
# The visible elements that contain a text, and these texts, in one step: a command for each element would be slow.
_VISIBLE = """
const read = (each) => (each.innerText ?? each.textContent).replaceAll('\\u00a0', ' ').trim();
const found = [...document.querySelectorAll(arguments[0])]
  .filter(each => each.checkVisibility({opacityProperty: true, visibilityProperty: true}))
  .filter(each => read(each).includes(arguments[1]));
return arguments[2] ? found.map(read) : found;
"""


@contextmanager
def chrome() -> Iterator[webdriver.Chrome]:
    """Without a browser the test fails in CI and is skipped elsewhere."""
    found = setup_browser.find()
    if found is None:
        reason = "Chrome or Chromium with its driver is missing: .venv/bin/python setup/browser.py installs it"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = str(found.browser)
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(str(found.driver), env={**os.environ, **found.environment})
    driver = webdriver.Chrome(options, service)
    try:
        yield driver
    finally:
        driver.quit()


class BrowserPage:
    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver, self.url = driver, url
        self.token = ""  # of the server, if the browser has its owner's cookie
        self.key = ""  # with which the browser is logged in

    def open_as_owner(self, server: ServerProcess) -> None:
        """With the link that the server has printed at its start."""
        link = re.search(r"http://\S+\?code=\S+", server.until("open it as the owner")["message"])
        assert link is not None
        self.driver.get(link[0].replace("localhost", "127.0.0.1"))

    def open(self, path: str) -> None:
        self.driver.get(f"{self.url}/workbench{path}")

    def resize(self, width: int) -> None:
        size = {"width": width, "height": _HEIGHTS[width], "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def log_in(self, key: str) -> None:
        assert self.driver.execute_async_script(_LOG_IN, key) == 204
        self.key = key

    def log_out(self) -> None:
        """Forget all cookies of the server."""
        self.open("/routes")
        self.driver.delete_all_cookies()
        self.token = self.key = ""

    def is_in_view(self, css: str) -> bool:
        """Whether the whole element can be seen without scrolling."""
        self.find(css)
        return bool(self.driver.execute_script(_IN_VIEW, css))

    def wait_until(self, condition: Callable[[], Any], description: str) -> Any:
        """Retries if an element was replaced while the condition looked at it."""

        def check(_: Any) -> Any:
            try:
                return condition()
            except StaleElementReferenceException:
                return None

        return WebDriverWait(self.driver, TIMEOUT_S, poll_frequency=_POLL_S).until(check, f"timed out: {description}")

    def find_all(self, css: str, text: str = "") -> list[WebElement]:
        """The visible elements that contain the text."""
        found: list[WebElement] = self.driver.execute_script(_VISIBLE, css, text, False)
        return found

    def texts(self, css: str, text: str = "") -> list[str]:
        """What the visible elements that contain the text say."""
        found: list[str] = self.driver.execute_script(_VISIBLE, css, text, True)
        return found

    def find(self, css: str, text: str = "") -> WebElement:
        found: list[WebElement] = self.wait_until(lambda: self.find_all(css, text), f"{css} with {text!r}")
        return found[0]

    def text(self, css: str, text: str = "") -> str:
        """Finds and reads in one step, because the element may be replaced a moment later."""
        found: list[str] = self.wait_until(lambda: self.texts(css, text), f"{css} with {text!r}")
        return found[0]

    def wait_gone(self, css: str, text: str = "") -> None:
        self.wait_until(lambda: not self.find_all(css, text), f"no {css} with {text!r}")

    def click(self, css: str, text: str = "") -> None:
        """Retries while another element, such as a notification, covers the target."""

        def clicked() -> bool:
            try:
                self.find(css, text).click()
            except StaleElementReferenceException:
                return False
            except WebDriverException as error:
                if "intercepted" not in str(error):
                    raise
                return False
            return True

        self.wait_until(clicked, f"a click on {css} {text!r}")

    def type(self, css: str, text: str, *keys: str) -> None:
        """Again if a field that was still being built has lost the text; `keys` may change it."""

        def typed() -> bool:
            field = self.find(css)
            field.send_keys(Keys.CONTROL + "a")
            field.send_keys(text, *keys)
            return bool(keys) or field.get_property("value") == text

        self.wait_until(typed, f"typing {text!r} into {css}")

    def choose_option(self, label: str, option: str) -> None:
        """In a list that opens at a click."""
        self.click(f".q-field__control:has(input[aria-label='{label}'])")
        self.click(".q-menu .q-item", option)
        self.wait_gone(".q-menu")

    def add_setting(self, name: str) -> None:
        """In a form of the configuration."""
        self.type(".add-setting input", name)
        self.click(".q-menu .q-item", f"{name}: ")
        self.wait_gone(".q-menu")

    def attach(self, file: Path, uploader: str = ".chat-foot .q-uploader") -> None:
        """Quasar replaces the input, which is hidden, after each file."""

        def attached() -> bool:
            self.driver.find_element(By.CSS_SELECTOR, f"{uploader} input[type=file]").send_keys(str(file))
            return True

        self.wait_until(attached, f"attaching {file.name}")

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


def choose(page: BrowserPage, model: str) -> None:
    """A new chat with this model."""
    page.open(f"/chat?model={model}")
    page.find(".model .q-chip", model)


def open_settings(page: BrowserPage) -> None:
    """Of the chat: they are folded away."""
    if not page.find_all(".chat-side"):
        page.click("button[aria-label=Settings]")
    page.find(".chat-side")


def send(page: BrowserPage, text: str) -> None:
    page.type(MESSAGE, text, Keys.ENTER)
