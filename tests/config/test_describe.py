from __future__ import annotations

from modelyard.config.describe import CacheRow, ModelRow, RouteRow, describe_config
from tests.config.conftest import Loader

TEXT = """
[models.m]
backend = "toy"
aliases = ["big"]
[models.n]
backend = "toy"
enabled = false
autoload = true
n_ctx = 64
[caches.main]
model = "m"
n_ctx = 100
parallel = 3
[caches.fast]
model = "m"
n_ctx = 50
overflow = "strict"
[[routes]]
match = ["*haiku*", "*mini*"]
endpoint = "/v1/*"
cache = "fast"
[[routes]]
match = "out*"
model = "n"
allow_remote = true
"""


def test_rows_show_the_effective_configuration(toml: Loader) -> None:
    rows = describe_config(toml(TEXT))
    assert rows.models == [ModelRow("m", "toy", ("big",), "at start"), ModelRow("n", "toy", (), "on demand")]
    assert rows.caches == [
        CacheRow("main", "m", 100, 3, 300, "clamp"),
        CacheRow("fast", "m", 50, 1, 50, "strict"),
        CacheRow("n", "n", 64, 1, 64, "clamp"),
    ]
    assert rows.routes == [
        RouteRow("*haiku* | *mini*", "/v1/*", "m", "fast", 50),
        RouteRow("out*", "*", "n", "n", 64, allow_remote=True),
        RouteRow("m", "*", "m", "main", 100),
        RouteRow("big", "*", "m", "main", 100),
        RouteRow("n", "*", "n", "n", 64),
    ]


def test_two_caches_of_a_model_are_not_batched_together(toml: Loader) -> None:
    (advice,) = describe_config(toml(TEXT)).problems
    assert advice.level == "warning"
    assert str(advice) == (
        "models.m: has 2 caches (main, fast): their requests are isolated, so they are not batched together."
    )
