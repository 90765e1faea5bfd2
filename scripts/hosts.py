"""Boot stock Debian hosts in virtual machines and run the product there; scripts/hosts describes the options.

A row is a shell command that runs as root in the checkout of the machine; it works if its exit status is 0. A release
whose engine can keep images in containerd runs the rows twice. The output of each row is kept in
build/hosts/RELEASE/logs, and the results in build/hosts/RELEASE/results.json, so that the rows can be run one by one.

Without KVM, the clock of a machine counts its instructions, one per nanosecond. The limits of the product and of the
tests then mean the same on every host, however busy: a machine is as slow as an old computer, and never slower.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAB = ROOT / "build" / "hosts"
SHARE = LAB / "share"
"""Files for the machines, which mount this folder read-only at /mnt."""
PAGE = ROOT / "docs" / "images.md"
BEGIN, END = "<!-- hosts: begin, written by scripts/hosts -->\n", "<!-- hosts: end -->\n"
HEADING = "### On which hosts was this tried?\n\n"
CHECKOUT = "/root/toolcrew"
IMAGES = ("toolcrew-sandbox", "toolcrew-sandboxd")
BOOT_S, POWEROFF_S = 1200, 600
ROW_S = 2400
"""Time limit of a row, by the machine's clock."""
ACCELERATORS = {
    True: ("-accel", "kvm", "-smp", "2"),
    False: ("-accel", "tcg,tb-size=1024", "-icount", "shift=0,sleep=on,align=off", "-rtc", "clock=vm", "-smp", "1"),
}
"""QEMU emulates the processor unless the caller says that KVM works: KVM inside of a virtual machine often does not."""
MEMORY_MIB, DISK_GIB = 4096, 24

PACKAGES = (
    "linux-image-amd64 systemd systemd-sysv dbus udev apparmor apparmor-utils openssh-server ca-certificates curl crun"
    " runc iptables python3 python3-venv python3-pip git redis-server e2fsprogs sudo iproute2 procps kmod ripgrep"
    " bash-static busybox-static docker.io docker-compose"
)
"""What a user's host has. The first packages make a minimal system boot."""

LOAD_IMAGES = """
containerd >/dev/null 2>&1 & containerd=$!
for store in STORES; do
    echo "{\\"features\\": {\\"containerd-snapshotter\\": $store}}" >/tmp/daemon.json
    dockerd --config-file /tmp/daemon.json --containerd /run/containerd/containerd.sock \
        --bridge none --iptables=false --ip6tables=false >/dev/null 2>&1 & dockerd=$!
    timeout 60 sh -c 'until docker version; do sleep 0.2; done' >/dev/null 2>&1 && docker load -q -i /mnt/images.tar || failed=yes
    kill $dockerd; wait $dockerd || true
done
kill $containerd; wait $containerd || true
[ -z "${failed:-}" ]
"""
"""Loads the images into each store of the release's engine, which runs without a network."""
PYTEST = "TOOLCREW_TEST_REQUIRE=1 .venv/bin/python -m pytest -q -p no:cacheprovider"
SANDBOXD = ".venv/bin/python -m toolcrew.workers.sandboxd --check"
COMPOSE = "docker-compose run --rm --no-deps -T -e TOOLCREW_SANDBOX_START=oci sandboxd python -m toolcrew.workers.sandboxd --check"


@dataclass(frozen=True)
class Release:
    """A release of Debian. `port`: of ssh, on the loopback address of this host."""

    title: str
    port: int
    has_containerd_store: bool


RELEASES = {
    "bookworm": Release("Debian 12", 2212, has_containerd_store=False),
    "trixie": Release("Debian 13", 2213, has_containerd_store=True),
    "sid": Release("Debian sid", 2214, has_containerd_store=True),
}
OVERLAY2, CONTAINERD = "overlay2", "containerd's store"


@dataclass(frozen=True)
class Result:
    """The last run of a row."""

    works: bool
    date: str

    @property
    def mark(self) -> str:
        return "works" if self.works else "**fails**"


@dataclass
class Column:
    """A host in the table. `rows`: title to result; a row that was not run is absent."""

    versions: str
    rows: dict[str, Result]


ROWS = {
    "`scripts/setup`": "scripts/setup --no-weights",
    # A real model would need hours where QEMU emulates the processor.
    "`scripts/demo`, with the scripted model": "TOOLCREW_MODEL_FILE=/none .venv/bin/python scripts/demo.py",
    "start without the engine": f"TOOLCREW_SANDBOX_START=oci {SANDBOXD}",
    "start by the engine": f"TOOLCREW_SANDBOX_START=engine {SANDBOXD}",
    "profile, pause, removal": f"{PYTEST} tests/conformance/test_sandbox_runtimes.py",
    "forks": f"{PYTEST} tests/integration/test_forks.py -k 'diverge or outlives or merged or root_session'",
    "checkpoints with root inside": f"{PYTEST} tests/integration/test_root_checkpoints.py",
    "root inside, quotas of bytes and files": f"{PYTEST} tests/attacks/test_root_inside.py",
    "memory limit, OOM report": f"{PYTEST} tests/attacks/test_exhaustion.py -k 'oom or memory_exhaustion'",
    "pids and descriptors": f"{PYTEST} tests/attacks/test_exhaustion.py -k 'fork_bomb or descriptors'",
    "processor and memory figures": f"{PYTEST} tests/integration/test_sandbox_figures.py",
    "attacks: escapes": f"{PYTEST} tests/attacks/test_escape.py tests/attacks/test_host_files.py",
    "attacks: neighbours, workspaces": f"{PYTEST} tests/attacks/test_neighbours.py tests/attacks/test_workspace_tricks.py",
    "nothing left after a kill": f"{PYTEST} tests/integration/test_nothing_left.py -k killed",
    "compose": COMPOSE,
}


def say(sentence: str) -> None:
    print(f"hosts: {sentence}", file=sys.stderr, flush=True)


def run(*argv: str | Path, **options: object) -> str:
    """Run a program of this host and return its output. Raises CalledProcessError."""
    return subprocess.run([str(word) for word in argv], check=True, stdout=subprocess.PIPE, text=True, **options).stdout  # type: ignore[call-overload,no-any-return]


class Machine:
    """The virtual machine of a release, with the folder of its disks."""

    def __init__(self, name: str, *, has_kvm: bool = False) -> None:
        self.name = name
        self._has_kvm = has_kvm
        self.release = RELEASES[name]
        self.folder = LAB / name
        self._base, self._disk = self.folder / "base.raw", self.folder / "run.raw"

    # --- Disk

    def build(self) -> None:
        """Make the disk of a stock host, unless it is there."""
        if self._base.exists():
            return
        say(f"making the disk of {self.release.title}")
        root = self.folder / "root"
        run("rm", "-rf", "--one-file-system", root)
        root.mkdir(parents=True)
        (self.folder / "sources.list").write_text(self._list_sources())
        # The kernel needs few modules before it sees its disk, and a chroot has no devices to detect.
        modules = "virtio_pci\\nvirtio_blk\\next4\\ncrc32c\\n"
        setup = (
            'mkdir -p "$1/etc/initramfs-tools/conf.d"; echo MODULES=list >"$1/etc/initramfs-tools/conf.d/lab"'
            f"; printf '{modules}' >\"$1/etc/initramfs-tools/modules\""
        )
        # A tar keeps owners and devices where the folder's file system would not.
        tar = self.folder / "root.tar"
        packages = PACKAGES.replace(" ", ",") + ("" if self.name == "bookworm" else ",docker-cli")
        bootstrap = ("mmdebstrap", "--variant=minbase", "--mode=root", "--skip=check/empty")
        run(*bootstrap, f"--include={packages}", f"--setup-hook={setup}", self.name, tar, self.folder / "sources.list")
        run("tar", "-C", root, "-xf", tar, "--numeric-owner")
        tar.unlink()
        self._configure(root)
        self._install(root)
        for pattern, name in (("vmlinuz-*", "vmlinuz"), ("initrd.img-*", "initrd")):
            [found] = (root / "boot").glob(pattern)
            (self.folder / name).write_bytes(found.read_bytes())
        unfinished = self.folder / "base.new"
        run("truncate", "-s", f"{DISK_GIB}G", unfinished)
        run("mkfs.ext4", "-q", "-L", "root", "-E", "nodiscard", "-d", root, unfinished)
        run("rm", "-rf", "--one-file-system", root)
        unfinished.rename(self._base)

    def _list_sources(self) -> str:
        """Return the sources of apt, on the mirror that this host uses."""
        lists = run("apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", "Origin: Debian")
        site = lists.split()[0].removesuffix("/debian")
        key = "signed-by=/usr/share/keyrings/debian-archive-keyring.gpg"
        if self.name == "sid":
            # The index of sid on a mirror that stands still is past its date. Its signature is checked.
            return f"deb [{key} check-valid-until=no] {site}/debian sid main\n"
        suites = (f"debian {self.name}", f"debian {self.name}-updates", f"debian-security {self.name}-security")
        return "".join(f"deb [{key}] {site}/{suite} main\n" for suite in suites)

    def _configure(self, root: Path) -> None:
        key = LAB / "key"
        if not key.exists():
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
        (root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
        (root / "root/.ssh/authorized_keys").write_bytes(key.with_suffix(".pub").read_bytes())
        (root / "etc/hostname").write_text(f"{self.name}\n")
        (root / "etc/hosts").write_text(f"127.0.0.1 localhost {self.name}\n")
        (root / "etc/systemd/network/10-all.network").write_text("[Match]\nName=en* eth*\n[Network]\nDHCP=yes\n")
        (root / "etc/fstab").write_text("LABEL=root / ext4 rw,relatime 0 1\nshare /mnt 9p trans=virtio,ro,nofail 0 0\n")
        # The machine reaches the network as this host does.
        for name in ("etc/resolv.conf", "etc/pip.conf"):
            if Path("/", name).exists():
                run("cp", "-L", "--remove-destination", f"/{name}", root / name)
        certificates = Path("/usr/local/share/ca-certificates")
        if certificates.is_dir():
            run("cp", "-rT", certificates, root / "usr/local/share/ca-certificates")
        self._chroot(root, "update-ca-certificates; systemctl enable systemd-networkd ssh docker containerd apparmor")
        timers = "apt-daily.timer apt-daily-upgrade.timer man-db.timer fstrim.timer"
        self._chroot(root, f"systemctl disable redis-server {timers} || true")

    def _install(self, root: Path) -> None:
        """Make the .venv with the release's own Python, on this host: the same files, much sooner."""
        run("git", "clone", "-q", f"file://{ROOT}", f"{root}{CHECKOUT}")
        with self._entered(root):
            self._chroot(root, f"cd {CHECKOUT} && scripts/setup --no-weights")

    def prepare(self) -> None:
        """Copy the disk, and bring the copy to the commit and the images, on this host for the same reason."""
        say(f"preparing {self.release.title}")
        run("cp", "--sparse=always", self._base, self._disk)
        root = self.folder / "root"
        root.mkdir(exist_ok=True)
        run("mount", "-o", "loop", self._disk, root)
        try:
            with self._entered(root):
                self._chroot(
                    root,
                    f"cd {CHECKOUT}; git fetch -q /mnt/tree.bundle HEAD; git checkout -q --force FETCH_HEAD"
                    "; scripts/setup --no-weights; .venv/bin/python -m compileall -q .venv/lib >/dev/null || true"
                    f"; {PYTEST} --co tests/conformance tests/integration tests/attacks >/dev/null",
                )
                stores = ("false", "true") if self.release.has_containerd_store else ("false",)
                self._chroot(root, LOAD_IMAGES.replace("STORES", " ".join(stores)))
        finally:
            run("umount", root)
            root.rmdir()

    @staticmethod
    @contextlib.contextmanager
    def _entered(root: Path) -> Iterator[None]:
        """Mount what programs of the disk need on this host."""
        with contextlib.ExitStack() as stack:
            for folder in ("proc", "dev", "sys", "run", "tmp", "mnt"):
                source = SHARE if folder == "mnt" else Path("/", folder)
                options = ("-t", "tmpfs", "tmpfs") if folder in ("run", "tmp") else ("--rbind", source)
                run("mount", *options, root / folder)
                stack.callback(run, "umount", "-l", root / folder)
                run("mount", "--make-rslave", root / folder)
            yield

    @staticmethod
    def _chroot(root: Path, script: str) -> None:
        path = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"
        run(
            "chroot",
            root,
            "env",
            "-i",
            path,
            "HOME=/root",
            "LANG=C.UTF-8",
            "sh",
            "-ec",
            script,
            stderr=subprocess.DEVNULL,
        )

    # --- The running machine

    @contextlib.contextmanager
    def booted(self) -> Iterator[None]:
        """Boot the copy of the disk. On exit, power off and delete the copy."""
        with (self.folder / "console.log").open("wb") as console:
            process = subprocess.Popen(self._describe(), stdin=subprocess.DEVNULL, stdout=console, stderr=console)
        try:
            self._wait_for_ssh(process)
            yield
        finally:
            self.ssh("systemctl poweroff", POWEROFF_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POWEROFF_S)
            process.kill()
            process.wait()
            self._disk.unlink()

    def _describe(self) -> list[str]:
        """Return QEMU's command."""
        kernel = "root=/dev/vda rw console=ttyS0 systemd.unified_cgroup_hierarchy=1 apparmor=1 security=apparmor net.ifnames=0"
        return [
            *("qemu-system-x86_64", "-machine", "q35", "-cpu", "max", *ACCELERATORS[self._has_kvm]),
            *("-m", str(MEMORY_MIB), "-display", "none", "-serial", "stdio", "-monitor", "none"),
            *("-kernel", str(self.folder / "vmlinuz"), "-initrd", str(self.folder / "initrd"), "-append", kernel),
            *("-drive", f"file={self._disk},format=raw,if=virtio,cache=unsafe,discard=unmap"),
            *("-nic", f"user,model=virtio-net-pci,hostfwd=tcp:127.0.0.1:{self.release.port}-:22"),
            *("-virtfs", f"local,path={SHARE},mount_tag=share,security_model=none,readonly=on"),
            *("-object", "rng-random,id=rng0,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng0"),
        ]

    def _wait_for_ssh(self, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + BOOT_S
        while self.ssh("true", 60)[0] != 0:
            if process.poll() is not None or time.monotonic() > until:
                sys.exit(f"hosts: {self.name} did not boot, see {self.folder / 'console.log'}")
            time.sleep(2)

    def login(self) -> list[str]:
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "ConnectTimeout=30")
        named = [word for option in options for word in ("-o", option)]
        return ["ssh", "-i", str(LAB / "key"), *named, "-p", str(self.release.port), "root@127.0.0.1"]

    def ssh(self, script: str, limit_s: int = 0) -> tuple[int, str]:
        """Run a script as root. Return its exit status, which is 124 at the time limit, and its output. 0: no limit."""
        argv = ["timeout", str(limit_s), *self.login(), f"sh -c {shlex.quote(script)}"]
        ended = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        return ended.returncode, ended.stdout

    def must(self, script: str) -> str:
        status, output = self.ssh(script)
        if status != 0:
            sys.exit(f"hosts: {self.name}: {script}\n{output[-4000:]}")
        return output

    # --- Rows

    def switch_to_containerd(self) -> None:
        feature = '{"features": {"containerd-snapshotter": true}}'
        self.must(f"mkdir -p /etc/docker; echo '{feature}' >/etc/docker/daemon.json; systemctl restart docker")

    def describe(self) -> str:
        """Return the versions that matter, as one line."""
        script = (
            "uname -r; docker version --format '{{.Server.Version}}'; crun --version | head -n 1; python3 --version"
        )
        kernel, engine, crun, python = self.must(script).splitlines()
        return f"Linux {re.split('[-+]', kernel)[0]}, Docker {engine.split('+')[0]}, {crun.replace(' version', '')}, {python}"

    def try_rows(self, rows: dict[str, str], store: str) -> None:
        """Run the rows, and add their results to those of earlier runs."""
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        title = self.release.title if store == OVERLAY2 else f"{self.release.title}, {store}"
        columns = self.load()
        column = columns.setdefault(title, Column("", {}))
        column.versions = self.describe()
        for row, command in rows.items():
            began = time.monotonic()
            name = re.sub(r"\W+", "-", f"{store} {row}").strip("-")
            # The limit is in the machine's time: how long a row takes here says nothing.
            status, output = self.ssh(f"cd {CHECKOUT} && exec timeout {ROW_S} sh -c {shlex.quote(command)}")
            (logs / f"{name}.log").write_text(f"$ {command}\n{output}\nexit status {status}\n")
            column.rows[row] = Result(status == 0, f"{datetime.now(UTC):%Y-%m-%d}")
            say(f"{self.name}, {store}: {row}: {column.rows[row].mark} ({time.monotonic() - began:.0f} s)")
            self.results.write_text(json.dumps(columns, default=asdict, indent=1))

    @property
    def results(self) -> Path:
        return self.folder / "results.json"

    def load(self) -> dict[str, Column]:
        """Return the columns of this release in the table, with the last result of each row."""
        if not self.results.exists():
            return {}
        stored = json.loads(self.results.read_text())
        return {
            title: Column(column["versions"], {row: Result(**result) for row, result in column["rows"].items()})
            for title, column in stored.items()
        }


def prepare_share() -> None:
    """Write the commit and the images where the machines read them."""
    SHARE.mkdir(parents=True, exist_ok=True)
    run("git", "bundle", "create", "-q", SHARE / "tree.bundle", "HEAD", cwd=ROOT)
    listed = run("docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split()
    current = _find_id("toolcrew-sandbox:dev")
    named = [name for name in listed if name.split(":")[0] in IMAGES]
    # scripts/build-image finds an image by the tag with the hash of its inputs.
    wanted = [name for name in named if name.endswith(":dev") or _find_id(name) == current]
    run("docker", "save", "-o", SHARE / "images.tar", *wanted)


def _find_id(image: str) -> str:
    return run("docker", "image", "inspect", "--format", "{{.Id}}", image).strip()


def render(columns: dict[str, Column]) -> str:
    """Return the table in Markdown. `columns`: by title."""
    heads = [f"{title} ({column.versions})" for title, column in columns.items()]
    lines = [f"| {' | '.join(('', *heads))} |", "|---" * (len(columns) + 1) + "|"]
    for row in ROWS:
        marks = (column.rows[row].mark if row in column.rows else "not run" for column in columns.values())
        lines.append(f"| {' | '.join((row, *marks))} |")
    dates = sorted({result.date for column in columns.values() for result in column.rows.values()})
    when = f"on {dates[0]}" if len(dates) == 1 else f"between {dates[0]} and {dates[-1]}"
    return f"{HEADING}`scripts/hosts` ran these rows {when}.\n\n" + "\n".join(lines) + "\n"


def write(table: str) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/hosts")
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help=f"default: {' '.join(RELEASES)}")
    parser.add_argument("--write", action="store_true", help="write the last result of every row into docs/images.md")
    parser.add_argument("--keep", action="store_true", help="wait for Ctrl-C before a machine is powered off")
    parser.add_argument("--kvm", action="store_true", help="use KVM, which is several times as quick")
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows with this text in their title")
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.releases) - RELEASES.keys()
    if unknown:
        parser.error(f"unknown release {', '.join(sorted(unknown))}; known: {', '.join(RELEASES)}")
    rows = {title: command for title, command in ROWS.items() if chosen.rows in title}
    prepare_share()
    columns: dict[str, Column] = {}
    for name in chosen.releases or RELEASES:
        machine = Machine(name, has_kvm=chosen.kvm)
        machine.build()
        machine.prepare()
        with machine.booted():
            machine.must(f"cd {CHECKOUT} && {{ [ -f .env ] || deploy/make-env; }}")
            machine.try_rows(rows, OVERLAY2)
            if machine.release.has_containerd_store:
                machine.switch_to_containerd()
                machine.try_rows(rows, CONTAINERD)
            if chosen.keep:
                say(f"{name} is up until Ctrl-C: {shlex.join(machine.login())}")
                with contextlib.suppress(KeyboardInterrupt):
                    time.sleep(86_400)
        columns |= machine.load()
    print(render(columns))
    if chosen.write:
        write(render({title: column for name in RELEASES for title, column in Machine(name).load().items()}))
    return int(not all(result.works for column in columns.values() for result in column.rows.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
