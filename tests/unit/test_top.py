"""`toolcrew top`: what fits is shown whatever the size, strangers' names drive no terminal, and a Redis that is away is
said and comes back.
"""

import json
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from contract.names import host_key, hosts_key
from orchestrator.cli.main import app
from orchestrator.cli.terminal_overview import VIEWS, Shown, build_overview_screen, count_rows
from store.overview import BatchSummary, Overview, QueueSummary, TenantSummary
from tests.conftest import RedisProcess
from tests.fake_hosts import build_report
from tests.stack import TOOLCREW, UP_S

HOSTILE = "\x1b]0;owned\x07\x1b[2J‮evil\nline"


def build_tenant(name: str, **fields: Any) -> TenantSummary:
    told = {
        "is_registered": True,
        "weight": 1.0,
        "in_flight": 8,
        "held": 2,
        "waiting": 3,
        "share": 0.5,
        "fair_share": 0.5,
        "is_paused": False,
    }
    return TenantSummary.model_validate({"tenant": name, **told, **fields})


def build_overview(*, tenants: int = 3, hosts: int = 2, batches: int = 2, **fields: Any) -> Overview:
    batch = {
        "tenant": "acme",
        "name": "",
        "state": "in_progress",
        "created_at": 1.0,
        "total": 10,
        "succeeded": 3,
        "failed": 1,
    }
    told: dict[str, Any] = {
        "at": 1_700_000_000.5,
        "deployment": "default",
        "hosts": tuple(build_report(f"h{number}", busy=1, sessions=4) for number in range(hosts)),
        "queues": tuple(
            QueueSummary(queue=f"host.h{number}.b00t", length=1, slots=4, held=3, waiting=2, oldest_s=75.0)
            for number in range(hosts)
        ),
        "tenants": tuple(build_tenant(f"tenant-{number}") for number in range(tenants)),
        "batches": tuple(
            BatchSummary.model_validate({**batch, "batch": f"b{number}", "running": 2, "waiting": 4})
            for number in range(batches)
        ),
        "batch_count": batches,
        "running": 5,
        "approvals": 1,
    }
    return Overview.model_validate({**told, **fields})


def lines_of(shown: Shown, width: int = 80, height: int = 24) -> list[str]:
    return [line.plain for line in build_overview_screen(shown, width, height)]


def test_a_small_terminal_shows_something_of_everything() -> None:
    lines = lines_of(Shown(build_overview(tenants=1000, hosts=40, batches=30)))

    text = "\n".join(lines)
    assert len(lines) == 24
    assert "120/160 in use" in lines[0]
    assert "1 approvals" in lines[0]
    assert all(title in text for title in ("h0 (sandbox)", "host.h0.b00t", "tenant-0", "acme/b0", "q ends"))
    assert sum("more" in line for line in lines) == 4


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("width", "height"), [(80, 24), (20, 5), (1, 1), (300, 100), (40, 2)])
def test_whatever_the_size_it_is_kept(width: int, height: int, view: Any) -> None:
    lines = build_overview_screen(
        Shown(build_overview(tenants=1000), trouble="Redis is away " * 20, view=view, offset=7), width, height
    )

    assert 0 < len(lines) <= height
    assert max(cell_len(line.plain) for line in lines) <= width


def test_one_table_is_shown_from_the_row_that_was_chosen() -> None:
    seen = build_overview(tenants=50)

    lines = lines_of(Shown(seen, view="tenants", offset=30))

    assert lines[2].startswith("tenant-30")
    assert "host.h0.b00t" not in "\n".join(lines)
    assert count_rows(seen, "tenants") == 50


def test_strangers_names_drive_no_terminal() -> None:
    batch = build_overview().batches[0].model_copy(update={"tenant": HOSTILE, "batch": HOSTILE, "state": HOSTILE})
    seen = build_overview(
        deployment=HOSTILE,
        tenants=0,
        hosts=0,
    ).model_copy(
        update={
            "hosts": (build_report("h").model_copy(update={"host": HOSTILE}),),
            "queues": (QueueSummary(queue=HOSTILE, length=0, slots=0, held=0, waiting=0),),
            "tenants": (build_tenant(HOSTILE, trouble=HOSTILE),),
            "batches": (batch,),
        }
    )

    lines = lines_of(Shown(seen, trouble=HOSTILE), 200, 40)

    text = "".join(lines)
    assert not [character for character in text if ord(character) < 32 or ord(character) in (0x7F, 0x202E)]
    assert "\\x1b" in text


def test_without_any_worker_it_says_what_to_do() -> None:
    assert "start one (toolcrew worker start)" in "\n".join(lines_of(Shown(build_overview(hosts=0))))


def test_for_programs_instants_are_iso_and_secrets_of_processes_are_left_out() -> None:
    told = build_overview().to_json()

    assert json.loads(json.dumps(told))["at"] == "2023-11-14T22:13:20Z"
    assert told["batches"][0]["created_at"] == "1970-01-01T00:00:01Z"
    assert told["hosts"][0]["state"] == "serving"
    assert "process" not in told["hosts"][0]


def environment(url: str) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TOOLCREW_")}
    return {**plain, "TOOLCREW_REDIS_URL": url, "TERM": "xterm-256color"}


def test_where_there_is_no_terminal_it_looks_once(redis_server: RedisProcess) -> None:
    def run(url: str, *options: str) -> Any:
        return CliRunner().invoke(
            app, ["top", *options], env={"TOOLCREW_REDIS_URL": url, "TOOLCREW_DEPLOYMENT": "default"}
        )

    text, as_json, nowhere = run(redis_server.url), run(redis_server.url, "--json"), run("redis://:pw@127.0.0.1:1/0")

    assert (text.exit_code, "pool.web" in text.stdout, "\x1b" in text.stdout) == (0, True, False)
    assert [queue["queue"] for queue in json.loads(as_json.stdout)["queues"]] == ["pool.tools", "pool.web"]
    assert (nowhere.exit_code, "does not answer" in nowhere.stderr, len(nowhere.stderr.splitlines())) == (1, True, 1)


class Screen:
    """What a program writes to a terminal of its own, and what is typed there."""

    def __init__(self, master: int, process: "subprocess.Popen[bytes]") -> None:
        self._master = master
        self.process = process
        self.text = ""

    def until(self, word: str) -> None:
        """Reads on until the word was written, after whatever was read before."""
        seen, until = len(self.text), time.monotonic() + UP_S
        while word not in self.text[seen:]:
            assert time.monotonic() < until, f"{word!r} was not shown: {self.text[-3000:]!r}"
            if select.select([self._master], [], [], 0.5)[0]:
                self.text += os.read(self._master, 65536).decode(errors="replace")

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)


@contextmanager
def open_top(url: str) -> Iterator[Screen]:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [TOOLCREW, "top"], env=environment(url), stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    try:
        yield Screen(master, process)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_on_a_terminal_it_lives_through_an_outage_of_redis_and_ends_by_q(redis_server: RedisProcess) -> None:
    report = build_report("h1")
    with redis_server.client() as client:
        client.zadd(hosts_key("default"), {report.queue: time.time()})
        client.set(host_key("default", report.queue), report.model_dump_json())
    with open_top(redis_server.url) as screen:
        screen.until("h1 (sandbox)")
        redis_server.stop()
        try:
            screen.until("is up")
        finally:
            redis_server.start()
        screen.until("pool.web")
        screen.type(b"\x1b[C")
        screen.until("rows    hosts")
        screen.type(b"q")
        assert screen.process.wait(UP_S) == 0


def test_ctrl_c_is_an_end_in_order(redis_server: RedisProcess) -> None:
    with open_top(redis_server.url) as screen:
        screen.until("pool.web")
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(UP_S) == 0
