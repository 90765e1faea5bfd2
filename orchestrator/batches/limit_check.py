"""Checks what runs and calls ask for against the limits of their tenant and its hosts, before anything is queued.

The hosts check the same limits again when a session opens: a policy or a host may have changed meanwhile.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from toolcrew.contract.calls import MAX_TIMEOUT_S
from toolcrew.contract.hosts import HostReport
from toolcrew.contract.image_names import ImageNameError, is_allowed, parse_image_name
from toolcrew.contract.session_spec import DEFAULT_OPTIONS, LargestOptions, SandboxOptions
from toolcrew.contract.specs import ToolSpec
from toolcrew.contract.tenancy import TenantPolicy, largest_limit
from toolcrew.orchestrator.batches.lines import MAX_SHOWN, BadBatch, BatchFile, LineError
from toolcrew.store.batches import BatchItem, CallBody

MAX_NAMED = 20
_SIZES = ("cpus", "memory_bytes", "workspace_bytes", "pids")


@dataclass(frozen=True)
class TenantLimits:
    """The limits of a tenant as they are now.

    `hosts`: hosts with the class of the tenant; empty: no host reports, so only the policy is checked. `tools`: the
    tools of the tenant by name. `secrets`: names of its secrets. `open_sessions`: those of the sessions that the items
    name which are open.
    """

    policy: TenantPolicy
    hosts: Sequence[HostReport] = ()
    tools: Mapping[str, ToolSpec] | None = None
    secrets: Collection[str] = ()
    open_sessions: Collection[str] = ()

    def find_errors(self, item: BatchItem, options: SandboxOptions = DEFAULT_OPTIONS) -> Iterator[str]:
        """Yield a sentence for each field of an item that cannot be accepted. `options`: the options of the sandbox for
        fields that the item does not set.
        """
        yield from self._find_work_errors(item)
        environment = item.environment
        if environment.fork is not None and environment.fork not in self.open_sessions:
            yield f"`fork`: there is no open session '{environment.fork}': open one, or name another session"
        if environment.fork is None and environment.session is None:
            requested = environment.with_defaults(options)
            yield from self._find_sandbox_errors("", environment.image, environment.network, requested)
        if item.grader is not None:
            # A grader has no network, and its secrets were refused with the line.
            yield from self._find_sandbox_errors("grader.", item.grader.image, None, item.grader.options)

    def _find_work_errors(self, item: BatchItem) -> Iterator[str]:
        work = item.work
        names = (work.name,) if isinstance(work, CallBody) else work.tools or ()
        for name in names:
            if name != "all" and not self.policy.allows_tool(name):
                yield f"the tool {name} is not allowed for this tenant: use another one, or ask the operator"
        class_s = self._largest_timeout_s()
        if class_s is None:
            return
        if isinstance(work, CallBody):
            spec = self.tools.get(work.name) if self.tools is not None else None
            most = largest_limit(spec, class_s) if spec is not None else class_s
            yield from _find_excess("timeout_s", work.timeout_s, most)
        else:
            yield from _find_excess("limits.tool_timeout_s", work.limits.tool_timeout_s, class_s)

    def _largest_timeout_s(self) -> float | None:
        """Return the largest limit of a call in seconds; None if no host reports it."""
        return max((largest.timeout_s for largest in self._largest), default=None)

    # Facts of all hosts are computed once, and not for each of the lines of a file.
    @cached_property
    def _largest(self) -> Sequence[LargestOptions]:
        tenant_class, unlimited = self.policy.sandbox.tenant_class, LargestOptions(timeout_s=MAX_TIMEOUT_S)
        return [host.largest.get(tenant_class, unlimited) for host in self.hosts]

    @cached_property
    def _images(self) -> Sequence[str]:
        return sorted({image for host in self.hosts for image in host.images})

    @cached_property
    def _largest_sizes(self) -> Mapping[str, float]:
        """The largest value of each size; without those that no host limits."""
        found: dict[str, float] = {}
        for field in _SIZES:
            sizes = [getattr(largest, field) for largest in self._largest]
            if field == "workspace_bytes" and self.policy.sandbox.workspace_bytes is not None:
                sizes = [min(size, self.policy.sandbox.workspace_bytes) for size in sizes if size is not None]
            if sizes and None not in sizes:
                found[field] = max(sizes)
        return found

    def _find_sandbox_errors(
        self, prefix: str, image: str | None, network: str | None, options: SandboxOptions
    ) -> Iterator[str]:
        """Yield the errors of a new session. `prefix`: of the names of its fields."""
        if image is not None:
            yield from self._find_image_errors(prefix, image)
        has_egress = self._allows_egress
        if network == "egress" and not has_egress:
            yield f"`{prefix}network` is 'egress', which this tenant does not have: omit it, or ask the operator"
        yield from self._find_size_errors(prefix, options)
        if options.secrets and (network == "none" or not has_egress):
            yield f"`{prefix}secrets` need a session with network egress: omit them, or ask the operator"
        for name in options.secrets:
            if self.policy.sandbox.secrets is not None and name not in self.policy.sandbox.secrets:
                yield f"`{prefix}secrets`: the tenant's policy does not allow {name}: omit it, or ask the operator"
            elif name not in self.secrets:
                yield f"`{prefix}secrets`: the tenant has no secret {name}: set it first (PUT /v1/secrets/{name})"

    @cached_property
    def _allows_egress(self) -> bool:
        """Whether the sessions of the tenant may have network, or no host reports."""
        tenant_class = self.policy.sandbox.tenant_class
        is_possible = not self.hosts or any(tenant_class in host.egress_classes for host in self.hosts)
        return is_possible and self.policy.sandbox.network != "none"

    def _find_image_errors(self, prefix: str, image: str) -> Iterator[str]:
        try:
            name = parse_image_name(image)
        except ImageNameError as error:
            yield f"`{prefix}image`: {error}"
            return
        images, own = self._images, self.policy.sandbox.images
        if (own is not None and not is_allowed(own, name)) or (self.hosts and not is_allowed(images, name)):
            allowed = own if own is not None else images
            yield (
                f"`{prefix}image`: '{image[:100]}' is not allowed: use one of {', '.join(allowed[:MAX_NAMED])}, or ask "
                "the operator to allow it"
            )

    def _find_size_errors(self, prefix: str, options: SandboxOptions) -> Iterator[str]:
        tenant_class = self.policy.sandbox.tenant_class
        for field, most in self._largest_sizes.items():
            requested = getattr(options, field)
            if requested is not None and requested > most:
                yield f"`{prefix}{field}` may be at most {most} in sessions of class '{tenant_class}'"
        users = {largest.user for largest in self._largest}
        if options.user == "root" and users == {"sandbox"}:
            yield f"`{prefix}user`: sessions of class '{tenant_class}' may not run as root: omit it"


def _find_excess(field: str, requested: float | None, most: float) -> Iterator[str]:
    if requested is not None and requested > most:
        yield f"`{field}` must be at most {most:g} s, not {requested:g}: ask for less, or ask the operator for more"


def find_sessions(file: BatchFile) -> set[str]:
    """Return the sessions that the items of a file fork."""
    return {item.environment.fork for item in file.items if item.environment.fork is not None}


def check_limits(file: BatchFile, name: str, limits: TenantLimits, options: SandboxOptions) -> None:
    """Raise BadBatch with the lines that ask for more than the tenant has. `name`: the name of the file in messages.
    `options`: the options of the batch for lines that do not set them.
    """
    errors, more = list[LineError](), 0
    for item in file.items:
        for problem in limits.find_errors(item, options):
            if len(errors) < MAX_SHOWN:
                errors.append(LineError(problem, item.line))
            else:
                more += 1
    if errors:
        raise BadBatch(name, errors, more, file)
