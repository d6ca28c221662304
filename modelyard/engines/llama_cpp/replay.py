"""A test option: prompts are read and KV is kept as ever, but the answers are a script's. For clients' long sessions.

    replay = "session.jsonl"

Each line of the file is one rule of the fake engine's script, as JSON:

    {"when": "write a note", "steps": [{"text": "Writing."}, {"call": {"name": "Write", "arguments": {"path": "a"}}}]}
    {"result": "created", "steps": [{"text": "Done."}]}
    {"turn": 3, "steps": [{"tokens": 50}]}

`when` looks into the last user turn, `result` into the tool results after it, `turn` counts the prompts of a session.
Steps that wait or fail have no meaning here. A prompt that no rule fits gets an empty answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from modelyard.core.errors import InvalidRequest
from modelyard.core.tokenizer import Tokenizer
from modelyard.engines.fake.output import PlanCompiler, format_writer, iterate
from modelyard.engines.fake.script import PromptView, Script, ScriptRule
from modelyard.tokenizer.gguf import GgufTokenizer


class Replay:
    """Belongs to the engine's thread."""

    def __init__(self, rules: tuple[ScriptRule, ...], vocab: Tokenizer) -> None:
        self._script, self._vocab, self._compiler = Script(rules), vocab, PlanCompiler(vocab)

    def answer(self, ids: list[int], session: str | None) -> Iterator[int]:
        """The tokens that are to be said, spelled as the vocabulary would spell their text in a later prompt."""
        talk = PromptView(ids, self._vocab)
        rule = self._script.choose(talk, session)
        if rule is None:
            return iter(())
        writer = format_writer("hermes", in_reasoning=talk.starts_in_reasoning)
        actions = iterate(self._compiler.compile(rule.steps, writer))
        said = [token for action in actions if isinstance(action, list) for token in action]
        return iter(self._spelled(ids, said))

    def _spelled(self, ids: list[int], said: list[int]) -> list[int]:
        """Behind the prompt's end, because a text is cut into tokens by what stands before it."""
        tail = ids[-_BEFORE:]
        whole = self._vocab.encode(self._vocab.decode([*tail, *said]))
        return whole[len(tail) :] if whole[: len(tail)] == tail else said


_BEFORE = 2  # tokens: the end of a turn's opening


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
        told = f"replay: line {number} of {path} is no rule: {where}: {first['msg']}"
        raise InvalidRequest(told, code="replay_invalid") from None


def create_replay(script: str | None, model: Path) -> Replay | None:
    return Replay(read_rules(Path(script)), GgufTokenizer(model)) if script is not None else None
