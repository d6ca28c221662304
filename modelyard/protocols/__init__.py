"""Client protocols, one module or package each. They are pure: bytes ⇄ core values. No protocol imports another one,
except that `openai_responses` hands bodies in the pool dialect to `pool_responses`.
"""

NOT_PLUGINS = frozenset({"common"})
