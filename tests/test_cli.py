"""The command line: every command in a process of its own, its output read by the programs that will read it."""
import csv
import io
import json
import os
import pty
import re
import select
import signal
import sqlite3
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

import pytest
from conftest import ROOT, Client, add, cli, environment, new_kb, run, write

import gno

os.environ.pop("PYTHONUNBUFFERED", None)                             # commands buffer their output, as they do for everybody

NOTES = {
    "a.md": "# Alpha\n\none quorum\ntwo\nthree\n",
    "b.md": "---\ntags: [work, work/deep]\nauthor: Ada\n---\n# Beta & <Co>\n\nA \"quorum\", 'quoted'; yes.\n",
    "sub/größe 🦓.md": "# Größe 🦓\n\nZählt als quorum: 東京都 – “so”.\n", "c.md": "# Gamma\n\nalpha beta together\n",
}
WORK = {"d.md": "# Delta\n\nquorum of work\n", "e.md": "# Epsilon\n\nnothing\n"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    "Two embedded collections, for reading only."
    base = tmp_path_factory.mktemp("cli")
    kb = new_kb(base)
    add(kb, write(base / "files" / "notes", NOTES), "notes")
    add(kb, write(base / "files" / "work", WORK), "work")
    run(kb, "embed")
    kb.close()
    return base


@pytest.fixture
def fresh(tmp_path):
    "A place with one indexed collection, to be changed."
    base = tmp_path / "gno"
    kb = new_kb(base)
    add(kb, write(tmp_path / "notes", NOTES), "notes")
    kb.close()
    return base


def ok(base, *words, **options) -> str:
    "The output of a command that must succeed without a word on stderr."
    done = cli(base, *words, **options)
    assert (done.returncode, done.stderr) == (0, b""), done
    return done.stdout.decode("utf-8")


def fails(base, code, *words, **options) -> str:
    "What a command that must fail says on stderr; nothing on stdout."
    done = cli(base, *words, **options)
    said = done.stderr.decode("utf-8")
    assert done.returncode == code and done.stdout == b"" and "Traceback" not in said, done
    assert said.startswith("gno: ") and len(said) < 2000, said
    return said


@pytest.fixture
def shell(base, monkeypatch, capsys):
    "The command line in this process, for tables of arguments: words -> (exit code, stdout, stderr)."
    for name, value in environment(base).items():
        if name.startswith("GNO_") or name == "HOME":
            monkeypatch.setenv(name, value)
    monkeypatch.chdir(base)

    def run(*words):
        code = gno.main(list(words))
        shown = capsys.readouterr()
        return code, shown.out, shown.err
    return run


def terminal(base, *words, typed=b"", env=None, seconds=20) -> tuple[int, bytes]:
    "Run a command on a pseudo-terminal -> (exit code, everything it showed)."
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(base)
        os.execve(sys.executable, [sys.executable, str(ROOT / "gno.py"), *words], environment(base, TERM="xterm-256color", **(env or {})))
    shown, until = b"", time.monotonic() + seconds
    if typed:
        os.write(fd, typed)
    while time.monotonic() < until and select.select([fd], [], [], max(0, until - time.monotonic()))[0]:
        try:
            data = os.read(fd, 65536)
        except OSError:                                               # the other end is closed
            break
        if not data:
            break
        shown += data
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown


def files_below(folder) -> dict[str, bytes]:
    "Every file below a folder with its content, and every folder."
    out = {}
    for d, ds, fs in os.walk(folder):
        out |= dict.fromkeys((os.path.relpath(os.path.join(d, n), folder) + "/" for n in ds), b"")
        for n in fs:
            with open(os.path.join(d, n), "rb") as f:
                out[os.path.relpath(os.path.join(d, n), folder)] = f.read()
    return out


# ---- every command ----

COMMANDS = {                                                          # command -> words after it, something it must say
    "cleanup": ([], "documents"), "collection add": (["{more}", "--name", "More"], "more: 1 added"), "collection list": ([], "notes"),
    "collection remove": (["notes", "--yes"], "notes"), "collection rename": (["notes", "texts"], "texts"), "doctor": ([], "python"),
    "embed": ([], "embedded"), "get": (["notes/a.md"], "# Alpha"), "index": ([], "notes: 4 unchanged"), "init": ([], "index.yml"),
    "job-status": (["{uuid}"], None), "list-jobs": ([], "no jobs"), "ls": ([], "gno://notes/a.md"),
    "multi-get": (["notes/a.md"], "Retrieved 1 document"),
    "query": (["quorum"], "a.md"), "query diagnose": (["quorum", "of", "five", "--target", "notes/a.md"], "bm25    active   present"),
    "similar": (["notes/a.md"], "gno://notes/"), "search": (["quorum"], "a.md:3"), "setup": (["{more}"], "more: 1 added"),
    "status": ([], "Index: default"),
    "sync": ([], "notes: 4 unchanged"), "tags": ([], "work (1)"), "update": ([], "notes: 4 unchanged"),
    "vsearch": (["a count of people"], "notes/"),
    "mcp": ([], ""), "completion": (["bash"], "gno"), "models list": ([], ""),
    "context add": (["notes:", "about", "notes"], "about notes"), "context check": ([], "ok   notes:"), "context list": ([], "about notes"),
    "context rm": (["notes:"], "removed: 1"),
    "links": (["notes/a.md"], "gno://notes/a.md"), "backlinks": (["notes/a.md"], "gno://notes/a.md"), "graph": ([], "Knowledge Graph: "),
    "graph query": (["notes/a.md"], "Found 1 node"), "graph neighbors": (["a.md"], "neighbors of gno://notes/a.md"),
    "graph path": (["a.md", "a.md"], "0 hops"),
    "capture": (["-c", "notes", "--title", "Cap", "a", "thought"], "relPath: cap.md"), "create-folder": (["notes", "sub"], "folderPath: sub"),
    "duplicate-note": (["notes/cap.md"], "relPath: cap-2.md"), "move-note": (["notes/cap-2.md", "sub"], "relPath: sub/cap-2.md"),
    "rename-note": (["notes/cap.md", "Captured", "note"], "relPath: Captured note.md"),
}
WRITERS = ["capture", "create-folder", "duplicate-note", "move-note", "rename-note"]     # in the order in which they build on each other


def commands(base) -> list[str]:
    "The commands that `gno help` lists."
    return [m[1] for m in re.finditer(r"(?m)^  ([a-z][a-z-]*(?: [a-z-]+)?)(?: \[PATH\.\.\.\])?  +\S",
        ok(base, "help").partition("commands:")[2])]


def test_every_command_explains_itself(base, shell):
    for command in commands(base):
        code, shown, said = shell(*command.split(), "--help")
        assert code == 0 and said == "" and shown.lower().startswith("usage: gno " + command), command
        assert shell("help", *command.split())[0] == 0, command


def test_every_command_of_help_runs(fresh, tmp_path):
    more = write(tmp_path / "more", {"m.md": "more\n"})
    run_kb = new_kb(fresh)
    run(run_kb, "embed")
    run_kb.close()
    listed = commands(fresh)
    assert len(listed) >= 20 and set(listed) <= set(COMMANDS), sorted(set(listed) - set(COMMANDS))
    order = [c for c in listed if c not in ("collection rename", "collection remove", "collection add", "setup", *WRITERS)]
    for command in [*order, *WRITERS, "setup", "collection rename"]:
        words, said = COMMANDS[command]
        words = [*command.split(), *(w.format(more=more, uuid="0" * 8) for w in words)]
        done = cli(fresh, *words)
        if said is None:
            assert done.returncode == 2 and done.stderr.startswith(b"gno: NOT_FOUND: ") and b"\nhint: " in done.stderr, done
            continue
        assert done.returncode == 0 and said in done.stdout.decode() and b"Traceback" not in done.stderr, (command, done)
    assert "texts" in ok(fresh, "collection", "remove", "texts", "--yes")
    assert "again: 1 added" in ok(fresh, "collection", "add", str(write(tmp_path / "again", {"x.md": "x\n"})))


@pytest.mark.parametrize("words", [[], ["help"], ["--help"], ["-h"], ["help", "search"], ["search", "--help"], ["search", "x", "-h"],
    ["collection", "add", "--help"]])
def test_help(base, words):
    shown = ok(base, *words)
    assert "gno" in shown and len(shown.split("\n")) < 60 and all(len(line) <= 160 for line in shown.split("\n"))
    assert ("search" in shown) == (words[:1] != ["collection"])


def test_version(base):
    for words in (["--version"], ["search", "--version"]):
        assert ok(base, *words) == "gno 1.0.0\n"


@pytest.mark.parametrize("words, code, name, said", [
    (["serach", "x"], 1, "INVALID_INPUT", "gno search"), (["stauts"], 1, "INVALID_INPUT", "gno status"),
    (["collection"], 1, "INVALID_INPUT", "collection add"),
    (["colection", "list"], 1, "INVALID_INPUT", "gno collection list"), (["xyzzy"], 1, "INVALID_INPUT", "gno help"),
    (["help", "xyzzy"], 1, "INVALID_INPUT", "gno help"),
    (["collection", "destroy"], 1, "INVALID_INPUT", "collection"),
    (["search"], 1, "INVALID_INPUT", "query"), (["search", ""], 1, "INVALID_INPUT", "query"),
    (["search", "x", "--nope"], 1, "INVALID_INPUT", "--nope"),
    (["search", "x", "-n", "0"], 1, "INVALID_INPUT", "limit"), (["search", "x", "-n", "abc"], 1, "INVALID_INPUT", "limit"),
    (["search", "x", "-n"], 1, "INVALID_INPUT", "-n"),
    (["search", "x", "-n", "1" * 30], 1, "INVALID_INPUT", "limit"), (["search", "x", "--min-score", "2"], 1, "INVALID_INPUT", "minScore"),
    (["search", "-foo"], 1, "INVALID_INPUT", ""),
    (["search", "--", "-foo"], 1, "INVALID_INPUT", "exclud"), (["search", "x", "-c", "nope"], 2, "NOT_FOUND", "notes"),
    (["search", "x", "--since", "never"], 1, "INVALID_INPUT", "never"),
    (["get"], 1, "INVALID_INPUT", "ref"), (["get", "notes/none.md"], 2, "NOT_FOUND", "none.md"),
    (["get", "a.md"], 1, "INVALID_INPUT", "a.md"), (["get", "#123456"], 2, "NOT_FOUND", "#123456"),
    (["get", "notes/a.md", "--from", "0"], 1, "INVALID_INPUT", "fromLine"),
    (["get", "gno://notes/a.md?index=nope"], 2, "NOT_FOUND", "nope"), (["get", "notes/a.md", "--csv"], 1, "INVALID_INPUT", "--csv"),
    (["multi-get"], 1, "INVALID_INPUT", "refs"), (["multi-get", "notes/a.md", "--pattern", "*"], 1, "INVALID_INPUT", "refs"),
    (["multi-get", "--pattern", "x/["], 1, "INVALID_INPUT", "["),
    (["ls", "nope"], 2, "NOT_FOUND", "nope"), (["ls", "--offset", "9" * 25], 1, "INVALID_INPUT", "offset"),
    (["tags", "--prefix", "a b!"], 1, "INVALID_INPUT", ""),
    (["status", "--index", "../x"], 1, "INVALID_INPUT", "../x"), (["status", "--index"], 1, "INVALID_INPUT", "--index"),
    (["status", "extra"], 1, "INVALID_INPUT", "extra"),
    (["collection", "add"], 1, "INVALID_INPUT", "path"), (["collection", "add", "/"], 1, "INVALID_PATH", "/"),
    (["collection", "add", "/no such folder"], 2, "PATH_NOT_FOUND", "/no such folder"),
    (["collection", "add", "/etc"], 1, "INVALID_PATH", "/etc"), (["collection", "add", "files/notes"], 1, "DUPLICATE", "notes"),
    (["collection", "add", "files", "--name", "a b"], 1, "INVALID_PATH", "a b"),
    (["collection", "remove", "nope", "--yes"], 2, "NOT_FOUND", "nope"), (["sync", "nope"], 2, "NOT_FOUND", "nope"),
    (["search", "x", "--folder", "/no such folder"], 2, "PATH_NOT_FOUND", "/no such folder"),
    (["mcp", "--nope"], 1, "INVALID_INPUT", "--nope"), (["search", "x", "--config", "files/notes/a.md"], 1, "INVALID_INPUT", "a.md"),
])
def test_wrong_input_has_an_exit_code_a_code_and_a_hint(base, shell, words, code, name, said):
    before = files_below(base / "config") | files_below(base / "data")
    exit_code, out, shown = shell(*words)
    assert (exit_code, out) == (code, "")
    assert shown.startswith(f"gno: {name}: ") and said in shown
    assert shown.count("\n") <= 2 and (shown.count("\n") == 1 or "\nhint: " in shown)
    assert {k: v for k, v in (files_below(base / "config") | files_below(base / "data")).items()
        if not re.search(r"-wal|-shm|\.lock", k)} == {
        k: v for k, v in before.items() if not re.search(r"-wal|-shm|\.lock", k)}


@pytest.mark.parametrize("words, code, name", [(["search", "x", "-c", "nope"], 2, "NOT_FOUND"), (["get", "a.md"], 1, "INVALID_INPUT"),
    (["frobnicate"], 1, "INVALID_INPUT"),
                                               (["search", "x", "--nope"], 1, "INVALID_INPUT"),
                                               (["collection", "remove", "notes"], 1, "INVALID_INPUT")])
def test_errors_as_json(base, words, code, name):
    done = cli(base, "--json", *words)
    error = json.loads(done.stdout or done.stderr)["error"]
    assert done.returncode == code and error["code"] == name and error["message"] and set(error) <= {"code", "message", "hint"}


@pytest.mark.parametrize("words, query, uris", [                      # words after `search` -> the query, what is found first
    (["alpha", "beta", "together"], "alpha beta together", ["gno://notes/c.md"]),
    (["alpha beta", "together"], "alpha beta together", ["gno://notes/c.md"]),
    (["-n", "1", "alpha", "beta"], "alpha beta", ["gno://notes/c.md"]), (["alpha", "beta", "-n1"], "alpha beta", ["gno://notes/c.md"]),
    (["--", "--yes", "quorum"], "--yes quorum", ["gno://notes/b.md"]), (["-n", "1", "--", "quorum", "-alpha", "--json"],
        "quorum -alpha --json", None),
    (["quorum", "-c", "work"], "quorum", ["gno://work/d.md"]), (["quorum", "--collection", "WORK"], "quorum", ["gno://work/d.md"]),
    (["--collection=Work", "quorum"], "quorum", ["gno://work/d.md"]), (["quorum", "-cwork"], "quorum", ["gno://work/d.md"]),
    (["quorum", "--tags-all", "work,work/deep"], "quorum", ["gno://notes/b.md"]),
    (["quorum", "--tags-all", "work", "--tags-all", "work/deep"], "quorum", ["gno://notes/b.md"]),
    (["quorum", "--tags-any", "nope,work"], "quorum", ["gno://notes/b.md"]),
    (["quorum", "--author", "ada"], "quorum", ["gno://notes/b.md"]),
    (["quorum", "--exclude", "alpha,beta", "--exclude", "Größe"], "quorum", ["gno://work/d.md"]),
    (["quorum", "--since", "2000-01-01", "--until", "2001-01-01"], "quorum", []),
])
def test_words_options_and_the_end_of_options(shell, words, query, uris):
    code, shown, _ = shell("--json", "search", *words)
    found = json.loads(shown)
    assert code == 0 and found["meta"]["query"] == query
    assert (uris is None or [h["uri"] for h in found["results"]][:len(uris) or None] == uris)


@pytest.mark.parametrize("words, uris", [
    (["notes/a.md,notes/c.md"], ["a.md", "c.md"]), (["notes/a.md", "notes/c.md"], ["a.md", "c.md"]),
    (["notes/{a,c}.md"], ["a.md", "c.md"]), (["--pattern", "notes/[ac].md"], ["a.md", "c.md"]),
    (["notes/a*", "notes/c*"], ["a.md", "c.md"]), (["notes/a*,notes/c.md"], ["a.md", "c.md"]),
    (["notes/c.md", "notes/a.md:2"], ["c.md", "a.md"]),
])
def test_references_lists_and_globs(shell, words, uris):
    code, shown, _ = shell("multi-get", *words, "--json")
    assert code == 0 and [d["uri"] for d in json.loads(shown)["documents"]] == ["gno://notes/" + u for u in uris]


def test_more_arguments(shell):
    assert shell("get", "notes/a.md:3", "-l", "1")[1] == shell("get", "notes/a.md", "--from", "3", "-l", "1")[1] == "one quorum\n"
    assert json.loads(shell("sync", "work", "--json")[1])["collections"][0]["collection"] == "work"
    assert json.loads(shell("index", "-c", "work", "--no-embed", "--json")[1])["sync"]["collections"][0]["collection"] == "work"
    assert shell("ls", "notes/sub", "--files")[1].count("\n") == 1
    assert shell("ls", "-n", "2", "--offset", "5", "--files")[1].count("\n") == 1
    assert [t["tag"] for t in json.loads(shell("tags", "--prefix", "work/", "-c", "notes", "--json")[1])["tags"]] == ["work", "work/deep"]


def test_options_may_stand_between_words(shell):
    code, shown, said = shell("search", "alpha", "-c", "notes", "beta", "--json", "together")
    assert code == 0, shown + said
    out = json.loads(shown)
    assert out["meta"]["query"] == "alpha beta together" and out["meta"]["collection"] == "notes"


def test_json_is_the_structured_content_of_the_tool(base):
    server = Client(base)
    for words, name, arguments in [
        (["search", "quorum"], "gno_search", {"query": "quorum"}), (["search", "quorum", "-n", "1", "-c", "notes"], "gno_search",
            {"query": "quorum", "limit": 1, "collection": "notes"}),
        (["vsearch", "people who vote"], "gno_vsearch", {"query": "people who vote"}),
        (["query", "quorum"], "gno_query", {"query": "quorum"}),
        (["query", "alpha", "--query-mode", "term:quorum, of people", "--query-mode", "intent:a count"], "gno_query",
            {"query": "alpha", "queryModes": [{"mode": "term", "text": "quorum, of people"}, {"mode": "intent", "text": "a count"}]}),
        (["query", "alpha", "--query-mode", '[{"mode": "hyde", "text": "a, b"}]'], "gno_query",
            {"query": "alpha", "queryModes": [{"mode": "hyde", "text": "a, b"}]}),
        (["query", "diagnose", "quorum", "of", "--target", "notes/a.md"], "gno_query_diagnose", {"query": "quorum of", "target": "notes/a.md"}),
        (["get", "notes/b.md"], "gno_get", {"ref": "notes/b.md"}), (["get", "notes/a.md:2"], "gno_get", {"ref": "notes/a.md:2"}),
        (["multi-get", "**"], "gno_multi_get", {"pattern": "**"}), (["multi-get", "notes/a.md", "odd"], "gno_multi_get",
            {"refs": ["notes/a.md", "odd"]}),
        (["tags"], "gno_list_tags", {}), (["list-jobs"], "gno_list_jobs", {}), (["status"], "gno_status", {}),
    ]:
        mine, theirs = json.loads(ok(base, *words, "--json")), server.call(name, **arguments)["structuredContent"]
        mine.pop("resident", None)
        theirs.pop("resident", None)
        assert mine == theirs, words
    assert server.close() == 0


# ---- formats ----

def hits(base, *words):
    return json.loads(ok(base, *words, "--json"))["results"]


def test_tables_are_read_by_their_readers(base):
    found = hits(base, "search", "quorum")
    assert len(found) == 4
    rows = list(csv.DictReader(io.StringIO(ok(base, "search", "quorum", "--csv"))))
    assert [(r["docid"], float(r["score"]), r["uri"], int(r["line"]), r["title"], r["snippet"]) for r in rows] == [
        (h["docid"], h["score"], h["uri"], h["line"], h["title"], h["snippet"]) for h in found]
    lines = ok(base, "search", "quorum", "--files").splitlines()
    assert [line.split(",")[::2] for line in lines] == [[h["docid"], h["uri"]] for h in found]
    assert all(abs(float(line.split(",")[1]) - h["score"]) < 1e-3 for line, h in zip(lines, found, strict=True))
    tree = ElementTree.fromstring(ok(base, "search", "quorum", "--xml"))
    assert [r.get("uri") for r in tree.iter("result")] == [h["uri"] for h in found]
    assert [(r.findtext("title"), r.findtext("snippet")) for r in tree.iter("result")] == [(h["title"], h["snippet"]) for h in found]
    shown = ok(base, "search", "quorum", "--md")
    assert all(h["uri"] in shown and h["title"] in shown for h in found)
    for form in ("--csv", "--files", "--xml", "--md"):
        assert cli(base, "search", "xyzzy", form).returncode == 0
    assert len(ok(base, "query", "quorum", "--files").splitlines()) == 5
    assert len(list(csv.DictReader(io.StringIO(ok(base, "vsearch", "quorum", "--csv"))))) == 5


def test_lists_of_files(base):
    assert [line.split(",")[-1] for line in ok(base, "ls", "--files").splitlines()] == [d["uri"]
        for d in json.loads(ok(base, "ls", "--json"))["documents"]]
    assert all(re.fullmatch(r"#[0-9a-f]{8},gno://.*", line) for line in ok(base, "multi-get", "work/*", "--files").splitlines())
    assert ok(base, "get", "notes/a.md", "--md") == NOTES["a.md"]


def test_hits_for_people(base):
    shown = ok(base, "search", "quorum", "together")
    assert "\x1b" not in shown and re.search(r"files/notes/a\.md:3\b", shown) and "one quorum" in shown and "Alpha" in shown
    assert re.search(r"(?<![/\w])a\.md:3\b", ok(base, "search", "quorum", cwd=base / "files" / "notes"))       # a path that opens from here
    assert "no results" in ok(base, "search", "xyzzy")


# ---- places ----

READING = [["--help"], ["help"], ["--version"], ["status"], ["search", "x"], ["query", "x"], ["vsearch", "x"], ["ls"], ["tags"],
    ["get", "n/a.md"], ["multi-get", "**"],
           ["collection", "list"], ["list-jobs"], ["doctor"], ["search", "x", "--index", "other"], ["frobnicate"], ["embed", "--help"]]


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_reading_leaves_no_trace_in_a_new_home(tmp_path, words):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GNO_", "XDG_"))} | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, str(ROOT / "gno.py"), *words], capture_output=True, cwd=tmp_path, env=env, timeout=30)
    assert done.returncode == {"get": 2, "frobnicate": 1}.get(words[0], 0) and b"Traceback" not in done.stderr, done
    assert files_below(tmp_path) == {}
    if words[0] in ("search", "query", "vsearch", "ls", "get", "multi-get", "status", "collection"):
        assert b"gno setup" in done.stdout + done.stderr or b"collection add" in done.stdout + done.stderr, done


def test_setup_is_all_it_takes_and_does_nothing_twice(tmp_path):
    base, root = tmp_path / "gno", write(tmp_path / "My Notes", NOTES | {"t.txt": "plain text quorum\n"})
    base.mkdir()
    assert "my-notes: 5 added" in ok(base, "setup", str(root))
    assert len(hits(base, "search", "quorum")) == 4 and len(hits(base, "query", "quorum")) == 5
    config = (base / "config" / "index.yml").read_bytes()
    assert "my-notes: 5 unchanged" in ok(base, "setup", str(root)) and (base / "config" / "index.yml").read_bytes() == config
    assert "5 unchanged" in ok(base, "index") and "OK" in ok(base, "status")
    (root / "new.md").write_text("# New\n\ngiraffe\n")
    (root / "a.md").unlink()
    assert "1 added" in (said := ok(base, "sync")) and "1 removed" in said
    assert [h["uri"] for h in hits(base, "search", "giraffe")] == ["gno://my-notes/new.md"]
    assert "documents: 1" in ok(base, "cleanup")


def test_taking_something_away_needs_yes(fresh):
    config = (fresh / "config" / "index.yml").read_bytes()
    assert "--yes" in fails(fresh, 1, "collection", "remove", "notes", stdin=b"y\n")
    code, shown = terminal(fresh, "collection", "remove", "notes", typed=b"n\n")
    assert code == 2 and b"[y/N]" in shown and b"nothing was changed" in shown
    assert (fresh / "config" / "index.yml").read_bytes() == config and hits(fresh, "search", "quorum")
    code, shown = terminal(fresh, "collection", "remove", "notes", typed=b"y\n")
    assert code == 0 and b"notes" in shown and "notes" not in ok(fresh, "collection", "list")
    assert cli(fresh, "search", "quorum", "--json").stdout.count(b'"uri"') == 0


def test_a_folder_is_asked_directly_and_its_index_used_again(tmp_path):
    base, root = tmp_path / "gno", write(tmp_path / "My Notes", NOTES)
    base.mkdir()
    assert [h["uri"] for h in hits(base, "search", "gamma", "--folder", str(root))] == ["gno://my-notes/c.md"]
    made = files_below(base)
    assert [n for n in made if n.endswith(".sqlite")] == [next(n for n in made
        if re.fullmatch(r"data/index-folder-[0-9a-f]{12}\.sqlite", n))]
    assert not any(n.startswith("config") for n in made)
    write(root, {"late.md": "# Late\n\ngiraffe\n"})
    assert [h["uri"] for h in hits(base, "search", "giraffe", "--folder", str(root) + "/")] == ["gno://my-notes/late.md"]
    assert hits(base, "query", "a tall animal", "--folder", str(root))[0]["uri"] == "gno://my-notes/late.md"
    assert ok(base, "get", "my-notes/c.md", "--folder", str(root)) == NOTES["c.md"]
    assert [n for n in files_below(base) if n.endswith(".sqlite")] == [n for n in made if n.endswith(".sqlite")]
    other = write(tmp_path / "work", WORK)
    both = hits(base, "search", "quorum", "--folder", str(root), "--folder", str(other), "-n", "10")
    assert {h["uri"].split("/")[2] for h in both} == {"my-notes", "work"}
    assert "no collections" in ok(base, "collection", "list")


def test_folders_given_twice_or_in_another_order_are_the_same(tmp_path):
    base, one, two = tmp_path / "gno", write(tmp_path / "a" / "notes", {"x.md": "zebra\n"}), write(tmp_path / "b" / "notes",
        {"y.md": "zebra\n"})
    base.mkdir()

    def found(*folders):
        return sorted((h["uri"], h["source"]["absPath"]) for h in hits(base, "search", "zebra",
            *(w for f in folders for w in ("--folder", str(f)))))
    assert found(one, two) == found(two, one) and len({uri for uri, _ in found(one, two)}) == 2
    assert len(found(one, str(one) + "/", one)) == 1 and len(found(one, two, one)) == 2
    assert len([n for n in files_below(base) if n.endswith(".sqlite")]) == 2


def test_the_model_leaves_nothing_outside_of_our_places(tmp_path):
    root = write(tmp_path / "notes", NOTES)
    (tmp_path / "home").mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GNO_", "XDG_"))} | {"HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT)}
    for words in (["setup", str(root)], ["vsearch", "people who vote"]):
        assert subprocess.run([sys.executable, str(ROOT / "gno.py"), *words], capture_output=True, cwd=tmp_path, env=env,
            timeout=60).returncode == 0
    kept = {n for n in files_below(tmp_path / "home") if not n.endswith("/")}
    assert {os.path.dirname(n) for n in kept} <= {".config/gno", ".local/share/gno"}, kept


def test_named_indexes_and_configurations_stand_apart(fresh, tmp_path):
    assert "4 added" in ok(fresh, "sync", "--index", "Other")
    assert hits(fresh, "search", "gamma", "--index", "OTHER")[0]["uri"].lower() == "gno://notes/c.md?index=other"
    assert ok(fresh, "get", "gno://notes/c.md?index=other") == NOTES["c.md"]
    place = str(tmp_path / "else.yml")
    assert "else.yml" in ok(fresh, "init", "--config", place) and "notes" not in ok(fresh, "collection", "list", "--config", place)


# ---- pipes, locales, terminals ----

@pytest.fixture(scope="module")
def big(tmp_path_factory):
    "1,500 notes and a long one."
    base = tmp_path_factory.mktemp("big")
    kb = new_kb(base)
    notes = {f"a rather long name of a note, number {n}.md": "words here\n" * 60 for n in range(1500)}
    add(kb, write(base / "files", notes | {"long.md": "words\n" * 100_000}), "big")
    kb.close()
    return base


@pytest.mark.parametrize("words, lines", [(["ls", "-n", "10000"], 1), (["get", "big/long.md"], 1),
    (["search", "words", "-n", "100", "--json"], 1), (["--version"], 0), (["help"], 0), (["status"], 0), (["ls"], 0)])
def test_a_reader_that_has_seen_enough_ends_a_command_quietly(big, words, lines):
    proc = subprocess.Popen([sys.executable, str(ROOT / "gno.py"), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=big,
        env=environment(big))
    for _ in range(lines):
        assert proc.stdout.readline()
    proc.stdout.close()
    assert proc.stderr.read() == b"" and proc.wait(20) in (0, -signal.SIGPIPE, 128 + signal.SIGPIPE)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("words", [["help"], ["ls"], ["search", "quorum", "--json"], ["get", "notes/a.md"], ["mcp"]], ids=" ".join)
def test_a_full_disk_is_an_error_and_no_traceback(base, words):
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, str(ROOT / "gno.py"), *words], input=b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n',
            stdout=full, stderr=subprocess.PIPE,
                              cwd=base, env=environment(base), timeout=30)
    assert b"Traceback" not in done.stderr and (done.returncode == 2 and b"No space left" in done.stderr or words == ["mcp"]), done


@pytest.mark.parametrize("words", [["search", "quorum"], ["get", "notes/a.md"], ["status"], ["sync"]], ids=" ".join)
def test_a_working_folder_that_is_gone_does_not_matter(base, tmp_path, words):
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os, sys; os.rmdir({str(gone)!r}); os.execv(sys.executable, [sys.executable, {str(ROOT / 'gno.py')!r}, *sys.argv[1:]])"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, cwd=gone, env=environment(base), timeout=30)
    assert done.returncode == 0 and done.stdout and b"Traceback" not in done.stderr, done


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-"])
def test_a_closed_standard_stream_is_no_reason_to_fail(base, closed):
    done = subprocess.run(["sh", "-c", f'"$0" "$1" status {closed}', sys.executable, str(ROOT / "gno.py")], capture_output=True, cwd=base,
        env=environment(base), timeout=30)
    assert done.returncode == 0 and b"Traceback" not in done.stderr and (closed == ">&-" or b"Index: default" in done.stdout), done


LOCALES = [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "cp1252"},
    {"PYTHONIOENCODING": "ascii"}]


@pytest.mark.parametrize("env", LOCALES, ids=["C", "cp1252", "ascii"])
@pytest.mark.parametrize("words", [["search", "zählt"], ["query", "東京都"], ["ls"], ["get", "notes/sub/größe 🦓.md"],
    ["get", "notes/gröbe.md"], ["search", "zählt", "--csv"], ["status"]], ids=" ".join)
def test_any_locale_will_do(base, env, words):
    done = cli(base, *words, env=env)
    assert done.returncode == (2 if "gröbe" in words[-1] else 0) and b"Traceback" not in done.stderr, done
    assert done.stdout or b"NOT_FOUND" in done.stderr


@pytest.mark.parametrize("env", LOCALES, ids=["C", "cp1252", "ascii"])
def test_json_and_xml_say_the_same_in_every_locale(base, env):
    done = cli(base, "search", "quorum", "--json", env=env)
    assert json.loads(done.stdout) == json.loads(ok(base, "search", "quorum", "--json"))
    xml = cli(base, "search", "quorum", "--xml", env=env).stdout
    assert ElementTree.tostring(ElementTree.fromstring(xml)) == ElementTree.tostring(ElementTree.fromstring(cli(base, "search", "quorum",
        "--xml").stdout))


@pytest.mark.parametrize("source, text", [
    (b"# A\n\nb\n", "# A\n\nb\n"), (b"no final line feed", "no final line feed\n"), (b"a\r\nb\r\n", "a\nb\n"),
    ("a\u0085b\u2028c\u009bd\n".encode(), "a\u0085b\u2028c\u009bd\n"),
    ("é🦓\n".encode(), "é🦓\n"), (b"", ""), ("Größe “so”\n".encode("cp1252"), "Größe “so”\n"),
    (b"---\ntitle: [broken\n---\ntext\n", "---\ntitle: [broken\n---\ntext\n"),
    (b"x" * 300_000 + b"\nend\n", "x" * 300_000 + "\nend\n"), (b"1: not numbered\n", "1: not numbered\n"),
])
def test_get_into_a_file_is_the_raw_text(tmp_path, source, text):
    base = tmp_path / "gno"
    kb = new_kb(base)
    add(kb, write(tmp_path / "n", {"a.md": source}), "n")
    kb.close()
    done = cli(base, "get", "n/a.md")
    assert done.returncode == 0 and done.stdout.decode("utf-8") == text


@pytest.mark.parametrize("env", LOCALES, ids=["C", "cp1252", "ascii"])
def test_get_into_a_file_loses_nothing_in_any_locale(base, env):
    assert cli(base, "get", "notes/sub/größe 🦓.md", env=env).stdout.decode("utf-8") == NOTES["sub/größe 🦓.md"]


def test_colours_only_on_a_terminal_that_wants_them(base):
    assert "\x1b" not in ok(base, "search", "quorum")
    code, shown = terminal(base, "search", "quorum")
    assert code == 0 and b"\x1b[" in shown and b"quorum" in shown
    for words, env in ((["search", "quorum", "--no-color"], {}), (["search", "quorum"], {"NO_COLOR": "1"}),
        (["status"], {"NO_COLOR": "1"}), (["sync", "--quiet", "--no-color"], {})):
        code, shown = terminal(base, *words, env=env)
        assert code == 0 and b"\x1b" not in shown, shown
    code, shown = terminal(base, "get", "notes/a.md")
    assert code == 0 and b"1: # Alpha\r\n2: \r\n3: one quorum" in shown   # numbered for the eye
    code, shown = terminal(base, "get", "notes/a.md", "--json")
    assert json.loads(shown)["content"] == NOTES["a.md"]


EVIL = ["evil\x1b]0;owned\x07\x1b[31mred.md", "bell\x07\x08\x7f.md", "c1\x9b31m\x85.md", "line\nfeed\r.md"]


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    "File names that hold control characters."
    base = tmp_path_factory.mktemp("evil")
    kb = new_kb(base)
    texts = dict.fromkeys(EVIL, "quorum \x1b[32mgreen\x07 \x9b31m text\n")
    root = write(base / "files", texts | {"bad\x1b[31m.txt": bytes(range(32)) * 100})
    add(kb, root, "evil", pattern="**/*")
    kb.close()
    return base


CONTROLS = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]|\r(?!\n)")


@pytest.mark.parametrize("words", [
    ["search", "quorum"], ["search", "quorum", "--md"], ["search", "quorum", "--csv"], ["search", "quorum", "--xml"],
    ["search", "quorum", "--files"], ["search", "quorum", "--json"],
    ["ls"], ["ls", "--files"], ["ls", "--md"], ["multi-get", "**"], ["multi-get", "**", "--md"], ["status"], ["sync", "--full"],
    ["doctor"], ["search", "x\x1b[31m"], ["get", "evil/none\x1b[31m.md"],
    ["get", "evil/" + EVIL[0]], ["get", "gno://evil/" + gno.uri_quote(EVIL[2])], ["collection", "add", "/none\x1b[31m"], ["\x1b[31m"],
    ["search", "x", "-c", "\x1b[31m"], ["get", "evil/" + EVIL[0], "--md"],
], ids=lambda w: " ".join(w).encode("unicode_escape").decode())
def test_control_characters_never_reach_the_terminal(evil, words):
    code, shown = terminal(evil, *words, env={"NO_COLOR": "1"})
    # the progress line clears itself
    shown = shown.replace(b"\r\x1b[K", b"") if words[0] == "sync" else shown.replace(b"\r\r\n", b"\r\n")
    assert shown and code in (0, 1, 2) and b"Traceback" not in shown and not CONTROLS.search(shown), shown


def test_odd_names_survive_machine_formats(evil):
    found = hits(evil, "search", "quorum", "-n", "10")
    assert {h["source"]["relPath"] for h in found} == set(EVIL)
    assert {h["uri"] for h in found} == {"gno://evil/" + gno.uri_quote(name) for name in EVIL}
    tree = ElementTree.fromstring(cli(evil, "search", "quorum", "-n", "10", "--xml").stdout)
    assert {r.get("uri") for r in tree.iter("result")} == {h["uri"] for h in found}
    rows = list(csv.reader(io.StringIO(cli(evil, "search", "quorum", "-n", "10", "--csv").stdout.decode(), newline="")))
    assert len(rows) == 1 + len(EVIL) and {r[2] for r in rows[1:]} == {h["uri"] for h in found}
    assert len(ok(evil, "search", "quorum", "-n", "10", "--files").splitlines()) == len(EVIL)


def test_xml_holds_whatever_a_text_holds(tmp_path):
    base = tmp_path / "gno"
    kb = new_kb(base)
    add(kb, write(tmp_path / "n", {"]]>&.md": "quorum ]]> & <b> \uffff \ufffe \u0085 \u2028 \U0001ffff end\n"}), "n")
    kb.close()
    tree = ElementTree.fromstring(cli(base, "search", "quorum", "--xml").stdout)
    assert "]]> & <b>" in tree.findtext(".//snippet")


def test_interrupting_a_command_is_quiet_and_keeps_what_was_done(tmp_path):
    base = tmp_path / "gno"
    root = write(tmp_path / "n", {f"{n}.md": f"# Note {n}\n\n" + f"word{n} among others that say little\n" * 30 for n in range(300)})
    write(base, {"config/index.yml": f'version: "1.0"\ncollections:\n- name: n\n  path: {root}\n'})
    proc = subprocess.Popen([sys.executable, str(ROOT / "gno.py"), "index"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=base,
        env=environment(base))
    time.sleep(1.2)
    proc.send_signal(signal.SIGINT)
    _, err = proc.communicate(timeout=10)
    assert proc.returncode == 130 and b"Traceback" not in err and b"gno: interrupted" in err, err
    assert json.loads(ok(base, "status", "--json"))["totalDocuments"] == 300


# ---- doctor ----

DAMAGE = {
    "sizes lost": "DELETE FROM docs_fts_docsize", "some sizes lost": "DELETE FROM docs_fts_docsize WHERE id % 2",
    "blocks zeroed": "UPDATE docs_fts_data SET block = zeroblob(length(block)) WHERE id > 10",
    "blocks lost": "DELETE FROM docs_fts_data WHERE id > 10",
    "version lost": "DELETE FROM docs_fts_config",
    "random blocks": "UPDATE docs_fts_data SET block = randomblob(length(block)) WHERE id > 10",
    "structure lost": "DELETE FROM docs_fts_data WHERE id = 10",
    "everything lost": "DELETE FROM docs_fts_data",
    "text changed behind its back": "UPDATE mirrors SET body = 'other words' WHERE id = (SELECT min(id) FROM mirrors)",
}


def test_doctor_finds_a_healthy_index_healthy(base):
    done = cli(base, "doctor")
    assert done.returncode == 0 and b"BAD" not in done.stdout and done.stderr == b"", done
    report = json.loads(ok(base, "doctor", "--json"))
    assert report["healthy"] is True and {c["status"] for c in report["checks"]} <= {"ok", "warn"}


@pytest.mark.parametrize("damage", DAMAGE)
def test_doctor_finds_and_mends_a_damaged_keyword_index(fresh, damage):
    path = fresh / "data" / "index-default.sqlite"
    db = sqlite3.connect(path)
    db.create_function("cjk", 3, gno.cjk, deterministic=True)
    db.execute(DAMAGE[damage])
    db.commit()
    db.close()
    done = cli(fresh, "search", "quorum")                             # wrong or not: never a traceback, never silence about a failure
    assert b"Traceback" not in done.stderr and done.returncode in (0, 2)
    assert done.returncode == 0 or done.stderr.startswith(b"gno: ") and b"doctor" in done.stderr, done
    done = cli(fresh, "doctor")
    assert done.returncode == 1 and b"doctor --fix" in done.stdout + done.stderr and b"Traceback" not in done.stderr, done
    done = cli(fresh, "doctor", "--fix")
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done
    kb = new_kb(fresh)
    assert run(kb, "doctor")["healthy"] and run(kb, "sync")["collections"][0]["filesUnchanged"] == 4
    found = {h["uri"] for h in run(kb, "search", query="quorum")["results"]}
    kb.close()
    assert found >= {"gno://notes/b.md", "gno://notes/sub/gr%C3%B6%C3%9Fe%20%F0%9F%A6%93.md"}


@pytest.mark.parametrize("content", [b"this is no database at all\n" * 100, b"SQLite format 3\0" + b"\0" * 4000])
def test_a_file_that_is_no_index_is_named_and_left_alone(fresh, content):
    path = fresh / "data" / "index-default.sqlite"
    for name in ("index-default.sqlite-wal", "index-default.sqlite-shm"):
        (fresh / "data" / name).unlink(missing_ok=True)
    path.write_bytes(content)
    for words in (["search", "quorum"], ["status"], ["get", "notes/a.md"], ["doctor"]):
        done = cli(fresh, *words)
        assert done.returncode in (1, 2) and b"index-default.sqlite" in done.stdout + done.stderr and b"Traceback" not in done.stderr, done
    assert path.read_bytes() == content
