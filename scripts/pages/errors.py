"""Build docs/errors.md from the codes of the source: meaning, reader, HTTP status and remedy of each code."""

from typing import get_args

from scripts.pages.tools import MEANINGS
from toolcrew.contract.errors import OPERATOR_CODES, ErrorCode, RefusalReason
from toolcrew.orchestrator.http.problems import ApiCode, status_of

PAGE = "errors.md"
INTRO = """\
# Errors

`scripts/reference.py` makes this page from the closed sets of codes. The meaning of a code never changes. Each error has a code and a sentence that
says what to do next.

There are three kinds of failures:

- **Model**: the model reads `Error [CODE]: sentence` and continues.
- **Operator**: the infrastructure failed. toolcrew retries the call if that is safe. Otherwise it reports the failure, never as output of a
  command.
- **Developer**: a bug in toolcrew, with the code `INTERNAL`.

## Codes of calls

These codes appear in `ToolResult.error_code`, in the `code` of API problems, and in the `error` of commands with `--json`.

`FAILURE` is red in Flower, and Flower's metrics count it as `task-failed`: the infrastructure failed. `SUCCESS` is green: the tool answered the model,
even if the answer is an error.

| code | for | HTTP | Flower | meaning | what to do |
|---|---|---|---|---|---|
"""
MODEL = "nothing; the model reads the sentence and decides what to do"
DO = {
    ErrorCode.TOOL_NOT_FOUND: "check the name: `toolcrew tools list`",
    ErrorCode.TOOL_DISABLED: "see who disabled it, and why: `toolcrew tools list`; enable it: `toolcrew tools enable NAME`",
    ErrorCode.PERMISSION_DENIED: (
        "check the approval ([approvals.md](approvals.md)), the tenant's policy ([tenants.md](tenants.md)) and the "
        "mode of the file"
    ),
    ErrorCode.SECURITY_REFUSED: "nothing: no approval allows it ([SECURITY.md](../SECURITY.md))",
    ErrorCode.NO_SPACE: (
        "remove files, or give the tenant a larger workspace (`toolcrew tenants set --workspace-bytes`)"
    ),
    ErrorCode.TIMEOUT: "give the call a longer `timeout`, or run the command in the background",
    ErrorCode.CANCELLED: "send the call again if you still need it",
    ErrorCode.CONFIG_MISSING: "set the setting that the sentence names ([settings.md](settings.md))",
    ErrorCode.NETWORK_ERROR: "check that the server is up; `toolcrew doctor` checks the model server",
    ErrorCode.SESSION_NOT_FOUND: "open a new session; set a longer time to live if the session expired",
    ErrorCode.SESSION_BUSY: "fork the session between its calls; end its background jobs, or leave them in the parent",
    ErrorCode.SANDBOX_UNAVAILABLE: (
        "run `toolcrew hosts list`, then `toolcrew doctor` on the host; read the log of sandboxd"
    ),
    ErrorCode.BROKER_UNAVAILABLE: "check that Redis is up: `toolcrew doctor`",
    ErrorCode.BROKER_FULL: (
        "delete ended batches, or raise `maxmemory`; `toolcrew doctor` shows how much is used "
        "([Operations](operations.md))"
    ),
    ErrorCode.UNKNOWN_TENANT: "check the name (`toolcrew tenants list`), or register the tenant",
    ErrorCode.UNAUTHENTICATED: "create a new key: `toolcrew keys create TENANT`",
    ErrorCode.RATE_LIMITED: "wait for `retry_after_s`, raise the tenant's rate, or add workers",
    ErrorCode.QUOTA_EXCEEDED: "close sessions, delete batches, or raise the tenant's limit (`toolcrew tenants set`)",
    ErrorCode.BUDGET_EXCEEDED: (
        "wait for the reset, or raise the [budget](tenants.md#how-do-i-limit-what-a-tenant-uses)"
    ),
    ErrorCode.HOST_LOST: (
        "send the call again: it was not run ([Operations](operations.md#what-happens-when-a-process-dies))"
    ),
    ErrorCode.OUTCOME_UNKNOWN: (
        "check whether the call had effects before you send it again "
        "([Operations](operations.md#what-happens-when-a-process-dies))"
    ),
    ErrorCode.RESULT_EXPIRED: "use a new id or key to run the call again",
    ErrorCode.ENVELOPE_REFUSED: (
        "use the same `TOOLCREW_SECRET` and release on all machines; check with `toolcrew doctor --deep`"
    ),
    ErrorCode.INTERNAL: "report the bug with the log lines of the call",
}
API = {
    ApiCode.NOT_FOUND: ("the URL does not exist, or the key may not see the object", "see `/openapi.json`"),
    ApiCode.METHOD_NOT_ALLOWED: ("the URL does not accept that method", "see the header `Allow`"),
    ApiCode.MALFORMED_REQUEST: (
        "the request cannot be read: it is not valid HTTP, or its body is not JSON; fields with wrong names or values "
        "are `INVALID_ARGUMENTS`",
        "correct the form of the request",
    ),
    ApiCode.BODY_TOO_LARGE: ("the body exceeds the limit of the URL", "send less data, or one file per request"),
    ApiCode.UNSUPPORTED_MEDIA_TYPE: (
        "the URL does not accept the media type of the body",
        "send the media type in `/openapi.json`",
    ),
    ApiCode.TOO_SLOW: ("the body did not arrive in time", "send it again over a faster connection"),
    ApiCode.TOO_MANY_REQUESTS: (
        "the key has sent too many requests",
        "wait for `Retry-After`, or raise `TOOLCREW_API_RATE`",
    ),
    ApiCode.CONFLICT: ("the current state does not allow the request", "read the object again, then decide"),
    ApiCode.IDEMPOTENCY_MISMATCH: (
        "the idempotency key was used for a different request",
        "use a new key for each request",
    ),
    ApiCode.IDEMPOTENCY_IN_PROGRESS: ("the first request with that idempotency key still runs", "try again later"),
    ApiCode.NOT_READY: ("the service has no connection to Redis", "see `/readyz` and the log of the service"),
}
REASONS: dict[str, str] = {
    "malformed": "the message is not an envelope: another program writes to the queues",
    "oversized": "the message exceeds the size limit of an envelope",
    "version": "an incompatible release wrote the message: run neighboring releases only ([Deploy](deploy.md#upgrade))",
    "signature": "the signature is missing or made with another secret ([Security](security.md))",
    "expired": "the message waited in the queue beyond its deadline",
    "wrong_task": "the message was sent under the name of another tool",
    "wrong_tenant": "the message names an object of another tenant",
    "repeated": "the message arrived again after a worker had accepted it",
}


def _reader(code: ErrorCode) -> str:
    if code is ErrorCode.INTERNAL:
        return "developer"
    return "operator" if code in OPERATOR_CODES else "model"


def build_page() -> str:
    """Return the text of the page. Raises KeyError for a code without text."""
    rows = "".join(
        (
            f"| `{code.value}` | {_reader(code)} | {status_of(code)} | "
            f"{'FAILURE' if code in OPERATOR_CODES else 'SUCCESS'} | {MEANINGS[code]} | {DO.get(code, MODEL)} |\n"
        )
        for code in ErrorCode
    )
    api = "".join(f"| `{code.value}` | {status_of(code)} | {API[code][0]} | {API[code][1]} |\n" for code in ApiCode)
    reasons = "".join(f"| `{reason}` | {REASONS[reason]} |\n" for reason in get_args(RefusalReason))
    return (
        f"{INTRO}{rows}\n## Codes of the API only\n\nThe API rejects these requests before they reach the pool "
        "([api.md](api.md)).\n\n"
        f"| code | HTTP | meaning | what to do |\n|---|---|---|---|\n{api}\n## Messages that workers refuse\n\nWorkers "
        "never run these messages. The metric `toolcrew_envelope_refusals_total` ([metrics.md](metrics.md)) counts "
        f"them by reason.\n\n| reason | meaning |\n|---|---|\n{reasons}"
    )
