"""A test option: scripted answers on the real engine. Prompts are read and KV is cached as usual.

    replay = "session.jsonl"

Each line of the file is one rule of the fake engine's script, as JSON:

    {"when": "write a note", "steps": [{"text": "Writing."}, {"call": {"name": "Write", "arguments": {"path": "a"}}}]}
    {"result": "created", "steps": [{"text": "Done."}]}
    {"turn": 3, "steps": [{"tokens": 50}]}

`when` searches the last user turn, `result` the tool results after it, `turn` counts the prompts of a session. Steps
that wait or fail are ignored. A prompt without a matching rule gets an empty answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from modelyard.core.errors import InvalidRequest
from modelyard.core.tokenizer import Tokenizer
from modelyard.engines.fake.answers import OutputEncoder
from modelyard.engines.fake.script import PromptView, Script, ScriptRule
from modelyard.tokenizer.gguf import GgufTokenizer

_PROMPT_TAIL = 2  # tokens: the end of a turn's opening


class Replay:
    """Belongs to the engine's thread."""

    def __init__(self, rules: tuple[ScriptRule, ...], tokenizer: Tokenizer) -> None:
        self._script, self._tokenizer, self._encoder = Script(rules), tokenizer, OutputEncoder(tokenizer)

    def answer(self, ids: list[int], session: str | None) -> Iterator[int]:
        """The answer's tokens, as the tokenizer would split its text in a later prompt."""
        view = PromptView(ids, self._tokenizer)
        rule = self._script.choose(view, session)
        if rule is None:
            return iter(())
        encoded = self._encoder.encode(rule.steps, in_reasoning=view.starts_in_reasoning)
        answer = [token for step in encoded if isinstance(step, list) for token in step]
        # The split depends on the text before it, so the end of the prompt is tokenized with it.
        tail = ids[-_PROMPT_TAIL:]
        whole = self._tokenizer.encode(self._tokenizer.decode([*tail, *answer]))
        return iter(whole[len(tail) :] if whole[: len(tail)] == tail else answer)


def read_rules(path: Path) -> tuple[ScriptRule, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidRequest(f"replay: {path} cannot be read: {error.strerror}", code="replay_unreadable") from None
    return tuple(_rule(path, number, line) for number, line in enumerate(lines, 1) if line.strip())


def _rule(path: Path, number: int, line: str) -> ScriptRule:
    try:
        return ScriptRule.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(
            f"replay: line {number} of {path} is not a rule: {where}: {first['msg']}", code="replay_invalid"
        ) from None


def create_replay(script: str | None, model: Path) -> Replay | None:
    return Replay(read_rules(Path(script)), GgufTokenizer(model)) if script is not None else None
