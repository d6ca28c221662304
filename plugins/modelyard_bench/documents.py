"""`modelyard bench --images`: each image of a folder with one prompt, the first time and again.

The first request of an image encodes and evaluates it; the repetitions are what a cache leaves to do. A number before
the image makes the first prompt new in every run, so that no KV of an earlier one is found.
"""

from __future__ import annotations

import base64
import statistics
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from modelyard.core.errors import InvalidRequest
from modelyard_bench.load import Sample, UrlTarget
from modelyard_bench.targets import TargetSpec

OUTPUT_TOKENS, REPETITIONS = 2048, 3
_TYPES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".gif": "gif", ".webp": "webp", ".bmp": "bmp"}


class DocumentResult(Struct, frozen=True):
    """One image on one target. `warm` are the repetitions."""

    target: str
    image: str
    first: Sample
    warm: tuple[Sample, ...]


def find_images(folder: Path) -> list[Path]:
    found = sorted(file for file in folder.glob("*") if file.suffix.lower() in _TYPES)
    if not found:
        raise InvalidRequest(f"{folder} has no images ({', '.join(_TYPES)})")
    return found


def read_prompt(file: Path | None) -> str:
    """The file's text, else that of the document-structure benchmark."""
    if file is None:
        return files("modelyard_bench").joinpath("document_prompt.txt").read_text("utf-8").strip()
    try:
        return file.read_text("utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}") from None


def messages(image: Path, prompt: str, number: int) -> list[dict[str, Any]]:
    url = f"data:image/{_TYPES[image.suffix.lower()]};base64,{base64.b64encode(image.read_bytes()).decode()}"
    content = [
        {"type": "text", "text": f"Document {number}:"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": prompt},
    ]
    return [{"role": "user", "content": content}]


async def run(
    specs: Sequence[TargetSpec],
    images: Sequence[Path],
    prompt: str,
    *,
    number: int,
    output_tokens: int = OUTPUT_TOKENS,
    repetitions: int = REPETITIONS,
    on_result: Callable[[DocumentResult], None] = lambda _: None,
) -> list[DocumentResult]:
    """One request at a time, target by target."""
    results: list[DocumentResult] = []
    for spec in specs:
        async with spec.open(lambda _: None) as target:
            assert isinstance(target, UrlTarget)  # noqa: S101 the caller asks for servers
            for at, image in enumerate(images):
                asked = messages(image, prompt, number + at)
                first, *warm = [(await target.chat(asked, output_tokens))[0] for _ in range(1 + repetitions)]
                results.append(DocumentResult(f"{spec.name} {target.model}", image.name, first, tuple(warm)))
                on_result(results[-1])
    return results


def show(results: Sequence[DocumentResult], console: Console) -> None:
    for target in dict.fromkeys(result.target for result in results):
        console.print(target, markup=False, highlight=False)
        table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("image")
        for name in ("prompt", "output", "TTFT s first", "warm", "total s first", "warm", "cached warm"):
            table.add_column(name, justify="right")
        for result in results:
            if result.target == target:
                table.add_row(result.image, *_cells(result))
        console.print(table)


def _cells(result: DocumentResult) -> list[str]:
    if error := next((sample.error for sample in (result.first, *result.warm) if sample.error), None):
        return [f"failed: {error}"]
    warm = result.warm or (result.first,)
    return [
        str(result.first.prompt_tokens),
        str(result.first.output_tokens),
        f"{result.first.ttft_s or 0:.2f}",
        f"{statistics.median(sample.ttft_s or 0 for sample in warm):.2f}",
        f"{result.first.total_s:.2f}",
        f"{statistics.median(sample.total_s for sample in warm):.2f}",
        str(warm[-1].cached_tokens),
    ]
