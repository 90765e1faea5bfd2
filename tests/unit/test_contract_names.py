"""Names of queues, tasks and keys: no two things under one name."""

import pytest

from contract import names


@pytest.mark.parametrize(
    ("tool", "task"), [("bash_tool", "tool.bash_tool"), ("session.open", "session.open"), ("session_x", "tool.session_x")]
)
def test_a_task_is_named_after_its_tool(tool: str, task: str) -> None:
    assert names.task_name(tool) == task


def test_a_host_that_was_started_again_has_another_queue() -> None:
    assert names.host_queue("h1", "aaaa") != names.host_queue("h1", "bbbb")
    assert names.host_of(names.host_queue("h1", "aaaa")) == "h1"


def test_a_blob_is_its_tenants_alone() -> None:
    key = names.blob_key("prod", "acme", "x")
    assert names.is_blob_of(key, "prod", "acme")
    assert not any(names.is_blob_of(key, *other) for other in (("prod", "acm"), ("prod", "acme2"), ("pro", "acme"), ("prod", "")))


@pytest.mark.parametrize(
    "key", ["", "toolcrew:prod:acme:call:x:run", "toolcrew:prod:acme:blo", "celery-task-meta-1", "x toolcrew:prod:acme:blob:1"]
)
def test_no_other_key_passes_for_a_blob(key: str) -> None:
    assert not names.is_blob_of(key, "prod", "acme")


def test_keys_of_two_tenants_or_two_calls_never_meet() -> None:
    keys = [names.call_key("d", tenant, call) for tenant in ("a", "b") for call in ("1", "2")]
    keys += [names.blob_key("d", tenant, call) for tenant in ("a", "b") for call in ("1", "2")]
    keys += [names.catalog_key(deployment, pool) for deployment in ("d", "e") for pool in names.CATALOG_POOLS]
    keys += [names.catalog_names_key(deployment, pool) for deployment in ("d", "e") for pool in names.CATALOG_POOLS]
    assert len(set(keys)) == len(keys)


def test_a_hub_hears_its_own_results_and_those_of_few_others() -> None:
    pattern = names.result_channel_pattern("abc123")
    assert pattern.endswith("*")
    assert names.result_key("abc123-call").startswith(pattern[:-1])
    assert not names.result_key("bac123-call").startswith(pattern[:-1])


def test_a_tenant_cannot_name_the_keys_of_another_by_its_sessions_name() -> None:
    """Neither names nor ids have a colon."""
    assert names.place_key("d", "a", "s") not in (names.place_key("d", "a:session", "s"), names.tenant_sessions_key("d", "a"))
