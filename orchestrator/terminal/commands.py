"""Builds the `toolcrew` commands that messages tell their reader to run, so that every one works when it is pasted."""

import shlex

from contract.tenancy import DEFAULT_TENANT
from orchestrator.terminal.text import escape_controls


def build_command(*words: str, tenant: str = DEFAULT_TENANT) -> str:
    """Return a command for a shell: `words` quoted, and the tenant named unless it is the default one."""
    named = [] if tenant == DEFAULT_TENANT else ["--tenant", tenant]
    return "toolcrew " + " ".join(shlex.quote(escape_controls(word.replace("\n", " "))) for word in (*words, *named))


def build_resubmission(batch: str, tenant: str = DEFAULT_TENANT) -> str:
    """Return the options with which the same file is submitted again to go on with a batch."""
    return build_command("batches", "submit", "--id", batch, tenant=tenant).removeprefix("toolcrew batches submit ")
