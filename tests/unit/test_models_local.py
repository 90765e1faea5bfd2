"""The local server's process: failures at the start. tests/e2e/test_local_model_server.py covers successful starts."""

from pathlib import Path

import pytest

from contract.errors import ModelUnavailable
from orchestrator.models.local import LocalModelServer


@pytest.mark.parametrize(("start_timeout_s", "error"), [(60.0, "ended while loading"), (0.001, "did not load in")])
async def test_weights_that_do_not_load_leave_no_process(tmp_path: Path, start_timeout_s: float, error: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    server = LocalModelServer(tmp_path / "bad.gguf", start_timeout_s=start_timeout_s)
    with pytest.raises(ModelUnavailable, match=error):
        await server.__aenter__()
    assert server.pid is None
