"""Records that cross processes, in the format of this release.

`python -m tests.support.records.wire_records` prints the records. Copied into the tree of an older release, the module prints the
records of that release. So the module may use only names that both releases have.
"""

import json
import sys

from toolcrew.contract.call_events import encode_event
from toolcrew.contract.calls import Clocks, SandboxInfo, ToolCall, ToolContext, ToolResult
from toolcrew.contract.envelope import encode_call, encode_result
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.hosts import HostReport
from toolcrew.contract.registry import Switch, seal_switch
from toolcrew.contract.run_spec import RunBody
from toolcrew.contract.session_locations import LocationState, SessionLocation
from toolcrew.contract.signing import ResultSeal, SigningKeys
from toolcrew.contract.specs import Catalog, ToolSpec, seal_catalog
from toolcrew.contract.tenancy import TenantPolicy, seal_policy
from toolcrew.store.batches import BatchDefaults, BatchItem, BatchRecord, BatchState, seal_item
from toolcrew.store.call_records import CallRecord, CallState

KEYS = SigningKeys.of("a secret of the wire fixtures")
CALL = ToolCall(id="call-1", name="bash_tool", arguments={"command": "echo 'a\u4e2d'", "timeout": 5})
CONTEXT = ToolContext(tenant="acme", run="run-1", session="s-1", sent_at=1000.0, deadline_at=1060.0, timeout_s=30.0)
RESULT = ToolResult(
    call_id="call-1",
    name="bash_tool",
    success=False,
    output="out",
    error="it did not go",
    error_code=ErrorCode.TIMEOUT,
    clocks=Clocks(queued_s=0.1, sandbox_s=0.2, run_s=0.3),
    sandbox=SandboxInfo(id="abc", generation=2, rebuilt=True),
)
REPORT = HostReport(
    host="a",
    queue="host.a.b1",
    worker="w1",
    kind="sandbox",
    slots=16,
    busy=1,
    images=("i",),
    started_at=1.0,
    reported_at=2.0,
)
SPEC = ToolSpec(name="bash_tool", description="Runs a command.", parameters={"type": "object", "properties": {}})


def build_records() -> dict[str, str]:
    """Return the text of each record by name."""
    batch = BatchRecord(
        state=BatchState.IN_PROGRESS, total=3, sha256="00", concurrency=4, defaults=BatchDefaults(), created_at=1.0
    )
    item = BatchItem(custom_id="one", line=1, url="/v1/agent/runs", work=RunBody(instruction="go"))
    return {
        "call": encode_call(CALL, CONTEXT, KEYS),
        "result": json.dumps(encode_result(RESULT, seal=ResultSeal(KEYS, "acme"))),
        "event": encode_event("output", {"stream": "stdout", "text": "x"}).decode(),
        "host": REPORT.model_dump_json(),
        "tenant": seal_policy(KEYS, "acme", TenantPolicy(weight=2)),
        "switch": seal_switch(KEYS, "bash_tool", Switch(by="root", at=1.0, reason="not today")),
        "place": SessionLocation(state=LocationState.OPEN, queue="host.a.b1", fence=3).model_dump_json(),
        "ledger": CallRecord(state=CallState.DONE, tool="bash_tool").model_dump_json(),
        "catalog": seal_catalog(KEYS, "sandbox", Catalog(tools=(SPEC,))),
        "batch": batch.model_dump_json(),
        "item": seal_item(KEYS, "acme", "run-1", "batch-1", item),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(build_records(), indent=1, ensure_ascii=False) + "\n")
