"""Settings that both sides must share: the address and options of Redis, and the secret that signs calls."""

from typing import Any

import pytest
from pydantic import SecretStr

from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.signing import SigningKeys

SENTINELS = "sentinel://worker:hunter2@h1:26380/3;sentinel://h2"


def build_settings(url: str, secret: str | None = None, **fields: Any) -> BrokerSettings:
    return BrokerSettings(redis_url=SecretStr(url), secret=None if secret is None else SecretStr(secret), **fields)


def test_previous_secrets_are_accepted_with_the_current_secret() -> None:
    settings = build_settings("redis://:pw@h/0", "new", secrets_previous=("old", "older"))
    assert settings.signing_keys() == SigningKeys.of("new", ["old", "older"], "default")


@pytest.mark.parametrize("secret", [None, ""])
def test_the_redis_password_signs_without_a_secret(secret: str | None) -> None:
    assert build_settings("redis://:pw@h/0", secret).signing_keys() == SigningKeys.of("pw", deployment="default")


@pytest.mark.parametrize("url", ["redis://h:6379/0", "redis://:@h/0", "redis://default@h"])
def test_redis_without_password_and_secret_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="TOOLCREW_SECRET"):
        build_settings(url).signing_keys()


@pytest.mark.parametrize("url", ["redis://worker:pw@h/0", "redis://worker@h/0", "sentinel://worker:pw@h/0"])
def test_the_password_of_a_named_redis_user_does_not_sign(url: str) -> None:
    master = {"redis_sentinel_master": "m"} if url.startswith("sentinel") else {}
    with pytest.raises(ConfigError, match="other Redis users than 'worker'"):
        build_settings(url, **master).signing_keys()
    assert build_settings(url, "s", **master).signing_keys() == SigningKeys.of("s", deployment="default")


def test_the_parts_of_a_redis_url_are_decoded() -> None:
    settings = build_settings("redis://us%40er:p%2Fw@h:7000/4", "s")
    assert (settings.user, settings.password, settings.database) == ("us@er", "p/w", 4)
    assert settings.addresses == (("h", 7000),)
    defaults = build_settings("redis://h")
    assert (defaults.user, defaults.password, defaults.database, defaults.addresses) == (None, None, 0, (("h", 6379),))


def test_a_sentinel_url_lists_the_sentinels_and_reads_user_and_database() -> None:
    settings = build_settings(SENTINELS, "s", redis_sentinel_master="m")
    assert settings.is_sentinel
    assert not settings.is_tls
    assert settings.addresses == (("h1", 26380), ("h2", 26379))
    assert (settings.user, settings.password, settings.database) == ("worker", "hunter2", 3)
    assert settings.celery_options()["broker_transport_options"]["master_name"] == "m"


@pytest.mark.parametrize(
    ("url", "fields", "fragment"),
    [
        ("redis://h/0?ssl_cert_reqs=none", {}, "an option that is not allowed"),
        ("rediss://h/0?ssl_cert_reqs=none", {}, "always checks certificates"),
        ("rediss://h/0?ssl_check_hostname=false", {}, "always checks certificates"),
        ("rediss://h/0?ssl_ca_certs=/ca.pem&ssl_cert_reqs=none", {}, "always checks certificates"),
        ("rediss://h/0?ssl_ca_certs=/ca.pem;ssl_check_hostname=false", {}, "begins with"),
        ("rediss://h/0?ssl_ca_certs=", {}, "an option that is not allowed"),
        ("rediss://h/0?ssl_ca_certs", {}, "an option that is not allowed"),
        ("rediss://h/0?&", {}, "an option that is not allowed"),
        ("rediss://h/0?socket_timeout=9", {}, "an option that is not allowed"),
        ("rediss://h/0#ssl_cert_reqs=none", {}, "an option that is not allowed"),
        (f"{SENTINELS}/0?ssl_cert_reqs=none", {"redis_sentinel_master": "m"}, "an option that is not allowed"),
        (f"{SENTINELS}?ssl_ca_certs=/ca.pem", {"redis_sentinel_master": "m"}, "a later address"),
        ("http://h", {}, "begins with 'http://'"),
        ("unix:///run/redis.sock", {}, "begins with 'unix://'"),
        ("h:6379", {}, "write redis://"),
        ("redis://", {}, "is not a valid URL"),
        ("redis://h:99999", {}, "is not a valid URL"),
        ("redis://h:0", {}, "is not a valid URL"),
        ("redis://h/one", {}, "is not a valid URL"),
        ("redis://h/-1", {}, "is not a valid URL"),
        ("redis://h?ssl_ca_certs=/ca.pem", {}, "nothing would be encrypted"),
        ("redis://h?ssl_certfile=/c.pem&ssl_keyfile=/k.pem", {}, "nothing would be encrypted"),
        ("rediss://h?ssl_certfile=/c.pem", {}, "belong together"),
        ("rediss://h?ssl_keyfile=/k.pem", {}, "belong together"),
        ("redis://h", {"redis_sentinel_master": "m"}, "but TOOLCREW_REDIS_URL does not begin with sentinel://"),
        (SENTINELS, {}, "TOOLCREW_REDIS_SENTINEL_MASTER"),
        (f"{SENTINELS}/0", {"redis_sentinel_master": "m"}, "a later address"),
        ("sentinel://h1;sentinel://worker:hunter2@h2", {"redis_sentinel_master": "m"}, "a later address"),
        (f"{SENTINELS};http://h3", {"redis_sentinel_master": "m"}, "begins with 'http://'"),
    ],
)
def test_an_ambiguous_or_insecure_redis_url_is_refused(url: str, fields: dict[str, str], fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment) as refused:
        build_settings(url, "s", **fields)
    assert "hunter2" not in str(refused.value)


def test_a_rediss_url_always_verifies_the_certificate() -> None:
    assert build_settings("redis://h").tls_options() == {}
    assert build_settings("rediss://h").tls_options() == {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
    fields = {"ssl_ca_certs": "/ca.pem", "ssl_certfile": "/c.pem", "ssl_keyfile": "/k.pem"}
    expected = {"ssl_cert_reqs": "required", "ssl_check_hostname": True, **fields}
    settings = build_settings("rediss://h/0?ssl_ca_certs=/ca.pem&ssl_certfile=/c.pem&ssl_keyfile=/k.pem")
    assert settings.tls_options() == expected
    celery = settings.celery_options()
    assert (celery["broker_use_ssl"], celery["redis_backend_use_ssl"]) == (expected, expected)
    assert celery["broker_url"] == "rediss://h/0"


def test_sentinels_use_tls_when_a_certificate_authority_is_set() -> None:
    url = SENTINELS.replace(";", "?ssl_ca_certs=/ca.pem;", 1)
    settings = build_settings(url, "s", redis_sentinel_master="m", redis_sentinel_password="watch")
    assert settings.addresses == build_settings(SENTINELS, "s", redis_sentinel_master="m").addresses
    assert settings.is_tls
    assert (
        settings.sentinel_options().items() >= {"ssl": True, "ssl_cert_reqs": "required", "password": "watch"}.items()
    )


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://:hunter2@h:6379/0", "redis://h:6379/0"),
        ("rediss://user:hunter2@h/1", "rediss://h/1"),
        ("redis://h", "redis://h"),
        (SENTINELS, "sentinel://h1:26380/3;sentinel://h2"),
    ],
)
def test_settings_do_not_show_secrets(url: str, address: str) -> None:
    master = {"redis_sentinel_master": "m"} if url == SENTINELS else {}
    settings = build_settings(url, "hunter2", secrets_previous=("hunter2",), **master)
    assert settings.redis_address() == address
    assert "hunter2" not in repr(settings)
