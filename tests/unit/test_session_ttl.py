"""The single limit for a session's time to live, in every place that accepts a value."""

from contract.session_locations import MAX_TTL_S
from orchestrator.api.sessions import NewSession
from workers.tools.session import SESSION_VERBS


def test_the_api_accepts_as_much_as_the_verb_that_opens_sessions() -> None:
    verb = next(tool.spec for tool in SESSION_VERBS if tool.spec.name == "session.open")
    accepted = NewSession.model_json_schema()["properties"]["ttl_s"]
    opened: object = verb.parameters["properties"]["ttl_s"]  # type: ignore[index, call-overload]
    assert isinstance(opened, dict)
    assert (accepted["maximum"], opened["maximum"]) == (MAX_TTL_S, MAX_TTL_S)
    assert (accepted["default"], opened["default"]) == (1800, 1800)
