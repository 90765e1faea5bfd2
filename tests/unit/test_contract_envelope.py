"""Envelopes: what goes in comes out, and nothing else does."""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery.utils.saferepr import saferepr
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.calls import Clocks, KillReport, SandboxInfo, Spill, ToolCall, ToolContext, ToolResult
from contract.envelope import MAX_ENVELOPE_BYTES, _signature, decode_call, decode_result, derive_key, encode_call, encode_result
from contract.errors import EnvelopeRefused, ErrorCode
from tests.builders import KEY, build_call, build_context

CALL = ToolCall(id="c1", name="bash_tool", arguments={"command": "ls", "deep": {"list": [1, "two", None]}})
CONTEXT = ToolContext(
    tenant="acme", run="r1", session="s1", sent_at=1000.0, deadline_at=1060.0, blob="b", model="m", config={"colour": "blue"}
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
json_objects = st.dictionaries(st.text(), json_values, max_size=5)


def resigned(change: Callable[[dict[str, Any]], None]) -> str:
    """An envelope that was changed before it was signed: what a buggy or newer sender would send."""
    payload = json.loads(encode_call(CALL, CONTEXT, KEY))
    del payload["sig"]
    change(payload)
    return json.dumps({**payload, "sig": _signature(payload, KEY)})


@settings(max_examples=60, deadline=None)
@given(arguments=json_objects, config=json_objects)
def test_a_call_comes_out_of_its_envelope_as_it_went_in(arguments: dict[str, Any], config: dict[str, Any]) -> None:
    call = ToolCall(id="c1", name="bash_tool", arguments=arguments)
    context = CONTEXT.model_copy(update={"config": config})
    assert decode_call(encode_call(call, context, KEY), KEY) == (call, context)


@settings(max_examples=40, deadline=None)
@given(output=st.text(max_size=200), metadata=json_objects)
def test_a_result_comes_out_as_it_went_in(output: str, metadata: dict[str, Any]) -> None:
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


def test_an_envelope_is_one_line_of_json() -> None:
    text = encode_call(build_call(text="a\nb"), CONTEXT, KEY)
    assert "\n" not in text
    assert json.loads(text)["v"] == 1


@pytest.mark.parametrize("arguments", [{"text": "half \ud800"}, {"half \udc00": 1}])
def test_half_a_surrogate_pair_is_refused_by_the_sender_or_arrives(arguments: dict[str, Any]) -> None:
    call = ToolCall(id="c1", name="echo", arguments=arguments)
    try:
        text = encode_call(call, CONTEXT, KEY)
    except ValueError:
        return
    assert decode_call(text, KEY)[0] == call


def test_what_the_sender_encodes_is_not_too_deep_for_the_receiver() -> None:
    deep: Any = []
    for _ in range(230):
        deep = [deep]
    call = ToolCall(id="c1", name="echo", arguments={"deep": deep})
    try:
        text = encode_call(call, CONTEXT, KEY)
    except ValueError:
        return
    assert decode_call(text, KEY)[0] == call


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    elif isinstance(value, list) and value:
        for at, inner in enumerate(value):
            yield from leaves(inner, (*path, at))
    else:
        yield path


def changed(value: Any) -> list[Any]:
    """Other values for a field, the closest ones first."""
    if isinstance(value, bool):
        return [not value, int(value)]
    if isinstance(value, int | float):
        return [value + 1, -value if value else 1, str(value), None]
    if isinstance(value, str):
        return [value + "x", value[:-1], value.upper() if value.upper() != value else value.lower(), "", None]
    return [1, "x"]


ENVELOPE = json.loads(encode_call(CALL, CONTEXT, KEY))
PATHS = list(leaves(ENVELOPE))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_an_envelope_with_one_field_changed_is_refused(path: tuple[Any, ...]) -> None:
    *parents, last = path
    for other in changed(_at(ENVELOPE, path)):
        payload = copy.deepcopy(ENVELOPE)
        _at(payload, parents)[last] = other
        with pytest.raises(EnvelopeRefused):
            decode_call(json.dumps(payload), KEY)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_an_envelope_with_one_field_gone_is_refused(path: tuple[Any, ...]) -> None:
    *parents, last = path
    payload = copy.deepcopy(ENVELOPE)
    del _at(payload, parents)[last]
    with pytest.raises(EnvelopeRefused):
        decode_call(json.dumps(payload), KEY)


@pytest.mark.parametrize("where", [(), ("call",), ("context",), ("call", "arguments"), ("context", "config")])
def test_an_envelope_with_a_field_added_is_refused(where: tuple[str, ...]) -> None:
    payload = copy.deepcopy(ENVELOPE)
    _at(payload, where)["extra"] = 1
    with pytest.raises(EnvelopeRefused):
        decode_call(json.dumps(payload), KEY)


def _at(payload: Any, path: Any) -> Any:
    for part in path:
        payload = payload[part]
    return payload


def test_another_tenant_or_a_later_deadline_needs_another_signature() -> None:
    for field, value in (("tenant", "rival"), ("deadline_at", 9e9), ("session", "other"), ("blob", "theirs")):
        payload = copy.deepcopy(ENVELOPE)
        payload["context"][field] = value
        with pytest.raises(EnvelopeRefused, match="signature"):
            decode_call(json.dumps(payload), KEY)


def test_a_signature_moved_from_another_call_is_refused() -> None:
    other = json.loads(encode_call(build_call(call_id="c2"), CONTEXT, KEY))
    with pytest.raises(EnvelopeRefused, match="signature"):
        decode_call(json.dumps({**ENVELOPE, "sig": other["sig"]}), KEY)


def test_another_key_is_refused_and_the_sentence_names_the_setting() -> None:
    with pytest.raises(EnvelopeRefused, match="TOOLCREW_SECRET"):
        decode_call(encode_call(CALL, CONTEXT, KEY), b"j" * 32)


def test_space_and_order_do_not_matter_to_the_signature() -> None:
    text = json.dumps(dict(reversed(ENVELOPE.items())), indent=2)
    assert decode_call(text, KEY) == (CALL, CONTEXT)


@pytest.mark.parametrize("version", [0, 2, "1", None, [1]])
def test_another_version_is_refused_with_what_to_do(version: Any) -> None:
    with pytest.raises(EnvelopeRefused, match="same release"):
        decode_call(json.dumps({**ENVELOPE, "v": version}), KEY)
    with pytest.raises(EnvelopeRefused, match="same release"):
        decode_result({**encode_result(ToolResult(call_id="c", name="x", success=True)), "v": version})


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p["call"].update(unknown=1),
        lambda p: p["context"].update(unknown=1),
        lambda p: p["context"].update(tenant="a b"),
        lambda p: p["context"].update(timeout_s=601),
        lambda p: p["context"].update(timeout_s=0),
        lambda p: p["context"].update(timeout_s=float("nan")),
        lambda p: p["call"].update(id="a/b"),
        lambda p: p["call"].update(name=""),
        lambda p: p["call"].update(arguments=[]),
        lambda p: p.update(call=None),
        lambda p: p["call"].pop("id"),
    ],
)
def test_a_well_signed_envelope_of_another_shape_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(EnvelopeRefused):
        decode_call(resigned(change), KEY)


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "1", "{", "\x00", "\ud800", "[" * 100_000, '{"v":1}', '{"v":1,"call":' + "1" * 5000 + ',"context":1,"sig":"x"}'],
    ids=lambda text: repr(text[:20]),
)
def test_garbage_is_refused_whatever_it_is(text: str) -> None:
    with pytest.raises(EnvelopeRefused):
        decode_call(text, KEY)


def test_a_signature_that_is_no_text_in_utf8_is_refused() -> None:
    with pytest.raises(EnvelopeRefused):
        decode_call(json.dumps({**ENVELOPE, "sig": "\ud800"}), KEY)


@pytest.mark.parametrize("sig", [None, 1, [], {}, "", "é"])
def test_a_signature_that_is_no_hex_text_is_refused(sig: Any) -> None:
    with pytest.raises(EnvelopeRefused):
        decode_call(json.dumps({**ENVELOPE, "sig": sig}), KEY)


@pytest.mark.parametrize("depth", [150, 300, 600, 900, 985, 1200])
def test_nesting_of_any_depth_never_escapes_as_another_error(depth: int) -> None:
    with pytest.raises(EnvelopeRefused):
        decode_call('{"v":1,"call":' + "[" * depth + "]" * depth + ',"context":1,"sig":"x"}', KEY)


def test_an_envelope_at_the_size_limit_passes_and_one_byte_more_does_not() -> None:
    empty = len(encode_call(build_call(text=""), CONTEXT, KEY))
    fits = build_call(text="x" * (MAX_ENVELOPE_BYTES - empty))
    assert decode_call(encode_call(fits, CONTEXT, KEY), KEY)[0] == fits
    with pytest.raises(ValueError, match="write_file"):
        encode_call(build_call(text="x" * (MAX_ENVELOPE_BYTES - empty + 1)), CONTEXT, KEY)


def test_size_is_counted_in_bytes_on_both_sides() -> None:
    with pytest.raises(ValueError, match="bytes"):
        encode_call(build_call(text="é" * (MAX_ENVELOPE_BYTES // 2)), CONTEXT, KEY)
    with pytest.raises(EnvelopeRefused, match="larger"):
        decode_call('"' + "é" * (MAX_ENVELOPE_BYTES // 2) + '"', KEY)


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
def test_a_result_of_another_shape_is_refused(change: dict[str, Any]) -> None:
    data = encode_result(ToolResult(call_id="c", name="x", success=True))
    with pytest.raises(EnvelopeRefused):
        decode_result({**data, **change})


@pytest.mark.parametrize("data", [None, "text", 1, [], {}])
def test_a_result_that_is_no_object_is_refused(data: Any) -> None:
    with pytest.raises(EnvelopeRefused):
        decode_result(data)


def test_the_first_fields_of_a_stored_result_are_short_and_harmless() -> None:
    stored = encode_result(ToolResult(call_id="c", name="x", success=True, output="secret"))
    assert list(stored)[:5] == ["v", "call_id", "name", "success", "error_code"]


@pytest.mark.parametrize("maxlen", [None, 46, 80, 160, 1024, 100_000])
def test_what_celery_shows_of_a_result_has_neither_output_nor_metadata(maxlen: int | None) -> None:
    """Celery logs a result, and sends it to Flower, through its `saferepr`, which shows three levels."""
    for size in (0, 1, 20, 160, 5000):
        secret = "canary" + "x" * size
        result = ToolResult(
            call_id="c" * (size % 60 + 1), name="n" * (size % 128 + 1), success=True, output=secret, metadata={secret: [secret]}
        )
        assert "canary" not in saferepr(encode_result(result), maxlen)


@pytest.mark.parametrize(
    "change",
    [{"data": None}, {"data": []}, {"data": [[]]}, {"data": [["x"]]}, {"data": [[{}]]}, {"name": "other"}, {"success": False}],
    ids=repr,
)
def test_a_result_whose_record_is_missing_or_another_than_its_head_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(EnvelopeRefused):
        decode_result({**encode_result(ToolResult(call_id="c", name="x", success=True)), **change})


@pytest.mark.parametrize(
    ("value", "word"),
    [("half \ud800", "surrogate"), ({"half \udc00": 1}, "surrogate"), (float("nan"), "JSON"), (float("inf"), "JSON")],
    ids=repr,
)
def test_what_no_worker_could_read_is_not_sent(value: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        encode_call(ToolCall.model_construct(id="c1", name="echo", arguments={"value": value}), CONTEXT, KEY)


def test_a_key_hides_its_secret_and_differs_by_it() -> None:
    assert b"hunter2" not in derive_key("hunter2")
    assert derive_key("hunter2") != derive_key("hunter3")


def test_the_context_of_a_call_is_bound_to_it() -> None:
    one = json.loads(encode_call(build_call(call_id="a"), build_context(tenant="one"), KEY))
    two = json.loads(encode_call(build_call(call_id="a"), build_context(tenant="two"), KEY))
    with pytest.raises(EnvelopeRefused):
        decode_call(json.dumps({**one, "context": two["context"]}), KEY)
