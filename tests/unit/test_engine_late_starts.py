"""Containers that appear after their start was given up."""

import asyncio

from contract.errors import SandboxUnavailable
from workers.sandboxd.runtime.engine import ABSENT_ENOUGH, LateContainerRemover

SOON_S = 10.0


class Removals:
    """Scripted replies to removals by name, in order: present, absent, or an engine that does not reply."""

    def __init__(self, *answers: bool | None) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, name: str) -> bool:
        self.asked.append(name)
        answer = self.answers.pop(0) if self.answers else False
        if answer is None:
            raise SandboxUnavailable("the Docker engine does not answer")
        return answer


async def settle(late: LateContainerRemover) -> None:
    async with asyncio.timeout(SOON_S):
        while len(late):  # noqa: ASYNC110  # it ends in a task of its own
            await asyncio.sleep(0)


async def test_a_container_that_comes_late_is_removed_and_asked_for_no_more() -> None:
    removals = Removals(None, None, False, True)
    late = LateContainerRemover(removals, pauses_s=(0.0,))

    late.remove_later("toolcrew-a")
    await settle(late)

    assert removals.asked == ["toolcrew-a"] * 4


async def test_one_that_never_came_is_given_up_after_some_answers_in_a_row() -> None:
    removals = Removals(False, False, None)
    late = LateContainerRemover(removals, pauses_s=(0.0,))

    late.remove_later("toolcrew-a")
    late.remove_later("toolcrew-a")
    assert len(late) == 1, "the same name is not looked for twice"
    await settle(late)

    assert len(removals.asked) == 3 + ABSENT_ENOUGH


async def test_at_the_end_nothing_is_looked_for_any_more() -> None:
    late = LateContainerRemover(Removals(), pauses_s=(3600.0,))
    late.remove_later("toolcrew-a")
    late.remove_later("toolcrew-b")

    late.close()
    await settle(late)

    assert len(late) == 0
