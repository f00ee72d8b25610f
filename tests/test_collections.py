"""Collections: which folders may become one, names, removing, renaming, cleaning up, first setup."""
import json
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, add, cli, new_kb, place, run, write
from test_kb import failure

import gno

WATCHED: list = []                          # None as first entry: every file opened from now on is appended


def _audit(event, arguments):
    if WATCHED and event == "open" and isinstance(arguments[0], (str, bytes)):
        WATCHED.append(os.fsdecode(arguments[0]))


sys.addaudithook(_audit)                    # Python reports every file it opens; hooks cannot be taken off again


@contextmanager
def opened(root: Path):
    "The files below root that this process opens inside the block, relative and in order."
    seen: list[str] = []
    WATCHED.append(None)
    try:
        yield seen
    finally:
        seen += [os.path.relpath(p, root) for p in WATCHED[1:] if p.startswith(f"{root}{os.sep}")]
        WATCHED.clear()


def found(kb, query="alpha") -> list[str]:
    "The documents with a word, as collection/path."
    return sorted(h["uri"].removeprefix("gno://") for h in run(kb, "search", query=query, limit=100)["results"])


def counts(result) -> tuple[int, ...]:
    "(added, updated, unchanged, removed, failed) of the only collection in a sync result."
    (c,) = (result.get("sync") or result)["collections"]
    return tuple(c["files" + k] for k in ("Added", "Updated", "Unchanged", "MarkedInactive", "Errored"))


# ---- which folders -------------------------------------------------------------------------------

@pytest.fixture
def home(tmp_path, monkeypatch):
    "A home folder with notes, secrets and settings in it; the working directory."
    write(tmp_path / "me", {"notes/a.md": "alpha", ".ssh/keys/id": "", ".gnupg/x": "", ".aws/x": "", ".config/gno/index.yml": "",
                            ".config/app/a.md": "", ".local/share/a.md": "", "file.md": "alpha", "$odd/a.md": "", "my $HOME/a.md": ""})
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.chdir(tmp_path / "me")
    return tmp_path / "me"


ROOTS = [
    # typed, code of the refusal or the folder below the home
    ("{home}/notes", "notes"), ("{home}/notes/", "notes"), ("{home}/notes/../notes/.", "notes"), ("  {home}/notes ", "notes"),
    ("~/notes", "notes"), ("{home}/link-to-notes", "notes"), ("{home}/$odd", "$odd"), ("{home}/my $HOME", "my $HOME"),
    ("{home}/.config/app", ".config/app"),
    ("", "INVALID_PATH"), ("   ", "INVALID_PATH"), ("{home}/no\0tes", "INVALID_PATH"),
    ("/", "INVALID_PATH"), ("//", "INVALID_PATH"), ("/.", "INVALID_PATH"), ("/usr/..", "INVALID_PATH"),
    ("~", "INVALID_PATH"), ("~/", "INVALID_PATH"), ("{home}", "INVALID_PATH"), ("{home}/notes/..", "INVALID_PATH"),
    ("/etc", "INVALID_PATH"), ("/etc/", "INVALID_PATH"), ("//etc", "INVALID_PATH"), ("/etc/ssl", "INVALID_PATH"),
    ("/etc/no/such", "INVALID_PATH"),
    ("/usr", "INVALID_PATH"), ("/bin", "INVALID_PATH"), ("/sbin", "INVALID_PATH"), ("/var", "INVALID_PATH"), ("/System", "INVALID_PATH"),
    ("/System/x", "INVALID_PATH"), ("/Library", "INVALID_PATH"), ("/home", "INVALID_PATH"), ("/home/somebody", "INVALID_PATH"),
    ("/Users/somebody", "INVALID_PATH"), ("/proc", "INVALID_PATH"), ("/proc/1", "INVALID_PATH"), ("/proc/self/cwd", "INVALID_PATH"),
    ("/dev", "INVALID_PATH"), ("/dev/shm", "INVALID_PATH"), ("/sys/kernel", "INVALID_PATH"), ("/boot", "INVALID_PATH"),
    ("/tmp", "INVALID_PATH"),
    ("~/.ssh", "INVALID_PATH"), ("~/.ssh/keys", "INVALID_PATH"), ("{home}/.ssh/keys", "INVALID_PATH"), ("~/.ssh/none", "INVALID_PATH"),
    ("~/.gnupg", "INVALID_PATH"), ("~/.aws", "INVALID_PATH"), ("~/.config", "INVALID_PATH"), ("~/.local", "INVALID_PATH"),
    ("~/.config/gno", "INVALID_PATH"),
    ("{home}/link-to-ssh", "INVALID_PATH"), ("{home}/link-to-etc/ssl", "INVALID_PATH"), ("{home}/link-to-home", "INVALID_PATH"),
    ("$HOME/notes", "INVALID_PATH"), ("${{HOME}}/notes", "INVALID_PATH"), ("{home}/$NONE/notes", "INVALID_PATH"),
    ("~nobody-of-this-name/notes", "INVALID_PATH"),
    ("C:\\notes", "INVALID_PATH"), ("c:/notes", "INVALID_PATH"), ("\\\\server\\share", "INVALID_PATH"), ("C:notes", "INVALID_PATH"),
    ("{home}/file.md", "INVALID_PATH"), ("{home}/none", "PATH_NOT_FOUND"), ("{home}/file.md/x", "PATH_NOT_FOUND"),
    ("~/none", "PATH_NOT_FOUND"),
    ("{home}/" + "x" * 300, "PATH_NOT_FOUND"), ("{home}/loop", "PATH_NOT_FOUND"), ("{home}/dead", "PATH_NOT_FOUND"),
]


@pytest.mark.skipif(os.name == "nt", reason="paths of other systems")
def test_which_folders_may_become_a_collection(home):
    for name, target in (("link-to-notes", "notes"), ("link-to-ssh", ".ssh"), ("link-to-etc", "/etc"), ("link-to-home", "."),
                         ("loop", "loop"), ("dead", "none")):
        (home / name).symlink_to(target)
    for typed, expected in ROOTS:
        path = typed.format(home=home)
        if expected.isupper():
            error = failure(gno.collection_root, path, False)
            assert error.code == expected, (path, error)
        else:
            assert gno.collection_root(path, False) == str(home / expected), path


def test_what_lies_in_another_persons_home_is_refused_except_to_root(home, monkeypatch):
    pwd = pytest.importorskip("pwd")
    people = [("/home/ann", 1001), ("/home/bob", 1002), ("/root", 0), ("/", 2), ("/srv/www", 33), ("/home/deep/carol", 1003)]
    monkeypatch.setattr(pwd, "getpwall", lambda: [pwd.struct_passwd(("", "", uid, 0, "", path, "")) for path, uid in people])
    for uid, path, code in [(1001, "/home/bob/notes", "INVALID_PATH"), (1001, "/root/notes", "INVALID_PATH"),
                            (1001, "/home/ann/x", "PATH_NOT_FOUND"), (1001, "/home/bobby/x", "PATH_NOT_FOUND"),
                            (1001, "/home/deep/carol/x", "PATH_NOT_FOUND"), (1001, "/srv/www/x", "PATH_NOT_FOUND"),
                            (0, "/home/bob/notes", "PATH_NOT_FOUND"), (0, "/home/bob", "INVALID_PATH")]:
        monkeypatch.setattr(os, "getuid", lambda uid=uid: uid)
        assert failure(gno.collection_root, path, False).code == code, (uid, path)


def test_relative_folders_are_for_people_in_a_shell(home):
    for path, expected in [("notes", "notes"), ("./notes", "notes"), ("../me/notes", "notes"), (".", "INVALID_PATH"),
                           ("none", "PATH_NOT_FOUND"),                           ("..", None), ("file.md", "INVALID_PATH")]:
        assert failure(gno.collection_root, path, False).code == "INVALID_PATH", path
        if expected and expected.isupper():
            assert failure(gno.collection_root, path, True).code == expected, path
        elif expected:
            assert gno.collection_root(path, True) == str(home / expected)


def test_relative_over_mcp_and_on_the_command_line(tmp_path, client):
    write(tmp_path, {"notes/a.md": "alpha"})
    server = client("--enable-write")
    for path in ("notes", "./notes", "$HOME/notes", "C:\\notes"):
        error = server.call("gno_add_collection", path=path)
        assert error["isError"] and error["structuredContent"]["error"] == "INVALID_PATH", path
        assert error["content"][0]["text"].startswith("Error: ") and "\nHint: " in error["content"][0]["text"]
    done = cli(tmp_path / "gno", "collection", "add", "notes", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert counts(json.loads(done.stdout)) == (1, 0, 0, 0, 0)


def test_a_refused_folder_writes_nothing(kb, tmp_path):
    (tmp_path / "n").mkdir()
    for arguments in [{"path": "/etc"}, {"path": str(tmp_path / "none")}, {"path": str(tmp_path / "n"), "name": "no name"},
                      {"path": str(tmp_path / "n"), "pattern": "{a"}, {"path": str(tmp_path / "n"), "pattern": "../*.md"},
                      {"path": str(tmp_path / "n"), "exclude": ["[a"]}]:
        error = failure(run, kb, "add_collection", **arguments)
        assert error.code in ("INVALID_PATH", "PATH_NOT_FOUND", "INVALID_INPUT"), arguments
        assert not os.path.exists(kb.config_path) and not os.path.exists(kb.db_path), arguments


# ---- names ---------------------------------------------------------------------------------------

def test_collection_names():
    for given, folder, expected in [
        (None, "Notes", "notes"), (None, "My Notes (2024)!", "my-notes-2024"), (None, "Über uns", "uber-uns"), (None, "日本語", "notes"),
        (None, "_private_", "private"), (None, ".hidden", "hidden"), (None, "x" * 90, "x" * 64), (None, "a.b", "a-b"),
        ("notes", "x", "notes"), ("NOTES", "x", "notes"), ("  a ", "x", "a"), ("7", "x", "7"), ("a_b-c", "x", "a_b-c"),
        ("a" * 64, "x", "a" * 64),
    ]:
        name = gno.collection_name(given, "/r/" + folder, ())
        assert name == expected and gno.NAME_RULE.fullmatch(name), (given, folder)
    for given in ("", " ", "a b", "-a", "_a", "ä", "a/b", "../a", "a.b", "a:b", "日本", "a\nb", "a" * 65):
        assert failure(gno.collection_name, given, "/r/x", ()).code == "INVALID_PATH", given


def test_a_taken_name_comes_with_a_free_one(kb, tmp_path):
    write(tmp_path, {"x/notes/a.md": "alpha", "y/Notes/b.md": "alpha", "z/notes/c.md": "alpha"})
    run(kb, "add_collection", path=str(tmp_path / "x" / "notes"))
    for arguments in ({"path": str(tmp_path / "y" / "Notes")}, {"path": str(tmp_path / "y" / "Notes"), "name": "NOTES"}):
        error = failure(run, kb, "add_collection", **arguments)
        assert error.code == "DUPLICATE" and error.hint.endswith("notes-2")
    run(kb, "add_collection", path=str(tmp_path / "y" / "Notes"), name="notes-2")
    error = failure(run, kb, "add_collection", path=str(tmp_path / "z" / "notes"))
    assert error.hint.endswith("notes-3")
    taken = {"a" * 64}
    hint = failure(gno.collection_name, "a" * 64, "/r", taken).hint.split()[-1]
    assert gno.collection_name(hint, "/r", taken) == hint
    assert found(kb) == ["notes-2/b.md", "notes/a.md"]


def test_a_folder_is_one_collection_however_it_is_spelt(kb, tmp_path):
    root = write(tmp_path / "n", {"a.md": "alpha"})
    (tmp_path / "link").symlink_to(root)
    add(kb, root)
    for path in (root, f"{root}/", f"{root}/../n", tmp_path / "link"):
        error = failure(run, kb, "add_collection", path=str(path), name="other")
        assert error.code == "DUPLICATE" and "notes" in error.message and "notes" in error.hint
    write(root, {"sub/b.md": "alpha"})      # a folder inside it is another one
    add(kb, root / "sub", "sub")
    assert found(kb) == ["notes/a.md", "sub/b.md"]


# ---- what the default pattern leaves out ---------------------------------------------------------

def test_left_out_files_are_counted_and_the_hint_brings_them_in(kb, tmp_path):
    root = write(tmp_path / "n", {"a.md": "alpha", "b.txt": "alpha", "c.TXT": "alpha", "d.py": "alpha = 1", "e.unknown": "alpha",
                                  ".hidden.txt": "alpha", "node_modules/f.txt": "alpha"})
    kb.mode = "stdio"                       # a client of a server, not a person in a shell
    job = gno.add_collection(kb, str(root), "notes")
    assert job.answer["pattern"] == "**/*.md" and job.answer["leftOut"] == {".py": 1, ".txt": 2}
    assert job.kind == "add" and counts(job.work(kb, gno.Progress())) == (1, 0, 0, 0, 0)
    assert '[".py", ".txt"]' in job.answer["hint"]
    run(kb, "remove_collection", collection="notes")
    job = gno.add_collection(kb, str(root), "notes", include=[".py", ".txt"])
    job.work(kb, gno.Progress())
    assert found(kb) == ["notes/a.md", "notes/b.txt", "notes/c.TXT", "notes/d.py"] and "leftOut" not in job.answer
    run(kb, "remove_collection", collection="notes")
    for pattern, expected in [("**/*", ["notes/a.md", "notes/b.txt", "notes/c.TXT", "notes/d.py"]), ("*.txt", ["notes/b.txt"])]:
        job = gno.add_collection(kb, str(root), "notes", pattern)
        assert job.answer["pattern"] == pattern and not {"leftOut", "hint"} & set(job.answer)
        job.work(kb, gno.Progress())
        assert set(expected) <= set(found(kb)), pattern
        run(kb, "remove_collection", collection="notes")


def test_on_the_command_line_everything_supported_is_taken(kb, tmp_path):
    root = write(tmp_path / "n", {"a.md": "alpha", "b.txt": "alpha"})
    assert counts(add(kb, root)) == (2, 0, 0, 0, 0)
    assert run(kb, "collection_list")["collections"] == [
        {"name": "notes", "path": str(root), "pattern": "**/*", "include": [], "exclude": [], "documents": 2}]


# ---- remove, add again ---------------------------------------------------------------------------

def test_removed_and_added_again_without_reading_a_file(kb, tmp_path):
    root = write(tmp_path / "n", {f"{n}.md": f"# {n}\n\nalpha #tag" for n in "abc"})
    with opened(root) as files:
        add(kb, root)
    assert sorted(files) == ["a.md", "b.md", "c.md"]
    answer = run(kb, "remove_collection", collection="NOTES")
    assert answer | {"note": ""} == {"removed": True, "collection": "notes", "configUpdated": True, "indexedDataRetained": True, "note": ""}
    assert found(kb) == [] and run(kb, "list_tags")["tags"] == [] and run(kb, "status")["totalDocuments"] == 0
    error = failure(run, kb, "get", ref="notes/a.md")
    assert error.code == "NOT_FOUND" and "collection" in error.hint
    assert sorted(os.listdir(root)) == ["a.md", "b.md", "c.md"]
    (root / "b.md").write_text("alpha, edited meanwhile")
    (root / "c.md").unlink()
    with opened(root) as files:
        assert counts(add(kb, root)) == (2, 0, 0, 0, 0)
    assert files == ["b.md"]
    assert found(kb) == ["notes/a.md", "notes/b.md"] and found(kb, "edited") == ["notes/b.md"]
    assert run(kb, "list_tags")["tags"] == [{"tag": "tag", "count": 1}]
    assert failure(run, kb, "remove_collection", collection="none").code == "NOT_FOUND"


def test_added_again_with_another_folder_or_pattern(kb, tmp_path):
    one, other = write(tmp_path / "1", {"a.md": "alpha one", "b.md": "alpha"}), write(tmp_path / "2", {"a.md": "alpha two"})
    add(kb, one)
    run(kb, "remove_collection", collection="notes")
    add(kb, other)
    assert found(kb) == ["notes/a.md"] and found(kb, "two") == ["notes/a.md"] and found(kb, "one") == []
    run(kb, "remove_collection", collection="notes")
    add(kb, one, pattern="b.md")
    assert found(kb) == ["notes/b.md"]


def test_a_collection_that_contexts_mention_stays(kb, tmp_path):
    root = write(tmp_path / "n", {"a.md": "alpha"})
    add(kb, root)
    add(kb, write(tmp_path / "m", {"a.md": "alpha"}), "note")
    path = Path(kb.config_path)
    plain = path.read_text()
    for key, refused in [("notes:", True), ("gno://notes/a", True), ("gno://notes/", True), ("gno://notes", True), ("/", False),
                         ("note:", False), ("gno://notes2/a", False), ("notes2:", False)]:
        path.write_text(plain + f"contexts:\n- {{scopeType: x, scopeKey: '{key}', text: t}}\n")
        before = path.read_bytes()
        if refused:
            error = failure(run, kb, "remove_collection", collection="Notes")
            assert error.code == "HAS_REFERENCES" and key in error.message and path.read_bytes() == before, key
            assert "notes/a.md" in found(kb)
        else:
            run(kb, "remove_collection", collection="notes")
            assert found(kb) == ["note/a.md"], key
            path.write_text(plain)
            run(kb, "sync")


def test_taken_out_of_the_file_by_hand(kb, tmp_path):
    add(kb, write(tmp_path / "n", {"a.md": "alpha"}))
    add(kb, write(tmp_path / "m", {"b.md": "alpha"}), "more")
    path = Path(kb.config_path)
    text = path.read_text()
    path.write_text("version: '1.0'\n")
    assert found(kb) == [] and failure(run, kb, "get", ref="notes/a.md").code == "NOT_FOUND"
    assert run(kb, "sync")["collections"] == []
    path.write_text(text)
    with opened(tmp_path / "n") as files:
        run(kb, "sync")
    assert found(kb) == ["more/b.md", "notes/a.md"] and files == []


# ---- clear embeddings ----------------------------------------------------------------------------

@pytest.fixture
def two_models(tmp_path):
    "Two model folders that differ in nothing but the name."
    for name in ("one", "two"):
        shutil.copytree(ROOT / "models", tmp_path / name, ignore=shutil.ignore_patterns("source", ".*"))
        card = json.loads((tmp_path / name / "card.json").read_text())
        (tmp_path / name / "card.json").write_text(json.dumps(card | {"name": name}))
    return tmp_path


def use(kb, models: dict[str, Path]):
    "Let the collections use these models."
    config = yaml.safe_load(Path(kb.config_path).read_text())
    for c in config["collections"]:
        c["models"] = {"embed": str(models[c["name"]])}
    Path(kb.config_path).write_text(yaml.safe_dump(config))


def clear(kb, collection="notes", **arguments) -> tuple:
    answer = run(kb, "clear_collection_embeddings", collection=collection, **arguments)
    assert answer["collection"] == collection.lower() and answer["mode"] == arguments.get("mode", "stale")
    assert ("note" in answer) is bool(answer["protectedSharedVectors"] or answer["deletedVectors"] and answer["mode"] == "all")
    return answer["deletedVectors"], answer["deletedModels"], answer["protectedSharedVectors"]


def embedded(kb) -> dict[str, tuple[int, int]]:
    "Of each collection (chunks, those with a vector of its model)."
    return {c["name"]: (c["chunkCount"], c["embeddedCount"]) for c in run(kb, "status")["collections"]}


def test_clearing_embeddings_by_hand(kb, tmp_path, two_models):
    add(kb, write(tmp_path / "n", {"a.md": "A kiln.", "b.md": "Clay."}))
    add(kb, write(tmp_path / "m", {"copy.md": "A kiln.", "c.md": "Glaze."}), "second")
    one, two = two_models / "one", two_models / "two"
    use(kb, {"notes": one, "second": one})
    assert clear(kb) == clear(kb, mode="all") == (0, [], 0)                   # nothing is embedded yet
    assert run(kb, "embed")["embedded"] == 3                                  # the kiln once
    assert clear(kb) == (0, [], 0) and embedded(kb) == {"notes": (2, 2), "second": (2, 2)}
    use(kb, {"notes": two, "second": one})
    status = run(kb, "status")
    assert embedded(kb) == {"notes": (2, 0), "second": (2, 2)} and status["embeddingBacklog"] == 2
    assert clear(kb, "NOTES") == (1, ["one"], 1)                              # clay; the kiln is the other one's too
    assert embedded(kb) == {"notes": (2, 0), "second": (2, 2)}
    assert run(kb, "embed")["embedded"] == 2
    assert embedded(kb) == {"notes": (2, 2), "second": (2, 2)} and run(kb, "status")["healthy"]
    assert clear(kb) == (0, [], 1) and clear(kb, "second") == (0, [], 1)      # each keeps what the other has as well
    assert clear(kb, mode="all") == (1, ["two"], 2)                           # clay; the kiln by either model stays
    assert embedded(kb) == {"notes": (2, 1), "second": (2, 2)} and run(kb, "status")["embeddingBacklog"] == 1
    assert run(kb, "embed")["embedded"] == 1
    (tmp_path / "m" / "copy.md").unlink()
    run(kb, "sync")
    assert clear(kb, mode="all") == (3, ["one", "two"], 0)                    # a deleted copy protects nothing
    assert embedded(kb) == {"notes": (2, 0), "second": (1, 1)}
    assert run(kb, "embed", collection="notes")["embedded"] == 2
    run(kb, "remove_collection", collection="second")
    assert clear(kb, mode="all") == (2, ["two"], 0) and failure(clear, kb, "second").code == "NOT_FOUND"


def test_clearing_without_the_model_in_use(kb, tmp_path, two_models):
    add(kb, write(tmp_path / "n", {"a.md": "A kiln."}))
    use(kb, {"notes": two_models / "one"})
    run(kb, "embed")
    use(kb, {"notes": two_models / "none"})
    assert failure(clear, kb).code == "MODEL_NOT_FOUND"
    use(kb, {"notes": two_models / "one"})
    assert embedded(kb) == {"notes": (1, 1)}                                  # what may still be wanted is kept
    use(kb, {"notes": two_models / "none"})
    assert clear(kb, mode="all") == (1, ["one"], 0)
    kb.writable = False
    assert failure(clear, kb).code == "WRITE_DISABLED"


def test_cleared_over_mcp_and_on_the_command_line(kb, tmp_path, client):
    add(kb, write(tmp_path / "n", {"a.md": "A kiln.", "b.md": "Clay."}))
    run(kb, "embed")
    server, base = client("--enable-write"), tmp_path / "gno"
    assert server.call("gno_vsearch", query="kiln")["structuredContent"]["results"]
    listed = {t["name"]: t for t in server.request("tools/list")["result"]["tools"]}["gno_clear_collection_embeddings"]
    assert listed["annotations"]["destructiveHint"] and listed["inputSchema"]["properties"]["mode"]["enum"] == ["stale", "all"]
    answer = server.call("gno_clear_collection_embeddings", collection="notes", mode="all")["structuredContent"]
    assert (answer["deletedVectors"], answer["protectedSharedVectors"]) == (2, 0) and "gno_embed" in answer["note"]
    refused = server.call("gno_vsearch", query="kiln")                        # nothing of it is left in the server's memory
    assert refused["isError"] and "nothing is embedded" in refused["content"][0]["text"]
    assert server.call("gno_query", query="kiln")["structuredContent"]["results"]
    assert server.call("gno_status")["structuredContent"]["embeddingBacklog"] == 2
    assert server.job("gno_embed")["typedResult"]["value"]["embedded"] == 2
    assert server.call("gno_vsearch", query="kiln")["structuredContent"]["results"]
    assert server.call("gno_clear_collection_embeddings", collection="notes", mode="some")["structuredContent"]["error"] == "INVALID_INPUT"
    assert cli(base, "collection", "clear-embeddings", "notes", "--all").returncode == 1          # nobody to ask
    for flags, deleted in [((), 0), (("--mode", "stale"), 0), (("--all",), 2), (("--all",), 0)]:
        done = cli(base, "collection", "clear-embeddings", "notes", *flags, "--yes", "--json")
        assert done.returncode == 0 and json.loads(done.stdout)["deletedVectors"] == deleted, (flags, done)


# ---- rename --------------------------------------------------------------------------------------

def test_rename_keeps_the_index(kb, tmp_path):
    root = write(tmp_path / "n", {"a.md": "alpha #t", "b.md": "alpha"})
    add(kb, root)
    assert run(kb, "collection_rename", collection="notes", name="Work") == {"renamed": "notes", "collection": "work"}
    assert found(kb) == ["work/a.md", "work/b.md"] and run(kb, "get", ref="work/a.md")["content"] == "alpha #t\n"
    assert failure(run, kb, "get", ref="notes/a.md").code == "NOT_FOUND"
    assert run(kb, "list_tags", collection="work")["tags"] == [{"tag": "t", "count": 1}]
    with opened(root) as files:
        assert counts(run(kb, "sync")) == (0, 0, 2, 0, 0)
    assert files == [], "a renamed collection is read again"
    for new, code in [("a b", "INVALID_PATH"), ("", "INVALID_INPUT"), ("x" * 65, "INVALID_PATH")]:
        assert failure(run, kb, "collection_rename", collection="work", name=new).code == code, new
    add(kb, write(tmp_path / "m", {"a.md": "beta"}), "other")
    assert failure(run, kb, "collection_rename", collection="work", name="OTHER").code == "DUPLICATE"
    assert failure(run, kb, "collection_rename", collection="none", name="x").code == "NOT_FOUND"
    run(kb, "collection_rename", collection="work", name="WORK")
    assert found(kb) == ["work/a.md", "work/b.md"]


def test_rename_onto_the_rows_of_a_removed_collection(kb, tmp_path):
    one, other = write(tmp_path / "1", {"a.md": "alpha one"}), write(tmp_path / "2", {"a.md": "alpha two"})
    add(kb, one, "old")
    run(kb, "remove_collection", collection="old")
    add(kb, other, "new")
    run(kb, "collection_rename", collection="new", name="old")
    assert found(kb) == ["old/a.md"] and found(kb, "two") == ["old/a.md"] and found(kb, "one") == []
    assert run(kb, "doctor")["healthy"]


def test_rename_takes_its_contexts_along_or_refuses(kb, tmp_path):
    add(kb, write(tmp_path / "n", {"a.md": "alpha"}))
    path = Path(kb.config_path)
    path.write_text(path.read_text() + "contexts:\n- {scopeType: collection, scopeKey: 'notes:', text: t}\n")
    try:
        run(kb, "collection_rename", collection="notes", name="work")
    except gno.GnoError as e:
        assert e.code == "HAS_REFERENCES"
    assert path.read_text().count("notes:") in (0, 1) and ("notes:" in path.read_text()) == ("notes" in kb.config.collections)


# ---- cleanup -------------------------------------------------------------------------------------

def test_cleanup_gives_the_space_back(kb, tmp_path):
    words = [f"word{i}" for i in range(4000)]
    root = write(tmp_path / "n", {f"{i}.md": " ".join(words[i * 20:i * 20 + 600]) for i in range(150)})
    add(kb, root)
    add(kb, write(tmp_path / "m", {"a.md": "alpha", "twin.md": (root / "0.md").read_text()}), "more")
    kb.wdb.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = os.path.getsize(kb.db_path)
    assert run(kb, "cleanup")["documents"] == 0
    run(kb, "remove_collection", collection="notes")
    assert run(kb, "status")["totalDocuments"] == 2
    answer = run(kb, "cleanup")
    after = os.path.getsize(kb.db_path)
    assert answer["documents"] == 150 and answer["bytesFreed"] > 0 and after < before / 4
    for left, sql in [(2, "documents"), (2, "mirrors"), (0, "chunks WHERE mirror_id NOT IN (SELECT id FROM mirrors)")]:
        assert kb.db.execute(f"SELECT count(*) FROM {sql}").fetchone() == (left,), sql
    assert found(kb) == ["more/a.md"] and found(kb, "word7") == ["more/twin.md"] and run(kb, "doctor")["healthy"]
    with opened(root) as files:
        assert counts(add(kb, root)) == (150, 0, 0, 0, 0)
    assert len(files) == 150
    kb.close()


# ---- from nothing --------------------------------------------------------------------------------

def test_init_and_setup_do_nothing_twice(tmp_path):
    base = tmp_path / "gno"
    root = write(tmp_path / "Notes", {"a.md": "alpha", "b.txt": "alpha"})
    config = Path(place(base)["config"], "index.yml")
    kb = new_kb(base)
    run(kb, "init")
    assert gno.load_config(str(config)).collections == {} and os.path.exists(kb.db_path)
    first = config.read_bytes()
    run(kb, "init")
    assert config.read_bytes() == first
    answer = run(kb, "init", path=str(root))
    assert answer["collection"] == "notes"
    first = config.read_bytes()
    assert run(kb, "init", path=f"{root}/")["collection"] == "notes" and config.read_bytes() == first
    kb.close()
    for expected in ((2, 0, 0, 0, 0), (0, 0, 2, 0, 0)):
        done = cli(base, "setup", str(root), "--no-embed", "--json")
        assert done.returncode == 0 and counts(json.loads(done.stdout)) == expected, done
        assert config.read_bytes() == first
    for words, code in [(["setup", str(tmp_path / "none")], 2), (["setup", "/etc"], 1), (["init", "/"], 1)]:
        assert cli(base, *words).returncode == code and config.read_bytes() == first, words


def test_setup_of_several_folders_of_one_name(tmp_path):
    write(tmp_path, {"x/notes/a.md": "alpha", "y/notes/b.md": "alpha"})
    for _ in range(2):
        done = cli(tmp_path / "gno", "setup", str(tmp_path / "x" / "notes"), str(tmp_path / "y" / "notes"), "--no-embed")
        assert done.returncode == 0, done.stderr
    kb = new_kb(tmp_path / "gno")
    assert len(kb.config.collections) == 0  # not read yet
    assert len(found(kb)) == 2 and len(kb.config.collections) == 2
    kb.close()


def test_setup_keeps_a_configuration_that_is_there(tmp_path):
    base = tmp_path / "gno"
    root = write(tmp_path / "n", {"a.md": "alpha"})
    config = Path(place(base)["config"], "index.yml")
    text = f"# mine\ncollections:\n- name: own   # own\n  path: {json.dumps(str(root))}\n  pattern: '*.md'\n"
    write(config.parent, {"index.yml": text})
    before = config.read_bytes()
    done = cli(base, "setup", str(root), "--no-embed")
    assert done.returncode == 0 and config.read_bytes() == before, done.stderr
    kb = new_kb(base)
    assert found(kb) == ["own/a.md"]
    kb.close()
