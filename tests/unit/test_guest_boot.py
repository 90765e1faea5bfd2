"""The entry point of the guest."""

import subprocess
import sys

from tests.guest_harness import GUEST_PARENT, needs_namespace, running_guest


def test_a_wrong_option_ends_the_guest_with_one_line() -> None:
    code = (
        f"import sys, runpy\nsys.path.insert(0, {str(GUEST_PARENT)!r})\n"
        f"runpy.run_path({str(GUEST_PARENT / 'guest/boot.py')!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, "--life", "nan"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n"), "--life nan" in done.stderr) == (1, 1, True)


@needs_namespace
def test_patterns_of_many_parts_match() -> None:
    with running_guest() as guest:
        guest.run("mkdir -p a/b/c d; touch a/b/c/one_two_three.py a/b/one_three_two.py d/one_two_three.py")
        limits = {"limit": 10, "max_bytes": 9999, "timeout_s": 9, "kind": "file"}
        assert guest.request("glob", pattern="*ne*two*th*.py", path=".", **limits)["total"] == 2
        done = guest.request("glob", pattern="**/b/**/{c,x}/**/*_*_*.py", path=".", **limits)
        assert done.bytes_of("lines") == b"a/b/c/one_two_three.py\n"
