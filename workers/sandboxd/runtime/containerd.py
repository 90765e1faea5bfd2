"""The layers of images that containerd keeps for the Docker engine (the engine's containerd image store).

The engine tells the address of its containerd, but not the folders of layers, as it does with its own storage driver.
The client uses the generic calls of grpcio and describes only the fields that it reads: no generated code, and replies
of later releases with more fields can be read. The messages are those of containerd's API (api/services).
"""

import os
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from toolcrew.contract.errors import SandboxUnavailable

SNAPSHOTTER: Final = "overlayfs"
"""The only snapshotter whose layers are folders for an overlay. The engine reports it as its storage driver."""
_NAMESPACE: Final = "moby"
SNAPSHOTTER_TYPE: Final = "io.containerd.snapshotter.v1"
"""The type of the engine's storage driver, if containerd keeps the images."""
DEFAULT_ADDRESS: Final = "/run/containerd/containerd.sock"
"""The socket of engines before 27, which do not tell it."""
_TIMEOUT_S: Final = 10.0
_MAX_REPLY_BYTES: Final = 1024 * 1024
_PACKAGE: Final = "toolcrew.containerd"
_LOWER: Final = "lowerdir="
_MESSAGES: Final[Mapping[str, Mapping[str, tuple[int, str]]]] = {
    "PluginsRequest": {"filters": (1, "string*")},
    "Entry": {"key": (1, "string"), "value": (2, "string")},
    "Plugin": {"type": (1, "string"), "id": (2, "string"), "exports": (5, "Entry*")},
    "PluginsReply": {"plugins": (1, "Plugin*")},
    "MountsRequest": {"snapshotter": (1, "string"), "key": (2, "string")},
    "Mount": {"type": (1, "string"), "source": (2, "string"), "options": (4, "string*")},
    "MountsReply": {"mounts": (1, "Mount*")},
}
"""Message -> field -> number and type. `*` stands for a repeated field. On the wire, a map is a list of entries."""


class Containerd:
    """A client of the containerd at a socket. The methods block and raise SandboxUnavailable."""

    def __init__(self, address: str) -> None:
        self.address = address

    @property
    def is_reachable(self) -> bool:
        """Return whether this process sees the socket and may connect."""
        return os.access(self.address, os.W_OK)

    def find_root(self) -> str:
        """Return the folder below which all layers are."""
        request = {"filters": [f"type=={SNAPSHOTTER_TYPE},id=={SNAPSHOTTER}"]}
        reply = self._call("containerd.services.introspection.v1.Introspection/Plugins", "Plugins", request)
        roots = [entry.value for plugin in reply.plugins for entry in plugin.exports if entry.key == "root"]
        if len(roots) != 1:
            raise SandboxUnavailable(f"containerd at {self.address} has no snapshotter {SNAPSHOTTER}")
        return str(roots[0])

    def find_layers(self, container: str, count: int) -> tuple[str, ...]:
        """Return the folders of the `count` layers of a container's image, the top one first. The container may have
        more layers above them: the engine adds one with its own files.
        """
        request = {"snapshotter": SNAPSHOTTER, "key": container}
        reply = self._call("containerd.services.snapshots.v1.Snapshots/Mounts", "Mounts", request)
        layers = _parse_layers([(mount.type, list(mount.options)) for mount in reply.mounts])
        if not 0 < count <= len(layers):
            raise SandboxUnavailable(
                f"containerd at {self.address} reports {len(layers)} layers of an image that has {count}: update "
                "toolcrew, or set TOOLCREW_SANDBOX_START=engine"
            )
        return layers[-count:]

    def _call(self, method: str, name: str, request: Mapping[str, Any]) -> Any:
        # The import takes longer than a start of a sandbox, and few hosts need it.
        import grpc

        encoded = _find_message(f"{name}Request")(**request)
        options = [("grpc.max_receive_message_length", _MAX_REPLY_BYTES)]
        with grpc.insecure_channel(f"unix:{self.address}", options) as channel:
            call = channel.unary_unary(
                f"/{method}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=_find_message(f"{name}Reply").FromString,
            )
            try:
                return call(encoded, timeout=_TIMEOUT_S, metadata=[("containerd-namespace", _NAMESPACE)])
            except grpc.RpcError as error:
                raise SandboxUnavailable(
                    f"containerd at {self.address} does not tell the layers of images ({error.code().name}: "
                    f"{str(error.details())[:300]}): see its log"
                ) from error


def _parse_layers(mounts: list[tuple[str, list[str]]]) -> tuple[str, ...]:
    """Return the lower folders of a container's overlay. Raises SandboxUnavailable for any other kind of mount."""
    lower = [option.removeprefix(_LOWER) for _, options in mounts for option in options if option.startswith(_LOWER)]
    layers = tuple(lower[0].split(":")) if lower else ()
    is_overlay = len(mounts) == len(lower) == 1 and mounts[0][0] == "overlay"
    if not is_overlay or not all(layer.startswith("/") for layer in layers):
        raise SandboxUnavailable(
            "containerd's mounts of a container are not one overlay: set TOOLCREW_SANDBOX_START=engine"
        )
    return layers


@cache
def _find_message(name: str) -> Any:
    """Return the class of a message of `_MESSAGES`."""
    file = descriptor_pb2.FileDescriptorProto(name="toolcrew/containerd.proto", package=_PACKAGE, syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for field, (number, kind) in fields.items():
            plain = kind.removesuffix("*")
            one = described.field.add(name=field, number=number)
            one.label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            one.type = kinds.TYPE_STRING if plain == "string" else kinds.TYPE_MESSAGE
            if plain != "string":
                one.type_name = f".{_PACKAGE}.{plain}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
