"""Images of containerd and their layers, from replies of a containerd that the test scripts."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.runtime import containerd
from toolcrew.workers.sandboxd.runtime.containerd import SNAPSHOTTER, Containerd
from toolcrew.workers.sandboxd.runtime.containerd_images import ContainerdImages, find_stored

ROOT = "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs"
LAYERS = tuple(f"{ROOT}/snapshots/{number}/fs" for number in (3, 2, 1))
OVERLAY = "overlay"


class FakeContainerd(grpc.GenericRpcHandler):
    """A containerd whose replies are the fields of `replies`, by method. Stores each request with its metadata."""

    def __init__(self) -> None:
        self.replies: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, dict[str, str], Any]] = []

    def service(self, call: Any) -> Any:
        method = call.method.rpartition("/")[2]

        def answer(request: Any, context: Any) -> Any:
            self.requests.append((call.method, dict(call.invocation_metadata), request))
            if method not in self.replies:
                context.abort(grpc.StatusCode.NOT_FOUND, f"{method}: not found")
            return containerd._find_message(f"{method}Reply")(**self.replies[method])

        return grpc.unary_unary_rpc_method_handler(
            answer,
            request_deserializer=containerd._find_message(f"{method}Request").FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )

    def show(self, config: str) -> None:
        """Answer requests for an image with an image of this configuration."""
        info = [{"key": "info", "value": config}]
        self.replies["ImageStatus"] = {"image": {"id": "sha256:1", "size": 1000}, "info": info}

    def mount(self, *options: str, kind: str = OVERLAY) -> None:
        """Answer requests for mounts with one mount."""
        self.replies["Mounts"] = {"mounts": [{"type": kind, "source": kind, "options": options}]}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeContainerd]:
    fake = FakeContainerd()
    running = grpc.server(ThreadPoolExecutor(2), handlers=[fake])
    running.add_insecure_port(f"unix:{tmp_path}/containerd.sock")
    running.start()
    yield fake
    running.stop(None).wait()


@pytest.fixture
def client(server: FakeContainerd, tmp_path: Path) -> Containerd:
    return Containerd(f"{tmp_path}/containerd.sock")


def test_layers_are_those_below_the_engine_s_own_one(server: FakeContainerd, client: Containerd) -> None:
    server.mount("index=off", "workdir=/w", "upperdir=/u", f"lowerdir={ROOT}/snapshots/4/fs:{':'.join(LAYERS)}")
    assert client.find_layers("a container", 3) == LAYERS
    [(method, metadata, request)] = server.requests
    assert method == "/containerd.services.snapshots.v1.Snapshots/Mounts"
    assert metadata["containerd-namespace"] == "moby"
    assert (request.snapshotter, request.key) == (SNAPSHOTTER, "a container")


@pytest.mark.parametrize("count", [0, 4])
def test_another_number_of_layers_than_the_image_has_is_an_error(
    server: FakeContainerd, client: Containerd, count: int
) -> None:
    server.mount(f"lowerdir={':'.join(LAYERS)}")
    with pytest.raises(SandboxUnavailable, match=f"reports 3 layers of an image that has {count}"):
        client.find_layers("a container", count)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("bind", ["rbind", "ro"]),  # its source is no path
        ("bind", ["rbind", "rw"]),
        ("fuse3.overlay", [f"lowerdir={LAYERS[0]}"]),
        (OVERLAY, ["lowerdir=relative/fs"]),
        (OVERLAY, ["lowerdir="]),
        (OVERLAY, [f"lowerdir={LAYERS[0]}", f"lowerdir={LAYERS[1]}"]),
        (OVERLAY, []),
    ],
)
def test_a_mount_that_is_no_overlay_of_folders_is_an_error(
    server: FakeContainerd, client: Containerd, kind: str, options: list[str]
) -> None:
    server.mount(*options, kind=kind)
    with pytest.raises(SandboxUnavailable, match="not one overlay"):
        client.find_layers("a container", 1)


def test_a_reply_above_the_limit_is_refused(server: FakeContainerd, client: Containerd) -> None:
    server.mount("x" * containerd._MAX_REPLY_BYTES)
    with pytest.raises(SandboxUnavailable, match="RESOURCE_EXHAUSTED"):
        client.find_layers("a container", 1)


def test_root_is_that_of_the_snapshotter(server: FakeContainerd, client: Containerd) -> None:
    exports = [{"key": "kind", "value": "x"}, {"key": "root", "value": ROOT}]
    server.replies["Plugins"] = {"plugins": [{"type": "snapshotter", "id": SNAPSHOTTER, "exports": exports}]}
    assert client.find_root() == ROOT
    server.replies["Plugins"] = {"plugins": []}
    with pytest.raises(SandboxUnavailable, match="no snapshotter overlayfs"):
        client.find_root()


@pytest.mark.parametrize("ask", [Containerd.find_root, lambda client: client.find_layers("a", 1)])
def test_a_refusal_names_the_socket_and_the_reason(
    server: FakeContainerd, client: Containerd, ask: Callable[[Containerd], object]
) -> None:
    with pytest.raises(SandboxUnavailable, match=r"containerd at .*\.sock refused .*NOT_FOUND: .*not found"):
        ask(client)


def test_a_containerd_without_cri_is_an_error_with_what_to_do(tmp_path: Path) -> None:
    running = grpc.server(ThreadPoolExecutor(1))
    running.add_insecure_port(f"unix:{tmp_path}/containerd.sock")
    running.start()
    with pytest.raises(SandboxUnavailable, match=r"UNIMPLEMENTED.*enable its CRI plugin"):
        find_stored(Containerd(f"{tmp_path}/containerd.sock"), "x")
    running.stop(None).wait()


def test_a_missing_socket_is_not_reachable(tmp_path: Path, client: Containerd) -> None:
    assert client.is_reachable
    missing = Containerd(f"{tmp_path}/other.sock")
    assert not missing.is_reachable
    with pytest.raises(SandboxUnavailable, match="UNAVAILABLE"):
        missing.find_root()


def test_a_view_of_one_layer_is_its_folder(server: FakeContainerd, client: Containerd) -> None:
    server.replies |= {"Create": {}, "Delete": {}}
    mount = {"type": "bind", "source": LAYERS[0], "options": ["ro", "rbind"]}
    server.replies["View"] = {"mounts": [mount]}
    assert client.hold("a pin", "sha256:top", 1, {"a": "b"}) == LAYERS[:1]
    metadata = {method.rpartition("/")[2]: metadata for method, metadata, _ in server.requests}
    assert metadata["View"]["containerd-lease"] == "a pin"
    assert "Delete" not in metadata


def test_a_lease_without_a_view_is_removed(server: FakeContainerd, client: Containerd) -> None:
    server.replies |= {"Create": {}, "Delete": {}}
    with pytest.raises(SandboxUnavailable, match="NOT_FOUND"):
        client.hold("a pin", "sha256:top", 1, {})
    method, _, request = server.requests[-1]
    assert (method, request.id, request.sync) == ("/containerd.services.leases.v1.Leases/Delete", "a pin", True)


def test_chain_ids_are_those_of_the_oci_image_specification(server: FakeContainerd, client: Containerd) -> None:
    config = {"architecture": "amd64", "config": {"Env": ["A=1"]}, "rootfs": {"diff_ids": ["sha256:a", "sha256:b"]}}
    server.show(json.dumps({"imageSpec": config}))
    stored = find_stored(client, "x")
    assert stored is not None
    assert (stored.architecture, stored.variables, stored.volumes) == ("amd64", ("A=1",), ())
    assert stored.chains == ("sha256:a", f"sha256:{sha256(b'sha256:a sha256:b').hexdigest()}")


@pytest.mark.parametrize(
    "config",
    [
        "",
        "[" * 100_000,
        "[]",
        "{}",
        '{"imageSpec": null}',
        '{"imageSpec": {"rootfs": {"diff_ids": []}}}',
        '{"imageSpec": {"rootfs": {"diff_ids": [1]}}}',
        '{"imageSpec": {"rootfs": {"diff_ids": "sha256:a"}, "config": []}}',
        '{"imageSpec": {"rootfs": {"diff_ids": {"a": 1}}}}',
        '{"imageSpec": {"rootfs": {"diff_ids": ["a"]}, "config": {"Env": [1]}}}',
        json.dumps({"imageSpec": {"rootfs": {"diff_ids": ["a"] * 1001}}}),
        "x" * containerd._MAX_REPLY_BYTES,
    ],
    ids=lambda config: config[:60],
)
async def test_an_image_with_an_unreadable_configuration_is_no_sandbox_but_can_be_removed(
    server: FakeContainerd, client: Containerd, config: str
) -> None:
    server.show(config)
    with pytest.raises(SandboxUnavailable, match="image x cannot be a sandbox: its configuration cannot be read"):
        find_stored(client, "x")
    image = {"id": "sha256:1", "size": 1000}
    server.replies |= {"ListImages": {"images": [image]}, "ListContainers": {}, "RemoveImage": {}}
    images = ContainerdImages(client)
    assert [found.size_bytes for found in await images.list()] == [1000]
    server.show("")
    assert await images.remove("sha256:1")
    assert server.requests[-1][2].image.image == "sha256:1"


async def test_an_image_of_a_pod_is_not_removed(server: FakeContainerd, client: Containerd) -> None:
    server.show("")
    server.replies["ListContainers"] = {"containers": [{"image_ref": "sha256:1"}]}
    assert not await ContainerdImages(client).remove("sha256:1")
