"""The network and the largest limit of a session in the descriptions of the tools that run there."""

import pytest

from toolcrew.contract.specs import NO_NETWORK, TIMEOUT_DESCRIPTION
from toolcrew.orchestrator.dialects.prompts import generate_tool_prompt
from toolcrew.orchestrator.sessions.session import SessionInfo
from toolcrew.workers.tools.builtin import build_registry


def info(**fields: object) -> SessionInfo:
    return SessionInfo(session="s", tenant="acme", host="h", queue="q", image="i", sandbox=None, start_s=0.1, **fields)  # type: ignore[arg-type]


def test_bash_description_lists_the_allowed_hosts_with_egress() -> None:
    description = info(network="egress", hosts=("pypi.org", "*.pythonhosted.org")).describe_network()
    bash = next(spec for spec in build_registry().specs() if spec.name == "bash_tool")
    described = bash.with_network(description)
    assert NO_NETWORK in bash.description
    assert NO_NETWORK not in described.description
    assert "to pypi.org, *.pythonhosted.org" in described.description
    assert described.network == description


def test_network_is_not_added_to_tools_of_another_pool() -> None:
    bash = next(spec for spec in build_registry().specs() if spec.name == "bash_tool").model_copy(
        update={"pool": "web"}
    )
    assert bash.with_network("with all of it") == bash


@pytest.mark.parametrize("name", ["bash_tool", "read_tool"])
def test_only_long_running_tools_mention_the_class_timeout(name: str) -> None:
    spec = info(timeout_s=7200.0).describe_tool(next(spec for spec in build_registry().specs() if spec.name == name))
    prompt = generate_tool_prompt([spec])
    assert ("at most 7200 s" in prompt) == (name == "bash_tool")
    assert ("at most 600" in prompt) == (name != "bash_tool")
    assert (TIMEOUT_DESCRIPTION.format(7200) in str(spec.parameters)) == (name == "bash_tool")
