"""The chat of the workbench in a real browser, with the fake engine and the default model."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from tests.prompt.test_pdf_pages import pdf
from tests.workbench.browser import MESSAGE, WIDTHS, BrowserPage, choose, open_settings, send
from tests.workbench.conftest import RestartableServer

pytestmark = pytest.mark.browser

WAV = (
    b"RIFF"
    + (36 + 1600).to_bytes(4, "little")
    + b"WAVEfmt \x10\0\0\0\1\0\1\0"
    + bytes.fromhex("803e0000 007d0000 02001000")
)
WAV += b"data" + (1600).to_bytes(4, "little") + bytes(1600)
IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IN_VIEW = (
    "const box = document.querySelector('{css}').getBoundingClientRect();"
    "const view = document.querySelector('.messages').getBoundingClientRect();"
    "return box.top >= view.top - 1 && box.bottom <= view.bottom + 1"
)


def test_tokens_of_a_real_model_are_streamed(page: BrowserPage, server: RestartableServer) -> None:
    server.api("POST", "/v1/admin/models/smollm2/load")
    choose(page, "smollm2")
    open_settings(page)
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
        open_settings(page)
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
    page.attach(tmp_path / "dot.png")
    page.find(".attachment .q-img")
    send(page, "think")
    page.find(".turn.user .q-img")
    open_settings(page)
    page.click(".q-tab", "Request")
    page.find(".code-block", "data:image/png;base64")
    page.find(".turn.assistant", "tok/s")
    assert not page.find_all(".attachment")


def test_sound_and_pdf_are_sent_where_the_model_takes_them(page: BrowserPage, tmp_path: Path) -> None:
    (tmp_path / "tone.wav").write_bytes(WAV)
    (tmp_path / "terms.pdf").write_bytes(pdf("The terms of 2026"))
    choose(page, "second")
    page.attach(tmp_path / "tone.wav")
    page.find("[role=alert]", "second takes text only: tone.wav is not attached.")
    assert not page.find_all(".attachment")
    page.attach(tmp_path / "terms.pdf")
    page.find(".attachment .file-chip", "terms.pdf")
    page.wait_gone("[role=alert]")
    send(page, "Read it")
    page.find(".turn.user .file-chip", "terms.pdf")
    page.find(".turn.assistant", "From the second.")
    page.click(".turn.assistant a", "view request")
    page.find(".card", "The terms of 2026")
    choose(page, "demo")
    page.attach(tmp_path / "tone.wav")
    page.find(".attachment audio")
    send(page, "think")
    page.find(".turn.user audio")
    open_settings(page)
    page.click(".q-tab", "Request")
    page.find(".code-block", "input_audio")
    page.find(".turn.assistant", "tok/s")
    page.wait_until(lambda: page.run("return document.querySelector('.turn audio').duration > 0"), "it can be played")


def test_pasted_and_dropped_files_are_attached(page: BrowserPage) -> None:
    choose(page, "demo")
    page.find(MESSAGE)
    for event in ("ClipboardEvent('paste', {clipboardData: data,", "DragEvent('drop', {dataTransfer: data,"):
        page.run(
            f"const bytes = Uint8Array.from(atob('{IMAGE}'), letter => letter.charCodeAt(0));"
            "const data = new DataTransfer(); data.items.add(new File([bytes], 'dot.png', {type: 'image/png'}));"
            f"document.querySelector('{MESSAGE}').dispatchEvent(new {event} bubbles: true, cancelable: true}}))"
        )
        page.find(".attachment .q-img")
        page.click(".attachment button[aria-label=Remove]")
        page.wait_gone(".attachment")


def test_a_tool_call_is_a_card_whose_result_is_sent_to_the_model(page: BrowserPage) -> None:
    choose(page, "demo")
    open_settings(page)
    page.click(".chat-side .q-expansion-item", "Tools of your own")
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


def test_a_menu_of_the_list_stays_open_while_the_list_is_refreshed(page: BrowserPage) -> None:
    choose(page, "demo")
    send(page, "pause for a moment")
    page.find(".row.current", "pause for a moment")
    page.click(".row.current button[aria-label=More]")
    page.find(".q-menu .q-item", "Rename")
    page.find(".turn.assistant", "tok/s")  # the end of an answer is stored, and the list shows it
    page.click(".q-menu .q-item", "Rename")
    page.find("input[aria-label='Name of the chat']")


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

    def shown() -> int:
        """The length of the second answer; nothing of it is shown while its turn is drawn again."""
        answers = page.texts(".answer")
        return len(answers[1]) if len(answers) == 2 else 0

    page.wait_until(lambda: shown() > 200, "text")
    assert (
        page.run("const e = document.querySelector('.messages'); return e.scrollHeight - e.scrollTop - e.clientHeight")
        < 60
    )
    page.run(
        "const e = document.querySelector('.messages');"
        "e.dispatchEvent(new WheelEvent('wheel', {deltaY: -500})); e.scrollTop = 0;"
        "e.dispatchEvent(new Event('scroll'))"
    )
    length = page.wait_until(shown, "text")
    page.wait_until(lambda: shown() > length + 100, "more text")
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


# --- at every width ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_what_a_chat_needs_is_in_view_and_the_rest_is_folded_away(page: BrowserPage, width: int) -> None:
    page.resize(width)
    choose(page, "demo")
    for css in (MESSAGE, ".model", "button[aria-label=Chats]", "button[aria-label=Settings]", ".composer"):
        assert page.is_in_view(css), css
    send(page, "long text")
    page.find(".turn.assistant", "tok/s")
    assert page.is_in_view(MESSAGE)
    assert page.run("return document.documentElement.scrollHeight <= innerHeight")
    assert page.run("return document.querySelector('.messages').clientWidth") >= min(width, 960) - 10
    assert bool(page.find_all(".chat-list")) == (width == 1440)
    assert not page.find_all(".chat-side")
    open_settings(page)
    assert page.find("input[aria-label=Temperature]").get_attribute("placeholder") == "0.7"
    assert page.find("input[aria-label=Seed]").get_attribute("placeholder") == "random"
    assert page.is_in_view(".chat-side .q-tab")
    page.click("button[aria-label=Settings]")
    page.wait_gone(".chat-side")
    if width < 1440:
        page.click("button[aria-label=Chats]")
    page.find(".chat-list .row.current", "long text")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_message_that_waits_shows_how_much_of_the_prompt_is_read(page: BrowserPage, width: int) -> None:
    page.resize(width)
    choose(page, "demo")
    send(page, "slowly please")
    page.find(".waiting", "Reading the prompt: ")
    share = "return +document.querySelector('.waiting [role=progressbar]').getAttribute('aria-valuenow')"
    page.wait_until(lambda: 0 < page.run(share) < 1, "the bar moves")
    page.find(".answer", "Read.")
    page.wait_gone(".waiting")


@pytest.mark.parametrize("width", WIDTHS)
def test_tools_of_a_ticked_server_run_without_the_user(
    page: BrowserPage, server: RestartableServer, width: int
) -> None:
    page.resize(width)
    choose(page, "demo")
    open_settings(page)
    page.click(".servers .q-checkbox", "sums")
    page.click("button[aria-label=Settings]")
    send(page, f"add the numbers at {width}")
    page.find(".answer", "The sum is 42.")
    card = page.text(".call", "add")
    assert "by the server sums" in card
    assert "42" in card.split("RESULT")[-1]
    assert not page.find_all("textarea[aria-label='Result of add']")
    page.driver.refresh()
    page.find(".call", "add")  # as it is stored
    send(page, "think again")
    page.find(".answer", "Forty-two.")


@pytest.mark.parametrize("width", WIDTHS)
def test_html_is_shown_in_a_frame_that_reaches_nothing(page: BrowserPage, width: int) -> None:
    page.resize(width)
    choose(page, "demo")
    send(page, "page please")
    page.find(".turn.assistant", "tok/s")
    page.click(".preview-code", "Preview")
    frame = page.find(".code iframe")
    assert frame.get_attribute("sandbox") == "allow-scripts"
    page.driver.switch_to.frame(frame)
    page.find("h1", "Hi")
    page.find("body", "apart")
    page.find("body", "alone")
    page.driver.switch_to.default_content()
    assert page.run("return window.hacked") is None
    assert page.driver.title == "Chat · Modelyard"
    page.click(".preview-code", "Code")
    page.find(".code pre", "document.title")
    page.errors()  # the policy of the frame is reported as one


@pytest.mark.parametrize("width", WIDTHS)
def test_a_message_is_spoken_where_the_model_hears(page: BrowserPage, width: int) -> None:
    page.resize(width)
    choose(page, "second")
    page.type(MESSAGE, "Hi")
    page.find(".context-meter", "tokens")
    assert not page.find_all("button[aria-label=Speak]")
    choose(page, "demo")
    page.click("button[aria-label=Speak]")
    page.find(".speak.recording")
    page.wait_until(lambda: page.run("return modelyard.recorder?.state") == "recording", "it records")
    page.click("button[aria-label=Speak]")
    page.find(".attachment audio")
    send(page, "think")
    page.find(".turn.user audio")
    page.find(".turn.assistant", "tok/s")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_chat_is_shared_as_a_file(page: BrowserPage, tmp_path: Path, width: int) -> None:
    page.resize(width)
    choose(page, "demo")
    send(page, f"think of sharing at {width}")
    page.find(".turn.assistant", "tok/s")
    page.driver.execute_cdp_cmd("Page.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    if width < 1440:
        page.click("button[aria-label=Chats]")
    page.click(".row.current button[aria-label=More]")
    page.click(".q-menu .q-item", "Export as a file to share")
    exported = tmp_path / f"think-of-sharing-at-{width}.json"
    page.wait_until(exported.exists, "the download")
    (tmp_path / "other.json").write_text("[1, 2]")
    page.attach(tmp_path / "other.json", ".chat-file")
    page.find(".q-notification", "other.json is no chat")
    page.attach(exported, ".chat-file")
    page.wait_until(lambda: len(page.find_all(".chat-list .row", f"sharing at {width}")) == 2, "a chat of its own")
    page.find(".answer", "Forty-two.")
