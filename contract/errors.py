"""Error codes that processes exchange, and the exceptions of all processes. The exceptions are grouped by who must act.

::

    ToolcrewError
    +-- ToolFailure            for the model: becomes a ToolResult with the same code; the agent loop continues
    +-- OperatorError          for the operator: one sentence and what to do next
    |   +-- ConfigError            a setting is missing or wrong
    |   |   +-- RecordRefused          a stored record is not signed with this deployment's secret
    |   +-- BrokerUnavailable      Redis cannot be reached, or refuses the credentials
    |   |   +-- BrokerFull             Redis answers, but its memory is full
    |   +-- ApiUnavailable         the HTTP API cannot be reached
    |   +-- StreamLost             the connection to a stream was lost; its process goes on
    |   +-- SandboxUnavailable     no engine, no image, no sandboxd, or the sandbox died
    |   +-- ModelUnavailable       the model server cannot be reached, or refuses the request
    |       +-- ModelBlocked           its rate limit asks for a longer wait than the caller allows
    |       +-- ModelInterrupted       the reply stopped after a part of it was streamed
    |       +-- ContextWindowExceeded  the request is too long for the model
    |       +-- ModelRefused           the server refuses the content of this request
    |       +-- ModelDenied            the server refuses every request: key, account or model name
    +-- EnvelopeRefused        a queue message that is not a valid call: counted, never run

Every other exception is a bug in toolcrew.
"""

from enum import StrEnum
from typing import Literal


class ErrorCode(StrEnum):
    """The error codes of calls. docs/errors.md says what each code means."""

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
    SESSION_BUSY = "SESSION_BUSY"
    SANDBOX_UNAVAILABLE = "SANDBOX_UNAVAILABLE"
    BROKER_UNAVAILABLE = "BROKER_UNAVAILABLE"
    BROKER_FULL = "BROKER_FULL"
    UNKNOWN_TENANT = "UNKNOWN_TENANT"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    RATE_LIMITED = "RATE_LIMITED"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    BUDGET_EXCEEDED = "BUDGET_EXCEEDED"
    HOST_LOST = "HOST_LOST"
    OUTCOME_UNKNOWN = "OUTCOME_UNKNOWN"
    RESULT_EXPIRED = "RESULT_EXPIRED"
    ENVELOPE_REFUSED = "ENVELOPE_REFUSED"
    INTERNAL = "INTERNAL"


OPERATOR_CODES = frozenset(
    {
        ErrorCode.SANDBOX_UNAVAILABLE,
        ErrorCode.BROKER_UNAVAILABLE,
        ErrorCode.BROKER_FULL,
        ErrorCode.HOST_LOST,
        ErrorCode.OUTCOME_UNKNOWN,
        ErrorCode.ENVELOPE_REFUSED,
        ErrorCode.CONFIG_MISSING,
        ErrorCode.INTERNAL,
    }
)
"""Codes of infrastructure failures: the operator must act, not the model or the tenant.

A call that ends with one of these codes is a FAILURE in Celery, so Flower shows it in red. All other codes are answers
that the model reads, and their Celery state is SUCCESS. Infrastructure failures are never shown as command output.
"""


BROKER_CODES = frozenset({ErrorCode.BROKER_UNAVAILABLE, ErrorCode.BROKER_FULL})
"""Codes of calls that failed because Redis did not answer or took no data."""


class ToolcrewError(Exception):
    """Base class of all errors that toolcrew raises on purpose."""


class ToolFailure(ToolcrewError):
    """Raised when a call fails and the model or program should read the error. Has a code from ErrorCode and a
    sentence.
    """

    def __init__(self, code: ErrorCode, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.metadata = metadata


class OperatorError(ToolcrewError):
    """Raised for a failure outside the call. The message says what failed and what to do next."""

    code = ErrorCode.INTERNAL


class ConfigError(OperatorError):
    """Raised when a setting is missing or wrong."""

    code = ErrorCode.CONFIG_MISSING


class RecordRefused(ConfigError):
    """Raised when the signature of a record in Redis is invalid: another secret signed the record, or the record was
    changed.
    """

    code = ErrorCode.ENVELOPE_REFUSED


class BrokerUnavailable(OperatorError):
    """Redis cannot be reached, or refuses the credentials."""

    code = ErrorCode.BROKER_UNAVAILABLE


class BrokerFull(BrokerUnavailable):
    """Redis answers, but refuses writes, because its memory is full."""

    code = ErrorCode.BROKER_FULL


class ApiUnavailable(OperatorError):
    """Raised when the HTTP API cannot be reached, or something else answers at its address."""

    code = ErrorCode.NETWORK_ERROR


class StreamLost(OperatorError):
    """Raised when the connection to a stream was lost, for example because a gateway ended. The process of the stream
    goes on: open a stream that attaches to it.
    """

    code = ErrorCode.HOST_LOST


class SandboxUnavailable(OperatorError):
    """Raised when the sandbox cannot be used: no engine, no image, no sandboxd, or the sandbox has ended."""

    code = ErrorCode.SANDBOX_UNAVAILABLE


class ModelUnavailable(OperatorError):
    """Raised when the model's endpoint cannot be reached, rejects the key, or does not know the model."""

    code = ErrorCode.NETWORK_ERROR


class ModelBlocked(ModelUnavailable):
    """Raised when the server's rate limit requests a longer wait than the caller allows."""


class ModelInterrupted(ModelUnavailable):
    """Raised when the reply stops after a part of the reply was streamed. The caller may send the request again; that
    part may then repeat.
    """


class ContextWindowExceeded(ModelUnavailable):
    """Raised when the request is too long for the model. `limit_tokens`: the context window, if the server reports
    its size.
    """

    def __init__(self, message: str, limit_tokens: int | None = None) -> None:
        super().__init__(message)
        self.limit_tokens = limit_tokens


class ModelRefused(ModelUnavailable):
    """Raised when the server rejects the content of this request. Another request may succeed. `detail`: the server's
    message on one line, without secrets.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class ModelDenied(ModelUnavailable):
    """Raised when the server rejects every request until the operator fixes the cause. `is_unknown_model`: the server
    does not know the model's name.
    """

    def __init__(self, message: str, *, is_unknown_model: bool = False) -> None:
        super().__init__(message)
        self.is_unknown_model = is_unknown_model


RefusalReason = Literal[
    "malformed", "oversized", "version", "signature", "expired", "wrong_task", "wrong_tenant", "repeated"
]
"""Reason why a worker did not run a message from a queue. Metrics count messages by reason."""


class EnvelopeRefused(ToolcrewError):
    """Raised when a queue message is not a valid, signed call of this version. The message is counted by `reason` and
    never run.
    """

    def __init__(self, message: str, reason: RefusalReason = "malformed") -> None:
        super().__init__(message)
        self.reason = reason
