"""The engines: each file or package here is a backend by its own name, apart from what they share."""

NOT_PLUGINS = frozenset(
    {"cores", "generation_queue", "grammars", "hf_folder", "in_process", "managed", "token_dispatch", "upstream"}
)
