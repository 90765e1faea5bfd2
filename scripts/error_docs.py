#!/usr/bin/env python3
"""Writes docs/errors.md from the closed codes: what each means, who is told, what the API answers, what to do.

    .venv/bin/python scripts/error_docs.py [--check]

With --check nothing is written: exit status 1 when the page is not what the codes say, or a code has no words.
"""

import sys
from pathlib import Path
from typing import get_args

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from contract.errors import OPERATOR_CODES, ErrorCode, RefusalReason  # noqa: E402
from orchestrator.http.problems import ApiCode, status_of  # noqa: E402
from scripts.kept_pages import keep_page  # noqa: E402
from scripts.tool_docs import MEANINGS  # noqa: E402

PAGE = ROOT / "docs" / "errors.md"
INTRO = """\
# Errors

Made from the closed sets of codes by `scripts/error_docs.py`. A code never changes what it means; the sentence beside it says what to do next.

Three kinds of failure are told apart everywhere. The **model's**: it reads `Error [CODE]: sentence` and goes on. The **operator's**: the
infrastructure is to blame, the call is repeated if its tool is idempotent, and then reported as such, never as a command's output. The
**developer's**: a bug of ours, loud, `INTERNAL`.

## Codes of calls

In `ToolResult.error_code`, in the `code` of a problem of the API, and in the `error` of commands with `--json`.

`FAILURE` in Flower is red, and Flower's metrics count it as `task-failed`: the infrastructure failed the call. `SUCCESS` is green: the tool gave the model an
answer, even if the answer is an error.

| code | told | HTTP | Flower | means | what to do |
|---|---|---|---|---|---|
"""
MODEL = "the next move is the model's; nothing is wrong with the deployment"
DO = {
    ErrorCode.TOOL_NOT_FOUND: "check the name: `toolcrew tools list`",
    ErrorCode.TOOL_DISABLED: "`toolcrew tools list` says who turned it off, and why; `toolcrew tools enable NAME`",
    ErrorCode.PERMISSION_DENIED: (
        "an approval ([approvals.md](approvals.md)), the tenant's policy ([tenants.md](tenants.md)), or the file's mode"
    ),
    ErrorCode.SECURITY_REFUSED: "nothing: it holds whoever asks ([SECURITY.md](../SECURITY.md))",
    ErrorCode.NO_SPACE: "make room, or give the tenant a larger workspace (`toolcrew tenants set --workspace-bytes`)",
    ErrorCode.TIMEOUT: "give the call longer (`timeout`), or run it in the background",
    ErrorCode.CANCELLED: "send it again if it is still wanted",
    ErrorCode.CONFIG_MISSING: "set what the sentence names ([settings.md](settings.md))",
    ErrorCode.NETWORK_ERROR: "see whether the other side is up; `toolcrew doctor` asks the model's endpoint",
    ErrorCode.SESSION_NOT_FOUND: "open a session; give it a longer time to live if that ran out",
    ErrorCode.SANDBOX_UNAVAILABLE: "`toolcrew hosts list`, then `toolcrew doctor` on the host, and sandboxd's log",
    ErrorCode.BROKER_UNAVAILABLE: "see that Redis is up: `toolcrew doctor`",
    ErrorCode.UNKNOWN_TENANT: "`toolcrew tenants list`, or register it",
    ErrorCode.UNAUTHENTICATED: "make another key: `toolcrew keys create TENANT`",
    ErrorCode.RATE_LIMITED: "wait for `retry_after_s`; or raise the tenant's rate, or add workers",
    ErrorCode.QUOTA_EXCEEDED: "close what is open, or raise the tenant's limit (`toolcrew tenants set`)",
    ErrorCode.HOST_LOST: "send it again: it was not run ([Operations](operations.md#what-happens-when-a-process-dies))",
    ErrorCode.OUTCOME_UNKNOWN: "look whether it has acted, before it is sent again ([Operations](operations.md#what-happens-when-a-process-dies))",
    ErrorCode.ENVELOPE_REFUSED: "the same `TOOLCREW_SECRET` and release on both sides; `toolcrew doctor --deep`",
    ErrorCode.INTERNAL: "report it, with the log's lines of the call",
}
API = {
    ApiCode.NOT_FOUND: ("no such address, or nothing there that the key may see", "see `/openapi.json`"),
    ApiCode.METHOD_NOT_ALLOWED: ("the address does not take that method", "the header `Allow` says which"),
    ApiCode.MALFORMED_REQUEST: ("the body or a parameter cannot be read", "`errors` says which part"),
    ApiCode.BODY_TOO_LARGE: ("the body is larger than the address takes", "send less, or files one by one"),
    ApiCode.UNSUPPORTED_MEDIA_TYPE: (
        "the body is of another type than the address takes",
        "send the type that `/openapi.json` names",
    ),
    ApiCode.TOO_SLOW: ("the body did not come in time", "send it again, faster"),
    ApiCode.TOO_MANY_REQUESTS: ("the key has made too many requests", "wait for `Retry-After`; `TOOLCREW_API_RATE`"),
    ApiCode.CONFLICT: ("what is there does not allow it now", "read it again, then decide"),
    ApiCode.IDEMPOTENCY_MISMATCH: (
        "the idempotency key was used for another request",
        "make a new one for each request",
    ),
    ApiCode.IDEMPOTENCY_IN_PROGRESS: ("the request of that idempotency key is still worked", "ask again in a moment"),
    ApiCode.NOT_READY: ("the service has no connection to its Redis", "see `/readyz` and its log"),
}
REASONS: dict[str, str] = {
    "malformed": "no envelope of ours: somebody else writes to the queues",
    "oversized": "larger than an envelope may be",
    "version": "another release wrote it: run neighbouring ones ([Deploy](deploy.md#upgrade))",
    "signature": "another secret signed it, or nobody with a secret ([Security](security.md))",
    "expired": "it lay in the queue beyond its deadline",
    "wrong_task": "it was sent under another tool's name",
    "wrong_tenant": "what it names is another tenant's",
    "repeated": "it came a second time; the first was taken",
}


def build_page() -> str:
    """The whole page. Raises KeyError for a code without words."""
    rows = "".join(
        (
            f"| `{code.value}` | {'operator' if code in OPERATOR_CODES else 'model'} | {status_of(code)} | "
            f"{'FAILURE' if code in OPERATOR_CODES else 'SUCCESS'} | {MEANINGS[code]} | {DO.get(code, MODEL)} |\n"
        )
        for code in ErrorCode
    )
    api = "".join(f"| `{code.value}` | {status_of(code)} | {API[code][0]} | {API[code][1]} |\n" for code in ApiCode)
    reasons = "".join(f"| `{reason}` | {REASONS[reason]} |\n" for reason in get_args(RefusalReason))
    return (
        f"{INTRO}{rows}\n## Codes of the API alone\n\nOf requests that do not get as far as the pool "
        "([api.md](api.md)).\n\n"
        f"| code | HTTP | means | what to do |\n|---|---|---|---|\n{api}\n## What workers refuse\n\nCounted by reason "
        "in `toolcrew_refused_envelopes_total` ([metrics.md](metrics.md)); nothing of it was run.\n\n| reason | means "
        f"|\n|---|---|\n{reasons}"
    )


def main() -> int:
    return keep_page(PAGE, build_page(), "the codes say")


if __name__ == "__main__":
    sys.exit(main())
