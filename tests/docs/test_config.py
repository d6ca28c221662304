"""docs/config.md: the table of prompt formats matches the templates."""

from __future__ import annotations

import re

from modelyard.prompt.render import Renderer
from modelyard.prompt.template import ChatTemplate
from modelyard.prompt.template_source import builtin, find_template, formats
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from tests.docs.pages import DOCS
from tests.tokenizer import sample_tokenizers

ROW = re.compile(r"^\| `(\w+)`[^|]*\| [^|]* \| `((?:[^`])+)` \| (yes|no) \|$", re.MULTILINE)


def test_the_table_of_prompt_formats_matches_the_templates():
    rows = {
        name: (stop.replace("\\|", "|"), switch) for name, stop, switch in ROW.findall((DOCS / "config.md").read_text())
    }
    vocab = HuggingFaceTokenizer.from_text(sample_tokenizers.byte_level())
    for name, (stop, switch) in rows.items():
        assert find_template(prompt_format=name).stops == (stop,)
        modes = Renderer(ChatTemplate(builtin(name)), vocab).thinking_modes
        assert (switch == "yes") == ("disabled" in modes), name
    assert set(rows) | {"chatml"} == set(formats())
