"""Links from Flower to our pages and back, also for invented ids."""

import json

import pytest
from pydantic import ValidationError

from tests.support.records.builders import build_attempt
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.names import call_page_url, flower_task_url, parse_shown_call
from toolcrew.contract.settings import OrchestratorSettings, load_settings
from toolcrew.orchestrator.dispatch.celery_transport import build_message


def test_id_in_a_link_is_escaped() -> None:
    assert flower_task_url("https://ops.example/flower/", "8b90-c1") == "https://ops.example/flower/task/8b90-c1"
    assert call_page_url("http://127.0.0.1:8080", "c1") == "http://127.0.0.1:8080/calls/c1"
    assert flower_task_url("http://f", "../?a#b\"'<x>") == "http://f/task/..%2F%3Fa%23b%22%27%3Cx%3E"


def test_message_shows_session_run_and_skill_name_in_flower() -> None:
    attempt = build_attempt("skill_tool", session="s1", run="r1", shown_as="word-count")
    headers = json.loads(build_message(attempt, "task", "key"))["headers"]
    plain = json.loads(build_message(build_attempt("bash_tool", call_id="call-7"), "task", "key"))["headers"]

    assert plain["kwargsrepr"] == "call call-7, tenant acme"
    assert headers["kwargsrepr"] == "call c1, tenant acme, session s1, run r1"
    assert parse_shown_call(headers["kwargsrepr"]) == "c1"
    # The task decides which code runs; `shadow` is only shown.
    assert (headers["task"], headers["shadow"]) == ("tool.skill_tool", "tool.word-count")


def test_parse_shown_call_refuses_other_texts() -> None:
    texts = ("", "call ", "call a b", "call a, tenant", "call a, owner b", "call ../x", "call a\n", "{'x': 'call a'}")
    for value in (None, 7, "call " + "a" * 65, *texts):
        assert parse_shown_call(value) is None


@pytest.mark.parametrize(
    "url", ["javascript:alert(1)", "http://user:password@host/", "http://host/?q", "host", "http://h\n"]
)
def test_invalid_flower_or_page_url_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError):
        OrchestratorSettings(flower_url=url)
    monkeypatch.setenv("TOOLCREW_PAGE_URL", url.strip() + " ")
    with pytest.raises(ConfigError, match="TOOLCREW_PAGE_URL"):
        load_settings()
