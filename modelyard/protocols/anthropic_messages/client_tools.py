"""Anthropic's tools that the client runs: a shell, editors of files and of a memory folder, a screen, a browser.

Their types end in a date. A single tool has one function; a toolset has one for each of its members, which share the
name of the set (`toolset_name` in calls and results).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from modelyard.core.request import Tool
from modelyard.protocols.common.client_tools import ClientTool, schema

_DIRECTIONS = ("up", "down", "left", "right")
_POINT = {
    "type": "object",
    "properties": {"type": {"const": "coordinate"}, "x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["type", "x", "y"],
}
_ELEMENT = {
    "type": "object",
    "properties": {"type": {"const": "ref"}, "ref": {"type": "string"}},
    "required": ["type", "ref"],
}
_PLACE = {"anyOf": [_POINT, _ELEMENT]}

_BASH = ClientTool(
    "bash",
    "Run a command in a shell that keeps its state between calls. `restart` starts a new shell.",
    schema("command?:string restart?:boolean"),
)
_MEMORY = ClientTool(
    "memory",
    "Keep notes in files under /memories, which outlive this conversation: view, create, edit, delete or rename them.",
    schema(
        "command:command path?:string view_range?:range file_text?:string old_str?:string new_str?:string "
        "insert_line?:integer insert_text?:string old_path?:string new_path?:string",
        command=("view", "create", "str_replace", "insert", "delete", "rename"),
    ),
)
_BASIC_ACTIONS = (
    *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click"),
    *("screenshot", "cursor_position"),
)
_MORE_ACTIONS = ("left_mouse_down", "left_mouse_up", "triple_click", "scroll", "hold_key", "wait")
_CLICK = "coordinate?:point text?:string"
_COMPUTER: Mapping[str, tuple[str, str]] = {
    "key": ("Press a key or a chord of keys.", "text:string repeat?:integer"),
    "hold_key": ("Hold a key or a chord for some seconds.", "text:string duration:integer"),
    "type": ("Type a text.", "text:string"),
    "cursor_position": ("Tell where the cursor is, in pixels.", ""),
    "mouse_move": ("Move the cursor to a pixel.", "coordinate:point"),
    "left_mouse_down": ("Press the left button where the cursor is, and hold it.", ""),
    "left_mouse_up": ("Release the left button.", ""),
    "left_click": ("Click with the left button at a pixel, or where the cursor is.", _CLICK),
    "left_click_drag": ("Drag from one pixel to another.", "start_coordinate:point coordinate:point text?:string"),
    "right_click": ("Click with the right button at a pixel, or where the cursor is.", _CLICK),
    "middle_click": ("Click with the middle button at a pixel, or where the cursor is.", _CLICK),
    "double_click": ("Click twice at a pixel, or where the cursor is.", _CLICK),
    "triple_click": ("Click three times at a pixel, or where the cursor is.", _CLICK),
    "scroll": ("Scroll at a pixel.", f"scroll_direction:direction scroll_amount:integer {_CLICK}"),
    "wait": ("Wait for some seconds.", "duration:integer"),
    "screenshot": ("Take a picture of the screen.", ""),
    "zoom": ("Take a picture of a region of the screen: x0, y0, x1, y1.", "region:region"),
}
_TAB = "tab_id?:string"
_BROWSER_CLICK = f"target:place modifiers?:string {_TAB}"
_BROWSER: Mapping[str, tuple[str, str]] = {
    "navigate": ("Open an address, or go `back`, `forward` or `reload`.", f"url:string {_TAB}"),
    "list_tabs": ("List the open tabs with their ids, titles and addresses.", ""),
    "new_tab": ("Open an empty tab; the result is its id.", ""),
    "switch_tab": ("Make a tab the active one.", "tab_id:string"),
    "close_tab": ("Close a tab.", "tab_id:string"),
    "screenshot": ("Take a picture of the page.", _TAB),
    "zoom": ("Take a picture of a region of the page: x0, y0, x1, y1.", f"region:region {_TAB}"),
    "read_page": (
        "Read the page as a tree of elements with references such as ref_7.",
        f"filter?:filter depth?:integer ref?:string {_TAB}",
    ),
    "get_page_text": ("Read the text of the page.", _TAB),
    "find": ("Find elements by a description in words; the result has references.", f"query:string {_TAB}"),
    "left_click": ("Click at a point or on an element.", _BROWSER_CLICK),
    "right_click": ("Click with the right button at a point or on an element.", _BROWSER_CLICK),
    "middle_click": ("Click with the middle button at a point or on an element.", _BROWSER_CLICK),
    "double_click": ("Click twice at a point or on an element.", _BROWSER_CLICK),
    "triple_click": ("Click three times at a point or on an element.", _BROWSER_CLICK),
    "hover": ("Move the cursor to a point or an element.", f"target:place {_TAB}"),
    "mouse_move": ("Move the cursor to a point.", f"target:point {_TAB}"),
    "left_mouse_down": ("Press the left button at a point, and hold it.", f"target:point {_TAB}"),
    "left_mouse_up": ("Release the left button at a point.", f"target:point {_TAB}"),
    "left_click_drag": ("Drag from one point to another.", f"from:point target:point {_TAB}"),
    "scroll": ("Scroll at a point.", f"target:point scroll_direction:direction scroll_amount?:integer {_TAB}"),
    "scroll_to": ("Scroll an element into view.", f"target:element {_TAB}"),
    "type": ("Type a text where the focus is.", f"text:string {_TAB}"),
    "key": ("Press a key or a chord of keys.", f"text:string repeat?:integer {_TAB}"),
    "hold_key": ("Hold a key or a chord for some seconds.", f"text:string duration:number {_TAB}"),
    "form_input": ("Set the value of a form's field.", f"target:element value:value {_TAB}"),
    "file_upload": (
        "Choose files in a file field.",
        f"target:element paths?:strings document_ids?:strings {_TAB}",
    ),
    "javascript_exec": (
        "Run JavaScript in the page; the result is the value of its last expression.",
        f"text:string {_TAB}",
    ),
    "read_console": ("Read the messages of the console.", _TAB),
    "read_network": ("Read the requests that the page has made.", _TAB),
    "wait": ("Wait for some seconds, at most 30.", f"duration:number {_TAB}"),
}


def _members(table: Mapping[str, tuple[str, str]], **shapes: Any) -> Mapping[str, ClientTool]:
    return {name: ClientTool(name, text, schema(fields, **shapes)) for name, (text, fields) in table.items()}


TOOLSETS: Mapping[str, Mapping[str, ClientTool]] = {
    "computer": _members(_COMPUTER, direction=_DIRECTIONS),
    "browser": _members(
        _BROWSER, direction=_DIRECTIONS, place=_PLACE, point=_POINT, element=_ELEMENT, filter=("all", "interactive")
    ),
}


def _editor(date: str) -> ClientTool:
    """Until the spring of 2025 it could undo, and the text of an insertion was `new_str`."""
    commands: tuple[str, ...] = ("view", "create", "str_replace", "insert")
    text = "insert_text?:string "
    if date < "20250429":
        commands, text = (*commands, "undo_edit"), ""
    fields = f"command:command path:string view_range?:range file_text?:string old_str?:string new_str?:string {text}"
    return ClientTool(
        "str_replace_editor" if date < "20250429" else "str_replace_based_edit_tool",
        "View, create and edit files. `old_str` must occur exactly once. `insert_line` is the line after which a text "
        "is inserted, 0 for the beginning. `view_range` is the first and the last line, -1 for the end.",
        schema(f"{fields}insert_line?:integer", command=commands),
    )


def _screen(date: str, settings: Mapping[str, Any]) -> ClientTool:
    """The whole screen as one function with an `action`."""
    actions = _BASIC_ACTIONS if date < "20250124" else (*_BASIC_ACTIONS, *_MORE_ACTIONS)
    if settings.get("enable_zoom") is True:
        actions = (*actions, "zoom")
    width, height = settings.get("display_width_px"), settings.get("display_height_px")
    size = f" It is {width} x {height} pixels large." if isinstance(width, int) and isinstance(height, int) else ""
    return ClientTool(
        "computer",
        f"Use the screen, the mouse and the keyboard of a computer.{size} Coordinates are x and y in pixels from the "
        "top left corner. Look at a screenshot before you click.",
        schema(
            "action:action coordinate?:point start_coordinate?:point text?:string duration?:integer "
            "scroll_direction?:direction scroll_amount?:integer region?:region",
            action=actions,
            direction=_DIRECTIONS,
        ),
    )


def _single(kind: str, settings: Mapping[str, Any]) -> ClientTool | None:
    family, _, date = kind.rpartition("_")
    if family == "text_editor":
        return _editor(date)
    return _screen(date, settings) if family == "computer" else {"bash": _BASH, "memory": _MEMORY}.get(family)


def is_client_tool(kind: str) -> bool:
    family = kind.rpartition("_")[0]
    return family in ("bash", "memory", "text_editor", "computer") or family.removesuffix("_toolset") in TOOLSETS


def read_client_tools(kind: str, entry: dict[str, Any]) -> Iterator[Tool]:
    """The functions of a tool or toolset that the client runs. `entry` is what the client sent."""
    toolset = kind.rpartition("_")[0].removesuffix("_toolset")
    if (tool := _single(kind, entry)) is not None:
        deferred, name = entry.get("defer_loading") is True, entry.get("name") or tool.name
        yield Tool(str(name), tool.description, tool.parameters, type=kind, deferred=deferred, vendor=entry)
        return
    configs = entry.get("configs") if isinstance(entry.get("configs"), dict) else {}
    for name, member in TOOLSETS[toolset].items():
        config = configs.get(name) if isinstance(configs, dict) else None
        config = config if isinstance(config, dict) else {}
        if config.get("enabled") is not False:
            yield Tool(
                name,
                member.description,
                member.parameters,
                type=kind,
                namespace=toolset,
                deferred=config.get("defer_loading") is True,
                vendor=entry,
            )
