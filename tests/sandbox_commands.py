"""What runs in a session's sandbox, seen from outside: by the host's processes, not by what the sandbox says."""

from orchestrator.dispatch.sessions import Session
from tests.stack import Stack, commands_in


async def find_container(stack: Stack, session: Session) -> str:
    """The whole id of the session's container."""
    await session.call("bash_tool", {"command": "true"})
    sandbox = (await session.info()).sandbox
    assert sandbox is not None
    return stack.full_id(sandbox.id)


def is_running(container: str, command: str) -> bool:
    """Whether a process of the container has these words in its command line."""
    return any(command in line for line in commands_in(container).values())
