"""Client protocols, one file each, both roles, pure: bytes ⇄ core values. A protocol never sees another one."""

NOT_PLUGINS = frozenset({"json", "extensions", "sealing", "sse", "statuses", "openai_errors", "openai_fields"})
