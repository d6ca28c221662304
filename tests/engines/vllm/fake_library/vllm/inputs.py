from typing import Any


class TokensPrompt(dict[str, Any]):
    pass


def tokens_input(
    prompt_token_ids: list[int], *, prompt: str | None = None, cache_salt: str | None = None
) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": prompt_token_ids, "cache_salt": cache_salt}
