"""Reading: references in every spelling, exact lines, many documents, named indexes."""
import hashlib
import itertools
import os
import random
import time

import pytest
from conftest import add, new_kb, run, write
from hypothesis import given, settings
from hypothesis import strategies as st

import gno

FIVE = "one\ntwo\nthree\nfour\nfive\n"
ODD = {name: f"text of {n}\n" for n, name in enumerate([
    "sub/b c.md", "100%.md", "a%20b.md", "a b.md", "hash#tag.md", "what?.md", "q?index=x.md", "plus+and&.md", "\u00fc.md", "e\u0301.md",
    "Case.md",
    "two.md", "TWO.md", "back\\slash.md", "'quote' (1)!~*.md", "zebra 🦓.md", "at 12:30.md", "[x]{y}.md", "-dash.md",
    "sub/deep/er.md"])} | {"a.md": FIVE}


def docid(text: str) -> str:
    return "#" + hashlib.sha256(text.encode()).hexdigest()[:8]


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    "A collection of odd file names, for reading only."
    base = tmp_path_factory.mktemp("odd")
    kb = new_kb(base / "gno")
    report = add(kb, write(base / "notes", ODD))["collections"][0]
    assert report["filesAdded"] == len(ODD) and not report["errors"], report
    yield kb
    kb.close()


def error(kb, name, **arguments) -> gno.GnoError:
    "The error that a call raises."
    with pytest.raises(gno.GnoError) as e:
        run(kb, name, **arguments)
    return e.value


SPELLINGS = [                                                         # reference, path, line
    ("notes/a.md", "a.md", 1), ("NOTES/a.md", "a.md", 1), ("gno://notes/a.md", "a.md", 1), ("gno://Notes/a.md", "a.md", 1),
    ("GNO://notes/a.md", "a.md", 1),
    (" notes/a.md\n", "a.md", 1), ("notes/a.md:3", "a.md", 3), ("gno://notes/a.md:3", "a.md", 3),
    ("gno://notes/a.md?index=default", "a.md", 1),
    ("gno://notes/a.md?index=DEFAULT:3", "a.md", 3), ("notes/a%2Emd", "a.md", 1), ("gno://notes/%61.md:2", "a.md", 2),
    ("notes/sub/b c.md", "sub/b c.md", 1), ("notes/sub/b%20c.md", "sub/b c.md", 1), ("gno://notes/sub/b%20c.md", "sub/b c.md", 1),
    ("gno://notes/sub/b c.md", "sub/b c.md", 1),
    ("notes/100%.md", "100%.md", 1), ("gno://notes/100%25.md", "100%.md", 1), ("gno://notes/100%.md", "100%.md", 1),
    ("notes/100%25.md", "100%.md", 1),
    ("notes/a%20b.md", "a%20b.md", 1), ("gno://notes/a%2520b.md", "a%20b.md", 1), ("gno://notes/a%20b.md", "a b.md", 1),
    ("notes/a b.md", "a b.md", 1),
    ("notes/hash#tag.md", "hash#tag.md", 1), ("gno://notes/hash%23tag.md", "hash#tag.md", 1), ("gno://notes/hash#tag.md", "hash#tag.md", 1),
    ("notes/what?.md", "what?.md", 1), ("gno://notes/what%3F.md", "what?.md", 1), ("gno://notes/what?.md", "what?.md", 1),
    ("notes/q?index=x.md", "q?index=x.md", 1), ("gno://notes/q%3Findex%3Dx.md", "q?index=x.md", 1),
    ("gno://notes/plus%2Band%26.md", "plus+and&.md", 1),
    ("notes/plus+and&.md", "plus+and&.md", 1), ("gno://notes/plus+and&.md", "plus+and&.md", 1),
    ("notes/\u00fc.md", "\u00fc.md", 1), ("notes/u\u0308.md", "\u00fc.md", 1), ("gno://notes/%C3%BC.md", "\u00fc.md", 1),
    ("gno://notes/u%CC%88.md", "\u00fc.md", 1),
    ("notes/\u00e9.md", "e\u0301.md", 1), ("gno://notes/%c3%a9.md", "e\u0301.md", 1), ("notes/e\u0301.md", "e\u0301.md", 1),
    ("notes/\u00dc.MD", "\u00fc.md", 1),
    ("notes/CASE.MD", "Case.md", 1), ("notes/two.md", "two.md", 1), ("notes/TWO.md", "TWO.md", 1),
    ("Notes/SUB/Deep/er.md", "sub/deep/er.md", 1),
    ("notes\\sub\\b c.md", "sub/b c.md", 1), ("notes\\a.md:3", "a.md", 3), ("gno://notes\\a.md", "a.md", 1),
    ("notes/back\\slash.md", "back\\slash.md", 1),
    ("gno://notes/back%5Cslash.md", "back\\slash.md", 1), ("notes/'quote' (1)!~*.md", "'quote' (1)!~*.md", 1),
    ("gno://notes/'quote'%20(1)!~*.md", "'quote' (1)!~*.md", 1),
    ("gno://notes/zebra%20%F0%9F%A6%93.md", "zebra 🦓.md", 1), ("notes/at 12:30.md", "at 12:30.md", 1),
    ("gno://notes/at%2012%3A30.md", "at 12:30.md", 1),
    ("notes/[x]{y}.md", "[x]{y}.md", 1), ("notes/-dash.md", "-dash.md", 1), (docid(FIVE), "a.md", 1), (docid(FIVE)[:7], "a.md", 1),
    (docid(FIVE)[:8].upper(), "a.md", 1),
]


@pytest.mark.parametrize("ref, path, line", SPELLINGS)
def test_every_spelling_of_a_reference_leads_to_the_document(odd, ref, path, line):
    got = run(odd, "get", ref=ref)
    assert got["source"]["relPath"] == path and got["returnedLines"]["start"] == line and got["totalLines"] == ODD[path].count("\n")
    many = run(odd, "multi_get", refs=[ref])                          # one resolver for all tools
    assert [d["source"]["relPath"] for d in many["documents"]] == [path] and many["skipped"] == []


@pytest.mark.parametrize("path, uri", [
    ("a.md", "gno://notes/a.md"), ("sub/b c.md", "gno://notes/sub/b%20c.md"), ("100%.md", "gno://notes/100%25.md"),
    ("a%20b.md", "gno://notes/a%2520b.md"),
    ("hash#tag.md", "gno://notes/hash%23tag.md"), ("what?.md", "gno://notes/what%3F.md"), ("plus+and&.md", "gno://notes/plus%2Band%26.md"),
    ("\u00fc.md", "gno://notes/%C3%BC.md"), ("back\\slash.md", "gno://notes/back%5Cslash.md"),
    ("'quote' (1)!~*.md", "gno://notes/'quote'%20(1)!~*.md"),
    ("at 12:30.md", "gno://notes/at%2012%3A30.md"), ("zebra 🦓.md", "gno://notes/zebra%20%F0%9F%A6%93.md"),
    ("[x]{y}.md", "gno://notes/%5Bx%5D%7By%7D.md"),
])
def test_uris_are_percent_encoded_and_lead_back(odd, path, uri):
    assert run(odd, "get", ref="notes/" + path)["uri"] == uri and run(odd, "get", ref=uri)["source"]["relPath"] == path


def test_every_file_name_leads_back_to_its_file(kb, tmp_path):
    chance, names = random.Random(5), set()
    parts = [*"ab%#?:&+= .!~*'()[]{}\\-_019\"<>|^`;,@$éü東🦓\u0301\u2028\n\t\x1b\x7f", "%20", "%2F", "?index=x", ":12", "..", "%zz", "gno:"]
    while len(names) < 400:
        name = "".join(chance.choice(parts) for _ in range(chance.randint(1, 8)))
        if not name.startswith((".", "~$")):
            names.add(chance.choice(["", "", "d/"]) + name + ".md")
    add(kb, write(tmp_path / "n", {name: f"{name!r}\n" for name in names}))
    listed = run(kb, "ls", limit=1000)["documents"]
    assert {d["relPath"] for d in listed} == names and len({d["uri"] for d in listed}) == len(names)
    for d in listed:
        for ref in (d["uri"], "notes/" + d["relPath"], d["uri"] + ":1", "gno://NOTES/" + d["uri"].removeprefix("gno://notes/"), d["docid"]):
            assert run(kb, "get", ref=ref)["source"]["relPath"] == d["relPath"], ref


def test_a_path_that_ends_like_a_line_suffix_is_reachable(kb, tmp_path):
    add(kb, write(tmp_path / "n", {"a.md": FIVE, "log": "", "b.md": "other\n"}))
    kb.wdb.execute("UPDATE documents SET path = 'log:12' WHERE path = 'b.md'")
    assert run(kb, "get", ref="notes/log:12")["content"] == "other\n" and run(kb, "get", ref="gno://notes/log%3A12")["content"] == "other\n"
    assert run(kb, "get", ref="notes/log:12:1")["returnedLines"] == {"start": 1, "end": 1}


@pytest.mark.parametrize("ref", [
    "", " ", "a.md", "/", "/a.md", "notes/", "gno://", "gno://notes", "gno://notes/", "gno:///a.md", "#", "#12345", "#zzzzzz", "# abcdef",
    "#abcdef:3", "##abcdef",
    "notes/a.md:0", "gno://notes/a.md:00", "notes/a.md:-1", "notes/a.md\0", "gno://notes/a.md?index=", "gno://notes/a.md?index=../x",
    "gno://notes/a.md?index=%2e%2e%2fx",
    "gno://notes/a.md?index=a/b", "gno://notes/a.md?index=.x", "gno://notes/a.md?index=%zz", "gno://notes/a.md?index=x.",
    "gno://notes/a.md?index=" + "x" * 65,
])
def test_what_is_no_reference_is_refused(odd, ref):
    before = sorted(os.listdir(odd.dirs["data"]))
    assert error(odd, "get", ref=ref).code == "INVALID_INPUT"
    assert sorted(os.listdir(odd.dirs["data"])) == before
    if ref and "?index" not in ref:
        assert run(odd, "multi_get", refs=["notes/a.md", ref])["skipped"] == [{"ref": ref, "reason": "invalid_ref"}]


@pytest.mark.parametrize("ref, hint", [
    ("notes/a", "notes/a.md"), ("notes/elsewhere/er.md", "notes/sub/deep/er.md"), ("notes/what.md", "notes/what?.md"),
    ("notes/Two.md", "notes/two.md"),
    ("nowhere/a.md", "notes"), ("#12345678", ""), ("notes/xyzzyplugh.md", "gno_search"), ("notes/" + "x" * 5000, ""),
    ("gno://notes/a.md?index=nowhere", "index"),
])
def test_what_is_not_there_is_not_found_and_near_misses_are_named(odd, ref, hint):
    e = error(odd, "get", ref=ref)
    assert e.code == "NOT_FOUND" and hint in e.hint and len(e.message) < 400 and len(e.hint) < 1000


def test_removed_files_and_collections_are_never_shown_as_current(kb, tmp_path):
    root = write(tmp_path / "n", {"gone note.md": "old\n", "stays.md": "here\n"})
    add(kb, root)
    add(kb, write(tmp_path / "other", {"x.md": "x\n"}), "other")
    (root / "gone note.md").unlink()
    run(kb, "sync")
    for ref in ("notes/gone note.md", "gno://notes/gone%20note.md", "gno://notes/gone%20note.md:1", docid("old\n")):
        e = error(kb, "get", ref=ref)
        assert e.code == "NOT_FOUND" and (ref[0] == "#" or "no longer there" in e.hint), (ref, e.hint)
    assert [d["uri"] for d in run(kb, "multi_get", pattern="**")["documents"]] == ["gno://notes/stays.md", "gno://other/x.md"]
    assert [d["uri"] for d in run(kb, "ls")["documents"]] == ["gno://notes/stays.md", "gno://other/x.md"]
    run(kb, "remove_collection", collection="notes")
    e = error(kb, "get", ref="notes/stays.md")
    assert e.code == "NOT_FOUND" and "collection add" in e.hint
    assert run(kb, "multi_get", refs=["notes/stays.md"])["skipped"] == [{"ref": "notes/stays.md", "reason": "not_found"}]
    add(kb, root)
    assert run(kb, "get", ref="notes/stays.md")["content"] == "here\n"


def test_a_file_that_could_not_be_read_says_why(kb, tmp_path):
    add(kb, write(tmp_path / "n", {"a.md": "fine\n", "bin.txt": bytes(range(32)) * 200}), pattern="**/*")
    e = error(kb, "get", ref="notes/bin.txt")
    assert e.code == "NOT_FOUND" and "BINARY" in e.message
    assert run(kb, "multi_get", refs=["notes/bin.txt"])["skipped"] == [{"ref": "notes/bin.txt", "reason": "conversion_error"}]


def test_docid_prefixes_resolve_where_they_are_unique(kb, tmp_path):
    seen, pair = {}, None
    for n in itertools.count():                                       # two texts whose hashes agree in the first six digits only
        text = f"text {n}\n"
        other = seen.setdefault(docid(text)[:7], text)
        if other != text and docid(other)[:8] != docid(text)[:8]:
            pair = (other, text)
            break
    add(kb, write(tmp_path / "n", {"a.md": pair[0], "b.md": pair[1], "c.md": FIVE}))
    e = error(kb, "get", ref=docid(pair[0])[:7])
    assert e.code == "INVALID_INPUT" and docid(pair[0]) in e.message + e.hint and docid(pair[1]) in e.message + e.hint
    for length in (8, 9):
        assert run(kb, "get", ref=docid(pair[0])[:length])["content"] == pair[0]
        assert run(kb, "get", ref=docid(pair[1])[:length])["content"] == pair[1]
    for length in (7, 8, 9):
        assert run(kb, "get", ref=docid(FIVE)[:length])["content"] == FIVE
    assert run(kb, "multi_get", refs=[docid(pair[0])[:7]])["documents"] == []


def test_twins_resolve_to_the_lowest_uri_and_name_the_others(kb, tmp_path):
    root = write(tmp_path / "n", dict.fromkeys(("z.md", "\u00e9.md", "m/x.md", "a b.md", "a!b.md"), "same\n"))
    add(kb, root, "notes")
    uris = ["gno://notes/%C3%A9.md", "gno://notes/a!b.md", "gno://notes/a%20b.md", "gno://notes/m/x.md", "gno://notes/z.md"]
    got = run(kb, "get", ref=docid("same\n"))
    assert [got["uri"], *got["duplicates"]] == uris == sorted(uris)
    assert [d["uri"] for d in run(kb, "multi_get", refs=[docid("same\n")])["documents"]] == uris[:1]
    assert "duplicates" not in run(kb, "get", ref="notes/z.md") or run(kb, "get", ref="notes/z.md")["uri"] == uris[4]
    add(kb, write(tmp_path / "aaa", {"zz.md": "same\n"}), "aaa")
    assert run(kb, "get", ref=docid("same\n")[:7])["uri"] == "gno://aaa/zz.md"
    (tmp_path / "aaa" / "zz.md").unlink()
    run(kb, "sync")
    assert run(kb, "get", ref=docid("same\n"))["uri"] == uris[0]


# ---- lines ----

@pytest.mark.parametrize("arguments, content, span", [
    ({}, FIVE, (1, 5)), ({"fromLine": 1}, FIVE, (1, 5)), ({"fromLine": 2, "lineCount": 2}, "two\nthree", (2, 3)),
    ({"fromLine": 5}, "five", (5, 5)),
    ({"fromLine": 4, "lineCount": 100}, "four\nfive", (4, 5)), ({"lineCount": 2}, "one\ntwo", (1, 2)), ({"lineCount": 5}, FIVE, (1, 5)),
    ({"fromLine": 6}, "", None), ({"fromLine": 6, "lineCount": 2}, "", None), ({"fromLine": 10 ** 30}, "", None),
    ({"fromLine": 3, "lineCount": 10 ** 30}, "three\nfour\nfive", (3, 5)),
    ({"ref": "notes/a.md:3"}, "three\nfour\nfive", (3, 5)), ({"ref": "notes/a.md:3", "lineCount": 1}, "three", (3, 3)),
    ({"ref": "notes/a.md:3", "fromLine": 5}, "five", (5, 5)), ({"ref": "notes/a.md:6"}, "", None),
    ({"ref": "gno://notes/a.md:2", "lineCount": 2}, "two\nthree", (2, 3)),
])
def test_ranges(odd, arguments, content, span):
    arguments = {"ref": "notes/a.md"} | arguments
    got = run(odd, "get", **arguments)
    assert got["content"].removesuffix("\n") == content.removesuffix("\n") and got["totalLines"] == 5
    assert got["returnedLines"] == (span and {"start": span[0], "end": span[1]})
    text = gno.text_of(gno.TOOLS["get"], got, arguments)
    assert text.startswith("".join(f"{n}: {line}\n" for n, line in enumerate(content.split("\n"), span[0])
        if line).rstrip("\n")) if span else "5 lines" in text


@pytest.mark.parametrize("source, total, content", [
    (b"", 0, ""), (b"a", 1, "a\n"), (b"a\n", 1, "a\n"), (b"a\nb", 2, "a\nb\n"), (b"a\n\n\nb\n", 4, "a\n\n\nb\n"),
    (b"\n\na\n", 3, "\n\na\n"), (b"a\r\nb\r\n", 2, "a\nb\n"),
    (b"a\rb\r", 2, "a\nb\n"), (b"\xef\xbb\xbfa\n", 1, "a\n"), ("a\u2028b\u2029c\u0085d\n".encode(), 1, "a\u2028b\u2029c\u0085d\n"),
    ("e\u0301\n".encode(), 1, "\u00e9\n"), (b"a  \t\nb\n", 2, "a\nb\n"), (b"a\n\n\n\n", 1, "a\n"),
    ("\ufeffa\n".encode("utf-16-le"), 1, "a\n"),
])
def test_lines_are_counted_as_an_editor_does(kb, tmp_path, source, total, content):
    add(kb, write(tmp_path / "n", {"a.md": source, "b.txt": source}), pattern="**/*")
    for ref in ("notes/a.md", "notes/b.txt"):
        got = run(kb, "get", ref=ref)
        assert (got["totalLines"], got["content"]) == (total, content), ref
        assert got["returnedLines"] == ({"start": 1, "end": total} if total else None)


def test_joining_pages_gives_the_document(tmp_path_factory):
    base = tmp_path_factory.mktemp("pages")
    kb = new_kb(base / "gno")
    root = write(base / "n", {"a.md": "x\n"})
    add(kb, root)
    line = st.text("ab#-|` é東🦓\u2028\u0085\u200b\"", max_size=12).map(lambda s: s.strip())

    @settings(max_examples=60, deadline=None)
    @given(st.lists(line, min_size=1, max_size=25), st.integers(1, 7))
    def check(lines, page):
        text = "\n".join(lines).rstrip() + "\n"
        if not text.strip():
            return
        (root / "a.md").write_bytes(text.encode())
        run(kb, "sync", full=True)
        assert run(kb, "get", ref="notes/a.md")["content"] == text
        total, parts, at = run(kb, "get", ref="notes/a.md")["totalLines"], [], 1
        assert total == text.count("\n")
        while (got := run(kb, "get", ref="notes/a.md", fromLine=at, lineCount=page))["returnedLines"]:
            assert got["returnedLines"] == {"start": at, "end": min(at + page - 1, total)}
            parts.append(got["content"])
            at = got["returnedLines"]["end"] + 1
        assert "\n".join(parts) == text and at == total + 1
    check()
    kb.close()


def served(kb):
    "The same knowledge base as a server sees it: replies are bounded."
    return gno.KB(dirs=kb.dirs, mode="stdio")


def whole(kb, ref) -> str:
    "A document put together from what get returns, going on at nextLine."
    got = run(kb, "get", ref=ref)
    parts = [got["content"]]
    while got.get("truncated"):
        assert len(got["content"].encode()) <= 100_000 and len(parts) < 100
        again = got["nextLine"] == got["returnedLines"]["end"]        # the last line was cut: it comes again, whole
        parts = ["\n".join(parts).rpartition("\n")[0]] if again else parts
        got = run(kb, "get", ref=ref, fromLine=got["nextLine"])
        parts.append(got["content"])
    return "\n".join(parts) if parts[0] or len(parts) == 1 else "\n".join(parts[1:])


@pytest.mark.parametrize("name, text, cut", [
    ("fits", "x" * 49_999 + "\n" + "y" * 49_999 + "\n", False), ("one more", "x" * 49_999 + "\n" + "y" * 50_000 + "\n", True),
    ("many lines", "".join(f"line {n} é東🦓\n" for n in range(9000)), True), ("wide", "é" * 49_998 + "\n" + "é\n" * 5, True),
    ("endless inside", "short\n" * 10 + "z" * 300_000 + "\n" + "end\n", True), ("endless", "é" * 150_000 + " end\n", True),
    ("endless first", "x" * 250_000 + "\nsecond\nthird\n", True), ("empty lines", "\n" * 99_998 + "a\n", False),
    ("more empty lines", "\n" * 150_000 + "a\n", True),
])
def test_a_long_document_is_cut_at_a_line_and_can_be_read_on(kb, tmp_path, name, text, cut):
    add(kb, write(tmp_path / "n", {"a.md": text}))
    kb = served(kb)
    got = run(kb, "get", ref="notes/a.md")
    assert got.get("truncated", False) == cut and ("nextLine" in got) == cut and len(got["content"].encode()) <= 100_000
    assert got["totalLines"] == text.count("\n") and text.startswith(got["content"])
    if cut:
        said = gno.text_of(gno.TOOLS["get"], got, {})
        assert f"fromLine {got['nextLine']}" in said and str(got["totalLines"]) in said
    assert whole(kb, "notes/a.md") == text
    kb.close()


def test_the_command_line_gets_everything(kb, tmp_path):
    text = "".join(f"line {n}\n" for n in range(20_000))
    add(kb, write(tmp_path / "n", {"a.md": text}))
    assert run(kb, "get", ref="notes/a.md")["content"] == text


# ---- many documents ----

def test_multi_get_takes_refs_or_a_pattern(odd):
    assert error(odd, "multi_get").code == error(odd, "multi_get", refs=["notes/a.md"], pattern="*").code == "INVALID_INPUT"
    assert error(odd, "multi_get", refs=[]).code == error(odd, "multi_get", pattern="").code == "INVALID_INPUT"
    many = run(odd, "multi_get", refs=["notes/two.md", "nowhere/x.md", "notes/a.md", "odd", docid(FIVE), "notes/none.md", "notes/two.md"])
    assert [d["source"]["relPath"] for d in many["documents"]] == ["two.md", "a.md", "a.md", "two.md"]
    assert many["skipped"] == [{"ref": "nowhere/x.md", "reason": "not_found"}, {"ref": "odd", "reason": "invalid_ref"},
        {"ref": "notes/none.md", "reason": "not_found"}]
    assert {k: many["meta"][k] for k in ("requested", "returned", "skipped")} == {"requested": 7, "returned": 4, "skipped": 3}


TEN = "0123456789\n" * 10


@pytest.mark.parametrize("text, max_bytes, content", [
    (TEN, 10240, TEN), (TEN, 110, TEN), (TEN, 25, "0123456789\n0123456789"), (TEN, 21, "0123456789\n0123456789"), (TEN, 20, "0123456789"),
    (TEN, 10, "0123456789"),
    (TEN, 9, None), (TEN, 1, None), ("ééééé\nb\n", 10, "ééééé"), ("ééééé\nb\n", 9, None), ("", 1, ""),
    ("a\n" + "x" * 100 + "\nb\n", 50, "a"), ("\n\nlong line\n", 3, "\n"),
])
def test_multi_get_cuts_at_a_line_end(kb, tmp_path, text, max_bytes, content):
    add(kb, write(tmp_path / "n", {"a.md": text}))
    many = run(kb, "multi_get", refs=["notes/a.md"], maxBytes=max_bytes)
    if content is None:
        assert many["documents"] == [] and many["skipped"] == [{"ref": "notes/a.md", "reason": "exceeds maxBytes"}]
        return
    doc, = many["documents"]
    assert doc["content"].removesuffix("\n") == content.removesuffix("\n") and len(doc["content"].encode()) <= max_bytes
    assert doc["totalLines"] == text.count("\n") and doc["truncated"] == (content != text)
    if doc["truncated"]:
        assert doc["nextLine"] == doc["content"].count("\n") + 2
        rest = run(kb, "get", ref="notes/a.md", fromLine=doc["nextLine"])["content"]
        assert doc["content"] + "\n" + rest == text
    else:
        assert doc["content"] == run(kb, "get", ref="notes/a.md")["content"]         # whole is whole, to the last byte


@pytest.mark.parametrize("pattern, paths", [
    ("**", sorted(ODD)), ("notes/**", sorted(ODD)), ("gno://notes/**", sorted(ODD)), ("sub/**", ["sub/b c.md", "sub/deep/er.md"]),
    ("**/er.md", ["sub/deep/er.md"]),
    ("a.md", ["a.md"]), ("notes/a.md", ["a.md"]), ("gno://notes/a.md", ["a.md"]), ("sub/b c.md", ["sub/b c.md"]),
    ("gno://notes/sub/b%20c.md", ["sub/b c.md"]),
    ("gno://notes/sub/b%20*", ["sub/b c.md"]), ("sub/?%20c.md", []), ("sub/? c.md", ["sub/b c.md"]),
    ("{two,TWO}.md", ["TWO.md", "two.md"]), ("t*.md", ["two.md"]),
    ("\u00fc.md", ["\u00fc.md"]), ("u\u0308.md", ["\u00fc.md"]), ("\u00e9.md", ["e\u0301.md"]), ("e\u0301*", ["e\u0301.md"]),
    ("NOTES/sub/*.md", ["sub/b c.md"]), ("nowhere/**", []), ("**/*.pdf", []),
    ("gno://nowhere/**", []), ("**/deep/**", ["sub/deep/er.md"]), ("notes/sub/*/*.md", ["sub/deep/er.md"]),
])
def test_patterns(odd, pattern, paths):
    many = run(odd, "multi_get", pattern=pattern)
    assert sorted(d["source"]["relPath"] for d in many["documents"]) == sorted(paths) and many["skipped"] == []
    assert many["meta"]["requested"] == len(paths)


def test_many_references_and_wide_patterns_are_accounted_for(kb, tmp_path):
    names = [f"{n % 9}/n{n}.md" for n in range(1100)]
    add(kb, write(tmp_path / "n", {name: f"# {name}\n" + "some words\n" * 40 for name in names} | {"big.md": "0123456789\n" * 2000}))
    begun = time.monotonic()
    refs = [f"notes/{names[n % 1100]}" if n % 2 else f"gno://notes/missing%20{n}.md" for n in range(5000)]
    many = run(kb, "multi_get", refs=refs, maxBytes=20)
    assert time.monotonic() - begun < 5
    assert len(many["documents"]) == 2500 and len(many["skipped"]) == 2500 and {s["reason"] for s in many["skipped"]} == {"not_found"}
    for arguments in ({"pattern": "**"}, {"refs": [f"notes/{n}" for n in names] + ["notes/big.md"] * 60}):
        many = run(kb, "multi_get", **arguments)
        size = sum(len(d["content"].encode()) for d in many["documents"])
        requested = len(arguments.get("refs", [0] * 1101))
        assert 300_000 < size <= gno.MULTI_BYTES
        assert many["meta"]["requested"] == requested == len(many["documents"]) + len(many["skipped"]), many["meta"]
        assert {s["reason"] for s in many["skipped"]} == {"exceeds maxBytes"}
        assert all(d["truncated"] == (d["content"].count("\n") + 1 < d["totalLines"]) for d in many["documents"])


# ---- named indexes ----

@pytest.fixture
def two(tmp_path):
    "The default index and one called Research, which holds an older text of the same file."
    root = write(tmp_path / "notes", {"a b.md": "old\n", "c.md": "same\n"})
    research = new_kb(tmp_path / "gno", name="Research")
    add(research, root)
    research.close()
    write(root, {"a b.md": "new words\n"})
    kb = new_kb(tmp_path / "gno")
    run(kb, "sync")
    yield kb
    kb.close()


def test_named_indexes_are_read_and_never_created(two):
    got = run(two, "get", ref="notes/a b.md")
    assert got["content"] == "new words\n" and got["uri"] == "gno://notes/a%20b.md"
    for name in ("Research", "research", "RESEARCH"):
        got = run(two, "get", ref=f"gno://notes/a%20b.md?index={name}:1")
        assert got["content"] == "old\n" and got["uri"].lower() == "gno://notes/a%20b.md?index=research"
        assert got["returnedLines"] == {"start": 1, "end": 1}
        assert run(two, "get", ref=got["uri"])["content"] == "old\n"
    before = sorted(os.listdir(two.dirs["data"]))
    for ref in ("gno://notes/a%20b.md?index=nowhere", "gno://notes/c.md?index=Caf%C3%A9"):
        e = error(two, "get", ref=ref)
        assert e.code == "NOT_FOUND"
        many = None
        try:
            many = run(two, "multi_get", refs=[ref])
        except gno.GnoError as e:
            assert e.code == "NOT_FOUND"
        assert many is None or many["documents"] == []
    assert sorted(os.listdir(two.dirs["data"])) == before
    research = gno.KB("RESEARCH", dirs=two.dirs)
    hit, = run(research, "search", query="old")["results"]
    assert hit["uri"].lower() == "gno://notes/a%20b.md?index=research"
    assert run(research, "get", ref="gno://notes/a%20b.md?index=default")["content"] == "new words\n"
    assert run(research, "get", ref="gno://notes/a%20b.md?index=default")["uri"] == "gno://notes/a%20b.md"
    research.close()


@pytest.mark.parametrize("refs, good", [
    (["gno://notes/c.md?index=research", "gno://notes/a%20b.md?index=RESEARCH"], True),
    (["gno://notes/c.md?index=default", "notes/c.md", "gno://notes/c.md"], True),
    (["gno://notes/c.md?index=research", "notes/c.md"], False), (["gno://notes/c.md", "gno://notes/c.md?index=research"], False),
    (["gno://notes/c.md?index=research", "gno://notes/c.md?index=default"], False),
    (["gno://notes/c.md?index=research", docid("same\n")], False),
    ([docid("same\n"), "gno://notes/c.md?index=research:1"], False), (["GNO://notes/c.md?index=research", "notes/c.md"], False),
])
def test_references_of_one_request_belong_to_one_index(two, refs, good):
    if good:
        assert run(two, "multi_get", refs=refs)["meta"]["returned"] == len(refs)
    else:
        assert error(two, "multi_get", refs=refs).code == "INVALID_INPUT"


@pytest.mark.parametrize("name, identity", [
    ("default", "default"), ("A b", "a b"), ("1.2", "1.2"), ("x_y-z", "x_y-z"), ("x" * 64, "x" * 64), ("Ünïcode", "ünïcode"),
    ("U\u0308ni", "üni"), ("日本語", "日本語"),
    ("Straße", "strasse"), ("STRASSE", "strasse"), ("a-", "a-"), ("a_", "a_"), ("4", "4"), ("x\u0301y", "x\u0301y"), ("𝐀" * 32, "𝐀" * 32),
    ("", None), (" a", None), ("a ", None), ("a.", None), (".a", None), ("a..b", None), ("a/b", None), ("a\\b", None), ("-a", None),
    ("_a", None), ("a\tb", None), ("a\n", None),
    ("a\0", None), ("x" * 65, None), ("🦓", None), ("a🦓", None), ("a\u00a0b", None), ("a:b", None), ("a*", None), ("𝐀" * 33, None),
    ("\u0301a", None), ("a?b", None), ("~a", None),
])
def test_index_names(name, identity):
    if identity is None:
        with pytest.raises(gno.GnoError) as e:
            gno.index_identity(name)
        assert e.value.code == "INVALID_INPUT"
    else:
        assert gno.index_identity(name) == identity == gno.index_identity(identity)


# ---- ls ----

@pytest.mark.parametrize("arguments, paths", [
    ({}, sorted(ODD)), ({"scope": "notes"}, sorted(ODD)), ({"scope": "NOTES"}, sorted(ODD)), ({"scope": "gno://notes/"}, sorted(ODD)),
    ({"scope": "notes/sub"}, ["sub/b c.md", "sub/deep/er.md"]),
    ({"scope": "notes/sub/"}, ["sub/b c.md", "sub/deep/er.md"]), ({"scope": "gno://notes/sub/deep"}, ["sub/deep/er.md"]),
    ({"scope": "gno://notes/sub/b%20c.md"}, ["sub/b c.md"]),
    ({"scope": "notes/su"}, []), ({"scope": "notes/100%.md"}, ["100%.md"]), ({"scope": "notes/_ub"}, []),
])
def test_ls(odd, arguments, paths):
    listing = run(odd, "ls", **arguments)
    assert sorted(d["relPath"] for d in listing["documents"]) == sorted(paths) and listing["total"] == len(paths)


def test_ls_pages_and_refuses_what_it_does_not_know(odd):
    whole = [d["uri"] for d in run(odd, "ls")["documents"]]
    pages = [[d["uri"] for d in run(odd, "ls", limit=4, offset=at)["documents"]] for at in range(0, len(ODD) + 4, 4)]
    assert sum(pages, []) == whole and len(set(whole)) == len(ODD) and pages[-1] == []
    assert run(odd, "ls", limit=4)["total"] == len(ODD)
    assert error(odd, "ls", scope="nowhere").code == "NOT_FOUND" and error(odd, "ls", limit=0).code == "INVALID_INPUT"
    assert run(odd, "ls", offset=10 ** 6)["documents"] == []
    try:
        assert run(odd, "ls", offset=10 ** 20)["documents"] == []
    except gno.GnoError as e:
        assert e.code == "INVALID_INPUT"
