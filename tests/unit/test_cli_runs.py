"""`toolcrew runs show` prints each field of a run that has a value."""

from orchestrator.cli.runs import describe_run
from store.run_records import HostedRun, HostedState, RunEnd


def test_a_run_is_described_with_readable_times_and_without_empty_fields() -> None:
    run = HostedRun(
        id="r",
        tenant="acme",
        state=HostedState.SUCCEEDED,
        instruction="say it",
        created_at=0.0,
        end=RunEnd(answer="done", artifacts_missing=("a.txt",)),
    )
    fields = dict(line.split(maxsplit=1) for line in describe_run(run))
    assert fields["created_at"] == "1970-01-01T00:00:00Z"
    assert (fields["answer"], fields["artifacts_missing"], fields["is_cut"]) == ("done", '["a.txt"]', "False")
    assert not fields.keys() & {"model", "session", "started_at", "metadata", "failure", "artifacts"}
