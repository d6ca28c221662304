"""Tokenizer files that a gateway fetches from a worker."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

import modelyard_fake as fake
from modelyard.core.errors import Unavailable, Unsupported
from modelyard.tokenizer import open_tokenizer
from modelyard.workers.tokenizer_files import cached_tokenizers, read_tokenizer_files, store_tokenizer, tokenizer_hash
from tests import cli_process
from tests.e2e.helpers import wait_until
from tests.engines.llama_cpp.helpers import model_file
from tests.engines.llama_cpp.short_model import short_model_file
from tests.workers.harness import connected, open_fake, running_worker, short_folder

SHIPPED = fake.tokenizer_path(fake.Options())


@pytest.mark.parametrize(
    "find", [lambda: SHIPPED, lambda: SHIPPED / "tokenizer.json", model_file], ids=["short_folder", "file", "gguf"]
)
def test_stored_files_open_as_the_same_tokenizer(find: Callable[[], Path], tmp_path: Path) -> None:
    files = read_tokenizer_files(where := find())
    assert sum(map(len, files.values())) < 8 << 20, "weights must not be sent"
    there = open_tokenizer(store_tokenizer(tmp_path / "store", tokenizer_hash(files), files))
    here = open_tokenizer(where)
    text = "<|im_start|>user\nNaïve 🎉<|im_end|>"
    assert (there.size, there.encode(text), there.eos) == (here.size, here.encode(text), here.eos)
    assert (there.template, there.bos_token, there.specials) == (here.template, here.bos_token, here.specials)


def test_a_tokenizer_is_stored_once_and_found_by_its_hash(tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert cached_tokenizers(store) == ()
    name = tokenizer_hash(files := read_tokenizer_files(SHIPPED))
    first = store_tokenizer(store, name, files)
    assert cached_tokenizers(store) == (name,)
    assert store_tokenizer(store, name, {}) == store_tokenizer(store, name, files) == first
    assert [each.name for each in tmp_path.iterdir()] == ["store"], "no partial files stay"


def test_a_change_of_one_byte_changes_the_hash() -> None:
    files = read_tokenizer_files(SHIPPED)
    assert tokenizer_hash(files) != tokenizer_hash(files | {"tokenizer.json": files["tokenizer.json"] + b" "})
    assert tokenizer_hash({"a": b"b", "c": b""}) != tokenizer_hash({"a": b"", "c": b"b"})


@pytest.mark.parametrize("name", ["../../evil", "/etc/passwd", "weights.bin"])
def test_unexpected_files_and_wrong_hashes_are_refused(name: str, tmp_path: Path) -> None:
    files = {name: b"x"}
    with pytest.raises(Unavailable):
        store_tokenizer(tmp_path / "store", tokenizer_hash(files), files)
    with pytest.raises(Unavailable):
        store_tokenizer(tmp_path / "store", "0" * 32, read_tokenizer_files(SHIPPED))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_tokenizer_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=str(tmp_path)):
        read_tokenizer_files(tmp_path)


async def test_a_worker_sends_only_files_that_the_gateway_lacks() -> None:
    async with running_worker() as worker, connected(worker) as session:
        engine = await open_fake(session)
        reply = await engine.fetch_tokenizer(())
        assert reply.files == read_tokenizer_files(SHIPPED)
        again = await engine.fetch_tokenizer((reply.tokenizer,))
        assert (again.tokenizer, again.files) == (reply.tokenizer, {})
        assert worker.faults == 0


# --- end to end: only the worker has the model file -------------------------------------------------------------------


CONFIG = """
[models.small]
backend = "llama_cpp"
path = "far.gguf"
n_threads = 1
[caches.main]
model = "small"
n_ctx = 512
[workers]
launch = false
patience = 1000
[scheduler]
endpoint = "{endpoint}"
"""


@contextmanager
def command(cwd: Path, *arguments: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([*cli_process.MODELYARD, *arguments], cwd=cwd, env=cli_process.environment(**env)) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(cli_process.DEADLINE)


def _answer(url: str) -> httpx.Response:
    body = {"model": "small", "max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": "Hi."}]}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=cli_process.DEADLINE)


def test_a_gateway_without_the_model_file_fetches_the_tokenizer_from_the_worker(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (there / "models").mkdir(parents=True)
    here.mkdir()
    (there / "models" / "far.gguf").symlink_to(short_model_file())
    endpoint = f"ipc://{short_folder() / 's'}"
    config = CONFIG.format(endpoint=endpoint)
    (there / "modelyard.toml").write_text(config)
    (here / "modelyard.toml").write_text(config)
    with ExitStack() as stack:
        stack.enter_context(command(here, "scheduler", MODELYARD_CACHE=str(here)))
        gateway = stack.enter_context(cli_process.serve(here, config=config, MODELYARD_CACHE=str(here)))
        refused = _answer(gateway.url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_failed")
        stack.enter_context(command(there, "worker", "--scheduler", endpoint, MODELYARD_CACHE=str(there)))
        wait_until(
            lambda: _answer(gateway.url).status_code == 200, "the gateway has the tokenizer", cli_process.DEADLINE
        )
        counted = httpx.post(
            f"{gateway.url}/v1/messages/count_tokens",
            json={"model": "small", "messages": [{"role": "user", "content": json.dumps({"a": "b"})}]},
        )
        assert counted.json()["input_tokens"] > 5
        (kept,) = (here / "tokenizers").iterdir()
        assert [each.name for each in kept.iterdir()] == ["tokenizer.gguf"]
