"""Batches over HTTP are checked against the tools of their tenant before any item is queued."""

import json
import threading
from typing import Any

import pytest

from tests.conftest import RedisProcess
from tests.support.api.api_harness import ApiHarness
from tests.support.records.builders import build_spec
from toolcrew.contract.specs import Catalog
from toolcrew.orchestrator.batches import lines
from toolcrew.store.batches import BatchItem

HEADERS = {"Content-Type": "application/jsonl"}


async def test_a_batch_with_an_unknown_tool_is_refused_and_a_parameter_alias_is_a_warning(
    api: ApiHarness, redis_server: RedisProcess
) -> None:
    spec = build_spec("bash_tool", properties={"command": {"type": "string"}}, aliases={"cmd": "command"})
    redis_server.publish_catalog(Catalog(tools=(spec,)))
    refused = await api["acme"].post("/v1/batches", content='{"id": "a", "tool": "bash_tol"}', headers=HEADERS)
    assert (refused.status_code, refused.json()["code"]) == (422, "INVALID_ARGUMENTS")
    assert "line 1: the tool bash_tol does not exist: did you mean bash_tool?" in refused.text
    assert (await api["acme"].get("/v1/batches")).json()["data"] == []
    line = '{"id": "a", "tool": "bash_tool", "arguments": {"cmd": "ls"}}'
    accepted = await api["acme"].post("/v1/batches", content=line, headers=HEADERS)
    assert accepted.status_code == 201
    assert accepted.json()["warnings"] == ["line 1: `cmd` is an alias of the parameter `command` of bash_tool"]


async def test_a_batch_is_accepted_with_a_warning_when_no_worker_is_online_to_check_it(api: ApiHarness) -> None:
    accepted = await api["acme"].post("/v1/batches", content='{"id": "a", "tool": "bash_tol"}', headers=HEADERS)
    assert accepted.status_code == 201
    assert accepted.json()["warnings"] == ["no worker is online, so the names and arguments of tools were not checked"]


async def test_large_batch_items_are_not_parsed_in_the_event_loop(
    api: ApiHarness, redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse, threads = lines._parse_item, list[int]()

    def parse_item(stored: BatchItem | bytes) -> BatchItem:
        threads.append(threading.get_ident())
        return parse(stored)

    monkeypatch.setattr(lines, "_parse_item", parse_item)
    redis_server.publish_catalog(Catalog(tools=()))
    history = [{"role": "user", "content": "x"}] * lines.MANY_VALUES
    content = json.dumps({"id": "a", "instruction": "x", "history": history})
    accepted = await api["acme"].post("/v1/batches", content=content, headers=HEADERS)
    assert accepted.status_code == 201
    # The service runs in the thread of this test.
    assert threads
    assert threading.get_ident() not in threads


async def test_a_batch_is_submitted_as_one_json_object(api: ApiHarness) -> None:
    lines = [{"id": name, "instruction": "Count the files.", "priority": 1} for name in ("a", "b\u00e9")]
    made = await api["acme"].post("/v1/batches?id=object", json={"lines": lines})
    assert (made.status_code, made.json()["request_counts"]["total"]) == (201, 2), made.text
    # The same lines as JSON lines continue the batch.
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    again = await api["acme"].post("/v1/batches?id=object", content=text)
    assert (again.status_code, again.json()["id"]) == (201, "object"), again.text
    single = {"headers": {"content-type": "application/json"}, "content": text.splitlines()[0]}
    assert (await api["acme"].post("/v1/batches", **single)).json()["request_counts"]["total"] == 1


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"lines": [{"id": "a", "instruction": "x"}, {"id": "b"}]}, "line 2: `instruction` is missing"),
        ({"lines": [5]}, "line 1, column 1: the line is not one JSON object"),
        ({"lines": []}, "the file has no lines"),
        ({"lines": {"id": "a"}}, "line 1: `lines` is an unknown field"),
        ({"lines": [{"id": "a", "instruction": "\ud800"}]}, "lone surrogate"),
    ],
)
async def test_an_invalid_json_object_of_lines_is_refused_with_the_line(
    api: ApiHarness, body: dict[str, Any], sentence: str
) -> None:
    headers = {"content-type": "application/json"}
    answer = await api["acme"].post("/v1/batches", content=json.dumps(body), headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_ARGUMENTS")
    assert sentence in answer.json()["detail"]
