"""Inspect the processes of a session's sandbox from the host, without relying on answers of the sandbox."""

from orchestrator.dispatch.sessions import Session
from tests.stack import Stack, commands_in


async def find_container(stack: Stack, session: Session) -> str:
    """Return the full id of the session's container."""
    await session.call("bash_tool", {"command": "true"})
    sandbox = (await session.info()).sandbox
    assert sandbox is not None
    return stack.full_id(sandbox.id)


def is_running(container: str, command: str) -> bool:
    """Return whether a process of the container has `command` in its command line."""
    return any(command in line for line in commands_in(container).values())
