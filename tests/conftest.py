"""Shared parts of the tests: a knowledge base in a temporary place, each vector engine, an MCP client over real pipes."""
from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import gno

ROOT = Path(__file__).resolve().parent.parent
VAULT = ROOT / "tests" / "vault"


def place(base: Path) -> dict[str, str]:
    "Fresh config, data and cache folders below `base`, by the names KB takes."
    return {kind: str(base / kind) for kind in ("config", "data", "cache")}


def environment(base: Path, **more: str) -> dict[str, str]:
    "An environment for a child process whose gno knows nothing but `base`."
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GNO_", "XDG_", "PYTHON", "ORT_"))}
    for kind, folder in place(base).items():
        env[f"GNO_{kind.upper()}_DIR"] = folder
    (base / "home").mkdir(parents=True, exist_ok=True)
    return env | {"HOME": str(base / "home"), "PYTHONPATH": str(ROOT)} | more


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    "Write files (relative path -> text or bytes) below root."
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def new_kb(base: Path, **options) -> gno.KB:
    "A knowledge base whose folders are below base; closes nothing by itself."
    return gno.KB(dirs=place(base), writable=True, **options)


def run(kb: gno.KB, tool: str, /, **arguments):
    "Call a tool through the one door; a job's work runs at once and its result is returned."
    return gno.call(kb, tool, arguments, inline=gno.Progress())


def add(kb: gno.KB, root: Path, name="notes", **arguments):
    "Add a folder as a collection and index its words."
    return run(kb, "add_collection", path=str(root), name=name, **arguments)


@pytest.fixture
def kb(tmp_path):
    base = new_kb(tmp_path / "gno")
    yield base
    base.close()


@pytest.fixture(params=["sqlite_vec", "numpy", "matrix"])
def engine(request, monkeypatch):
    "Each vector engine in turn; sqlite-vec only where this Python's SQLite loads extensions."
    if request.param == "sqlite_vec" and not gno.vec_loaded(gno.memory_db()):
        pytest.skip("this Python's SQLite does not load extensions")
    monkeypatch.setattr(gno, "engine", lambda kb: (gno.vec_loaded(kb.db), getattr(gno, f"propose_{request.param}"))[1])
    return request.param


def cli(base: Path, *words: str, stdin: bytes = b"", cwd=None, env=None, python=sys.executable, timeout=60):
    "Run the command line in a process of its own -> CompletedProcess with bytes."
    return subprocess.run([python, str(ROOT / "gno.py"), *words], input=stdin, capture_output=True, timeout=timeout,
                          cwd=cwd or base, env=environment(base, **(env or {})))


class Client:
    "An MCP client over the pipes of a real `gno mcp` process. Every line of its stdout must be one JSON-RPC message."

    def __init__(self, base: Path, *arguments: str, env=None, initialize=True, python=sys.executable):
        base.mkdir(parents=True, exist_ok=True)
        self.proc = subprocess.Popen([python, str(ROOT / "gno.py"), "mcp", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                     stderr=subprocess.PIPE, cwd=base, env=environment(base, **(env or {})))
        self.inbox, self.notes, self.ids = queue.Queue(), [], 0
        threading.Thread(target=self._read, daemon=True).start()
        self.errors = []
        threading.Thread(target=lambda: self.errors.extend(self.proc.stderr), daemon=True).start()
        if initialize:
            self.hello = self.request("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}})
            self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def _read(self):
        for line in self.proc.stdout:
            self.inbox.put(json.loads(line))
        self.inbox.put(None)

    def send(self, message):
        self.raw(json.dumps(message).encode() + b"\n")

    def raw(self, data: bytes):
        self.proc.stdin.write(data)
        self.proc.stdin.flush()

    def receive(self, timeout=20):
        return self.inbox.get(timeout=timeout)

    def request(self, method, params=None, timeout=20):
        "The whole reply to one request; notifications on the way are kept in `notes`."
        self.ids += 1
        self.send({"jsonrpc": "2.0", "id": self.ids, "method": method} | ({} if params is None else {"params": params}))
        while True:
            message = self.receive(timeout)
            assert message is not None, f"server ended: {b''.join(self.errors)!r}"
            if message.get("id") == self.ids and "method" not in message:
                return message
            self.notes.append(message)

    def call(self, tool, /, **arguments):
        "The result of a tool call."
        return self.request("tools/call", {"name": tool, "arguments": arguments})["result"]

    def job(self, tool, /, timeout=60, **arguments):
        "Start a job tool and wait for its end -> its status record."
        import time
        started = self.call(tool, **arguments)
        assert not started.get("isError"), started
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            state = self.call("gno_job_status", jobId=started["structuredContent"]["jobId"])["structuredContent"]
            if state["status"] != "running":
                return state
            time.sleep(0.02)
        raise TimeoutError(f"{tool} still runs")

    def close(self, timeout=10) -> int:
        self.proc.stdin.close()
        try:
            return self.proc.wait(timeout)
        finally:
            self.proc.kill()


@pytest.fixture
def client(tmp_path):
    "A function that starts MCP clients; all are ended afterwards."
    started = []

    def start(*arguments, base=tmp_path / "gno", **options):
        started.append(Client(base, *arguments, **options))
        return started[-1]
    yield start
    for c in started:
        c.proc.kill()
        c.proc.wait()
