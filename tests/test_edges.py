"""Edges: what a target means, how edges are typed, that incremental projection is full projection, one hop from documents."""
import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from conftest import add, new_kb, run, write
from hypothesis import given, settings
from hypothesis import strategies as st

import gno

# ---- what a target means -------------------------------------------------------------------------

DOCS = {                    # uri without scheme -> title; their order is not that of the paths
    "notes/z/Alpha.md": "Alpha", "notes/a/Alpha.md": "First of all", "notes/Beta.md": "Alpha", "notes/twin/one.md": "Twin",
    "notes/twin/two.md": "Twin", "notes/Case.md": "Upper", "notes/case.md": "Lower", "notes/x/Case.md": "Deep",
    "notes/caf\u00e9.md": "Caf\u00e9", "notes/Stra\u00dfe.md": "Road", "notes/deep/er/Gamma.md": "G", "notes/report.pdf": "Report 2025",
    "notes/a b (c).md": "Blanks", "notes/50%2Foff.md": "Sale", "notes/index.md": "Notes: all", "notes/a/index.md": "Home",
    "notes/work/Plan.md": "Plan", "work/Plan.md": "Plan", "work/Solo.md": "Only here", "work/deep/Far.md": "Far away",
    "work/index.md": "Work", "notes/.md.md": ".md", "notes/draft.md": "Draft: one",
}


def names_of(docs: dict[str, str]) -> tuple[dict[str, gno.Named], gno.Names]:
    "Documents by collection/path, and what resolve_target needs of them."
    named, by_key = {}, {}
    for i, (uri, title) in enumerate(docs.items(), 1):
        named[uri] = gno.Named(i, *uri.split("/", 1), title, "#" + gno.sha256(title)[:8], "prose", None)
        for key in gno.name_keys(*named[uri][2:5]):
            by_key.setdefault(key, []).append(named[uri])
    return named, gno.Names(by_key, frozenset(uri.split("/")[0] for uri in docs))


def meant(source: str, kind: str, target: str, docs=DOCS) -> tuple[str | None, ...]:
    "(resolution, candidates...) of a target in a document."
    named, names = names_of(docs)
    found = gno.resolve_target(names, named[source], kind, target)
    uris = {doc.id: uri for uri, doc in named.items()}
    return (found.resolution, *[uris[i] for i in found.candidates])


NONE = (None,)
WIKI = {
    # target: what it means in notes/a/index.md
    "Beta": ("exact-path", "notes/Beta.md"),
    "beta.MD": ("exact-path", "notes/Beta.md"),
    "Alpha": ("ambiguous-fallback", "notes/Beta.md", "notes/z/Alpha.md"),       # two titles beat the path of a third
    "z/Alpha": ("exact-path", "notes/z/Alpha.md"),                              # a path beats the titles that end it
    "/z/Alpha.md": ("exact-path", "notes/z/Alpha.md"),
    "q/Alpha": ("ambiguous-fallback", "notes/Beta.md", "notes/z/Alpha.md"),     # only its end is known
    "First of all": ("exact-title", "notes/a/Alpha.md"),
    "first OF all": ("exact-title", "notes/a/Alpha.md"),
    "Twin": ("ambiguous-fallback", "notes/twin/one.md", "notes/twin/two.md"),
    "Case": ("exact-path", "notes/Case.md"), "case": ("exact-path", "notes/case.md"),
    "CASE": ("ambiguous-fallback", "notes/Case.md", "notes/case.md"),
    "x/case": ("exact-path", "notes/x/Case.md"),
    "cafe\u0301": ("exact-title", "notes/caf\u00e9.md"), "CAFE\u0301": ("exact-title", "notes/caf\u00e9.md"),
    "strasse": ("exact-path", "notes/Stra\u00dfe.md"),
    "Gamma": ("path-fallback", "notes/deep/er/Gamma.md"), "er/gamma": ("path-fallback", "notes/deep/er/Gamma.md"),
    "r/Gamma": NONE,                                                            # components are whole ...
    "old/place/Beta": ("path-fallback", "notes/Beta.md"),                       # ... and so are those of the target
    "report.pdf": ("exact-path", "notes/report.pdf"), "report": NONE, "Report 2025": ("exact-title", "notes/report.pdf"),
    "Notes: all": NONE,                                                         # `notes:` is a collection
    "Other: all": NONE, "draft: ONE": ("exact-title", "notes/draft.md"),        # `draft:` is none
    "notes:Gamma": ("path-fallback", "notes/deep/er/Gamma.md"),
    "Plan": ("exact-title", "notes/work/Plan.md"), "work:Plan": ("exact-title", "work/Plan.md"),
    "WORK: plan": ("exact-title", "work/Plan.md"),
    "work/Plan": ("exact-path", "notes/work/Plan.md"),
    "Solo": ("exact-path", "work/Solo.md"), "Only here": ("exact-title", "work/Solo.md"),       # nowhere at home
    "deep/far": ("exact-path", "work/deep/Far.md"), "Far": ("path-fallback", "work/deep/Far.md"),
    "gone/Solo": NONE,                                                          # far away an end alone says too little
    "work:gone/Solo": ("path-fallback", "work/Solo.md"), "notes:Solo": NONE,
    "index": ("exact-path", "notes/index.md"), "./index": ("exact-path", "notes/a/index.md"),
    "../index": ("exact-path", "notes/index.md"), "../../index": NONE,
    "nothing": NONE, "/": NONE, ".md": NONE, "..": NONE,
}


@pytest.mark.parametrize("target", WIKI)
def test_wiki_targets(target):
    assert meant("notes/a/index.md", "wiki", target) == WIKI[target]


MARKDOWN = {
    # target: what it means in notes/a/index.md
    "Alpha.md": ("exact-path", "notes/a/Alpha.md"), "./Alpha.md": ("exact-path", "notes/a/Alpha.md"),
    "alpha": ("exact-path", "notes/a/Alpha.md"), "../Beta.md": ("exact-path", "notes/Beta.md"), "/Beta.md": ("exact-path", "notes/Beta.md"),
    "..//./a/../Beta.md": ("exact-path", "notes/Beta.md"),
    "../../Beta.md": NONE, "../../notes/Beta.md": NONE, "../../work/Plan.md": NONE,     # never out of the collection
    "Beta.md": NONE, "First of all": NONE, "../Twin": NONE, "../Gamma.md": NONE,        # a path, not a title, not an end
    "../a%20b%20(c).md": ("exact-path", "notes/a b (c).md"), "../a b \\(c\\).md": ("exact-path", "notes/a b (c).md"),
    "%2e%2e/Beta.md": ("exact-path", "notes/Beta.md"), "..%2FBeta.md": NONE, "..%2fBeta.md": NONE, "..\\Beta.md": NONE,
    "../50%2Foff.md": ("exact-path", "notes/50%2Foff.md"), "../50%252Foff.md": ("exact-path", "notes/50%2Foff.md"),
    "../cafe%CC%81.md": ("exact-path", "notes/caf\u00e9.md"), "../100%.md": NONE, "../%ff.md": NONE,
    "../Case.md": ("exact-path", "notes/Case.md"), "../case.md": ("exact-path", "notes/case.md"),
    "../CASE.md": ("ambiguous-fallback", "notes/Case.md", "notes/case.md"),
    "../report.pdf": ("exact-path", "notes/report.pdf"), "index.md": ("exact-path", "notes/a/index.md"),
    "..": NONE, "../": NONE, "./": NONE, "/": NONE, "../Beta/": NONE,
}


@pytest.mark.parametrize("target", MARKDOWN)
def test_markdown_targets(target):
    assert meant("notes/a/index.md", "markdown", target) == MARKDOWN[target]


SALE, TWIN = "#" + gno.sha256("Sale")[:8], "#" + gno.sha256("Twin")[:8]
RELATION = {
    "[[Beta]]": ("exact-path", "notes/Beta.md"), "[[Beta|shown]]": ("exact-path", "notes/Beta.md"),
    "[[Beta#part|shown]]": ("exact-path", "notes/Beta.md"), "[[work:Plan]]": ("exact-title", "work/Plan.md"),
    "work:Plan": ("exact-title", "work/Plan.md"), "work:gone": NONE,
    "Beta": ("exact-path", "notes/Beta.md"), "First of all": ("exact-title", "notes/a/Alpha.md"),
    "Alpha": ("exact-path", "notes/a/Alpha.md"),                                # in its own folder, before any title
    "../Beta.md": ("exact-path", "notes/Beta.md"), "../../Beta.md": NONE, "Only here": ("exact-title", "work/Solo.md"),
    "work/Plan": ("exact-path", "work/Plan.md"), "work/deep/Far.md": ("exact-path", "work/deep/Far.md"),
    "gno://work/Plan.md": ("exact-path", "work/Plan.md"), "gno://notes/a%20b%20(c).md": ("exact-path", "notes/a b (c).md"),
    "GNO://Work/Plan.md?index=x": ("exact-path", "work/Plan.md"), "gno://nowhere/Plan.md": NONE, "gno://work": NONE,
    SALE: ("exact-path", "notes/50%2Foff.md"), SALE[:7].upper(): ("exact-path", "notes/50%2Foff.md"), SALE[:6]: NONE, "#00000000": NONE,
    TWIN: ("ambiguous-fallback", "notes/twin/one.md", "notes/twin/two.md"), "nobody": NONE, "[[nobody]]": NONE, "[[#part]]": NONE,
}


@pytest.mark.parametrize("target", RELATION)
def test_relation_targets(target):
    assert meant("notes/a/index.md", "relation", target) == RELATION[target]


def test_the_lowest_uri_is_meant_whatever_came_first():
    docs = {"notes/b.md": "Same", "notes/a.md": "Same", "notes/me.md": "Me", "work/a.md": "Same"}
    for order in itertools.permutations(docs):
        assert meant("notes/me.md", "wiki", "Same", {uri: docs[uri] for uri in order}) == (
            "ambiguous-fallback", "notes/a.md", "notes/b.md")


# ---- the stored edges ----------------------------------------------------------------------------

def edges(kb) -> list[tuple]:
    "The edges of the index in words: (source, seq, target, type, edge source, confidence, resolution, match count)."
    where = {i: f"{collection}/{path}" for i, collection, path in kb.wdb.execute("SELECT id, collection, path FROM documents")}
    return sorted((where[s], seq, where.get(t), kind, gno.EDGE_SOURCES[source], gno.TYPE_CONFIDENCE[confidence],
                   None if resolution is None else gno.RESOLUTIONS[resolution], count)
                  for s, seq, t, kind, source, confidence, resolution, count in kb.wdb.execute(
        "SELECT source, seq, target, edge_type, edge_source, confidence, resolution, match_count FROM edges"))


def warnings(report) -> list[tuple[str, str]]:
    "(collection/path, message) of the unresolved relations a sync reports."
    return [(f"{c['collection']}/{w['relPath']}", w["message"]) for c in report["collections"] for w in c["warnings"]
            if w["code"] == "UNRESOLVED_RELATION"]


def test_links_relations_and_hints(kb, tmp_path):
    root = write(tmp_path / "n", {
        "ada.md": "---\nrelations:\n  Works-At: '[[Acme]]'\n  knows: [bob.md, '[[Nobody]]', Bob B]\n---\n"
                  "# Ada\n\n[[Acme]] and [bob](bob.md), [[gone]]\n",
        "bob.md": "# Bob B\n\n[[ada]]\n", "acme.md": "# Acme\n\n[a](ada.md) [b](ada.md)\n",
        "people/eve.md": "---\nrelations: {knows: Acme}\n---\n# Eve\n\n[[Acme]] [[Bob B]] [x](../bob.md) [[gone]]\n"})
    kb.edit_config(lambda text: 'version: "1.0"\ncontentTypes: [{id: person, prefixes: [people/], graphHints: [Met With, other]}]\n')
    mentions, related = ("mentions", "wikilink", "parsed"), ("related_to", "markdown-link", "parsed")
    expected = [
        ("notes/acme.md", 0, "notes/ada.md", *related, "exact-path", 1), ("notes/acme.md", 1, "notes/ada.md", *related, "exact-path", 1),
        ("notes/ada.md", -4, "notes/bob.md", "knows", "frontmatter-relation", "manual", "exact-title", 1),
        ("notes/ada.md", -3, None, "knows", "frontmatter-relation", "manual", None, 0),
        ("notes/ada.md", -2, "notes/bob.md", "knows", "frontmatter-relation", "manual", "exact-path", 1),
        ("notes/ada.md", -1, "notes/acme.md", "works_at", "frontmatter-relation", "manual", "exact-title", 1),
        ("notes/ada.md", 0, "notes/acme.md", *mentions, "exact-title", 1), ("notes/ada.md", 1, "notes/bob.md", *related, "exact-path", 1),
        ("notes/ada.md", 2, None, *mentions, None, 0),
        ("notes/bob.md", 0, "notes/ada.md", *mentions, "exact-title", 1),
        ("notes/people/eve.md", -1, "notes/acme.md", "knows", "frontmatter-relation", "manual", "exact-title", 1),
        ("notes/people/eve.md", 0, "notes/acme.md", *mentions, "exact-title", 1),           # it has a relation
        ("notes/people/eve.md", 1, "notes/bob.md", "met_with", "wikilink", "configured", "exact-title", 1),
        ("notes/people/eve.md", 2, "notes/bob.md", "met_with", "markdown-link", "configured", "exact-path", 1),
        ("notes/people/eve.md", 3, None, "met_with", "wikilink", "configured", None, 0)]
    report = add(kb, root)
    assert edges(kb) == expected
    assert warnings(report) == [("notes/ada.md", "no document for the relation knows: [[Nobody]]")]     # a lost link is none
    assert warnings(run(kb, "sync")) == []
    write(root, {"nobody.md": "# N\n"})
    assert warnings(run(kb, "sync")) == []
    expected[3] = ("notes/ada.md", -3, "notes/nobody.md", "knows", "frontmatter-relation", "manual", "exact-path", 1)
    assert edges(kb) == expected
    (root / "nobody.md").unlink()
    assert warnings(run(kb, "sync")) == [("notes/ada.md", "no document for the relation knows: [[Nobody]]")]
    write(root, {"ada.md": "# Ada\n\n[[Acme]] and [bob](bob.md), [[gone]]\n"})
    assert warnings(run(kb, "sync")) == []
    assert edges(kb) == expected[:2] + expected[6:]                                          # no front matter, no relations


@pytest.mark.parametrize("hints, edge_type", [
    (["see"], "see"), (["See Also"], "see_also"), ([], "mentions"), (None, "mentions"), ("see", "mentions"), (["1st"], "mentions"),
    ([""], "mentions")])
def test_hints(kb, tmp_path, hints, edge_type):
    kb.edit_config(lambda text: 'version: "1.0"\ncontentTypes: ' + json.dumps([{"id": "a", "prefixes": ["a"], "graphHints": hints}]) + "\n")
    add(kb, write(tmp_path / "n", {"a.md": "[[b]]", "b.md": "[[a]]"}))
    assert [e[3] for e in edges(kb)] == [edge_type, "mentions"]


def test_collections_come_and_go(kb, tmp_path):
    add(kb, write(tmp_path / "n", {"a.md": "[[Plan]] [[work:Plan]] [[job:Plan]]"}))
    assert [e[2] for e in edges(kb)] == [None] * 3
    add(kb, write(tmp_path / "w", {"Plan.md": "[[a]]"}), "work")
    assert [e[2] for e in edges(kb)] == ["work/Plan.md", "work/Plan.md", None, "notes/a.md"]
    run(kb, "collection_rename", collection="work", name="job")
    assert [e[2] for e in edges(kb)] == ["notes/a.md", "job/Plan.md", None, "job/Plan.md"]
    run(kb, "remove_collection", collection="job")
    assert [e[2] for e in edges(kb)] == [None] * 3
    add(kb, tmp_path / "w", "work")
    assert [e[2] for e in edges(kb)] == ["work/Plan.md", "work/Plan.md", None, "notes/a.md"]
    kb.edit_config(lambda text: text.replace("name: notes", "name: other"))
    run(kb, "sync", collection="work")
    assert [e[:3] for e in edges(kb)] == [("work/Plan.md", 0, None)]


def test_an_index_of_the_first_schema_gets_its_edges(kb, tmp_path):
    root = write(tmp_path / "n", {"a.md": "[[b]]", "b.md": "alpha"})
    add(kb, root)
    for made in ("TRIGGER documents_added", "TRIGGER documents_changed", "TRIGGER documents_dropped", "TABLE edges", "TABLE edges_due"):
        kb.wdb.execute("DROP " + made)
    kb.wdb.execute("DELETE FROM meta WHERE key = 'edges'")
    kb.wdb.execute("PRAGMA user_version = 1")
    kb.close()
    run(kb, "sync")
    assert [e[:3] for e in edges(kb)] == [("notes/a.md", 0, "notes/b.md")]


# ---- incremental is full -------------------------------------------------------------------------

def in_line(kb):
    "What incremental projection left is what a full one makes."
    assert kb.wdb.execute("SELECT count(*) FROM edges_due").fetchone() == (0,)
    before = kb.wdb.execute("SELECT * FROM edges").fetchall()
    with gno.transaction(kb.wdb):
        kb.wdb.execute("DELETE FROM meta WHERE key = 'edges'")
        gno.project_edges(kb.wdb, kb.config)
    assert before == kb.wdb.execute("SELECT * FROM edges").fetchall()


PATHS = st.sampled_from(["a.md", "b.md", "A.md", "d/a.md", "d/B.md", "d/e/a.md", "D/b.md", "c.txt"])
TITLES = st.sampled_from(["a", "A", "b", "d/a", "e/a.md", "B.md", "Twin", "c"])
TARGETS = st.sampled_from(["[[a]]", "[[A]]", "[[b]]", "[[d/a]]", "[[D/B]]", "[[e/a]]", "[[x/a]]", "[[Twin|t]]", "[[two:a]]", "[[notes:b]]",
                           "[[../a]]", "[[c.txt]]", "[x](a.md)", "[x](../b.md)", "[x](/d/a.md)", "[x](B)", "[x](e/a.md)", "[[c]]"])
RELATED = st.sampled_from(["", "'[[a]]'", "../a.md", "d/a", "notes/b.md", "two:Twin", "b", "'#" + gno.sha256(b"alpha")[:8] + "'"])
FIXED = st.sampled_from(["alpha", "# a", "# Twin\n"])       # twins, and the text of the docid above
TEXTS = st.one_of(FIXED, st.builds(
    lambda title, links, related: (f"---\nrelations: {{near: {related}}}\n---\n" if related else "") + f"# {title}\n\n{' '.join(links)}\n",
    TITLES, st.lists(TARGETS, max_size=5), RELATED))
DEEDS = st.one_of(
    *[st.tuples(st.just("write"), PATHS, TEXTS)] * 3, st.tuples(st.just("move"), PATHS, PATHS), st.tuples(st.just("delete"), PATHS),
    st.tuples(st.just("drop folder"), st.sampled_from(["d", "d/e"])), st.tuples(st.just("sync")), st.tuples(st.just("sync")),
    st.tuples(st.just("two")), st.tuples(st.just("cleanup")))
CLOCK = itertools.count(1_700_000_000_000_000_000, 1_000_000_007)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(PATHS, TEXTS), min_size=5, max_size=8), st.lists(DEEDS, min_size=3, max_size=12))
def test_incremental_is_full(files, deeds):
    with tempfile.TemporaryDirectory() as place:
        root, kb = write(Path(place, "n"), dict(files)), new_kb(Path(place, "gno"))
        write(Path(place, "two"), {"a.md": "# a\n\n[[b]] [[Twin]]", "twin.md": "# Twin\n\n[[notes:a]] [[c]]"})
        try:
            add(kb, root)
            in_line(kb)
            for deed, *what in deeds:
                path = root / what[0] if what else root
                if deed == "write":
                    write(root, {what[0]: what[1]})
                    os.utime(path, ns=(0, next(CLOCK)))
                elif deed == "move" and path.exists() and what[0] != what[1]:
                    (root / what[1]).parent.mkdir(parents=True, exist_ok=True)
                    path.replace(root / what[1])
                elif deed == "delete":
                    path.unlink(missing_ok=True)
                elif deed == "drop folder":
                    shutil.rmtree(path, ignore_errors=True)
                elif deed == "sync":
                    run(kb, "sync")
                    in_line(kb)
                elif deed == "two" and "two" in kb.config.collections:
                    run(kb, "remove_collection", collection="two")
                    in_line(kb)
                elif deed == "two":
                    add(kb, Path(place, "two"), "two")
                    in_line(kb)
                elif deed == "cleanup":
                    run(kb, "cleanup")
            run(kb, "sync")
            in_line(kb)
            fresh = new_kb(Path(place, "fresh"), config_path=kb.config_path)
            try:
                run(fresh, "sync")
                assert edges(kb) == edges(fresh)
            finally:
                fresh.close()
        finally:
            kb.close()


def projected(kb, monkeypatch) -> set[str]:
    "Sync, and say the documents whose links were resolved again."
    seen, resolve = set(), gno.resolve_target

    def watch(names, source, kind, target):
        seen.add(source.path)
        return resolve(names, source, kind, target)
    with monkeypatch.context() as m:
        m.setattr(gno, "resolve_target", watch)
        run(kb, "sync")
    return seen


def test_only_what_a_change_can_concern_is_resolved_again(kb, tmp_path, monkeypatch):
    filler = {f"f{i}.md": f"[[g{i}]] [x](f0.md)" for i in range(20)}
    root = write(tmp_path / "n", filler | {
        "a.md": "# A\n\n[[b]]", "by-path.md": "[[b]] [[f1]]", "by-title.md": "[[Bee]]", "lost.md": "[[New]]", "b.md": "# Bee\n\n[[a]]",
        "by-docid.md": "---\nrelations: {as: '#" + gno.sha256("# Newer")[:8] + "'}\n---\n"})
    add(kb, root)
    for files, expected in [
            ({}, set()),
            ({"b.md": "# Bee\n\n[[a]] more"}, {"b.md"}),                            # its names are the old ones
            ({"b.md": "# Bees\n\n[[a]]"}, {"b.md", "a.md", "by-path.md", "by-title.md"}),
            ({"new.md": "# Newer"}, {"lost.md", "by-docid.md"}), ({"new.md": "# Newer\n"}, {"by-docid.md"}),
            ({"new.md": "# New"}, {"lost.md"}),
            ({"b.md": None}, {"a.md", "by-path.md"}), ({"b.md": "# Bees\n\n[[a]]"}, {"b.md", "a.md", "by-path.md"})]:
        for name, text in files.items():
            (root / name).unlink() if text is None else write(root, {name: text})
        assert projected(kb, monkeypatch) == expected, files
        in_line(kb)


def test_a_sync_without_changes_looks_at_no_names(kb, tmp_path, monkeypatch):
    add(kb, write(tmp_path / "n", {"a.md": "[[b]]", "b.md": "x"}))
    monkeypatch.setattr(gno, "load_names", None)
    run(kb, "sync")


def test_cut_short_it_is_made_good_by_the_next_sync(kb, tmp_path, monkeypatch):
    root = write(tmp_path / "n", {"a.md": "[[b]]", "b.md": "x", "c.md": "[[d]]", "e.md": "# E", "f.md": "# F"})
    add(kb, root)
    write(root, {"d.md": "# D", "a.md": "[[d]]"})

    def killed(db, config):
        raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(gno, "project_edges", killed)
        run(kb, "sync")
    run(kb, "sync")
    assert [e[:3] for e in edges(kb)] == [("notes/a.md", 0, "notes/d.md"), ("notes/c.md", 0, "notes/d.md")]


@pytest.mark.parametrize("count", [10, 400])
def test_the_number_of_statements_does_not_grow(kb, tmp_path, monkeypatch, count):
    "15 at most however many links there are (the rows of one executemany apart)."
    root = write(tmp_path / "n", {f"n{i}.md": f"# T{i}\n\n[[T{i + 1}]] [[n{i - 1}]] [x](n{i + 2}.md) [[gone]]" for i in range(count)})
    add(kb, root)
    for full in (True, False):
        said: list[str] = []
        if full:
            kb.wdb.execute("DELETE FROM meta WHERE key = 'edges'")
        else:
            write(root, {f"n{i}.md": "# Same\n\n[[n0]] [[T1]]" for i in range(count // 4)})
            with monkeypatch.context() as m:
                m.setattr(gno, "project_edges", lambda db, config: [])
                run(kb, "sync")
        with gno.transaction(kb.wdb):
            kb.wdb.set_trace_callback(said.append)
            gno.project_edges(kb.wdb, kb.config)
            kb.wdb.set_trace_callback(None)
        said = [s for s in said if not s.startswith("INSERT INTO edges ")]
        assert 0 < len(said) <= 15, said


# ---- one hop -------------------------------------------------------------------------------------

def test_linked(kb, tmp_path):
    root = write(tmp_path / "n", {
        "a.md": "---\nrelations: {near: lonely.md}\n---\n# A\n\n[[b]] [[Bee]] [x](c.md) [[A]] [[gone]] [[Twin]] [[q/deep]]",
        "b.md": "# Bee\n\n[x](a.md)", "c.md": "# C\n\n[[deep]]", "t1.md": "# Twin", "t2.md": "# Twin", "x/deep.md": "# Depth",
        "lonely.md": "alpha"})
    add(kb, root)
    where = dict(kb.wdb.execute("SELECT path, id FROM documents").fetchall())
    paths = {i: path for path, i in where.items()}

    def hops(*seeds):
        return {(paths[s], paths[n]): (confidence, weight) for s, n, confidence, weight in gno.linked(kb.wdb, [where[p] for p in seeds])}
    assert hops("a.md") == {("a.md", "b.md"): ("explicit", 3.0), ("a.md", "c.md"): ("explicit", 1.0), ("a.md", "t1.md"): ("ambiguous", 1.0)}
    assert hops("c.md", "x/deep.md", "t2.md", "lonely.md") == {
        ("c.md", "a.md"): ("explicit", 1.0), ("c.md", "x/deep.md"): ("inferred", 1.0), ("x/deep.md", "c.md"): ("inferred", 1.0)}
    assert gno.linked(kb.wdb, []) == [] and gno.linked(kb.wdb, [10 ** 9]) == []
    said: list[str] = []
    kb.wdb.set_trace_callback(said.append)
    gno.linked(kb.wdb, list(paths))
    kb.wdb.set_trace_callback(None)
    assert len([s for s in said if not s.startswith("--")]) == 1
    kb.wdb.execute("UPDATE documents SET active = 0 WHERE path IN ('b.md', 'x/deep.md')")      # before the edges follow
    assert hops("a.md", "b.md", "c.md").keys() == {("a.md", "c.md"), ("a.md", "t1.md"), ("c.md", "a.md")}
