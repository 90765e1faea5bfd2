"""Rows of scripts/programs.toml whose programs the shipped image has. scripts/programs runs all rows."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from docker import APIClient

from benchmarks.processes import RunningSandboxd, running_sandboxd
from scripts.programs import CLASSES, USERS, Program, load_programs, run_program
from tests.support.sandboxd.containers import IMAGE
from toolcrew.contract.session_spec import SandboxUser

pytestmark = pytest.mark.stack

SHIPPED = [program for program in load_programs() if program.is_shipped]


@pytest.fixture(scope="module")
def sandboxd(engine: APIClient) -> Iterator[RunningSandboxd]:
    with running_sandboxd({"TOOLCREW_TENANT_CLASSES": CLASSES, "TOOLCREW_SANDBOX_START": "oci"}) as running:
        yield running


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("program", SHIPPED, ids=lambda program: program.name)
def test_a_program_works_or_fails_as_its_row_says(
    sandboxd: RunningSandboxd, program: Program, user: SandboxUser, tmp_path: Path
) -> None:
    outcome = run_program(sandboxd, program, user, IMAGE, tmp_path)
    assert outcome.is_expected, outcome
