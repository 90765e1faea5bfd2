"""An environment of verifiers: the lines of a batch file, which agents solve in sessions of the pool that
TOOLCREW_REDIS_URL names.

Run it in this folder: PYTHONPATH=. vf-eval verifiers_tasks --env.taskset.file graded/batch.jsonl -m MODEL
"""

from toolcrew import ToolcrewEnv, ToolcrewHarness, ToolcrewTaskset

__all__ = ["ToolcrewEnv", "ToolcrewHarness", "ToolcrewTaskset"]
