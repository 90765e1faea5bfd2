"""`toolcrew runs show` prints the fields of a run and of its end side by side, as text and as JSON."""

from toolcrew.contract.run_events import Failure, FailureKind
from toolcrew.contract.run_views import DurableRunState
from toolcrew.orchestrator.cli.runs import describe_run
from toolcrew.orchestrator.operations.views import view_run
from toolcrew.store.run_records import DurableRun, RunEnd


def test_a_run_is_described_with_readable_times_and_without_empty_fields() -> None:
    run = DurableRun(
        id="r",
        tenant="acme",
        state=DurableRunState.SUCCEEDED,
        instruction="say it",
        created_at=0.0,
        end=RunEnd(answer="done", artifacts_missing=("a.txt",)),
    )
    fields = dict(line.split(maxsplit=1) for line in describe_run(view_run(run)))
    assert fields["created_at"] == "1970-01-01T00:00:00Z"
    assert (fields["answer"], fields["artifacts_missing"], fields["is_cut"]) == ("done", '["a.txt"]', "False")
    assert not fields.keys() & {"model", "session", "started_at", "metadata", "failure", "artifacts"}


def test_the_json_of_a_run_has_the_fields_of_its_end_next_to_its_state_and_readable_times() -> None:
    failure = Failure(kind=FailureKind.MODEL, code="max_iterations", message="the run reached its limit")
    end = RunEnd(stop_reason="max_iterations", steps=3, failure=failure)
    run = DurableRun(
        id="r", tenant="acme", state=DurableRunState.FAILED, instruction="x", created_at=0.0, ended_at=1.0, end=end
    )
    shown = view_run(run).model_dump(mode="json")
    assert (shown["state"], shown["stop_reason"], shown["steps"]) == ("failed", "max_iterations", 3)
    assert shown["failure"]["code"] == "max_iterations"
    assert (shown["created_at"], shown["ended_at"]) == ("1970-01-01T00:00:00Z", "1970-01-01T00:00:01Z")
