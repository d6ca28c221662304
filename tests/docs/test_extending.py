"""The recipes of docs/extending.md: the files they name exist, and the first one works."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import DOCS, blocks

ROOT = DOCS.parent
PAGE = (DOCS / "extending.md").read_text()
# In a copy of the program: a request with the new parameter, read by a protocol and sent to a worker and back.
TRY = """
from modelyard.config.load import load_config
from modelyard.core.engine import Prompt
from modelyard.core.request import Sampling
from modelyard.http.errors import load_protocol
from modelyard.workers.messages import AddRequest, encode, decode_for_worker
body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "top_a": 0.25}'
request = load_protocol("openai_chat").read_request(body, {})
assert request.sampling.top_a == 0.25, request.sampling
sent = AddRequest("e", 1, Prompt(parts=(), sampling=request.sampling))
assert decode_for_worker(encode(sent)).prompt.sampling.top_a == 0.25
config = load_config(env={}, overrides={"models": {"m": {"backend": "fake", "decoding": {"top_a": 0.5}}}}).config
assert config.models["m"].decoding.sampling() == Sampling(top_a=0.5)
try:
    load_protocol("openai_chat").read_request(body.replace(b"0.25", b"7"), {})
except Exception as error:
    print(error)
"""


def test_every_file_named_in_a_recipe_exists() -> None:
    named = set(re.findall(r"`((?:modelyard|tests)/[\w/.]+)`", PAGE))
    assert len(named) > 10
    for path in named:
        assert (ROOT / path).exists(), path


def test_the_recipe_for_a_sampling_parameter_works(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "modelyard", tmp_path / "modelyard", ignore=shutil.ignore_patterns("__pycache__"))
    files = [
        "core/request.py",
        "protocols/common/extensions.py",
        "protocols/common/extensions.py",
        "router/settings.py",
    ]
    for file, change in zip(files, blocks("extending.md", "diff"), strict=True):
        _apply(tmp_path / "modelyard" / file, change)
    done = subprocess.run(
        [sys.executable, "-c", TRY], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "top_a must be between 0 and 1" in done.stdout


def _apply(file: Path, change: str) -> None:
    """Each line with a plus is inserted after the line above it, which occurs once in the file."""
    before, added = (line[1:] for line in change.splitlines())
    text = file.read_text()
    assert text.count(f"{before}\n") == 1, f"{file} has no one place for {before!r}"
    file.write_text(text.replace(f"{before}\n", f"{before}\n{added}\n"))
