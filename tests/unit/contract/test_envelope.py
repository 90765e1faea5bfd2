"""Envelopes: opening an envelope returns exactly the sealed content and refuses everything else."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from celery.utils.saferepr import saferepr
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.records.builders import KEY, build_call, build_context, build_spec
from toolcrew.contract.calls import Clocks, KillReport, SandboxInfo, Spill, ToolCall, ToolContext, ToolResult
from toolcrew.contract.envelope import (
    MAX_ENVELOPE_BYTES,
    PURPOSE,
    VERSION,
    decode_call,
    decode_result,
    encode_call,
    encode_result,
)
from toolcrew.contract.errors import EnvelopeRefused, ErrorCode, RefusalReason
from toolcrew.contract.signing import SigningKey, SigningKeys

CALL = ToolCall(id="c1", name="bash_tool", arguments={"command": "ls", "deep": {"list": [1, "two", None]}})
CONTEXT = ToolContext(
    tenant="acme",
    run="r1",
    session="s1",
    sent_at=1000.0,
    deadline_at=1060.0,
    blob="b",
    model="m",
    config={"colour": "blue"},
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
json_objects = st.dictionaries(st.text(), json_values, max_size=5)


def seal(body: str, keys: SigningKeys = KEY, version: int = VERSION) -> str:
    """Return a correctly signed envelope around any text, as a faulty, newer or hostile sender with the secret would
    send it.
    """
    head = f"v{version}.{keys.current.id}"
    return f"{head}.{keys.current.sign(PURPOSE, f'{head}.{body}'.encode())}.{body}"


def reason_of(envelope: str, keys: SigningKeys = KEY) -> RefusalReason:
    """Return the reason of the refusal."""
    with pytest.raises(EnvelopeRefused) as refused:
        decode_call(envelope, keys)
    return refused.value.reason


@settings(max_examples=60, deadline=None)
@given(arguments=json_objects, config=json_objects)
def test_a_call_is_decoded_unchanged_from_its_envelope(arguments: dict[str, Any], config: dict[str, Any]) -> None:
    call = ToolCall(id="c1", name="bash_tool", arguments=arguments)
    context = CONTEXT.model_copy(update={"config": config})
    assert decode_call(encode_call(call, context, KEY), KEY) == (call, context)


@settings(max_examples=40, deadline=None)
@given(output=st.text(max_size=200), metadata=json_objects)
def test_a_result_is_decoded_unchanged(output: str, metadata: dict[str, Any]) -> None:
    result = ToolResult(
        call_id="c1",
        name="bash_tool",
        success=False,
        output=output,
        error=output,
        error_code=ErrorCode.TIMEOUT,
        metadata=metadata,
        truncated=True,
        spill=Spill(path="/out/1", bytes=9),
        clocks=Clocks(queued_s=0.1, run_s=2.5),
        kill=KillReport(signalled=3, survivors=0, method="tree", ms=4.0),
        sandbox=SandboxInfo(id="c0ffee", generation=2, rebuilt=True),
        blob="key",
    )
    assert decode_result(json.loads(json.dumps(encode_result(result)))) == result


def test_a_nested_call_that_can_be_encoded_can_be_decoded() -> None:
    deep: Any = []
    for _ in range(230):
        deep = [deep]
    call = ToolCall(id="c1", name="echo", arguments={"deep": deep})
    try:
        text = encode_call(call, CONTEXT, KEY)
    except ValueError:
        return
    assert decode_call(text, KEY)[0] == call


ENVELOPE = encode_call(CALL, CONTEXT, KEY)


@pytest.mark.parametrize("at", range(0, len(ENVELOPE), 3))
def test_an_envelope_with_one_character_changed_is_refused(at: int) -> None:
    for other in ("x", "0", ENVELOPE[at].swapcase(), ""):
        changed = ENVELOPE[:at] + other + ENVELOPE[at + 1 :]
        if changed != ENVELOPE:
            with pytest.raises(EnvelopeRefused):
                decode_call(changed, KEY)


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, len(ENVELOPE)), text=st.text(min_size=1, max_size=4))
def test_an_envelope_with_inserted_text_is_refused(at: int, text: str) -> None:
    assert reason_of(ENVELOPE[:at] + text + ENVELOPE[at:]) in ("signature", "malformed", "version")


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60) | st.from_regex(r"v[0-9]{1,3}\.[0-9a-f]{12}\.[0-9a-f]{64}\.", fullmatch=True))
def test_a_text_without_a_valid_signature_is_refused(text: str) -> None:
    with pytest.raises(EnvelopeRefused):
        decode_call(text, KEY)


def test_a_signature_of_another_call_purpose_key_or_deployment_is_refused() -> None:
    """The signature of another call, for another purpose, by another key of this name, or of another deployment."""
    body = ENVELOPE.split(".", 3)[3]
    other_header = encode_call(build_call(call_id="c2"), CONTEXT, KEY).split(".", 3)[:3]
    head = f"v{VERSION}.{KEY.current.id}"
    purpose = f"{head}.{KEY.current.sign('result', f'{head}.{body}'.encode())}.{body}"
    same_id_key = SigningKeys(SigningKey(KEY.current.id, b"guessed" * 5))
    for envelope in (".".join([*other_header, body]), purpose, encode_call(CALL, CONTEXT, same_id_key)):
        assert reason_of(envelope) == "signature"
    test, prod = SigningKeys.of("secret", deployment="test"), SigningKeys.of("secret", deployment="prod")
    with pytest.raises(EnvelopeRefused):
        decode_call(encode_call(CALL, CONTEXT, test), prod)


def test_an_envelope_signed_with_another_key_names_the_secret_settings() -> None:
    with pytest.raises(EnvelopeRefused, match=r"TOOLCREW_SECRET.*TOOLCREW_SECRETS_PREVIOUS"):
        decode_call(ENVELOPE, SigningKeys.of("another"))


@pytest.mark.parametrize("version", ["v0", "v1", "v2", "v99999999"])
def test_an_envelope_of_another_version_is_refused(version: str) -> None:
    with pytest.raises(EnvelopeRefused, match="same release") as refused:
        decode_call(ENVELOPE.replace("v3", version, 1), KEY)
    assert refused.value.reason == "version"


def test_an_envelope_of_the_first_version_is_refused_for_its_version() -> None:
    assert reason_of('{"v":1,"call":{},"context":{},"sig":"x"}') == "version"


@pytest.mark.parametrize("version", [0, 1, 2, "3", None, [3]])
def test_a_result_of_another_version_is_refused(version: Any) -> None:
    with pytest.raises(EnvelopeRefused, match="same release"):
        decode_result({**encode_result(ToolResult(call_id="c", name="x", success=True)), "v": version})


class TestKeysThatChange:
    """Key rotation: one side has the new secret before the other side does, in either order."""

    OLD, NEW = SigningKeys.of("old"), SigningKeys.of("new")
    BOTH_SIGNS_OLD, BOTH_SIGNS_NEW = SigningKeys.of("old", ["new"]), SigningKeys.of("new", ["old"])

    @pytest.mark.parametrize(
        ("sender", "receiver"),
        [
            (OLD, BOTH_SIGNS_OLD),
            (BOTH_SIGNS_OLD, OLD),
            (BOTH_SIGNS_OLD, BOTH_SIGNS_NEW),
            (BOTH_SIGNS_NEW, BOTH_SIGNS_OLD),
            (BOTH_SIGNS_NEW, NEW),
            (NEW, BOTH_SIGNS_NEW),
        ],
        ids=["learn", "learn-reversed", "switch", "switch-reversed", "forget", "forget-reversed"],
    )
    def test_processes_at_adjacent_rotation_steps_accept_each_other(
        self, sender: SigningKeys, receiver: SigningKeys
    ) -> None:
        assert decode_call(encode_call(CALL, CONTEXT, sender), receiver) == (CALL, CONTEXT)

    def test_a_removed_key_is_refused(self) -> None:
        assert reason_of(encode_call(CALL, CONTEXT, self.OLD), self.NEW) == "signature"

    def test_a_call_is_signed_with_the_current_key_only(self) -> None:
        assert encode_call(CALL, CONTEXT, self.BOTH_SIGNS_NEW).startswith(f"v3.{self.NEW.current.id}.")


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p["call"].update(unknown=1),
        lambda p: p["context"].update(unknown=1),
        lambda p: p["context"].update(tenant="a b"),
        lambda p: p["context"].update(timeout_s=86_401),
        lambda p: p["context"].update(timeout_s=0),
        lambda p: p["context"].update(timeout_s=float("nan")),
        lambda p: p["call"].update(id="a/b"),
        lambda p: p["call"].update(name=""),
        lambda p: p["call"].update(arguments=[]),
        lambda p: p.update(call=None),
        lambda p: p["call"].pop("id"),
    ],
)
def test_a_signed_envelope_with_invalid_fields_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    payload = json.loads(ENVELOPE.split(".", 3)[3])
    change(payload)
    with pytest.raises(EnvelopeRefused):
        decode_call(seal(json.dumps(payload)), KEY)


MALFORMED_TEXTS = ["", "null", "[]", "1", "\x00", "\ud800", "[" * 100_000, "v3.", "v3..." + "x" * 200]
MALFORMED_TEXTS += [f"v3.{KEY.current.id}.{'0' * 63}.x"]


@pytest.mark.parametrize("text", MALFORMED_TEXTS, ids=lambda text: repr(text[:20]))
def test_malformed_text_is_refused(text: str) -> None:
    assert reason_of(text) == "malformed"


BODIES = [
    "",
    "null",
    "[]",
    "{",
    "{}",
    '{"call":' + "1" * 5000 + "}",
    '{"call":{},"context":{},"more":1}',
    "NaN",
    "\x00",
]
BODIES += ['{"call":"\\ud800"}']
BODIES += [ENVELOPE.split(".", 3)[3].replace('"two"', constant) for constant in ("NaN", "Infinity", "-Infinity")]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:20]))
def test_a_signed_body_that_is_not_a_call_is_refused(body: str) -> None:
    assert reason_of(seal(body)) == "malformed"


def test_a_lone_surrogate_at_any_position_is_refused() -> None:
    for at in (0, 5, 30, 90, len(ENVELOPE)):
        with pytest.raises(EnvelopeRefused):
            decode_call(ENVELOPE[:at] + "\ud800" + ENVELOPE[at:], KEY)


def test_an_envelope_one_byte_above_the_size_limit_is_refused() -> None:
    empty = len(encode_call(build_call(text=""), CONTEXT, KEY))
    fits = build_call(text="x" * (MAX_ENVELOPE_BYTES - empty))
    assert decode_call(encode_call(fits, CONTEXT, KEY), KEY)[0] == fits
    with pytest.raises(ValueError, match="write_file"):
        encode_call(build_call(text="x" * (MAX_ENVELOPE_BYTES - empty + 1)), CONTEXT, KEY)


def test_sender_and_receiver_count_the_size_in_bytes() -> None:
    with pytest.raises(ValueError, match="bytes"):
        encode_call(build_call(text="é" * (MAX_ENVELOPE_BYTES // 2)), CONTEXT, KEY)
    assert reason_of("é" * (MAX_ENVELOPE_BYTES // 2 + 1)) == "oversized"
    assert reason_of("x" * (MAX_ENVELOPE_BYTES + 1)) == "oversized"


@pytest.mark.parametrize(
    "change",
    [
        {"error_code": "SOMETHING_NEW"},
        {"surprise": 1},
        {"success": None},
        {"call_id": "a b"},
        {"output": "x" * (256 * 1024 + 1)},
        {"kill": {"signalled": 1, "survivors": 0, "method": "magic", "ms": 1}},
        {"kill": {"signalled": -1, "survivors": 0, "method": "tree", "ms": 1}},
        {"metadata": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_result_with_an_invalid_field_is_refused(change: dict[str, Any]) -> None:
    data = encode_result(ToolResult(call_id="c", name="x", success=True))
    with pytest.raises(EnvelopeRefused):
        decode_result({**data, **change})


@pytest.mark.parametrize("maxlen", [None, 46, 80, 160, 1024, 100_000])
def test_the_celery_representation_of_a_result_hides_output_and_metadata(maxlen: int | None) -> None:
    """Celery logs a result, and sends it to Flower, through its `saferepr`, which shows three levels."""
    for size in (0, 1, 20, 160, 5000):
        secret = "canary" + "x" * size
        result = ToolResult(
            call_id="c" * (size % 60 + 1),
            name="n" * (size % 128 + 1),
            success=True,
            output=secret,
            metadata={secret: [secret]},
        )
        assert "canary" not in saferepr(encode_result(result), maxlen)


@pytest.mark.parametrize(
    "change",
    [
        {"data": None},
        {"data": []},
        {"data": [[]]},
        {"data": [["x"]]},
        {"data": [[{}]]},
        {"name": "other"},
        {"success": False},
    ],
    ids=repr,
)
def test_a_result_with_a_missing_or_different_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(EnvelopeRefused):
        decode_result({**encode_result(ToolResult(call_id="c", name="x", success=True)), **change})


@pytest.mark.parametrize(
    ("value", "fragment"),
    [("half \ud800", "surrogate"), ({"half \udc00": 1}, "surrogate"), (float("nan"), "JSON"), (float("inf"), "JSON")],
    ids=repr,
)
def test_arguments_that_are_not_valid_json_are_not_sent(value: Any, fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment):
        encode_call(ToolCall.model_construct(id="c1", name="echo", arguments={"value": value}), CONTEXT, KEY)


def test_a_signing_key_hides_its_secret_and_depends_on_it() -> None:
    key = SigningKey.of("hunter2")
    assert b"hunter2" not in key.key
    assert key != SigningKey.of("hunter3")
    assert key.key.hex() not in repr(SigningKeys(key))


@pytest.mark.parametrize("text", ["", "a b", "a/b", "a:b", "é", "a\n", "x" * 65, "..", "a*"])
def test_an_identifier_with_unsafe_characters_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        ToolCall(id=text, name="x")
    with pytest.raises(ValidationError):
        ToolContext(tenant=text, sent_at=0, deadline_at=0)


@pytest.mark.parametrize("timeout_s", [0, -1, 86_400.1, float("nan"), float("inf")])
def test_a_timeout_outside_zero_to_one_day_is_refused(timeout_s: float) -> None:
    with pytest.raises(ValidationError):
        build_context(timeout_s=timeout_s)
    with pytest.raises(ValidationError):
        build_spec(timeout_s=timeout_s)


def test_a_result_text_above_the_limit_is_refused() -> None:
    ToolResult(call_id="c", name="x", success=True, output="x" * 256 * 1024)
    with pytest.raises(ValidationError):
        ToolResult(call_id="c", name="x", success=True, output="x" * (256 * 1024 + 1))
    with pytest.raises(ValidationError):
        ToolResult(call_id="c", name="x" * 129, success=True)


@pytest.mark.parametrize(
    ("call_id", "name", "error", "fields"),
    [
        ("not an id", "", "", {}),
        ("", "x" * 500, "half \ud800", {}),
        ("é" * 500, "half \udc00", "x", {"output": "x" * 300_000}),
        ("c", "x", "x", {"metadata": {"a": object()}, "kill": 5}),
    ],
)
def test_a_failed_result_is_valid_for_any_call(call_id: str, name: str, error: str, fields: dict[str, Any]) -> None:
    call = ToolCall.model_construct(id=call_id, name=name, arguments={})
    result = ToolResult.failed(call, ErrorCode.INVALID_ARGUMENTS, error, **fields)
    assert ToolResult.model_validate_json(result.model_dump_json()) == result


def test_a_failed_result_keeps_the_valid_fields() -> None:
    result = ToolResult.failed(build_call(), ErrorCode.TIMEOUT, "x", output="half", metadata={"a": object()})
    assert (result.output, result.metadata) == ("half", {})


@pytest.mark.parametrize("depth", [150, 300, 600, 900, 985, 1200, 100_000])
def test_a_signed_body_of_any_nesting_depth_is_refused_as_malformed(depth: int) -> None:
    assert reason_of(seal('{"call":' + "[" * depth + "]" * depth + ',"context":1}')) == "malformed"
