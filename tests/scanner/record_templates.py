"""Record which markers the chat templates of a folder contain: `python -m tests.scanner.record_templates FOLDER`.

The folder is `vendor/llama.cpp/models/templates` in the source package of llama-cpp-python. `templates.toml` lists for
every template the format that its model writes, decided by reading the template, and its markers: enough to test the
detection without the templates themselves.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

from modelyard.scanner.detect import detect
from modelyard.scanner.formats import load, names

TABLE = Path(__file__).parent / "templates.toml"
_TAG = re.compile(r"<[^\s<>{}'\"\\]{1,40}>|\[/?[A-Z_]{3,}\]|>>>\w+|\]<\]\w+\[>\[")


def markers(template: str) -> list[str]:
    """Everything in it that looks like a marker, and every hint of ours that it contains."""
    hints = {hint for name in names() for group in load(name).template_hints for hint in group if hint in template}
    return sorted({*_TAG.findall(template), *hints})


def main(folder: Path) -> None:
    known = tomllib.loads(TABLE.read_text()) if TABLE.exists() else {}
    lines = []
    for path in sorted(folder.glob("*.jinja")):
        text = path.read_text()
        format = known.get(path.stem, {}).get("format") or detect(None, text, "").format
        found = ", ".join(json.dumps(marker, ensure_ascii=False) for marker in markers(text))
        lines.append(f'["{path.stem}"]\nformat = "{format}"\nmarkers = [{found}]\n')
    TABLE.write_text("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
