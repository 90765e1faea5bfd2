"""A tree of forked sessions that grows while its sandboxd is killed: every session has the files of its own line, and
nothing is left at the end.
"""

import argparse
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.sandboxd.containers import open_engine
from tests.support.stack.daemons import Daemon, open_daemons, run_script
from tests.support.stack.waiting import wait_until
from toolcrew.contract.errors import SandboxUnavailable, ToolFailure
from toolcrew.workers.sandbox_client import SandboxClient

SETTINGS = {
    "oci": {"sandbox_start": "oci", "sandbox_workspace": "image"},
    "oci-root": {
        "sandbox_start": "oci",
        "sandbox_workspace": "image",
        "tenant_classes": '{"default": {"user": "root"}}',
    },
}
LEFT_S = 60.0
CHECKED = 150
"""Largest number of sessions that are read at the end; each starts a sandbox."""
READERS = 6


@dataclass
class Tree:
    """Sessions of a daemon, with the lines that each has written or inherited."""

    daemon: Daemon
    choice: random.Random
    lines: dict[str, list[str]] = field(default_factory=dict)
    _writing: str = "acme:root"
    """The session that was written to last."""

    def plant(self) -> None:
        with self.daemon.client() as client:
            self.lines[client.open("acme", "root")] = []

    def grow_until_killed(self, after_s: float, most_children: int) -> None:
        """Grow the tree, kill sandboxd in the middle of it, and start it again."""
        killer = threading.Timer(after_s, self.daemon.kill)
        killer.start()
        with suppress(SandboxUnavailable, ToolFailure), self.daemon.client() as client:
            while killer.is_alive():
                self._grow(client, most_children)
        killer.join()
        self.daemon.start()
        with self.daemon.client() as client:
            names = {row["name"] for row in client.sessions()}
            assert self.lines.keys() <= names
            for name in names - self.lines.keys():  # the answer to its fork was lost
                client.close(name)
        # The call may have been killed before or after it wrote.
        line, found = self.lines[self._writing], self._read(self._writing)
        assert found in (line, line[:-1])
        self.lines[self._writing] = found

    def grow_to(self, nodes: int, most_children: int) -> None:
        with self.daemon.client() as client:
            while len(self.lines) < nodes:
                self._grow(client, most_children)

    def find_wrong(self) -> list[str]:
        """Return the sessions that have other files than their line, of at most CHECKED."""
        names = self.choice.sample(sorted(self.lines), min(CHECKED, len(self.lines)))
        with ThreadPoolExecutor(READERS) as threads:
            found = dict(zip(names, threads.map(self._read, names), strict=True))
        return [name for name in names if found[name] != self.lines[name]]

    def _read(self, name: str) -> list[str]:
        with self.daemon.client() as client:
            return run_script(client, name, "cat /workspace/log 2>/dev/null").split()

    def _grow(self, client: SandboxClient, most_children: int) -> None:
        """Write to one session, and fork it."""
        parent, word = self.choice.choice(list(self.lines)), secrets.token_hex(4)
        self._writing, self.lines[parent] = parent, [*self.lines[parent], word]
        run_script(client, parent, f"echo {word} >> /workspace/log; sync")
        children = [f"acme:{secrets.token_hex(6)}" for _ in range(self.choice.randint(1, most_children))]
        client.fork(parent, children)
        self.lines |= {child: self.lines[parent] for child in children}


def find_left(daemon: Daemon) -> list[str]:
    """Return what a sandboxd without sessions still has: disks, archives, records, loop devices and mounts."""
    folders = [daemon.state / "workspaces", daemon.state / "archives", daemon.state / "sessions"]
    files = [str(path) for folder in folders for path in folder.rglob("*") if path.is_file()]
    devices = subprocess.run(["losetup", "-ln", "-O", "BACK-FILE"], capture_output=True, text=True, check=True)
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return [
        *(file for file in files if ".templates" not in file),
        *(line for line in (*devices.stdout.splitlines(), *mounts) if str(daemon.state) in line),
    ]


def close_all(daemon: Daemon) -> None:
    """Close all sessions, and wait until nothing of them is left."""
    with daemon.client() as client:
        for row in client.sessions():
            client.close(row["name"])
    wait_until(lambda: find_left(daemon) == [], LEFT_S, lambda: f"nothing is left of sessions: {find_left(daemon)[:9]}")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("scripts/chaos forks", description="Kill sandboxd while a tree of forks grows.")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--start", choices=list(SETTINGS), default="oci-root")
    parser.add_argument("--seed", help="of the tree and the moments; printed when it is not given")
    arguments = parser.parse_args(argv)
    # SIGTERM must also stop the processes of the harness.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    seed, began = arguments.seed or secrets.token_hex(4), time.monotonic()
    sys.stderr.write(f"seed {seed}: {arguments.nodes} nodes, {arguments.kills} kills\n")
    with open_daemons(open_engine()) as daemons:
        daemon = daemons.start(**SETTINGS[arguments.start], max_sessions=str(arguments.nodes * 2 + 100))
        tree = Tree(daemon, random.Random(seed))
        tree.plant()
        for _ in range(arguments.kills):
            tree.grow_until_killed(tree.choice.uniform(1, 6), 20)
        tree.grow_to(arguments.nodes, 20)
        wrong = tree.find_wrong()
        close_all(daemon)
    took_s = time.monotonic() - began
    sys.stdout.write(f"{'WRONG' if wrong else 'held'}  took_s {took_s:.0f}  nodes {len(tree.lines)}  {wrong}\n")
    return 1 if wrong else 0
