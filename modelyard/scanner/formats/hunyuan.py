"""Hunyuan, as other servers call Hy 3's format.

    <tool_calls>
    <tool_call>get_weather<tool_sep>
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>
    </tool_calls>

An alias of `hy_v3`: the same reader, for either spelling of the tags. Hunyuan A13B is `hunyuan_a13b`.
"""

from __future__ import annotations

from msgspec.structs import replace

from modelyard.scanner.formats import hy_v3

FORMAT = replace(hy_v3.FORMAT, name="hunyuan", template=(), names=("hunyuan",))
