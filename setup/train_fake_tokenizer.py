"""Train the tokenizer of the fake engine: `python setup/train_fake_tokenizer.py`, then commit the files it writes.

A byte-level BPE of about 4,000 tokens over the docstrings and the source of some of Python's standard library: English
and code, on every machine, with no download. Any text round trips, because every byte has a token of its own.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

HOME = Path(__file__).parent.parent / "modelyard" / "engines" / "fake" / "tokenizer"
SIZE = 4096
ENDS = ("<|im_end|>", "<|endoftext|>", "<|return|>", "<|call|>")
SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"),
)
GAPS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")  # behind the others: ids stay the same
CHAT = """I am the built-in fake engine. You said hello. What is the weather in Rome today? Call the tool get_weather.
{"name": "get_weather", "arguments": {"city": "Rome"}}\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>
{"type": "object", "properties": {"location": {"type": "string", "description": "the city"}}, "required": ["location"]}
system user assistant tool commentary analysis final json to=functions. You are a helpful assistant. Hello! Thanks, yes.
"""


def corpus() -> Iterator[str]:
    """Each text short: one long text would be one long word list for the trainer's memory."""
    yield from [CHAT] * 20
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="ignore")
        yield from docstrings(source)
        yield source[:4000]


def docstrings(source: str) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield text


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        show_progress=False,
        max_token_length=16,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in GAPS])
    return tokenizer


def write(tokenizer: Tokenizer) -> None:
    HOME.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(HOME / "tokenizer.json"), pretty=False)
    config = {"eos_token": "<|im_end|>", "add_bos_token": False, "clean_up_tokenization_spaces": False}
    ends = {"eos_token_id": [tokenizer.token_to_id(text) for text in ENDS]}
    (HOME / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (HOME / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")


if __name__ == "__main__":
    write(train())
    print(f"{HOME / 'tokenizer.json'}: {(HOME / 'tokenizer.json').stat().st_size} bytes")
