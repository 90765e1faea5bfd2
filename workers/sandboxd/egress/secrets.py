"""The values of secrets, which sandboxd passes from its worker to the egress proxy, and the certificate authority of
the proxy.

Values are in memory only. Without the worker's confirmation they are forgotten, so that a revoked secret does not
outlive a worker that cannot read Redis.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.workers.sandboxd.egress.relay import connect_proxy
from toolcrew.workers.sandboxd.runtime.hardening import AUTHORITIES

AUTHORITY_VARIABLES: Mapping[str, str] = dict.fromkeys(
    (
        *("SSL_CERT_FILE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "PIP_CERT"),
        *("CURL_CA_BUNDLE", "npm_config_cafile"),
    ),
    AUTHORITIES,
)
"""Environment variables that make programs trust the proxy's certificate authority."""
LEASE_S = 10.0
"""Seconds after which values are forgotten, unless the worker sends them again."""
WAIT_S = 5.0
"""Time that a connection waits for values that the worker has not sent yet."""
MAX_ANSWER_BYTES = 8 * 1024 * 1024
_ASK_S = 5.0

Values = Mapping[str, Mapping[str, Mapping[str, Any] | None]]
"""Tenant -> name -> value, hosts and place of a secret; None: there is no such secret."""
_VALUES: TypeAdapter[Values] = TypeAdapter(dict[str, dict[str, dict[str, Any] | None]])


def parse_values(body: bytes) -> Values:
    """Return the values that a worker sent. Raises ToolFailure, whose text contains no value."""
    try:
        return _VALUES.validate_json(body)
    except ValidationError:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "the body is not an object of tenants and secrets") from None


class SecretValues:
    """The values for the sessions of this host. `on_change` receives pairs of tenant and secret whose value was changed
    or removed.
    """

    def __init__(self, on_change: Callable[[set[tuple[str, str]]], None]) -> None:
        self._on_change = on_change
        self._values: Values = {}
        self._received = asyncio.Event()
        self._lease: asyncio.TimerHandle | None = None

    def replace(self, values: Values) -> None:
        """Replace all values and confirm them for LEASE_S."""
        before, self._values = self._values, values
        changed = {
            (tenant, name)
            for tenant, secrets in before.items()
            for name, secret in secrets.items()
            if secret is not None and values.get(tenant, {}).get(name) != secret
        }
        self._received.set()
        self._received = asyncio.Event()
        if self._lease is not None:
            self._lease.cancel()
        self._lease = asyncio.get_running_loop().call_later(LEASE_S, self.replace, {}) if values else None
        if changed:
            self._on_change(changed)

    async def wait(self, tenant: str, names: Iterable[str]) -> list[dict[str, Any]]:
        """Return the existing secrets among `names`, in the form that the proxy expects. Raises OSError when the worker
        sends no values within WAIT_S.
        """
        requested = set(names)
        try:
            async with asyncio.timeout(WAIT_S):
                while not requested <= self._values.get(tenant, {}).keys():
                    await self._received.wait()
        except TimeoutError:
            raise OSError("the worker of this host sends no secrets: check that it runs and reaches Redis") from None
        found = self._values[tenant] if requested else {}
        return [{"name": name, **secret} for name in sorted(requested) if (secret := found[name]) is not None]


class ProxyAuthority:
    """Keeps the file up to date that contains the certificate authorities for sandboxes. Each start of the proxy
    creates a new authority. `place` writes the file.
    """

    def __init__(self, path: Path | None, uids: frozenset[int], place: Callable[[bytes], Awaitable[None]]) -> None:
        self._path = path
        self._uids = uids
        self._place = place
        self._file_identity: tuple[int, int] | None = None
        self._lock = asyncio.Lock()

    async def refresh(self) -> None:
        """Write the file with the certificate authorities if the proxy has restarted since the last write. Raises
        OSError.
        """
        async with self._lock:
            stat = await asyncio.to_thread(Path(self._path or "").stat)
            if (identity := (stat.st_ino, stat.st_ctime_ns)) != self._file_identity:
                bundle = await ask_proxy(self._path, self._uids, "authority")
                try:
                    await self._place(bundle)
                except SandboxUnavailable as error:
                    raise OSError(str(error)) from error
                self._file_identity = identity

    async def require(self) -> None:
        """Write the file like `refresh`. Raises SandboxUnavailable when there is no proxy."""
        try:
            await self.refresh()
        except OSError as error:
            raise SandboxUnavailable(
                f"the session's secrets need the egress proxy, which does not answer ({error}): start it"
            ) from error


async def ask_proxy(path: Path | None, uids: frozenset[int], question: Literal["authority", "uses"]) -> bytes:
    """Send a question to the proxy and return the answer. Raises OSError."""
    if path is None:
        raise OSError("TOOLCREW_EGRESS_SOCKET is not set")
    reader, writer = await connect_proxy(path, uids)
    try:
        async with asyncio.timeout(_ASK_S):
            writer.write(json.dumps({"v": 1, "ask": question}).encode() + b"\n")
            data = bytearray()
            while piece := await reader.read(65_536):
                data += piece
                if len(data) > MAX_ANSWER_BYTES:
                    raise OSError("the egress proxy sends too much")
    finally:
        writer.transport.abort()
    return bytes(data)


async def read_uses(path: Path | None, uids: frozenset[int]) -> Sequence[Any]:
    """Return the uses of secrets since the last question; none when the proxy does not answer."""
    with contextlib.suppress(OSError, ValueError):
        uses = json.loads(await ask_proxy(path, uids, "uses"))
        return uses if isinstance(uses, list) else []
    return []
