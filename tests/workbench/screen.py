"""A headless browser as a person uses it: look for words, click on them, type. Every wait has a deadline."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException, WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120  # for a busy machine; nothing here waits for it when all is well
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # containers have none to give, and only our own pages are opened
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1440,1000",
)


def setup_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("browser", ROOT / "setup" / "browser.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def chrome() -> Iterator[webdriver.Chrome]:
    """Where CI runs there must be one; elsewhere its absence is said."""
    found = setup_script().find()
    if found is None:
        why = "no Chrome or Chromium with its driver is here: .venv/bin/python setup/browser.py fetches one"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
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


class Screen:
    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver, self.url = driver, url

    def open(self, path: str) -> None:
        self.driver.get(f"{self.url}/workbench{path}")

    def until(self, true: Callable[[], Any], what: str) -> Any:
        """Elements come and go while the page renews itself: one that is gone is looked for again."""

        def looked(_: Any) -> Any:
            try:
                return true()
            except StaleElementReferenceException:
                return None

        return WebDriverWait(self.driver, PATIENCE_S, poll_frequency=0.1).until(looked, f"it did not happen: {what}")

    def all(self, css: str, text: str = "") -> list[WebElement]:
        found = self.driver.find_elements(By.CSS_SELECTOR, css)
        return [one for one in found if text in one.text and one.is_displayed()]

    def see(self, css: str, text: str = "") -> WebElement:
        found: list[WebElement] = self.until(lambda: self.all(css, text), f"{css} with {text!r}")
        return found[0]

    def text(self, css: str, text: str = "") -> str:
        """Of what is seen: in one look, since what was seen may be drawn anew a moment later."""
        found: list[str] = self.until(lambda: [one.text for one in self.all(css, text)], f"{css} with {text!r}")
        return found[0]

    def gone(self, css: str, text: str = "") -> None:
        self.until(lambda: not self.all(css, text), f"no {css} with {text!r}")

    def click(self, css: str, text: str = "") -> None:
        """What covers a button for a moment, such as a notice, goes away."""

        def clicked() -> bool:
            try:
                self.see(css, text).click()
            except StaleElementReferenceException:
                return False
            except WebDriverException as error:
                if "intercepted" not in str(error):
                    raise
                return False
            return True

        self.until(clicked, f"a click on {css} {text!r}")

    def type(self, css: str, text: str, *keys: str) -> None:
        def typed() -> bool:
            field = self.see(css)
            field.send_keys(Keys.CONTROL + "a")
            field.send_keys(text, *keys)
            return True

        self.until(typed, f"{text!r} is typed into {css}")

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
