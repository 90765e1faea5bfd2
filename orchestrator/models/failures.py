"""Classifies failed requests to a model: whether a retry may succeed, and the message for the operator."""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from toolcrew.contract.errors import (
    ContextWindowExceeded,
    ModelBlocked,
    ModelDenied,
    ModelInterrupted,
    ModelRefused,
    ModelUnavailable,
)
from toolcrew.orchestrator.models.retries import is_retried_status

MAX_DETAIL_CHARS = 300
MAX_SEARCHED_CHARS = 4000
FailureType = Literal["timeout", "connection", "status", "in_reply", "broken", "unfinished", "no_chat", "unknown"]
"""Kind of failure. `status`: an HTTP error. `in_reply`: an error object in a reply. `unfinished`: the reply has no
finish_reason.
"""


@dataclass(frozen=True)
class AttemptFailure:
    """One failed attempt. `body` is the server's parsed error object, or a string when it was not JSON. `wait_s` is the
    wait that the server requests.
    """

    kind: FailureType
    status: int | None = None
    body: Any = None
    wait_s: float | None = None
    is_final: bool = False
    """The server states that a retry cannot succeed."""
    name: str = ""
    """The name of the SDK's exception, for `unknown`."""

    @property
    def codes(self) -> frozenset[str]:
        """Return the server's `code`, `type` and `status`, in lower case."""
        body = self.body if isinstance(self.body, dict) else {}
        return frozenset(str(body[key]).lower() for key in ("code", "type", "status") if body.get(key) is not None)

    @property
    def reason(self) -> str:
        """Return a short reason for the log. The reason contains no text of the server."""
        return f"status {self.status}" if self.kind == "status" else _REASONS[self.kind]


@dataclass(frozen=True)
class FailedEndpoint:
    """The endpoint that failed. `address` contains no credentials. `secret` is removed from all text of the server.
    `name`: the name of a configured endpoint; "" for the endpoint that the environment variables set.
    """

    address: str
    model: str
    secret: str = field(default="", repr=False)
    name: str = ""

    @property
    def subject(self) -> str:
        # A tenant that may use a configured endpoint need not know where it is.
        return f"the model endpoint {self.name}" if self.name else f"the model at {self.address}"

    def check(self, variable: str) -> str:
        """Return the advice to check a setting of the endpoint. `variable`: the environment variable that has the
        setting.
        """
        return "check its settings (`toolcrew models list`)" if self.name else f"check {variable}"


_REASONS: dict[FailureType, str] = {
    "timeout": "no answer in time",
    "connection": "no connection",
    "in_reply": "an error inside the reply",
    "broken": "a broken reply",
    "unfinished": "an unfinished reply",
    "no_chat": "no chat endpoint",
    "unknown": "unknown",
}
_ALWAYS_RETRIED: frozenset[FailureType] = frozenset({"timeout", "connection", "broken", "unfinished"})
_QUOTA_CODES = frozenset({"insufficient_quota", "billing_hard_limit_reached"})
# llama.cpp answers 500 when it was started without --jinja or when its template rejects the messages. A retry gets the
# same answer.
_TEMPLATE = re.compile(r"jinja", re.IGNORECASE)
_ABOUT_TOOLS = re.compile(r"tool|function", re.IGNORECASE)
_REFUSED_STATUSES = frozenset({400, 413, 415, 422, 501})
_DENIED_STATUSES = frozenset({401, 402, 403, 404})


def is_transient(failure: AttemptFailure) -> bool:
    """Return whether the same request may succeed later."""
    if failure.is_final or failure.codes & _QUOTA_CODES or is_too_long(failure):
        return False
    if failure.kind in _ALWAYS_RETRIED:
        return True
    if failure.kind == "status":
        return is_retried_status(failure.status or 0) and not _is_template_fault(failure)
    if failure.kind == "in_reply":
        status = _embedded_status(failure)
        # Without a status, treat it like a broken connection: most servers send only a message here.
        return "invalid_request_error" not in failure.codes if status is None else is_retried_status(status)
    return False


def is_rate_limit(failure: AttemptFailure) -> bool:
    """Return whether the failure is a rate limit for all requests, and not a problem of this request."""
    status = _embedded_status(failure) if failure.kind == "in_reply" else failure.status
    return status == 429 or failure.wait_s is not None


def build_no_chat(reply: object) -> AttemptFailure:
    """Return the failure for a JSON value that is no chat reply: an error, if it has an HTTP status."""
    failure = AttemptFailure("in_reply", body=reply)
    return failure if _embedded_status(failure) else AttemptFailure("no_chat", body=reply)


def find_retry_delay(body: object) -> float | None:
    """Return the seconds in the `retryDelay` of an error's details: Gemini sends no header."""
    details = body.get("details") if isinstance(body, dict) else None
    delays = (
        [detail.get("retryDelay") for detail in details if isinstance(detail, dict)]
        if isinstance(details, list)
        else []
    )
    found = next((match for delay in delays if (match := re.fullmatch(r"(\d{1,6}(?:\.\d{1,9})?)s", str(delay)))), None)
    return float(found[1]) if found is not None else None


def build_error(
    failure: AttemptFailure, endpoint: FailedEndpoint, *, attempts: int = 1, max_wait_s: float | None = None
) -> ModelUnavailable:
    """Return the error for a request without any reply.

    `attempts`: number of attempts. `max_wait_s`: set when the server requests a longer wait.
    """
    sentence = _build_sentence(failure, endpoint)
    if max_wait_s is not None and failure.wait_s is not None:
        sentence += f"; it requests a wait of {failure.wait_s:.0f} s, and the limit is {max_wait_s:.0f} s"
    if attempts > 1:
        sentence += f" (tried {attempts} times)"
    if is_too_long(failure):
        return ContextWindowExceeded(sentence, find_limit_tokens(failure))
    if _is_refusal(failure):
        return ModelRefused(sentence, _detail(failure, endpoint))
    if _is_denial(failure):
        return ModelDenied(sentence, is_unknown_model=failure.status == 404)
    return ModelBlocked(sentence) if is_rate_limit(failure) else ModelUnavailable(sentence)


def build_refusal(failure: AttemptFailure, endpoint: FailedEndpoint) -> ModelRefused:
    """Return the error for one request that the server denied, although it accepts others."""
    status = f" with status {failure.status}" if failure.status else ""
    detail = _detail(failure, endpoint)
    return ModelRefused(
        f"{endpoint.subject} refuses this request{status}, and accepts others: change its content, or lower its limits "
        f"of tokens ({detail})",
        detail,
    )


def build_interruption(failure: AttemptFailure, endpoint: FailedEndpoint) -> ModelUnavailable:
    """Return the error for a reply that was partly returned: ModelInterrupted, or ContextWindowExceeded when it grew
    too long.
    """
    sentence = _build_sentence(failure, endpoint)
    if is_too_long(failure):
        return ContextWindowExceeded(sentence, find_limit_tokens(failure))
    return ModelInterrupted(sentence)


# --- Too long ---------------------------------------------------------------------------------------------------------

_TOO_LONG_CODES = frozenset(
    {
        "context_length_exceeded",
        "exceed_context_size_error",
        "model_max_prompt_tokens_exceeded",
        "tokens_limit_reached",
        "request_too_large",
    }
)
# Servers say it in their own words. The subject and the verb are in one sentence, and neither a time, a limit of the
# reply nor another kind of input is between them.
_OTHER_LIMIT = r"deadline|max_|completion|output|\bper\b|\brate|quota|image|file|audio|video|schema|tool|function|valid"
_GAP = rf"(?:(?!{_OTHER_LIMIT})(?:[^.:;\n\"{{}}]|\.\d)){{0,80}}?"
_TOO_LONG = re.compile(
    r"maximum (?:context|model|prompt) length|context[ _]length[ _]exceeded|"
    r"exceeds? (?:the |model'?s? )?(?:maximum |available |max )?context"
    r"|exceeded max context length|context window of \d|prompt (?:is )?too long|context length is only \d"
    r"|reduce the length of the (?:messages|prompt|input)|input token count.{0,40}exceeds"
    r"|greater than the context length"
    r"|longer than the (?:model's )?context|context (?:the )?overflows|inputs. tokens \+ .max_new_tokens. must be"
    rf"|(?:prompt|input|context|messages|history|total tokens){_GAP}"
    r"(?:too (?:long|large)|exceed|overflow|must be less than max|only supports up to|should be \[)"
    rf"|exceed{_GAP}(?:model token limit|max message tokens)|too many (?:input |prompt )?tokens(?! per)"
    r"|max_tokens must be at least 1, got -\d",
    re.IGNORECASE,
)
# Each pattern captures the limit. Numbers that may be the request's own length are not matched.
_LIMITS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"maximum (?:context|model|prompt) length (?:is|of) (?:only )?(\d{1,12})\b",
        r"context (?:length|window|size) \((\d{1,12})\b",
        r"context (?:length|window|size) (?:is|of)(?: only)? (\d{1,12})\b",
        r"> (\d{1,12}) maximum",
        r"maximum number of tokens allowed \((\d{1,12})\b",
        r"\b(\d{1,12}) maximum context length",
        r"max_new_tokens. must be <= (\d{1,12})\b",
        r"token limit: (\d{1,12})\b",
        r"length should be \[\d+, (\d{1,12})\]",
        r"max_seq_len \((\d{1,12})\)",
        r"maximum length of (\d{1,12})\b",
        r"only supports up to (\d{1,12})\b",
    )
)
_LIMIT_KEYS = ("n_ctx", "max_model_len", "context_length", "max_context_length")


def is_too_long(failure: AttemptFailure) -> bool:
    """Return whether the request exceeds the context window. Knows the messages of OpenAI, llama.cpp, vLLM, Ollama and
    compatible servers.
    """
    status = failure.status if failure.kind == "status" else _embedded_status(failure)
    if failure.kind not in ("status", "in_reply") or status in (401, 403, 404, 429):
        return False
    return (
        bool(failure.codes & _TOO_LONG_CODES)
        or _TOO_LONG.search(_error_text(failure.body)[:MAX_SEARCHED_CHARS]) is not None
    )


def find_limit_tokens(failure: AttemptFailure) -> int | None:
    """Return the context window that the server names in its refusal, in tokens."""
    body = failure.body if isinstance(failure.body, dict) else {}
    for key in _LIMIT_KEYS:
        value = body.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    text = _error_text(failure.body)[:MAX_SEARCHED_CHARS]
    for pattern in _LIMITS:
        if (match := pattern.search(text)) is not None:
            return int(match[1]) or None
    return None


# --- Sentences --------------------------------------------------------------------------------------------------------


def _build_sentence(failure: AttemptFailure, endpoint: FailedEndpoint) -> str:
    subject = endpoint.subject
    match failure.kind:
        case "timeout":
            return f"{subject} did not answer in time: check that the server runs, or raise TOOLCREW_MODEL_TIMEOUT_S"
        case "connection":
            return (
                f"{subject} cannot be reached or interrupted its reply: {endpoint.check('OPENAI_BASE_URL')} and that "
                "the server is up"
            )
        case "broken":
            return f"{subject} interrupted its reply: try again; if it repeats, read the server's log"
        case "unfinished":
            return (
                f"{subject} ended its reply without a finish_reason: the reply was interrupted, or the address is not "
                f"a chat endpoint; {endpoint.check(_URL)}"
            )
        case "no_chat":
            about = f" ({_detail(failure, endpoint)})" if failure.body else ""
            return f"{subject} did not answer as a chat endpoint does{about}; {endpoint.check(_URL)}"
        case "status":
            return _build_status_sentence(failure, endpoint, subject)
        case "in_reply":
            return f"{subject} failed while it answered: {_detail(failure, endpoint)}"
        case _:
            return f"{subject} could not be called: {failure.name}"


_URL = "OPENAI_BASE_URL (it ends in /v1)"


def _build_status_sentence(failure: AttemptFailure, endpoint: FailedEndpoint, subject: str) -> str:
    if is_too_long(failure):
        return (
            f"{subject} refuses the request because it is longer than the context window: {_detail(failure, endpoint)}"
        )
    if failure.status in (401, 403):
        return f"{subject} refuses the API key: {endpoint.check('OPENAI_API_KEY')}"
    if failure.status == 404:
        about = f" ({_detail(failure, endpoint)})" if _is_refusal(failure) else ""
        return (
            f"{subject} does not know the model '{endpoint.model}' or the path: "
            f"{endpoint.check(f'TOOLCREW_MODEL and {_URL}')}{about}"
        )
    if failure.codes & _QUOTA_CODES:
        return (
            f"{subject} refuses the request because the account's quota is used up: check the plan and the billing "
            f"({_detail(failure, endpoint)})"
        )
    if failure.status == 429:
        return (
            f"{subject} refuses the request because of a rate limit or quota: wait, run fewer calls at once, or raise "
            "the limit "
            f"({_detail(failure, endpoint)})"
        )
    if (failure.status or 0) >= 500:
        return (
            f"{subject} failed with status {failure.status}: try again later, or check the log of the server "
            f"({_detail(failure, endpoint)})"
        )
    return f"{subject} refused the request: {_detail(failure, endpoint)}"


def _is_refusal(failure: AttemptFailure) -> bool:
    if failure.kind == "in_reply":
        return _embedded_status(failure) in _REFUSED_STATUSES or "invalid_request_error" in failure.codes
    if failure.status == 404:
        # Routers answer 404 when none of a model's hosts accepts tools.
        return _ABOUT_TOOLS.search(_error_text(failure.body)) is not None
    return failure.status in _REFUSED_STATUSES or _is_template_fault(failure)


def _is_denial(failure: AttemptFailure) -> bool:
    """Return whether a key, an account or a model's name was denied, by HTTP status or by an error inside a reply."""
    status = _embedded_status(failure) if failure.kind == "in_reply" else failure.status
    return status in _DENIED_STATUSES or bool(failure.codes & _QUOTA_CODES)


def _is_template_fault(failure: AttemptFailure) -> bool:
    return (failure.status or 0) >= 500 and _TEMPLATE.search(_error_text(failure.body)) is not None


def _embedded_status(failure: AttemptFailure) -> int | None:
    """Return the HTTP status that an error inside a reply contains as its `code`."""
    return next((int(code) for code in failure.codes if re.fullmatch(r"[45]\d\d", code)), None)


_MESSAGE_KEYS = ("message", "detail", "msg", "error_msg")


def has_message(body: dict[str, Any]) -> bool:
    """Return whether an object in place of a chunk has the message of an error."""
    return not body.get("choices") and any(body.get(key) for key in _MESSAGE_KEYS)


def _error_text(body: Any) -> str:
    """Return the server's message with the objects next to it, in which gateways put the error of their own server; the
    whole body if it has no message.
    """
    if body is None:
        return "the server gave no reason"
    message = next((body[key] for key in _MESSAGE_KEYS if body.get(key)), body) if isinstance(body, dict) else body
    inner = [part for part in body.values() if part and isinstance(part, dict | list)] if message is not body else []
    try:
        return " ".join(map(_as_text, [message, *(part for part in inner if part is not message)]))
    except RecursionError:
        return "the reason of the server is nested too deeply"


def _as_text(part: Any) -> str:
    return part if isinstance(part, str) else json.dumps(part, ensure_ascii=False, default=str)


def _detail(failure: AttemptFailure, endpoint: FailedEndpoint) -> str:
    """Return the server's message on one line. Pages that are not JSON are mentioned, not quoted."""
    text = "the answer is not JSON" if isinstance(failure.body, str) else _error_text(failure.body)
    # Remove the key before cutting the text: half a key is also a leak.
    redacted = text.replace(endpoint.secret, "***") if endpoint.secret else text
    return " ".join(redacted.split())[:MAX_DETAIL_CHARS]
