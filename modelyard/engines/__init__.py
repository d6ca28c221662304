"""The engines. Each package or module here is a backend with its own name, except those in NOT_PLUGINS."""

NOT_PLUGINS = frozenset(
    {
        "generation_queue",
        "grammar_check",
        "grammars",
        "hf_folder",
        "in_process",
        "managed",
        "media_checks",
        "option_faults",
        "tokenizer_check",
        "upstream",
        "upstream_client",
        "upstream_connection",
    }
)
