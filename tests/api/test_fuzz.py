"""Every operation of the API's own description, with valid and invalid requests. The responses always match the
description.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.config import GenerationConfig, SchemathesisConfig
from schemathesis.specs.openapi import checks

from tests.support.api.api_harness import api_settings, make_keys
from tests.support.stack.service_process import ApiProcess, open_api_process
from tests.support.stack.stack import open_footprint, open_redis_server
from toolcrew.orchestrator.api.api_state import ApiState
from toolcrew.orchestrator.api.app import build_app

CASES = {"admin": 24, "acme": 5, "operator": 5}
"""The number of cases for each operation, by role of the key."""
SLOW = {"POST /v1/calls/{call_id}/kill": 1}
"""Fewer cases for slow operations. The API searches for an unknown call for several seconds."""
EXAMPLES = 3
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
    checks.allow_header_conformance,
]
NO_FAULT = {503}
"""The correct status without workers. Every other 5xx is a defect of the product."""


@schemathesis.serializer("application/jsonl", "application/x-ndjson")
def write_lines(_: Any, value: Any) -> bytes:
    """Return a batch's lines, or the value that replaces the lines."""
    if isinstance(value, bytes):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "surrogatepass")


def describe() -> dict[str, Any]:
    app_state = ApiState(api_settings("redis://127.0.0.1:1/0"))
    fields: dict[str, Any] = build_app(app_state, lambda _: nullcontext()).openapi()
    return fields


DESCRIPTION = describe()
CONFIG = SchemathesisConfig(seed=1)
SCHEMA = schemathesis.openapi.from_dict(DESCRIPTION, config=CONFIG)
OPERATIONS = {found.ok().label: found.ok() for found in SCHEMA.get_all_operations()}


@dataclass
class Target:
    """A running API without workers, and its keys."""

    api: ApiProcess
    keys: dict[str, str]
    session: requests.Session

    def ask(self, case: Case, role: str) -> None:
        """Send one request and check the response."""
        headers = {"Authorization": f"Bearer {self.keys[role]}"}
        response = case.call(base_url=self.api.url, headers=headers, session=self.session, timeout=60)
        assert response.status_code < 500 or response.status_code in NO_FAULT, (
            f"{case.as_curl_command()}: {response.text}"
        )
        case.validate_response(response, checks=CHECKS, headers=headers)
        if response.status_code >= 400 and case.operation.path != "/readyz" and case.method != "HEAD":
            assert_problem(response)


def assert_problem(response: Any) -> None:
    assert response.headers["content-type"] == ["application/problem+json"]
    reply = response.json()
    assert reply["status"] == response.status_code
    assert reply["code"]
    assert reply["detail"]


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with open_footprint() as footprint, open_redis_server() as server, requests.Session() as session:
        keys = asyncio.run(make_keys(server.url))
        with open_api_process(footprint, server.url) as api:
            assert session.get(f"{api.url}/openapi.json", timeout=60).json() == DESCRIPTION
            yield Target(api, keys, session)
            assert not api.has_logged("api_failed"), api.log()


@pytest.mark.parametrize("label", OPERATIONS)
def test_every_operation_matches_its_description_for_coverage_cases(target: Target, label: str) -> None:
    for role, most in CASES.items() if label not in SLOW else [("admin", SLOW[label])]:
        cases = SCHEMA.iter_coverage_cases(
            OPERATIONS[label],
            generation_modes=list(GenerationMode),
            generation_config=GenerationConfig(deterministic=True),
        )
        for case in islice(cases, most):
            target.ask(case, role)


@pytest.mark.parametrize("label", [label for label in OPERATIONS if label not in SLOW])
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_every_operation_matches_its_schema_for_generated_requests(
    target: Target, label: str, mode: GenerationMode
) -> None:
    try:
        strategy = OPERATIONS[label].as_strategy(generation_mode=mode)
        ask = given(case=strategy)(lambda case: target.ask(case, "admin"))
        quiet = list(HealthCheck)
        hypothesis.seed(1)(
            settings(
                max_examples=EXAMPLES,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=quiet,
                database=None,
            )(ask)
        )()
    except hypothesis.errors.Unsatisfiable:
        # An operation without parameters has no invalid requests.
        assert mode is GenerationMode.NEGATIVE
