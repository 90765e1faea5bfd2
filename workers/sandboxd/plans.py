"""Plans of sandboxes. A plan comes from the settings and the tenant class; the terms of the tenant can only
narrow it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from contract.errors import ConfigError, ErrorCode, ToolFailure
from contract.tenancy import NetworkPolicy, SandboxTerms
from workers.sandboxd.disks.base import WorkspaceMount
from workers.sandboxd.runtime.hardening import SandboxLimits, SandboxSpec
from workers.settings import EgressRules, SandboxdSettings, TenantClass

DEFAULT = "default"
MAX_NAME_CHARS = 64
"""Longest name of a class in terms."""


BYTES_PER_INODE = 4096
"""A workspace may hold one file for each block of this size."""


@dataclass(frozen=True)
class SandboxPlan:
    """The properties of a container. Sessions with equal plans may get the same unused sandbox. Sizes are in bytes."""

    image: str
    runtime: str
    network: NetworkPolicy
    workspace_bytes: int
    workspace_inodes: int
    memory_reserve_bytes: int
    cpus: float
    pids: int


class Plans:
    """Computes plans from a tenant's terms and class. A session gets only properties that both allow.

    Raises ValueError: for a class with an invalid name, or a class that this host cannot support.
    """

    def __init__(self, settings: SandboxdSettings) -> None:
        self._settings = settings
        self.classes: Mapping[str, TenantClass] = {DEFAULT: TenantClass(), **settings.tenant_classes}
        for name, terms in self.classes.items():
            if not 0 < len(name) <= MAX_NAME_CHARS:
                raise ValueError(f"class '{name[:100]}' has an invalid name: use 1 to {MAX_NAME_CHARS} characters")
            if settings.egress_socket is None and terms.network == "egress":
                raise ValueError(
                    f"class '{name}' has network egress, and there is no proxy: set TOOLCREW_EGRESS_SOCKET"
                )

    def choose(self, terms: SandboxTerms, image: str | None = None, network: str | None = None) -> SandboxPlan:
        """Return the plan of a new session. Raises ToolFailure when this host does not have the class, or when the
        image or the network is not allowed.
        """
        granted = self._class(terms)
        chosen = self._plan(granted, self._image(granted, terms, image), _network(granted, terms, network))
        size = min(chosen.workspace_bytes, terms.workspace_bytes or chosen.workspace_bytes)
        return replace(chosen, workspace_bytes=size, workspace_inodes=size // BYTES_PER_INODE)

    def revise(self, terms: SandboxTerms, plan: SandboxPlan) -> SandboxPlan:
        """Return the plan of an existing session under the current class and terms. It never allows more than before,
        and keeps the image where that is still allowed, and the size of the workspace. Raises ToolFailure like
        `choose`.
        """
        granted = self._class(terms)
        image = plan.image if plan.image in self._allowed(granted, terms) else self._image(granted, terms, None)
        network = "none" if plan.network == "none" else self.network(terms)
        return replace(
            self._plan(granted, image, network),
            workspace_bytes=plan.workspace_bytes,
            workspace_inodes=plan.workspace_inodes,
        )

    def standard(self) -> SandboxPlan:
        """Return the plan of the default class. The pool uses it."""
        return self.choose(SandboxTerms())

    def largest_bytes(self, *, has_tmpfs_workspace: bool) -> int:
        """Return the largest memory in bytes that a sandbox of any class may use."""
        plans = [self.choose(SandboxTerms(tenant_class=name)) for name in self.classes]
        return max(limits_of(plan).memory_bytes(has_tmpfs_workspace=has_tmpfs_workspace) for plan in plans)

    def proofs(self) -> tuple[SandboxPlan, ...]:
        """Return the plans that the start-up check tries: the standard plan, then the same under every other runtime
        that a class uses.
        """
        first = self.standard()
        return (first, *(replace(first, runtime=runtime) for runtime in sorted(self.runtimes() - {first.runtime})))

    def pooled(self) -> Mapping[SandboxPlan, int]:
        """Return how many sandboxes of each plan to keep ready. Classes with equal plans share them. Raises ValueError
        for an image that is not allowed.
        """
        targets = {self.standard(): self._settings.pool_size}
        for name, terms in self.classes.items():
            for image, target in terms.pool.items():
                if image not in self._images(terms):
                    raise ValueError(
                        f"class '{name}' has a pool of image '{image}', which it may not use: add it to its images"
                    )
                plan = self._plan(terms, image, terms.network)
                targets[plan] = target if name == DEFAULT else targets.get(plan, 0) + target
        return targets

    def network(self, terms: SandboxTerms) -> NetworkPolicy:
        """Return the network that sessions of these terms may have now. It is "none" under a class that this host does
        not have, or no longer has.
        """
        granted = self.classes.get(terms.tenant_class)
        return "none" if granted is None or terms.network == "none" else granted.network

    def rules(self, terms: SandboxTerms) -> EgressRules:
        """Return the destinations that sessions of these terms may reach now. Without egress there are no
        destinations, even if the opening allowed some.
        """
        return self.classes[terms.tenant_class].egress if self.network(terms) == "egress" else EgressRules()

    def runtimes(self) -> frozenset[str]:
        """Return the runtimes of all classes."""
        return frozenset(terms.runtime or self._settings.sandbox_runtime for terms in self.classes.values())

    def images(self) -> frozenset[str]:
        """Return the images of all classes."""
        return frozenset(image for terms in self.classes.values() for image in self._images(terms))

    def _class(self, terms: SandboxTerms) -> TenantClass:
        granted = self.classes.get(terms.tenant_class)
        if granted is None:
            names = ", ".join(sorted(self.classes))
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"this host has no tenant class '{terms.tenant_class}', it has: {names}; give the tenant one of these, "
                "or add the class to TOOLCREW_TENANT_CLASSES and restart sandboxd",
            )
        return granted

    def _images(self, granted: TenantClass) -> frozenset[str]:
        listed = granted.images if granted.images is not None else self._settings.sandbox_images_allowed
        return frozenset({granted.image or self._settings.sandbox_image, *listed})

    def _allowed(self, granted: TenantClass, terms: SandboxTerms) -> frozenset[str]:
        return self._images(granted) if terms.images is None else self._images(granted).intersection(terms.images)

    def _image(self, granted: TenantClass, terms: SandboxTerms, requested: str | None) -> str:
        """Return the requested image; by default the image of the class, or the tenant's first image that the class
        allows.
        """
        allowed = self._allowed(granted, terms)
        if not allowed:
            names = ", ".join(sorted(self._images(granted)))
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"none of the tenant's images is one of class '{terms.tenant_class}' on this host, which has: {names}; "
                "add one to the tenant's policy",
            )
        if requested is not None and requested not in allowed:
            names = ", ".join(sorted(allowed))
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, f"image '{requested[:200]}' is not allowed on this host; allowed: {names}"
            )
        own = granted.image or self._settings.sandbox_image
        return requested or next(image for image in (own, *(terms.images or ())) if image in allowed)

    def _plan(self, granted: TenantClass, image: str, network: NetworkPolicy) -> SandboxPlan:
        settings = self._settings
        size = granted.workspace_bytes or settings.sandbox_workspace_bytes
        return SandboxPlan(
            image=image,
            runtime=granted.runtime or settings.sandbox_runtime,
            network=network,
            workspace_bytes=size,
            workspace_inodes=size // BYTES_PER_INODE,
            memory_reserve_bytes=granted.memory_reserve_bytes or settings.sandbox_memory_reserve_bytes,
            cpus=granted.cpus or settings.sandbox_cpus,
            pids=granted.pids or settings.sandbox_pids,
        )


def load_plans(settings: SandboxdSettings) -> Plans:
    """Return the plans of the settings. Raises ConfigError for invalid classes."""
    try:
        plans = Plans(settings)
        plans.pooled()
        return plans
    except ValueError as error:
        raise ConfigError(f"TOOLCREW_TENANT_CLASSES: {error}") from None


def _network(granted: TenantClass, terms: SandboxTerms, requested: str | None) -> NetworkPolicy:
    most = "none" if terms.network == "none" else granted.network
    if requested in (None, most):
        return most
    if requested == "none":
        return "none"
    raise ToolFailure(
        ErrorCode.INVALID_ARGUMENTS,
        f"network '{str(requested)[:40]}' is not allowed for this tenant: leave it out, or ask the operator for a "
        "policy and a class with it",
    )


def limits_of(plan: SandboxPlan) -> SandboxLimits:
    """Return the sizes of a plan; the profile's defaults fill the rest."""
    return SandboxLimits(
        memory_reserve_bytes=plan.memory_reserve_bytes,
        workspace_bytes=plan.workspace_bytes,
        workspace_inodes=plan.workspace_inodes,
        cpus=plan.cpus,
        pids=plan.pids,
    )


class Profile:
    """Builds the complete specification of a sandbox from a plan and this host's profile."""

    def __init__(self, *, seccomp: str, cgroup_version: int, life_s: float, skills_volume: str | None = None) -> None:
        self._seccomp = seccomp
        self._cgroup_version = cgroup_version
        self._skills_volume = skills_volume
        self.life_s = life_s

    def build_spec(
        self,
        plan: SandboxPlan,
        mount: WorkspaceMount,
        labels: Mapping[str, str],
        guest_volume: str | None = None,
        image_variables: Sequence[str] = (),
    ) -> SandboxSpec:
        return SandboxSpec(
            image=plan.image,
            runtime=plan.runtime,
            limits=limits_of(plan),
            labels=labels,
            seccomp=self._seccomp,
            cgroup_version=self._cgroup_version,
            workspace=mount,
            network=plan.network,
            life_s=self.life_s,
            guest_volume=guest_volume,
            skills_volume=self._skills_volume,
            image_variables=image_variables,
        )
