"""Scripted answers on the real llama.cpp engine: prompts are read and KV is cached as usual.

    with scripted_answers([{"when": "write a note", "steps": [{"text": "Writing."}]}]):
        …  # engines of this process that are opened here

The rules are those of the fake engine's script: `when` searches the last user turn, `result` the tool results after it,
`turn` counts the prompts of a session. Steps that wait or fail are ignored. A prompt without a matching rule gets an
empty answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from modelyard.core.engine import EngineSpec
from modelyard.core.tokenizer import Tokenizer
from modelyard.engines.llama_cpp import engine as llama_cpp
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.library.model_files import locate_model_file
from modelyard.tokenizer.gguf import GgufTokenizer
from modelyard_fake.answers import OutputEncoder
from modelyard_fake.script import PromptView, Script, ScriptRule

_PROMPT_TAIL = 2  # tokens: the end of a turn's opening


class ScriptedAnswers:
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


@contextmanager
def scripted_answers(rules: Iterable[dict[str, Any]]) -> Iterator[None]:
    script = tuple(ScriptRule.model_validate(rule) for rule in rules)

    class ScriptedEngine(llama_cpp.LlamaCppEngine):
        def __init__(self, spec: EngineSpec) -> None:
            super().__init__(spec)
            self._answers = ScriptedAnswers(script, GgufTokenizer(locate_model_file(spec.options.path)))

        def _admit(self, job: LlamaCppJob) -> None:
            job.mask, job.scripted = None, self._answers.answer(job.prompt.ids, job.prompt.session)
            super()._admit(job)

    with patch.object(llama_cpp, "LlamaCppEngine", ScriptedEngine):
        yield
