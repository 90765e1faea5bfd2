"""What both sides must share: where Redis is, and what signs a call."""

import pytest
from pydantic import SecretStr, ValidationError

from contract.envelope import derive_key
from contract.errors import ConfigError
from contract.settings import BrokerSettings


def build_settings(url: str, secret: str | None = None, **fields: str) -> BrokerSettings:
    return BrokerSettings(redis_url=SecretStr(url), secret=None if secret is None else SecretStr(secret), **fields)


def test_the_secret_signs_when_there_is_one() -> None:
    assert build_settings("redis://:pw@h/0", "s3cret").signing_key() == derive_key("s3cret")


@pytest.mark.parametrize("secret", [None, ""])
def test_else_the_redis_password_signs(secret: str | None) -> None:
    assert build_settings("redis://:pw@h/0", secret).signing_key() == derive_key("pw")


@pytest.mark.parametrize("url", ["redis://h:6379/0", "redis://user@h/0", "redis://:@h/0", "unix:///run/redis.sock"])
def test_a_queue_that_anyone_may_write_to_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="TOOLCREW_SECRET"):
        build_settings(url).signing_key()


def test_host_user_and_database_do_not_change_the_key() -> None:
    keys = {build_settings(url).signing_key() for url in ("redis://:pw@a:1/0", "redis://user:pw@b:2/3", "rediss://:pw@c/0")}
    assert len(keys) == 1


def test_two_spellings_of_one_password_give_one_key() -> None:
    assert build_settings("redis://:p%77@h/0").signing_key() == build_settings("redis://:pw@h/0").signing_key()


def test_a_percent_encoded_password_signs_as_what_redis_gets() -> None:
    assert build_settings("redis://:p%40w%2F@h/0").signing_key() == derive_key("p@w/")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://:hunter2@h:6379/0", "redis://h:6379/0"),
        ("rediss://user:hunter2@h/1", "rediss://h/1"),
        ("redis://h", "redis://h"),
    ],
)
def test_an_address_for_messages_has_no_password(url: str, address: str) -> None:
    assert build_settings(url).redis_address() == address


def test_nothing_secret_shows_in_a_print() -> None:
    assert "hunter2" not in repr(build_settings("redis://:hunter2@h/0", "hunter2"))


@pytest.mark.parametrize("deployment", ["", "a:b", "a b", "x" * 65, "a\n"])
def test_a_deployment_is_an_identifier(deployment: str) -> None:
    with pytest.raises(ValidationError):
        build_settings("redis://:pw@h/0", deployment=deployment)
