"""The default image of a host, TOOLCREW_SANDBOX_IMAGE: any image works, or sandboxd does not start and says why."""

from collections.abc import Iterator

import pytest
from docker import APIClient

from tests.integration.test_images import PASSWD, Files, build_tree, imported, read_files
from tests.support.sandboxd.containers import IMAGE
from tests.support.stack.daemons import Daemons, run_script
from toolcrew.contract.session_spec import SessionSpec

pytestmark = pytest.mark.stack

# Files besides a static program as /usr/bin/sh, and lines of a Dockerfile.
IMAGES: dict[str, tuple[Files, list[str], str]] = {
    "a plain system": (
        [("etc/passwd", 0o644, PASSWD), ("tmp/", 0o1777, b""), ("root/", 0o700, b""), ("var/tmp/", 0o1777, b"")],
        [],
        "sandbox",
    ),
    "no /tmp and no /etc/passwd": ([], [], "sandbox"),
    "entry point, user and folder": (
        [],
        ['ENTRYPOINT ["/no/such/program"]', "USER nobody:4711", "WORKDIR /no/such/folder", 'CMD ["--x"]'],
        "sandbox",
    ),
    "uid 1000 of another name": (
        [("etc/passwd", 0o644, PASSWD + b"node:x:1000:1000::/home/node:/bin/sh\n")],
        [],
        "node",
    ),
    "a large passwd": ([("etc/passwd", 0o644, PASSWD + b"# a comment\n" * 7000)], [], "sandbox"),
    "variables of the loader": ([], ["ENV LD_DEBUG=all", "ENV LD_AUDIT=/x.so", "ENV LC_ALL=POSIX"], "sandbox"),
}
CLOSED: Files = [("./", 0o700, b""), ("opt/", 0o700, b""), ("home/", 0o700, b"")]
FOR_OCI: dict[str, tuple[Files, list[str], str]] = {
    "closed folders": (CLOSED, [], "sandbox"),
    "a variable that stops the loader": ([], ["ENV LD_TRACE_LOADED_OBJECTS=1", "ENV LD_SHOW_AUXV=1"], "sandbox"),
    "a file at /workspace": ([("workspace", 0o644, b"")], [], "sandbox"),
}
# With `oci`, sandboxd makes the folders and removes the variables.
UNFIT: dict[str, tuple[str, Files, list[str], str]] = {
    "a volume": ("oci", [], ["VOLUME /data"], "declares volumes (/data)"),
    "a volume, by the engine": ("engine", [], ["VOLUME /data"], "declares volumes (/data)"),
    "a file at /workspace": ("engine", [("workspace", 0o644, b"")], [], "its /workspace is not a folder"),
    "closed folders": ("engine", CLOSED, [], "user 1000 may not enter"),
    "a variable that stops the loader": ("engine", [], ["ENV LD_TRACE_LOADED_OBJECTS=1"], "LD_TRACE_LOADED_OBJECTS"),
}


@pytest.fixture(scope="module")
def static_program(engine: APIClient) -> bytes:
    return read_files(engine, IMAGE, "/opt/toolcrew/bin/bash")["bash"]


@pytest.fixture(params=["oci", "engine"])
def start(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def build(engine: APIClient, program: bytes, files: Files, changes: list[str]) -> Iterator[str]:
    return imported(engine, build_tree([("usr/bin/sh", 0o755, program), *files]), changes)


@pytest.mark.parametrize(("files", "changes", "user"), IMAGES.values(), ids=IMAGES.keys())
def test_any_image_can_be_the_default_image(
    engine: APIClient, daemons: Daemons, static_program: bytes, start: str, files: Files, changes: list[str], user: str
) -> None:
    for image in build(engine, static_program, files, changes):
        daemon = daemons.start(sandbox_image=image, sandbox_start=start, pool_size="1")
        with daemon.client() as client:
            name = client.open("acme", "s1", SessionSpec())
            shown = run_script(client, name, "echo $UID $USER $LOGNAME ~ $HOME $PWD; echo x > /tmp/f; echo $(</tmp/f)")
            assert shown == f"1000 {user} {user} /home/sandbox /home/sandbox /workspace\nx\n"
        assert daemon.stop(for_good=True) == 0


@pytest.mark.parametrize(("files", "changes", "user"), FOR_OCI.values(), ids=FOR_OCI.keys())
def test_images_that_the_engine_cannot_start_work_with_oci(
    engine: APIClient, daemons: Daemons, static_program: bytes, files: Files, changes: list[str], user: str
) -> None:
    test_any_image_can_be_the_default_image(engine, daemons, static_program, "oci", files, changes, user)


@pytest.mark.parametrize(("start", "files", "changes", "reason"), UNFIT.values(), ids=UNFIT.keys())
def test_a_default_image_that_cannot_be_a_sandbox_is_named_at_the_start(
    engine: APIClient,
    daemons: Daemons,
    static_program: bytes,
    start: str,
    files: Files,
    changes: list[str],
    reason: str,
) -> None:
    for image in build(engine, static_program, files, changes):
        daemon = daemons.describe(sandbox_image=image, sandbox_start=start, pool_size="1")
        with pytest.raises(AssertionError, match="sandboxd did not start"):
            daemon.start()
        assert image in daemon.log()
        assert reason in daemon.log()
