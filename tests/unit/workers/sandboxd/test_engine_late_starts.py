"""Containers that appear after their start was given up."""

import asyncio

from tests.support.stack.waiting import SOON_S
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.runtime.engine import ABSENT_ENOUGH, LateContainerRemover


class Removals:
    """Scripted replies to removals by name, in order: present, absent, or an engine that does not reply."""

    def __init__(self, *answers: bool | None) -> None:
        self.answers = list(answers)
        self.requested_names: list[str] = []

    async def __call__(self, name: str) -> bool:
        self.requested_names.append(name)
        answer = self.answers.pop(0) if self.answers else False
        if answer is None:
            raise SandboxUnavailable("the Docker engine does not answer")
        return answer


async def settle(remover: LateContainerRemover) -> None:
    async with asyncio.timeout(SOON_S):
        while len(remover):  # noqa: ASYNC110  # it ends in a task of its own
            await asyncio.sleep(0)


async def test_a_late_container_is_removed_once() -> None:
    removals = Removals(None, None, False, True)
    remover = LateContainerRemover(removals, pauses_s=(0.0,))

    remover.remove_later("toolcrew-a")
    await settle(remover)

    assert removals.requested_names == ["toolcrew-a"] * 4


async def test_an_absent_container_is_dropped_after_repeated_answers() -> None:
    removals = Removals(False, False, None)
    remover = LateContainerRemover(removals, pauses_s=(0.0,))

    remover.remove_later("toolcrew-a")
    remover.remove_later("toolcrew-a")
    assert len(remover) == 1, "the same name is not looked for twice"
    await settle(remover)

    assert len(removals.requested_names) == 3 + ABSENT_ENOUGH


async def test_close_stops_all_pending_removals() -> None:
    remover = LateContainerRemover(Removals(), pauses_s=(3600.0,))
    remover.remove_later("toolcrew-a")
    remover.remove_later("toolcrew-b")

    remover.close()
    await settle(remover)

    assert len(remover) == 0
