"""Counts the tokens of images with a model's own processor: a program for the interpreter that has vLLM.

It reads lines of JSON, `{"images": [base64, …]}`, and answers each with `{"counts": […]}` or `{"error": …, "of": …}`.
An image takes the tokens that the processor adds to a prompt with its placeholder; vLLM calls the same processor. This
file imports nothing of this package: another environment need not have what that needs.
"""

import base64
import io
import json
import sys
from importlib import import_module
from typing import Any, TextIO

_MAX_PIXELS = 1 << 26  # as when the image is read for an answer


class ImageFault(Exception):
    """An image cannot be read."""


def load(folder: str, settings: dict[str, Any], trust: bool) -> Any:
    transformers = import_module("transformers")
    return transformers.AutoProcessor.from_pretrained(
        folder, trust_remote_code=trust, local_files_only=True, **settings
    )


def prompt_of(processor: Any) -> str:
    """A prompt with the placeholder of an image, as the model's template writes it."""
    content = [{"type": "image"}, {"type": "text", "text": "?"}]
    if getattr(processor, "chat_template", None) or getattr(processor.tokenizer, "chat_template", None):
        text: str = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        return text
    return str(processor.image_token)


def read(data: bytes) -> Any:
    pil = import_module("PIL.Image")
    try:
        image = pil.open(io.BytesIO(data))
        if image.width * image.height > _MAX_PIXELS:
            raise ImageFault(f"an image of {image.width}x{image.height} is too large")
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, pil.DecompressionBombError) as error:
        raise ImageFault(f"an image cannot be read: {error}") from error


def count(processor: Any, text: str, data: bytes) -> int:
    made = processor(text=text, images=[read(data)], return_tensors="pt")
    return len(made["input_ids"][0]) - len(processor.tokenizer(text)["input_ids"])


def answer(processor: Any, text: str, line: str) -> dict[str, Any]:
    try:
        return {"counts": [count(processor, text, base64.b64decode(each)) for each in json.loads(line)["images"]]}
    except ImageFault as error:
        return {"error": str(error), "of": "image"}
    except Exception as error:  # whatever a model's own code raises
        return {"error": f"{type(error).__name__}: {error}", "of": "processor"}


def main(arguments: str, lines: TextIO, replies: TextIO) -> None:
    given = json.loads(arguments)
    try:
        processor = load(given["folder"], given["settings"], given["trust"])
        text = prompt_of(processor)
    except Exception as error:  # missing files, a missing library, a model's own code
        print(json.dumps({"error": f"{type(error).__name__}: {error}", "of": "processor"}), file=replies, flush=True)
        return
    for line in lines:
        print(json.dumps(answer(processor, text, line)), file=replies, flush=True)


if __name__ == "__main__":
    stdout, sys.stdout = sys.stdout, sys.stderr  # libraries write to it
    main(sys.argv[1], sys.stdin, stdout)
