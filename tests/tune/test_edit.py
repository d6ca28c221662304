"""Changes in a configuration's text: the keys that change, and not a byte besides."""

from __future__ import annotations

import json
import tomllib

import pytest

from modelyard.core.errors import Conflict
from modelyard.tune.edit import fragment, json_text, toml

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


def test_a_value_is_replaced_and_everything_else_stays():
    new = toml(TOML, {("models", "m", "n_threads"): 4})
    assert new == TOML.replace("n_threads = 1 ", "n_threads = 4 ")


def test_a_new_key_goes_to_the_end_of_its_section():
    new = toml(TOML, {("models", "m", "n_ubatch"): 256})
    assert new == TOML.replace('flash_attn = "off"\n', 'flash_attn = "off"\nn_ubatch = 256\n')


def test_a_section_that_is_not_there_is_made():
    new = toml(TOML, {("caches", "fast", "n_ubatch"): 128})
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
def test_every_way_of_writing_a_section_is_understood(text):
    new = toml(text, {("models", "m", "n_threads"): 8, ("models", "m", "flash_attn"): "on"})
    assert tomllib.loads(new)["models"]["m"] == {"path": "x", "n_threads": 8, "flash_attn": "on"}


def test_a_value_where_a_section_should_be_is_refused():
    with pytest.raises(Conflict, match="is no section"):
        toml("models = 3\n", {("models", "m", "n_threads"): 1})


def test_a_fragment_has_only_what_changes():
    told = fragment({("models", "a.b", "n_threads"): 2, ("models", "a.b", "flash_attn"): "on"})
    assert told == '[models."a.b"]\nn_threads = 2\nflash_attn = "on"'


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


def test_json_is_cut_open_at_the_value_only():
    new = json_text(JSON, {("engine", "models", "m", "n_threads"): 4})
    assert new == JSON.replace('"n_threads": 1', '"n_threads": 4')


def test_a_new_json_key_gets_a_line_like_its_neighbours():
    new = json_text(JSON, {("engine", "models", "m", "flash_attn"): "on"})
    assert new == JSON.replace('"n_threads": 1\n', '"n_threads": 1,\n        "flash_attn": "on"\n')


def test_a_json_object_on_one_line_stays_on_it():
    assert json_text(JSON, {("service", "host"): "::1"}) == JSON.replace("8000}", '8000, "host": "::1"}')


def test_json_objects_that_are_not_there_are_made():
    new = json.loads(json_text(JSON, {("caches", "main", "n_ubatch"): 64}))
    assert new["caches"] == {"main": {"n_ubatch": 64}}
    assert json.loads(json_text("{}", {("a", "b"): True})) == {"a": {"b": True}}
    assert json.loads(json_text("{ }", {("a",): "ü"})) == {"a": "ü"}


def test_text_that_looks_like_a_key_is_none():
    tricky = '{"about": "\\"n_threads\\": 7, }", "n_threads" : 1, "z": {"n_threads": 9}}'
    new = json_text(tricky, {("n_threads",): 2})
    assert new == tricky.replace('"n_threads" : 1', '"n_threads" : 2')


def test_a_json_value_where_an_object_should_be_is_refused():
    with pytest.raises(Conflict, match="is no object"):
        json_text('{"models": 3}', {("models", "m"): 1})
