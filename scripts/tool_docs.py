#!/usr/bin/env python3
"""Writes docs/tools.md from the specs of the built-in tools, so that the page says what the tools do.

    .venv/bin/python scripts/tool_docs.py [--check]

With --check nothing is written: exit status 1 when the page is not what the specs say.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from contract.errors import ErrorCode  # noqa: E402
from contract.tool_pages import render_tool  # noqa: E402
from workers.tools.builtin import build_registry  # noqa: E402
from workers.web.webfetch import WEBFETCH_SPEC  # noqa: E402
from workers.web.websearch import WEBSEARCH_SPEC  # noqa: E402

PAGE = ROOT / "docs" / "tools.md"
INTRO = """\
# The built-in tools

Made from the tools' own specs by `scripts/tool_docs.py`; `toolcrew tools show NAME` prints the same of a running pool. How to write one of
your own: [Add a tool](add-a-tool.md). `skill_tool` is there where there are skills: [Add a tool](add-a-tool.md#skills).

Every call gives one result: `success`, `output`, `error`, `error_code`, `metadata`, `truncated`, `spill`. A model reads the output, or
`Error [CODE]: sentence` with its next move and what was printed until then. Nothing is left out silently: what was cut, skipped, clamped or
guessed stands in a line in [brackets], with the call that gets the rest. Names of parameters that other agents use are understood and noted
in `metadata.aliases_used`; an unknown name is refused, with the nearest known one. Values are checked against the schema as they are;
only calls written as text (tags) have their strings converted, where that is exact.

Files: `/workspace` (the session's own, where relative paths start until a `cd`), `/tmp`, and `/output`, which can only be read: long outputs and
logs of background jobs. Every path is resolved by the guest, component by component, on open directories: no link, `..` or swap leads out.

| code | means |
|---|---|
"""
MEANINGS = {
    ErrorCode.TOOL_NOT_FOUND: "no tool of that name; `metadata.nearest` has the three most like it",
    ErrorCode.TOOL_DISABLED: "an operator has switched the tool off",
    ErrorCode.INVALID_ARGUMENTS: "the arguments do not fit the schema or a check of the tool; nothing has run",
    ErrorCode.PERMISSION_DENIED: "refused by a person, a rule, the tenant's policy, or the file's own mode",
    ErrorCode.SECURITY_REFUSED: "a catastrophic or forbidden command, or a forbidden address; no approval lifts it",
    ErrorCode.PATH_NOT_ALLOWED: "the path leads out of the allowed folders, or is a device, a pipe, a socket",
    ErrorCode.FILE_NOT_FOUND: "nothing there; the sentence names what is like it",
    ErrorCode.FILE_EXISTS: "mode create, and the file exists",
    ErrorCode.IS_DIRECTORY: "a folder where a file is needed; read_tool lists it",
    ErrorCode.NOT_A_DIRECTORY: "a part of the path is a file",
    ErrorCode.BINARY_FILE: "not text; type and size are told",
    ErrorCode.FILE_TOO_LARGE: "beyond a limit that is told",
    ErrorCode.NO_SPACE: "the disk is full; the old file is intact",
    ErrorCode.OFFSET_OUT_OF_RANGE: "the file has fewer lines; their number is told",
    ErrorCode.NO_MATCH: "the text to replace is not in the file; the sentence says why, and what comes closest",
    ErrorCode.AMBIGUOUS_MATCH: "it is there more than once; line numbers are told",
    ErrorCode.NO_CHANGE: "old and new text are the same",
    ErrorCode.STALE_FILE: (
        "the file has changed since this session saw it; the difference is told, and the same call then passes"
    ),
    ErrorCode.INVALID_PATTERN: "no valid pattern; the place of the mistake is told",
    ErrorCode.TIMEOUT: "the limit was reached and everything the call started was killed; what was printed is there",
    ErrorCode.CANCELLED: "whoever asked has left",
    ErrorCode.CONFIG_MISSING: "a setting is missing, and named",
    ErrorCode.NETWORK_ERROR: "no connection: name, refusal, TLS or reset is said",
    ErrorCode.HTTP_ERROR: "the server answered with an error",
    ErrorCode.SESSION_NOT_FOUND: "the session was closed, or its time was over",
    ErrorCode.SANDBOX_UNAVAILABLE: "no sandbox could be had, or it died; said once, then a fresh one is made",
    ErrorCode.BROKER_UNAVAILABLE: "Redis does not answer",
    ErrorCode.UNKNOWN_TENANT: "no tenant of that name is registered",
    ErrorCode.UNAUTHENTICATED: "the API key is none, was revoked or has expired",
    ErrorCode.RATE_LIMITED: (
        "the tenant has too many calls waiting, or none became free in time; `metadata.retry_after_s` tells when to "
        "try again"
    ),
    ErrorCode.QUOTA_EXCEEDED: "the tenant has all that its policy gives it",
    ErrorCode.HOST_LOST: "the session's host is gone, and the call was not run",
    ErrorCode.OUTCOME_UNKNOWN: "the call may or may not have acted",
    ErrorCode.ENVELOPE_REFUSED: "call, result or record was not signed with our secret, or is of another release",
    ErrorCode.INTERNAL: "a bug of ours; the log has it under the call's id",
}


def build_page() -> str:
    """The whole page."""
    specs = [spec for spec in build_registry().specs() if spec.audience == "model"]
    tools = sorted([*specs, WEBFETCH_SPEC, WEBSEARCH_SPEC], key=lambda spec: spec.name)
    rows = "".join(f"| `{code.value}` | {MEANINGS[code]} |\n" for code in ErrorCode)
    return INTRO + rows + "\n" + "\n".join(render_tool(spec) for spec in tools)


def main() -> int:
    page = build_page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page)
        return 0
    if PAGE.is_file() and PAGE.read_text() == page:
        return 0
    print("docs/tools.md is not what the specs say: run .venv/bin/python scripts/tool_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
