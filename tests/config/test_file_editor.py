"""Edits of a configuration file's text: comments and order stay, and what was meant is what it says."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from modelyard.config.file_editor import (
    FileEdit,
    InsertEntry,
    MoveEntry,
    RemoveValue,
    SetValue,
    edit_text,
    encode,
    toml_fragment,
    write_with_backup,
)
from modelyard.core.errors import Conflict, Unavailable


def edit_toml(text: str, changes: dict[tuple[str, ...], Any]) -> str:
    return edit_text(".toml", text, [SetValue(path, value) for path, value in changes.items()])


def edit_json(text: str, changes: dict[tuple[str, ...], Any]) -> str:
    return edit_text(".json", text, [SetValue(path, value) for path, value in changes.items()])


TOML = """\
# at the top
[http]
port = 8000   # a port

[models.m]    # the model
path = "m.gguf"
n_threads = 1   # too few?
flash_attn = "off"

[caches.main]
model = "m"
n_ctx = 4096

# at the end
"""


def test_a_value_is_replaced_and_everything_else_stays() -> None:
    new = edit_toml(TOML, {("models", "m", "n_threads"): 4})
    assert new == TOML.replace("n_threads = 1 ", "n_threads = 4 ")


def test_a_new_key_goes_to_the_end_of_its_section() -> None:
    new = edit_toml(TOML, {("models", "m", "n_ubatch"): 256})
    assert new == TOML.replace('flash_attn = "off"\n', 'flash_attn = "off"\nn_ubatch = 256\n')


def test_a_missing_section_is_created() -> None:
    new = edit_toml(TOML, {("caches", "fast", "n_ubatch"): 128})
    assert tomllib.loads(new)["caches"] == {"main": {"model": "m", "n_ctx": 4096}, "fast": {"n_ubatch": 128}}
    assert "[caches.fast]" in new
    assert new.startswith(TOML.split("# at the end")[0].rstrip())


@pytest.mark.parametrize(
    "text",
    [
        'models = { m = { path = "x", n_threads = 1 } }\n',
        'models.m.path = "x"\nmodels.m.n_threads = 1\n',
        '[models]\nm = { path = "x", n_threads = 1 }\n',
        '[models.m]\npath = "x"\nn_threads = 1\n[http]\nport = 1\n[models.other]\npath = "y"\n',
    ],
    ids=["inline", "dotted", "half inline", "out of order"],
)
def test_every_syntax_of_a_section_is_understood(text: str) -> None:
    new = edit_toml(text, {("models", "m", "n_threads"): 8, ("models", "m", "flash_attn"): "on"})
    assert tomllib.loads(new)["models"]["m"] == {"path": "x", "n_threads": 8, "flash_attn": "on"}


def test_a_value_where_a_section_should_be_is_refused() -> None:
    with pytest.raises(Conflict, match="is not a section"):
        edit_toml("models = 3\n", {("models", "m", "n_threads"): 1})


def test_a_fragment_has_only_what_changes() -> None:
    text_ = toml_fragment({("models", "a.b", "n_threads"): 2, ("models", "a.b", "flash_attn"): "on"})
    assert text_ == '[models."a.b"]\nn_threads = 2\nflash_attn = "on"'


JSON = """{
  "service": {"port": 8000},
  "engine": {
    "models": {
      "m": {
        "model_path": "m.gguf",
        "list": [1, 2,   3],
        "n_threads": 1
      }
    }
  }
}
"""


def test_json_is_changed_at_the_value_only() -> None:
    new = edit_json(JSON, {("engine", "models", "m", "n_threads"): 4})
    assert new == JSON.replace('"n_threads": 1', '"n_threads": 4')


def test_a_new_json_key_gets_a_line_like_its_neighbours() -> None:
    new = edit_json(JSON, {("engine", "models", "m", "flash_attn"): "on"})
    assert new == JSON.replace('"n_threads": 1\n', '"n_threads": 1,\n        "flash_attn": "on"\n')


def test_a_json_object_on_one_line_stays_on_it() -> None:
    assert edit_json(JSON, {("service", "host"): "::1"}) == JSON.replace("8000}", '8000, "host": "::1"}')


def test_missing_json_objects_are_created() -> None:
    new = json.loads(edit_json(JSON, {("caches", "main", "n_ubatch"): 64}))
    assert new["caches"] == {"main": {"n_ubatch": 64}}
    assert json.loads(edit_json("{}", {("a", "b"): True})) == {"a": {"b": True}}
    assert json.loads(edit_json("{ }", {("a",): "ü"})) == {"a": "ü"}


def test_text_that_looks_like_a_key_is_not_changed() -> None:
    tricky = '{"about": "\\"n_threads\\": 7, }", "n_threads" : 1, "z": {"n_threads": 9}}'
    new = edit_json(tricky, {("n_threads",): 2})
    assert new == tricky.replace('"n_threads" : 1', '"n_threads" : 2')


def test_a_json_value_where_an_object_should_be_is_refused() -> None:
    with pytest.raises(Conflict, match="is not a section"):
        edit_json('{"models": 3}', {("models", "m"): 1})


# --- sections ---------------------------------------------------------------------------------------------------------

SECTIONS = """\
# The first model
[models.a]    # small
path = "a.gguf"
# n_gpu_layers = 99

[models.a.decoding]
temperature = 0.5

# The second model
# is larger
[models.b]
path = "b.gguf"

# background
[[routes]]
match = "*haiku*"
cache = "fast"

# everything else
[[routes]]
match = ["a", "b"] # two
model = "a"

# the end
"""
A = SECTIONS[: SECTIONS.index("# The second")]
B = SECTIONS[SECTIONS.index("# The second") : SECTIONS.index("# background")]
FIRST = SECTIONS[SECTIONS.index("# background") : SECTIONS.index("# everything")]
SECOND = SECTIONS[SECTIONS.index("# everything") : SECTIONS.index("# the end")]
END = "# the end\n"


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ([RemoveValue(("models", "a"))], B + FIRST + SECOND + END),
        ([RemoveValue(("models", "b"))], A + FIRST + SECOND + END),
        ([RemoveValue(("routes", 0))], A + B + SECOND + END),
        ([RemoveValue(("routes", 1)), RemoveValue(("routes", 0))], A + B + END),
        ([MoveEntry(("routes", 1), 0)], A + B + SECOND + FIRST + END),
        ([MoveEntry(("routes", 0), 1)], A + B + SECOND + FIRST + END),
        ([InsertEntry(("routes", 1), {"model": "c"})], A + B + FIRST + '[[routes]]\nmodel = "c"\n\n' + SECOND + END),
        ([InsertEntry(("routes", 2), {"model": "c"})], A + B + FIRST + SECOND + '[[routes]]\nmodel = "c"\n\n' + END),
        (
            [SetValue(("models", "c", "path"), "c.gguf"), SetValue(("models", "c", "aliases"), ["d"])],
            A + B + '[models.c]\npath = "c.gguf"\naliases = ["d"]\n\n' + FIRST + SECOND + END,
        ),
        ([SetValue(("models", "a", "decoding", "top_p"), 0.9)], SECTIONS.replace("0.5\n", "0.5\ntop_p = 0.9\n")),
        (
            [SetValue(("models", "b", "decoding", "top_p"), 0.9)],
            SECTIONS.replace('"b.gguf"\n', '"b.gguf"\ndecoding = { top_p = 0.9 }\n'),
        ),
        (
            [RemoveValue(("routes", 1, "model")), SetValue(("routes", 1, "cache"), "x")],
            SECTIONS.replace('model = "a"', 'cache = "x"'),
        ),
    ],
)
def test_a_section_takes_its_comment_along_and_others_keep_theirs(edits: list[FileEdit], expected: str) -> None:
    assert edit_text(".toml", SECTIONS, edits) == expected


@pytest.mark.parametrize(
    "text",
    [
        'routes = [{ match = "a", model = "m" }, { match = "b", model = "m" }]\n',
        '[[routes]]\nmatch = "a"\nmodel = "m"\n[[routes]]\nmatch = "b"\nmodel = "m"\n',
        '[http]\nport = 1\n[[routes]]\nmatch = "a"\nmodel = "m"\n[log]\n[[routes]]\nmatch = "b"\nmodel = "m"\n',
    ],
    ids=["inline", "sections", "apart"],
)
def test_routes_are_edited_in_every_syntax(text: str) -> None:
    edits: list[FileEdit] = [
        MoveEntry(("routes", 1), 0),
        InsertEntry(("routes", 1), {"match": "c", "model": "m"}),
        SetValue(("routes", 2, "match"), "z"),
    ]
    assert [route["match"] for route in tomllib.loads(edit_text(".toml", text, edits))["routes"]] == ["b", "c", "z"]
    assert tomllib.loads(edit_text(".toml", text, [RemoveValue(("routes", 0))]))["routes"][0]["match"] == "b"


def test_a_text_of_several_lines_is_written_as_one() -> None:
    template = "{% for m in messages %}\n  '''\\ \"\"\" \n{% endfor %}"
    new = edit_text(".toml", SECTIONS, [SetValue(("models", "a", "chat_template"), template)])
    assert tomllib.loads(new)["models"]["a"]["chat_template"] == template
    assert "\n{% endfor %}" in new


def test_what_is_not_there_cannot_be_removed() -> None:
    with pytest.raises(Conflict, match=r"no models\.z in the file"):
        edit_text(".toml", SECTIONS, [RemoveValue(("models", "z"))])


def test_json_members_are_removed_with_their_comma() -> None:
    text = '{\n  "models": {\n    "a": {"path": "x"},\n    "b": {"path": "y"}\n  }\n}\n'
    assert edit_text(".json", text, [RemoveValue(("models", "a"))]) == text.replace('    "a": {"path": "x"},\n', "")
    assert edit_text(".json", text, [RemoveValue(("models", "b"))]) == text.replace(',\n    "b": {"path": "y"}', "")
    new = edit_text(".json", text, [InsertEntry(("routes", 0), {"match": "*", "model": "a"})])
    assert json.loads(new)["routes"] == [{"match": "*", "model": "a"}]


# --- writing ----------------------------------------------------------------------------------------------------------


def test_a_file_that_another_program_changed_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "modelyard.toml"
    file.write_text("theirs = 1\n")
    with pytest.raises(Conflict, match="another program has changed"):
        write_with_backup(file, "ours = 1\n", b"before = 1\n")
    assert file.read_text() == "theirs = 1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["modelyard.toml"]


def test_a_read_only_file_stays_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "modelyard.toml"
    file.write_text("a = 1\n")
    monkeypatch.setattr("modelyard.config.file_editor.os.access", lambda *_: False)  # root may write everything
    with pytest.raises(Unavailable, match="read-only; it is unchanged"):
        write_with_backup(file, "a = 2\n", b"a = 1\n")
    assert [path.name for path in tmp_path.iterdir()] == ["modelyard.toml"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real.toml"
    real.write_text("a = 1\n")
    link = tmp_path / "modelyard.toml"
    link.symlink_to(real)
    backup = write_with_backup(link, "a = 2\n", b"a = 1\n")
    assert link.is_symlink()
    assert real.read_text() == "a = 2\n"
    assert backup == tmp_path / "real.bak.toml"


def test_a_mounted_file_that_cannot_be_replaced_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> None:
        raise OSError(16, os.strerror(16))

    file = tmp_path / "modelyard.toml"
    file.write_text("a = 1\n")
    monkeypatch.setattr("modelyard.config.file_editor.os.replace", busy)
    backup = write_with_backup(file, "a = 2\n", b"a = 1\n")
    assert file.read_text() == "a = 2\n"
    assert backup is not None
    assert backup.read_text() == "a = 1\n"
    assert len(list(tmp_path.iterdir())) == 2


def test_line_ends_of_windows_and_its_mark_stay() -> None:
    assert encode("a = 1\n", b"\xef\xbb\xbfb = 1\r\n") == b"\xef\xbb\xbfa = 1\r\n"
    assert encode("a = 1\n", None) == b"a = 1\n"
