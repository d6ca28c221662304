"""The engines: each file or package here is a backend by its own name, apart from what they share."""

NOT_PLUGINS = frozenset({"cores", "grammars", "mailbox", "managed", "outbox", "upstream"})
