"""The embedded model's server as a separate program.

Start: `python -m toolcrew.orchestrator.models.local_server --weights FILE`. The first line of stdin is
`{"api_key": ...}`. When the model is loaded, stdout gets one line `{"base_url": ..., "model": "local"}` and nothing
else. The server exits on SIGTERM and at the end of stdin, so it never outlives the process that started it.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

MODEL_NAME = "local"
CONTEXT_TOKENS = 4096


def load_template() -> str:
    """Return the chat template, byte for byte. The server derives its tool-call parser from it."""
    return (Path(__file__).parent / "local-model.jinja").read_bytes().decode()


def main() -> None:
    arguments = _parse_arguments()
    ready_descriptor = _redirect_stdout()
    key = json.loads(sys.stdin.readline())["api_key"]
    server = open_server(arguments.weights, arguments.port, arguments.threads, key)
    line = json.dumps({"base_url": f"{server.listening_address}/v1", "model": MODEL_NAME})
    os.write(ready_descriptor, line.encode() + b"\n")
    os.close(ready_descriptor)
    while sys.stdin.buffer.read(4096):
        pass
    # A normal exit would wait for the server's threads and their current reply, which has no client any more.
    os._exit(0)


def open_server(weights: Path, port: int, threads: int, api_key: str) -> Any:
    """Return a server that listens on 127.0.0.1 and has loaded the model. Port 0: the kernel selects one."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(weights)
    params.n_ctx = CONTEXT_TOKENS
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.api_keys = [api_key]
    params.model_alias = {MODEL_NAME}
    params.cache_ram_mib = 0
    params.ui = False
    params.use_jinja = True
    params.chat_template = load_template()
    return xllamacpp.Server(params)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m toolcrew.orchestrator.models.local_server", description="Serves the embedded model."
    )
    parser.add_argument("--weights", type=Path, required=True, help="the GGUF file")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    # llama.cpp's threads busy-wait. A second thread on a busy two-core machine makes a reply ten times slower.
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def _redirect_stdout() -> int:
    """Return a descriptor for the ready line, and redirect the output of libraries to stderr."""
    ready_descriptor = os.dup(1)
    os.dup2(2, 1)
    return ready_descriptor


if __name__ == "__main__":
    main()
