"""Several processes on one index: reading never fails, no write is lost, whoever dies leaves a good index and a free lock."""
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import campaign
import pytest
from conftest import ROOT, Client, add, environment, new_kb, run, write
from test_jobs import holder, spawn, whole
from test_sync import sound

import gno


@pytest.fixture
def base(tmp_path):
    "A knowledge base of one embedded note and 300 more whose vectors take seconds; its notes lie beside it."
    base, root = tmp_path / "gno", write(tmp_path / "notes", {"a.md": "# A\n\nzebra\n"})
    kb = new_kb(base)
    add(kb, root)
    run(kb, "embed")
    write(root, {f"{n}.md": f"# Note {n}\n\n" + f"The word{n} stands here among many other words that tell nothing.\n" * 8
        for n in range(300)})
    kb.close()
    return base


def result(reply: dict) -> dict:
    assert not reply.get("isError"), reply
    return reply["structuredContent"]


def finished(c: Client, job: str) -> dict:
    "The record of a job of this server once it ended."
    until = time.monotonic() + 60
    while (state := result(c.call("gno_job_status", jobId=job)))["status"] == "running":
        assert time.monotonic() < until
        time.sleep(0.01)
    return state


def test_four_processes_on_one_index(tmp_path):
    counts = campaign.four_processes(tmp_path, seconds=8, notes=25)
    assert counts["reads"] > 50 and counts["jobs"] >= 2


def test_a_writer_killed_at_random_moments(tmp_path):
    assert campaign.kills(tmp_path, times=6, notes=40)["reads"] > 10


def test_reading_goes_on_while_another_process_is_in_a_transaction_and_the_writer_waits(base, client):
    writer, reader = client("--enable-write", base=base), client(base=base)
    db = sqlite3.connect(base / "data" / "index-default.sqlite", isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    job = result(writer.call("gno_sync"))["jobId"]
    for _ in range(20):
        assert result(reader.call("gno_search", query="zebra"))["results"] and result(writer.call("gno_search", query="zebra"))["results"]
        assert result(reader.call("gno_status"))["totalDocuments"] == 1
    assert result(writer.call("gno_job_status", jobId=job))["status"] == "running"
    db.execute("COMMIT")
    assert finished(writer, job)["result"]["totalFilesAdded"] == 300
    assert result(reader.call("gno_status"))["totalDocuments"] == 301


def test_a_transaction_that_outlasts_the_wait_fails_the_job_and_the_server_lives_on(base, client, monkeypatch):
    kb = new_kb(base)
    monkeypatch.setattr(gno, "BUSY_MS", 100)
    db = sqlite3.connect(base / "data" / "index-default.sqlite", isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    job = gno.call(kb, "sync", {})["jobId"]
    while (state := run(kb, "job_status", jobId=job))["status"] == "running":
        time.sleep(0.01)
    assert state["status"] == "failed" and state["error"].startswith("LOCKED")
    db.execute("ROLLBACK")
    assert run(kb, "sync")["totalFilesAdded"] == 300
    kb.close()


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_after_a_killed_server_two_more_start_one_writes_and_the_other_learns_that_it_is_locked(base, tmp_path, client):
    hold = write(tmp_path / "bin", {"git": f"#!/bin/sh\nwhile [ -e '{tmp_path}/bin/hold' ]; do sleep 0.05; done\n", "hold": ""}) / "hold"
    (tmp_path / "bin" / "git").chmod(0o755)                           # a pull that takes as long as we want
    a = client("--enable-write", base=base)
    job = result(a.call("gno_index"))["jobId"]
    while result(a.call("gno_job_status", jobId=job))["progress"]["phase"] != "embed":
        time.sleep(0.005)
    a.proc.kill()
    a.proc.wait()
    b = client("--enable-write", base=base, env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"})
    c = client("--enable-write", base=base)
    assert b.request("tools/list")["result"] == c.request("tools/list")["result"]
    job = result(b.call("gno_index", gitPull=True))["jobId"]
    begun = time.monotonic()
    for tool, arguments in [("gno_sync", {}), ("gno_clear_collection_embeddings", {"collection": "notes"}), ("gno_index", {})]:
        refused = b.call(tool, **arguments)["structuredContent"]
        assert refused["error"] == "JOB_CONFLICT" and job in refused["message"]
    assert time.monotonic() - begun < 3                               # at once, not after the wait for the lock
    assert c.call("gno_sync")["structuredContent"]["error"] == "LOCKED"
    assert result(b.call("gno_job_status", jobId=job))["progress"]["phase"] == "git pull"
    assert result(c.call("gno_search", query="word7"))["results"] and result(b.call("gno_search", query="word7"))["results"]
    hold.unlink()
    assert finished(b, job)["status"] == "completed"
    assert c.job("gno_sync")["status"] == "completed"
    assert (b.close(), c.close()) == (0, 0) and whole(base) == []


def test_who_waits_for_the_lock_learns_at_once_of_a_job_that_got_it(base):
    kb, outcomes = new_kb(base), []
    go, other = threading.Event(), holder(base)

    def work(kb, progress):
        assert go.wait(20)
        return {}

    def ask():
        try:
            gno.call(kb, "cleanup", {})
        except gno.GnoError as e:
            outcomes.append((e.code, time.monotonic()))
    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.2)                                                   # it waits for the other process
    job = kb.jobs.start(kb, "sync", work, open(os.devnull, "rb"))     # noqa: SIM115 (the job closes its lock)
    began = time.monotonic()
    thread.join(10)
    go.set()
    other.kill()
    other.wait()
    assert outcomes[0][0] == "JOB_CONFLICT" and outcomes[0][1] - began < 3
    assert run(kb, "job_status", jobId=job)
    kb.close()


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("how", ["end of input", signal.SIGTERM, signal.SIGINT, "the parent is killed"])
@pytest.mark.parametrize("tool", ["gno_sync", "gno_index"])
def test_a_server_that_ends_during_a_job_leaves_a_good_index_and_a_free_lock(base, how, tool):
    if how == "the parent is killed":
        code = (f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, {str(ROOT / 'gno.py')!r}, 'mcp', '--enable-write'], "
                "stdin=subprocess.PIPE, stdout=sys.stdout); print(p.pid, flush=True)\n"
                "for line in sys.stdin: p.stdin.write(line.encode()); p.stdin.flush()")
        proc = subprocess.Popen([sys.executable, "-c", code], env=environment(base), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                text=True)
        server = int(proc.stdout.readline())
    else:
        proc = subprocess.Popen([sys.executable, str(ROOT / "gno.py"), "mcp", "--enable-write"], env=environment(base),
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        server = proc.pid
    proc.stdin.write('{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}\n'
                     f'{{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{{"name":"{tool}","arguments":{{}}}}}}\n')
    proc.stdin.flush()
    assert '"id":1' in proc.stdout.readline() and '"jobId"' in proc.stdout.readline()
    if how == "end of input":
        proc.stdin.close()
        assert proc.wait(20) == 0
    elif how == "the parent is killed":
        proc.kill()
        proc.stdout.read()                                            # ends when the server, which holds it too, is gone
    else:
        os.kill(server, how)
        assert proc.wait(20) == 0
    proc.kill()
    proc.wait()
    kb = new_kb(base)
    with kb.lock(0):
        sound(kb)
    assert run(kb, "sync")["collections"][0]["filesErrored"] == 0 and run(kb, "status")["totalDocuments"] == 301
    kb.close()


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_a_signal_lets_the_running_tool_finish_and_its_reply_out(base, client):
    c, other = client("--enable-write", base=base), holder(base)
    remove = {"name": "gno_remove_collection", "arguments": {"collection": "notes"}}
    c.send({"jsonrpc": "2.0", "id": "w", "method": "tools/call", "params": remove})
    c.send({"jsonrpc": "2.0", "id": "p", "method": "ping"})
    assert c.receive()["id"] == "p"
    c.proc.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    other.kill()                                                      # the lock is free: the tool that waited for it runs
    other.wait()
    assert c.receive()["result"]["structuredContent"]["removed"] is True
    assert c.proc.wait(10) == 0 and "notes" not in (base / "config" / "index.yml").read_text()


def test_two_embeds_at_once(base):
    assert spawn(base, "sync").wait(30) == 0
    both = [spawn(base, "embed", "--json") for _ in range(2)]
    for proc in both:
        out, err = proc.communicate(timeout=60)
        assert proc.returncode == 0 or proc.returncode == 2 and b"LOCKED" in out + err, err
        assert b"Traceback" not in err
    kb = new_kb(base)
    assert run(kb, "status")["embeddingBacklog"] == 0 and run(kb, "embed")["embedded"] == 0
    sound(kb)
    kb.close()
