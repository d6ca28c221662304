"""`modelyard bench --images`: every image the first time and again, on any server."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from modelyard.core.errors import InvalidRequest
from modelyard_bench import documents
from modelyard_bench.targets import Access, url_target
from tests.engines.llama_cpp.media_files import picture
from tests.live_server import demo_config, live_server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b.PNG").write_bytes(picture(1))
    (tmp_path / "a.jpg").write_bytes(picture(2, format="JPEG"))
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


def test_images_are_found_by_their_names(folder: Path, tmp_path: Path) -> None:
    assert [file.name for file in documents.find_images(folder)] == ["a.jpg", "b.PNG"]
    with pytest.raises(InvalidRequest, match="has no images"):
        documents.find_images(folder / "none")


def test_the_prompt_is_the_files_or_that_of_the_document_benchmark(tmp_path: Path) -> None:
    assert documents.read_prompt(None).startswith("Transcribe this document")
    (tmp_path / "ask.txt").write_text("What is it?\n")
    assert documents.read_prompt(tmp_path / "ask.txt") == "What is it?"
    with pytest.raises(InvalidRequest, match="cannot be read"):
        documents.read_prompt(tmp_path / "none.txt")


async def test_each_image_is_sent_once_and_again(folder: Path) -> None:
    script = [{"steps": [{"tokens": 5}]}]
    with live_server(demo_config(script, modalities=["text", "image"])) as running:
        spec = url_target(running.url, None, Access())
        images = documents.find_images(folder)
        results = await documents.run([spec], images, "Read.", number=1, output_tokens=8, repetitions=2)
    assert [(result.image, len(result.warm)) for result in results] == [("a.jpg", 2), ("b.PNG", 2)]
    assert all(sample.error is None and sample.output_tokens for result in results for sample in result.warm)
    shown = io.StringIO()
    documents.show(results, Console(file=shown, width=120))
    assert "a.jpg" in shown.getvalue()
    assert "cached warm" in shown.getvalue()


async def test_a_failure_is_shown_with_its_image(folder: Path) -> None:
    with live_server(demo_config()) as running:  # a text model
        spec = url_target(running.url, None, Access())
        results = await documents.run([spec], documents.find_images(folder), "Read.", number=1, repetitions=1)
    shown = io.StringIO()
    documents.show(results, Console(file=shown, width=200))
    assert "failed: 400" in shown.getvalue()
