"""Names of queues, tasks and keys: no two objects share a name."""

import inspect
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from fnmatch import translate

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from toolcrew.contract import names
from toolcrew.orchestrator.operations.redis_users import ROLES
from toolcrew.store import batches, run_events, run_log


def test_a_blob_key_belongs_to_its_tenant_only() -> None:
    key = names.blob_key("prod", "acme", "sandbox", "x")
    assert names.is_blob_of(key, "prod", "acme")
    assert not any(
        names.is_blob_of(key, *other) for other in (("prod", "acm"), ("prod", "acme2"), ("pro", "acme"), ("prod", ""))
    )


@pytest.mark.parametrize(
    "key",
    [
        "", "toolcrew:prod:t:acme:call.x:run", "toolcrew:prod:t:acme:blo", "celery-task-meta-1",
        "x toolcrew:prod:t:acme:blob-web.1",
    ],
)  # fmt: skip
def test_another_kind_of_key_is_not_a_blob_key(key: str) -> None:
    assert not names.is_blob_of(key, "prod", "acme")


def test_a_result_channel_pattern_matches_the_results_of_its_hub() -> None:
    pattern = names.result_channel_pattern("abc123")
    assert pattern.endswith("*")
    assert names.result_key("abc123-call").startswith(pattern[:-1])
    assert not names.result_key("bac123-call").startswith(pattern[:-1])


BUILDERS = [
    one
    for module in (names, batches, run_log, run_events)
    for one in vars(module).values()
    if inspect.isfunction(one)
    and one.__module__ == module.__name__
    and next(iter(inspect.signature(one).parameters), "") == "deployment"
    and one not in (names.deployment_key, names.tenant_key)
]
"""Every function that builds a key from the name of the deployment, and other names."""


def build_all(build: Callable[..., str], sample_names: Collection[str]) -> Iterator[str]:
    """Yield the builder's keys for every combination of the names."""
    other_parameters = len(inspect.signature(build).parameters) - 1
    return (build("d", *chosen) for chosen in itertools.product(sample_names, repeat=other_parameters))


KINDS = sorted({part for one in BUILDERS for key in build_all(one, "d") for part in re.split(r"[:.]", key) if part})
"""All words that keys are made of: the most likely names to collide with."""
NAMES = st.sets(st.sampled_from(KINDS) | st.from_regex(r"\A[A-Za-z0-9_-]{1,64}\Z"), min_size=1, max_size=5)


@settings(deadline=None)
@given(sample_names=NAMES)
@example(sample_names=set(KINDS))
def test_different_key_builders_never_build_the_same_key(sample_names: set[str]) -> None:
    keys = [key for build in BUILDERS for key in build_all(build, sample_names)]
    assert [key for key, count in Counter(keys).items() if count > 1] == []


@settings(deadline=None)
@given(sample_names=NAMES)
@example(sample_names=set(KINDS))
def test_redis_user_access_to_a_tenant_key_depends_only_on_its_kind(sample_names: set[str]) -> None:
    patterns = [re.compile(translate(names.deployment_key("d", own))) for role in ROLES.values() for own in role.own]
    for build in BUILDERS:
        if "tenant" in inspect.signature(build).parameters:
            reached = {
                tuple(bool(pattern.match(key)) for pattern in patterns)
                for key in build_all(build, sample_names | {"plain"})
            }
            assert len(reached) == 1, build
