"""Sync: what is read again, what a report counts, what is kept when files vanish, languages and types of documents."""
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT, add, cli, environment, new_kb, run, write
from hypothesis import given, settings
from hypothesis import strategies as st
from test_collections import found, opened
from test_kb import failure, open_place, without_root  # noqa: F401 (open_place is a fixture)

import gno

COUNTS = ("Added", "Updated", "Unchanged", "MarkedInactive", "Errored", "Skipped")


def sync(kb, **arguments) -> dict:
    "The report on the only collection, plus `counts`: its numbers that are not 0."
    (report,) = run(kb, "sync", **arguments)["collections"]
    settled = sum(report["files" + k] for k in ("Added", "Updated", "Unchanged", "Errored"))
    settled -= len([e for e in report["errors"] if not e["relPath"]])          # those of the collection as a whole
    assert settled <= report["filesProcessed"] <= settled + report["filesSkipped"]
    return report | {"counts": {k: report["files" + k] for k in COUNTS if report["files" + k]}}


def codes(report, kind="warnings") -> list[tuple[str, str]]:
    "(path, code) of the errors or warnings of a report."
    return [(p["relPath"], p["code"]) for p in report[kind]]


def sound(kb):
    "SQLite and FTS5 find the index in order, and it lists exactly what is visible."
    assert kb.wdb.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    kb.wdb.execute("INSERT INTO docs_fts(docs_fts, rank) VALUES ('integrity-check', 1)")
    listed = kb.wdb.execute("SELECT id FROM docs_fts_docsize ORDER BY id").fetchall()
    assert listed == kb.wdb.execute("SELECT id FROM documents WHERE active AND mirror_id IS NOT NULL ORDER BY id").fetchall()
    for table, column, owner in [("tags", "doc_id", "documents"), ("links", "doc_id", "documents"), ("edges", "source", "documents"),
                                 ("chunks", "mirror_id", "mirrors"), ("documents", "mirror_id", "mirrors")]:
        assert kb.wdb.execute(f"SELECT count(*) FROM {table} WHERE {column} NOT IN (SELECT id FROM {owner})").fetchone() == (0,), table


DERIVED = """docid, source_hash, cut, mime, ext, size, title, lang, content_type, categories, author, document_date, meta, converter,
    warnings, error_code"""


def visible(kb) -> dict:
    "Everything that the index derives from the files: (collection, path) -> fields, text, chunks, tags, links."
    sound(kb)
    out = {}
    for doc, collection, path, mirror, cut, body, *fields in kb.wdb.execute(
            f"SELECT d.id, collection, path, mirror_id, cut, body, {DERIVED} FROM documents d LEFT JOIN mirrors m ON m.id = mirror_id "
            "WHERE active"):
        out[collection, path] = (
            fields, body, kb.wdb.execute("SELECT * FROM chunks WHERE mirror_id = ? AND cut = ? ORDER BY seq", [mirror, cut]).fetchall(),
            kb.wdb.execute("SELECT tag, source FROM tags WHERE doc_id = ? ORDER BY tag", [doc]).fetchall(),
            kb.wdb.execute("SELECT * FROM links WHERE doc_id = ? ORDER BY seq", [doc]).fetchall())
        out[collection, path][2][:] = [chunk[1:] for chunk in out[collection, path][2]]
        out[collection, path][4][:] = [link[1:] for link in out[collection, path][4]]
    return out


def like_new(kb, base: Path):
    "The index is what a new one of the same folders would be."
    fresh = new_kb(base / "fresh", config_path=kb.config_path)
    try:
        run(fresh, "sync")
        assert visible(kb) == visible(fresh)
    finally:
        fresh.close()
        shutil.rmtree(base / "fresh", ignore_errors=True)


# ---- what changed --------------------------------------------------------------------------------

def edit_unseen(root):
    "Another text of the same size, and the old times put back."
    before = (root / "a.md").stat()
    (root / "a.md").write_text("alpha TWO")
    os.utime(root / "a.md", ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(root, text):
    "What editors do: write another file and rename it over the old one, with its times."
    before = (root / "a.md").stat()
    (root / "new").write_text(text)
    os.utime(root / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
    (root / "new").replace(root / "a.md")


def folder_in_place_of_a_file(root):
    (root / "a.md").unlink()
    write(root, {"a.md/inside.md": "alpha"})


def link_in_place_of_a_file(root):
    (root / "a.md").replace(root / "real.md")
    (root / "a.md").symlink_to("real.md")


CHANGES = {
    # what happens to a.md ("alpha one"), sub/b.md and sub/c.md; the counts of the next sync; the files it opens
    "nothing": (lambda root: None, {"Unchanged": 3}, []),
    "edit": (lambda root: (root / "a.md").write_text("alpha two, longer"), {"Updated": 1, "Unchanged": 2}, ["a.md"]),
    "edit of the same size and time": (edit_unseen, {"Updated": 1, "Unchanged": 2}, ["a.md"]),
    "replaced by another text": (lambda root: replace(root, "alpha TWO"), {"Updated": 1, "Unchanged": 2}, ["a.md"]),
    "replaced by the same text": (lambda root: replace(root, "alpha one"), {"Unchanged": 3}, ["a.md"]),
    "touch": (lambda root: (root / "a.md").touch(), {"Unchanged": 3}, ["a.md"]),
    "chmod": (lambda root: (root / "a.md").chmod(0o600), {"Unchanged": 3}, ["a.md"]),
    "time 1970": (lambda root: os.utime(root / "a.md", (0, 0)), {"Unchanged": 3}, ["a.md"]),
    "time 1950": (lambda root: os.utime(root / "a.md", (-6e8, -6e8)), {"Unchanged": 3}, ["a.md"]),
    "time 2099": (lambda root: os.utime(root / "a.md", (4.1e9, 4.1e9)), {"Unchanged": 3}, ["a.md"]),
    "emptied": (lambda root: (root / "a.md").write_bytes(b""), {"Updated": 1, "Unchanged": 2}, ["a.md"]),
    "new file": (lambda root: write(root, {"sub/new/d.md": "alpha"}), {"Added": 1, "Unchanged": 3}, ["sub/new/d.md"]),
    "copy": (lambda root: shutil.copy2(root / "a.md", root / "z.md"), {"Added": 1, "Unchanged": 3}, ["z.md"]),
    "hard link": (lambda root: os.link(root / "a.md", root / "z.md"), {"Added": 1, "Unchanged": 3}, ["a.md", "z.md"]),
    "move": (lambda root: (root / "a.md").rename(root / "sub/z.md"), {"Added": 1, "Unchanged": 2, "MarkedInactive": 1}, ["sub/z.md"]),
    "other case": (lambda root: (root / "a.md").rename(root / "A.md"), {"Added": 1, "Unchanged": 2, "MarkedInactive": 1}, ["A.md"]),
    "folder moved": (lambda root: (root / "sub").rename(root / "zub"), {"Added": 2, "Unchanged": 1, "MarkedInactive": 2},
                     ["zub/b.md", "zub/c.md"]),
    "delete": (lambda root: (root / "a.md").unlink(), {"Unchanged": 2, "MarkedInactive": 1}, []),
    "folder deleted": (lambda root: shutil.rmtree(root / "sub"), {"Unchanged": 1, "MarkedInactive": 2}, []),
    "all deleted": (lambda root: [shutil.rmtree(root / "sub"), (root / "a.md").unlink()], {"MarkedInactive": 3}, []),
    "hidden": (lambda root: (root / "a.md").rename(root / ".a.md"), {"Unchanged": 2, "MarkedInactive": 1}, []),
    "a folder in its place": (folder_in_place_of_a_file, {"Added": 1, "Unchanged": 2, "MarkedInactive": 1}, ["a.md/inside.md"]),
    "a link in its place": (link_in_place_of_a_file, {"Added": 1, "Unchanged": 2, "MarkedInactive": 1, "Skipped": 1}, ["real.md"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_read_again_and_how_it_counts(kb, tmp_path, change):
    act, expected, files = CHANGES[change]
    root = write(tmp_path / "n", {"a.md": "alpha one", "sub/b.md": "# B #tag\n\nalpha [[a]]", "sub/c.md": "alpha"})
    add(kb, root)
    act(root)
    with opened(root) as read:
        report = sync(kb)
    assert report["counts"] == expected and read == files and report["errors"] == []
    like_new(kb, tmp_path)
    with opened(root) as read:              # and then it is settled
        again = sync(kb)
    assert read == [] and set(again["counts"]) <= {"Unchanged", "Skipped"}
    assert again["filesUnchanged"] == again["filesProcessed"] == len(visible(kb))


def test_full_reads_every_file_and_counts_what_changed(kb, tmp_path):
    root = write(tmp_path / "n", {"a.md": "alpha one", "b.md": "beta"})
    add(kb, root)
    (root / "a.md").write_text("alpha TWO")
    info = (root / "a.md").stat()           # a change that no time stamp shows
    with gno.transaction(kb.wdb):
        kb.wdb.execute("UPDATE documents SET mtime_ns = ?, ctime_ns = ? WHERE path = 'a.md'", [info.st_mtime_ns, info.st_ctime_ns])
    assert sync(kb)["counts"] == {"Unchanged": 2} and found(kb, "two") == []
    with opened(root) as read:
        assert sync(kb, full=True)["counts"] == {"Updated": 1, "Unchanged": 1}
    assert read == ["a.md", "b.md"] and found(kb, "two") == ["notes/a.md"]
    like_new(kb, tmp_path)


def test_the_whole_report(kb, tmp_path):
    root = write(tmp_path / "n", {"a.md": "alpha", "b.md": "alpha", "c.md": "---\na: [\n---\nalpha"})
    first = add(kb, root)
    totals = {f"totalFiles{k}" for k in ("Processed", "Added", "Updated", "Errored", "Skipped")}
    assert set(first) == {"collections", "totalDurationMs"} | totals
    assert first["totalFilesProcessed"] == first["totalFilesAdded"] == 3 and first["totalFilesErrored"] == 0
    (report,) = first["collections"]
    assert set(report) == {"collection", "filesProcessed", "durationMs", "errors", "warnings", *(f"files{k}" for k in COUNTS)}
    assert report["collection"] == "notes" and codes(report) == [("c.md", "FRONT_MATTER")]
    assert found(kb) == ["notes/a.md", "notes/b.md", "notes/c.md"]
    assert codes(sync(kb)) == []


def test_no_file_at_all_is_said(kb, tmp_path):
    root = write(tmp_path / "n", {"a.unknown": "alpha", ".hidden.md": "alpha"})
    (report,) = add(kb, root)["collections"]
    assert report["filesProcessed"] == 0 and codes(report) == [("", "NO_FILES")] and report["errors"] == []


def test_a_malformed_pattern_in_the_file_keeps_the_index(kb, tmp_path):
    add(kb, write(tmp_path / "n", {"a.md": "alpha"}))
    path = Path(kb.config_path)
    text = path.read_text()
    path.write_text(text.replace("**/*", "{a"))
    report = sync(kb)
    assert codes(report, "errors") == [("", "INVALID_INPUT")] and found(kb) == ["notes/a.md"]
    path.write_text(text)
    assert sync(kb)["counts"] == {"Unchanged": 1}


# ---- bad files -----------------------------------------------------------------------------------

def test_a_bad_file_never_stops_the_rest_and_is_tried_again_when_it_changes(kb, tmp_path):
    root = write(tmp_path / "n", {"a.md": "alpha", "b.md": b"\x00\x01\x02\x00 alpha", "c.docx": b"this is no archive", "d.md": "alpha"})
    (report,) = add(kb, root)["collections"]
    assert report["filesAdded"] == 2 and report["filesErrored"] == 2
    assert codes(report, "errors") == [("b.md", "BINARY"), ("c.docx", "CORRUPT")]
    assert found(kb) == ["notes/a.md", "notes/d.md"]
    assert "BINARY" in failure(run, kb, "get", ref="notes/b.md").message
    status = run(kb, "status")
    assert status["collections"][0]["errorDocuments"] == 2 and len(status["recentErrors"]) == 2 and not status["healthy"]
    with opened(root) as read:
        assert sync(kb)["counts"] == {"Unchanged": 4}
    assert read == []
    (root / "c.docx").write_bytes(b"still no archive")
    with opened(root) as read:
        report = sync(kb)
    assert report["counts"] == {"Errored": 1, "Unchanged": 3} and read == ["c.docx"]
    (root / "b.md").write_text("alpha at last")
    (root / "c.docx").unlink()
    assert sync(kb)["counts"] == {"Updated": 1, "Unchanged": 2, "MarkedInactive": 1}
    assert found(kb) == ["notes/a.md", "notes/b.md", "notes/d.md"] and run(kb, "status")["collections"][0]["errorDocuments"] == 0
    (root / "a.md").write_bytes(b"\x00\x01\x02\x00 alpha")              # a good text is not shown for a file that is broken now
    assert sync(kb)["counts"] == {"Errored": 1, "Unchanged": 2} and found(kb) == ["notes/b.md", "notes/d.md"]
    like_new(kb, tmp_path)


def test_a_file_that_may_not_be_read_keeps_its_last_text(open_place):  # noqa: F811
    root = write(open_place / "n", {"a.md": "alpha", "shut/b.md": "alpha", "new.md": "alpha"})
    (root / "new.md").unlink()
    if os.geteuid() == 0:
        for path in (open_place, root, *root.rglob("*")):
            os.chown(path, 65534, 65534)

    def story():
        kb = new_kb(open_place / "gno")
        add(kb, root)
        seen = []
        write(root, {"new.md": "alpha"})
        for mode in (0o000, 0o644):
            (root / "a.md").chmod(mode)
            (root / "new.md").chmod(mode)
            (root / "shut").chmod(mode | (0o111 if mode else 0))
            report = sync(kb)
            seen.append((report["counts"], codes(report, "errors"), codes(report), found(kb)))
        (root / "a.md").write_text("alpha beta")
        seen.append((sync(kb)["counts"], found(kb, "beta")))
        kb.close()
        return seen
    shut, opened_again, edited = without_root(story)
    assert shut[1] == [("new.md", "PERMISSION")] and ("shut", "PERMISSION") in shut[2]
    assert shut[3] == ["notes/a.md", "notes/shut/b.md"]
    assert opened_again[1] == opened_again[2] == [] and opened_again[3] == ["notes/a.md", "notes/new.md", "notes/shut/b.md"]
    assert edited == ({"Updated": 1, "Unchanged": 2}, ["notes/a.md"])


def test_an_empty_place_holder_of_a_cloud_drive_keeps_the_text(kb, tmp_path):
    root = write(tmp_path / "n", {"a.md": "alpha one", "b.md": "alpha"})
    add(kb, root)
    (root / "a.md").write_bytes(b"\0" * 9)
    assert sync(kb)["counts"] == {"Unchanged": 1, "Skipped": 1} and found(kb, "one") == ["notes/a.md"]
    (root / "a.md").write_text("alpha two")
    assert sync(kb)["counts"] == {"Updated": 1, "Unchanged": 1} and found(kb, "one") == []
    with open(root / "b.md", "wb") as f:    # many blocks, none of them on the disk
        f.truncate(100_000)
    sync(kb)
    assert found(kb) == ["notes/a.md", "notes/b.md"]
    (root / "b.md").write_bytes(b"")        # but an empty file is empty
    sync(kb)
    assert found(kb) == ["notes/a.md"]
    like_new(kb, tmp_path)


def test_lists_in_a_report_are_short_and_its_counts_complete(kb, tmp_path):
    root = write(tmp_path / "n", {f"{i:03}.md": b"\0\1" for i in range(130)} | {"z.md": b"alpha"})
    (report,) = add(kb, root)["collections"]
    assert report["filesErrored"] == 130 and report["filesAdded"] == 1 and found(kb) == ["notes/z.md"]
    assert codes(report, "errors") == [(f"{i:03}.md", "BINARY") for i in range(100)]
    assert run(kb, "status")["collections"][0]["errorDocuments"] == 130


# ---- much vanishes at once -----------------------------------------------------------------------

def test_a_vanished_root_changes_nothing_and_says_so(kb, tmp_path):
    root = write(tmp_path / "n", {f"{i}.md": f"alpha {i}" for i in range(3)})
    other = write(tmp_path / "m", {"m.md": "alpha"})
    add(kb, root)
    add(kb, other, "more")
    before = visible(kb)
    root.rename(tmp_path / "away")
    (other / "m.md").write_text("alpha edited")
    for _ in range(3):
        result = run(kb, "sync")
        assert [codes(c, "errors") for c in result["collections"]] == [[("", "PATH_NOT_FOUND")], []]
        assert str(root) in result["collections"][0]["errors"][0]["message"]
    assert found(kb) == ["more/m.md", "notes/0.md", "notes/1.md", "notes/2.md"] and found(kb, "edited") == ["more/m.md"]
    assert not run(kb, "status")["healthy"]
    root.write_text("a file stands where the folder was")
    assert codes(run(kb, "sync")["collections"][0], "errors") == [("", "PATH_NOT_FOUND")]
    root.unlink()
    (tmp_path / "away").rename(root)
    assert sync(kb, collection="notes")["counts"] == {"Unchanged": 3}
    assert {k: v for k, v in visible(kb).items() if k[0] == "notes"} == {k: v for k, v in before.items() if k[0] == "notes"}


def test_held_back():
    def folder(name, count):
        return {f"{name}{i}.md": None for i in range(count)}
    for gone, left, active, expected in [
        (folder("", 20), [], 20, True), (folder("", 19), [], 19, False),                # at least twenty
        (folder("d/", 20), ["a.md"], 21, True), (folder("d/", 20), folder("e/", 20), 40, False),        # more than half
        (folder("d/", 21), folder("e/", 20), 41, True),
        (folder("", 30), ["a.md"], 31, False),                                          # the folder still holds a file
        (folder("d/", 30), ["d/left.md"], 31, False), (folder("d/", 30), ["d/e/left.md"], 31, True),
        (folder("d/", 30), ["left.md"], 31, True),
        (folder("d/", 10) | folder("e/", 10), ["a.md"], 21, True),
        (folder("d/", 19) | folder("e/", 5), ["e/left.md"], 25, False),                 # only d has no file left
        ({}, [], 0, False), ({}, ["a.md"], 1, False),
    ]:
        assert gno.held_back(gone, set(left), active) is expected, (len(gone), left, active)


def test_a_mass_delete_is_held_once(kb, tmp_path):
    root = write(tmp_path / "n", {f"sub/{i}.md": f"alpha {i}" for i in range(30)} | {"top.md": "alpha"})
    add(kb, root)
    (root / "sub").rename(tmp_path / "away")
    report = sync(kb)
    assert report["counts"] == {"Unchanged": 1} and codes(report) == [("", "MASS_DELETE_HELD")] and len(found(kb)) == 31
    assert "30 documents" in report["warnings"][0]["message"]
    (tmp_path / "away").rename(root / "sub")
    assert sync(kb)["counts"] == {"Unchanged": 31}
    (root / "sub").rename(tmp_path / "away")
    assert codes(sync(kb)) == [("", "MASS_DELETE_HELD")] and len(found(kb)) == 31     # they were back: held once more
    report = sync(kb)
    assert report["counts"] == {"Unchanged": 1, "MarkedInactive": 30} and codes(report) == [] and found(kb) == ["notes/top.md"]
    like_new(kb, tmp_path)
    (tmp_path / "away").rename(root / "sub")
    with opened(root) as read:
        assert sync(kb)["counts"] == {"Added": 30, "Unchanged": 1}
    assert read == [] and len(found(kb)) == 31
    shutil.rmtree(root / "sub")
    report = sync(kb, allowMassDelete=True)
    assert report["counts"] == {"Unchanged": 1, "MarkedInactive": 30} and codes(report) == []
    like_new(kb, tmp_path)


def test_an_emptied_root_is_held_too_and_editing_goes_on(kb, tmp_path):
    root = write(tmp_path / "n", {f"{i}.md": f"alpha {i}" for i in range(25)})
    add(kb, root)
    shutil.rmtree(root)
    root.mkdir()
    assert ("", "MASS_DELETE_HELD") in codes(sync(kb)) and len(found(kb)) == 25
    write(root, {"new.md": "alpha"})        # a file came back to the folder, so the others were deleted on purpose
    assert sync(kb)["counts"] == {"Added": 1, "MarkedInactive": 25} and found(kb) == ["notes/new.md"]


def test_deleting_in_a_living_folder_is_taken_at_once(kb, tmp_path):
    root = write(tmp_path / "n", {f"{i}.md": f"alpha {i}" for i in range(40)})
    add(kb, root)
    for i in range(39):
        (root / f"{i}.md").unlink()
    report = sync(kb)
    assert report["counts"] == {"Unchanged": 1, "MarkedInactive": 39} and codes(report) == []


# ---- one text, several documents -----------------------------------------------------------------

def test_twins_share_a_mirror(kb, tmp_path):
    root = write(tmp_path / "n", {"a.md": "# One\n\nalpha #t", "b/a.md": "# One\n\nalpha #t", "c.md": "other"})
    add(kb, root)

    def mirrors():
        return kb.wdb.execute("SELECT count(*) FROM mirrors").fetchone()[0]
    assert mirrors() == 2 and found(kb) == ["notes/a.md", "notes/b/a.md"]
    got = run(kb, "get", ref=run(kb, "get", ref="notes/a.md")["docid"])
    assert got["uri"] == "gno://notes/a.md" and got["duplicates"] == ["gno://notes/b/a.md"]
    (root / "a.md").write_text("# One\n\nalpha beta")
    sync(kb)
    assert mirrors() == 3 and found(kb, "beta") == ["notes/a.md"] and found(kb) == ["notes/a.md", "notes/b/a.md"]
    (root / "a.md").unlink()
    sync(kb)
    assert found(kb) == ["notes/b/a.md"]
    run(kb, "cleanup")
    assert mirrors() == 2
    like_new(kb, tmp_path)


@pytest.mark.parametrize("first", ["a.md", "b.txt", "c.py"])
def test_one_text_under_three_extensions(kb, tmp_path, first):
    text = "# The heading\n\ndef alpha():\n    return 1\n"
    root = write(tmp_path / "n", {first: text})
    add(kb, root)                           # the order in which they are indexed must not matter
    write(root, {"a.md": text, "b.txt": text, "c.py": text})
    sync(kb)
    like_new(kb, tmp_path)
    assert kb.wdb.execute("SELECT count(*) FROM mirrors").fetchone() == (1,)


def test_every_chunk_of_twins_can_be_embedded(kb, tmp_path):
    root = write(tmp_path / "n", {"a.txt": "something else"})
    add(kb, root)
    write(root, {"b.md": "# The heading\n\nalpha beta gamma\n"})
    sync(kb)
    write(root, {"a.txt": "# The heading\n\nalpha beta gamma\n"})        # a text file: its title is its name
    sync(kb)
    run(kb, "embed")
    assert run(kb, "status")["embeddingBacklog"] == 0


def test_two_collections_with_the_same_file(kb, tmp_path):
    root = write(tmp_path / "n", {"sub/a.md": "alpha one", "b.md": "alpha"})
    add(kb, root, "all")
    add(kb, root / "sub", "part")
    assert found(kb) == ["all/b.md", "all/sub/a.md", "part/a.md"]
    (root / "sub" / "a.md").write_text("alpha two")
    run(kb, "sync", collection="part")
    assert found(kb, "two") == ["part/a.md"] and found(kb, "one") == ["all/sub/a.md"]
    run(kb, "sync")
    assert found(kb, "two") == ["all/sub/a.md", "part/a.md"]
    like_new(kb, tmp_path)
    run(kb, "remove_collection", collection="all")
    assert found(kb) == ["part/a.md"]
    run(kb, "cleanup")
    like_new(kb, tmp_path)
    assert found(kb, "two") == ["part/a.md"]


# ---- the index is what a new one would be --------------------------------------------------------

PATHS = st.sampled_from(["a.md", "b.md", "b.txt", "c.py", "d/a.md", "d/e/f.md", "d/g.txt"])
TEXTS = st.sampled_from(["", "\n", "alpha", "# Title\n\nalpha #tag\n",
                         "---\ntitle: From the head\ntags: [x, y]\n---\n# Title\n\nsee [[a]] and [b](b.md)\n",
                         "日本語の文書です。検索できます。\n", "def alpha():\n    return 1\n\n\n" * 40, "word " * 900,
                         "# Title\r\n\r\nalpha #tag\r\n"])
DEEDS = st.one_of(
    st.tuples(st.just("write"), PATHS, TEXTS), st.tuples(st.just("write"), PATHS, TEXTS), st.tuples(st.just("move"), PATHS, PATHS),
    st.tuples(st.just("delete"), PATHS), st.tuples(st.just("touch"), PATHS),
    st.tuples(st.just("drop folder"), st.sampled_from(["d", "d/e"])),
    st.tuples(st.just("sync"), st.booleans()), st.tuples(st.just("sync"), st.just(False)), st.tuples(st.just("remove and add")),
    st.tuples(st.just("rename")), st.tuples(st.just("cleanup")))
CLOCK = itertools.count(1_700_000_000_000_000_000, 1_000_000_007)


@settings(max_examples=50, deadline=None)
@given(st.lists(DEEDS, min_size=3, max_size=14))
def test_after_any_walk_the_index_is_what_a_new_one_would_be(deeds):
    with tempfile.TemporaryDirectory() as place:
        root, kb, name = Path(place, "n"), new_kb(Path(place, "gno")), "notes"
        root.mkdir()
        try:
            add(kb, root)
            for deed, *what in deeds:
                path = root / what[0] if what and isinstance(what[0], str) else root
                if deed == "write":
                    write(root, {what[0]: what[1]})
                    os.utime(path, ns=(0, next(CLOCK)))     # two edits within one tick of the clock must differ
                elif deed == "move" and path.exists() and what[0] != what[1]:
                    (root / what[1]).parent.mkdir(parents=True, exist_ok=True)
                    path.replace(root / what[1])
                elif deed == "delete":
                    path.unlink(missing_ok=True)
                elif deed == "touch" and path.exists():
                    os.utime(path, ns=(0, next(CLOCK)))
                elif deed == "drop folder":
                    shutil.rmtree(path, ignore_errors=True)
                elif deed == "sync":
                    sync(kb, full=what[0])
                elif deed == "remove and add":
                    run(kb, "remove_collection", collection=name)
                    add(kb, root, name)
                elif deed == "rename":
                    old, name = name, "tones" if name == "notes" else "notes"
                    run(kb, "collection_rename", collection=old, name=name)
                elif deed == "cleanup":
                    run(kb, "cleanup")
                sound(kb)
            sync(kb)
            like_new(kb, Path(place))
            assert set(sync(kb)["counts"]) <= {"Unchanged"}
        finally:
            kb.close()


def test_cancelled_it_keeps_what_was_done_and_goes_on_later(kb, tmp_path, monkeypatch):
    monkeypatch.setattr(gno, "BATCH_DOCS", 10)
    root = write(tmp_path / "n", {f"{i:02}.md": f"alpha {i}" for i in range(50)})
    run(kb, "init", path=str(root), name="notes")
    progress = gno.Progress(lambda p: p.cancelled.set() if p.current == 33 else None)
    assert failure(gno.call, kb, "sync", {}, inline=progress).code == "CANCELLED"
    sound(kb)
    assert 10 <= len(found(kb)) < 50
    with opened(root) as read:
        run(kb, "sync")
    assert len(found(kb)) == 50 and len(read) < 50
    like_new(kb, tmp_path)


def test_the_keyword_index_can_be_built_anew(kb, tmp_path):
    root = write(tmp_path / "n", {"a.md": "# Title\n\nalpha", "b.md": "日本語の文書", "c.md": "alpha"})
    add(kb, root)
    (root / "c.md").unlink()
    sync(kb)
    before = [run(kb, "search", query=q)["results"] for q in ("alpha", "title", "文書")]
    assert [len(hits) for hits in before] == [1, 1, 1]
    with gno.transaction(kb.wdb):           # a document that the index has forgotten
        gno.unlist(kb.wdb, [1])
    assert not run(kb, "doctor")["healthy"] and not run(kb, "status")["healthy"]
    run(kb, "index", rebuild=True, noEmbed=True)
    like_new(kb, tmp_path)
    with gno.transaction(kb.wdb):
        gno.unlist(kb.wdb, [1])
    assert run(kb, "doctor", fix=True)["healthy"] and run(kb, "status")["healthy"]
    assert [run(kb, "search", query=q)["results"] for q in ("alpha", "title", "文書")] == before


def test_killed_at_any_moment_it_goes_on(tmp_path):
    base = tmp_path / "gno"
    root = write(tmp_path / "n", {f"{i % 9}/{i}.md": f"# Note {i}\n\nalpha word{i} #tag{i}\n\n{f'text of {i} ' * 150}" for i in range(900)})
    assert cli(base, "init", str(root)).returncode == 0
    for delay in (0.15, 0.25, 0.3, 0.35, 0.45):
        child = subprocess.Popen([sys.executable, str(ROOT / "gno.py"), "index", "--no-embed"], env=environment(base), cwd=base,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(delay)
        child.kill()
        child.wait()
        kb = new_kb(base)
        if os.path.exists(kb.db_path):
            sound(kb)
        kb.close()
    kb = new_kb(base)
    run(kb, "sync")
    like_new(kb, tmp_path)
    kb.close()


# ---- read anew when the rules change -------------------------------------------------------------

def test_new_rules_read_every_file_once(kb, tmp_path, monkeypatch):
    root = write(tmp_path / "n", {"a.md": "alpha", "work/b.md": "---\ntype: Recipe\n---\nalpha"})
    add(kb, root)
    path = Path(kb.config_path)
    for change in (lambda: monkeypatch.setattr(gno, "EXTRACTOR", "next"), lambda: monkeypatch.setattr(gno, "CHUNK_RULES", "other"),
                   lambda: path.write_text(path.read_text() + "contentTypes: [{id: recipe, prefixes: []}, {id: job, prefixes: [work/]}]\n"),
                   lambda: path.write_text(path.read_text().replace("- name: notes", "- languageHint: da\n    name: notes"))):
        change()
        with opened(root) as read:
            assert sync(kb)["counts"] == {"Updated": 2}
        assert read == ["a.md", "work/b.md"]
        assert sync(kb)["counts"] == {"Unchanged": 2}
        like_new(kb, tmp_path)
    assert run(kb, "search", query="alpha", lang="da")["meta"]["totalResults"] == 2
    assert run(kb, "search", query="alpha", categories=["recipe"])["results"][0]["contentType"] == "recipe"


def test_new_rules_reach_a_folder_that_was_away(kb, tmp_path, monkeypatch):
    root = write(tmp_path / "n", {"a.md": "alpha", "b.md": "alpha"})
    add(kb, root)
    root.rename(tmp_path / "away")
    monkeypatch.setattr(gno, "EXTRACTOR", "next")
    assert codes(sync(kb), "errors") == [("", "PATH_NOT_FOUND")]
    (tmp_path / "away").rename(root)
    with opened(root) as read:
        sync(kb)
    assert read == ["a.md", "b.md"]


# ---- before a sync: git pull, updateCmd ----------------------------------------------------------

def git(folder: Path, *words: str):
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    "A clone whose origin is one commit ahead: b.md is new there."
    if not shutil.which("git"):
        pytest.skip("no git here")
    for name, value in {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_AUTHOR_NAME": "a",
                        "GIT_AUTHOR_EMAIL": "a@example.org", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@example.org"}.items():
        monkeypatch.setenv(name, value)
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    write(origin, {"a.md": "alpha"})
    git(origin, "init", "-q")
    git(origin, "add", ".")
    git(origin, "commit", "-qm", "one")
    git(tmp_path, "clone", "-q", str(origin), str(clone))
    write(origin, {"b.md": "alpha", ".gitattributes": "*.md filter=x\n"})
    git(origin, "add", ".")
    git(origin, "commit", "-qm", "two")
    return clone


def test_git_pull_brings_new_files(kb, clone):
    (report,) = add(kb, clone)["collections"]
    assert report["filesAdded"] == 1
    report = sync(kb, gitPull=True)
    assert report["counts"] == {"Added": 1, "Unchanged": 1} and codes(report) == []
    assert "Fast-forward" in report["output"] and "b.md" in report["output"]
    assert "up to date" in sync(kb, gitPull=True)["output"] and "output" not in sync(kb)
    assert "\n  | Already up to date." in gno.work_text(run(kb, "sync", gitPull=True))


def test_git_pull_elsewhere_is_a_warning(kb, tmp_path, clone):
    root = write(tmp_path / "n", {"a.md": "alpha"})
    (report,) = add(kb, root, gitPull=True)["collections"]
    assert codes(report) == [("", "GIT_PULL_FAILED")] and report["filesAdded"] == 1
    root.rename(tmp_path / "away")
    report = sync(kb, gitPull=True)
    assert codes(report, "errors") == [("", "PATH_NOT_FOUND")] and found(kb) == ["notes/a.md"]
    run(kb, "remove_collection", collection="notes")
    add(kb, clone, "clone")
    write(clone, {"b.md": "in the way"})    # git will not overwrite it, and neither do we
    report = sync(kb, gitPull=True)
    assert codes(report) == [("", "GIT_PULL_FAILED")] and (clone / "b.md").read_text() == "in the way"


COMMANDS = {
    # what the repository's own configuration says; {run} is a program; whether the pull can still work
    "fsmonitor": ({"core.fsmonitor": "{run}"}, True),
    "hooks": ({}, True),
    "hooks elsewhere": ({"core.hooksPath": "{hooks}"}, True),
    "included": ({"include.path": "{included}"}, True),
    "ssh": ({"remote.origin.url": "ssh://example.invalid/x", "core.sshCommand": "{run}"}, False),
    "proxy": ({"remote.origin.url": "git://example.invalid/x", "core.gitProxy": "{run}"}, False),
    "uploadpack": ({"remote.origin.uploadpack": "{run}"}, False),
    "transport": ({"remote.origin.url": "ext::{run}", "protocol.ext.allow": "always"}, False),
    "transport by another name": ({"url.ext::{run} .insteadOf": "{origin}", "protocol.ext.allow": "always"}, False),
    "smudge": ({"filter.x.smudge": "{run}"}, False),
    "filter process": ({"filter.x.process": "{run}"}, False),
    "alternates": ({"core.alternateRefsCommand": "{run}"}, False),
}


@pytest.mark.skipif(os.name == "nt", reason="shell scripts")
@pytest.mark.parametrize("name", COMMANDS)
def test_git_pull_runs_nothing_that_the_repository_names(kb, tmp_path, clone, name):
    entries, works = COMMANDS[name]
    trace, hooks = tmp_path / "it-ran", tmp_path / "hooks"
    script = f"#!/bin/sh\necho \"$0 $*\" >> {trace}\nexit 1\n"
    for path in ("run", "hooks/post-merge", "hooks/post-checkout", "hooks/reference-transaction", "hooks/pre-auto-gc"):
        write(tmp_path, {path: script})
        (tmp_path / path).chmod(0o755)
    write(tmp_path, {"included": f"[core]\n\tfsmonitor = {tmp_path / 'run'}\n\thooksPath = {hooks}\n"})
    add(kb, clone)
    for key, value in entries.items():
        names = {"run": tmp_path / "run", "hooks": hooks, "included": tmp_path / "included", "origin": tmp_path / "origin"}
        git(clone, "config", key.format(**names), value.format(**names))
    if name == "hooks":
        shutil.copytree(hooks, clone / ".git" / "hooks", dirs_exist_ok=True)
    if name == "alternates":
        write(clone, {".git/objects/info/alternates": str(tmp_path / "origin" / ".git" / "objects") + "\n"})
    report = sync(kb, gitPull=True)
    assert not trace.exists(), f"{trace.read_text()} ran"
    assert report["counts"] == ({"Added": 1, "Unchanged": 1} if works or (clone / "b.md").exists() else {"Unchanged": 1})
    assert bool(codes(report)) is not (clone / "b.md").exists()


def test_update_cmd_runs_only_where_a_person_asked_for_it(kb, tmp_path, client):
    root = write(tmp_path / "n", {"a.md": "alpha"})
    add(kb, root)
    path = Path(kb.config_path)
    path.write_text(path.read_text().replace("- name: notes", "- updateCmd: echo alpha >> made.md\n    name: notes"))
    base = tmp_path / "gno"
    for words in (["sync"], ["index", "--no-embed"]):
        assert cli(base, *words).returncode == 0 and not (root / "made.md").exists(), words
    server = client("--enable-write")
    assert not server.call("gno_sync", runUpdateCmd=True)["structuredContent"]["options"]["runUpdateCmd"]      # the effective options
    while server.call("gno_list_jobs")["structuredContent"]["active"]:
        time.sleep(0.01)
    for name, arguments in [("gno_sync", {"runUpdateCmd": True}), ("gno_sync", {}), ("gno_index", {})]:
        job = server.job(name, **arguments)
        (report,) = (job.get("result") or job["typedResult"]["value"]["sync"])["collections"]
        assert not (root / "made.md").exists(), name
        assert codes(report) == ([("", "UPDATE_CMD_SKIPPED")] if arguments else [])
    for n, words in enumerate((["update"], ["sync", "--run-update-cmd"]), 1):
        assert cli(base, *words).returncode == 0 and (root / "made.md").read_text() == "alpha\n" * n, words
    assert "notes/made.md" in found(kb)
    path.write_text(path.read_text().replace("echo alpha >> made.md", "echo it broke >&2; exit 3"))
    write(root, {"late.md": "alpha"})
    done = cli(base, "update", "--json")
    (report,) = json.loads(done.stdout)["collections"]
    assert codes(report) == [("", "UPDATE_CMD_FAILED")] and "it broke" in report["warnings"][0]["message"] and report["filesAdded"] == 1


@pytest.mark.skipif(os.name == "nt", reason="a shell command")
@pytest.mark.parametrize("how", ["it takes too long", "the sync is cancelled"])
def test_an_update_cmd_ends_with_all_that_it_started(kb, tmp_path, monkeypatch, how):
    root = write(tmp_path / "n", {"a.md": "alpha"})
    add(kb, root)
    path = Path(kb.config_path)
    command = "echo begun; (sleep 60; touch late.md) & echo $! > pid; wait"
    path.write_text(path.read_text().replace("- name: notes", f"- updateCmd: '{command}'\n    name: notes"))
    progress = gno.Progress()
    monkeypatch.setattr(gno, "UPDATE_S", 0.5 if how == "it takes too long" else 600)
    timer = threading.Timer(0.5, progress.cancelled.set)
    begun = time.monotonic()
    if how == "it takes too long":
        (report,) = gno.call(kb, "update", {}, inline=progress)["collections"]
        assert codes(report) == [("", "UPDATE_CMD_FAILED")] and "longer than 0.5 s" in report["warnings"][0]["message"]
        assert report["filesUnchanged"] == 1                                  # the sync goes on
    else:
        timer.start()
        assert failure(gno.call, kb, "update", {}, inline=progress).code == "CANCELLED"
    assert time.monotonic() - begun < 30
    child, until = (root / "pid").read_text().strip(), time.monotonic() + 10
    while (state := subprocess.run(["ps", "-o", "stat=", "-p", child], capture_output=True, text=True).stdout.strip()) and state[0] != "Z":
        assert time.monotonic() < until, state


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_a_pull_that_hangs_is_a_warning(kb, tmp_path, monkeypatch):
    write(tmp_path / "bin", {"git": "#!/bin/sh\n[ \"$1\" = config ] || sleep 60\n"})
    (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(gno, "GIT_S", 1)
    (report,) = add(kb, write(tmp_path / "n", {"a.md": "alpha"}), gitPull=True)["collections"]
    assert codes(report) == [("", "GIT_PULL_FAILED")] and report["filesAdded"] == 1


def test_a_second_edit_within_a_tick_of_the_clock_is_seen(kb, tmp_path, monkeypatch):
    root, read, walk = write(tmp_path / "n", {"a.md": "first"}), gno.read_source, gno.walk
    add(kb, root)

    def coarse(*arguments, **options):                                        # file times as older kernels keep them
        for e in walk(*arguments, **options):
            yield e._replace(mtime_ns=e.mtime_ns // 10 ** 7 * 10 ** 7, ctime_ns=e.ctime_ns // 10 ** 7 * 10 ** 7)
    monkeypatch.setattr(gno, "walk", coarse)

    def edited_at_once(kb, c, entry, *rest):
        out = read(kb, c, entry, *rest)
        (root / "a.md").write_text(f"late{n:03}")                             # the same size, at once
        return out
    for n in range(10):
        monkeypatch.setattr(gno, "read_source", edited_at_once)
        (root / "a.md").write_text(f"soon{n:03}")
        sync(kb)
        monkeypatch.setattr(gno, "read_source", read)
        sync(kb)
        assert found(kb, f"late{n:03}") == ["notes/a.md"], n


# ---- what a document is --------------------------------------------------------------------------

LANGUAGES = [
    ("ja", "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。"), ("ja", "カタカナ"),
    ("zh", "学而时习之，不亦说乎？有朋自远方来，不亦乐乎？"), ("zh", "學而時習之"),
    ("ko", "나랏말싸미 듕귁에 달아 문자와로 서르 사맛디 아니할쎄"), ("th", "กินข้าวหรือยัง วันนี้อากาศดีมาก"),
    ("ru", "Все счастливые семьи похожи друг на друга"), ("ar", "كان يا ما كان في قديم الزمان"),
    ("el", "Μῆνιν ἄειδε θεὰ Πηληϊάδεω Ἀχιλῆος"),
    ("he", "בראשית ברא אלהים את השמים ואת הארץ"), ("hi", "सभी मनुष्यों को गौरव और अधिकारों के मामले में"),
    ("en", "It was the best of times and it was the worst of times, in the age of wisdom"),
    ("de", "Als Gregor Samsa eines Morgens aus unruhigen Träumen erwachte, fand er sich und das ist nicht gut"),
    ("fr", "Longtemps je me suis couché de bonne heure et les yeux se fermaient dans la nuit pour une heure"),
    ("it", "Nel mezzo del cammin di nostra vita mi ritrovai per una selva oscura che la via era smarrita"),
    ("es", "En un lugar de la Mancha de cuyo nombre no quiero acordarme vivía un hidalgo con los suyos"),
    ("nl", "Ik ben makelaar in koffie en woon op de Lauriergracht en het is niet mijn gewoonte dat te doen"),
    ("", ""), ("", "\n\n"), ("", "Hello the and"), ("", "日"), ("", "12 34 56 78 90 12 34 56 78 90 12"),
    ("", "p = q + r; t = v * w; x = z / f; g = h % k; j = l"),
    ("en", "The word for it in Japanese is 猫 and this is the only one of them in the whole of this long line of text"),
    ("en", "It is the 😀 of the 😀 and that is all there is to it, with no end in sight for this 😀"),
    ("zh", "中文 mixed with a few English words 中文中文中文中文"),
]


def test_guess_language():
    for expected, text in LANGUAGES:
        assert gno.guess_language(text) == expected, text


def test_content_types():
    rules = [{"id": "Recipe", "prefixes": ["food/", "notes/cook"]}, {"id": "cake", "prefixes": ["food/sweet/"]}, {"id": "empty"}, "no rule",
             {"prefixes": ["x/"]}]
    for path, declared, expected in [
        ("a.md", "", "prose"), ("food/a.md", "", "Recipe"), ("food/sweet/a.md", "", "cake"), ("cooking/a.md", "", "Recipe"),
        ("seafood/a.md", "", "prose"),
        ("a.md", "cake", "cake"), ("food/sweet/a.md", "recipe", "Recipe"), ("a.md", "empty", "empty"), ("a.md", "unknown", "prose"),
        ("x/a.md", "", "prose"), ("a.py", "", "code"), ("food/a.py", "", "Recipe"), ("tests/spec.py", "", "code"),
        ("Meetings/a.md", "", "meeting"), ("weekly-standup.md", "", "meeting"), ("docs/rfc-7.md", "", "spec"),
        ("meeting-spec.md", "", "meeting"),
        ("Journal/2024.md", "", "notes"), ("my notes.md", "", "notes"), ("spec notes.md", "", "spec"),
    ]:
        assert gno.content_type_of(rules, "notes", path, os.path.splitext(path)[1], declared) == expected, (path, declared)
    assert gno.content_type_of([], "notes", "a.md", ".md", "cake") == "prose"
