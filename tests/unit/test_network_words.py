"""The description of the network for a model: part of the description of the tools that run there."""

from contract.specs import NO_NETWORK
from orchestrator.dispatch.sessions import SessionInfo
from tests.builders import build_spec
from workers.tools.builtin import build_registry


def info(**fields: object) -> SessionInfo:
    return SessionInfo(session="s", tenant="acme", host="h", queue="q", image="i", sandbox=None, start_s=0.1, **fields)  # type: ignore[arg-type]


def test_without_network_nothing_changes() -> None:
    for spec in build_registry().specs():
        assert spec.with_network(info().describe_network()) == spec


def test_with_egress_the_description_of_bash_names_the_hosts_and_no_longer_says_that_there_is_none() -> None:
    words = info(network="egress", hosts=("pypi.org", "*.pythonhosted.org")).describe_network()
    bash = next(spec for spec in build_registry().specs() if spec.name == "bash_tool")
    described = bash.with_network(words)
    assert NO_NETWORK in bash.description
    assert NO_NETWORK not in described.description
    assert "to pypi.org, *.pythonhosted.org" in described.description
    assert described.network == words


def test_a_tool_of_another_pool_has_no_sandbox_to_report_of() -> None:
    bash = next(spec for spec in build_registry().specs() if spec.name == "bash_tool").model_copy(
        update={"pool": "web"}
    )
    assert bash.with_network("with all of it") == bash


def test_an_authors_own_words_stay_as_they_are() -> None:
    spec = build_spec(
        "count", description="Counts, also without network. It runs in the session's sandbox, without network."
    )
    description = spec.with_network("with all of it").description
    assert description == "Counts, also without network. It runs in the session's sandbox, with all of it."
