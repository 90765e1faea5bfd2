"""An MCP server over stdio for tests, with the standard library only. The first argument selects correct or faulty
behaviour.
"""

import json
import os
import subprocess
import sys
import threading
import time

MODE = sys.argv[1] if len(sys.argv) > 1 else "good"
TOOLS = [
    {
        "name": "echo",
        "description": "Says it again.",
        "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
    {"name": "where", "description": "Where it is.", "inputSchema": {"type": "object"}},
    {"name": "count", "description": "Which call of this process it is.", "inputSchema": {"type": "object"}},
]


lock = threading.RLock()
calls = 0


def send(message):
    with lock:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def answer(request, result):
    send({"jsonrpc": "2.0", "id": request["id"], "result": result})


def refuse(request, code, message):
    send({"jsonrpc": "2.0", "id": request["id"], "error": {"code": code, "message": message}})


def flood():
    while MODE == "floods":
        sys.stdout.write("x" * 65536)
    while MODE == "floods_lines":
        send({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x" * 1000}})
    if MODE == "shouts":
        sys.stderr.write("x" * 10_000_000)


def send_scripted(request):
    """Return the answers that the environment variable contains, unchanged except for the request's number."""
    output = (
        bytes.fromhex(os.environ["SAYS"])
        .replace(b"NEXT", b"%d" % (request["id"] + 1))
        .replace(b"ID", b"%d" % request["id"])
    )
    sys.stdout.buffer.write(output)
    sys.stdout.flush()
    if not output.endswith(b"\n"):
        os._exit(0)


def misbehave(request):
    """Misbehave instead of answering a call."""
    if MODE in ("hangs", "clings"):
        os.kill(os.getppid(), 9 if MODE == "clings" else 0)
        time.sleep(600)
    if MODE == "dies":
        sys.stderr.write("out of luck\x1b[2J\n")
        sys.stderr.flush()
        os._exit(7)
    if MODE == "lies":
        send({"jsonrpc": "2.0", "id": 99, "result": {}})
        send({"jsonrpc": "2.0", "id": True, "result": {}})
        sys.stdout.write("no json\n[[[\n\xff\n")
        send([1])
    if MODE == "asks":
        send({"jsonrpc": "2.0", "id": "s1", "method": "sampling/createMessage", "params": {}})
        if "error" not in json.loads(sys.stdin.readline()):
            os._exit(8)
    if MODE == "forges":
        # The driver's output is the sandbox's output, so any text may appear here.
        folder = f"/proc/{os.getppid()}/fd"
        for name in os.listdir(folder):
            try:
                with open(f"{folder}/{name}", "wb") as out:
                    out.write(b"\n" + b"0" * 32 + b' {"reply": {}}\n')
            except OSError:
                continue
        os.kill(os.getppid(), 9)
    if MODE == "leaves":
        subprocess.Popen(["sleep", "4321"], start_new_session=True)
    if MODE == "says":
        send_scripted(request)
    if MODE == "gone":
        refuse(request, -32602, "Unknown tool: echo")
    return MODE in ("says", "gone")


def call(request):
    """Answer a call; only `echo` can be faulty. With `fifo` the answer waits until another process writes to the
    named pipe.
    """
    global calls
    calls += 1
    arguments = request["params"]["arguments"]
    if request["params"]["name"] == "where":
        output = os.getcwd() + " " + os.environ.get("LEVEL", "")
    elif request["params"]["name"] == "count":
        output = f"{calls} {os.getpid()}"
    else:
        flood()
        if misbehave(request):
            return
        output = arguments.get("text", "")
    if "fifo" in arguments:
        with open(arguments["fifo"]) as fifo:
            fifo.read()
    answer(request, {"content": [{"type": "text", "text": output}]})


def serve(request):
    method = request["method"]
    if method == "server/discover" and MODE == "mute":
        return
    if method == "server/discover" and MODE != "old":
        answer(request, {"supportedVersions": ["2026-07-28"]})
    elif method == "initialize":
        answer(
            request, {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {"name": "p", "version": "1"}}
        )
    elif method == "tools/list":
        answer(request, {"tools": TOOLS})
    elif method == "tools/call":
        call(request)
    elif method == "notifications/cancelled" and MODE == "obeys":
        refuse({"id": request["params"]["requestId"]}, 0, "Request cancelled")
    elif "id" in request:
        refuse(request, -32601, "Method not found")


for line in sys.stdin:
    if MODE in ("threads", "obeys"):
        threading.Thread(target=serve, args=(json.loads(line),), daemon=True).start()
    else:
        serve(json.loads(line))
