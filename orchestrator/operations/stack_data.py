"""Data of embedded stacks that outlives them: the folder of `toolcrew up --data`, and the records of pulled images."""

import fcntl
import hashlib
import itertools
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.settings import default_image_records


@dataclass(frozen=True)
class StackData:
    """A folder that this process has locked. `redis_password` is the same at every start, because the keys that sign
    records are derived from it.
    """

    folder: Path
    redis_password: str

    @property
    def redis(self) -> Path:
        """Return the folder of Redis's append-only file."""
        return self.folder / "redis"

    @property
    def sandboxd(self) -> Path:
        """Return the folder of sandboxd's state and of checkpoints."""
        return self.folder / "sandboxd"

    @property
    def store(self) -> Path:
        """Return the folder of uploads, artifacts and checkpoints, if no other store is configured. All processes of
        the stack are on this host, so the folder is a shared store.
        """
        return self.folder / "store"

    @property
    def sandboxd_name(self) -> str:
        """Return sandboxd's name. It is the same at every start, so that sandboxd removes the sandboxes of a killed
        stack.
        """
        return f"local-{hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:8]}"


@contextmanager
def open_stack_data(path: Path) -> Iterator[StackData]:
    """Create the folder with mode 0700, or lock the existing one. Raises ConfigError when another stack uses it, or
    it cannot be written.
    """
    folder = path.absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror}): select another folder with --data"
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another `toolcrew up` uses {folder}: stop it, or select another folder with --data"
            ) from error
        for name in ("redis", "store"):
            (folder / name).mkdir(mode=0o700, exist_ok=True)
        yield StackData(folder.resolve(), _load_password(folder / "redis-password"))
    finally:
        os.close(lock)


@contextmanager
def open_image_records() -> Iterator[Path]:
    """Yield a folder for the records of the images that sandboxd pulls, of a stack without a data folder. It begins
    with the records of stacks that have ended, so that this stack removes their images when they need too much space.
    """
    root = default_image_records()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{root} cannot be written ({error.strerror}): set XDG_STATE_HOME to a folder "
            "for the records of pulled images"
        ) from error
    own: Path | None = None
    with ExitStack() as stack:
        for number in itertools.count():
            folder = root / str(number)
            if own is not None and not folder.exists():
                break
            folder.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            if own is None:
                own = folder
                stack.callback(os.close, lock)
                continue
            for record in folder.glob("*.json"):
                record.replace(own / record.name)
            os.close(lock)
        assert own is not None
        yield own


def _load_password(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        password = secrets.token_urlsafe(24)
        # Written atomically. With another password, the existing records could not be verified.
        unfinished = path.with_suffix(".new")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(password)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        return password
