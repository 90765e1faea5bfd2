"""Attacks through images. The settings of an image must not change the sandbox, and its files must not deceive
sandboxd.
"""

import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from docker import APIClient

from tests.support.sandboxd.attack_sandboxd import OwnSandboxd, open_own_sandboxd
from tests.support.sandboxd.containers import IMAGE, watch
from toolcrew.contract.errors import SandboxUnavailable

pytestmark = pytest.mark.stack

# All settings that an image can contain besides its files.
METADATA = """
USER root
WORKDIR /proc/self/fd/7
ENV LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libz.so.1 LD_AUDIT=/evil.so BASH_ENV=/evil.sh PYTHONPATH=/evil PATH=/evil
ENTRYPOINT ["/bin/sh", "-c", "sleep 666"]
CMD ["evil"]
HEALTHCHECK --interval=1s CMD sleep 667
LABEL toolcrew.sandboxd=another toolcrew.deployment=another toolcrew.deadline=0 toolcrew.lease=0
EXPOSE 80
STOPSIGNAL SIGCONT
ONBUILD RUN false
SHELL ["/evil"]
"""
# The C library loads code that these settings name.
LIBRARY = "/usr/lib/x86_64-linux-gnu"
MODULES = f"""
USER root
RUN cp $(readlink -f {LIBRARY}/libz.so.1) {LIBRARY}/libnss_evil.so.2 && echo 'passwd: evil files' > /etc/nsswitch.conf
ENV LC_ALL=xx_XX.EVIL LOCPATH=/evil GCONV_PATH=/evil LD_SHOW_LATER=1 GLIBC_TUNABLES=glibc.malloc.check=3
"""
ENDLESS_OUTPUT = "#!/bin/sh\nprintf '%s' \"$0\" >&2; while :; do head -c 65536 /dev/urandom; done\n"
FORGED_HELLO = (
    '#!/bin/bash\nh=\'{"ev":"hello","v":1}\'\nprintf \'\\0\\0\\0\\x18\\0\\0\\0\\x14%s\' "$h"\nexec cat >/dev/null\n'
)


def build(api: APIClient, name: str, dockerfile: str, files: Mapping[str, tuple[str, int]]) -> str:
    """Build an image with these files (content, mode), owned by root, and these settings."""
    packed, context = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as layer:
        for path, (content, mode) in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), mode
            layer.addfile(entry, io.BytesIO(content.encode()))
    with tarfile.open(fileobj=context, mode="w") as outer:
        for path, data in (
            ("layer.tar", packed.getvalue()),
            ("Dockerfile", f"FROM {IMAGE}\nADD layer.tar /\n{dockerfile}".encode()),
        ):
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            outer.addfile(entry, io.BytesIO(data))
    context.seek(0)
    tag = f"toolcrew-test-{name}"
    result = list(api.build(fileobj=context, custom_context=True, tag=tag, rm=True, decode=True, network_mode="none"))
    assert "error" not in result[-1], result
    return tag


@pytest.fixture(scope="module")
def images(engine: APIClient) -> Iterator[dict[str, str]]:
    """Return name to tag. The images are removed at the end."""
    plain = {"etc/note": ("x", 0o644)}
    tags = {
        "loud": build(engine, "loud", METADATA, plain),
        "modules": build(engine, "modules", MODULES, plain),
        "volume": build(engine, "volume", "VOLUME /data /workspace", plain),
        "hollow": build(engine, "hollow", "", {"opt/toolcrew/bin/python3": (ENDLESS_OUTPUT, 0o755)}),
        "liar": build(engine, "liar", "", {"opt/toolcrew/bin/python3": (FORGED_HELLO, 0o755)}),
    }
    yield tags
    for tag in tags.values():
        engine.remove_image(tag, force=True)


@pytest.fixture(scope="module")
def unrestricted_sandboxd(start: str, engine: APIClient, images: dict[str, str]) -> Iterator[OwnSandboxd]:
    """Return a sandboxd whose operator has allowed all of these images."""
    with open_own_sandboxd(
        engine, {"TOOLCREW_SANDBOX_IMAGES_ALLOWED": json.dumps(list(images.values())), "TOOLCREW_SANDBOX_START": start}
    ) as opened:
        yield opened


def test_entrypoint_user_and_other_settings_of_an_image_are_ignored(
    unrestricted_sandboxd: OwnSandboxd, images: dict[str, str]
) -> None:
    """Aim: make the engine use the image's entrypoint, command, user, folder, health check or stop signal."""
    with unrestricted_sandboxd.session(session="loud", image=images["loud"]) as session:
        watched = session.watched
        own = str(watched.host_id(1000))

        assert os.readlink(f"/proc/{watched.pid}/exe").startswith("/opt/toolcrew/bin/")
        assert str(Path(f"/proc/{watched.pid}/cwd").readlink()) == "/workspace"
        assert {watched.status_of(pid)["Uid"] for pid in watched.processes()} == {"\t".join([own] * 4)}
        assert not [line for line in session.programs().values() if "66" in line]


def test_the_guest_loads_no_library_of_the_image(unrestricted_sandboxd: OwnSandboxd, images: dict[str, str]) -> None:
    """Aim: run code of the image in PID 1, by a variable that the loader of every program reads."""
    with unrestricted_sandboxd.session(session="preload", image=images["loud"]) as session:
        assert session.bash("echo ${LD_PRELOAD-unset}").done["exit_code"] == 0
        pids = session.watched.processes()
        assert pids
        for pid in pids:
            assert "/usr/lib/x86_64-linux-gnu/libz" not in Path(f"/proc/{pid}/maps").read_text()


def test_the_guest_loads_no_module_that_the_image_names_for_the_c_library(
    unrestricted_sandboxd: OwnSandboxd, images: dict[str, str]
) -> None:
    """Aim: run code of the image in PID 1, as a module for names of users, character sets or memory."""
    with unrestricted_sandboxd.session(session="modules", image=images["modules"]) as session:
        assert session.bash("echo $LC_ALL $USER").streams["merged"].count(b"xx_XX.EVIL sandbox\n")
        pid = session.watched.pid
        environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
        names = ("LC_ALL=", "LOCPATH=", "GCONV_PATH=", "LD_SHOW_LATER=", "GLIBC_TUNABLES=")
        assert {text for text in environment if text.startswith(names) and not text.endswith("=")} == {"LC_ALL=C"}
        for pid in session.watched.processes():
            assert "libnss_evil" not in Path(f"/proc/{pid}/maps").read_text()


def test_labels_of_an_image_do_not_replace_sandboxd_labels(
    unrestricted_sandboxd: OwnSandboxd, images: dict[str, str]
) -> None:
    """Aim: avoid the clean-up of every sandboxd, or have another daemon's sandboxes removed."""
    with unrestricted_sandboxd.session(session="labels", image=images["loud"]) as session:
        labels = session.watched.labels()

        assert labels["toolcrew.sandboxd"] == labels["toolcrew.deployment"] == unrestricted_sandboxd.name
        assert int(labels["toolcrew.deadline"]) > 0
        assert labels["toolcrew.lease"] != "0"


def test_an_image_with_a_volume_is_refused(
    engine: APIClient, unrestricted_sandboxd: OwnSandboxd, images: dict[str, str]
) -> None:
    """Aim: get an anonymous volume, which is a folder of the host without a limit."""
    before = {volume["Name"] for volume in engine.volumes()["Volumes"] or []}
    with (
        pytest.raises(SandboxUnavailable, match="/data"),
        unrestricted_sandboxd.session(session="volume", image=images["volume"]),
    ):
        pass

    assert {volume["Name"] for volume in engine.volumes()["Volumes"] or []} <= before
    described = [watch(engine, box).described() for box in unrestricted_sandboxd.footprint.containers()]
    assert not [text for text in described if images["volume"] in text]


def test_an_image_cannot_replace_the_guest_program(unrestricted_sandboxd: OwnSandboxd, images: dict[str, str]) -> None:
    """Aim: be PID 1, to flood sandboxd or to impersonate the guest. The mounted toolkit hides the image's program."""
    for name in ("hollow", "liar"):
        unrestricted_sandboxd.reset_peak()
        before, log_before = unrestricted_sandboxd.peak_bytes(), len(unrestricted_sandboxd.log())
        with unrestricted_sandboxd.session(session=name, image=images[name]) as session:
            assert session.bash("exit 42").done["exit_code"] == 42
        assert unrestricted_sandboxd.peak_bytes() - before < 12 << 20
        assert len(unrestricted_sandboxd.log()) - log_before < 5000
