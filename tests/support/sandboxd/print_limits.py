"""A program that `run_child` starts in a test: it writes its limits of memory to a descriptor."""

import os
import resource
import sys
from pathlib import Path

from toolcrew.workers.sandboxd.disks.children import limit_child

if __name__ == "__main__":
    limit_child()
    score = Path("/proc/self/oom_score_adj").read_text().strip()
    os.write(int(sys.argv[1]), f"{resource.getrlimit(resource.RLIMIT_AS)[0]} {score}".encode())
