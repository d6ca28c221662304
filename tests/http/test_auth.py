"""Who may enter: keys in every form, names of the server, pages of elsewhere, and addresses that need a key."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from modelyard.core.errors import Forbidden, InvalidRequest, ModelyardError, Unauthenticated
from modelyard.http import auth
from modelyard.http.auth import OPEN_PATHS, Authenticator, check_bind, is_loopback, read_keys
from modelyard.http.request_context import RequestContext
from modelyard.http.settings import HttpSettings, KeySettings

HASH = "sha256:" + hashlib.sha256(b"hashed-secret").hexdigest()
KEYS = read_keys(
    [
        KeySettings(name="plain", key="plain-secret"),
        KeySettings(name="hashed", hash=HASH),
        KeySettings(name="env", env="A_KEY", allow_remote=True),
        KeySettings(name="boss", key="boss-secret", admin=True),
    ],
    {"A_KEY": "env-secret"},
)
SECRETS = {"plain": "plain-secret", "hashed": "hashed-secret", "env": "env-secret", "boss": "boss-secret"}


def make_scope(path: str = "/v1/messages", **headers: str) -> RequestContext:
    return RequestContext("t", path, {"host": "localhost:8000"} | {k.replace("_", "-"): v for k, v in headers.items()})


def admitted(seen: RequestContext, keys: Any = KEYS, **settings: Any) -> RequestContext:
    Authenticator(HttpSettings(**settings), keys).admit(seen)
    return seen


def rejected(seen: RequestContext, keys: Any = KEYS, **settings: Any) -> ModelyardError:
    with pytest.raises(ModelyardError) as caught:
        admitted(seen, keys, **settings)
    return caught.value


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "Bearer  {} "])
def test_a_key_in_any_form_opens_as_a_bearer(name: str, form: str) -> None:
    assert admitted(make_scope(authorization=form.format(SECRETS[name]))).key == name


@pytest.mark.parametrize("name", SECRETS)
def test_a_key_in_any_form_opens_as_an_api_key(name: str) -> None:
    seen = admitted(make_scope(x_api_key=SECRETS[name]))
    assert (seen.key, seen.admin, seen.allow_remote) == (name, name == "boss", name == "env")


@pytest.mark.parametrize(
    ("bearer", "api_key", "name"),
    [
        ("plain-secret", "plain-secret", "plain"),
        ("plain-secret", "wrong", "plain"),
        ("wrong", "plain-secret", "plain"),
        ("plain-secret", "", "plain"),
    ],
)
def test_with_both_headers_one_good_key_is_enough(bearer: str, api_key: str, name: str) -> None:
    assert admitted(make_scope(authorization=f"Bearer {bearer}", x_api_key=api_key)).key == name


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "plain-secret"},
        {"authorization": "Basic plain-secret"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"x_api_key": ""},
        {"x_api_key": "PLAIN-SECRET"},
        {"x_api_key": HASH},
        {"x_api_key": HASH.removeprefix("sha256:")},
        {"x_api_key": "plain-secre"},
        {"x_api_key": "\x80\xff\udc80"},
    ],
)
def test_no_key_and_a_wrong_key_are_turned_away_alike(headers: dict[str, str]) -> None:
    error = rejected(make_scope(**headers))
    assert isinstance(error, Unauthenticated)
    assert error.code == "invalid_api_key"
    assert "Authorization: Bearer" in error.message
    assert error == rejected(make_scope()), "what was shown has left a trace"


def test_without_keys_whoever_reaches_it_owns_it() -> None:
    assert admitted(make_scope("/v1/admin/models"), ()).admin is True


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: (compared.append(b), a == b)[1])
    for secret in ("boss-secret", "plain-secret", "wrong"):
        compared.clear()
        seen = make_scope(x_api_key=secret, authorization="Bearer other")
        if secret == "wrong":
            rejected(seen)
        else:
            admitted(seen)
        assert compared == [key.digest for key in KEYS] * 2


@pytest.mark.parametrize("path", ["/v1/admin", "/v1/admin/models/demo/load"])
def test_admin_paths_need_an_admin_key(path: str) -> None:
    assert admitted(make_scope(path, x_api_key="boss-secret")).admin
    error = rejected(make_scope(path, x_api_key="plain-secret"))
    assert isinstance(error, Forbidden)
    assert error.code == "admin_key_required"
    assert isinstance(rejected(make_scope(path)), Unauthenticated)


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_open_paths_need_none_and_tell_the_known_apart(path: str) -> None:
    assert admitted(make_scope(path)).key == ""
    assert admitted(make_scope(path, x_api_key="plain-secret")).key == "plain"


def test_a_key_whose_variable_is_not_set_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"keys\.env: the environment variable A_KEY is not set"):
        read_keys([KeySettings(name="env", env="A_KEY")], {})


def test_no_secret_is_kept() -> None:
    assert not any(secret in repr(KEYS) for secret in SECRETS.values())


def test_a_header_may_consent_to_remote_models() -> None:
    assert admitted(make_scope(x_modelyard_allow_remote="true"), ()).allow_remote is True
    assert admitted(make_scope(x_modelyard_allow_remote="no"), ()).allow_remote is False


# --- names and pages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.9.9.9", "[::1]:8000", "a.localhost", "", "my.box:80"]
)
def test_our_own_names_are_admitted(host: str) -> None:
    assert admitted(make_scope(host=host), (), allowed_hosts=["My.Box"])


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "[::2]"],
)
def test_a_name_that_was_bound_to_us_by_others_is_not(host: str) -> None:
    error = rejected(make_scope("/health", host=host, x_api_key="plain-secret"))
    assert isinstance(error, Forbidden)
    assert error.code == "host_not_allowed"
    assert "http.allowed_hosts" in error.message


def test_a_server_for_others_has_more_names_than_it_knows() -> None:
    assert admitted(make_scope(host="box.lan", x_api_key="plain-secret"), host="0.0.0.0")


PAGES = ["https://evil.example", "null", "http://[", "http://localhost:3000", "://", "", "x" * 10_000]


@pytest.mark.parametrize("origin", PAGES)
@pytest.mark.parametrize(
    "settings", [{}, {"cors_origins": PAGES}, {"cors_enabled": True, "cors_origins": ["https://a"]}]
)
def test_a_foreign_page_is_turned_away_before_its_request_runs(origin: str, settings: dict[str, Any]) -> None:
    error = rejected(make_scope(origin=origin, x_api_key="plain-secret"), **settings)
    assert isinstance(error, Forbidden)
    assert error.code == "origin_not_allowed"
    assert len(error.message) < 500


@pytest.mark.parametrize("origin", ["http://localhost:8000", "https://LOCALHOST:8000"])
def test_our_own_page_is_no_stranger(origin: str) -> None:
    assert admitted(make_scope(origin=origin), ())


def test_a_page_without_a_name_does_not_match_a_request_without_one() -> None:
    assert isinstance(rejected(make_scope(origin="null", host=""), ()), Forbidden)


@pytest.mark.parametrize("origins", [[], ["*"], ["https://chat.example"]])
def test_a_page_that_cors_admits_may_enter(origins: list[str]) -> None:
    assert admitted(make_scope(origin="https://chat.example"), (), cors_enabled=True, cors_origins=origins)


# --- where to listen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "box.lan"])
def test_an_address_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_bind(HttpSettings(host=host), ())
    assert caught.value.code == "bind_refused"
    for words in (host, "MODELYARD_API_KEY", "[[keys]]", "127.0.0.1"):
        assert words in caught.value.message
    check_bind(HttpSettings(host=host), KEYS)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.53", "::1", "[::1]", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    check_bind(HttpSettings(host=host), ())
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "localhost.", "1", "::ffff:10.0.0.1", "127.0.0.1.example"])
def test_what_only_looks_like_loopback_is_not(host: str) -> None:
    assert not is_loopback(host)


def test_a_name_that_is_known_opens_no_door_for_another() -> None:
    doorkeeper = Authenticator(HttpSettings(), ())
    for number in range(200):
        doorkeeper.admit(make_scope(host=f"a{number}.localhost:8000"))
        with pytest.raises(Forbidden):
            doorkeeper.admit(make_scope(host=f"a{number}.localhost.evil.example"))
    assert len(doorkeeper._known_hosts) == 64
