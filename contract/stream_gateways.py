"""Stream gateways: the record that each gateway publishes, and the proofs with which a gateway and a client of its
connection show that they belong to the deployment.

The certificate of a gateway is signed by no authority. Its digest is in the signed record, and both proofs contain the
digest. Its key never leaves the process of the gateway, so no other process can take part in the connection.
"""

from typing import Annotated, Final

from pydantic import Field, ValidationError

from toolcrew.contract.calls import Record
from toolcrew.contract.errors import EnvelopeRefused
from toolcrew.contract.signing import SigningKeys

GATEWAY_TTL_S: Final = 15
"""Seconds for which the record of a gateway is valid."""
RENEW_S: Final = 4.0
"""Seconds between two publications of a gateway's record."""
GREETING: Final = "toolcrew-streams 1"
"""Start of the first line of a gateway. The number is the version of the protocol."""
NONCE_BYTES: Final = 32
MAX_LINE_BYTES: Final = 512
"""Limit of a line of the handshake."""


class StreamGateway(Record):
    """Record of a stream gateway. `queue`: the queue of the first worker at the gateway's sandboxd
    (names.sandboxd_queue). `certificate`: SHA-256 of the certificate in hex. `started_at`: Unix seconds.
    """

    id: str = Field(min_length=16, max_length=64)
    queue: str = Field(max_length=256)
    addresses: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=255)], ...], Field(min_length=1)]
    port: int = Field(ge=1, le=65_535)
    certificate: str = Field(pattern=r"^[0-9a-f]{64}$")
    started_at: float


def seal_gateway(keys: SigningKeys, gateway: StreamGateway) -> str:
    """Return the signed record. The signature is valid for the gateway's queue only."""
    return keys.seal(f"stream-gateway {gateway.queue}", gateway.model_dump_json())


def open_gateway(keys: SigningKeys, queue: str, sealed: str | bytes) -> StreamGateway:
    """Return the record of the gateway of a queue. Raises EnvelopeRefused."""
    try:
        gateway = StreamGateway.model_validate_json(keys.unseal(f"stream-gateway {queue}", sealed))
    except ValidationError:
        raise EnvelopeRefused("another release wrote this record: run the same release everywhere") from None
    if gateway.queue != queue:
        raise EnvelopeRefused("the record belongs to another queue", "signature")
    return gateway


def build_greeting(nonce: str) -> str:
    """Return the first line of a gateway. `nonce`: random bytes in hex."""
    return f"{GREETING} {nonce}"


def parse_greeting(line: str) -> str | None:
    """Return the nonce of a gateway's first line; None when the line is not one of this version."""
    greeting, _, nonce = line.rpartition(" ")
    return nonce if greeting == GREETING and len(nonce) == 2 * NONCE_BYTES else None


def build_proof(keys: SigningKeys, side: str, handshake: str, key_id: str | None = None) -> str:
    """Return the line with which a side (`client` or `gateway`) proves that it has the secret of the deployment.
    `handshake`: the text of `describe_handshake`. `key_id`: the key that the other side has used, so that both sides
    accept each other during a change of the secret.
    """
    key = (keys.find(key_id) if key_id is not None else None) or keys.current
    return f"{key.id} {key.sign(f'stream-hello {side}', handshake.encode())}"


def check_proof(keys: SigningKeys, side: str, handshake: str, proof: str) -> bool:
    """Return whether the line is a proof of that side for this handshake."""
    key_id, _, signature = proof.partition(" ")
    return keys.holds(key_id, f"stream-hello {side}", handshake.encode(errors="replace"), signature)


def describe_handshake(gateway_nonce: str, client_nonce: str, certificate: str) -> str:
    """Return the text that both proofs sign. `certificate`: SHA-256 in hex of the certificate of the connection."""
    return f"{gateway_nonce} {client_nonce} {certificate}"
