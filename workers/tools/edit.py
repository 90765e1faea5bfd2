"""edit_tool: exact replacements in a text file of the session's sandbox. A call applies all of its edits or none."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from toolcrew.contract.calls import ToolContext
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.guest_protocol import EditTextRequest
from toolcrew.contract.specs import ToolSpec
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerTool
from toolcrew.workers.tools.read import PATH_ALIASES
from toolcrew.workers.tools.text import MAX_OUTPUT_BYTES, decode, encode, show_name

MAX_EDITS = 100
TOLERANCE = "edit.tolerance"
"""Key of a context's config. `none` (default): exact match. `whitespace`: lines may differ in the blanks around them.
"""
_STRING_ALIASES = {
    "oldString": "old_string",
    "old_str": "old_string",
    "newString": "new_string",
    "new_str": "new_string",
    "replaceAll": "replace_all",
    "allow_multiple": "replace_all",
}
_OLD = {"type": "string", "description": "the text to replace; empty: create the file"}
_NEW = {"type": "string"}
_ALL = {"type": "boolean", "default": False}

_EDIT = ToolSpec(
    name="edit_tool",
    description=(
        "Replace text in a file. old_string must match the file exactly, with blanks and indentation, and only once; "
        "include lines around it, or set replace_all. `edits`: several edits of one file, all or none."
    ),
    parameters={
        "type": "object",
        "properties": {
            "file_path": {"type": "string", "minLength": 1},
            "old_string": _OLD,
            "new_string": _NEW,
            "replace_all": _ALL,
            "expected_count": {
                "type": "integer",
                "minimum": 1,
                "description": "replace exactly so many occurrences; with any other number nothing is replaced",
                "x-hidden": True,
            },
            "edits": {
                "type": "array",
                "minItems": 1,
                "maxItems": MAX_EDITS,
                "items": {
                    "type": "object",
                    "properties": {"old_string": _OLD, "new_string": _NEW, "replace_all": _ALL},
                    "required": ["old_string", "new_string"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["file_path"],
        "additionalProperties": False,
    },
    requires_permission=True,
    aliases={**PATH_ALIASES, **_STRING_ALIASES},
)


def check_form(arguments: Mapping[str, Any]) -> str | None:
    """Return an error message unless the call has either one edit or a list of edits."""
    single = [name for name in ("old_string", "new_string", "expected_count") if name in arguments]
    if "edits" in arguments:
        is_mixed = single or arguments.get("replace_all")
        return (
            "give either edits, or old_string and new_string with replace_all and expected_count, not both"
            if is_mixed
            else None
        )
    missing = [name for name in ("old_string", "new_string") if name not in arguments]
    return f"{' and '.join(missing)} missing: give old_string and new_string, or edits" if missing else None


def _edit(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    path = arguments["file_path"]
    edits = arguments.get("edits") or [{name: arguments[name] for name in ("old_string", "new_string", "replace_all")}]
    body = encode(json.dumps(edits, ensure_ascii=False), "an edit")
    request = EditTextRequest(
        path=path,
        expected_count=arguments.get("expected_count"),
        tolerance=_tolerance(environment.context),
        max_bytes=MAX_OUTPUT_BYTES,
        timeout_s=environment.context.timeout_s,
    )
    reply = environment.run(request, body)
    answer = reply.answer
    shown = decode(reply.streams.get("file", b""))
    verb = "created" if answer.created else f"replaced {answer.replaced} in"
    metadata: dict[str, JsonValue] = {
        "size_bytes": answer.size,
        "created": answer.created,
        "replaced": answer.replaced,
        "encoding": answer.encoding,
    }
    return Outcome(f"{verb} {show_name(path)}\n{shown}".rstrip("\n"), metadata)


def _tolerance(context: ToolContext) -> Any:
    tolerance = context.config.get(TOLERANCE, "none")
    if tolerance not in ("none", "whitespace"):
        raise ToolFailure(ErrorCode.CONFIG_MISSING, f"the setting {TOLERANCE} is invalid: use none or whitespace")
    return tolerance


EDIT_TOOL = WorkerTool(_EDIT, _edit, (check_form,))
