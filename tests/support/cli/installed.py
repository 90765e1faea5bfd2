"""Environments with the toolcrew wheel and only its required packages. Packages are linked from the current
environment; nothing is downloaded.
"""

import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, distribution
from pathlib import Path, PurePath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
RUN_S = 120.0


@dataclass(frozen=True)
class Installed:
    """A virtual environment."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def packages(self) -> Path:
        return self.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    def run(self, *argv: str, timeout_s: float = RUN_S, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run a command without any part of the current environment."""
        variables = {
            "PATH": f"{self.folder}/bin:/usr/bin:/bin",
            "HOME": str(self.folder),
            "LANG": "C.UTF-8",
            **environment,
        }
        return subprocess.run(
            argv, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
        )


def build_wheel(folder: Path) -> Path:
    """Build the toolcrew wheel from the working tree."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=RUN_S,
    )
    (wheel,) = folder.glob("toolcrew-*.whl")
    return wheel


def unpack_wheel(wheel: Path, folder: Path) -> Path:
    """Unpack the files that the wheel installs. Several environments share the folder, so that Python compiles the
    files once.
    """
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def make_environment(folder: Path, unpacked: Path, extras: tuple[str, ...], *, is_installed: bool = True) -> Installed:
    """Make an environment with everything that the unpacked wheel requires for `extras`. `is_installed`: also install
    the wheel itself.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    environment_made = Installed(folder)
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    requirements = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    if is_installed:
        (environment_made.packages / "own.pth").write_text(f"{unpacked}\n")
    for package in _resolve(requirements, extras).values():
        _link(package, environment_made.packages)
    return environment_made


def _resolve(requirements: list[str], extras: tuple[str, ...]) -> dict[str, Distribution]:
    """Return the distributions that meet the requirements, including indirect requirements, by name."""
    found: dict[str, Distribution] = {}
    requirements_done: set[tuple[str, str]] = set()
    waiting = [(text, extra) for text in requirements for extra in ("", *extras)]
    while waiting:
        text, extra = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name == "toolcrew":
            # An extra that includes another extra.
            waiting += [(inner, extra_name) for extra_name in requirement.extras for inner in requirements]
            continue
        package = found.setdefault(name, distribution(requirement.name))
        assert requirement.specifier.contains(package.version, prereleases=True), (
            f"{text} is asked for, and {package.version} is here"
        )
        for extra_name in {"", *requirement.extras}:
            if (name, extra_name) not in requirements_done:
                requirements_done.add((name, extra_name))
                waiting += [(inner, extra_name) for inner in package.requires or []]
    return found


def _link(package: Distribution, packages: Path) -> None:
    """Link the files of a distribution, including compiled files. Programs outside of the packages are left out."""
    for part in _parts(package):
        target = packages / part
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(str(package.locate_file(part)))


@cache
def _is_whole(folder: Path) -> bool:
    """Return whether the folder is linked as a whole. Several distributions may share a folder that is not itself a
    package.
    """
    return folder.name.endswith(".dist-info") or (folder / "__init__.py").exists()


def _parts(package: Distribution) -> set[PurePath]:
    """Return the packages of a distribution, and its files outside of packages."""
    place, parts = Path(str(package.locate_file(""))), set[PurePath]()
    for file in package.files or []:
        if file.parts[0] != "..":
            folders = reversed(file.parents[:-1])
            parts.add(next((folder for folder in folders if _is_whole(place / folder)), file))
    return {part for part in parts if (place / part).exists()}
