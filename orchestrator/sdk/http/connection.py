"""What both clients share: the address and the key, errors in answers, repeated requests, paths, and event streams."""

import json
import random
import secrets
import socket
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from toolcrew.contract.errors import (
    OPERATOR_CODES,
    ApiUnavailable,
    BrokerFull,
    BrokerUnavailable,
    ConfigError,
    ErrorCode,
    OperatorError,
    SandboxUnavailable,
    ToolcrewError,
    ToolFailure,
)

if TYPE_CHECKING:
    from toolcrew.contract.run_spec import RunBody

M = TypeVar("M", bound=BaseModel)

TRIES: Final = 4
"""Attempts of a request that may be sent again."""
LONGEST_PAUSE_S: Final = 30.0
"""Longest pause before the next attempt. A service that asks for a longer one gets no further attempt."""
CONNECT_S: Final = 10.0
ANSWER_S: Final = 60.0
"""Seconds without a byte after which the service is lost: an event stream has a comment every 15 s."""
MAX_ERROR_BYTES: Final = 64 * 1024
MAX_ANSWER_BYTES: Final = 128 * 1024 * 1024
"""Limit of an answer that is held in memory. The largest are files of 64 MiB and transcripts."""
MAX_LINE_BYTES: Final = 128 * 1024
"""Limit of one line of a list: an entry of a file in JSON."""
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
"""Limit of one event: a result of 256 Ki characters, each as an escape sequence of JSON, and its metadata."""
_BUSY: Final = frozenset({429, 503})
_EFFECTLESS: Final = frozenset({"TOO_MANY_REQUESTS", "NOT_READY", "RATE_LIMITED", "IDEMPOTENCY_IN_PROGRESS"})
"""Codes of answers after which a request can be sent again: it had no effect, or waits for its first attempt to end."""
_API_CODES: Final[Mapping[str, ErrorCode]] = {
    "NOT_FOUND": ErrorCode.FILE_NOT_FOUND,
    "BODY_TOO_LARGE": ErrorCode.FILE_TOO_LARGE,
    "TOO_MANY_REQUESTS": ErrorCode.RATE_LIMITED,
    "CONFLICT": ErrorCode.SESSION_BUSY,
    "IDEMPOTENCY_IN_PROGRESS": ErrorCode.SESSION_BUSY,
    "TOO_SLOW": ErrorCode.TIMEOUT,
    "NOT_READY": ErrorCode.SANDBOX_UNAVAILABLE,
}
"""Code of the HTTP API -> the code that the direct client raises in the same case. All others: INVALID_ARGUMENTS."""
_ERRORS: Final[Mapping[ErrorCode, type[OperatorError]]] = {
    ErrorCode.SANDBOX_UNAVAILABLE: SandboxUnavailable,
    ErrorCode.BROKER_UNAVAILABLE: BrokerUnavailable,
    ErrorCode.BROKER_FULL: BrokerFull,
}


def build_options(url: str | None, api_key: str | None, tenant: str | None = None) -> dict[str, Any]:
    """Return the options of an httpx client. `url` and `api_key` None: TOOLCREW_URL and TOOLCREW_API_KEY. `tenant` is
    sent with every request. Raises ConfigError.
    """
    if not url or not api_key:
        from toolcrew.contract.settings import ClientSettings, read_environment

        settings = read_environment(ClientSettings)
        url = url or settings.url
        api_key = api_key or (settings.api_key.get_secret_value() if settings.api_key is not None else None)
    if not url or not api_key:
        missing = "TOOLCREW_URL" if not url else "TOOLCREW_API_KEY"
        raise ConfigError(f"the address or the key of the API is missing: set {missing}, or pass url and api_key")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"the address of the API is invalid: {url} must begin with https:// or http://")
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise ConfigError("the API key contains a character that no key has: copy the whole key, without spaces")
    return {
        "base_url": url,
        "params": {"tenant": tenant} if tenant is not None else {},
        "headers": {"Authorization": f"Bearer {api_key}"},
        "timeout": httpx.Timeout(ANSWER_S, connect=CONNECT_S, pool=None),
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=20),
    }


def keepalive() -> list[tuple[int, int, int]]:
    """Return socket options that find a lost service within 60 s, also while no answer is due."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        # Not every system has them.
        if (number := getattr(socket, name, None)) is not None:
            options.append((socket.IPPROTO_TCP, number, value))
    return options


@dataclass(frozen=True)
class Ask:
    """A request. `repeats`: the request may be sent again after a lost answer, because it has no second effect.
    `wait_s`: seconds that the answer may take beyond ANSWER_S. `content` can be iterated again for each attempt.
    """

    method: str
    path: str
    repeats: bool = False
    params: Mapping[str, Any] | None = None
    body: Any = None
    content: bytes | Iterable[bytes] | AsyncIterable[bytes] | None = None
    headers: Mapping[str, str] | None = None
    wait_s: float = 0.0

    def options(self) -> dict[str, Any]:
        """Return the arguments for httpx's `build_request`."""
        params = {name: value for name, value in (self.params or {}).items() if value is not None}
        options: dict[str, Any] = {"params": params, "headers": dict(self.headers or {})}
        if self.content is not None:
            options["content"] = self.content
            options["headers"].setdefault("Content-Type", "application/octet-stream")
        elif self.body is not None:
            options["content"] = json.dumps(self.body, separators=(",", ":"), allow_nan=False).encode()
            options["headers"]["Content-Type"] = "application/json"
        if self.wait_s:
            options["timeout"] = httpx.Timeout(ANSWER_S + self.wait_s, connect=CONNECT_S, pool=None)
        return options


def pause_after(ask: Ask, attempt: int, problem: httpx.Response | httpx.TransportError) -> float | None:
    """Return the seconds until the next attempt; None: there is none. `attempt`: number of the attempt, from 1."""
    if attempt >= TRIES:
        return None
    pause_s = random.uniform(0.5, 1.0) * 2.0 ** (attempt - 1)
    if isinstance(problem, httpx.TransportError):
        # The request of a connection that was never made had no effect.
        never_sent = isinstance(problem, httpx.ConnectError | httpx.ConnectTimeout)
        return pause_s if ask.repeats or never_sent else None
    is_busy = ask.repeats and problem.status_code in _BUSY
    if not is_busy and read_problem(problem).get("code") not in _EFFECTLESS:
        return None
    asked = problem.headers.get("retry-after", "")
    after_s = float(asked) if asked.isascii() and asked.isdigit() else 0.0
    return max(pause_s, after_s) if after_s <= LONGEST_PAUSE_S else None


def read_problem(response: httpx.Response) -> Mapping[str, Any]:
    """Return the problem of an answer whose content was read; {} if it has none."""
    try:
        problem = json.loads(response.content)
    except (ValueError, RecursionError):
        return {}
    return problem if isinstance(problem, dict) else {}


def keep_error(response: httpx.Response, content: bytes) -> httpx.Response:
    """Return a failed answer with the part of its content that was read."""
    headers = {"Retry-After": response.headers.get("retry-after", "")}
    return httpx.Response(
        response.status_code, headers=headers, content=content[:MAX_ERROR_BYTES], request=response.request
    )


def build_error(response: httpx.Response) -> ToolcrewError:
    """Return the error of a failed answer: the one that the direct client raises in the same case."""
    problem = read_problem(response)
    name = str(problem.get("code") or "")
    if not name:
        return ApiUnavailable(
            f"{response.request.url} answered with status {response.status_code} and without a code of toolcrew: "
            "check that TOOLCREW_URL is the address of its API"
        )
    return build_failure(name, str(problem.get("detail") or name), nearest=problem.get("nearest") or [])


def build_failure(name: str, detail: str, **metadata: Any) -> ToolcrewError:
    """Return the error of a code of the API."""
    code = ErrorCode(name) if name in list(ErrorCode) else _API_CODES.get(name, ErrorCode.INVALID_ARGUMENTS)
    if code in OPERATOR_CODES:
        error = _ERRORS.get(code, OperatorError)(detail)
        error.code = code
        return error
    return ToolFailure(code, detail, api_code=name, **metadata)


def build_lost(error: httpx.TransportError, url: str) -> ApiUnavailable:
    """Return the error for a service that does not answer."""
    reason = str(error) or type(error).__name__
    return ApiUnavailable(f"the API at {url} does not answer ({reason}): check TOOLCREW_URL and that the service runs")


def build_too_large(url: str) -> ApiUnavailable:
    """Return the error for an answer that is too large for memory."""
    return ApiUnavailable(f"the API at {url} sent more than {MAX_ANSWER_BYTES} bytes: check TOOLCREW_URL")


def parse(kind: type[M], content: bytes) -> M:
    """Return the record of an answer. Fields that a newer service adds are left out. Raises ApiUnavailable."""
    try:
        return kind.model_validate_json(content, extra="ignore")
    except ValidationError as error:
        raise ApiUnavailable(
            f"the API sent an answer that this release cannot read ({error.error_count()} parts of {kind.__name__}): "
            "use the release of the service"
        ) from error


def parse_object(content: bytes) -> dict[str, Any]:
    """Return the fields of an answer. Raises ApiUnavailable."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ApiUnavailable("the API sent an answer that is no JSON object: check TOOLCREW_URL")
    return fields


def with_key(ask: Ask, key: str | None = None) -> Ask:
    """Return the request with an Idempotency-Key, so that it can be sent again. `key` None: a new one."""
    headers = {**(ask.headers or {}), "Idempotency-Key": key or secrets.token_hex(16)}
    return replace(ask, headers=headers, repeats=True)


def replace_workspaces(lines: bytes, uploads: Mapping[str, str]) -> bytes:
    """Return JSON lines whose `workspace` names the uploaded file instead of a key of `uploads`. Raises ConfigError for
    a name that no line has.
    """
    used, out = set[str](), list[str]()
    for line in lines.splitlines():
        fields = json.loads(line) if line.strip() else None
        name = fields.get("workspace") if isinstance(fields, dict) else None
        if isinstance(fields, dict) and isinstance(name, str) and name in uploads:
            used.add(name)
            line = json.dumps({**fields, "workspace": uploads[name]}).encode()
        out.append(line.decode())
    if unused := sorted(uploads.keys() - used):
        raise ConfigError(f"no line has the workspace {', '.join(unused)}: correct the names of `files`")
    return "".join(f"{line}\n" for line in out).encode()


def run_fields(body: "RunBody") -> dict[str, Any]:
    """Return the fields of a new run as the API reads them: with the limits among the other fields."""
    fields = body.model_dump(mode="json", exclude_defaults=True)
    limits = fields.pop("limits", {})
    return {**fields, **limits}


def segment(name: str) -> str:
    """Return a name as one part of an address."""
    # httpx would remove `..` and the part before it, and so change the address.
    return name.replace(".", "%2E") if name in (".", "..") else quote(name.encode("utf-8", "surrogateescape"), safe="")


def file_path(session: str, path: str) -> str:
    """Return the address of a file of a session."""
    return f"/v1/sessions/{segment(session)}/files/{'/'.join(map(segment, path.split('/')))}"


@dataclass(frozen=True)
class ServerEvent:
    """An event of a stream. `id`: the position after which a new stream can continue; "" if there is none."""

    event: str
    data: str
    id: str


class EventReader:
    """Reads the pieces of an event stream (HTML Standard, 9.2.6). Raises ApiUnavailable for an event of more than
    MAX_EVENT_BYTES.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._event, self._id = "message", ""
        self._data: list[str] = []
        self._size = 0

    def feed(self, piece: bytes) -> Iterator[ServerEvent]:
        """Yield the events that a piece completes."""
        self._rest += piece
        self._size += len(piece)
        if self._size > MAX_EVENT_BYTES:
            raise ApiUnavailable(f"the API sent an event of more than {MAX_EVENT_BYTES} bytes: check TOOLCREW_URL")
        if b"\n" not in piece:
            # Do not search the beginning of a long line again for each piece.
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if (event := self._take(line.removesuffix(b"\r").decode("utf-8", "replace"))) is not None:
                yield event

    def _take(self, line: str) -> ServerEvent | None:
        if line:
            name, _, value = line.partition(":")
            self._set(name, value.removeprefix(" "))
            return None
        data, self._data = self._data, []
        self._size = 0
        event, self._event = self._event, "message"
        return ServerEvent(event, "\n".join(data), self._id) if data else None

    def _set(self, name: str, value: str) -> None:
        match name:
            case "event":
                self._event = value
            case "data":
                self._data.append(value)
            case "id":
                self._id = value
