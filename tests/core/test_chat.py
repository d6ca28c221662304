"""A chat is a tree of turns: what is shown, sent and exported after edits, new answers and side-by-side answers."""

from __future__ import annotations

import msgspec

from modelyard.core.chat import MAX_TITLE, Chat, Turn, to_markdown
from modelyard.core.request import Image, Part, Text, Thinking, ToolCall, ToolResult

IMAGE = Image("data:image/png;base64,AAAA")


def user(chat: Chat, *parts: Part) -> Turn:
    return chat.add(Turn(parent=chat.head, role="user", parts=parts))


def answer(chat: Chat, *parts: Part, parent: str | None = None, round: str = "") -> Turn:
    turn = Turn(parent=parent or chat.head, role="assistant", parts=parts, model="m", round=round, end="finished")
    return chat.add(turn)


def texts(chat: Chat) -> list[str]:
    return [turn.text for turn in chat.path()]


def test_an_edited_message_starts_a_branch_and_the_old_one_can_be_shown_again() -> None:
    chat = Chat()
    first = user(chat, IMAGE, Text("one"))
    answer(chat, Text("answer to one"))
    second = chat.rewrite(first, "two", now=1.0)
    answer(chat, Text("answer to two"))
    assert texts(chat) == ["two", "answer to two"]
    assert second.parts == (IMAGE, Text("two"))
    assert chat.alternatives(second) == [first, second]
    chat.select(first)
    assert texts(chat) == ["one", "answer to one"]


def test_another_answer_is_an_alternative_and_later_turns_follow_the_one_that_was_shown() -> None:
    chat = Chat()
    question = user(chat, Text("q"))
    old = answer(chat, Text("old"))
    new = answer(chat, Text("new"), parent=question.id)
    user(chat, Text("next"))
    assert texts(chat) == ["q", "new", "next"]
    assert chat.alternatives(new) == [old, new]
    chat.select(old)
    assert texts(chat) == ["q", "old"]
    chat.select(new)
    assert texts(chat) == ["q", "new", "next"]


def test_answers_side_by_side_are_one_place_and_the_chosen_one_is_continued() -> None:
    chat = Chat()
    question = user(chat, Text("q"))
    alone = answer(chat, Text("alone"))
    left = answer(chat, Text("left"), parent=question.id, round="r")
    right = answer(chat, Text("right"), parent=question.id, round="r")
    assert chat.round(right) == [left, right]
    assert chat.round(alone) == [alone]
    assert chat.alternatives(right) == [alone, right]
    chat.select(right)
    assert [message.parts for message in chat.messages()] == [(Text("q"),), (Text("right"),)]


def test_reasoning_and_empty_answers_are_not_sent_back() -> None:
    chat = Chat()
    user(chat, Text("q"))
    answer(chat, Thinking("hm"), Text("Hello."))
    user(chat, Text("more"))
    answer(chat, Thinking("stopped here"))
    assert [message.parts for message in chat.messages()] == [(Text("q"),), (Text("Hello."),), (Text("more"),)]


def test_a_removed_turn_takes_its_followers_with_it() -> None:
    chat = Chat()
    first = user(chat, Text("q"))
    answer(chat, Text("a"))
    second = user(chat, Text("r"))
    answer(chat, Text("b"))
    chat.remove(second)
    assert texts(chat) == ["q", "a"]
    chat.remove(first)
    assert (chat.turns, chat.head) == ([], None)


def test_the_title_is_the_beginning_of_the_first_message_until_it_is_named() -> None:
    chat = Chat()
    assert chat.display_title == "New chat"
    user(chat, Text("word " * 50))
    assert len(chat.display_title) == MAX_TITLE
    chat.title = "Trees"
    assert chat.display_title == "Trees"


def test_a_copy_has_only_what_is_shown() -> None:
    chat = Chat()
    first = user(chat, Text("one"))
    answer(chat, Text("a"))
    chat.rewrite(first, "two", now=1.0)
    copied = chat.copy(now=2.0)
    assert (texts(copied), len(copied.turns)) == (["two"], 1)
    assert (copied.id != chat.id, copied.revision) == (True, 0)


def test_a_damaged_chat_with_a_cycle_can_be_read() -> None:
    turns = [Turn(id="a", parent="b", role="user"), Turn(id="b", parent="a", role="assistant")]
    assert len(Chat(turns=turns, head="a").path()) <= 3


def test_a_chat_survives_json_and_is_exported_as_markdown() -> None:
    chat = Chat(title="Weather")
    user(chat, IMAGE, Text("Rome?"))
    call = answer(chat, Thinking("hm"), ToolCall("c", "weather", '{"city": "Rome"}'))
    chat.add(Turn(parent=call.id, role="tool", parts=(ToolResult("c", (Text("sunny"),)),)))
    answer(chat, Text("Take a **hat**."))
    assert msgspec.json.decode(msgspec.json.encode(chat), type=Chat) == chat
    exported = to_markdown(chat)
    assert exported.startswith("# Weather\n")
    for text in ("## You", "Rome?", "an image", "`weather`", '{"city": "Rome"}', "sunny", "## m", "Take a **hat**."):
        assert text in exported, text
    assert "hm" not in exported
