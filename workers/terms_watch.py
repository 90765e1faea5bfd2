"""Tells sandboxd what tenants may have by now, between their calls: a background job loses a network that was taken back."""

import threading
from collections.abc import Callable

import structlog

from contract.errors import ErrorCode, OperatorError, ToolFailure
from contract.hosts import HEARTBEAT_S
from contract.tenancy import SandboxTerms, TenantPolicy
from workers.sandbox_client import SandboxClient

log = structlog.get_logger(__name__)


class TermsWatch:
    """A thread that asks for the policies of the tenants that have sessions here every HEARTBEAT_S seconds, until `stop` is set.

    `find_policy` raises ToolFailure(UNKNOWN_TENANT) and OperatorError.
    """

    def __init__(self, open_client: Callable[[], SandboxClient], find_policy: Callable[[str], TenantPolicy], stop: threading.Event) -> None:
        self._open_client = open_client
        self._find_policy = find_policy
        self._stop = stop
        self._told: dict[str, SandboxTerms] = {}
        self._thread = threading.Thread(target=self._run, name="terms", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def look(self, client: SandboxClient) -> int:
        """One round: tell what has changed; gives of how many tenants. Raises OperatorError."""
        tenants = {str(row["name"]).partition(":")[0] for row in client.sessions()}
        self._told = {tenant: terms for tenant, terms in self._told.items() if tenant in tenants}
        count = 0
        for tenant in sorted(tenants):
            terms = self._find_terms(tenant)
            if terms is not None and terms != self._told.get(tenant):
                client.tell_terms(tenant, terms)
                self._told[tenant] = terms
                count += 1
        return count

    def _find_terms(self, tenant: str) -> SandboxTerms | None:
        """Those of its policy; of a tenant that is none any more its last ones without network. None: nobody can say."""
        try:
            return self._find_policy(tenant).sandbox
        except ToolFailure as refused:
            if refused.code is not ErrorCode.UNKNOWN_TENANT:
                raise
            return self._told.get(tenant, SandboxTerms()).model_copy(update={"network": "none"})
        except OperatorError as error:
            log.warning("terms_not_known", error=str(error))
            return None

    def _run(self) -> None:
        with self._open_client() as client:
            while not self._stop.wait(HEARTBEAT_S):
                try:
                    self.look(client)
                except (OperatorError, ToolFailure) as error:
                    log.warning("terms_not_told", error=str(error))
