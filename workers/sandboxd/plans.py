"""What a session of a tenant gets on this host: the plan of its sandbox, from the settings and the tenant's class."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from contract.errors import ConfigError, ErrorCode, ToolFailure
from workers.sandboxd.classes import DEFAULT, EgressRules, NetworkPolicy, SandboxPlan, TenantClass, TenantClasses
from workers.sandboxd.hardening import SandboxLimits, Variant, build_container_config
from workers.sandboxd.workspaces.base import WorkspaceMount
from workers.settings import SandboxdSettings


class Plans:
    """Raises ValueError for classes that contradict each other, or promise what this host has not been given."""

    def __init__(self, settings: SandboxdSettings) -> None:
        default = next((terms for name, terms in settings.tenant_classes.items() if name == "default"), TenantClass())
        others = {name: terms for name, terms in settings.tenant_classes.items() if name != "default"}
        self._settings = settings
        self.classes = TenantClasses(others, default)
        if settings.egress_socket is None and (names := [name for name, terms in self.classes.all.items() if terms.network == "egress"]):
            raise ValueError(f"class '{names[0]}' has network egress, and there is no proxy: set TOOLCREW_EGRESS_SOCKET")

    def choose(self, tenant: str, image: str | None = None, network: str | None = None) -> SandboxPlan:
        """The plan of a session. Raises ToolFailure when the tenant may not have that image or network."""
        terms = self.classes.of(tenant)
        return self._plan(terms, self._image(terms, image), _network(terms, network))

    def revise(self, tenant: str, plan: SandboxPlan) -> SandboxPlan:
        """A kept session's plan as its class has it today: its image where that is still allowed, the size that its workspace has."""
        terms = self.classes.of(tenant)
        image = plan.image if plan.image in self._images(terms) else self._image(terms, None)
        network = plan.network if plan.network == terms.network else "none"
        return replace(self._plan(terms, image, network), workspace_bytes=plan.workspace_bytes, workspace_inodes=plan.workspace_inodes)

    def standard(self) -> SandboxPlan:
        """The default class's plan: what the pool makes."""
        terms = self.classes.of("")
        return self._plan(terms, self._image(terms, None), terms.network)

    def proofs(self) -> tuple[SandboxPlan, ...]:
        """What the start-up check makes: the standard plan, then the same under every other runtime that a class asks for."""
        first = self.standard()
        return (first, *(replace(first, runtime=runtime) for runtime in sorted(self.runtimes() - {first.runtime})))

    def pooled(self) -> Mapping[SandboxPlan, int]:
        """How many sandboxes to keep ready of which plan; classes with equal plans share them. Raises ValueError for an image that is not allowed."""
        wanted = {self.standard(): self._settings.pool_target}
        for name, terms in self.classes.all.items():
            for image, target in terms.pool.items():
                if image not in self._images(terms):
                    raise ValueError(f"class '{name}' has a pool of image '{image}', which it may not use: add it to its images")
                plan = self._plan(terms, image, terms.network)
                wanted[plan] = target if name == DEFAULT else wanted.get(plan, 0) + target
        return wanted

    def rules(self, tenant: str) -> EgressRules:
        """What the tenant's sessions may reach now: nothing without egress, whatever an earlier sandboxd let a session have that it kept."""
        terms = self.classes.of(tenant)
        return terms.egress if terms.network == "egress" else EgressRules()

    def runtimes(self) -> frozenset[str]:
        """All that any class asks for."""
        return frozenset(terms.runtime or self._settings.sandbox_runtime for terms in self.classes.all.values())

    def images(self) -> frozenset[str]:
        """All that any class may ask for."""
        return frozenset(image for terms in self.classes.all.values() for image in self._images(terms))

    def _images(self, terms: TenantClass) -> frozenset[str]:
        listed = terms.images if terms.images is not None else self._settings.sandbox_images_allowed
        return frozenset({terms.image or self._settings.sandbox_image, *listed})

    def _image(self, terms: TenantClass, asked: str | None) -> str:
        allowed = self._images(terms)
        image = asked or terms.image or self._settings.sandbox_image
        if image not in allowed:
            names = ", ".join(sorted(allowed))
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"image '{image[:200]}' is not allowed on this host; allowed: {names}")
        return image

    def _plan(self, terms: TenantClass, image: str, network: NetworkPolicy) -> SandboxPlan:
        settings = self._settings
        return SandboxPlan(
            image=image,
            runtime=terms.runtime or settings.sandbox_runtime,
            network=network,
            workspace_bytes=terms.workspace_bytes or settings.sandbox_workspace_bytes,
            workspace_inodes=settings.sandbox_workspace_inodes,
            memory_reserve_bytes=terms.memory_reserve_bytes or settings.sandbox_memory_reserve_bytes,
            cpus=terms.cpus or settings.sandbox_cpus,
            pids=terms.pids or settings.sandbox_pids,
        )


def load_plans(settings: SandboxdSettings) -> Plans:
    """The plans of those settings. Raises ConfigError for classes that cannot be."""
    try:
        plans = Plans(settings)
        plans.pooled()
        return plans
    except ValueError as error:
        raise ConfigError(f"TOOLCREW_TENANT_CLASSES: {error}") from None


def _network(terms: TenantClass, asked: str | None) -> NetworkPolicy:
    if asked in (None, terms.network):
        return terms.network
    if asked == "none":
        return "none"
    raise ToolFailure(
        ErrorCode.INVALID_ARGUMENTS,
        f"network '{str(asked)[:40]}' is not allowed for this tenant: leave it out, or ask the operator for a class with it",
    )


def limits_of(plan: SandboxPlan) -> SandboxLimits:
    """The sizes of a plan, with the profile's own for the rest."""
    return SandboxLimits(
        memory_reserve_bytes=plan.memory_reserve_bytes,
        workspace_bytes=plan.workspace_bytes,
        workspace_inodes=plan.workspace_inodes,
        cpus=plan.cpus,
        pids=plan.pids,
    )


class Profile:
    """Plans as the engine wants them: the whole configuration of a container under this host's profile."""

    def __init__(self, *, seccomp: str, cgroup_version: int, life_s: float) -> None:
        self._seccomp = seccomp
        self._cgroup_version = cgroup_version
        self.life_s = life_s

    def build_config(
        self, plan: SandboxPlan, mount: WorkspaceMount, labels: Mapping[str, str], guest_volume: str | None = None
    ) -> Mapping[str, Any]:
        return build_container_config(
            image=plan.image,
            runtime=plan.runtime,
            limits=limits_of(plan),
            labels=labels,
            seccomp=self._seccomp,
            cgroup_version=self._cgroup_version,
            variant=Variant(workspace=mount, network=plan.network, life_s=self.life_s, guest_volume=guest_volume),
        )
