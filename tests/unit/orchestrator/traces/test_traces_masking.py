"""Secrets in texts: known secrets in every form, and keys by their shape. Other text stays unchanged."""

import base64
import json
import time
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from toolcrew.contract.masking import MARK, Masker, secrets_of_pool
from toolcrew.contract.settings import build_masker, load_settings, secrets_of_environment

SECRET = "hunter2/+pass wörd"
MASKER = Masker({"TOOLCREW_SECRET": SECRET})
BLANK = "\ue000"
letters = st.characters(exclude_characters=BLANK, exclude_categories=["Cs"])
secret_values = st.text(letters, min_size=6, max_size=40)
other_text = st.text(letters, max_size=30)


@given(secret_values, other_text, other_text)
def test_known_secret_is_masked_in_any_text(secret: str, before: str, after: str) -> None:
    masked = Masker({"k": secret}).mask(before + secret + after)
    assert MARK in masked
    if secret not in f"{MARK}k]":
        assert secret not in masked.replace(f"{MARK}k]", BLANK)


@given(secret_values, st.binary(max_size=20), st.binary(max_size=20), st.booleans())
def test_secret_inside_base64_text_is_masked(secret: str, before: bytes, after: bytes, is_url: bool) -> None:
    encode = base64.urlsafe_b64encode if is_url else base64.b64encode
    text = encode(before + secret.encode() + after).decode()
    assert Masker({"k": secret}).mask(f"got: {text}, done") == "got: [masked: k], done"


@pytest.mark.parametrize(
    "form",
    [
        SECRET,
        quote(SECRET),
        quote(SECRET, safe=""),
        quote_plus(SECRET),
        quote(SECRET, safe="").replace("%2F", "%2f").replace("%2B", "%2b").replace("%C3%B6", "%c3%b6"),
        json.dumps(SECRET)[1:-1],
        SECRET.encode().hex(),
        SECRET.encode().hex().upper(),
        base64.b64encode(SECRET.encode()).decode(),
    ],
)
def test_known_secret_is_masked_in_every_encoding(form: str) -> None:
    assert MASKER.mask(f"<{form}>") == "<[masked: TOOLCREW_SECRET]>"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("sk-proj-abcdEFGH1234567890abcd", "API key"),
        ("ghp_" + "a1B2" * 9, "GitHub token"),
        ("github_pat_" + "a1B2" * 9, "GitHub token"),
        ("glpat-" + "a1B2-" * 5, "GitLab token"),
        ("AKIAIOSFODNN7EXAMPLE", "AWS key"),
        ("AIza" + "a" * 35, "Google key"),
        ("xoxb-123456789012-abcdef", "Slack token"),
        ("hf_" + "a" * 34, "Hugging Face token"),
        ("tc_" + "0" * 16 + "_" + "x" * 43, "toolcrew key"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-_", "JWT"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", "private key"),
        ("-----BEGIN PRIVATE KEY-----\\nabc and it is cut", "private key"),
    ],
)
def test_api_keys_are_recognized_by_their_format(text: str, kind: str) -> None:
    assert MASKER.mask(f'"{text}"').startswith(f'"[masked: {kind}]')
    assert text not in MASKER.mask(text)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("redis://:p4ss@host:6379/0", "redis://:[masked: password]@host:6379/0"),
        ("https://me:p@ss:word@host/x", "https://me:[masked: password]@host/x"),
        (
            "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
            "aws_secret_access_key = [masked: AWS key]",
        ),
        ("Authorization: Bearer abc123def456", "Authorization: Bearer [masked: bearer token]"),
        ('{"Authorization": "Basic dXNlcjpwYXNz"}', '{"Authorization": "Basic [masked: credentials]"}'),
    ],
)
def test_text_around_a_secret_is_kept(text: str, masked: str) -> None:
    assert MASKER.mask(text) == masked
    assert MASKER.mask(masked) == masked


def test_very_short_secret_is_not_masked() -> None:
    assert Masker({"k": "abc"}).mask("abcabc") == "abcabc"


def test_overlapping_secrets_are_masked_whole() -> None:
    assert Masker({"short": "secret1", "long": "secret1-and-more"}).mask("x secret1-and-more y") == "x [masked: long] y"


def test_object_keys_and_values_are_masked() -> None:
    masked = MASKER.mask_value({SECRET: [{"x": f"a{SECRET}"}, 1, None]})
    assert SECRET not in json.dumps(masked, ensure_ascii=False)


@pytest.mark.parametrize(
    "text",
    [
        "sk-" * 80_000,
        "eyJ" * 80_000,
        "://" * 80_000,
        "bearer " * 40_000,
        "-----BEGIN PRIVATE KEY-----" * 9000,
        "xoxb-" * 50_000,
        "A" * 250_000,
    ],
)
def test_masking_of_hostile_text_takes_linear_time(text: str) -> None:
    started = time.process_time()
    MASKER.mask(text)
    assert time.process_time() - started < 3


def test_secrets_of_settings_and_environment_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", "redis://:redis-passw0rd@h")
    monkeypatch.setenv("TOOLCREW_SECRET", "signing-secret")
    monkeypatch.setenv("TOOLCREW_SECRETS_PREVIOUS", '["older-secret"]')
    monkeypatch.setenv("TOOLCREW_BRAVE_API_KEY", "brave-api-value")
    monkeypatch.setenv("OPENAI_API_KEY", "openai-api-value")
    monkeypatch.setenv("SOME_TOKEN", "token-of-another")
    masker = build_masker(load_settings(), {"more": "given-by-hand"})
    secrets = [
        "redis-passw0rd",
        "signing-secret",
        "older-secret",
        "brave-api-value",
        "openai-api-value",
        "token-of-another",
        "given-by-hand",
    ]
    masked = masker.mask(" ".join(secrets))
    assert [secret for secret in secrets if secret in masked] == []
    assert {"TOOLCREW_BRAVE_API_KEY", "SOME_TOKEN"} <= secrets_of_environment().keys()


def test_url_password_is_masked_encoded_and_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", "sentinel://u:p%40ss%3Aw0rd-a@h:1;sentinel://:p%40ss%3Aw0rd-b@h:2")
    monkeypatch.setenv("OPENAI_BASE_URL", "https://u:endpoint-passw0rd@h/v1")
    monkeypatch.setenv("TOOLCREW_SECRET", "no://url:of@any/kind")
    masker = build_masker(load_settings())
    written = ["p%40ss%3Aw0rd-a", "p@ss:w0rd-a", "p@ss:w0rd-b", "endpoint-passw0rd", "no://url:of@any/kind"]
    assert [secret for secret in written if secret in masker.mask(f"it is {secret} here")] == []


def test_secrets_of_a_pool_client_are_masked() -> None:
    secrets = secrets_of_pool(
        "redis://:redis-made-up@h", flower_url="http://toolcrew:flower-made-up@h/", api_key="key-of-the-tenant"
    )
    assert sorted(secrets.values()) == ["flower-made-up", "key-of-the-tenant", "redis-made-up"]
    assert secrets_of_pool("redis://h:1") == {}


def test_every_secret_setting_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings()
    fields = [
        name
        for name, field in type(settings).model_fields.items()
        if "SecretStr" in str(field.annotation) and name != "redis_url"
    ]
    values = {
        name: [SecretStr(f"value-of-{name}")] if name == "secrets_previous" else SecretStr(f"value-of-{name}")
        for name in fields
    }
    masker = build_masker(settings.model_copy(update=values))
    assert [name for name in fields if f"value-of-{name}" in masker.mask(f"value-of-{name}")] == []
