"""Builds the `toolcrew` commands in messages. Each command works when a reader pastes it into a shell."""

import shlex

from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.orchestrator.terminal.text import escape_controls


def build_command(*arguments: str, tenant: str = DEFAULT_TENANT) -> str:
    """Return a shell command with quoted words. The command names the tenant, unless the tenant is the default
    tenant.
    """
    named = [] if tenant == DEFAULT_TENANT else ["--tenant", tenant]
    return "toolcrew " + " ".join(
        shlex.quote(escape_controls(word.replace("\n", " "))) for word in (*arguments, *named)
    )


def build_resubmission(batch: str, tenant: str = DEFAULT_TENANT) -> str:
    """Return the options that submit the same file again to continue a batch."""
    return build_command("batches", "submit", "--id", batch, tenant=tenant).removeprefix("toolcrew batches submit ")
