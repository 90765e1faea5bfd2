"""A client of containerd: the images of Kubernetes (CRI), and the layers of all images.

The client uses the generic calls of grpcio and describes only the fields that it uses: no generated code, and replies
of later releases with more fields can be read. The messages are those of containerd's API (api/services), and of the
image service that the kubelet uses too (`runtime.v1`).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from toolcrew.contract.errors import SandboxUnavailable

SNAPSHOTTER: Final = "overlayfs"
"""The only snapshotter whose layers are folders for an overlay. The engine reports it as its storage driver."""
SNAPSHOTTER_TYPE: Final = "io.containerd.snapshotter.v1"
"""The type of the engine's storage driver, if containerd keeps the images."""
DOCKER: Final = "moby"
KUBERNETES: Final = "k8s.io"
"""The namespaces of the Docker engine and of the kubelet. Each has its own names of images, layers and leases."""
DEFAULT_ADDRESS: Final = "/run/containerd/containerd.sock"
"""The socket of engines before 27, which do not tell it, and of Kubernetes nodes."""
_TIMEOUT_S: Final = 10.0
_CHECK_S: Final = 0.5
_MAX_REPLY_BYTES: Final = 1024 * 1024
MAX_LIST_BYTES: Final = 16 * _MAX_REPLY_BYTES
"""Limit of a list of all images or containers of a host."""
_MAX_ERROR_CHARS: Final = 500
_PACKAGE: Final = "toolcrew.containerd"
_LOWER: Final = "lowerdir="
_SCALARS: Final = {"string": "TYPE_STRING", "bool": "TYPE_BOOL", "int64": "TYPE_INT64", "uint64": "TYPE_UINT64"}
_MESSAGES: Final[Mapping[str, Mapping[str, tuple[int, str]]]] = {
    "Entry": {"key": (1, "string"), "value": (2, "string")},
    "PluginsRequest": {"filters": (1, "string*")},
    "Plugin": {"type": (1, "string"), "id": (2, "string"), "exports": (5, "Entry*")},
    "PluginsReply": {"plugins": (1, "Plugin*")},
    "VersionRequest": {},
    "VersionReply": {"version": (1, "string")},
    "MountsRequest": {"snapshotter": (1, "string"), "key": (2, "string")},
    "Mount": {"type": (1, "string"), "source": (2, "string"), "options": (4, "string*")},
    "MountsReply": {"mounts": (1, "Mount*")},
    "ViewRequest": {"snapshotter": (1, "string"), "key": (2, "string"), "parent": (3, "string")},
    "ViewReply": {"mounts": (1, "Mount*")},
    "UsageRequest": {"snapshotter": (1, "string"), "key": (2, "string")},
    "UsageReply": {"size": (1, "int64")},
    "CreateRequest": {"id": (1, "string"), "labels": (3, "Entry*")},
    "CreateReply": {},
    "DeleteRequest": {"id": (1, "string"), "sync": (2, "bool")},
    "DeleteReply": {},
    "ListRequest": {"filters": (1, "string*")},
    "Time": {"seconds": (1, "int64")},
    "Lease": {"id": (1, "string"), "created_at": (2, "Time"), "labels": (3, "Entry*")},
    "ListReply": {"leases": (1, "Lease*")},
    "ImageSpec": {"image": (1, "string")},
    "Image": {"id": (1, "string"), "repo_tags": (2, "string*"), "repo_digests": (3, "string*"), "size": (4, "uint64")},
    "ImageStatusRequest": {"image": (1, "ImageSpec"), "verbose": (2, "bool")},
    "ImageStatusReply": {"image": (1, "Image"), "info": (2, "Entry*")},
    "ListImagesRequest": {},
    "ListImagesReply": {"images": (1, "Image*")},
    "Login": {"username": (1, "string"), "password": (2, "string")},
    "PullImageRequest": {"image": (1, "ImageSpec"), "auth": (2, "Login")},
    "PullImageReply": {},
    "RemoveImageRequest": {"image": (1, "ImageSpec")},
    "RemoveImageReply": {},
    "ListContainersRequest": {},
    "Container": {"image_ref": (5, "string"), "image_id": (10, "string")},
    "ListContainersReply": {"containers": (1, "Container*")},
}
"""Message -> field -> number and type. `*` stands for a repeated field. On the wire, a map is a list of entries. The
messages of a method are its name with `Request` and `Reply`.
"""
_SNAPSHOTS: Final = "containerd.services.snapshots.v1.Snapshots"
_LEASES: Final = "containerd.services.leases.v1.Leases"


class ContainerdRefused(SandboxUnavailable):
    """Error: containerd refused a call or did not answer it. `status`: the name of the gRPC status. `reason`:
    containerd's own text.
    """

    def __init__(self, address: str, method: str, status: str, reason: str) -> None:
        advice = "enable its CRI plugin" if status == "UNIMPLEMENTED" else "see its log"
        super().__init__(f"containerd at {address} refused {method} ({status}: {reason}): {advice}")
        self.status = status
        self.reason = reason


class Containerd:
    """A client of the containerd at a socket, for one of its namespaces. The methods block and raise
    SandboxUnavailable.
    """

    def __init__(self, address: str, namespace: str = DOCKER) -> None:
        self.address = address
        self._namespace = namespace

    @property
    def is_reachable(self) -> bool:
        """Return whether this process sees the socket and may connect."""
        return os.access(self.address, os.W_OK)

    def find_root(self) -> str:
        """Return the folder below which all layers are."""
        request = {"filters": [f"type=={SNAPSHOTTER_TYPE},id=={SNAPSHOTTER}"]}
        reply = self.call("containerd.services.introspection.v1.Introspection/Plugins", request)
        roots = [entry.value for plugin in reply.plugins for entry in plugin.exports if entry.key == "root"]
        if len(roots) != 1:
            raise SandboxUnavailable(f"containerd at {self.address} has no snapshotter {SNAPSHOTTER}")
        return str(roots[0])

    def find_version(self) -> str:
        """Return the version of containerd."""
        return str(self.call("containerd.services.version.v1.Version/Version").version)

    def find_layers(self, container: str, count: int) -> tuple[str, ...]:
        """Return the folders of the `count` layers of a container's image, the top one first. The container may have
        more layers above them: the engine adds one with its own files.
        """
        reply = self.call(f"{_SNAPSHOTS}/Mounts", {"snapshotter": SNAPSHOTTER, "key": container})
        return self._take_layers(reply.mounts, count)

    def measure(self, chain: str) -> int:
        """Return the bytes of a layer on the disk. `chain`: the layer's chain id; 0 for a layer that is not there."""
        try:
            return int(self.call(f"{_SNAPSHOTS}/Usage", {"snapshotter": SNAPSHOTTER, "key": chain}).size)
        except ContainerdRefused as error:
            if error.status == "NOT_FOUND":
                return 0
            raise

    def hold(self, name: str, chain: str, count: int, labels: Mapping[str, str]) -> tuple[str, ...]:
        """Protect the layers of an image from containerd's garbage collection, until `release` with the same name.
        Return their folders, the top one first. `chain`: the chain id of the top layer.
        """
        entries = [{"key": key, "value": value} for key, value in labels.items()]
        self.call(f"{_LEASES}/Create", {"id": name, "labels": entries})
        try:
            # The view belongs to the lease: containerd removes it with the lease, and no layer below a view.
            request = {"snapshotter": SNAPSHOTTER, "key": name, "parent": chain}
            return self._take_layers(self.call(f"{_SNAPSHOTS}/View", request, lease=name).mounts, count)
        except BaseException:
            self.release(name)
            raise

    def release(self, name: str) -> bool:
        """End the protection of layers. Return whether it existed."""
        try:
            self.call(f"{_LEASES}/Delete", {"id": name, "sync": True})
        except ContainerdRefused as error:
            if error.status == "NOT_FOUND":
                return False
            raise
        return True

    def list_held(self, labels: Mapping[str, str]) -> list[tuple[str, Mapping[str, str], float]]:
        """Return name, labels and time of creation (epoch seconds) of every `hold` with these labels."""
        wanted = ",".join(f'labels."{key}"=="{value}"' for key, value in labels.items())
        return [
            (lease.id, {entry.key: entry.value for entry in lease.labels}, float(lease.created_at.seconds))
            for lease in self.call(f"{_LEASES}/List", {"filters": [wanted]}).leases
        ]

    def call(
        self,
        method: str,
        request: Mapping[str, Any] | None = None,
        *,
        lease: str = "",
        timeout_s: float = _TIMEOUT_S,
        max_bytes: int = _MAX_REPLY_BYTES,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Any:
        """Call a method, and return its reply. `lease`: what the method creates belongs to this lease. The call ends
        soon after `is_stopped` returns True. `max_bytes`: the largest reply. Raises ContainerdRefused.
        """
        # The import takes longer than a start of a sandbox, and few hosts need it.
        import grpc

        name = method.rpartition("/")[2]
        options = [("grpc.max_receive_message_length", max_bytes)]
        metadata = [("containerd-namespace", self._namespace), *([("containerd-lease", lease)] if lease else [])]
        with grpc.insecure_channel(f"unix:{self.address}", options) as channel:
            stub = channel.unary_unary(
                f"/{method}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=_find_message(f"{name}Reply").FromString,
            )
            running = stub.future(_find_message(f"{name}Request")(**(request or {})), timeout_s, metadata)
            try:
                while True:
                    try:
                        return running.result(_CHECK_S)
                    except grpc.FutureTimeoutError:
                        if is_stopped():
                            running.cancel()
            except grpc.FutureCancelledError as error:
                raise ContainerdRefused(self.address, name, "CANCELLED", "the call was stopped") from error
            except grpc.RpcError as error:
                reason = str(error.details())[:_MAX_ERROR_CHARS]
                raise ContainerdRefused(self.address, name, error.code().name, reason) from error

    def _take_layers(self, mounts: Sequence[Any], count: int) -> tuple[str, ...]:
        layers = _parse_layers([(mount.type, mount.source, list(mount.options)) for mount in mounts])
        if not 0 < count <= len(layers):
            raise SandboxUnavailable(
                f"containerd at {self.address} reports {len(layers)} layers of an image that has {count}: update "
                "toolcrew, or set TOOLCREW_SANDBOX_START=engine"
            )
        return layers[-count:]


def _parse_layers(mounts: list[tuple[str, str, list[str]]]) -> tuple[str, ...]:
    """Return the lower folders of an overlay, or the folder of a view of a single layer. Raises SandboxUnavailable for
    any other kind of mount.
    """
    lower = [option.removeprefix(_LOWER) for *_, options in mounts for option in options if option.startswith(_LOWER)]
    layers = tuple(lower[0].split(":")) if lower else ()
    is_known = len(mounts) == len(lower) == 1 and mounts[0][0] == "overlay"
    if not lower and [kind for kind, *_ in mounts] == ["bind"] and "ro" in mounts[0][2]:
        layers, is_known = (mounts[0][1],), True
    if not is_known or not all(layer.startswith("/") for layer in layers):
        raise SandboxUnavailable(
            "containerd's mounts of a container are not one overlay: set TOOLCREW_SANDBOX_START=engine"
        )
    return layers


@cache
def _find_message(name: str) -> Any:
    """Return the class of a message of `_MESSAGES`."""
    return message_factory.GetMessageClass(_open_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


@cache
def _open_pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="toolcrew/containerd.proto", package=_PACKAGE, syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for field, (number, kind) in fields.items():
            plain = kind.removesuffix("*")
            one = described.field.add(name=field, number=number)
            one.label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            one.type = getattr(kinds, _SCALARS.get(plain, "TYPE_MESSAGE"))
            if plain not in _SCALARS:
                one.type_name = f".{_PACKAGE}.{plain}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool
