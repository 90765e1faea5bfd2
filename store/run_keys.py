"""The Redis keys of runs and batches. Only orchestrators read them."""

from contract.names import deployment_key, tenant_key

RUN_TTL_S = 30 * 24 * 3600
"""How long a run and its batch are remembered, from when something last happened in them."""
LOG_KEPT_S = 3600
"""How long a log outlives its run: what the run came to is in its record."""


def runs_prefix(deployment: str) -> str:
    """Of the deployment's queue of runs: `leases` (sorted set, by when they end), `delayed` (by when they are due), `batches` (those with
    something to do, by when they were last served)."""
    return deployment_key(deployment, "runs:")


def run_key(deployment: str, tenant: str, run: str) -> str:
    """The hash of a run (RunRecord); of a program's with more in it (hosted_records.py)."""
    return tenant_key(deployment, tenant, f"run.{run}")


def run_log_key(deployment: str, tenant: str, run: str) -> str:
    """The list of what happened in it (entries.py)."""
    return tenant_key(deployment, tenant, f"run.{run}:log")


def run_parts_key(deployment: str, tenant: str, run: str) -> str:
    """The hash of entries that are too large to lie in the log itself, by their places in it."""
    return tenant_key(deployment, tenant, f"run.{run}:parts")


def run_events_key(deployment: str, tenant: str, run: str) -> str:
    """The stream of what is told of a program's run (told_events.py)."""
    return tenant_key(deployment, tenant, f"run.{run}:events")


def run_transcript_key(deployment: str, tenant: str, run: str) -> str:
    """The messages of a program's run that has ended, packed (hosted_records.py)."""
    return tenant_key(deployment, tenant, f"run.{run}:transcript")


def batch_key(deployment: str, tenant: str, batch: str) -> str:
    """The hash of a batch (BatchRecord); beside it `:waiting` (sorted set), `:delayed` and `:running` (sets), `:ended` (sorted set) and `:items` (list)
    of its runs' ids, and `:events` (stream). Beside the one of programs' runs `:index` (sorted set, as they were started), of which
    `:succeeded`, `:failed` and `:cancelled` are those that ended so, and `:sessions` (hash, of those that they work in)."""
    return tenant_key(deployment, tenant, f"batch.{batch}")


def batches_key(deployment: str, tenant: str) -> str:
    """The sorted set of a tenant's batches, by when they were submitted. It may still name batches that have expired."""
    return tenant_key(deployment, tenant, "batch-ids")


def member(tenant: str, name: str) -> str:
    """How a tenant's run or batch is called in the deployment's sets; a tenant's name has no bar."""
    return f"{tenant}|{name}"


def split_member(text: str) -> tuple[str, str]:
    tenant, _, name = text.partition("|")
    return tenant, name
