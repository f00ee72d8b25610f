"""Jobs and the write lock: one at a time, in threads and across processes, and what a killed process leaves behind."""
import itertools
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import conftest
import pytest
from conftest import ROOT, add, cli, environment, new_kb, place, run, write

import gno

os.environ.pop("PYTHONUNBUFFERED", None)                             # commands buffer their output, as they do for everybody


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "400 notes of about 600 characters: a keyword index takes a moment, vectors take seconds."
    return write(tmp_path_factory.mktemp("folder"), {
        f"{n % 5}/n{n}.md": f"# Note {n}\n\n" + f"The word{n} stands here among many other words that tell nothing.\n" * 8
            for n in range(400)})


def whole(base) -> list[str]:
    "What SQLite and FTS5 say about an index file, [] when both are content."
    db = gno.connect(str(base / "data" / "index-default.sqlite"), write=True)
    try:
        wrong = [row[0] for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
        db.execute("INSERT INTO docs_fts(docs_fts, rank) VALUES ('integrity-check', 1)")
        return wrong
    except sqlite3.DatabaseError as e:
        return [str(e)]
    finally:
        db.close()


def spawn(base, *words, **options):
    "A gno command as a process that runs beside the test."
    base.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen([sys.executable, str(ROOT / "gno.py"), *words], cwd=base, env=environment(base), stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def holder(base):
    "Another process that holds the write lock until it is killed."
    code = f"import gno, sys; lock = gno.write_lock({place(base)['data']!r}, 0); print('held', flush=True); sys.stdin.read()"
    proc = subprocess.Popen([sys.executable, "-c", code], env=environment(base), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert proc.stdout.readline() == b"held\n"
    return proc


def start(kb, work, kind="sync") -> str:
    "Start a job that runs `work(kb, progress)`, as call() does."
    kb.jobs.refuse_second()
    return kb.jobs.start(kb, kind, work, kb.lock())


def ended(kb, job_id, seconds=10) -> dict:
    "The record of a job once it has ended."
    until = time.monotonic() + seconds
    while (state := run(kb, "job_status", jobId=job_id))["status"] == "running":
        assert time.monotonic() < until
        time.sleep(0.002)
    return state


def code_of(function, *arguments, **options) -> str:
    "The code of the error that a call raises."
    with pytest.raises(gno.GnoError) as e:
        function(*arguments, **options)
    return e.value.code


# ---- one job at a time ----

def test_one_job_at_a_time_and_reads_go_on(tmp_path, kb):
    add(kb, write(tmp_path / "notes", {"a.md": "# A\n\nzebra\n"}))
    go, entered = threading.Event(), threading.Event()

    def work(kb, progress):
        progress.update("sync", 3, 7, "a.md")
        entered.set()
        assert go.wait(10)
        return {"done": 1}
    job = start(kb, work)
    assert entered.wait(5)
    begun = time.monotonic()
    for name, arguments in [("sync", {}), ("index", {}), ("embed", {}), ("add_collection", {"path": str(tmp_path)}),
        ("remove_collection", {"collection": "notes"}), ("clear_collection_embeddings", {"collection": "notes"})]:
        with pytest.raises(gno.GnoError) as e:
            gno.call(kb, name, arguments)
        assert e.value.code == "JOB_CONFLICT" and job in e.value.message, name
    assert code_of(gno.call, kb, "sync", {"collection": 5}) == "INVALID_INPUT"       # what is wrong with the call comes first
    assert run(kb, "search", query="zebra")["results"] and run(kb, "get", ref="notes/a.md")["content"] and run(kb, "status")["healthy"]
    state = run(kb, "job_status", jobId=job)
    assert state["status"] == "running" and state["progress"] == {"phase": "sync", "current": 3, "total": 7, "currentFile": "a.md"}
    assert "completedAt" not in state and state["type"] == "sync"
    listed = run(kb, "list_jobs")
    assert [j["jobId"] for j in listed["active"]] == [job] and listed["recent"] == []
    assert time.monotonic() - begun < 4                               # nothing waited for the lock
    go.set()
    assert ended(kb, job)["status"] == "completed"
    assert run(kb, "list_jobs")["active"] == [] and [j["jobId"] for j in run(kb, "list_jobs")["recent"]] == [job]
    assert run(kb, "sync")["collections"][0]["filesUnchanged"] == 1


@pytest.mark.parametrize("raised, said", [
    (gno.GnoError("MODEL_NOT_FOUND", "no embed model found"), "MODEL_NOT_FOUND: no embed model found"),
    (ValueError("oddity"), "RUNTIME: "), (sqlite3.OperationalError("disk full"), "RUNTIME: "), (MemoryError(), "RUNTIME: MemoryError"),
])
def test_a_failing_job_keeps_its_error_and_frees_the_lock(kb, raised, said, capfd):
    def work(kb, progress):
        kb.wdb.execute("BEGIN IMMEDIATE")
        kb.wdb.execute("INSERT INTO meta VALUES ('half', 'done')")
        raise raised
    state = ended(kb, start(kb, work))
    assert kb.get_meta("half") == ""                                  # what it had begun is rolled back
    assert ("Traceback" in capfd.readouterr().err) is not isinstance(raised, (gno.GnoError, sqlite3.Error))
    assert state["status"] == "failed" and state["error"].startswith(said) and str(raised) in state["error"]
    assert state["completedAt"] >= state["startedAt"]
    assert run(kb, "list_jobs")["recent"][0]["status"] == "failed"
    assert ended(kb, start(kb, lambda kb, progress: {}))["status"] == "completed"


def test_files_that_fail_do_not_fail_the_job(tmp_path, kb):
    root = write(tmp_path / "notes", {"a.md": "fine\n", "b.txt": b"\0\1\2\3" * 500})
    add(kb, root, pattern="**/*")
    shutil.rmtree(root)
    with kb.lock():
        pass
    job = gno.call(kb, "sync", {})["jobId"]
    state = ended(kb, job)
    assert state["status"] == "completed" and state["result"]["collections"][0]["errors"], state
    assert run(kb, "get", ref="notes/a.md")["content"] == "fine\n"           # a vanished folder wipes nothing


def test_without_a_model_the_index_job_fails_but_keeps_the_sync(tmp_path, monkeypatch, client):
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(ROOT / "gno.py", alone)
    write(alone, {"gno_models/__init__.py": ""})                     # hides the model of an installed gno
    monkeypatch.setattr(conftest, "ROOT", alone)                     # a copy without models/ beside it
    root = write(tmp_path / "notes", {"a.md": "zebra\n"})
    c = client("--enable-write", env={"PYTHONPATH": str(alone)})
    assert c.job("gno_add_collection", path=str(root))["status"] == "completed"
    write(root, {"b.md": "giraffe\n"})
    refused = c.call("gno_embed")
    assert refused["isError"] and refused["structuredContent"]["error"] == "MODEL_NOT_FOUND"
    result = c.call("gno_index")                                      # says at once what is missing, and keeps the sync
    assert "no embed model found" in result["structuredContent"]["hint"] and "no embed model found" in result["content"][0]["text"]
    job = result["structuredContent"]["jobId"]
    while (state := c.call("gno_job_status", jobId=job)["structuredContent"])["status"] == "running":
        time.sleep(0.01)
    assert state["status"] == "failed" and state["error"].startswith("MODEL_NOT_FOUND")
    assert state["typedResult"]["kind"] == "index" and state["typedResult"]["value"]["sync"]["totalFilesAdded"] == 1
    assert c.call("gno_search", query="giraffe")["structuredContent"]["results"]
    assert c.call("gno_query", query="zebra")["structuredContent"]["meta"]["mode"] == "bm25_only"


def test_ended_jobs_are_kept_for_an_hour_and_at_most_a_hundred(kb):
    ids = []
    for _ in range(105):
        ids.append(start(kb, lambda kb, progress: {}))
        ended(kb, ids[-1])
    recent = run(kb, "list_jobs", limit=100)["recent"]
    assert [j["jobId"] for j in recent] == ids[:4:-1] and gno.JOBS_KEPT == 100 and gno.JOB_KEPT_S == 3600
    assert [j["jobId"] for j in run(kb, "list_jobs")["recent"]] == ids[:-11:-1]
    assert code_of(run, kb, "job_status", jobId=ids[0]) == "NOT_FOUND"
    for job in kb.jobs.finished[:50]:
        job.completed -= 3601
    kb.jobs.finished[50].completed -= 3590
    assert len(run(kb, "list_jobs", limit=100)["recent"]) == 50
    assert code_of(run, kb, "job_status", jobId=ids[5]) == "NOT_FOUND" and run(kb, "job_status", jobId=ids[55])["status"] == "completed"


def test_who_sees_a_job_ended_can_start_the_next_at_once(tmp_path, kb):
    add(kb, write(tmp_path / "notes", {"a.md": "a\n"}))
    for _ in range(40):
        job = gno.call(kb, "sync", {})["jobId"]
        while run(kb, "job_status", jobId=job)["status"] == "running":
            pass
    assert len(run(kb, "list_jobs", limit=100)["recent"]) == 40
    while run(kb, "list_jobs")["active"]:
        pass
    assert gno.call(kb, "sync", {})["status"] == "started"


def test_a_job_can_be_stopped_and_many_can_ask_at_once(kb):
    entered = threading.Event()

    def work(kb, progress):
        for n in range(10_000):
            progress.update("embed", n, 10_000)
            entered.set()
            time.sleep(0.001)
    job = start(kb, work, "embed")
    assert entered.wait(5)
    codes = []
    threads = [threading.Thread(target=lambda: codes.append(code_of(start, kb, work))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert codes == ["JOB_CONFLICT"] * 8
    kb.jobs.stop(5)
    state = ended(kb, job)
    assert state["status"] == "failed" and state["error"].startswith("CANCELLED")


# ---- other processes ----

def test_locked_while_another_process_writes_and_free_when_it_is_killed(tmp_path, client):
    base, root = tmp_path / "gno", write(tmp_path / "notes", {"a.md": "zebra\n"})
    kb = new_kb(base)
    add(kb, root)
    kb.close()
    c, other = client("--enable-write", base=base), holder(base)
    c.send({"jsonrpc": "2.0", "id": "w", "method": "tools/call", "params": {"name": "gno_sync", "arguments": {}}})
    c.send({"jsonrpc": "2.0", "id": "p", "method": "ping"})
    command = spawn(base, "sync")
    assert c.receive()["id"] == "p"                                   # waiting for the lock holds up nobody's ping
    refused = c.receive()["result"]
    assert refused["isError"] and refused["structuredContent"]["error"] == "LOCKED" and refused["content"][0]["text"].startswith("Error: ")
    _, said = command.communicate(timeout=10)
    assert command.returncode == 2 and b"LOCKED" in said and b"Traceback" not in said
    assert c.call("gno_search", query="zebra")["structuredContent"]["results"]       # reading takes no lock
    assert c.call("gno_list_jobs")["structuredContent"] == {"active": [], "recent": []}
    assert c.call("gno_job_status", jobId="f" * 8)["structuredContent"]["error"] == "NOT_FOUND"
    os.kill(other.pid, signal.SIGKILL)
    begun = time.monotonic()
    assert c.job("gno_sync")["status"] == "completed" and time.monotonic() - begun < 4
    other.wait()
    assert c.close() == 0


def test_progress_phases_conflict_restart_and_end_of_input_during_a_job(tmp_path, client, folder):
    base = tmp_path / "gno"
    c = client("--enable-write", base=base)
    added = c.request("tools/call", {"name": "gno_add_collection", "arguments": {"path": str(folder),
        "name": "notes"}})["result"]["structuredContent"]
    assert added["collection"] == "notes"
    while c.call("gno_list_jobs")["structuredContent"]["active"]:
        time.sleep(0.005)
    state = c.call("gno_job_status", jobId=added["jobId"])["structuredContent"]
    assert state["status"] == "completed" and state["type"] == "add" and state["result"]["totalFilesAdded"] == 400
    job = c.call("gno_index")["structuredContent"]["jobId"]
    seen, begun = [], time.monotonic()
    while time.monotonic() - begun < 10 and not (seen and seen[-1]["phase"] == "embed" and seen[-1]["current"] > 0):
        state = c.call("gno_job_status", jobId=job)["structuredContent"]
        assert state["status"] == "running", state
        seen.append(state["progress"])
    assert {p["phase"] for p in seen} <= {"", "sync", "embed"} and seen[-1]["phase"] == "embed"
    embed = [p for p in seen if p["phase"] == "embed"]
    assert all(a["current"] <= b["current"] <= b["total"] for a, b in itertools.pairwise(embed)) and embed[-1]["total"] >= 400
    begun = time.monotonic()
    refused = c.call("gno_sync")["structuredContent"]
    assert refused["error"] == "JOB_CONFLICT" and job in refused["message"] and time.monotonic() - begun < 3
    assert c.call("gno_search", query="word77")["structuredContent"]["results"][0]["uri"] == "gno://notes/2/n77.md"
    assert time.monotonic() - begun < 4
    assert c.close() == 0 and time.monotonic() - begun < 12           # end of input stops the job and ends the process
    assert b"".join(c.errors) == b"" and whole(base) == []
    c = client("--enable-write", base=base)
    gone = c.call("gno_job_status", jobId=job)
    assert gone["isError"] and gone["structuredContent"]["error"] == "NOT_FOUND"
    status = c.call("gno_status")["structuredContent"]
    assert 0 < status["embeddingBacklog"] < status["totalChunks"] and status["totalDocuments"] == 400     # what was embedded is kept
    assert c.close() == 0


def test_a_process_killed_at_any_moment_leaves_a_good_index(tmp_path, folder):
    chance = random.Random(20)
    for n in range(15):
        base = tmp_path / str(n)
        write(base, {"config/index.yml": f'version: "1.0"\ncollections:\n- name: notes\n  path: {folder}\n'})
        proc = spawn(base, "index", *(["--no-embed"] if n % 3 == 0 else []))
        time.sleep(chance.uniform(0.05, 0.35 if n % 3 == 0 else 0.9))
        proc.kill()
        proc.communicate()
        kb = new_kb(base)
        if os.path.exists(kb.db_path):
            assert whole(base) == [], n
        report = run(kb, "sync")["collections"][0]
        assert report["filesErrored"] == 0 and report["filesProcessed"] == 400, (n, report)
        assert run(kb, "status")["totalDocuments"] == 400
        assert run(kb, "search", query="word399")["results"][0]["uri"] == "gno://notes/4/n399.md"
        assert run(kb, "sync")["collections"][0]["filesUnchanged"] == 400
        kb.close()
        assert whole(base) == [], n
        shutil.rmtree(base)


def test_two_processes_index_at_once(tmp_path, folder):
    base = tmp_path / "gno"
    write(base, {"config/index.yml": f'version: "1.0"\ncollections:\n- name: notes\n  path: {folder}\n'})
    both = [spawn(base, "index", "--no-embed", "--json") for _ in range(2)]
    for proc in both:
        out, err = proc.communicate(timeout=30)
        assert proc.returncode == 0 or proc.returncode == 2 and b"LOCKED" in out + err, err
        assert b"Traceback" not in err
    kb = new_kb(base)
    assert run(kb, "status")["totalDocuments"] == 400 and run(kb, "sync")["collections"][0]["filesUnchanged"] == 400
    kb.close()
    assert whole(base) == []


def test_many_processes_open_a_new_index_at_once(tmp_path):
    base = tmp_path / "gno"
    code = (f"import gno; kb = gno.KB(dirs={place(base)!r}, writable=True); kb.wdb.execute('SELECT count(*) FROM documents').fetchone(); "
            "print(gno.call(kb, 'status', dict())['totalDocuments'])")
    procs = [subprocess.Popen([sys.executable, "-c", code], env=environment(base), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(8)]
    for proc in procs:
        out, err = proc.communicate(timeout=30)
        assert proc.returncode == 0 and out == b"0\n", err
    assert whole(base) == []


def test_commands_that_waited_for_the_lock_see_the_configuration_of_that_moment(tmp_path):
    base, root = tmp_path / "gno", write(tmp_path / "notes", {"a.md": "zebra\n"})
    base.mkdir()
    other = holder(base)
    waiting = [spawn(base, "collection", "add", str(root), "--name", name) for name in ("notes", "notes", "again")]
    time.sleep(0.6)                                                   # all three have read the configuration and wait
    other.kill()
    other.wait()
    codes = []
    for proc in waiting:
        _, err = proc.communicate(timeout=30)
        codes.append(proc.returncode)
        assert proc.returncode == 0 or b"DUPLICATE" in err and b"Traceback" not in err, err
    assert codes.count(0) == 1
    listed = cli(base, "collection", "list", "--json")
    assert listed.returncode == 0 and listed.stdout.count(b'"name": ') == 1, listed
