"""Compatibility of old and new processes: the data between them equals, byte for byte, the data of the previous
release. An older process can read everything that this release writes while no new feature is used, and this release
can read everything of the older one. A new field is omitted from the bytes while it has its default.
`tests/support/records/wire_records.py` printed the fixtures in the tree of that release.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.support.records.wire_records import CALL, CONTEXT, KEYS, REPORT, RESULT, build_records
from toolcrew.contract.call_events import decode_event
from toolcrew.contract.envelope import decode_call, decode_result
from toolcrew.contract.hosts import HostReport
from toolcrew.contract.registry import Switch, parse_switches
from toolcrew.contract.session_locations import SessionLocation
from toolcrew.contract.signing import ResultSeal
from toolcrew.contract.specs import open_catalog
from toolcrew.contract.tenancy import TenantPolicy, parse_policy
from toolcrew.store.batches import BatchRecord, open_item
from toolcrew.store.call_records import CallRecord

FIXTURES = sorted((Path(__file__).parent / "wire").glob("*.json"))
DECODERS: dict[str, Callable[[str], Any]] = {
    "call": lambda text: decode_call(text, KEYS),
    "result": lambda text: decode_result(json.loads(text), ResultSeal(KEYS, "acme")),
    "event": lambda text: decode_event(text.encode()).payload,
    "catalog": lambda text: open_catalog(KEYS, "sandbox", text),
    "item": lambda text: open_item(KEYS, "acme", "run-1", "batch-1", text),
    "switch": lambda text: parse_switches(KEYS, {b"bash_tool": text.encode()})["bash_tool"],
    "tenant": lambda text: parse_policy(KEYS, "acme", text.encode()),
    **{
        name: kind.model_validate_json
        for name, kind in {
            "host": HostReport,
            "place": SessionLocation,
            "ledger": CallRecord,
            "batch": BatchRecord,
        }.items()
    },
}
# In Redis these records are hashes, written field by field: a new field that is not set is absent.
HASHES = ("place", "ledger")


def read_fixture(path: Path) -> dict[str, str]:
    texts: dict[str, str] = json.loads(path.read_text())
    return texts


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", sorted(DECODERS))
def test_records_are_written_as_by_the_previous_release(path: Path, name: str) -> None:
    now, then = build_records()[name], read_fixture(path)[name]
    if name in HASHES:
        assert json.loads(now).items() >= json.loads(then).items()
    else:
        assert now == then


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_records_of_the_previous_release_are_read_unchanged(path: Path) -> None:
    values = {name: DECODERS[name](text) for name, text in read_fixture(path).items()}
    assert values["call"] == (CALL, CONTEXT)
    assert values["result"] == RESULT
    assert values["host"] == REPORT
    assert values["tenant"] == TenantPolicy(weight=2)
    assert values["switch"] == Switch(by="root", at=1.0, reason="not today")
    assert values["event"] == {"stream": "stdout", "text": "x"}
    assert all(isinstance(value, BaseModel) for name, value in values.items() if name not in ("call", "event"))


def test_fixtures_cover_every_record() -> None:
    assert FIXTURES
    assert all(set(read_fixture(path)) == set(DECODERS) == set(build_records()) for path in FIXTURES)
