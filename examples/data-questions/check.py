"""Check the rows of the data questions: `python examples/data-questions/check.py OUT.jsonl`."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from batch_checking import judge_answer, run_check  # noqa: E402

if __name__ == "__main__":
    sys.exit(run_check(HERE, "Compare the answers of a batch with the expected answers.", lambda _: judge_answer))
