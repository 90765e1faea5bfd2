"""Build docs/tools.md from the specs of the built-in tools."""

from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.tool_pages import render_tool
from toolcrew.workers.tools.builtin import build_registry
from toolcrew.workers.web.webfetch import WEBFETCH_SPEC
from toolcrew.workers.web.websearch import WEBSEARCH_SPEC

PAGE = "tools.md"
INTRO = """\
# The built-in tools

`scripts/reference.py` makes this page. `toolcrew tools show NAME` prints the same for a running pool. `skill_tool` exists only if skills are installed:
[Add a tool](add-a-tool.md#skills).

**Results.** Every call returns one result: `success`, `output`, `error`, `error_code`, `metadata`, `truncated`, `spill`. If `output` is only a part,
`truncated` is true, and `spill` names the file in `/output` that has the whole output. After a success, a model reads the output. After a failure, it
reads `Error [CODE]: sentence`, which also says what to do next, and then the output that the call had produced. Nothing is omitted silently: a line in
[brackets] reports text that was cut or skipped and values that were changed. It names the call that returns the rest. Output of commands is shown as a terminal shows it: colors and overwritten parts of a line are removed. Bytes that
are not UTF-8 are shown as U+FFFD and counted (`metadata.not_utf8_bytes`). The file of `spill` has the bytes of the program.

**Parameters.** Tools accept the parameter names of other agents and list them in `metadata.aliases_used`. An unknown name is refused, with the nearest
valid name. Values must match the schema. In the [tags dialect](agents.md#which-dialect-should-i-use) all values are text: a text is converted to the type
of the schema if no information is lost (`"5"` to 5). A JSON text for a list or object is read in every dialect. `null` for an optional parameter that does not admit null means absent. `5.0` and `1e3` are
integers. A default that does not fit its schema is ignored.

**Flags.** `requires_permission`: a call of a model needs [approval](approvals.md). `read_only`: the call changes nothing, and consecutive calls may run
in parallel. `idempotent`: the call may run again after a process died.

**Files.** `/workspace` belongs to the session; relative paths start there until a `cd`. `/tmp` is writable too. `/output` is read-only and contains long
outputs and logs of background jobs. No link, `..` or concurrent change leads outside.

| code | meaning |
|---|---|
"""
MEANINGS = {
    ErrorCode.TOOL_NOT_FOUND: "no tool has that name; `metadata.nearest` has the three most similar names",
    ErrorCode.TOOL_DISABLED: "an operator has disabled the tool",
    ErrorCode.INVALID_ARGUMENTS: "the arguments do not match the schema or fail a check of the tool; nothing has run",
    ErrorCode.PERMISSION_DENIED: "a person, a rule, the tenant's policy or the mode of the file does not allow the call",
    ErrorCode.SECURITY_REFUSED: (
        "the command is catastrophic or forbidden, or the address is forbidden; no approval allows it"
    ),
    ErrorCode.PATH_NOT_ALLOWED: "the path leads outside the allowed folders, or is a device, a pipe or a socket",
    ErrorCode.FILE_NOT_FOUND: "the path does not exist; the sentence names similar paths",
    ErrorCode.FILE_EXISTS: "the file exists already, and the mode is create",
    ErrorCode.IS_DIRECTORY: "the path is a folder, but the tool needs a file; read_tool lists folders",
    ErrorCode.NOT_A_DIRECTORY: "a part of the path is a file",
    ErrorCode.BINARY_FILE: "the file is not text; the sentence has its type and size",
    ErrorCode.FILE_TOO_LARGE: "the file exceeds a limit; the sentence has the limit",
    ErrorCode.NO_SPACE: "the disk is full; the old file is unchanged",
    ErrorCode.OFFSET_OUT_OF_RANGE: "the file has fewer lines; the sentence has their number",
    ErrorCode.NO_MATCH: (
        "the text to replace is not in the file; the sentence says why, and shows the most similar text"
    ),
    ErrorCode.AMBIGUOUS_MATCH: "the text occurs more than once; the sentence has the line numbers",
    ErrorCode.NO_CHANGE: "old and new text are the same",
    ErrorCode.STALE_FILE: (
        "the file has changed since this session read it; the error shows the difference, and the same call then "
        "succeeds"
    ),
    ErrorCode.INVALID_PATTERN: "the pattern is invalid; the sentence has the position of the mistake",
    ErrorCode.TIMEOUT: (
        "the call reached its time limit, and all processes that it started were killed; the result has the output "
        "until then"
    ),
    ErrorCode.CANCELLED: "the caller cancelled the call or disconnected",
    ErrorCode.CONFIG_MISSING: "a setting is missing; the sentence names it",
    ErrorCode.NETWORK_ERROR: "the connection failed; the sentence has the cause: name lookup, refusal, TLS or reset",
    ErrorCode.HTTP_ERROR: "the server answered with an error",
    ErrorCode.SESSION_NOT_FOUND: "the session was closed or has expired",
    ErrorCode.SESSION_BUSY: "the session runs a call or a background job and cannot be forked now",
    ErrorCode.SANDBOX_UNAVAILABLE: (
        "no sandbox is available, or the sandbox died; a lost sandbox is reported once and then replaced"
    ),
    ErrorCode.BROKER_UNAVAILABLE: "Redis does not answer",
    ErrorCode.BROKER_FULL: "the memory of Redis is full",
    ErrorCode.UNKNOWN_TENANT: "no tenant of that name is registered",
    ErrorCode.UNAUTHENTICATED: "the API key is unknown, revoked or expired",
    ErrorCode.RATE_LIMITED: (
        "too many calls of the tenant wait, or no slot became free in time; `metadata.retry_after_s` says when to "
        "try again"
    ),
    ErrorCode.QUOTA_EXCEEDED: "the tenant has reached a limit of its policy, or its part of the memory of Redis",
    ErrorCode.BUDGET_EXCEEDED: "a budget of the tenant is used up; `metadata.resets_at` says when it resets",
    ErrorCode.HOST_LOST: "the session's host was lost, and the call was not run",
    ErrorCode.OUTCOME_UNKNOWN: "the call may have run or not",
    ErrorCode.RESULT_EXPIRED: "a call with this id or key ran before, and its result is no longer stored; it was not "
    "run again",
    ErrorCode.ENVELOPE_REFUSED: (
        "the call, result or record is not signed with the deployment's secret, or is of another release"
    ),
    ErrorCode.INTERNAL: "a bug in toolcrew; the log has the error with the id of the call",
}


def build_page() -> str:
    """Return the text of the page."""
    specs = [spec for spec in build_registry().specs() if spec.audience == "model"]
    tools = sorted([*specs, WEBFETCH_SPEC, WEBSEARCH_SPEC], key=lambda spec: spec.name)
    rows = "".join(f"| `{code.value}` | {MEANINGS[code]} |\n" for code in ErrorCode)
    return INTRO + rows + "\n" + "\n".join(render_tool(spec) for spec in tools)
