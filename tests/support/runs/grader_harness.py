"""Graded items, and a pool whose sandboxes answer for the agent and for its grader."""

import io
import tarfile
from typing import Any

from tests.support.runs.item_harness import ItemHarness
from toolcrew.contract.calls import SandboxInfo, ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.store.batches import BatchItem, Grader


def with_grader(item: BatchItem, **fields: Any) -> BatchItem:
    """Return the item with a grader."""
    values = {"command": "grade", "artifacts": ("*.py",), "timeout_s": 60.0, **fields}
    return item.model_copy(update={"grader": Grader.model_validate(values), "task": "t"})


def build_tar(*entries: tuple[str, bytes, bytes]) -> bytes:
    """Return an archive of (name, type, content)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, kind, content in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.size = kind, len(content)
            entry.linkname = "/etc/passwd" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


class Sandboxes:
    """Answers of a pool: the agent's sandbox has `files`, and the grader's command ends with `code`."""

    def __init__(self, harness: ItemHarness, code: int = 0, reward: bytes | None = None, **exec_fields: Any) -> None:
        self.harness = harness
        self.code = code
        self.reward = reward
        self.exec_fields = exec_fields
        self.listing = b"5 1.0 a.py\0"
        self.archive = build_tar(("a.py", tarfile.REGTYPE, b"hello"))
        self.graded: list[str | None] = []
        self.imported = b""
        self.sandbox = SandboxInfo(id="s", generation=1, rebuilt=False)
        harness.answers |= {
            "exec": self.exec,
            "export": lambda call, _: self.blob(call, self.archive),
            "import": self.take,
            "read_file": self.read,
        }

    def blob(self, call: ToolCall, data: bytes, **metadata: Any) -> ToolResult:
        self.harness.blobs.kept[f"b-{call.id}"] = data
        return ToolResult(
            call_id=call.id,
            name=call.name,
            success=True,
            metadata=metadata,
            blob=f"b-{call.id}",
            sandbox=self.sandbox,
        )

    def exec(self, call: ToolCall, context: ToolContext) -> ToolResult:
        argv: Any = call.arguments["argv"]
        facts = {"returncode": 0, "timed_out": False, "stdout_bytes": 0}
        if "find" in argv:
            return self.blob(call, self.listing, **{**facts, "stdout_bytes": len(self.listing)})
        if argv[-1] == "grade":
            self.graded.append(context.session)
            return self.blob(call, b"out", **{**facts, "returncode": self.code, "stdout_bytes": 3, **self.exec_fields})
        return self.blob(call, b"x", **facts)

    def take(self, call: ToolCall, context: ToolContext) -> ToolResult:
        self.imported = self.harness.blobs.kept[str(context.blob)]
        return self.blob(call, b"")

    def read(self, call: ToolCall, _: ToolContext) -> ToolResult:
        if self.reward is None:
            return ToolResult.failed(call, ErrorCode.FILE_NOT_FOUND, "no such file")
        return self.blob(call, self.reward)
