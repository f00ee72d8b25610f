"""Writing notes: where may be written, front matter edited in place, capture, links kept alive by rename and move, kill -9."""
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jsonschema
import pytest
from conftest import ROOT, Client, add, cli, environment, new_kb, run, write
from hypothesis import given, settings
from hypothesis import strategies as st

import gno


def refused(code, kb, tool, /, **arguments):
    "The call fails with this code -> its message."
    with pytest.raises(gno.GnoError) as e:
        run(kb, tool, **arguments)
    assert e.value.code in code.split(), (e.value.code, e.value.message)
    return e.value.message


def tree(root: Path) -> dict[str, bytes]:
    "Every file below root and its bytes."
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


# ---- paths from outside --------------------------------------------------------------------------

FENCED = {                  # path: what it means in a collection with folders Projects, cafe + U+0301, "ab:c" and a link `out` out of it
    "x.md": "x.md", "./a//b.md": "a/b.md", "a\\b.md": "a/b.md", "": "", ".": "", "x.md/": "x.md", "a b (c)#.md": "a b (c)#.md",
    "projects/x.md": "Projects/x.md", "PROJECTS": "PROJECTS", "caf\u00e9/x.md": "cafe\u0301/x.md", "new/cafe\u0301.md": "new/caf\u00e9.md",
    "%2e%2e/x.md": "%2e%2e/x.md", "ab:c/x.md": "ab:c/x.md", "con-tent.md": "con-tent.md", "\u65e5\u672c.md": "\u65e5\u672c.md",
    **dict.fromkeys([
        "../x.md", "a/../../x.md", "a/../b.md", "..\\x.md", "/abs.md", "\\abs.md", "//srv/x.md", "C:\\x.md", "c:x.md", "~/x.md", "~",
        "a\0.md", "new\nline.md", "a\x7f.md", "out/x.md", "out", ".git/hooks/x", "a/.GIT/x.md", ".g\u200cit/x.md", "git~1/x.md", ".ssh/x",
        ".obsidian/x.md", ".env", "a/.env.local", "node_modules/x.md", "Node_Modules/x.md", "CON.md", "a/aux", "lpt1.txt", "a:c/x.md", "ab:d/x.md",
        "what?.md", 'a"b.md', "a|b.md", "a<b>.md", "dot./x.md", "blank /x.md", " x.md", "trail.md ", "x" * 251,
        "\u65e5" * 90 + ".md"])}


@pytest.mark.parametrize("path", FENCED)
def test_fence(kb, tmp_path, path):
    root = write(tmp_path / "notes", {"Projects/a.md": "a", "cafe\u0301/b.md": "b", "ab:c/c.md": "c"})
    write(tmp_path / "outside", {"secret.md": "s"})
    os.symlink("../outside", root / "out")
    add(kb, root)
    if FENCED[path] is not None:
        assert gno.fence(kb, "NOTES", path) == FENCED[path]
        return
    with pytest.raises(gno.GnoError) as e:
        gno.fence(kb, "notes", path)
    assert e.value.code == "INVALID_PATH"


def test_nothing_is_written_outside_or_in_protected_places(kb, tmp_path):
    root = write(tmp_path / "notes", {"in.md": "inside"})
    write(tmp_path, {"outside/secret.md": "s", "notes-evil/evil.md": "s"})
    os.symlink("../outside", root / "out")
    os.symlink("../outside/fresh.md", root / "dangling.md")
    add(kb, root)
    before = tree(tmp_path / "outside") | tree(tmp_path / "notes-evil")
    for path in ("../x.md", "/abs.md", "out/x.md", ".git/x.md", "dangling.md"):
        refused("INVALID_PATH", kb, "capture", collection="notes", path=path, content="t")
        refused("INVALID_PATH", kb, "capture", collection="notes", path=path, content="t", overwrite=True)
    refused("INVALID_PATH", kb, "capture", collection="notes", path="Dangling.md", content="t", overwrite=True)   # one file on many systems
    for parent in ("../", "a/../..", "out", "/"):
        refused("INVALID_PATH", kb, "create_folder", collection="notes", name="fresh", parentPath=parent)
    for name in ("..", "a/b", "a\\b", "."):
        refused("INVALID_PATH", kb, "create_folder", collection="notes", name=name)
        refused("INVALID_PATH", kb, "rename_note", ref="notes/in.md", name=name)
    refused("INVALID_INPUT", kb, "rename_note", ref="notes/in.md", name="   ")
    refused("INVALID_PATH", kb, "move_note", ref="notes/in.md", folderPath="../outside")
    refused("INVALID_PATH", kb, "duplicate_note", ref="notes/in.md", folderPath="out")
    assert tree(tmp_path / "outside") | tree(tmp_path / "notes-evil") == before
    assert sorted(os.listdir(root)) == ["dangling.md", "in.md", "out"]


@pytest.mark.parametrize("name, expected", [
    ("new", "new.md"), ("v1.2 notes", "v1.2 notes.md"), ("x.md", "x.md"), ("x.TXT", "x.TXT"), ("about setup.py", "about setup.py.md")])
def test_note_name(name, expected):
    assert gno.note_name(name, ".md") == expected


# ---- front matter --------------------------------------------------------------------------------

EDITS = [   # front matter lines before, changes, after; all else stays
    ("title: T\ntags: [a, b]   # trailing", {"tags": ["c"]}, "title: T\ntags: [a, b, c]   # trailing"),
    ("tags: []", {"tags": ["c", "yes"]}, 'tags: [c, "yes"]'),
    ("tags:\n  - a\n  - b\n# end\nx: 1", {"tags": ["c"]}, "tags:\n  - a\n  - b\n  - c\n# end\nx: 1"),
    ("tags:\n- a\nx: 1", {"tags": ["c"]}, "tags:\n- a\n- c\nx: 1"),
    ("tags: a, b # c", {"tags": ["c"]}, "tags: [a, b, c] # c"),
    ("tags:\nx: 1", {"tags": ["c"]}, "tags: [c]\nx: 1"),
    ("tags: one", {"tags": ["c"]}, "tags: [one, c]"),
    ("# keep\nzip: \"00123\"\nflag: yes\nlong: >-\n  folded\n  text", {"tags": ["c"]},
     "# keep\nzip: \"00123\"\nflag: yes\nlong: >-\n  folded\n  text\ntags:\n  - \"c\""),
    ("date: 2026-06-29", {"title": "A \"b\": c", "status": "open"}, 'title: "A \\"b\\": c"\ndate: 2026-06-29\nstatus: "open"'),
    ("source: old\nx: 1", {"source": {"title": "old", "kind": "web"}}, 'source:\n  title: "old"\n  kind: "web"\nx: 1'),
    ("source:\n  a: 1\n  # note\n  b: 2\nx: &anchor 1\ny: *anchor", {"source": {"kind": "web"}}, 'source:\n  kind: "web"\nx: &anchor 1\ny: *anchor'),
]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("before, changes, after", EDITS)
def test_front_matter_is_edited_in_place(before, changes, after, bom, newline):
    def note(head):
        return bom + f"--- \n{head}\n---\n\nBody  \nof it\n\n\n".replace("\n", newline)
    assert gno.set_front_matter(note(before), changes) == note(after)


def test_a_note_without_front_matter_gets_some():
    assert gno.set_front_matter("Body", {"title": "T"}) == '---\ntitle: "T"\n---\n\nBody'
    assert gno.set_front_matter("\ufeffBody\r\n", {"tags": ["a"]}) == '\ufeff---\r\ntags:\r\n  - "a"\r\n---\r\n\r\nBody\r\n'
    prose = "---\nJust prose\n---\nBody"
    assert gno.set_front_matter(prose, {"title": "T"}) == '---\ntitle: "T"\n---\n\n' + prose
    assert gno.set_front_matter("---\n---\nBody", {"title": "T"}) == '---\ntitle: "T"\n---\nBody'


@pytest.mark.parametrize("text, said", [
    ("---\ntitle: a: b\n---\nx", "line 2"), ("---\ntitle: a\n\nno end", "no closing"), ("---\na: [b\n---\n", "line"),
    ("---\n{a: 1}\n---\nx", "unusual"), ("---\ntags: {a: 1}\n---\nx", "tags is not a list")])
def test_malformed_front_matter_is_refused_with_the_reason(text, said):
    with pytest.raises(gno.GnoError) as e:
        gno.set_front_matter(text, {"tags": ["c"]})
    assert e.value.code == "INVALID_INPUT" and said in e.value.message


# ---- capture -------------------------------------------------------------------------------------

@pytest.fixture
def notes(kb, tmp_path):
    "A collection `notes` with one note."
    root = write(tmp_path / "notes", {"site-roadmap.md": "# Site Roadmap\n\nold\n"})
    add(kb, root)
    return root


def test_a_captured_note_is_found_at_once_and_its_receipt_conforms(kb, notes):
    source = {"kind": "web", "url": "https://example.test/a", "observedAt": "2024-05-01 10:00", "author": "Ann: O'Hara"}
    got = run(kb, "capture", collection="NOTES", title="Tide Tables: 2025", content="High mango water [[site-roadmap]]", tags=["Harbour/North"], source=source)
    assert got["relPath"] == "tide-tables-2025.md" and got["collection"] == "notes" and got["created"] and got["sync"] == {"status": "completed"}
    assert got["uri"] == "gno://notes/tide-tables-2025.md" and got["absPath"] == str(notes / got["relPath"])
    assert got["contentHash"] == gno.sha256("High mango water [[site-roadmap]]") and got["tags"] == ["harbour/north"]
    jsonschema.validate(got, gno.output_schema(gno.TOOLS["capture"]))
    lines = (notes / got["relPath"]).read_text().split("\n")
    assert lines == ["---", 'title: "Tide Tables: 2025"', "tags:", '  - "harbour/north"', "source:", '  kind: "web"',
                     f'  capturedAt: "{got["source"]["capturedAt"]}"', '  url: "https://example.test/a"', '''  author: "Ann: O'Hara"''',
                     '  observedAt: "2024-05-01T10:00:00.000Z"', "---", "", "High mango water [[site-roadmap]]", ""]
    assert [h["uri"] for h in run(kb, "search", query="mango", tagsAll=["harbour/north"])["results"]] == [got["uri"]]
    assert gno.sha256((notes / got["relPath"]).read_bytes())[:8] == got["docid"][1:]
    assert run(kb, "sync")["totalFilesAdded"] == run(kb, "sync")["totalFilesUpdated"] == 0
    target = kb.db.execute("SELECT t.path FROM edges e JOIN documents d ON d.id = e.source JOIN documents t ON t.id = e.target WHERE d.path = ?",
                           [got["relPath"]]).fetchall()
    assert target == [("site-roadmap.md",)]


def test_the_same_capture_twice_opens_the_first(kb, notes):
    one = run(kb, "capture", collection="notes", content="a thought\r\n", source={"capturedAt": "2025-03-04T23:30:00-02:00"})
    assert one["relPath"] == f"inbox/2025-03-05/capture-{gno.sha256('a thought')[:12]}.md"
    before = tree(notes)
    two = run(kb, "capture", collection="notes", content="a thought", source={"capturedAt": "2025-03-05T05:00:00Z"})
    assert two["openedExisting"] and not two["created"] and two["docid"] == one["docid"] and two["collisionPolicyResult"] == "opened_existing"
    assert tree(notes) == before


def test_collision_policies(kb, notes):
    ask = {"collection": "notes", "title": "Site Roadmap", "content": "other"}
    assert "site-roadmap.md already exists" in refused("DUPLICATE", kb, "capture", **ask)
    refused("DUPLICATE", kb, "capture", collection="notes", path="SITE-roadmap", content="x")        # one file on many systems
    opened = run(kb, "capture", collisionPolicy="open_existing", **ask)
    assert opened["uri"].endswith("/site-roadmap.md") and opened["docid"]
    assert [run(kb, "capture", collisionPolicy="create_with_suffix", **ask)["relPath"] for _ in range(2)] == ["site-roadmap-2.md", "site-roadmap-3.md"]
    write(notes, {"unseen.md": "on disk alone"})
    refused("DUPLICATE", kb, "capture", collection="notes", path="unseen.md", content="x")
    assert run(kb, "capture", collection="notes", path="unseen.md", content="x", collisionPolicy="open_existing")["sync"]["status"] == "skipped"
    assert (notes / "site-roadmap.md").read_text() == "# Site Roadmap\n\nold\n" and (notes / "unseen.md").read_text() == "on disk alone"
    over = run(kb, "capture", overwrite=True, **ask)
    assert over["overwritten"] and not over["created"] and over["collisionPolicyResult"] == "overwritten"
    assert not run(kb, "search", query="old")["results"]


@pytest.mark.parametrize("preset, heading, front", [
    ("blank", ["# Ada"], {}), ("person", ["# Ada", "## Current Synthesis", "## Open Threads", "## Assessment", "## Timeline", "## Relationship"],
                               {"type": "person", "category": "person"}),
    ("decision-note", ["# Ada", "## Current Synthesis", "## Decision", "## Rationale", "## Consequences", "## Timeline"],
     {"category": "decision", "status": "proposed", "tags": ["decision"]})])
def test_presets_scaffold_a_note(kb, notes, preset, heading, front):
    run(kb, "capture", collection="notes", title="Ada", presetId=preset)
    text = (notes / "ada.md").read_text()
    meta, at, _ = gno.front_matter(text)
    assert [line for line in text[at:].split("\n") if line] == heading
    assert {k: v for k, v in meta.items() if k != "source"} == {"title": "Ada"} | front
    run(kb, "capture", collection="notes", title="Own", content="Own body", presetId=preset)
    assert (notes / "own.md").read_text().endswith("---\n\nOwn body\n")


@pytest.mark.parametrize("arguments, code", [
    ({"content": " \n"}, "INVALID_INPUT"), ({}, "INVALID_INPUT"), ({"content": "a\0b"}, "INVALID_INPUT"), ({"content": "a\x1bb"}, "INVALID_INPUT"),
    ({"content": "\u00e9" * 2**19 + "x"}, "INVALID_INPUT"), ({"content": "x", "tags": ["two words"]}, "INVALID_INPUT"),
    ({"content": "x", "source": {"uri": "abc"}}, "INVALID_INPUT"), ({"content": "x", "source": {"kind": "odd"}}, "INVALID_INPUT"),
    ({"content": "x", "source": {"observedAt": "soon"}}, "INVALID_INPUT"), ({"content": "x", "path": "a/.git/x.md"}, "INVALID_PATH"),
    ({"content": "x", "path": "x.pdf"}, "INVALID_INPUT"), ({"content": "x", "path": "a/b", "folderPath": "../c"}, "INVALID_PATH"),
    ({"content": "---\ntitle: a: b\n---\nx", "path": "broken.md"}, "INVALID_INPUT"), ({"content": "x", "collection": "nowhere"}, "NOT_FOUND")])
def test_capture_refuses(kb, notes, arguments, code):
    before = tree(notes)
    refused(code, kb, "capture", **{"collection": "notes"} | arguments)
    assert tree(notes) == before


def test_where_a_capture_goes(kb, notes):
    for arguments, rel in [
            ({"path": "a/b"}, "a/b.md"), ({"path": "b.txt"}, "b.txt"), ({"path": "c/d.md", "folderPath": "e"}, "e/d.md"),
            ({"path": "f/g.md", "folderPath": "f"}, "f/g.md"), ({"folderPath": "h", "content": "# My Plan\n\nx"}, "h/my-plan.md"),
            ({"title": "\u65e5\u672c \u00c9t\u00e9"}, "\u65e5\u672c-\u00e9t\u00e9.md"), ({"title": "v1.2", "folderPath": "h/"}, "h/v12.md")]:
        assert run(kb, "capture", **{"collection": "notes", "content": "x"} | arguments)["relPath"] == rel


def test_tags_of_a_text_file_are_the_users_and_move_with_it(kb, notes):
    run(kb, "capture", collection="notes", path="plain.txt", content="walnut", tags=["wood"])
    assert (notes / "plain.txt").read_bytes() == b"walnut\n"
    run(kb, "rename_note", ref="notes/plain.txt", name="nut")
    assert [h["uri"] for h in run(kb, "search", query="walnut", tagsAll=["wood"])["results"]] == ["gno://notes/nut.txt"]


def test_an_own_source_of_the_note_is_kept(kb, notes):
    run(kb, "capture", collection="notes", path="n.md", content="---\nTitle: Mine\nsource: a book\ncustom: 1\n---\nBody\n")
    text = (notes / "n.md").read_text()
    assert text.startswith('---\nTitle: Mine\nsource:\n  title: "a book"\n  kind: "direct"\n') and text.endswith("custom: 1\n---\nBody\n")


def test_the_receipt_tells_writing_from_indexing(kb, notes, monkeypatch):
    write(notes, {".git/HEAD": "ref: refs/heads/main\n", ".gitignore": "drafts/\n"})
    for path in ("drafts/x.md", "build/x.md"):
        left_out = run(kb, "capture", collection="notes", path=path, content="x")
        assert left_out["sync"]["status"] == "skipped" and left_out["docid"] == "" and left_out["created"] and (notes / path).exists()
    monkeypatch.setitem(gno.CONVERTERS, ".md", lambda data, warnings: (_ for _ in ()).throw(gno.GnoError("CORRUPT", "no way")))
    failed = run(kb, "capture", collection="notes", path="y.md", content="x")
    assert failed["sync"] == {"status": "failed", "error": "no way"} and (notes / "y.md").exists()


# ---- folders and copies --------------------------------------------------------------------------

def test_create_folder(kb, notes):
    made = run(kb, "create_folder", collection="Notes", name="2025", parentPath="a/b")
    assert made == {"collection": "notes", "folderPath": "a/b/2025", "path": str(notes / "a/b/2025")} and (notes / "a/b/2025").is_dir()
    assert run(kb, "create_folder", collection="notes", name="2025", parentPath="a/b") == made
    refused("DUPLICATE", kb, "create_folder", collection="notes", name="site-roadmap.md")


def test_a_copy_keeps_its_links_right(kb, tmp_path):
    root = write(tmp_path / "notes", {"a/one.md": "# One\n\n[t](two.md) ![i](i.png) [[one]]\n", "a/two.md": "# Two\n", "a/i.png": b"png", "b/x.md": "[[one]]\n"})
    add(kb, root)
    beside = run(kb, "duplicate_note", ref="notes/a/one.md")
    assert beside["relPath"] == "a/one-2.md"                # both are titled One now, and [[one]] would mean the copy
    assert (root / "a/one-2.md").read_text() == "# One\n\n[t](two.md) ![i](i.png) [[a/one]]\n"
    assert beside["warnings"] == ["gno://notes/b/x.md line 1: 'one' now means a/one-2.md"]
    away = run(kb, "duplicate_note", ref="notes/a/one.md", folderPath="b", name="copy")
    assert away["relPath"] == "b/copy.md"
    assert (root / "b/copy.md").read_text() == "# One\n\n[t](../a/two.md) ![i](../a/i.png) [[one]]\n"
    assert run(kb, "duplicate_note", ref="notes/b/x.md", folderPath="/")["relPath"] == "x.md"
    assert run(kb, "sync")["totalFilesAdded"] == 0


# ---- rename and move -----------------------------------------------------------------------------

STYLES = {      # link in hub/index.md to in/old note.md, titled Old: what it becomes as out/new note.md
    "[[in/old note]]": "[[out/new note]]", "[[old note]]": "[[new note]]", "[[Old Note.md|x]]": "[[new note.md|x]]",
    "![[old note#Part]]": "![[new note#Part]]", "[[/in/old note]]": "[[/out/new note]]", "[[../in/old note]]": "[[../out/new note]]",
    "[[notes:in/old note]]": "[[notes:out/new note]]", "[[Heading of it]]": "[[Heading of it]]", "[[ old note | x ]]": "[[ new note | x ]]",
    "[a](../in/old%20note.md)": "[a](../out/new%20note.md)", "[a](<../in/old note.md> 'T')": "[a](<../out/new note.md> 'T')",
    "[a](/in/old%20note.md#p \"t\")": "[a](/out/new%20note.md#p \"t\")", "[a](../in/old%20note)": "[a](../out/new%20note)",
    "[a](./../in/old%20note.md)": "[a](../out/new%20note.md)", "`[[old note]]`": "`[[old note]]`", "[[other]]": "[[other]]",
    "[[old nothing]]": "[[old nothing]]", "[a][r]\n\n[r]: ../in/old%20note.md": "[a][r]\n\n[r]: ../out/new%20note.md",
    "| [[old note\\|x]] |": "| [[new note\\|x]] |", "[t]([[old note]])": "[t]([[new note]])",
}
FORMS = {"lf": lambda t: t.encode(), "crlf": lambda t: t.replace("\n", "\r\n").encode(), "bom": lambda t: b"\xef\xbb\xbf" + t.replace("\n", "\r\n").encode(),
         "utf-16": lambda t: t.encode("utf-16"), "cp1252": lambda t: t.encode("cp1252"), "mixed": lambda t: t.replace("\n\n", " \t\r\n\n").encode()}


@pytest.mark.parametrize("form", FORMS)
def test_every_spelling_follows_and_nothing_else_changes(kb, tmp_path, form):
    text = "---\naliases: [x] # \u00fc\nup: \"[[old note]]\"\n---\n\n" + "\n\n".join(STYLES) + "\n\n\u00e9nd  \n\n"
    expected = "---\naliases: [x] # \u00fc\nup: \"[[new note]]\"\n---\n\n" + "\n\n".join(STYLES.values()) + "\n\n\u00e9nd  \n\n"
    root = write(tmp_path / "notes", {"in/old note.md": "# Heading of it\n\n[up](../hub/index.md) [self](#p)\n", "hub/index.md": FORMS[form](text),
                                      "other.md": "# Other\n", "nfd.md": "cafe\u0301 [[old note]]\n"})
    add(kb, root)
    before = tree(root)
    plan = run(kb, "move_note", ref="notes/in/old note.md", folderPath="out", name="new note", dryRun=True)
    assert plan["dryRun"] and tree(root) == before and not (root / "out").exists()
    done = run(kb, "move_note", ref="notes/in/old note.md", folderPath="out", name="new note")
    assert done | {"dryRun": True} == plan and done["warnings"] == [] and done["uri"] == "gno://notes/out/new%20note.md"
    assert [f["uri"] for f in done["files"]] == ["gno://notes/hub/index.md", "gno://notes/nfd.md"]
    assert tree(root) == {"hub/index.md": FORMS[form](expected), "nfd.md": "cafe\u0301 [[new note]]\n".encode(), "other.md": b"# Other\n",
                          "out/new note.md": before["in/old note.md"]}
    again = run(kb, "sync")
    assert again["totalFilesAdded"] == again["totalFilesUpdated"] == again["collections"][0]["filesMarkedInactive"] == 0
    jsonschema.validate(done, gno.output_schema(gno.TOOLS["move_note"]))


def test_the_notes_own_links_are_seen_from_its_new_place(kb, tmp_path):
    text = "![p](img.png) ![[../deep/x]] [x](../deep/x.md#h) [self](#plan) [me](old.md) [gone](gone.md) ![[./img.png]] [r]\n\n[r]: <img.png>\n"
    root = write(tmp_path / "notes", {"in/old.md": text, "in/img.png": b"p", "deep/x.md": "x"})
    add(kb, root)
    run(kb, "move_note", ref="notes/in/old.md", folderPath="deep/er")
    assert (root / "deep/er/old.md").read_text() == \
        "![p](../../in/img.png) ![[../x]] [x](../x.md#h) [self](#plan) [me](old.md) [gone](gone.md) ![[../../in/img.png]] [r]\n\n[r]: <../../in/img.png>\n"


def test_links_of_others_are_not_captured_by_the_new_name(kb, tmp_path):
    root = write(tmp_path / "notes", {"sub/plan.md": "# Sub\n", "draft.md": "# D\n", "a.md": "[[plan]] [[draft]]\n", "b.md": "[[sub/plan]]\n"})
    add(kb, root)
    done = run(kb, "rename_note", ref="notes/draft.md", name="plan")
    assert (root / "a.md").read_text() == "[[sub/plan]] [[plan]]\n" and (root / "b.md").read_text() == "[[sub/plan]]\n"
    assert len(done["files"]) == 1 and done["files"][0]["changes"][0] == {"line": 1, "before": "plan", "after": "sub/plan"}


def test_links_from_other_collections_and_relations(kb, tmp_path):
    add(kb, write(tmp_path / "one", {"acme.md": "# Acme Inc\n", "p.md": "---\nrelations:\n  works-at: \"[[acme]]\"\n  owns: acme.md\n---\nx\n"}), "one")
    add(kb, write(tmp_path / "two", {"b.md": "[[one:acme]] [[acme]]\n"}), "two")
    done = run(kb, "rename_note", ref="one/acme.md", name="acme-corp")
    assert (tmp_path / "two/b.md").read_text() == "[[one:acme-corp]] [[acme-corp]]\n"
    assert 'works-at: "[[acme-corp]]"\n  owns: acme.md\n' in (tmp_path / "one/p.md").read_text()
    assert done["warnings"] == ["gno://one/p.md: the relation to 'acme.md' must be changed by hand"]


def test_links_left_alone_on_request_are_counted(kb, tmp_path):
    root = write(tmp_path / "notes", {"a.md": "[[b]] [b](b.md)\n", "b.md": "x\n"})
    add(kb, root)
    done = run(kb, "rename_note", ref="notes/b.md", name="c", updateLinks=False)
    assert (root / "a.md").read_text() == "[[b]] [b](b.md)\n" and done["files"] == [] and done["warnings"] == ["2 links in 1 file no longer lead where they led"]


def test_what_is_not_known_yet_is_indexed_first(kb, tmp_path):
    root = write(tmp_path / "notes", {"a.md": "x\n", "b.md": "x\n"})
    add(kb, root)
    write(root, {"a.md": "now [[b]]\n", "new.md": "[[b]]\n"})
    run(kb, "rename_note", ref="notes/b.md", name="c")
    assert (root / "a.md").read_text() == "now [[c]]\n" and (root / "new.md").read_text() == "[[c]]\n"


def test_a_name_that_a_link_cannot_spell_is_a_warning(kb, tmp_path):
    root = write(tmp_path / "notes", {"a.md": "[[b]] [b](b.md)\n", "b.md": "x\n"})
    add(kb, root)
    done = run(kb, "rename_note", ref="notes/b.md", name="c#1")
    assert (root / "a.md").read_text() == "[[b]] [b](c%231.md)\n" and len(done["warnings"]) == 1 and "'b'" in done["warnings"][0]


def test_case_only_renames_and_existing_files(kb, tmp_path):
    root = write(tmp_path / "notes", {"Note.md": "alpha\n", "note.md": "beta\n", "l.md": "[[note]] [[Note]] [x](Note.md)\n", "x.md": "x"})
    add(kb, root)
    doc_id = kb.db.execute("SELECT id FROM documents WHERE path = 'Note.md'").fetchone()
    run(kb, "rename_note", ref="notes/Note.md", name="NOTE")
    assert kb.db.execute("SELECT id FROM documents WHERE path = 'NOTE.md'").fetchone() == doc_id
    assert (root / "l.md").read_text() == "[[note]] [[NOTE]] [x](NOTE.md)\n"
    refused("DUPLICATE", kb, "rename_note", ref="notes/x.md", name="note")
    refused("INVALID_INPUT", kb, "rename_note", ref="notes/x.md", name="x")
    refused("INVALID_PATH", kb, "move_note", ref="notes/x.md", folderPath="build")          # would leave the index
    write(root, {"fresh.md": "not indexed"})
    refused("DUPLICATE", kb, "rename_note", ref="notes/x.md", name="fresh")
    assert set(tree(root)) == {"NOTE.md", "note.md", "l.md", "x.md", "fresh.md"}


def test_front_matter_is_not_edited_without_a_parser_and_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(gno.GnoError) as e:
        gno.set_front_matter("---\na: 1\n---\nx\n", {"title": "T"})
    assert e.value.code == "MISSING_PACKAGE" and "front matter" in e.value.message and "index.yml" not in e.value.message


def test_a_file_that_no_sync_has_seen_yet_is_renamed(kb, tmp_path):
    root = write(tmp_path / "fresh", {"a.md": "# A\n\n[[new]]\n"})
    add(kb, root, name="fresh")
    write(root, {"new.md": "# New\n\nJust written.\n"})
    moved = run(kb, "rename_note", ref="fresh/new.md", name="newer")
    assert moved["relPath"] == "newer.md" and sorted(p.name for p in root.iterdir()) == ["a.md", "newer.md"]
    assert (root / "newer.md").read_text() == "# New\n\nJust written.\n" and "newer" in (root / "a.md").read_text()


def test_a_file_that_is_no_note_is_not_renamed(kb, tmp_path):
    add(kb, write(tmp_path / "notes", {"a.csv": "a,b\n1,2\n", "t.eml": "Subject: x\n\nbody\n"}), pattern="**/*")
    refused("CONFLICT", kb, "rename_note", ref="notes/t.eml", name="b")
    refused("NOT_FOUND", kb, "rename_note", ref="notes/none.md", name="b")


def test_a_step_that_fails_is_undone(kb, tmp_path):
    root = write(tmp_path / "notes", {"a.md": "[[b]]\n", "b.md": "x\n", "c.md": "[[b]]\n"})
    add(kb, root)
    doc = gno.editable_note(kb, "notes/b.md")
    edits, _ = gno.plan_links(kb, doc, "d.md")
    assert [e.path for e in edits] == ["a.md", "c.md"]
    write(root, {"c.md": "[[b]] edited meanwhile\n"})
    before = tree(root)
    with pytest.raises(gno.GnoError) as e:
        gno.carry_out(kb, doc, "d.md", edits)
    assert e.value.code == "CONFLICT" and tree(root) == before and kb.get_meta("journal") == ""
    with pytest.raises(gno.GnoError) as e:
        gno.carry_out(kb, doc, "a.md", [])                  # the name was free when the move was planned
    assert e.value.code == "CONFLICT" and tree(root) == before


NAMES = ["a", "b", "Plan", "plan x", "caf\u00e9", "n#1"]
FOLDERS = ["", "one/", "two/", "one/deep/"]
PATHS = [folder + name + ".md" for folder in FOLDERS for name in NAMES]


@settings(max_examples=60 if not os.environ.get("GNO_MANY") else 1000, deadline=None)
@given(st.data())
def test_after_any_move_every_link_means_what_it_meant(data):
    paths = data.draw(st.lists(st.sampled_from(PATHS), min_size=2, max_size=6, unique=True))
    spelt = st.sampled_from([*paths, *(os.path.basename(p) for p in paths), *("../" + p for p in paths), *("./" + p for p in paths)])
    link = st.builds(lambda kind, target: f"[[{target[:-3]}]]" if kind == "w" else f"[[{target}|x]]" if kind == "m" else
                     f"[x](<{target}>)" if kind == "a" else f"[x]({gno.uri_quote(target)})", st.sampled_from("wmap"), spelt)
    head = st.sampled_from(["", "# Plan\n\n", "---\ntitle: a\n---\n\n"])
    newline = data.draw(st.sampled_from(["\n", "\r\n"]))
    files = {p: (data.draw(head) + "\n".join(data.draw(st.lists(link, max_size=4))) + "\n").replace("\n", newline) for p in paths}
    source, folder, name = data.draw(st.sampled_from(paths)), data.draw(st.sampled_from(FOLDERS)), data.draw(st.sampled_from(NAMES))
    with tempfile.TemporaryDirectory() as base:
        root, kb = write(Path(base) / "notes", files), new_kb(Path(base) / "gno")
        add(kb, root)
        before = meanings(kb)
        try:
            done = run(kb, "move_note", ref="notes/" + source, folderPath=folder or "/", name=name)
        except gno.GnoError as e:
            assert e.code in ("DUPLICATE", "INVALID_INPUT") and tree(root) == {p: t.encode() for p, t in files.items()}
            return
        finally:
            kb.close()
        after, now = meanings(kb), tree(root)
        kb.close()
    path = done["relPath"]

    def then(p):
        return path if p == source else p
    assert set(now) == set(map(then, paths))
    unspellable = {(gno.uri_unquote(re.match("gno://notes/(.*?) line", w)[1])) for w in done["warnings"]}
    for (at, seq), meant in before.items():
        if meant:
            assert after[then(at), seq] == then(meant) or at in unspellable, (files, source, path, at, seq, now)
    for p, text in files.items():           # without the targets of links, nothing has changed
        old, new = ([re.sub(r"\[\[[^\]|]*|\]\(<?[^)>]*", "L", t), t.count("\n")] for t in (text, now[then(p)].decode()))
        assert old == new


def meanings(kb) -> dict[tuple[str, int], str | None]:
    "(path, number of the link) -> path of the document that it means."
    return {(a, b): c for a, b, c in kb.db.execute(
        "SELECT s.path, e.seq, t.path FROM edges e JOIN documents s ON s.id = e.source LEFT JOIN documents t ON t.id = e.target WHERE s.active")}


# ---- processes -----------------------------------------------------------------------------------

MOVER = """
import itertools, time
import gno
kb = gno.KB(writable=True)
kb.refresh()
gno.resume(kb)
print("ready", flush=True)
for n in itertools.count():
    path = kb.db.execute("SELECT path FROM documents WHERE active AND path LIKE '%hub%'").fetchone()[0]
    gno.call(kb, "move_note", {"ref": "notes/" + path, "folderPath": ["one", "two/deep", "/"][n % 3], "name": f"hub{time.time_ns()}"})
"""


def test_a_killed_writer_leaves_all_or_nothing(tmp_path):
    "GNO_MANY=1 kills 200 times."
    moments = random.Random(7)
    kb = new_kb(tmp_path)
    links_of = {f"n{i}.md": f"# N{i}\r\n\n[[HUB]] and [x](PATH) " + "text " * 2000 * i + "\n" for i in range(8)}
    root = write(tmp_path / "notes", {"hub0.md": "# The hub\n\n[n](n1.md)\n", **{p: t.replace("HUB", "hub0").replace("PATH", "hub0.md")
                                                                                for p, t in links_of.items()}})
    add(kb, root)
    kb.close()
    places, resumed = set(), 0
    for _ in range(200 if os.environ.get("GNO_MANY") else 8):
        child = subprocess.Popen([sys.executable, "-c", MOVER], env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n", child.stderr.read()
        time.sleep(0.1 + moments.random() * 0.4)
        child.kill()
        assert b"Traceback" not in child.communicate()[1]
        kb.refresh()
        resumed += bool(kb.get_meta("journal"))
        gno.resume(kb)
        kb.lock(0).close()
        found = tree(root)
        hub = next(p for p in found if "hub" in p)
        assert set(found) == {hub, *links_of}, sorted(found)
        stem = os.path.basename(hub)[:-3]
        for p, text in links_of.items():
            assert found[p].decode() == text.replace("HUB", stem).replace("PATH", hub), (hub, found[p][:80])
        assert found[hub].decode() == f"# The hub\n\n[n]({'../' * hub.count('/')}n1.md)\n"
        again = run(kb, "sync")
        assert again["totalFilesAdded"] == again["totalFilesUpdated"] == again["totalFilesErrored"] == 0
        assert all(meant for meant in meanings(kb).values())
        kb.close()
        places.add(hub)
    assert len(places) > 1
    print(f"{resumed} were cut short")


@pytest.mark.parametrize("done", range(5))
def test_a_start_finishes_what_was_cut_short(tmp_path, done):
    "A journal and the first `done` of its steps, as a killed process leaves them; any command finishes the rest."
    kb = new_kb(tmp_path)
    root = write(tmp_path / "notes", {"a.md": "[[b]]\n", "b.md": "x\n", "c.md": "[[b]]\n"})
    add(kb, root)
    doc = gno.editable_note(kb, "notes/b.md")
    edits, _ = gno.plan_links(kb, doc, "sub/d.md")
    steps = [lambda: os.mkdir(root / "sub"), lambda: os.link(root / "b.md", root / "sub/d.md"), lambda: os.unlink(root / "b.md"),
             lambda: (root / "a.md").write_bytes(edits[0].after)]
    keep, gno.replay = gno.replay, lambda journal: (_ for _ in ()).throw(KeyboardInterrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            gno.carry_out(kb, doc, "sub/d.md", edits)
    finally:
        gno.replay = keep
    write(root, {".gno-1-2.tmp": "half"})
    for step in steps[:done]:
        step()
    kb.close()
    assert b'"documents"' in cli(tmp_path, "ls", "--json").stdout
    assert tree(root) == {"a.md": b"[[d]]\n", "c.md": b"[[d]]\n", "sub/d.md": b"x\n"}
    assert sorted(meanings(kb).values()) == ["sub/d.md", "sub/d.md"] and kb.get_meta("journal") == ""
    kb.close()


def test_over_mcp_and_on_the_command_line(tmp_path, client):
    base = tmp_path / "gno"
    root = write(tmp_path / "notes", {"a.md": "[[b]]\n", "b.md": "x\n"})
    kb = new_kb(base)
    add(kb, root)
    kb.close()
    names = {"gno_capture", "gno_create_folder", "gno_rename_note", "gno_move_note", "gno_duplicate_note"}
    reader = client()
    assert not names & {t["name"] for t in reader.request("tools/list")["result"]["tools"]}
    assert "error" in reader.request("tools/call", {"name": "gno_capture", "arguments": {"collection": "notes", "content": "x"}})
    writer: Client = client("--enable-write")
    assert names <= {t["name"] for t in writer.request("tools/list")["result"]["tools"]}
    got = writer.call("gno_capture", collection="notes", path="c.md", content="[[b]]")
    assert not got.get("isError") and "gno://notes/c.md" in got["content"][0]["text"]
    assert writer.call("gno_rename_note", ref="notes/b.md", name="../b")["structuredContent"]["error"] == "INVALID_PATH"
    moved = json.loads(cli(base, "rename-note", "notes/b.md", "new", "b", "--json").stdout)
    assert moved["uri"] == "gno://notes/new%20b.md" and (root / "a.md").read_text() == "[[new b]]\n"
    for words, stdin in [(["two", "words"], b""), (["--stdin"], b"two words"), (["--file", str(root / "w.md")], b"")]:
        write(root, {"w.md": "two words"})
        done = cli(base, "capture", "-c", "notes", "--title", "Cli", "--collision-policy", "create_with_suffix", "--tags", "a,b", "--source-url", "https://x.test", "--json", *words, stdin=stdin)
        got = json.loads(done.stdout)
        assert got["tags"] == ["a", "b"] and got["source"]["url"] == "https://x.test" and (root / got["relPath"]).read_text().endswith("---\n\ntwo words\n"), done.stderr
    assert cli(base, "capture", "-c", "notes", "--file", "none").returncode == 1
