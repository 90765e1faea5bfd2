"""Error codes that cross a process, and the exceptions of both sides, sorted by who is told.

::

    ToolcrewError
    +-- ToolFailure            the model is told: becomes a ToolResult with the same code, the loop goes on
    +-- OperatorError          the operator is told: one sentence and what to do next
    |   +-- ConfigError            a setting is missing or wrong
    |   |   +-- RecordRefused          a stored record is not signed with this deployment's secret
    |   +-- BrokerUnavailable      Redis cannot be reached, or refuses us
    |   +-- SandboxUnavailable     no engine, no image, no sandboxd, or the sandbox died
    |   +-- ModelUnavailable       the model's endpoint cannot be reached, or refuses us
    |       +-- ModelInterrupted       its reply broke off after a part of it was given out
    |       +-- ContextWindowExceeded  it refuses a request as too long
    |       +-- ModelRefused           it refuses a request for what is in it
    |       +-- ModelDenied            it refuses the key, the account or the model's name: any request
    +-- EnvelopeRefused        bytes from the queue that are not a call of ours: counted, never run

Anything else is the developer's: a bug, loud.
"""

from enum import StrEnum
from typing import Literal


class ErrorCode(StrEnum):
    """Every way a call can fail. Closed: a code that is not here is refused by the codec."""

    TOOL_NOT_FOUND = "TOOL_NOT_FOUND"
    TOOL_DISABLED = "TOOL_DISABLED"
    INVALID_ARGUMENTS = "INVALID_ARGUMENTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    SECURITY_REFUSED = "SECURITY_REFUSED"
    PATH_NOT_ALLOWED = "PATH_NOT_ALLOWED"
    FILE_NOT_FOUND = "FILE_NOT_FOUND"
    FILE_EXISTS = "FILE_EXISTS"
    IS_DIRECTORY = "IS_DIRECTORY"
    NOT_A_DIRECTORY = "NOT_A_DIRECTORY"
    BINARY_FILE = "BINARY_FILE"
    FILE_TOO_LARGE = "FILE_TOO_LARGE"
    NO_SPACE = "NO_SPACE"
    OFFSET_OUT_OF_RANGE = "OFFSET_OUT_OF_RANGE"
    NO_MATCH = "NO_MATCH"
    AMBIGUOUS_MATCH = "AMBIGUOUS_MATCH"
    NO_CHANGE = "NO_CHANGE"
    STALE_FILE = "STALE_FILE"
    INVALID_PATTERN = "INVALID_PATTERN"
    TIMEOUT = "TIMEOUT"
    CANCELLED = "CANCELLED"
    CONFIG_MISSING = "CONFIG_MISSING"
    NETWORK_ERROR = "NETWORK_ERROR"
    HTTP_ERROR = "HTTP_ERROR"
    SESSION_NOT_FOUND = "SESSION_NOT_FOUND"
    SANDBOX_UNAVAILABLE = "SANDBOX_UNAVAILABLE"
    BROKER_UNAVAILABLE = "BROKER_UNAVAILABLE"
    UNKNOWN_TENANT = "UNKNOWN_TENANT"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    RATE_LIMITED = "RATE_LIMITED"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    HOST_LOST = "HOST_LOST"
    OUTCOME_UNKNOWN = "OUTCOME_UNKNOWN"
    ENVELOPE_REFUSED = "ENVELOPE_REFUSED"
    INTERNAL = "INTERNAL"


OPERATOR_CODES = frozenset(
    {
        ErrorCode.SANDBOX_UNAVAILABLE,
        ErrorCode.BROKER_UNAVAILABLE,
        ErrorCode.HOST_LOST,
        ErrorCode.OUTCOME_UNKNOWN,
        ErrorCode.ENVELOPE_REFUSED,
        ErrorCode.CONFIG_MISSING,
        ErrorCode.INTERNAL,
    }
)
"""The codes of the infrastructure: the operator must act, not the model or the tenant. A call that ends with one of
them is a FAILURE in Celery, so it is red in Flower. All other codes are answers that the model reads, and Celery's
state is SUCCESS. Never shown as command output."""


class ToolcrewError(Exception):
    """Base of every error we raise on purpose."""


class ToolFailure(ToolcrewError):
    """A call failed in a way its model (or program) should read. Carries a closed code and a sentence."""

    def __init__(self, code: ErrorCode, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.metadata = metadata


class OperatorError(ToolcrewError):
    """Something outside the call is broken. The message says what, and what to do next."""

    code = ErrorCode.INTERNAL


class ConfigError(OperatorError):
    """A setting is missing or wrong."""

    code = ErrorCode.CONFIG_MISSING


class RecordRefused(ConfigError):
    """A signed record in Redis cannot be verified: it was written with another secret, or changed."""

    code = ErrorCode.ENVELOPE_REFUSED


class BrokerUnavailable(OperatorError):
    """Redis cannot be reached, or refuses the credentials."""

    code = ErrorCode.BROKER_UNAVAILABLE


class SandboxUnavailable(OperatorError):
    """No engine, no image, no sandboxd, or the sandbox is gone."""

    code = ErrorCode.SANDBOX_UNAVAILABLE


class ModelUnavailable(OperatorError):
    """The model's endpoint cannot be reached, refuses the key, or does not know the model."""

    code = ErrorCode.NETWORK_ERROR


class ModelInterrupted(ModelUnavailable):
    """A reply broke off after a part of it was given out. The same request may be sent again; the part may then come
    again.
    """


class ContextWindowExceeded(ModelUnavailable):
    """The server refuses a request as too long for the model. `limit_tokens`: what fits, when the server says it."""

    def __init__(self, message: str, limit_tokens: int | None = None) -> None:
        super().__init__(message)
        self.limit_tokens = limit_tokens


class ModelRefused(ModelUnavailable):
    """The server refuses this request for what is in it; another one may pass. `detail`: its words on one line, without
    secrets.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class ModelDenied(ModelUnavailable):
    """The server refuses us, whatever we ask: no request passes until that is mended. `is_unknown_model`: it is the
    model's name that it does not know.
    """

    def __init__(self, message: str, *, is_unknown_model: bool = False) -> None:
        super().__init__(message)
        self.is_unknown_model = is_unknown_model


RefusalReason = Literal[
    "malformed", "oversized", "version", "signature", "expired", "wrong_task", "wrong_tenant", "repeated"
]
"""Why something in a queue was not run: what is counted."""


class EnvelopeRefused(ToolcrewError):
    """Bytes from the queue that are not a valid, signed call of this version. Never run, and counted by `reason`."""

    def __init__(self, message: str, reason: RefusalReason = "malformed") -> None:
        super().__init__(message)
        self.reason = reason
