"""Who asks, for whom, and whether he may: a bearer key with each request."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query, Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase

from contract.errors import ErrorCode
from orchestrator.api.door import bearer_of, identify
from orchestrator.api.house import House
from orchestrator.api.problems import ApiProblem
from orchestrator.api.shares import Streams
from orchestrator.sdk.client import ToolClient
from store.api_keys import ApiKeys, Credential, Identity
from store.audit import Audit, AuditAction, AuditEntry, build_entry
from store.tenants import RedisTenants


@dataclass(frozen=True)
class Caller:
    """Who asks, and the tenant that it is about: the key's own, or the one that an operator names."""

    house: House
    identity: Identity
    tenant: str
    credential: Credential

    @property
    def client(self) -> ToolClient:
        """The pool as that tenant has it."""
        return self.house.client(self.tenant, self.credential, key=self.identity.key_id)

    @property
    def tenants(self) -> RedisTenants:
        """The tenants, changed in the caller's name."""
        return self.house.parts.pool.tenants.acting_as(self.identity.actor())

    @property
    def keys(self) -> ApiKeys:
        """The API keys, changed in the caller's name."""
        return self.house.parts.keys.acting_as(self.identity.actor())

    @property
    def streams(self) -> Streams:
        """Those that the key has open in this process."""
        return self.house.streams.of(self.identity.key_id)

    async def note_foreign(self, action: AuditAction, target: str) -> None:
        """Put into the audit log, before it is done, what `foreign_entry` gives."""
        if (entry := self.foreign_entry(action, target)) is not None:
            await Audit(self.house.parts.pool.redis, self.house.settings.deployment).add(entry)

    def foreign_entry(self, action: AuditAction, target: str) -> AuditEntry | None:
        """Of the audit, about what an operator does to another tenant's; None: what is one's own is one's own
        affair.
        """
        if self.tenant == self.identity.tenant:
            return None
        return build_entry(self.identity.actor(), action, target, tenant=self.tenant)

    @property
    def is_operator(self) -> bool:
        return self.identity.role != "tenant"


def house_of(request: Request) -> House:
    house = request.app.state.house
    assert isinstance(house, House)
    return house


async def depend_on_house(request: Request) -> House:
    """The same for routes. Async, though it waits for nothing: what is not is run in a thread, which costs a request
    more than all else that is looked up.
    """
    return house_of(request)


class _Callers(SecurityBase):
    """Who asks, by the key that is shown. One dependency that describes itself as a bearer key: finding out what a
    chain of them needs takes longer than their work."""

    scheme_name = "HTTPBearer"
    model = HTTPBearer(description="An API key: `toolcrew tenants keys add TENANT`.")

    async def __call__(
        self,
        request: Request,
        tenant: Annotated[
            str | None,
            Query(
                pattern=r"^[A-Za-z0-9_-]{1,64}$",
                description="For whom, with the key of an operator. Else the key's own tenant.",
            ),
        ] = None,
    ) -> Caller:
        house = house_of(request)
        identity = await identify(house, request.scope)
        credential = Credential(house.parts.keys, bearer_of(request.scope))
        wanted = tenant or identity.tenant
        if not identity.may_act_for(wanted):
            raise ApiProblem(
                ErrorCode.PERMISSION_DENIED, f"the API key is for tenant {identity.tenant} alone: leave `tenant` out"
            )
        return Caller(house, identity, wanted, credential)


find_caller = _Callers()
AnyCaller = Annotated[Caller, Depends(find_caller)]


async def _operator(caller: AnyCaller) -> Caller:
    if caller.identity.role not in ("operator", "admin"):
        raise ApiProblem(ErrorCode.PERMISSION_DENIED, "this is for operators: use a key of the role operator or admin")
    return caller


async def _admin(caller: AnyCaller) -> Caller:
    if caller.identity.role != "admin":
        raise ApiProblem(ErrorCode.PERMISSION_DENIED, "this is for administrators: use a key of the role admin")
    return caller


OperatorCaller = Annotated[Caller, Depends(_operator)]
AdminCaller = Annotated[Caller, Depends(_admin)]
