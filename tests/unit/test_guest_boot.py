"""The entry point of the guest."""

import subprocess
import sys

from tests.guest_harness import GUEST_PARENT


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
