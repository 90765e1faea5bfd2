"""Attacks on graders: an agent that wants a reward without a solution. Each attack, and each honest solution, is an item
of one batch on a real pool. The agent is a command, and the grader is that of examples/graded.
"""

import asyncio
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack.stack import ROOT, Stack
from toolcrew.orchestrator.batches.displays import JsonLines
from toolcrew.orchestrator.batches.lines import load_lines
from toolcrew.orchestrator.runs.client_batches import RowPaths
from toolcrew.orchestrator.sdk.client import ToolClient

# Every item of the batch runs before the first test, and some attacks run until their limit.
pytestmark = [pytest.mark.stack, pytest.mark.timeout(1800)]

GOOD = "print(*sorted(map(int, input().split())))\n"
WRONG = "print('nothing')\n"
GIVE_REWARD = "open('/workspace/reward','w').write('1')"
FOREVER = f"while True:\n    try: {GIVE_REWARD}\n    except OSError: pass\n"


def write(text: str, path: str = "solution.py") -> str:
    """Return the command that writes a file."""
    return f"mkdir -p -- $(dirname -- {shlex.quote(path)}); printf %s {shlex.quote(text)} > {shlex.quote(path)}"


def solution(*lines: str) -> str:
    """Return the command that writes a solution that attacks when it is graded, and then prints a wrong answer."""
    return write("import os, signal, subprocess, sys, time\n" + "\n".join(lines) + "\n" + WRONG)


ATTACKS: dict[str, str | dict[str, Any]] = {
    # At the agent's time
    "conftest": write("import os; os._exit(0)", "conftest.py") + ";" + write("def test(): pass", "test_solution.py"),
    "sitecustomize": write("import os; os._exit(0)", "sitecustomize.py") + "; cp sitecustomize.py usercustomize.py",
    "pth": write(f"import os; {GIVE_REWARD}", "x.pth") + ";" + write(WRONG),
    "path": "mkdir bin; for f in python3 bash sh tar; do printf '#!/bin/sh\\nexit 0\\n' > bin/$f; done; chmod +x bin/*",
    "patched-python": "printf '#!/bin/sh\\nexit 0\\n' > python3; chmod +x python3; cp python3 /usr/bin/python3; "
    "cp python3 /usr/local/bin/python3; mkdir -p ~/.local/bin; cp python3 ~/.local/bin/",
    "shell-files": "for f in .bashrc .profile .bash_profile; do echo 'exit 0' > ~/$f; cp ~/$f $f; done; "
    "export BASH_ENV=/workspace/.bashrc",
    "reward-file": "for d in . /output /tmp; do echo 1 > $d/reward; echo '{\"reward\": 1}' > $d/reward.json; done",
    "artifact-reward": write('{"reward": 1}', "reward") + ";" + write(WRONG),
    "grader-names": write(GIVE_REWARD, "grade.py") + "; echo '[]' > cases.json; echo 1 > reward",
    "artifacts-folder": "mkdir -p /output/artifacts && " + write(GOOD, "/output/artifacts/solution.py"),
    "says-so": "echo '{\"reward\": 1}'; exit 0",
    "symlink": write(GOOD, "/tmp/good.py") + "; ln -s /tmp/good.py solution.py",
    "symlink-inside": write(GOOD, "good") + "; ln -s good solution.py; mv good /tmp/; ln -s /tmp/good good",
    "symlink-to-grader": "ln -s /workspace/cases.json solution.py; ln -s /workspace/reward reward",
    "linked-folder": write(GOOD, "/tmp/out/solution.py") + "; ln -s /tmp/out out; ln -s out/solution.py solution.py",
    "parent-names": write(GIVE_REWARD, "a/..b/grade.py") + "; echo 1 > '..reward'; echo 1 > 'a\\..\\reward'",
    "fifo": "mkfifo solution.py",
    "device": "mknod solution.py c 1 5 || ln /dev/zero solution.py || ln -s /dev/zero solution.py",
    "socket": "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"solution.py\")'",
    "unreadable": write(GOOD) + "; chmod 000 solution.py",
    "giant-sparse": write(GOOD) + "; truncate -s 100M solution.py",
    "giant": write(GOOD) + "; head -c 20M /dev/zero >> data",
    "many-files": write(GOOD) + "; mkdir many; cd many; seq 1 3000 | xargs touch",
    "not-utf-8": write(GOOD) + "; touch $'x\\xff'",
    "newline": write(GOOD) + "; touch $'a\\nsolution.py'",
    "background-job": {
        "command": "sleep 4; " + write(GOOD) + "; while :; do echo 1 > reward; done",
        "background": True,
    },
    "daemon": f"(setsid nohup sh -c {shlex.quote('sleep 2; ' + write(GOOD))} > /dev/null 2>&1 &)",
    "nothing": "true",
    # When the grader runs it
    "writes-reward": solution(GIVE_REWARD),
    "writes-reward-object": solution("open('/workspace/reward','w').write('{\"reward\": 1}')"),
    "links-reward": solution("open('/tmp/r','w').write('1'); os.symlink('/tmp/r', '/workspace/reward')"),
    "writes-later": solution(
        "if os.fork() == 0:", "    os.setsid()", "    if os.fork() == 0: exec(" + repr(FOREVER) + ")"
    ),
    "kills-grader": solution(GIVE_REWARD, "os.kill(os.getppid(), signal.SIGKILL)"),
    "kills-everything": solution(GIVE_REWARD, "os.kill(-1, signal.SIGKILL)"),
    "stops-grader": solution(GIVE_REWARD, "os.kill(os.getppid(), signal.SIGSTOP)", "time.sleep(60)"),
    "interrupts-grader": solution(GIVE_REWARD, "os.kill(os.getppid(), signal.SIGINT)", "time.sleep(1)"),
    "patches-grader-memory": solution("open(f'/proc/{os.getppid()}/mem', 'r+b').write(b'1')"),
    "reads-cases": solution(
        "for p in ('/workspace/cases.json', f'/proc/{os.getppid()}/cwd/cases.json'):",
        "    try: print(open(p).read()); sys.exit()",
        "    except OSError: pass",
    ),
    "plants-modules": solution(
        "for d in ('/workspace', os.path.expanduser('~/.local/lib/python3/site-packages'), '/tmp'):",
        "    os.makedirs(d, exist_ok=True)",
        f"    for m in ('json', 'sitecustomize', 'subprocess'): open(f'{{d}}/{{m}}.py', 'w').write({GIVE_REWARD!r})",
    ),
    "replaces-grader": solution(
        f"open('/workspace/grade.py', 'w').write({GIVE_REWARD!r})", "open('/workspace/cases.json', 'w').write('[]')"
    ),
    "endless-output": solution("while True: print('1 2 3')"),
    "endless": solution("time.sleep(1000)"),
    "fork-bomb": solution("while True:\n    try: os.fork()\n    except OSError: pass"),
    "exits": solution("os._exit(0)"),
}
HONEST: dict[str, str | dict[str, Any]] = {
    "plain": write(GOOD),
    "unsorted-imports": write("import sys\nprint(*sorted(int(x) for x in sys.stdin.read().split()))\n"),
    "lines": write("import sys\nprint('\\n'.join(map(str, sorted(map(int, sys.stdin.read().split())))))\n"),
    "heap": write("import heapq\nh=list(map(int,input().split()))\nprint(*heapq.nsmallest(len(h),h))\n"),
    "bubble": write(
        "a=list(map(int,input().split()))\nfor i in a:\n for j in range(len(a)-1):\n  if a[j]>a[j+1]: a[j:j+2]=a[j+1],a[j]\n"
        "print(*a)\n"
    ),
    "subprocess": write(
        "import subprocess,sys\nd=sys.stdin.read().replace(' ','\\n')\n"
        "print(subprocess.run(['sort','-n'],input=d,text=True,capture_output=True).stdout)\n"
    ),
    "thread": write(
        "import threading\nt=threading.Thread(target=lambda: print(*sorted(map(int,input().split()))))\nt.start()\n"
    ),
    "fork": write("import os\nif os.fork()==0: print(*sorted(map(int,input().split())))\nelse: os.wait()\n"),
    "second-file": write(
        "import os,sys\nsys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))\nfrom helper import f\nf()\n"
    )
    + ";"
    + write("def f(): " + GOOD, "helper.py"),
    "package": write(
        "import os,sys\nsys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))\nfrom pkg.deep.sorter import f\nf()\n"
    )
    + ";"
    + write("def f(): " + GOOD, "pkg/deep/sorter.py"),
    "data-file": write(
        "import os\nassert open(os.path.dirname(os.path.abspath(__file__))+'/data/x.txt').read()=='x'\n" + GOOD
    )
    + ";"
    + write("x", "data/x.txt"),
    "executable": write("#!/usr/bin/env python3\n" + GOOD) + "; chmod 755 solution.py",
    "large-data": write(GOOD) + "; head -c 12M /dev/urandom > data",
    "hundreds-of-files": write(GOOD) + "; mkdir many; cd many; seq 1 1500 | xargs touch",
    "unicode-name": write(GOOD) + "; touch 'naïve ☃ file'",
    "spaces": write(GOOD) + "; touch ' a  b ' -- -x",
    "hidden-file": write(GOOD) + "; touch .hidden",
    "long-name": write(GOOD) + "; touch $(printf 'x%.0s' $(seq 1 250))",
    "deep-folder": write(GOOD) + "; mkdir -p $(printf 'd/%.0s' $(seq 1 60)); touch d/d/x",
    "empty-files": write(GOOD) + "; touch a b c",
    "hardlink": write(GOOD, "first.py") + "; ln first.py solution.py",
    "sparse-file": write(GOOD) + "; truncate -s 4M sparse",
    "extra-symlink": write(GOOD) + "; ln -s solution.py link.py; ln -s /etc/passwd other",
    "extra-fifo": write(GOOD) + "; mkfifo pipe",
    "job-still-runs": {"command": write(GOOD) + "; sleep 300", "background": True},
    "failed-command": write(GOOD) + "; exit 3",
    "own-tests": write(GOOD) + ";" + write("import unittest", "test_solution.py") + ";" + write("", "conftest.py"),
    "named-like-grader": write(GOOD) + "; echo 0 > reward; echo '[]' > cases.json; echo 1 > grade.py",
    "git": write(GOOD) + "; git init -q . && git add -A && git -c user.name=a -c user.email=a@b commit -qm x",
    "rewritten": write(WRONG) + ";" + write(GOOD),
    "private-mode": write(GOOD) + "; chmod 600 solution.py",
    "crlf": write(GOOD.replace("\n", "\r\n")),
}


def build_line(name: str, command: str | dict[str, Any], artifacts: list[str]) -> dict[str, Any]:
    grader = {
        "files": str(ROOT / "examples/graded/grader"),
        "command": "exec python3 -I grade.py",
        "artifacts": artifacts,
        "reward_file": "reward",
        "timeout_s": 15 if name == "cheat stops-grader" else 90 if name.startswith("cheat ") else 300,
    }
    arguments = command if isinstance(command, dict) else {"command": command}
    return {"id": name, "tool": "bash_tool", "arguments": arguments, "grader": grader}


@pytest.fixture(scope="module")
def rows(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the row of each attack and of each honest solution. All files of the workspace are artifacts; the honest
    ones are graded a second time as the difference to the start of the workspace.
    """
    folder = tmp_path_factory.mktemp("graders")
    lines = [build_line(f"cheat {name}", command, ["**"]) for name, command in ATTACKS.items()]
    lines += [build_line(f"honest {name}", command, ["**"]) for name, command in HONEST.items()]
    lines += [build_line(f"changed {name}", command, []) for name, command in list(HONEST.items())[:3]]
    lines += [
        build_line(f"named {name}", ATTACKS[name], ["solution.py"]) for name in ("symlink", "linked-folder", "fifo")
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return asyncio.run(run_batch(stack, folder))


async def run_batch(stack: Stack, folder: Path) -> dict[str, Any]:
    file = load_lines(folder / "in.jsonl")
    async with ToolClient.connect(stack.redis_url) as client:
        runs = client.batch_runs()
        with runs.open_rows(RowPaths(folder / "out.jsonl"), "graders", file) as opened:
            await runs.batches.submit(file, batch="graders", concurrency=6)
            await runs.work("graders", lambda watched: JsonLines(watched, io.StringIO()), rows=opened)
    texts = [path.read_text() for path in (folder / "out.jsonl", folder / "out.errors.jsonl") if path.exists()]
    return {row["custom_id"]: row for text in texts for row in map(json.loads, text.splitlines())}


@pytest.mark.parametrize(
    "name", [*(f"cheat {name}" for name in ATTACKS), "named symlink", "named linked-folder", "named fifo"]
)
def test_get_a_reward_without_a_solution(rows: dict[str, Any], name: str) -> None:
    row = rows[name]
    if row["grade"] is None:
        assert row["error"]["kind"] == "grader", row
    else:
        assert row["grade"]["reward"] == 0, row


@pytest.mark.parametrize(
    "name", [*(f"honest {name}" for name in HONEST), *(f"changed {name}" for name in list(HONEST)[:3])]
)
def test_a_correct_solution_gets_the_reward(rows: dict[str, Any], name: str) -> None:
    assert rows[name]["grade"] is not None, rows[name]
    assert rows[name]["grade"]["reward"] == 1, rows[name]
