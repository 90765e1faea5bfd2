"""Cancels of calls that run in no sandbox: whichever worker of the pool reads one ends the call, or passes the order on to who runs it."""

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from contract.calls import ToolCall, ToolContext
from contract.errors import RefusalReason
from contract.hosts import holder_name
from contract.signing import SigningKeys
from store.hosts import WorkerControlStore
from workers.control import ControlReader
from workers.interrupts import END_SIGNAL, CancelBoard

_HOLDER = re.compile(r"(pool\.[^/\s]{1,128})/([1-9][0-9]{0,9})")
"""As `process_holder` writes it. It comes from Redis: it may only name a worker of ours, and a process."""


class HolderLedger(Protocol):
    """Who may start a call, and who has."""

    def forbid(self, tenant: str, call_id: str) -> bool: ...

    def holder(self, tenant: str, call_id: str) -> str | None: ...


def process_holder(worker: str, pid: int) -> str:
    """Who runs a call, for the ledger, when it is one process of a worker without sandboxes."""
    return holder_name(worker, str(pid))


class PoolControlListener(ControlReader):
    """Reads the control lists of this worker's pools, which any of their workers may read, and one of its own. Serves `session.cancel` alone."""

    verbs = frozenset({"session.cancel"})
    needs_session = False

    def __init__(
        self,
        orders: WorkerControlStore,
        ledger: HolderLedger,
        board: CancelBoard,
        worker: str,
        pools: Sequence[str],
        key: SigningKeys,
        end_process: Callable[[int], bool] | None = None,
        clock: Callable[[], float] = time.time,
        on_refused: Callable[[RefusalReason], None] | None = None,
    ) -> None:
        super().__init__(orders, (worker, *pools), key, clock, on_refused)
        self._ledger = ledger
        self._board = board
        self._worker = worker
        self._end_process = end_process or _interrupt_child

    def obey(self, call: ToolCall, context: ToolContext, data: bytes) -> bool:
        """True when the call had not started and never will, or is being ended, here or by whoever runs it."""
        call_id = str(call.arguments["call_id"])
        if self._ledger.forbid(context.tenant, call_id):
            return True
        found = _HOLDER.fullmatch(self._ledger.holder(context.tenant, call_id) or "")
        if found is None:
            return False
        if found[1] != self._worker:
            self._orders.push(found[1], data)
            return True
        # Before the signal: the process looks there whether it is meant.
        self._board.mark(context.tenant, call_id)
        return self._end_process(int(found[2]))


def _interrupt_child(pid: int) -> bool:
    """Send END_SIGNAL to a process that this one forked; a marker from Redis cannot name any other."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent != os.getpid():
            return False
        os.kill(pid, END_SIGNAL)
    except (OSError, ValueError, IndexError):
        return False
    return True
