"""Knowledge base: index names, folders, index.yml, the database file, the write lock, atomic files."""
import os
import pickle
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT, add, cli, environment, new_kb, place, run, write
from hypothesis import assume, given
from hypothesis import strategies as st

import gno


def failure(action, *arguments, **named) -> gno.GnoError:
    "The GnoError that a call raises."
    with pytest.raises(gno.GnoError) as caught:
        action(*arguments, **named)
    return caught.value


def without_root(action):
    "The picklable result of action() in a child process that may not ignore file permissions."
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            answer = action()
        except BaseException as e:
            answer = f"{type(e).__name__}: {e}"
        os.write(sink, pickle.dumps(answer))
        os._exit(0)
    os.close(sink)
    with open(source, "rb") as f:
        answer = pickle.loads(f.read())
    os.waitpid(child, 0)
    return answer


@pytest.fixture
def open_place():
    "A temporary folder that other users may enter."
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)


# ---- index names --------------------------------------------------------------------------------

GOOD_NAMES = [
    # typed, identity
    ("a", "a"), ("7", "7"), ("default", "default"), ("Work", "work"), ("work notes", "work notes"), ("a  b", "a  b"),
    ("v1.2", "v1.2"), ("a.b.c", "a.b.c"), ("a-b_c", "a-b_c"), ("a-", "a-"), ("a_", "a_"),
    ("Ärger", "ärger"), ("E\u0301t\u00e9", "été"), ("日本語", "日本語"), ("Ⅷ", "ⅷ"), ("a\u0301", "á"),
    ("हिन्दी", "हिन्दी"),                                   # vowel signs and the virama are marks
    ("a" * 64, "a" * 64), ("\U00010428" * 32, "\U00010428" * 32),               # 64 UTF-16 units each
    ("日" * 64, "日" * 64),                                                     # 192 bytes
    ("ᾳ" * 60, "αι" * 60),                                                      # 240 bytes once folded
    ("ᾷ" * 48, "ᾶι" * 48),                                                      # 240
]
BAD_NAMES = [
    "", " ", "a ", " a", ".a", "-a", "_a", "a.", "a..b", "..", ".", "a/b", "a\\b", "a:b", "a*", "a?b", "a\0b", "a\nb", "a\n", "a\tb",
    "a\u00a0b", "a\u3000b", "\u0301a", "a\u200bb", "😀", "a😀", "a'b", 'a"b', "a,b", "a+b", "a@b", "a|b", "a\ud800",
    "a" * 65, "\U00010428" * 33, "ᾳ" * 61, "ᾷ" * 49,
]
TWINS = [
    ("Work", "WORK"), ("straße", "STRASSE"), ("straße", "Strasse"), ("\u00e9", "E\u0301"), ("ΣΑΣ", "σασ"), ("σας", "ΣΑΣ"),
    ("ﬁn", "FIN"), ("\u212a", "k"), ("İ", "i\u0307"), ("ı", "I"), ("ſ", "S"), ("Ǆ", "ǆ"), ("ΐ", "\u03b9\u0308\u0301"),
]


def test_index_names():
    for typed, identity in GOOD_NAMES:
        assert gno.index_identity(typed) == identity, typed
        assert len(f"index-{identity}.sqlite".encode()) <= 255
    for typed in BAD_NAMES:
        assert failure(gno.index_identity, typed).code == "INVALID_INPUT", typed
    for one, other in TWINS:
        assert gno.index_identity(one) == gno.index_identity(other), (one, other)


@given(st.text(st.sampled_from("abzAZäÄßéÉσςΣжЖ日09 ._-\u0301"), min_size=1, max_size=40))
def test_index_identity_is_one_for_all_spellings(name):
    try:
        identity = gno.index_identity(name)
    except gno.GnoError:
        assume(False)
    import unicodedata
    for spelling in (identity, name.upper(), name.lower(), unicodedata.normalize("NFD", name), unicodedata.normalize("NFC", name)):
        if len(spelling.encode("utf-16-le")) <= 128:
            assert gno.index_identity(spelling) == identity, spelling


def test_two_spellings_are_one_file_and_a_bad_name_touches_nothing(tmp_path):
    one, other = (new_kb(tmp_path, name=name) for name in ("Straße", "STRASSE"))
    assert one.db_path == other.db_path == str(tmp_path / "data" / "index-strasse.sqlite")
    for name in ("../x", "a/b", ""):
        assert failure(new_kb, tmp_path, name=name).code == "INVALID_INPUT"
    assert list(tmp_path.iterdir()) == []


# ---- folders of its own -------------------------------------------------------------------------

def test_default_dirs(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    kinds = ("config", "data", "cache")
    for platform, env, expected in [
        ("linux", {}, ("/h/.config/gno", "/h/.local/share/gno", "/h/.cache/gno")),
        ("linux", {"XDG_CONFIG_HOME": "/x", "XDG_DATA_HOME": "", "XDG_CACHE_HOME": "/y/"}, ("/x/gno", "/h/.local/share/gno", "/y/gno")),
        ("linux", {"GNO_DATA_DIR": "~/d", "XDG_DATA_HOME": "/x", "GNO_CACHE_DIR": ""}, ("/h/.config/gno", "/h/d", "/h/.cache/gno")),
        ("linux", {"GNO_CONFIG_DIR": "rel"}, (os.path.abspath("rel"), "/h/.local/share/gno", "/h/.cache/gno")),
        ("darwin", {"XDG_CONFIG_HOME": "/x"}, ("/h/Library/Application Support/gno/config", "/h/Library/Application Support/gno/data",
                                               "/h/Library/Caches/gno")),
        ("darwin", {"GNO_DATA_DIR": "/d"}, ("/h/Library/Application Support/gno/config", "/d", "/h/Library/Caches/gno")),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(gno.sys, "platform", platform)
            assert gno.default_dirs(env) == dict(zip(kinds, expected, strict=True)), (platform, env)


# ---- index.yml ----------------------------------------------------------------------------------

def test_load_config_reads(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    path = tmp_path / "index.yml"
    assert gno.load_config(str(path)) == gno.Config({}, {})
    for text, expected in [
        ("", {}), ("# nothing yet\n", {}), ("{}", {}), ("collections:\n", {}), ("collections: []\nversion: \"1.0\"\n", {}),
        ("version: 1.0\n", {}),                             # YAML reads a number; it means the same
        ("\ufeffversion: \"1.0\"\r\ncollections:\r\n- {name: A, path: /n}\r\n", {"a": gno.Collection("a", "/n")}),
        ("collections: [{name: a, path: ~/n}]", {"a": gno.Collection("a", "/h/n")}),
        ("collections: [{name: 7, path: /n, pattern: '*.md', include: [.pdf], exclude: [x, 1], updateCmd: make, "
         "languageHint: de, gitignore: false, color: red}]",
         {"7": gno.Collection("7", "/n", "*.md", (".pdf",), ("x", "1"), "make", "de", False)}),
        ("collections: [{name: b, path: /b, include: null}, {name: a, path: /a}]",
         {"b": gno.Collection("b", "/b"), "a": gno.Collection("a", "/a")}),     # in the order of the file
    ]:
        path.write_text(text, encoding="utf-8", newline="")
        config = gno.load_config(str(path))
        assert config.collections == expected and list(config.collections) == list(expected), text
        assert config.warnings == (), text
    path.write_text("colour: red\nversion: '1.0'\ncolection: []\n")
    config = gno.load_config(str(path))
    assert len(config.warnings) == 2 and "colour" in config.warnings[0] and "colection" in config.warnings[1]
    assert config.raw["colour"] == "red"


@pytest.mark.parametrize("text, says", [
    ("a: [", "YAML"), ("a: b: c", "YAML"), ("\t- x", "YAML"), ("x: !!python/object:os.system {}", "YAML"),
    ("- a\n- b\n", "mapping"), ("just text", "mapping"), ("7", "mapping"),
    ("version: '2.0'", "2.0"), ("version: 1", "1"), ("version: null", "version"),
    ("collections: {a: /n}", "collections"), ("collections: 7", "collections"), ("collections: text", "collections"),
    ("collections: [/n]", "collections[0]"), ("collections: [{name: a}]", "collections[0]"),
    ("collections: [{path: /n}]", "collections[0]"),
    ("collections: [{name: a, path: /n}, {name: A, path: /m}]", "collections[1]"),
    ("collections: [{name: -a, path: /n}]", "name"), ("collections: [{name: a/b, path: /n}]", "name"),
    (f"collections: [{{name: {'a' * 65}, path: /n}}]", "name"),
    ("collections: [{name: a, path: notes}]", "absolute"), ("collections: [{name: a, path: ./notes}]", "absolute"),
    ("collections: [{name: a, path: [/n]}]", "path"),
    ("collections: [{name: a, path: /n, include: .md}]", "include"), ("collections: [{name: a, path: /n, exclude: {x: 1}}]", "exclude"),
    ("started: 2026-13-45\n", "YAML"),                      # no day of any calendar
    ("x: " + "[" * 3000, "YAML"), ("x: " + "[" * 3000 + "]" * 3000, "YAML"),
], ids=lambda text: text[:40])
def test_load_config_refuses(tmp_path, text, says):
    path = tmp_path / "index.yml"
    path.write_text(text)
    error = failure(gno.load_config, str(path))
    assert error.code == "INVALID_INPUT" and str(path) in error.message and says.lower() in error.message.lower(), error.message


def test_load_config_of_what_is_no_text(tmp_path):
    (tmp_path / "latin").write_bytes(b"x: \xff\xfe\xfa\n")
    (tmp_path / "folder").mkdir()
    for name in ("latin", "folder"):
        error = failure(gno.load_config, str(tmp_path / name))
        assert error.code == "INVALID_INPUT" and name in error.message


def test_every_call_sees_the_configuration_of_the_moment(kb, tmp_path):
    write(tmp_path, {"n/a.md": "alpha"})
    add(kb, tmp_path / "n")
    path = Path(kb.config_path)
    good, before = path.read_text(), path.stat()
    path.write_text("collections: [")
    error = failure(run, kb, "search", query="alpha")
    assert error.code == "INVALID_INPUT" and str(path) in error.message
    path.write_text(good)
    assert len(run(kb, "search", query="alpha")["results"]) == 1
    other = path.with_name("new")           # same size and time, by another file
    other.write_text(good.replace("notes", "tones"))
    os.utime(other, ns=(before.st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)
    assert [c["name"] for c in run(kb, "status")["collections"]] == ["tones"]
    path.unlink()
    assert run(kb, "status")["collections"] == []


COMMENTED = """\
# my knowledge
version: "1.0"          # never change

myOwnKey: {deep: [1, 2]}   # not gno's
collections:
  # the first
  - name: first         # with a remark
    path: /first
    exclude: [tmp]
    colour: blue

  # the second
  - name: Second
    path: "/second"
contexts:
  - {scopeType: global, scopeKey: /, text: "all: of it"}   # a context
# the end
"""
LAYOUTS = {
    "commented": COMMENTED,
    "windows line ends": COMMENTED.replace("\n", "\r\n"),
    "no final newline": COMMENTED.rstrip("\n"),
    "items at the margin": COMMENTED.replace("\n  - name", "\n- name").replace("\n    ", "\n  "),
    "byte order mark": "\ufeff" + COMMENTED,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_comments_and_unknown_keys_survive_every_edit(kb, tmp_path, layout):
    text = LAYOUTS[layout]
    path = Path(kb.config_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode())
    kb.refresh()
    before = gno.load_config(str(path)).raw

    def now() -> dict:
        raw = path.read_bytes().decode()
        assert ("\r\n" in raw) == ("\r\n" in text) and ("\r\n" not in text or raw.count("\n") == raw.count("\r\n"))
        for comment in ("# my knowledge", "# never change", "# not gno's", "# a context", "# the end"):
            assert raw.count(comment) == 1, (comment, raw)
        config = gno.load_config(str(path))
        assert {k: v for k, v in config.raw.items() if k != "collections"} == {k: v for k, v in before.items() if k != "collections"}
        return {c["name"]: c for c in config.raw["collections"]}

    (tmp_path / "third: odd #1").mkdir()
    run(kb, "add_collection", path=str(tmp_path / "third: odd #1"), name="third", exclude=["*.tmp", "yes"])
    assert now() == {"first": before["collections"][0], "Second": before["collections"][1],
                     "third": {"name": "third", "path": str(tmp_path / "third: odd #1"), "pattern": "**/*", "exclude": ["*.tmp", "yes"]}}
    run(kb, "collection_rename", collection="second", name="zweite")
    assert list(now()) == ["first", "zweite", "third"]
    run(kb, "remove_collection", collection="third")
    assert list(now()) == ["first", "zweite"]
    assert "# the first" in path.read_text() and "# with a remark" in path.read_text() and now()["first"]["colour"] == "blue"
    run(kb, "remove_collection", collection="first")
    run(kb, "remove_collection", collection="ZWEITE")
    assert now() == {}
    run(kb, "add_collection", path=str(tmp_path / "third: odd #1"), name="again")
    assert list(now()) == ["again"]


@pytest.mark.parametrize("text", [
    "", "# only this\n", 'version: "1.0"\n', "version: '1.0'\ncollections: []\n", "collections: []   # none yet\n",
    "collections:\n", "collections:\n\n# end\n", "---\nversion: '1.0'\n",
])
def test_a_first_collection_fits_into_any_file(kb, tmp_path, text):
    path = Path(kb.config_path)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (tmp_path / "n").mkdir()
    add(kb, tmp_path / "n")
    assert list(gno.load_config(str(path)).collections) == ["notes"]
    assert all(line.partition("#")[2] in path.read_text() for line in text.splitlines() if "#" in line)
    run(kb, "remove_collection", collection="notes")
    assert gno.load_config(str(path)).collections == {}


def test_a_file_that_cannot_be_edited_as_text_is_left_alone(kb, tmp_path):
    path = Path(kb.config_path)
    path.parent.mkdir(parents=True)
    (tmp_path / "n").mkdir()
    for text in ("{version: '1.0', collections: []}\n", "version: '1.0'\n...\n", "collections: &all []\nmore: *all\n",
                 "version: '1.0'\ncollections: []\ncollections: []\n"):
        path.write_text(text)
        error = failure(add, kb, tmp_path / "n")
        assert error.code == "CONFLICT" and "by hand" in error.hint and path.read_text() == text, text
        assert os.listdir(path.parent) == ["index.yml"]


# ---- the database file --------------------------------------------------------------------------

READS = [("status", {}), ("search", {"query": "alpha"}), ("list_tags", {}), ("multi_get", {"pattern": "**"}), ("list_jobs", {})]


def listing(folder: Path) -> dict[str, bytes]:
    "Every file below a folder with its content."
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_reading_creates_nothing(tmp_path):
    kb = new_kb(tmp_path / "gno")
    for name, arguments in READS:
        run(kb, name, **arguments)
    for ref in ("notes/a.md", "gno://notes/a.md?index=other"):
        assert failure(run, kb, "get", ref=ref).code == "NOT_FOUND"
    kb.close()
    assert not (tmp_path / "gno").exists()


def test_a_reader_sees_an_index_that_appears_later(tmp_path):
    reader, writer = new_kb(tmp_path / "gno"), new_kb(tmp_path / "gno")
    assert run(reader, "search", query="alpha")["results"] == []
    add(writer, write(tmp_path / "n", {"a.md": "alpha"}))
    assert len(run(reader, "search", query="alpha")["results"]) == 1
    writer.close()
    reader.close()


def test_reading_works_where_nothing_may_be_written(open_place):
    base = open_place / "gno"
    kb = new_kb(base)
    add(kb, write(open_place / "n", {"a.md": "alpha beta"}))
    kb.close()
    before = listing(base)
    for folder in (base / "data", base / "config", base):
        folder.chmod(0o555)

    def read():
        kb = new_kb(base)
        found = run(kb, "search", query="alpha")["results"][0]["uri"]
        checks = run(kb, "status")["health"]["checks"]
        kb.close()
        return found, [c["detail"] for c in checks if "read-only" in c["detail"]]
    found, told = without_root(read)
    assert found == "gno://notes/a.md"
    assert listing(base) == before
    assert told, "gno_status does not say that the index is on a read-only place"


def test_a_newer_schema_is_refused_and_left_alone(tmp_path):
    kb = new_kb(tmp_path)
    kb.wdb.execute("PRAGMA user_version = 99")
    kb.close()
    for action in (lambda kb: run(kb, "status"), lambda kb: run(kb, "index"), lambda kb: kb.wdb):
        kb = new_kb(tmp_path)
        error = failure(action, kb)
        assert error.code == "RUNTIME" and "99" in error.message and "newer gno" in error.hint
        kb.close()
    db = sqlite3.connect(kb.db_path)
    assert db.execute("PRAGMA user_version").fetchone() == (99,)
    db.close()


@pytest.mark.parametrize("damage", ["garbage", "cut short", "header only", "a folder"])
def test_a_damaged_file_is_a_clear_error(tmp_path, damage):
    kb = new_kb(tmp_path / "gno")
    add(kb, write(tmp_path / "n", {f"{i}.md": f"alpha word{i} " * 200 for i in range(40)}))
    kb.close()
    path = Path(kb.db_path)
    if damage == "garbage":
        path.write_bytes(b"this is no database at all\n" * 500)
    elif damage == "cut short":
        path.write_bytes(path.read_bytes()[:path.stat().st_size // 3])
    elif damage == "header only":
        path.write_bytes(path.read_bytes()[:4096])
    else:
        path.unlink()
        path.mkdir()
    for words in (["search", "alpha"], ["index", "--no-embed"]):
        done = cli(tmp_path / "gno", *words)
        said = done.stderr.decode()
        assert done.returncode == 2 and said.startswith("gno: RUNTIME: ") and path.name in said and "Traceback" not in said, said


def test_an_empty_file_is_an_empty_index(tmp_path):
    kb = new_kb(tmp_path / "gno")
    os.makedirs(tmp_path / "gno" / "data")
    Path(kb.db_path).touch()
    assert run(kb, "search", query="alpha")["results"] == []
    add(kb, write(tmp_path / "n", {"a.md": "alpha"}))
    assert len(run(kb, "search", query="alpha")["results"]) == 1
    kb.close()


def test_many_processes_may_create_one_index_at_once(tmp_path):
    code = ("import os, sys, time, gno\nkb = gno.KB(writable=True)\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.001)\n"
            "with gno.transaction(kb.wdb): gno.set_meta(kb.wdb, sys.argv[2], 'here')\nkb.close()")
    children = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "go"), f"p{i}"], env=environment(tmp_path),
                                 stderr=subprocess.PIPE)
                for i in range(8)]
    time.sleep(0.3)
    (tmp_path / "go").touch()
    for child in children:
        said = child.communicate(timeout=60)[1]
        assert child.returncode == 0, said
    kb = new_kb(tmp_path)
    assert [kb.get_meta(f"p{i}") for i in range(8)] == ["here"] * 8
    assert kb.db.execute("PRAGMA user_version").fetchone() == (len(gno.SCHEMA),)
    kb.close()


def test_each_thread_has_its_own_connections(kb):
    kb.wdb.execute("SELECT 1")

    def look(into):
        into += [kb.db, kb.wdb, kb.db, kb.wdb]
        kb.close()
    here = [kb.db, kb.wdb, kb.db, kb.wdb]
    there: list = []
    thread = threading.Thread(target=look, args=[there])
    thread.start()
    thread.join()
    assert here[:2] == here[2:] and there[:2] == there[2:]
    assert len({id(c) for c in here + there}) == 4
    assert kb.db.execute("SELECT count(*) FROM meta").fetchone() == (0,)      # closing there closed nothing here


def test_reading_never_waits_for_a_writer_and_never_sees_half(kb, tmp_path, monkeypatch):
    add(kb, write(tmp_path / "n", {"a.md": "alpha"}))
    monkeypatch.setattr(gno, "BUSY_MS", 50)
    other = new_kb(tmp_path / "gno")
    with pytest.raises(RuntimeError), gno.transaction(kb.wdb):
        kb.wdb.execute("UPDATE documents SET title = 'changed'")
        assert run(other, "search", query="alpha")["results"][0]["title"] == "a"
        assert failure(gno.transaction(other.wdb).__enter__).code == "LOCKED"
        raise RuntimeError("the power fails")
    assert run(other, "search", query="alpha")["results"][0]["title"] == "a"
    with gno.transaction(other.wdb):        # and the failed transaction holds nothing
        pass
    other.close()


def test_a_named_index_is_read_and_never_made(tmp_path):
    base = tmp_path / "gno"
    kb, work = new_kb(base), new_kb(base, name="Work")
    root = write(tmp_path / "n", {"a.md": "alpha", "b.md": "beta"})
    add(kb, root)
    (root / "a.md").write_text("alpha of work")
    run(work, "sync")
    before = set(os.listdir(base / "data"))
    assert run(kb, "get", ref="gno://notes/a.md")["content"] == "alpha\n"
    got = run(kb, "get", ref="gno://notes/a.md?index=WORK")
    assert got["content"] == "alpha of work\n" and got["uri"].lower() == "gno://notes/a.md?index=work"
    for ref, code in [("gno://notes/a.md?index=none", "NOT_FOUND"), ("gno://notes/a.md?index=a%2Fb", "INVALID_INPUT"),
                      ("gno://notes/a.md?index=", "INVALID_INPUT"), ("gno://notes/a.md?index=..", "INVALID_INPUT")]:
        assert failure(run, kb, "get", ref=ref).code == code, ref
    assert {f for f in os.listdir(base / "data") if "none" in f} == set()
    assert {f.removesuffix("-wal").removesuffix("-shm") for f in os.listdir(base / "data")} == \
        {f.removesuffix("-wal").removesuffix("-shm") for f in before}
    for k in (kb, work, *kb.others.values()):
        k.close()


# ---- the write lock -----------------------------------------------------------------------------

HOLD = "import sys, time, gno; f = gno.write_lock(sys.argv[1], 0); print('held', flush=True); time.sleep(60)"


def test_write_lock_is_for_one_process_and_dies_with_it(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], env=environment(tmp_path / "home"), stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        for wait in (0, 0.1):
            error = failure(gno.write_lock, str(tmp_path), wait)
            assert error.code == "LOCKED" and error.hint
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with gno.write_lock(str(tmp_path), 5):
            assert failure(gno.write_lock, str(tmp_path), 0).code == "LOCKED"      # nor twice in this process
        gno.write_lock(str(tmp_path), 0).close()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_writing_tools_answer_locked_and_reading_ones_go_on(kb, tmp_path, monkeypatch):
    add(kb, write(tmp_path / "n", {"a.md": "alpha"}))
    monkeypatch.setattr(gno.KB, "lock", lambda self, wait_s=0: gno.write_lock(self.dirs["data"], 0))
    with gno.write_lock(kb.dirs["data"], 0):
        for name, arguments in [("sync", {}), ("remove_collection", {"collection": "notes"}),
                                ("add_collection", {"path": str(tmp_path / "gno")})]:
            assert failure(run, kb, name, **arguments).code == "LOCKED", name
        for name, arguments in READS:
            run(kb, name, **arguments)
    assert run(kb, "sync")["collections"][0]["filesUnchanged"] == 1


# ---- files written whole or not at all ----------------------------------------------------------

def test_write_file(tmp_path):
    path = tmp_path / "new" / "deep" / "a.md"
    gno.write_file(str(path), b"one")
    assert path.read_bytes() == b"one"
    path.chmod(0o640)
    gno.write_file(str(path), b"two")
    assert path.read_bytes() == b"two" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert failure(gno.write_file, str(path), b"three", exclusive=True).code == "CONFLICT"
    assert path.read_bytes() == b"two"
    gno.write_file(str(path.with_name("b.md")), b"", exclusive=True)
    link = path.with_name("link.md")
    link.symlink_to("a.md")
    gno.write_file(str(link), b"by the link")
    assert link.is_symlink() and path.read_bytes() == b"by the link"
    with pytest.raises(TypeError):
        gno.write_file(str(path), "text is no bytes")
    assert failure(gno.write_file, str(path.parent), b"a folder stands there").code == "PERMISSION"
    assert failure(gno.write_file, str(path / "below"), b"a file stands there").code == "PERMISSION"
    assert path.read_bytes() == b"by the link"
    assert sorted(os.listdir(path.parent)) == ["a.md", "b.md", "link.md"]


@pytest.mark.parametrize("name", ["a" * 250 + ".md", "日" * 83 + ".md", "😀" * 62 + ".md", "-rf", " a ", "a\nb.md"],
                         ids=["250 letters", "83 ideographs", "62 emoji", "dash", "blanks", "newline"])
def test_write_file_takes_any_name_that_the_disk_takes(tmp_path, name):
    for text in (b"one", b"two"):
        gno.write_file(str(tmp_path / name), text)
    assert os.listdir(tmp_path) == [name] and (tmp_path / name).read_bytes() == b"two"


def test_write_file_among_many_writers(tmp_path):
    path, won = str(tmp_path / "a"), []

    def create(i):
        try:
            gno.write_file(path, b"%d" % i * 5000, exclusive=True)
            won.append(i)
        except gno.GnoError as e:
            assert e.code == "CONFLICT"
    threads = [threading.Thread(target=create, args=[i]) for i in range(9)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(won) == 1 and Path(path).read_bytes() == b"%d" % won[0] * 5000
    threads = [threading.Thread(target=gno.write_file, args=[path, b"%d" % i * 5000]) for i in range(9)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert Path(path).read_bytes() in [b"%d" % i * 5000 for i in range(9)] and os.listdir(tmp_path) == ["a"]


def test_write_file_in_a_closed_folder_changes_nothing(open_place):
    (open_place / "a").write_text("old")
    open_place.chmod(0o555)
    said = without_root(lambda: gno.write_file(str(open_place / "a"), b"new"))
    assert "ermission denied" in said and (open_place / "a").read_text() == "old" and os.listdir(open_place) == ["a"]


def test_folders_without_configuration(tmp_path):
    for name in ("x/Notes", "y/Notes", "z/Ünïcode & co"):
        write(tmp_path / name, {"a.md": f"alpha {name[0]}"})
    roots = [str(tmp_path / n) for n in ("x/Notes", "y/Notes", "z/Ünïcode & co")]
    kb = new_kb(tmp_path / "gno", folders=roots)
    assert list(kb.config.collections) == ["notes", "notes-2", "unicode-co"]
    assert kb.db_path == new_kb(tmp_path / "gno", folders=[roots[2], roots[0] + "/", roots[1]]).db_path
    assert kb.db_path != new_kb(tmp_path / "gno", folders=roots[:2]).db_path
    assert Path(kb.db_path).name.startswith("index-folder-") and place(tmp_path / "gno")["data"] in kb.db_path
    run(kb, "sync")
    assert len(run(kb, "search", query="alpha")["results"]) == 3
    assert not os.path.exists(kb.config_path)
    assert failure(add, kb, tmp_path, "more").code == "CONFLICT"
    assert failure(new_kb, tmp_path, folders=[str(tmp_path / "none")]).code == "PATH_NOT_FOUND"
    kb.close()


assert ROOT                                 # the command line of `cli` and the module under test are the same file
