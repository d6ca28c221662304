"""Command A Plus, North: as Command A, with `TEXT` in place of `RESPONSE`.

    <|START_THINKING|>I need …<|END_THINKING|><|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}
    ]<|END_ACTION|>

    <|START_THINKING|>It rains.<|END_THINKING|><|START_TEXT|>It <co>rains</co: 0:[0]>.<|END_TEXT|>

An alias: one reader reads both. The prompt opens the thinking.
"""

from __future__ import annotations

from msgspec.structs import replace

from modelyard.scanner.formats import cohere_command

FORMAT = replace(
    cohere_command.FORMAT,
    name="cohere_command4",
    template=(("<|CHATBOT_TOKEN|>", "<|START_TEXT|>", "<|END_TEXT|>"),),
    names=("command-a-plus", "command-a-05-2026", "north-mini", "cohere2moe"),
)
