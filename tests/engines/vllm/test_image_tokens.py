"""The tokens of images before a model is loaded: a processor in another interpreter counts them."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import modelyard_vllm as vllm
from modelyard.core.engine import Media
from modelyard.core.errors import InvalidRequest, Unavailable, Unimplemented, Unsupported
from modelyard_vllm import image_tokens
from modelyard_vllm.options import VllmOptions
from modelyard_vllm.serve.server import interpreter_of

# A stand-in for the library: an image takes one token for each 10 pixels of its width.
LIBRARY = """
import os
from pathlib import Path

class Tokenizer:
    chat_template = "one"

    def __call__(self, text):
        return {"input_ids": text.split()}

class Processor:
    tokenizer = Tokenizer()

    def apply_chat_template(self, messages, tokenize):
        return "user <image> ?"

    def __call__(self, text, images, return_tensors):
        (image,) = images
        if image.size == (13, 13):
            os._exit(3)
        if image.size == (14, 14):
            raise RuntimeError("no such size")
        words = text.split()
        at = words.index("<image>")
        words[at : at + 1] = ["<image>"] * (image.width // 10)
        return {"input_ids": [words]}

class AutoProcessor:
    @staticmethod
    def from_pretrained(folder, trust_remote_code, local_files_only, **settings):
        print("libraries write to the output")
        with open(Path(folder) / "loads", "a") as file:
            file.write(repr((settings, trust_remote_code)) + "\\n")
        if not (Path(folder) / "preprocessor_config.json").exists():
            raise OSError("there is no preprocessor_config.json")
        return Processor()
"""


def picture(width: int, height: int = 20) -> Media:
    data = io.BytesIO()
    Image.new("RGB", (width, height)).save(data, "PNG")
    return media(data.getvalue())


def media(data: bytes, kind: str = "image") -> Media:
    return Media(kind, hashlib.sha256(data).hexdigest(), data, 0)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    library = tmp_path / "library"
    library.mkdir()
    (library / "transformers.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(library))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "preprocessor_config.json").write_text("{}")
    yield model
    image_tokens.close_all()


def count(folder: Path, *found: Media, **options: Any) -> list[int]:
    return vllm.count_media(VllmOptions(vllm_model=str(folder), **options), found)


def loads(folder: Path) -> list[str]:
    return (folder / "loads").read_text().splitlines()


def test_an_image_counts_as_what_the_processor_adds_to_its_placeholder(folder: Path) -> None:
    assert count(folder, picture(40), picture(70), picture(40)) == [3, 6, 3]


def test_the_processor_is_loaded_once(folder: Path) -> None:
    assert [count(folder, picture(width)) for width in (20, 30, 20)] == [[1], [2], [1]]
    assert len(loads(folder)) == 1


def test_the_settings_of_the_processor_are_those_of_the_engine(folder: Path) -> None:
    count(
        folder, picture(20), vllm_mm_processor_kwargs={"size": 7}, vllm_max_pixels=10_000, vllm_trust_remote_code=True
    )
    assert loads(folder) == ["({'size': 7, 'max_pixels': 10000}, True)"]


def test_an_unreadable_image_is_the_clients_fault(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read") as raised:
        count(folder, media(b"no picture"))
    assert raised.value.code == "invalid_image"
    assert count(folder, picture(50)) == [4], "the process goes on"
    assert len(loads(folder)) == 1


def test_a_folder_without_a_processor_says_what_is_missing(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(Unimplemented, match=r"once the model is loaded.*no preprocessor_config\.json"):
        count(folder, picture(50))
    (folder / "preprocessor_config.json").write_text("{}")
    assert count(folder, picture(50)) == [4], "the next request tries again"


def test_an_interpreter_without_the_library_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(Unimplemented, match="No module named 'transformers'"):
        count(folder, picture(50))


def test_an_error_of_the_processor_is_shown(folder: Path) -> None:
    with pytest.raises(Unimplemented, match="RuntimeError: no such size"):
        count(folder, picture(14, 14))


def test_a_processor_that_dies_is_started_again(folder: Path) -> None:
    with pytest.raises(Unavailable, match="ended"):
        count(folder, picture(13, 13))
    assert count(folder, picture(50)) == [4]


def test_a_processor_that_hangs_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_tokens, "_ANSWER_S", 0.01)
    with pytest.raises(Unavailable):
        count(folder, picture(50))


def test_a_missing_interpreter_is_reported(folder: Path) -> None:
    options = VllmOptions(vllm_model=str(folder))
    with pytest.raises(Unavailable):
        vllm.count_media(options, [picture(50)], "/no/such/python")


def test_a_process_without_work_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = image_tokens.ProcessorProcess(sys.executable, folder, {})
    assert process.count([picture(50)]) == [4]
    child = process._process
    assert child is not None
    process.close()
    assert child.poll() is not None
    assert process.count([picture(50)]) == [4], "what was counted is known"


def test_audio_is_refused(folder: Path) -> None:
    with pytest.raises(Unsupported):
        count(folder, media(b"RIFF", "audio"))


def test_a_model_that_is_not_here_cannot_be_counted() -> None:
    with pytest.raises(Unimplemented, match="not on this machine"):
        vllm.count_media(VllmOptions(vllm_model="nobody/has-this"), [picture(50)])


def test_the_interpreter_of_a_program_is_the_one_beside_it(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text("#!/usr/bin/env python3\n")
    assert interpreter_of(str(program)) == "/usr/bin/env"
    (tmp_path / "python").symlink_to(sys.executable)
    assert interpreter_of(str(program)) == str(tmp_path / "python")


def test_the_script_needs_nothing_of_this_package() -> None:
    source = Path(image_tokens._SCRIPT).read_text()
    assert "modelyard" not in source.replace("this package", "")
    argument = base64.b64encode(os.urandom(4)).decode()
    failed = subprocess.run([sys.executable, "-I", "-c", source, argument], capture_output=True, check=False)
    assert b"JSONDecodeError" in failed.stderr
