"""The name in a TLS greeting: found in real greetings, and never by accident in other data."""

import contextlib
import ssl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sandboxd.egress_harness import build_hello
from toolcrew.workers.egress.hellos import HelloError, HelloGate, parse_hello
from toolcrew.workers.egress.outcomes import EgressOutcome, Refusal
from toolcrew.workers.web.urls import parse_url

HELLO = build_hello("site.example")


def split_records(hello: bytes, size: int) -> bytes:
    """Return the same greeting in records of `size` bytes."""
    message = hello[5:]
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(hello[:3] + len(piece).to_bytes(2, "big") + piece for piece in pieces)


def gate_for(url: str = "https://site.example/") -> HelloGate:
    return HelloGate(parse_url(url))


def refusal_of(gate: HelloGate, data: bytes) -> str:
    def send_all() -> None:
        gate.pass_on(data)
        gate.finish()

    with pytest.raises(Refusal) as refusal:
        send_all()
    assert refusal.value.outcome is EgressOutcome.TLS_REFUSED
    return refusal.value.sentence


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize(
    ("name", "server_name"), [("site.example", "site.example"), ("SITE.example", "site.example"), (None, "")]
)
def test_the_server_name_of_a_real_client_hello_is_found(
    name: str | None, server_name: str, version: ssl.TLSVersion
) -> None:
    assert parse_hello(build_hello(name, version) + b"what follows") == server_name


def test_a_client_hello_in_too_many_records_is_refused() -> None:
    assert parse_hello(split_records(HELLO, len(HELLO) // 8)) == "site.example"
    with pytest.raises(HelloError, match="too many records"):
        parse_hello(split_records(HELLO, 1))
    for size in (b"\0\0", b"\xff\xff"):
        with pytest.raises(HelloError, match="invalid size"):
            parse_hello(b"\x16\x03\x01" + size)
    with pytest.raises(HelloError, match="not exactly one server name"):
        parse_hello(HELLO.replace(b"\0\x0csite.example", b"\0\x0bsite.example"))


_CHANGED = st.builds(
    lambda at, value: HELLO[:at] + bytes([value]) + HELLO[at + 1 :], st.integers(0, len(HELLO) - 1), st.integers(0, 255)
)
_RECORDS = st.binary(min_size=1, max_size=300).map(lambda data: b"\x16\x03\x01" + len(data).to_bytes(2, "big") + data)


@settings(max_examples=300)
@given(_CHANGED | _RECORDS | st.binary(max_size=300))
def test_any_bytes_give_a_name_or_an_error(data: bytes) -> None:
    with contextlib.suppress(HelloError):
        server_name = parse_hello(data)
        assert server_name is None or server_name.isascii()


def test_a_valid_client_hello_in_pieces_passes_unchanged() -> None:
    gate = gate_for()
    output = [gate.pass_on(HELLO[at : at + 50]) for at in range(0, len(HELLO), 50)]
    assert (output[0], b"".join(output)) == (b"", HELLO)
    assert gate.pass_on(b"\x17 more") == b"\x17 more"
    gate.finish()


@pytest.mark.parametrize("name", ["evil.example", "site.example.evil.example", "w.site.example"])
def test_a_client_hello_for_another_server_is_refused(name: str) -> None:
    assert "than site.example" in refusal_of(gate_for(), build_hello(name))


def test_a_client_hello_without_a_name_is_refused_for_a_host_name() -> None:
    hello_without_name = build_hello(None)
    assert "names no server" in refusal_of(gate_for(), hello_without_name)
    assert gate_for("https://127.0.0.1/").pass_on(hello_without_name) == hello_without_name
    assert "names another" in refusal_of(gate_for("https://127.0.0.1/"), HELLO)


def test_a_client_hello_with_two_names_is_refused() -> None:
    extension = (
        b"\x00\x00"
        + (17).to_bytes(2, "big")
        + (15).to_bytes(2, "big")
        + b"\x00"
        + (12).to_bytes(2, "big")
        + b"evil.example"
    )
    message = HELLO[9:]
    at = 2 + 32 + 1 + message[34]
    at += 2 + int.from_bytes(message[at : at + 2], "big")
    at += 1 + message[at]
    size = int.from_bytes(message[at : at + 2], "big") + len(extension)
    message = message[:at] + size.to_bytes(2, "big") + extension + message[at + 2 :]
    data = b"\x01" + len(message).to_bytes(3, "big") + message
    assert "must use TLS" in refusal_of(gate_for(), b"\x16\x03\x01" + len(data).to_bytes(2, "big") + data)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"\x80\x2e\x01\x00\x02", b"\x00", b"\x17\x03\x03\x00\x01x"]
)
def test_non_tls_data_is_refused_on_web_ports_only(data: bytes) -> None:
    assert "does not speak TLS" in refusal_of(gate_for(), data)
    assert "does not speak TLS" in refusal_of(gate_for("https://site.example:80/"), data)
    assert gate_for("https://site.example:22/").pass_on(data) == data


def test_a_truncated_client_hello_is_refused_and_no_data_is_not() -> None:
    assert "in the middle of" in refusal_of(gate_for(), HELLO[:60])
    gate_for().finish()
