"""What of a guest's last header goes on to the worker: the documented fields of its op, and nothing that only sandboxd may say."""

from collections.abc import Mapping
from typing import Any

_DONE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "ping": (),
    "attest": ("processes", "zombies", "jobs", "entries", "workspace", "python", "programs"),
    "exec": (
        "exit_code",
        "signal",
        "timed_out",
        "cancelled",
        "oom",
        "run_s",
        "streams",
        "pipe_status",
        "state",
        "spill",
        "spill_failed",
        "live",
    ),
    "job_start": ("job", "streams"),
    "job_poll": ("job", "streams"),
    "job_input": ("job", "pending"),
    "job_kill": ("job", "streams"),
    "job_list": ("jobs",),
    "read_text": (
        "kind",
        "size",
        "lines",
        "is_counted",
        "count",
        "is_out_of_room",
        "cuts",
        "encoding",
        "has_bom",
        "is_guess",
        "is_damaged",
        "newline",
        "final_newline",
        "type",
        "width",
        "height",
        "entries",
    ),
    "read_file": ("size",),
    "write_file": ("created", "size", "mode_bits"),
    "write_text": ("created", "size", "mode_bits", "written", "lines", "encoding"),
    "edit_text": ("created", "size", "mode_bits", "replaced", "encoding"),
    "glob": ("total", "shown", "cut", "ignored", "unreadable", "partial", "bad_rules"),
    "grep": (
        "engine",
        "is_file",
        "matches",
        "files",
        "shown",
        "shown_files",
        "cut",
        "cut_lines",
        "searched",
        "ignored",
        "large",
        "large_names",
        "binary",
        "binary_names",
        "unreadable",
        "unreadable_names",
        "bad_rules",
        "partial",
    ),
}
_STREAMS: Mapping[str, frozenset[str]] = {
    "exec": frozenset({"stdout", "stderr", "merged", "live", "live_stderr"}),
    "job_start": frozenset({"merged"}),
    "job_poll": frozenset({"merged"}),
    "job_kill": frozenset({"merged"}),
    "read_text": frozenset({"file"}),
    "read_file": frozenset({"file"}),
    "write_text": frozenset({"file"}),
    "edit_text": frozenset({"file"}),
    "glob": frozenset({"lines"}),
    "grep": frozenset({"lines"}),
}
_KILL_FIELDS = ("signalled", "survivors", "method", "ms")
_KILL_METHODS = ("tree", "all")
_MESSAGE_CHARS = 4096
_WORDS_CHARS = 200


def has_stream(op: str, stream: object) -> bool:
    """Whether a request of that op may be answered with data of that stream."""
    return isinstance(stream, str) and stream in _STREAMS.get(op, ())


def build_done(op: str, header: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a request of that op. What the protocol does not know is dropped: a guest cannot speak for sandboxd."""
    done: dict[str, Any] = {"ev": "done"}
    if header.get("error") is not None:
        done["error"] = _build_error(header["error"])
    else:
        done |= {name: header[name] for name in _DONE_FIELDS[op] if name in header}
    if "kill" in header:
        done["kill"] = _build_kill(header["kill"])
    return done


def count_survivors(header: Mapping[str, Any]) -> int:
    """Processes that outlived the call's kill. A report that is not plainly "none" counts as one."""
    kill = header.get("kill")
    if kill is None:
        return 0
    count = kill.get("survivors", 0) if isinstance(kill, dict) else 1
    return count if isinstance(count, int) else 1


def build_words(text: object) -> str:
    """A guest's own words, short and in printable ASCII, fit for a log and a sentence."""
    return str(text)[:_WORDS_CHARS].encode("unicode_escape").decode("ascii")[:_WORDS_CHARS]


def _build_error(error: object) -> dict[str, Any]:
    if not isinstance(error, dict):
        return {"code": "INTERNAL", "message": "the guest failed and did not say how"}
    counts = {name: error[name] for name in ("size", "lines") if isinstance(error.get(name), int)}
    return {"code": str(error.get("code"))[:64], "message": str(error.get("message"))[:_MESSAGE_CHARS], **counts}


def _build_kill(kill: object) -> dict[str, Any] | None:
    if not isinstance(kill, dict) or kill.get("method") not in _KILL_METHODS:
        return None
    return {name: kill[name] for name in _KILL_FIELDS if name in kill}
