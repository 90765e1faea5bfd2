"""Attacks with ptrace, in a class that allows it: programs trace each other, but not the guest, and the filter of system
calls and the limits hold for traced programs.
"""

import json
from collections.abc import Iterator

import pytest
from docker import APIClient

from tests.support.sandboxd.attack_sandboxd import HostileSession, OwnSandboxd, open_own_sandboxd

PRELUDE = """
import ctypes, errno, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long
TRACEME, CONT, GETREGS, SETREGS, ATTACH, DETACH, SYSCALL, SEIZE = 0, 7, 12, 13, 16, 17, 24, 0x4206
ORIG_RAX, RAX, RDI = 15, 10, 14

def ptrace(request, pid=0, address=None, data=None):
    if libc.ptrace(request, pid, address, data) == -1:
        raise OSError(ctypes.get_errno(), "ptrace")

def stop(pid):
    assert os.WIFSTOPPED(os.waitpid(pid, 0x40000000)[1])
"""
REPLACES_A_CALL = """
child = os.fork()
if child == 0:
    ptrace(TRACEME)
    os.kill(os.getpid(), signal.SIGSTOP)
    libc.getppid()
    os._exit(0)
stop(child)
registers = (ctypes.c_ulonglong * 27)()
ptrace(SYSCALL, child); stop(child)
ptrace(GETREGS, child, None, registers)
while registers[ORIG_RAX] != 110:  # getppid
    ptrace(SYSCALL, child); stop(child)
    ptrace(GETREGS, child, None, registers)
registers[ORIG_RAX], registers[RDI] = 272, 0x10000000  # unshare(CLONE_NEWUSER)
ptrace(SETREGS, child, None, registers)
ptrace(SYSCALL, child); stop(child)
ptrace(GETREGS, child, None, registers)
print(errno.errorcode[2**64 - registers[RAX]])
"""
TRACES_THE_GUEST = """
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]

def reads(pid):
    here = ctypes.create_string_buffer(8)
    try: start = int(open(f"/proc/{pid}/maps").readline().split("-")[0], 16)
    except PermissionError: start = 0x400000
    near, far = Part(ctypes.addressof(here), 8), Part(start, 8)
    return libc.process_vm_readv(pid, ctypes.byref(near), 1, ctypes.byref(far), 1, 0) != -1 or ctypes.get_errno() != errno.EPERM

for pid in (1, os.getppid() if len(sys.argv) < 2 else int(sys.argv[1])):
    for request in (ATTACH, SEIZE):
        try: ptrace(request, pid); print(pid, request, "traced")
        except PermissionError: print("refused")
    print("read" if reads(pid) else "refused")
    for name in ("mem", "maps", "environ", "syscall", "stack"):
        try: open(f"/proc/{pid}/{name}", "rb").read(1); print(pid, name, "read")
        except (PermissionError, FileNotFoundError): print("refused")
"""


def build_command(source: str, *arguments: str) -> str:
    return f"python3 - {' '.join(arguments)} <<'SOURCE'\n{PRELUDE}{source}\nSOURCE"


@pytest.fixture(scope="module", params=["engine", "oci", "root"])
def tracing(request: pytest.FixtureRequest, engine: APIClient) -> Iterator[OwnSandboxd]:
    """Return a sandboxd whose default class allows ptrace. `root`: also with root inside."""
    is_root = request.param == "root"
    own_class = {"ptrace": True, **({"user": "root"} if is_root else {})}
    settings = {
        "TOOLCREW_SANDBOX_START": "oci" if is_root else request.param,
        "TOOLCREW_TENANT_CLASSES": json.dumps({"default": own_class}),
    }
    with open_own_sandboxd(engine, settings) as opened:
        yield opened


@pytest.fixture
def session(tracing: OwnSandboxd) -> Iterator[HostileSession]:
    with tracing.session() as opened:
        yield opened


def output(session: HostileSession, script: str) -> list[str]:
    return session.bash(script).streams["merged"].decode().split()


TRACED = build_command("ptrace(TRACEME); print('traced', os.environ.get('LSAN_OPTIONS'))")


def test_programs_are_traced_where_the_class_allows_it(session: HostileSession) -> None:
    assert output(session, TRACED) == ["traced", "None"]


def test_programs_are_not_traced_elsewhere(sandboxd: OwnSandboxd) -> None:
    with sandboxd.session("acme", "plain") as session:
        assert output(session, TRACED)[-4:] == ["PermissionError:", "[Errno", "1]", "ptrace"]
        assert output(session, "echo $LSAN_OPTIONS") == ["detect_leaks=0"]


def test_no_program_traces_the_guest_or_its_supervisors(session: HostileSession) -> None:
    """Aim: answer in place of the guest, or lift the limits that it sets. Its processes have the same user."""
    # The parent of the shell is the supervisor of the call.
    answer = output(session, "supervisor=$PPID\n" + build_command(TRACES_THE_GUEST, "$supervisor"))
    assert answer == ["refused"] * 16
    assert session.is_usable()


def test_a_tracer_brings_no_call_past_the_filter(session: HostileSession) -> None:
    """Aim: replace a call of a traced program after the filter has allowed it."""
    assert output(session, build_command(REPLACES_A_CALL)) == ["EPERM"]


def test_a_traced_program_ends_at_the_limit_of_its_call(session: HostileSession) -> None:
    """Aim: outlive the call. A stopped program ignores signals, and a tracer holds back the end of a program."""
    source = """
child = os.fork()
if child == 0:
    ptrace(TRACEME); os.setsid(); os.kill(os.getpid(), signal.SIGSTOP); signal.pause()
stop(child)
for number in range(1, 32):
    if number not in (9, 19): signal.signal(number, signal.SIG_IGN)
signal.pause()
"""
    done = session.bash(build_command(source), timeout_s=2.0).done
    assert done["timed_out"], done
    assert session.is_usable()
    assert session.programs() == {}


def test_a_tracer_of_another_call_does_not_hold_the_end_of_a_call(session: HostileSession) -> None:
    """Aim: a program that has ended, but that its tracer does not release, so that its call never ends."""
    source = """
import glob, time
while True:
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            if b"traced-program" in open(path, "rb").read().split(b"\\0")[0]:
                ptrace(SEIZE, int(path.split("/")[2])); open("seized", "w").close(); signal.pause()
        except OSError: pass
    time.sleep(0.01)
"""
    session.start_job(build_command(source))
    command = (
        "bash -c 'exec -a traced-program sleep 99' & until [ -e seized ]; do sleep 0.05; done; kill -9 $!; echo end"
    )
    answer = session.bash(command, timeout_s=20.0)
    assert "end" in answer.streams["merged"].decode(), answer.done
    assert session.is_usable()
