"""The fake engine as a plug-in."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from modelyard import plugins
from modelyard.core.engine import AvailableMemory
from modelyard.engines import fake
from tests.engines.fake.stage import spec


def test_fake_is_a_backend_and_the_mailbox_is_none() -> None:
    assert "fake" in plugins.names("engines")
    assert "generation_queue" not in plugins.names("engines")
    assert plugins.load("engines", "fake") is fake


def test_kind_follows_the_options() -> None:
    assert fake.kind(fake.Options()) == "text"
    assert fake.kind(fake.Options(kind="chat")) == "chat"


def test_estimate_grows_with_the_caches() -> None:
    machine = AvailableMemory(ram_free=0)
    small, large = (fake.estimate(spec(window=window), machine) for window in (1000, 2000))
    assert 0 < small.total < large.total
    assert small.weights == 0


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        fake.Options.model_validate({"tokens_delay": 1})


def test_demo_speaks_at_a_natural_pace_and_scripts_at_once() -> None:
    assert fake.Options().delay > 0
    assert fake.Options(echo=True).delay == 0
    assert fake.Options(token_delay=0).delay == 0


def test_tokenizer_can_be_replaced() -> None:
    assert fake.tokenizer_path(fake.Options(tokenizer_path=Path("x"))) == Path("x")
    assert (fake.tokenizer_path(fake.Options()) / "tokenizer.json").is_file()
    assert fake.chat_template(fake.Options()) is None
