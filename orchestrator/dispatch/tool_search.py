"""The tool that a call names: among those that the workers publish, and those that a tenant's own skills are."""

from collections.abc import Sequence
from typing import Protocol

from contract.calls import ToolCall
from contract.errors import ConfigError, ErrorCode, ToolFailure
from contract.schema import find_nearest, prepare_arguments
from contract.specs import ToolSpec
from orchestrator.metrics.call_meter import CallMeter
from store.catalog import CatalogSource


class TenantTools(Protocol):
    """What there is for one tenant (orchestrator/dispatch/tenant_catalog.py)."""

    async def find(self, name: str, tenant: str) -> ToolSpec | None: ...


class ToolSearch:
    """`offers` None: tenants have no tools of their own. `meter`: is told what there is."""

    def __init__(
        self, catalog: CatalogSource, offers: TenantTools | None = None, meter: CallMeter | None = None
    ) -> None:
        self._catalog, self._offers, self._meter = catalog, offers, meter
        self._published: Sequence[ToolSpec] = ()
        self._by_name: dict[str, ToolSpec] = {}

    async def find(self, name: str, audience: str, tenant: str) -> ToolSpec:
        """Raises ToolFailure(TOOL_NOT_FOUND) with the nearest names, ConfigError when no worker serves it now,
        BrokerUnavailable.
        """
        published = await self._catalog.specs()
        if published is not self._published:
            # Catalogs are read once a second, tools are looked up for every call.
            self._published, self._by_name = published, {spec.name: spec for spec in published}
            if self._meter is not None:
                self._meter.know(published)
        found = self._by_name.get(name)
        if found is not None and not (found.audience == audience and found.is_for(tenant)):
            found = None
        if self._offers is not None and audience == "model" and not name.startswith("session."):
            found = await self._offers.find(name, tenant)
        if found is not None:
            return found
        missing = self._catalog.explain_missing(name)
        if missing is not None:
            raise ConfigError(missing)
        raise ToolFailure(
            ErrorCode.TOOL_NOT_FOUND,
            f"Tool not found: {name}",
            nearest=find_nearest(
                name, [spec.name for spec in published if spec.audience == audience and spec.is_for(tenant)]
            ),
        )


def as_skill_run(call: ToolCall, spec: ToolSpec) -> ToolCall:
    """The call of a tool that is an installed skill, as the call of skill_tool that a worker knows. `spec`: of that
    one.
    """
    arguments, _ = prepare_arguments(spec, {"name": call.name, "action": "run", "args": call.arguments})
    return ToolCall(id=call.id, name=spec.name, arguments=arguments)
