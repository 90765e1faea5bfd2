"""What this process knows to be secret, for striking it out of what it writes down (contract/masking.py)."""

from collections.abc import Mapping

from contract.masking import Masker, passwords_of, secrets_of_settings
from orchestrator.settings import OrchestratorSettings, secrets_of_environment

__all__ = ["Masker", "build_masker", "passwords_of"]


def build_masker(settings: OrchestratorSettings, more: Mapping[str, str] | None = None) -> Masker:
    """A masker of what this process knows: the secrets of its settings, of its environment, and `more` (kind ->
    value).
    """
    return Masker({**secrets_of_environment(), **secrets_of_settings(settings), **(more or {})})
