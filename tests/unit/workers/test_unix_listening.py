"""The socket of a daemon: its allowed locations, the processes that it may replace, and the identity of its clients."""

import os
import socket
import stat
from pathlib import Path

import pytest

from toolcrew.workers.unix_listening import find_peer_uid, open_listener, refuse_second, unlink_own


def open_own(path: Path, mode: int = 0o600) -> socket.socket:
    return open_listener(path, mode, owner="daemon", variable="TOOLCREW_SOCKET")


def test_abandoned_socket_is_replaced_with_the_requested_mode(tmp_path: Path) -> None:
    path = tmp_path / "own" / "x.sock"
    open_own(path).close()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    refuse_second(path, owner="daemon")
    with open_own(path, 0o660):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660


def test_second_listener_on_a_socket_is_refused(tmp_path: Path) -> None:
    with open_own(tmp_path / "x.sock"):
        with pytest.raises(OSError, match="another daemon already listens"):
            open_own(tmp_path / "x.sock")
        assert (tmp_path / "x.sock").exists()


def test_socket_with_a_full_backlog_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(path))
        busy.listen(0)
        waiting.connect(str(path))
        with pytest.raises(OSError, match="another daemon already listens"):
            open_own(path)
        assert path.exists()


def test_file_that_is_not_a_socket_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OSError, match="is not a socket: move the file, or set TOOLCREW_SOCKET"):
        open_own(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_socket_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 4321, 4321)
    with pytest.raises(OSError, match="belongs to another user"):
        open_own(tmp_path / "x.sock")


def test_unlink_own_removes_only_its_own_socket(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with open_own(path):
        own = path.stat().st_ino
        unlink_own(path, own + 1)
        assert path.exists()
        unlink_own(path, own)
        assert not path.exists()
        unlink_own(path, own)


def test_peers_see_the_uid_of_each_other(tmp_path: Path) -> None:
    with open_own(tmp_path / "x.sock") as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "x.sock"))
        server, _ = listener.accept()
        with server:
            assert find_peer_uid(server) == find_peer_uid(client) == os.geteuid()
