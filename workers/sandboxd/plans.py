"""Plans of sandboxes: which image, sizes, network and runtime a sandbox gets. A plan comes from the settings and the
tenant class. The tenant's SandboxPolicy can only reduce what it allows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from toolcrew.contract.calls import MAX_TIMEOUT_S
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.image_names import (
    ImageName,
    ImageNameError,
    find_matches,
    is_allowed,
    parse_image_name,
    parse_image_pattern,
)
from toolcrew.contract.secrets import build_placeholder
from toolcrew.contract.session_spec import (
    DEFAULT_HOSTNAME,
    DEFAULT_OPTIONS,
    LargestOptions,
    NetworkPolicy,
    PreviewAccess,
    SandboxOptions,
)
from toolcrew.contract.settings import SandboxdSettings
from toolcrew.contract.tenancy import SandboxPolicy
from toolcrew.contract.tenant_classes import EgressRules, TenantClass
from toolcrew.workers.sandboxd.disks.base import WorkspaceMount
from toolcrew.workers.sandboxd.runtime.hardening import MOUNTS_BYTES, NO_IMAGE, ImageFacts, SandboxLimits, SandboxSpec
from toolcrew.workers.sandboxd.runtime.seccomp import allow_tracing

DEFAULT = "default"
_MAX_LIST_CHARS = 2000
DEFAULT_RUNTIME = "runc"
"""Runtime for which sandboxd may start sandboxes itself. Others, such as runsc, are started by the engine."""
MAX_NAME_CHARS = 64
"""Maximum length of the name of a class, because a SandboxPolicy names its class."""
MAX_IMAGES_CHARS = 32 * 1024
"""Limit of the names and patterns of images of all classes. Each report of the host contains them."""
_SIZES = {
    "cpus": "cpus",
    "memory_reserve_bytes": "memory_bytes",
    "workspace_bytes": "workspace_bytes",
    "pids": "pids",
}
"""Sizes of a plan, each with its name in SandboxOptions."""
BYTES_PER_INODE = 4096
"""A workspace may hold one file for each block of this size."""


@dataclass(frozen=True)
class SandboxPlan:
    """The properties of a container. Sessions with equal plans may get the same unused sandbox. Sizes are in bytes.

    `tenant_class`: the class whose registry logins pull the image. `image_id`: the content id of the image once it is
    known; the container is made from this id, so a tag that moves does not change the image of a session. `options`:
    the options that the session asked for. `timeout_s`: the largest limit of a call.
    """

    image: str
    runtime: str
    network: NetworkPolicy
    workspace_bytes: int
    workspace_inodes: int
    memory_reserve_bytes: int
    cpus: float
    pids: int
    is_root: bool = False
    ptrace: bool = False
    hostname: str = DEFAULT_HOSTNAME
    secrets: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """Names of the session's secrets with their placeholders (texts that the proxy replaces by the secrets). A sandbox
    of the pool gets the placeholders when a session takes it.
    """
    options: SandboxOptions = field(default=DEFAULT_OPTIONS, compare=False)
    timeout_s: float = field(default=MAX_TIMEOUT_S, compare=False)
    tenant_class: str = field(default=DEFAULT, compare=False)
    image_id: str | None = field(default=None, compare=False)

    def granted(self) -> SandboxOptions:
        """Return the sizes, the user and the secrets of the sandbox."""
        return SandboxOptions(
            cpus=self.cpus,
            memory_bytes=self.memory_reserve_bytes + MOUNTS_BYTES,
            workspace_bytes=self.workspace_bytes,
            pids=self.pids,
            user="root" if self.is_root else "sandbox",
            hostname=self.options.hostname,
            secrets=tuple(name for name, _ in self.secrets),
        )


class Plans:
    """Computes plans from a tenant's policy and class. A session gets only properties that both allow.

    Raises ValueError for a class with an invalid name, or a class that this host cannot support.
    """

    def __init__(self, settings: SandboxdSettings) -> None:
        self._settings = settings
        self.classes: Mapping[str, TenantClass] = {DEFAULT: TenantClass(), **settings.tenant_classes}
        for name, tenant_class in self.classes.items():
            if not 0 < len(name) <= MAX_NAME_CHARS:
                raise ValueError(f"class '{name[:100]}' has an invalid name: use 1 to {MAX_NAME_CHARS} characters")
            if settings.egress_socket is None and tenant_class.network == "egress":
                raise ValueError(
                    f"class '{name}' has network egress, and there is no proxy: set TOOLCREW_EGRESS_SOCKET"
                )
        if sum(map(len, self.images())) > MAX_IMAGES_CHARS:
            raise ValueError(
                f"the names and patterns of images have more than {MAX_IMAGES_CHARS} characters together: use patterns "
                "in place of names"
            )

    def choose(
        self,
        policy: SandboxPolicy,
        image: str | None = None,
        network: str | None = None,
        options: SandboxOptions = DEFAULT_OPTIONS,
    ) -> SandboxPlan:
        """Return the plan of a new session. Raises ToolFailure when this host does not have the class, or when the
        image, the network or an option is not allowed.
        """
        granted = self._class(policy)
        chosen = self._plan(
            policy.tenant_class, self._image(granted, policy, image), _network(granted, policy, network)
        )
        plan, largest = _with_options(chosen, options), self._largest(policy, chosen)
        _check_options(options, plan, largest)
        _check_secrets(policy, plan)
        return _cut(plan, largest)

    def revise(self, policy: SandboxPolicy, plan: SandboxPlan) -> SandboxPlan:
        """Return the plan of an existing session under the current class and policy. The new plan never allows more
        than the old one. It keeps the size of the workspace, and the image if that is still allowed. Raises the
        ToolFailures of `choose`.
        """
        granted = self._class(policy)
        if plan.is_root and "root" not in (granted.user, granted.largest.user):
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"sessions of class '{policy.tenant_class}' no longer run as root, but this session's disk was made "
                f"for root: open a new session",
            )
        is_kept = self._allows(granted, policy, plan.image)
        image = plan.image if is_kept else self._image(granted, policy, None)
        network = "none" if plan.network == "none" else self.network(policy)
        chosen = self._plan(policy.tenant_class, image, network)
        return replace(
            _cut(_with_options(chosen, plan.options), self._largest(policy, chosen)),
            is_root=plan.is_root,
            secrets=plan.secrets,
            image_id=plan.image_id if is_kept else None,
            workspace_bytes=plan.workspace_bytes,
            workspace_inodes=plan.workspace_inodes,
        )

    def standard(self) -> SandboxPlan:
        """Return the plan of the default class. The pool uses it."""
        return self.choose(SandboxPolicy())

    def largest_bytes(self, *, has_tmpfs_workspace: bool) -> int:
        """Return the largest memory in bytes that a sandbox of any class may use."""
        plans = [
            self.choose(SandboxPolicy(tenant_class=name), options=tenant_class.largest)
            for name, tenant_class in self.classes.items()
        ]
        return max(limits_of(plan).memory_bytes(has_tmpfs_workspace=has_tmpfs_workspace) for plan in plans)

    def proofs(self) -> tuple[SandboxPlan, ...]:
        """Return the plans that the test at the start of sandboxd uses: the standard plan; the standard plan under
        every other runtime that a class uses; and with root of the sandbox if a class allows it.
        """
        first = self.standard()
        others = [replace(first, runtime=runtime) for runtime in sorted(self.runtimes() - {first.runtime})]
        if self.has_root():
            others.append(replace(first, is_root=not first.is_root))
        return (first, *others)

    def has_root(self) -> bool:
        """Return whether sessions of any class may run as root of the sandbox."""
        return any("root" in (tenant_class.user, tenant_class.largest.user) for tenant_class in self.classes.values())

    def pooled(self) -> Mapping[SandboxPlan, int]:
        """Return how many sandboxes of each plan to keep ready. Classes with equal plans share them. Raises ValueError
        for an image that is not allowed.
        """
        targets = {self.standard(): self._settings.pool_size}
        for name, tenant_class in self.classes.items():
            for image, target in tenant_class.pool.items():
                if not is_allowed(self._entries(tenant_class), parse_image_name(image)):
                    raise ValueError(
                        f"class '{name}' has a pool of image '{image}', which it may not use: add it to its images"
                    )
                plan = self._plan(name, self._spell(tenant_class, parse_image_name(image)), tenant_class.network)
                targets[plan] = target if name == DEFAULT else targets.get(plan, 0) + target
        return targets

    def network(self, policy: SandboxPolicy) -> NetworkPolicy:
        """Return the network that sessions of this policy may have now. It is "none" if this host does not have the
        policy's class (any more).
        """
        granted = self.classes.get(policy.tenant_class)
        return "none" if granted is None or policy.network == "none" else granted.network

    def previews(self, policy: SandboxPolicy) -> PreviewAccess:
        """Return who may use previews of sessions of this policy."""
        granted = self.classes.get(policy.tenant_class)
        return "none" if granted is None else granted.previews

    def rules(self, policy: SandboxPolicy) -> EgressRules:
        """Return the destinations that sessions of this policy may reach now. Without network `egress` there are none,
        even if they were allowed when the session was opened.
        """
        return self.classes[policy.tenant_class].egress if self.network(policy) == "egress" else EgressRules()

    def runtimes(self) -> frozenset[str]:
        """Return the runtimes of all classes."""
        return frozenset(
            tenant_class.runtime or self._settings.sandbox_runtime for tenant_class in self.classes.values()
        )

    def largest_options(self) -> dict[str, LargestOptions]:
        """Return the largest options that a session may request, by class. Every field has a value."""
        return {name: self._largest_options(name, granted) for name, granted in self.classes.items()}

    def _largest_options(self, name: str, granted: TenantClass) -> LargestOptions:
        chosen = self._plan(name, granted.image or self._settings.sandbox_image, granted.network)
        largest = self._largest(SandboxPolicy(tenant_class=name), chosen)
        sizes = largest.granted().model_dump(exclude={"hostname", "secrets"})
        return LargestOptions(**sizes, timeout_s=largest.timeout_s)

    def egress_classes(self) -> list[str]:
        """Return the classes whose sessions may have network egress."""
        return sorted(name for name, granted in self.classes.items() if granted.network == "egress")

    def images(self) -> frozenset[str]:
        """Return the names and patterns of images of all classes."""
        return frozenset(image for tenant_class in self.classes.values() for image in self._entries(tenant_class))

    def local_images(self) -> frozenset[str]:
        """Return the names of images that the operator must provide, because sandboxd does not pull them."""
        return frozenset(image for image in self.images() if not parse_image_pattern(image).names_registry)

    def may_pull(self, plan: SandboxPlan) -> bool:
        """Return whether sandboxd may pull the image of a plan: an entry of the class that begins with a registry
        allows it.
        """
        granted, name = self.classes.get(plan.tenant_class), parse_image_name(plan.image)
        # An entry without a registry is an image that the operator builds. In a public registry the name may belong to
        # another owner.
        return granted is not None and any(found.names_registry for found in find_matches(self._entries(granted), name))

    def _class(self, policy: SandboxPolicy) -> TenantClass:
        granted = self.classes.get(policy.tenant_class)
        if granted is None:
            names = ", ".join(sorted(self.classes))
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"this host has no tenant class '{policy.tenant_class}', it has: {names}; give the tenant one of "
                "these, or add the class to TOOLCREW_TENANT_CLASSES and restart sandboxd",
            )
        return granted

    def _entries(self, granted: TenantClass) -> tuple[str, ...]:
        """Return the names and patterns of the class, its own image first."""
        listed = granted.images if granted.images is not None else self._settings.sandbox_images_allowed
        return (granted.image or self._settings.sandbox_image, *listed)

    def _allows(self, granted: TenantClass, policy: SandboxPolicy, image: str) -> bool:
        """Return whether both the class and the policy allow the image. False for a malformed name."""
        try:
            name = parse_image_name(image)
        except ImageNameError:
            return False
        return is_allowed(self._entries(granted), name) and (policy.images is None or is_allowed(policy.images, name))

    def _spell(self, granted: TenantClass, name: ImageName) -> str:
        """Return the image's name in the spelling of the class, so that the same image always gives the same plan."""
        return next((found.text for found in find_matches(self._entries(granted), name) if found.name), name.short)

    def _image(self, granted: TenantClass, policy: SandboxPolicy, requested: str | None) -> str:
        """Return the requested image. By default return the image of the class, or if the policy does not allow it, the
        tenant's first image that the class allows.
        """
        own = granted.image or self._settings.sandbox_image
        candidates = (own, *(policy.images or ())) if requested is None else (requested,)
        chosen = next((image for image in candidates if self._allows(granted, policy, image)), None)
        if chosen is not None:
            return self._spell(granted, parse_image_name(chosen))
        allowed = self._list_allowed(granted, policy)
        if requested is None or not allowed:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"no image of the tenant's policy is allowed in class '{policy.tenant_class}' on this host. The class "
                f"allows {_join(self._entries(granted))}: add one of these to the tenant's policy, or name an image",
            )
        try:
            parse_image_name(requested)
        except ImageNameError as error:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, str(error)) from error
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"image '{requested}' is not allowed on this host: use one of {_join(allowed)}",
        )

    def _list_allowed(self, granted: TenantClass, policy: SandboxPolicy) -> set[str]:
        """Return the entries of the class that the policy allows, and the entries of the policy that the class allows.
        Patterns are not compared with each other, because two patterns may have no name in common.
        """
        entries = self._entries(granted)
        if policy.images is None:
            return set(entries)
        return {image for image in (*entries, *policy.images) if self._allows(granted, policy, image)} | {
            image for image in policy.images if "*" in image
        }

    def _largest(self, policy: SandboxPolicy, plan: SandboxPlan) -> SandboxPlan:
        """Return the plan with the largest sizes that a session of this policy may request. `plan`: the plan of the
        class.
        """
        most = self.classes[policy.tenant_class].largest
        largest = _with_options(plan, most)
        sizes = {name: max(getattr(plan, name), getattr(largest, name)) for name in _SIZES}
        if policy.workspace_bytes is not None:
            sizes["workspace_bytes"] = min(sizes["workspace_bytes"], policy.workspace_bytes)
        return replace(largest, is_root=plan.is_root or largest.is_root, **sizes)

    def _plan(self, tenant_class: str, image: str, network: NetworkPolicy) -> SandboxPlan:
        settings, granted = self._settings, self.classes[tenant_class]
        size = granted.workspace_bytes or settings.sandbox_workspace_bytes
        return SandboxPlan(
            image=image,
            runtime=granted.runtime or settings.sandbox_runtime,
            network=network,
            workspace_bytes=size,
            workspace_inodes=size // BYTES_PER_INODE,
            memory_reserve_bytes=granted.memory_reserve_bytes or settings.sandbox_memory_reserve_bytes,
            cpus=granted.cpus or SandboxLimits.cpus,
            pids=granted.pids or SandboxLimits.pids,
            is_root=granted.user == "root",
            ptrace=granted.ptrace,
            timeout_s=granted.largest.timeout_s,
            tenant_class=tenant_class,
        )


def load_plans(settings: SandboxdSettings) -> Plans:
    """Return the plans of the settings. Raises ConfigError for invalid classes."""
    try:
        plans = Plans(settings)
        plans.pooled()
        return plans
    except ValueError as error:
        raise ConfigError(f"TOOLCREW_TENANT_CLASSES: {error}") from None


def _join(images: Iterable[str]) -> str:
    """Return the names of images as one text of limited length."""
    text = ", ".join(sorted(images))
    return text if len(text) <= _MAX_LIST_CHARS else f"{text[:_MAX_LIST_CHARS]}…"


def _network(granted: TenantClass, policy: SandboxPolicy, requested: str | None) -> NetworkPolicy:
    most = "none" if policy.network == "none" else granted.network
    if requested in (None, most):
        return most
    if requested == "none":
        return "none"
    raise ToolFailure(
        ErrorCode.INVALID_ARGUMENTS,
        f"network '{str(requested)[:40]}' is not allowed for this tenant: omit it, or ask the operator for a policy "
        f"and a class that allow it",
    )


def _check_options(options: SandboxOptions, plan: SandboxPlan, largest: SandboxPlan) -> None:
    """Raise ToolFailure for an option above the largest one. `plan`: the plan with the options."""
    for name, option in _SIZES.items():
        requested, most = getattr(options, option), getattr(largest, name)
        if requested is not None and getattr(plan, name) > most:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"{option} is {requested}, and a session of class '{plan.tenant_class}' may have at most "
                f"{most + MOUNTS_BYTES if option == 'memory_bytes' else most} for this tenant: ask for less, or ask "
                "the operator to raise `largest` of the class",
            )
    if plan.is_root and not largest.is_root:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"a session of class '{plan.tenant_class}' may not run as root: leave `user` out, or ask the operator to "
            "set `user` in `largest` of the class",
        )


def _check_secrets(policy: SandboxPolicy, plan: SandboxPlan) -> None:
    """Raise ToolFailure for secrets that the policy or the network does not allow."""
    names = plan.options.secrets
    refused = [name for name in names if policy.secrets is not None and name not in policy.secrets]
    if refused:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"the tenant's policy does not allow the secret {refused[0]}: omit it, or ask the operator to allow it",
        )
    if names and plan.network != "egress":
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            "a session without network cannot use secrets: leave them out, or use a tenant class with egress",
        )


def _with_options(plan: SandboxPlan, options: SandboxOptions) -> SandboxPlan:
    """Return the plan of a class with the options of a session."""
    reserve = None if options.memory_bytes is None else options.memory_bytes - MOUNTS_BYTES
    return replace(
        plan,
        options=options,
        cpus=options.cpus or plan.cpus,
        memory_reserve_bytes=reserve or plan.memory_reserve_bytes,
        workspace_bytes=options.workspace_bytes or plan.workspace_bytes,
        pids=options.pids or plan.pids,
        is_root=plan.is_root if options.user is None else options.user == "root",
        hostname=options.hostname or plan.hostname,
    )


def with_placeholders(plan: SandboxPlan, name: str) -> SandboxPlan:
    """Return the plan with the placeholders of the session `name`, `<tenant>:<session>`."""
    tenant, _, session = name.partition(":")
    names = sorted(set(plan.options.secrets))
    return replace(plan, secrets=tuple((secret, build_placeholder(tenant, session, secret)) for secret in names))


def _cut(plan: SandboxPlan, largest: SandboxPlan) -> SandboxPlan:
    """Return the plan with every size limited to that of `largest`."""
    sizes = {name: min(getattr(plan, name), getattr(largest, name)) for name in _SIZES}
    return replace(plan, workspace_inodes=sizes["workspace_bytes"] // BYTES_PER_INODE, **sizes)


def limits_of(plan: SandboxPlan) -> SandboxLimits:
    """Return the limits of a sandbox with this plan. Limits that a plan does not contain have the defaults of
    SandboxLimits.
    """
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
        image: ImageFacts = NO_IMAGE,
    ) -> SandboxSpec:
        return SandboxSpec(
            image=plan.image_id or plan.image,
            runtime=plan.runtime,
            limits=limits_of(plan),
            labels=labels,
            seccomp=allow_tracing(self._seccomp) if plan.ptrace else self._seccomp,
            cgroup_version=self._cgroup_version,
            workspace=mount,
            network=plan.network,
            life_s=self.life_s,
            guest_volume=guest_volume,
            skills_volume=self._skills_volume,
            image_facts=image,
            is_root=plan.is_root,
            hostname=plan.hostname,
        )
