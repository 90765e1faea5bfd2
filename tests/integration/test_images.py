"""Images: the guarantees of the shipped images, and of any other image as a sandbox."""

import io
import re
import secrets
import struct
import tarfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from docker import APIClient

from tests.support.sandboxd.containers import IMAGE, LABELS, RUNTIME, open_container, open_engine
from tests.support.sandboxd.image_scan import scan_image
from tests.support.stack.stack import missing
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.disks.tmpfs import TmpfsWorkspaces
from toolcrew.workers.sandboxd.factory import SandboxFactory, SandboxSlots, StartCheck
from toolcrew.workers.sandboxd.plans import Profile, SandboxPlan
from toolcrew.workers.sandboxd.records import Records
from toolcrew.workers.sandboxd.runtime.attestation import Attestation, find_dirt, find_misfits, parse_attestation
from toolcrew.workers.sandboxd.runtime.base import LABEL_DEPLOYMENT, LABEL_LEASE, LABEL_SANDBOXD
from toolcrew.workers.sandboxd.runtime.engine import Engine
from toolcrew.workers.sandboxd.runtime.oci import OciRuntime, find_obstacle, find_program
from toolcrew.workers.sandboxd.runtime.seccomp import load_seccomp_profile
from toolcrew.workers.sandboxd.sandbox import Sandbox

PYTHON_IMAGE, NODE_IMAGE = "toolcrew-sandbox-python:dev", "toolcrew-sandbox-node:dev"
MB = 1_000_000
MAX_MB = {IMAGE: 260, PYTHON_IMAGE: 300, NODE_IMAGE: 500}


def plan_of(image: str) -> SandboxPlan:
    mib = 1024 * 1024
    return SandboxPlan(image, RUNTIME, "none", 64 * mib, 4096, 128 * mib, cpus=1.0, pids=64)


@pytest.fixture(scope="module")
def api() -> APIClient:
    return open_engine()


class Host:
    """The parts of sandboxd that create sandboxes. `made`: sandboxes to remove at the end."""

    def __init__(self, folder: Path, engine: Engine, cgroup_version: int, life_s: float) -> None:
        profile = Profile(seccomp=load_seccomp_profile(), cgroup_version=cgroup_version, life_s=life_s)
        owner = {LABEL_DEPLOYMENT: "images-test", LABEL_SANDBOXD: f"images-{secrets.token_hex(4)}", LABEL_LEASE: "none"}
        self.factory = SandboxFactory(
            engine, profile, TmpfsWorkspaces(), Records(folder), SandboxSlots(10), owner, IMAGE
        )
        self.factory.check_start = StartCheck(is_hard=True).check
        self.made: list[Sandbox] = []

    async def make(self, image: str) -> Sandbox:
        await self.factory.slots.take()
        plan = plan_of(image)
        self.made.append(await self.factory.make(plan, await self.factory.make_workspace(plan), 1))
        return self.made[-1]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with closing(Engine()) as opened:
        yield opened


@asynccontextmanager
async def open_host(
    engine: Engine, folder: Path, life_s: float = 600.0, oci: OciRuntime | None = None
) -> AsyncIterator[Host]:
    host = Host(folder, engine, (await engine.facts()).cgroup_version, life_s)
    if oci is not None:
        host.factory.runtimes = [oci]
    try:
        yield host
    finally:
        for sandbox in host.made:
            await sandbox.remove()


@pytest.fixture
async def host(engine: Engine, tmp_path: Path) -> AsyncIterator[Host]:
    """Return a host whose engine starts the sandboxes."""
    async with open_host(engine, tmp_path) as opened:
        yield opened


@pytest.fixture(params=["engine", "oci"])
async def either_host(request: pytest.FixtureRequest, engine: Engine, tmp_path: Path) -> AsyncIterator[Host]:
    """Return a host whose engine starts the sandboxes, then one that starts them itself."""
    if request.param == "engine":
        async with open_host(engine, tmp_path) as opened:
            yield opened
        return
    facts, program = await engine.facts(), find_program()
    assert find_obstacle(facts) is None
    assert program is not None
    oci = OciRuntime(engine, program, facts)
    try:
        async with open_host(engine, tmp_path, oci=oci) as opened:
            yield opened
    finally:
        await oci.close()


async def attest(sandbox: Sandbox) -> Attestation:
    return parse_attestation(await sandbox.ask({"op": "attest", "timeout_s": 10.0}))


async def run(sandbox: Sandbox, *argv: str, timeout_s: float = 20.0) -> tuple[dict[str, Any], str]:
    """Return the end of a program, and its output."""
    output: list[bytes] = []
    request = {
        "op": "exec",
        "argv": list(argv),
        "script_bytes": 0,
        "body_bytes": 0,
        "cwd": ".",
        "env": {},
        "timeout_s": timeout_s,
        "capture": {"merged": 65_536},
    }
    done = await sandbox.ask(request, sink=lambda frame: output.append(frame.body))
    return done, b"".join(output).decode()


async def shell(sandbox: Sandbox, script: str) -> str:
    """Run a script that must succeed, and return its output."""
    done, output = await run(sandbox, "/bin/bash", "-ec", script, timeout_s=60)
    assert done.get("exit_code") == 0, (done, output)
    return output


# --- Shipped images
# ---------------------------------------------------------------------------------------------------


def look_into(api: APIClient, image: str, script: str) -> str:
    """Run a script as root in a container of the unchanged image, and return its output."""
    config = {
        "Image": image,
        "Entrypoint": ["/bin/sh", "-c", script],
        "User": "0:0",
        "NetworkDisabled": True,
        "Labels": LABELS,
    }
    with open_container(api, {**config, "HostConfig": {"NetworkMode": "none"}}) as container:
        api.start(container)
        api.wait(container, timeout=60)
        return api.logs(container, stderr=True).decode()


@pytest.fixture(params=[IMAGE, PYTHON_IMAGE, NODE_IMAGE])
def image(request: pytest.FixtureRequest, api: APIClient) -> str:
    name = str(request.param)
    return require_image(api, name, is_optional=name == NODE_IMAGE)


def require_image(api: APIClient, name: str, is_optional: bool = False) -> str:
    """Return the image's name. The node image is large and only its own tests need it, so these tests run only if the
    image was built.
    """
    if not api.images(name):
        (pytest.skip if is_optional else missing)(f"no image {name}: scripts/build-image all")
    return name


def test_a_shipped_image_has_no_setuid_or_world_writable_files(api: APIClient, image: str) -> None:
    found = look_into(
        api,
        image,
        # One walk: setuid and setgid files, files that every user can write, and files of the sandbox's user.
        r"find / -xdev \( \( -type f -o -type d \) -perm /6000 -o ! -type l -perm -0002 ! -path /tmp ! -path /var/tmp ! -path /run/lock"
        r" -o -uid 1000 ! -path '/home/sandbox*' ! -path /workspace \) -print; find /opt/toolcrew -perm /022 -o -gid +0",
    )
    assert found == ""
    # Only an export shows the capabilities of files.
    assert scan_image(image) == []


def test_a_shipped_image_is_small_and_has_an_unprivileged_user(api: APIClient, image: str) -> None:
    inspected = api.inspect_image(image)
    assert inspected["Size"] < MAX_MB[image] * MB
    assert (inspected["Config"]["User"], inspected["Config"]["WorkingDir"]) == ("1000:1000", "/workspace")
    assert any(re.fullmatch(r".*:[0-9a-f]{12}", tag) for tag in inspected["RepoTags"])


async def test_a_new_sandbox_is_attested_clean_with_its_workspace(host: Host) -> None:
    found = await attest(await host.make(IMAGE))
    plan = plan_of(IMAGE)
    assert find_dirt(found) == []
    assert find_misfits(found, plan.workspace_bytes, plan.workspace_inodes) == []
    assert found.workspace_type == "tmpfs"


async def test_files_left_by_a_session_are_attested(host: Host) -> None:
    sandbox = await host.make(IMAGE)
    await shell(sandbox, "touch /workspace/.a /tmp/b /output/c /dev/shm/d")
    assert len(find_dirt(await attest(sandbox))) == 4


async def test_a_sandbox_ends_at_its_maximum_life(api: APIClient, engine: Engine, tmp_path: Path) -> None:
    async with open_host(engine, tmp_path, life_s=1.0) as host:
        sandbox = await host.make(IMAGE)
        await wait_until_async(lambda: sandbox.lost, SOON_S, "the sandbox lives on")
        assert "maximum life of 1 s" in str(sandbox.lost)
        await wait_until_async(
            lambda: not api.containers(all=True, filters={"name": sandbox.name}), SOON_S, "the container is still there"
        )


async def test_the_python_image_installs_packages_into_the_workspace(api: APIClient, host: Host) -> None:
    sandbox = await host.make(require_image(api, PYTHON_IMAGE))
    # A package of one file, so that no package index is needed.
    await shell(sandbox, "mkdir p && cd p && printf 'x = 42\\n' > tiny.py && zip -q ../tiny-1-py3-none-any.whl tiny.py")
    await shell(
        sandbox,
        "mkdir p/tiny-1.dist-info && cd p/tiny-1.dist-info && printf 'Metadata-Version: 2.1\\nName: tiny\\nVersion: "
        "1\\n' > METADATA && printf 'Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n' "
        "> WHEEL && printf "
        "'tiny.py,,\\ntiny-1.dist-info/METADATA,,\\ntiny-1.dist-info/WHEEL,,\\ntiny-1.dist-info/RECORD,,\\n' > RECORD "
        "&& cd .. && zip -q -r ../tiny-1-py3-none-any.whl tiny-1.dist-info",
    )
    await shell(sandbox, "pip install -q --no-index ./tiny-1-py3-none-any.whl")
    assert await shell(sandbox, "cd /tmp && python -c 'import tiny; print(tiny.x, tiny.__file__)'") == (
        "42 /home/sandbox/.local/lib/python3.11/site-packages/tiny.py\n"
    )
    # Creating a venv with its own pip takes 5 s of processor time. The test checks only that the required parts are
    # present.
    await shell(sandbox, "python3 -m ensurepip --version && python3 -m venv --without-pip v")
    await shell(sandbox, "pip --python v/bin/python install -q --no-index ./tiny-1-py3-none-any.whl")
    assert (await shell(sandbox, "v/bin/python -c 'import tiny; print(tiny.__file__)'")).startswith("/workspace/v/")


async def test_the_node_image_runs_javascript(api: APIClient, host: Host) -> None:
    sandbox = await host.make(require_image(api, NODE_IMAGE, is_optional=True))
    assert re.fullmatch(r"v22\.\d+\.\d+\n", await shell(sandbox, "node -e 'console.log(process.version)'"))
    for program in ("npm", "npx", "corepack"):
        done, version = await run(sandbox, program, "--version")
        assert (done["exit_code"], bool(re.fullmatch(r"\d+\.\d+\.\d+\n", version))) == (0, True), version
    # npm warns about a version of Node.js that it does not support.
    package = 'echo \'{"scripts": {"show": "node -p 6*7"}}\' > package.json && npm run --silent show'
    assert await shell(sandbox, f"{package} && npx --no-install node -p 1 2>&1") == "42\n1\n"


# --- Other images
# -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def static_program(api: APIClient) -> bytes:
    """Return a program that needs no library: the bash of the toolkit."""
    return read_files(api, IMAGE, "/opt/toolcrew/bin/bash")["bash"]


def read_files(api: APIClient, image: str, path: str) -> dict[str, bytes]:
    """Return the files of a folder or of one path of an image, by their path in the archive."""
    with open_container(api, {"Image": image, "Labels": LABELS}) as container:
        chunks, _ = api.get_archive(container, path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
            files = [(member.name, archive.extractfile(member)) for member in archive]
            return {name: content.read() for name, content in files if content is not None}


def imported(api: APIClient, tree: bytes, changes: Sequence[str] = ()) -> Iterator[str]:
    """Import an image with these files. `changes`: further lines of a Dockerfile."""
    name = f"toolcrew-test-image:{secrets.token_hex(6)}"
    api.import_image(tree, *name.split(":"), changes=list(changes))
    yield name
    api.remove_image(name, force=True)  # a container that is never started keeps it


def build_tree(files: Iterable[tuple[str, int, bytes]], owners: Mapping[str, tuple[int, int]] | None = None) -> bytes:
    """Return a tar of (path, mode, content). A path that ends with "/" is a folder. `owners`: path -> user and group;
    without it, root.
    """
    tree = io.BytesIO()
    with tarfile.open(fileobj=tree, mode="w") as archive:
        for path, mode, content in files:
            member = tarfile.TarInfo(path.rstrip("/"))
            member.type = tarfile.DIRTYPE if path.endswith("/") else tarfile.REGTYPE
            member.mode, member.size = mode, len(content)
            member.uid, member.gid = (owners or {}).get(member.name, (0, 0))
            archive.addfile(member, io.BytesIO(content))
    return tree.getvalue()


FOLDERS = {
    "etc/": (0o751, 0, 0),
    "home/": (0o711, 0, 0),
    "opt/": (0o2775, 0, 50),
    "root/": (0o750, 12, 34),
    "srv/": (0o1777, 0, 0),
    "var/": (0o770, 1000, 1000),
}
"""Folder -> mode, user and group in the image."""
MODES = "import os, sys; print([(s.st_mode & 0o7777, s.st_uid, s.st_gid) for s in map(os.stat, sys.argv[1:])])"


async def test_folders_have_the_modes_and_owners_of_the_image(
    api: APIClient, either_host: Host, static_program: bytes
) -> None:
    tree = [("usr/bin/sh", 0o755, static_program), *((name, mode, b"") for name, (mode, _, _) in FOLDERS.items())]
    owners = {name.rstrip("/"): (uid, gid) for name, (_, uid, gid) in FOLDERS.items()}
    for image in imported(api, build_tree(tree, owners)):
        sandbox = await either_host.make(image)
        _, shown = await run(
            sandbox, "/opt/toolcrew/bin/python3", "-I", "-S", "-c", MODES, *(f"/{name}" for name in FOLDERS)
        )
        assert shown == f"{list(FOLDERS.values())}\n"
        await either_host.made.pop().remove()


SCRIPT = b"#!/usr/bin/sh\n"
BAD_LIBRARY = b"not a library\n"
OTHER_MACHINE = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHI", 2, 0x1234, 1) + bytes(200)
Files = list[tuple[str, int, bytes]]
# Each image has a static program as /usr/bin/sh, these files, and these lines of a Dockerfile.
IMAGES: dict[str, tuple[Files, list[str]]] = {
    "one static program": ([], []),
    "no /tmp and no /etc/passwd": ([("etc/", 0o755, b"")], []),
    "an old Python with the name python": ([("usr/bin/python", 0o755, SCRIPT + b"echo Python 2.7.18\n")], []),
    "a Python of another processor": ([("usr/bin/python3", 0o755, OTHER_MACHINE)], []),
    "a conda layout": (
        [
            ("opt/conda/bin/python", 0o755, SCRIPT + b"echo Python 3.13.0\n"),
            ("opt/conda/lib/libc.so.6", 0o755, BAD_LIBRARY),
            ("opt/conda/lib/libz.so.1", 0o755, BAD_LIBRARY),
        ],
        ["ENV PATH=/opt/conda/bin:/usr/bin", "ENV LD_LIBRARY_PATH=/opt/conda/lib", "ENV PYTHONHOME=/opt/conda"],
    ),
    "a /testbed of root with a virtual environment": (
        [
            ("testbed/", 0o755, b""),
            ("testbed/main.py", 0o644, b"print(1)\n"),
            ("testbed/.venv/bin/python", 0o755, SCRIPT),
        ],
        ["ENV VIRTUAL_ENV=/testbed/.venv", "WORKDIR /testbed"],
    ),
    "a user of its own": ([("home/app/", 0o755, b"")], ["USER 4711:4711"]),
    "a strange working directory": ([], ["WORKDIR /no/such/folder"]),
    "read-only files": ([("data/", 0o555, b""), ("data/a", 0o444, b"x\n")], []),
    "30,000 files": ([(f"srv/{number // 300}/{number}", 0o644, b"") for number in range(30_000)], []),
    "setuid programs": ([("usr/bin/rootly", 0o6755, SCRIPT)], []),
    "an entry point that exits": ([("bin/", 0o755, b"")], ['ENTRYPOINT ["/no/such/program"]', 'CMD ["--x"]']),
    "programs of another user": ([("usr/bin/rg", 0o755, OTHER_MACHINE), ("usr/bin/git", 0o755, OTHER_MACHINE)], []),
}


@pytest.mark.parametrize(("files", "changes"), IMAGES.values(), ids=IMAGES.keys())
async def test_any_image_works_as_a_sandbox_with_all_tools(
    api: APIClient, either_host: Host, static_program: bytes, files: Files, changes: list[str]
) -> None:
    for image in imported(api, build_tree([("usr/bin/sh", 0o755, static_program), *files]), changes):
        sandbox = await either_host.make(image)
        assert find_dirt(await attest(sandbox)) == []
        assert await bash(sandbox, "echo $UID $PWD; echo needle here > a") == "1000 /workspace\n"
        grep = {"op": "grep", "pattern": "needle", "path": ".", "mode": "content", "limit": 9, "max_lines": 9}
        found = await sandbox.ask({**grep, "max_bytes": 9999, "timeout_s": 9.0, "body_bytes": 0}, sink=lambda _: None)
        assert found["matches"] == 1
        for variable, value in [line.removeprefix("ENV ").split("=") for line in changes if line.startswith("ENV ")]:
            assert await bash(sandbox, f"echo ${variable}") == f"{value}\n"
        if any(b"echo Python" in content for _, _, content in files):
            assert (await bash(sandbox, "python --version")).startswith("Python ")
        # Removed here, because the engine keeps an image while a container of it exists.
        await either_host.made.pop().remove()


async def bash(sandbox: Sandbox, script: str) -> str:
    """Run a script as the bash tool does, and return its output."""
    output: list[bytes] = []
    text = script.encode()
    request = {"op": "exec", "argv": None, "script_bytes": len(text), "state": "use", "timeout_s": 20.0}

    async def body() -> AsyncIterator[bytes]:
        yield text

    done = await sandbox.ask(
        {**request, "capture": {"merged": 65_536}},
        sink=lambda frame: output.append(frame.body),
        body=body(),
        body_bytes=len(text),
    )
    assert done.get("exit_code") == 0, (done, output)
    return b"".join(output).decode()


@pytest.fixture(scope="module")
def foreign_image(api: APIClient, static_program: bytes) -> Iterator[str]:
    """Yield an image without a guest, with a setuid copy of its only program."""
    files = [("usr/bin/sh", 0o755, static_program), ("usr/bin/rootly", 0o4755, static_program)]
    yield from imported(api, build_tree(files), ["ENV HOME=/root", "ENV OF_THE_IMAGE=1"])


async def test_a_setuid_program_of_an_image_gives_no_rights(either_host: Host, foreign_image: str) -> None:
    # Bash drops the rights of a setuid start itself, unless it gets -p.
    _, output = await run(await either_host.make(foreign_image), "/usr/bin/rootly", "-p", "-c", "echo $UID $EUID")
    assert output == "1000 1000\n"


async def test_the_mounted_guest_cannot_be_written(either_host: Host, foreign_image: str) -> None:
    _, output = await run(
        await either_host.make(foreign_image), "/usr/bin/sh", "-c", "echo >> /opt/toolcrew/guest/loop.py"
    )
    assert "Read-only file system" in output or "Permission denied" in output


async def test_programs_get_the_environment_of_the_image_and_the_home_of_the_session(
    either_host: Host, foreign_image: str
) -> None:
    assert await bash(await either_host.make(foreign_image), "echo $OF_THE_IMAGE $HOME") == "1 /home/sandbox\n"


async def test_an_image_that_declares_a_volume_is_refused(api: APIClient, host: Host) -> None:
    for image in imported(api, build_tree([("data/x", 0o644, b"")]), ["VOLUME /data"]):
        with pytest.raises(SandboxUnavailable, match=r"declares volumes \(/data\)"):
            await host.make(image)


async def test_an_image_that_cannot_be_a_sandbox_is_refused_with_the_reason(api: APIClient, host: Host) -> None:
    for image in imported(api, build_tree([("workspace", 0o644, b"")])):
        started_at = time.monotonic()
        with pytest.raises(SandboxUnavailable) as caught:
            await host.make(image)
        assert f"image {image} cannot be a sandbox: " in str(caught.value)
        assert "its /workspace is not a folder" in str(caught.value)
        assert time.monotonic() - started_at < 10
    assert host.factory.slots.used == 0


@pytest.fixture(scope="module")
def image_of_a_task(api: APIClient) -> Iterator[str]:
    """Return an image as benchmarks have them: a repository of root, and a configuration of git."""
    name = f"toolcrew-test:{secrets.token_hex(4)}"
    lines = (
        f"FROM {IMAGE}",
        "USER 0",
        "RUN git config --system alias.fromimage 'log --oneline' && git init -q -b main /testbed && cd /testbed"
        " && git config user.email a@b.example && git config user.name a && echo one > f && git add f"
        " && git commit -qm first && git checkout -qb side && echo side > g && git add g && git commit -qm side"
        " && git checkout -q main && echo two > h && git add h && git commit -qm second && chown -R 0:0 /testbed",
        "ENV GIT_PAGER=head",
    )
    for line in api.build(fileobj=io.BytesIO("\n".join(lines).encode()), tag=name, network_mode="none", decode=True):
        assert "error" not in line, line
    yield name
    api.remove_image(name, force=True)


async def test_git_works_with_a_repository_of_another_user(either_host: Host, image_of_a_task: str) -> None:
    sandbox = await either_host.make(image_of_a_task)
    assert await bash(sandbox, "git -C /testbed status --short && git -C /testbed fromimage | wc -l") == "2\n"
    copy = "cp -r /testbed . && cd testbed && git checkout -q side && "
    assert (
        await bash(sandbox, copy + "git rebase -q main && git merge -q --no-ff main; git log --oneline | wc -l")
    ) == "3\n"
    amend = "cd testbed && git commit --amend -q && git log -1 --format=%s; echo $GIT_PAGER $USER $LOGNAME"
    assert await bash(sandbox, amend) == "side\nhead sandbox sandbox\n"


async def test_bash_scripts_run_in_an_image_without_bash_and_show_their_lines(
    either_host: Host, foreign_image: str
) -> None:
    for image in (foreign_image, IMAGE):
        sandbox = await either_host.make(image)
        assert (await run(sandbox, "bash", "-c", "pkill -f nothing-xyz; echo $0 $1", "name", "first"))[1].endswith(
            "name first\n"
        )
        for script, line in (("\n\nnosuch", "line 3"), ("echo 1\n\necho (", "line 3")):
            assert line in (await run(sandbox, "bash", "-c", script))[1]
        titles = "for file in /proc/[0-9]*/comm; do read -r name < $file; echo $name; done"
        names = (await run(sandbox, "bash", "-c", titles))[1].split()
        assert set(names) == {"init", "bash"}


WHO = (
    "import getpass, os, pathlib, pwd; user = pwd.getpwuid(os.getuid()); home = pathlib.Path.home();"
    "(home / 'file').write_text('x'); print(user.pw_name, user.pw_dir, getpass.getuser(), home,"
    " os.path.expanduser('~'), pwd.getpwuid(0).pw_name, os.access('/etc/passwd', os.W_OK))"
)
PASSWD = b"root:x:0:0::/root:/bin/sh\n"
USERS: dict[str, tuple[Files, str]] = {
    "no /etc/passwd": ([], "sandbox /home/sandbox sandbox /home/sandbox /home/sandbox root False\n"),
    "a passwd without uid 1000": (
        [("etc/passwd", 0o644, PASSWD.rstrip())],
        "sandbox /home/sandbox sandbox /home/sandbox /home/sandbox root False\n",
    ),
    "uid 1000 of another name": (
        [("etc/passwd", 0o644, PASSWD + b"node:x:1000:1000::/home/node:/bin/sh\n")],
        "node /home/sandbox node /home/sandbox /home/sandbox root False\n",
    ),
}


@pytest.mark.parametrize(("files", "expected"), USERS.values(), ids=USERS.keys())
async def test_the_user_of_programs_has_a_name_and_a_home_in_any_image(
    api: APIClient, either_host: Host, static_program: bytes, files: Files, expected: str
) -> None:
    for image in imported(api, build_tree([("usr/bin/sh", 0o755, static_program), *files])):
        for _ in range(2):
            sandbox = await either_host.make(image)
            assert (await run(sandbox, "/opt/toolcrew/bin/python3", "-I", "-S", "-c", WHO))[1] == expected
            assert await bash(sandbox, "echo ~ $HOME $USER $LOGNAME") == (
                f"/home/sandbox /home/sandbox {expected.split()[0]} {expected.split()[0]}\n"
            )
            assert await sandbox.runtime.find_drift(sandbox.container, sandbox.spec) == []
            await either_host.made.pop().remove()
