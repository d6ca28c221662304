"""Authentication: keys in every form, host names, origins, and addresses that need a key."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from modelyard.accounts.keys import KeyRing, read_keys
from modelyard.accounts.owner import OwnerProof, Role
from modelyard.accounts.settings import KeySettings
from modelyard.core.errors import Forbidden, InvalidRequest, ModelyardError, Unauthenticated
from modelyard.http.auth import Authenticator, check_bind, is_loopback, require
from modelyard.http.request_context import RequestContext
from modelyard.http.routes import OPEN
from modelyard.http.settings import HttpSettings
from tests.http.app_client import app_client, row_of
from tests.live_server import demo_config

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


def make_context(path: str = "/v1/messages", **headers: str) -> RequestContext:
    sent = {"host": "localhost:8000"} | {k.replace("_", "-"): v for k, v in headers.items()}
    return RequestContext("t", path, sent, row_of(path))


def admit(context: RequestContext, keys: Any = KEYS, **settings: Any) -> RequestContext:
    Authenticator(HttpSettings(**settings), KeyRing(keys)).admit(context)
    return context


def rejection(context: RequestContext, keys: Any = KEYS, **settings: Any) -> ModelyardError:
    with pytest.raises(ModelyardError) as caught:
        admit(context, keys, **settings)
    return caught.value


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "Bearer  {} "])
def test_every_form_of_key_is_accepted_as_bearer_token(name: str, form: str) -> None:
    assert admit(make_context(authorization=form.format(SECRETS[name]))).key == name


@pytest.mark.parametrize("name", SECRETS)
def test_every_form_of_key_is_accepted_as_api_key(name: str) -> None:
    context = admit(make_context(x_api_key=SECRETS[name]))
    role = "operator" if name == "boss" else "member"
    assert (context.key, context.role, context.allow_remote) == (name, role, name == "env")


@pytest.mark.parametrize(
    ("bearer", "api_key", "name"),
    [
        ("plain-secret", "plain-secret", "plain"),
        ("plain-secret", "wrong", "plain"),
        ("wrong", "plain-secret", "plain"),
        ("plain-secret", "", "plain"),
    ],
)
def test_one_valid_key_in_either_header_is_enough(bearer: str, api_key: str, name: str) -> None:
    assert admit(make_context(authorization=f"Bearer {bearer}", x_api_key=api_key)).key == name


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
def test_missing_and_wrong_keys_get_the_same_error(headers: dict[str, str]) -> None:
    error = rejection(make_context(**headers))
    assert isinstance(error, Unauthenticated)
    assert error.code == "invalid_api_key"
    assert "Authorization: Bearer" in error.message
    assert error == rejection(make_context()), "what was shown has left a trace"


def test_without_keys_every_client_has_the_role_of_a_local_user() -> None:
    assert admit(make_context("/v1/admin/models"), ()).role == "local"


def test_a_server_on_a_public_address_is_never_open() -> None:
    """Its last key may have been revoked while it runs."""
    assert isinstance(rejection(make_context(), (), host="0.0.0.0"), Unauthenticated)


def test_an_expired_key_is_refused_with_the_reason() -> None:
    keys = read_keys([KeySettings.model_validate({"name": "old", "key": "old-secret", "expires": "2020-01-01"})], {})
    error = rejection(make_context(x_api_key="old-secret"), keys)
    assert isinstance(error, Unauthenticated)
    assert error.code == "key_expired"
    assert "old-secret" not in error.message


def test_a_request_has_the_models_of_its_key() -> None:
    keys = read_keys([KeySettings(name="k", key="secret", models=["qwen*"])], {})
    assert admit(make_context(x_api_key="secret"), keys).caller().allowed == ("qwen*",)


@pytest.mark.parametrize("keys", [(), KEYS], ids=["no keys", "keys"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_token_makes_the_owner_with_and_without_keys(keys: Any, host: str) -> None:
    owner = OwnerProof()
    authenticator = Authenticator(HttpSettings(host=host), KeyRing(keys), owner)
    context = make_context(x_modelyard_owner=owner.token)
    authenticator.admit(context)
    assert (context.role, context.key) == ("owner", "")
    for wrong in ("", owner.token[:-1], owner.cookie, "\udc80"):
        other = make_context("/health", x_modelyard_owner=wrong)
        authenticator.admit(other)
        assert other.role != "owner"


def test_a_page_acts_for_its_visitor_only_with_the_token() -> None:
    """The workbench asks for another user of the machine: with that user's scope, and without the owner's rights."""
    owner = OwnerProof()
    for token, key in ((owner.token, "uid:1001"), ("wrong", "")):
        context = make_context(x_modelyard_owner=token, x_modelyard_user="uid:1001")
        Authenticator(HttpSettings(), KeyRing(), owner).admit(context)
        assert (context.role, context.key) == ("local", key)
    with pytest.raises(Unauthenticated):
        Authenticator(HttpSettings(), KeyRing(KEYS), owner).admit(context)


def test_a_key_beside_the_token_says_whose_the_request_is() -> None:
    owner = OwnerProof()
    context = make_context(x_modelyard_owner=owner.token, x_api_key="plain-secret")
    Authenticator(HttpSettings(), KeyRing(KEYS), owner).admit(context)
    assert (context.role, context.key) == ("owner", "plain")


@pytest.mark.parametrize(
    ("role", "needed", "code"),
    [
        ("member", "member", None),
        ("member", "local", "admin_key_required"),
        ("member", "operator", "admin_key_required"),
        ("member", "owner", "owner_required"),
        ("local", "local", None),
        ("local", "operator", "owner_required"),
        ("operator", "local", None),
        ("operator", "operator", None),
        ("operator", "owner", "owner_required"),
        ("owner", "owner", None),
    ],
)
def test_a_role_includes_those_before_it(role: Role, needed: Role, code: str | None) -> None:
    context = RequestContext("t", "/", {}, role=role)
    if code is None:
        require(context, needed)
        return
    with pytest.raises(Forbidden) as refused:
        require(context, needed)
    assert refused.value.code == code


@pytest.mark.parametrize("path", sorted(row.path for row in OPEN if "{" not in row.path))
def test_open_paths_need_no_key_but_recognise_valid_ones(path: str) -> None:
    assert admit(make_context(path)).key == ""
    assert admit(make_context(path, x_api_key="plain-secret")).key == "plain"


def test_a_key_whose_variable_is_not_set_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"keys\.env: the environment variable A_KEY is not set"):
        read_keys([KeySettings(name="env", env="A_KEY")], {})


def test_no_secret_is_kept() -> None:
    assert not any(secret in repr(KEYS) for secret in SECRETS.values())


def test_a_header_gives_consent_to_remote_models() -> None:
    assert admit(make_context(x_modelyard_allow_remote="true"), ()).allow_remote is True
    assert admit(make_context(x_modelyard_allow_remote="no"), ()).allow_remote is False


@pytest.mark.parametrize(
    ("setting", "allowed", "forbidden"), [(True, True, False), (None, False, False), (False, False, True)]
)
@pytest.mark.parametrize("header", ["true", "false"])
def test_no_header_overrides_what_a_key_may_do(
    setting: bool | None, allowed: bool, forbidden: bool, header: str
) -> None:
    keys = read_keys([KeySettings(name="k", key="secret", allow_remote=setting)], {})
    context = admit(make_context(x_api_key="secret", x_modelyard_allow_remote=header), keys)
    assert (context.allow_remote, context.forbid_remote) == (allowed, forbidden)
    assert (context.caller().allow_remote, context.caller().forbid_remote) == (allowed, forbidden)


def test_a_page_of_another_site_opens_no_workbench() -> None:
    """Each page takes memory: foreign images would use up those of the owner."""
    for site in ("same-origin", "same-site", "none"):
        assert admit(make_context("/workbench", sec_fetch_site=site))
    for path in ("/workbench", "/workbench/chat"):
        refused = rejection(make_context(path, sec_fetch_site="cross-site"))
        assert (type(refused), refused.code) == (Forbidden, "cross_site")
    assert admit(make_context("/health", sec_fetch_site="cross-site"))


@pytest.mark.parametrize("page", ["workbench", "docs"])
async def test_a_page_that_is_switched_off_is_no_open_path(page: str) -> None:
    config = demo_config() | {"keys": [{"name": "k", "key": "some-secret-0123456789"}], "http": {page: False}}
    async with app_client(config) as client:
        assert (await client.get(f"/{page}")).status_code == 401
        assert (await client.get(f"/{page}", headers={"x-api-key": "some-secret-0123456789"})).status_code == 404


# --- names and pages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.9.9.9", "[::1]:8000", "a.localhost", "", "my.box:80"]
)
def test_own_host_names_are_accepted(host: str) -> None:
    assert admit(make_context(host=host), (), allowed_hosts=["My.Box"])


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "[::2]"],
)
def test_foreign_host_names_are_refused(host: str) -> None:
    error = rejection(make_context("/health", host=host, x_api_key="plain-secret"))
    assert isinstance(error, Forbidden)
    assert error.code == "host_not_allowed"
    assert "http.allowed_hosts" in error.message


def test_a_public_server_accepts_every_host_name() -> None:
    assert admit(make_context(host="box.lan", x_api_key="plain-secret"), host="0.0.0.0")


PAGES = ["https://evil.example", "null", "http://[", "http://localhost:3000", "://", "", "x" * 10_000]


@pytest.mark.parametrize("origin", PAGES)
@pytest.mark.parametrize(
    "settings", [{}, {"cors_origins": PAGES}, {"cors_enabled": True, "cors_origins": ["https://a"]}]
)
def test_a_foreign_origin_is_refused_before_its_request_runs(origin: str, settings: dict[str, Any]) -> None:
    error = rejection(make_context(origin=origin, x_api_key="plain-secret"), **settings)
    assert isinstance(error, Forbidden)
    assert error.code == "origin_not_allowed"
    assert len(error.message) < 500


@pytest.mark.parametrize("origin", ["http://localhost:8000", "https://LOCALHOST:8000"])
def test_our_own_origin_is_accepted(origin: str) -> None:
    assert admit(make_context(origin=origin), ())


def test_an_empty_origin_does_not_match_an_empty_host() -> None:
    assert isinstance(rejection(make_context(origin="null", host=""), ()), Forbidden)


@pytest.mark.parametrize("origins", [[], ["*"], ["https://chat.example"]])
def test_an_origin_allowed_by_cors_is_accepted(origins: list[str]) -> None:
    assert admit(make_context(origin="https://chat.example"), (), cors_enabled=True, cors_origins=origins)


# --- where to listen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "box.lan"])
def test_a_public_address_needs_a_key(host: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_bind(HttpSettings(host=host), ())
    assert caught.value.code == "bind_refused"
    for words in (host, "MODELYARD_API_KEY", "[[keys]]", "127.0.0.1"):
        assert words in caught.value.message
    check_bind(HttpSettings(host=host), KEYS)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.53", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    check_bind(HttpSettings(host=host), ())
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "localhost.", "1", "::ffff:10.0.0.1", "127.0.0.1.example"])
def test_addresses_that_only_look_like_loopback_need_a_key(host: str) -> None:
    assert not is_loopback(host)


def test_one_accepted_host_name_does_not_accept_another() -> None:
    doorkeeper = Authenticator(HttpSettings(), KeyRing())
    for number in range(200):
        doorkeeper.admit(make_context(host=f"a{number}.localhost:8000"))
        with pytest.raises(Forbidden):
            doorkeeper.admit(make_context(host=f"a{number}.localhost.evil.example"))
    assert len(doorkeeper._known_hosts) == 64
