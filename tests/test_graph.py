"""Links and graph: what each of the six tools answers, worked out by hand; that all of them agree on random vaults; statements counted."""
import itertools
import json
import re
import tempfile
from collections import Counter, deque
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from conftest import add, cli, new_kb, run, write
from hypothesis import given, settings
from hypothesis import strategies as st
from test_edges import PATHS, TEXTS

import gno

GRAPH_TOOLS = ("links", "backlinks", "graph", "graph_query", "graph_neighbors", "graph_path")


def ask(kb, tool: str, /, **arguments):
    "A tool's result, checked against its own schema, and its text."
    result = run(kb, tool, **arguments)
    jsonschema.validate(result, gno.output_schema(gno.TOOLS[tool]))
    return result, gno.text_of(gno.TOOLS[tool], result, arguments)


def refused(kb, tool: str, /, **arguments) -> tuple[str, str]:
    "The code of the error of a call, and all it says."
    with pytest.raises(gno.GnoError) as e:
        run(kb, tool, **arguments)
    return e.value.code, f"{e.value.message} {e.value.hint}"


def path_of(uri: str) -> str:
    "collection/path of a uri."
    return gno.uri_unquote(uri.removeprefix("gno://"))


def graph_edges(result) -> dict[tuple, tuple]:
    "(source, target, type) -> (weight, confidence, audit) of a graph, documents by collection/path."
    where = {node["id"]: path_of(node["uri"]) for node in result["nodes"]}
    return {(where[e["source"]], where[e["target"]], e["type"]): (e["weight"], e["confidence"], e["audit"]) for e in result["links"]}


# ---- links and backlinks -------------------------------------------------------------------------

HOME = """---
up: '[[no]]'
---
# Home

[[docs:Getting Started#top|gs]] [x](./b.md#h) <!-- [[b]] --> [m](mailto:a@b.c) [[https://e.test]]
\U0001f600 [[Twin]] and [[gone]] [[odd: one]] ![[pic.png]] [p](paper.pdf) `[[b]]`
[y](sp%20ace.md) [z](sp%2Face.md) [e](../../escape.md) [f](folder/) [[folder/Note|folder/Note]]
```
[[b]]
```
| [[b\\|B]] | [[Home]] |
"""
DOCID = {name: "#" + gno.sha256(text)[:8] for name, text in {"gs": "# Getting Started\n\n[[notes:b]]\n",
                                                             "b": "# Bee\n\n[[home]] [[Home|h]]\n",
                                                            "twin": "# Twin\n", "space": "# S\n", "note": "# N\n", "home": HOME}.items()}
LINKS = [   # (type, target, more, line, column in UTF-16 units, document, confidence, matches)
    ("wiki", "Getting Started", {"targetCollection": "docs", "targetAnchor": "top", "linkText": "gs"}, 6, 1, "docs/gs.md", "explicit", 1),
    ("markdown", "./b.md", {"targetAnchor": "h", "linkText": "x"}, 6, 33, "notes/b.md", "explicit", 1),
    ("wiki", "Twin", {"candidates": ["gno://notes/t1.md", "gno://notes/t2.md"]}, 7, 4, "notes/t1.md", "ambiguous", 2),
    ("wiki", "gone", {}, 7, 17, None, None, None),
    ("wiki", "odd: one", {}, 7, 26, None, None, None),
    ("wiki", "pic.png", {"attachment": True}, 7, 39, None, None, None),
    ("markdown", "paper.pdf", {"attachment": True, "linkText": "p"}, 7, 52, None, None, None),
    ("markdown", "sp%20ace.md", {"linkText": "y"}, 8, 1, "notes/sp ace.md", "explicit", 1),
    ("markdown", "sp%2Face.md", {"linkText": "z"}, 8, 18, None, None, None),
    ("wiki", "folder/Note", {}, 8, 69, "notes/folder/Note.md", "explicit", 1),
    ("wiki", "b", {"linkText": "B"}, 12, 3, "notes/b.md", "explicit", 1),
    ("wiki", "Home", {}, 12, 14, "notes/home.md", "explicit", 1)]


@pytest.fixture
def vault(kb, tmp_path):
    add(kb, write(tmp_path / "n", {"home.md": HOME, "b.md": "# Bee\n\n[[home]] [[Home|h]]\n", "t1.md": "# Twin\n", "t2.md": "# Twin\n",
                                   "sp ace.md": "# S\n", "folder/Note.md": "# N\n", "lonely.md": "alone", "pic.png": b"\x89PNG"}))
    add(kb, write(tmp_path / "d", {"gs.md": "# Getting Started\n\n[[notes:b]]\n"}), "docs")
    return kb


def test_links(vault):
    result, text = ask(vault, "links", ref="notes/home.md")
    assert [(link["linkType"], link["targetRef"],
             {k: v for k, v in link.items() if k in ("targetCollection", "targetAnchor", "linkText", "attachment", "candidates")},
             *link["position"].values(), link["resolved"] and path_of(link["resolved"]["uri"]), link.get("confidence"),
             link.get("matchCount"))
            for link in result["links"]] == LINKS
    assert result["links"][0]["resolved"] == {"docid": DOCID["gs"], "uri": "gno://docs/gs.md", "title": "Getting Started"}
    assert result["meta"] == {"docid": DOCID["home"], "uri": "gno://notes/home.md", "title": "Home", "totalLinks": 12, "resolvedCount": 7,
                              "resolutionAvailable": True, "filterType": None}
    assert text.startswith('Found 12 outgoing links in gno://notes/home.md:\n\n  [wiki] docs:Getting Started#top "gs" (line 6) -> gno://docs/gs.md\n')
    result, text = ask(vault, "links", ref=DOCID["home"], type="markdown")
    assert [link["targetRef"] for link in result["links"]] == [link[1] for link in LINKS if link[0] == "markdown"]
    assert result["meta"]["filterType"] == "markdown" and text.startswith("Found 4 outgoing links in ")
    assert ask(vault, "links", ref="gno://notes/lonely.md")[1] == "No outgoing links in gno://notes/lonely.md"


def test_links_before_they_are_resolved(vault, tmp_path, monkeypatch):
    write(tmp_path / "n", {"new.md": "[[b]]"})
    with monkeypatch.context() as m:
        m.setattr(gno, "project_edges", lambda db, config: [])
        run(vault, "sync")
    result, _ = ask(vault, "links", ref="notes/new.md")
    assert result["links"][0]["resolved"] is None and result["meta"]["resolutionAvailable"] is False


def test_backlinks(vault):
    result, text = ask(vault, "backlinks", ref="notes/b.md")
    assert [(path_of(b["sourceDocUri"]), b["sourceDocTitle"], b["linkText"], b["linkType"], *b["position"].values())
            for b in result["backlinks"]] == [
        ("docs/gs.md", "Getting Started", "notes:b", "wiki", 3, 1), ("notes/home.md", "Home", "x", "markdown", 6, 33),
        ("notes/home.md", "Home", "B", "wiki", 12, 3)]
    assert result["meta"] == {"docid": DOCID["b"], "uri": "gno://notes/b.md", "title": "Bee", "totalBacklinks": 3, "filterCollection": None}
    assert text == ('Found 3 backlinks to gno://notes/b.md:\n\n  gno://docs/gs.md "Getting Started" (line 3)\n'
                    '  gno://notes/home.md "Home" (line 6)\n  gno://notes/home.md "Home" (line 12)')
    result, text = ask(vault, "backlinks", ref="notes/b.md", collection="DOCS")
    assert len(result["backlinks"]) == 1 and result["meta"]["filterCollection"] == "docs" and text.startswith("Found 1 backlink to ")
    result, text = ask(vault, "backlinks", ref="notes/t1.md")
    (only,) = result["backlinks"]
    assert (only["confidence"], only["matchCount"]) == ("ambiguous", 2) and "ambiguous, 2 matches" in text
    assert ask(vault, "backlinks", ref="notes/t2.md")[1] == "No backlinks to gno://notes/t2.md"
    assert ask(vault, "backlinks", ref="notes/home.md")[0]["meta"]["totalBacklinks"] == 3          # its link to itself too


def test_deleted_sources_are_gone(vault, tmp_path):
    (tmp_path / "n" / "home.md").unlink()
    run(vault, "sync")
    assert [path_of(b["sourceDocUri"]) for b in ask(vault, "backlinks", ref="notes/b.md")[0]["backlinks"]] == ["docs/gs.md"]
    assert set(graph_edges(ask(vault, "graph")[0])) == {("docs/gs.md", "notes/b.md", "wiki")}


@pytest.mark.parametrize("tool, arguments, code, said", [
    ("links", {"ref": "b"}, "INVALID_INPUT", "Invalid ref format"), ("links", {"ref": "notes/none.md"}, "NOT_FOUND", "notes/none.md"),
    ("links", {"ref": "notes/b.md", "type": "similar"}, "INVALID_INPUT", "type"), ("backlinks", {"ref": "#zz"}, "INVALID_INPUT", "#zz"),
    ("backlinks", {"ref": "notes/b.md", "collection": "none"}, "NOT_FOUND", "known collections: notes, docs"),
    ("graph", {"collection": "none"}, "NOT_FOUND", "none"), ("graph", {"limit": 5001}, "INVALID_INPUT", "limit"),
    ("graph", {"edgeLimit": 0}, "INVALID_INPUT", "edgeLimit"), ("graph", {"similarTopK": 21}, "INVALID_INPUT", "similarTopK"),
    ("graph", {"threshold": 1.5}, "INVALID_INPUT", "threshold"),
    ("graph_neighbors", {"ref": "none"}, "NOT_FOUND", "none"),
    ("graph_neighbors", {"ref": "twin"}, "INVALID_INPUT", "gno://notes/t1.md, gno://notes/t2.md"),
    ("graph_neighbors", {"ref": "docs/gs.md", "collection": "notes"}, "NOT_FOUND", "not in the collection"),
    ("graph_neighbors", {"ref": "b.md", "collection": "docs"}, "NOT_FOUND", "b.md"),
    ("graph_neighbors", {"ref": "#zz"}, "INVALID_INPUT", "#zz"),
    ("graph_neighbors", {"ref": "b.md", "direction": "up"}, "INVALID_INPUT", "direction"),
    ("graph_path", {"from": "b.md", "to": "none.md"}, "NOT_FOUND", "none.md"),
    ("graph_path", {"from": "b.md"}, "INVALID_INPUT", "to is required"),
    ("graph_path", {"from": "b.md", "to": "b.md", "maxDepth": 13}, "INVALID_INPUT", "maxDepth"),
    ("graph_query", {"ref": "notes/none.md"}, "NOT_FOUND", "notes/none.md"),
    ("graph_query", {"ref": "b"}, "INVALID_INPUT", "Invalid ref format"),
    ("graph_query", {"ref": "notes/b.md", "edgeType": "a", "relation": "b"}, "INVALID_INPUT", "edgeType and relation"),
    ("graph_query", {"ref": "notes/b.md", "maxDepth": 1, "depth": 2}, "INVALID_INPUT", "maxDepth and depth"),
    ("graph_query", {"ref": "notes/b.md", "edgeType": "1st"}, "INVALID_INPUT", "1st"),
    ("graph_query", {"ref": "notes/b.md", "relation": "!"}, "INVALID_INPUT", "!"),
    ("graph_query", {"ref": "notes/b.md", "depth": 7}, "INVALID_INPUT", "depth")])
def test_refusals(vault, tool, arguments, code, said):
    assert refused(vault, tool, **arguments)[0] == code and said in refused(vault, tool, **arguments)[1]


# ---- the graph and its report --------------------------------------------------------------------

def test_graph(vault):
    result, text = ask(vault, "graph")
    exact_title, exact_path = {"resolution": "exact-title", "matchCount": 1}, {"resolution": "exact-path", "matchCount": 1}
    assert graph_edges(result) == {         # home's link to itself is no edge
        ("notes/home.md", "docs/gs.md", "wiki"): (1, "explicit", exact_title),
        ("notes/home.md", "notes/b.md", "markdown"): (1, "explicit", exact_path),
        ("notes/home.md", "notes/b.md", "wiki"): (1, "explicit", exact_path),
        ("notes/home.md", "notes/t1.md", "wiki"): (1, "ambiguous", {"resolution": "ambiguous-fallback", "matchCount": 2}),
        ("notes/home.md", "notes/sp ace.md", "markdown"): (1, "explicit", exact_path),
        ("notes/home.md", "notes/folder/Note.md", "wiki"): (1, "explicit", exact_path),
        ("docs/gs.md", "notes/b.md", "wiki"): (1, "explicit", exact_path),
        ("notes/b.md", "notes/home.md", "wiki"): (2, "explicit", exact_title)}
    assert {path_of(n["uri"]): n["degree"] for n in result["nodes"]} == {
        "notes/home.md": 6, "notes/b.md": 3, "docs/gs.md": 2, "notes/t1.md": 1, "notes/sp ace.md": 1, "notes/folder/Note.md": 1}
    report, meta = result["report"], result["meta"]
    assert [n["uri"] for n in report["hubs"][:3]] == ["gno://notes/home.md", "gno://notes/b.md", "gno://docs/gs.md"]
    assert [n["uri"] for n in report["bridgeCandidates"]] == ["gno://notes/home.md"]
    assert report["isolated"]["total"] == 2
    assert {n["uri"] for n in report["isolated"]["examples"]} == {"gno://notes/t2.md", "gno://notes/lonely.md"}
    # attachments and what is elsewhere are no notes
    assert report["unresolvedLinks"] == {"total": 3, "byType": {"wiki": 2, "markdown": 1}}
    assert report["edgeTypes"] == {"wiki": 6, "markdown": 2, "similar": 0}
    assert report["edgeConfidence"] == {"explicit": 7, "inferred": 0, "ambiguous": 1, "similarity": 0}
    assert report["audit"] == {"inferredEdges": 0, "ambiguousEdges": 1, "similarityEdges": 0}
    assert meta == {"collection": None, "nodeLimit": 2000, "edgeLimit": 10000, "totalNodes": 6, "totalEdges": 8, "totalEdgesUnresolved": 3,
                    "returnedNodes": 6, "returnedEdges": 8, "truncated": False, "linkedOnly": True, "includedSimilar": False,
                    "similarAvailable": False, "similarTopK": 5, "similarTruncatedByComputeBudget": False, "warnings": []}
    assert re.match(r'Knowledge Graph: 6 nodes, 8 edges\n\nTop nodes by degree:\n  \[#[0-9a-f]{8}\] gno://notes/home.md "Home" \(degree: 6\)\n', text)
    assert ask(vault, "graph")[0] == result


def test_graph_of_one_collection_and_cut_short(vault):
    result, _ = ask(vault, "graph", collection="notes")
    assert not any("docs/gs.md" in key for key in graph_edges(result))
    assert result["meta"]["totalEdges"] == 6 and result["meta"]["collection"] == "notes"
    assert result["report"]["unresolvedLinks"]["total"] == 3
    result, text = ask(vault, "graph", limit=2, edgeLimit=2)
    assert [n["uri"] for n in result["nodes"]] == ["gno://notes/home.md", "gno://notes/b.md"] and len(result["links"]) == 2
    assert {"totalNodes": 6, "totalEdges": 8, "returnedNodes": 2, "returnedEdges": 2, "truncated": True}.items() <= result["meta"].items()
    assert result["report"]["edgeTypes"]["wiki"] == 6 and "Returned: 2 nodes, 2 edges" in text      # of the whole graph
    result, _ = ask(vault, "graph", linkedOnly=False)
    assert result["meta"]["totalNodes"] == 8
    assert {n["uri"] for n in result["nodes"] if not n["degree"]} == {"gno://notes/t2.md", "gno://notes/lonely.md"}
    result, _ = ask(vault, "graph", linkedOnly=False, includeSimilar=True)
    assert result["meta"]["warnings"] and not result["meta"]["includedSimilar"]


def test_an_empty_graph(kb):
    result, text = ask(kb, "graph")
    assert result["nodes"] == result["links"] == [] and result["report"]["communities"]["total"] == 0
    assert text.startswith("Knowledge Graph: 0 nodes, 0 edges")


def test_twins_are_two_nodes(kb, tmp_path):
    add(kb, write(tmp_path / "n", {"a.md": "alpha", "b.md": "alpha", "c.md": "[[a]] [[b]]"}))
    result, _ = ask(kb, "graph")
    docid = "#" + gno.sha256("alpha")[:8]
    assert {n["id"]: n["uri"] for n in result["nodes"] if n["relPath"] != "c.md"} == {
        docid: "gno://notes/a.md", "gno://notes/b.md": "gno://notes/b.md"}
    assert run(kb, "graph_neighbors", ref=docid)["source"]["uri"] == "gno://notes/a.md"
    assert run(kb, "graph_neighbors", ref="gno://notes/b.md")["source"]["id"] == "gno://notes/b.md"
    assert {e["target"] for e in run(kb, "graph_query", ref="notes/c.md")["edges"]} == {docid, "gno://notes/b.md"}


def test_removed_collections_are_out_of_sight(vault):
    run(vault, "remove_collection", collection="docs")
    assert not any("docs/gs.md" in key for key in graph_edges(run(vault, "graph")))
    assert len(run(vault, "backlinks", ref="notes/b.md")["backlinks"]) == 2
    assert run(vault, "links", ref="notes/home.md")["links"][0]["resolved"] is None


@pytest.mark.parametrize("near, points", [
    ({}, set()), ({1: [2], 2: [1]}, set()),
    ({1: [2], 2: [1, 3], 3: [2]}, {2}),                                                             # a chain
    ({1: [2, 2], 2: [1, 1, 3], 3: [2]}, {2}),                                                       # two links are not two ways
    ({1: [2, 3], 2: [1, 3], 3: [1, 2]}, set()),                                                     # a ring
    ({1: [2, 3], 2: [1, 3], 3: [1, 2, 4, 5], 4: [3, 5], 5: [3, 4]}, {3}),                           # two rings that share a node
    ({1: [2], 2: [1, 3, 4], 3: [2], 4: [2], 5: [6], 6: [5, 7], 7: [6]}, {2, 6})])                   # a star and a chain
def test_articulation_points(near, points):
    for order in itertools.islice(itertools.permutations(near), 120):
        assert gno.articulation_points({node: near[node] for node in order}) == points


def parts(nodes, pairs) -> int:
    "How many parts a graph is in."
    left, count = set(nodes), 0
    while left:
        count, todo = count + 1, [left.pop()]
        while todo:
            node = todo.pop()
            linked = {b if a == node else a for a, b in pairs if node in (a, b)} & left
            left -= linked
            todo += linked
    return count


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] < pair[1]), max_size=16))
def test_articulation_points_by_taking_each_away(pairs):
    nodes = {node for pair in pairs for node in pair}
    cut = {node for node in nodes if parts(nodes - {node}, [p for p in pairs if node not in p]) > parts(nodes, pairs)}
    assert gno.articulation_points(gno.near_of({(*pair, 0): (0, 1, 1) for pair in pairs})) == cut


def communities(ids: str, *edges: tuple) -> list[str]:
    "The groups of nodes with one-letter ids, in the order of `ids`; edges are (\"ab\", weight, place in GRAPH_RESOLUTIONS)."
    nodes = [gno.Node(n, "notes", letter, "#" + letter, letter, "", "#" + letter) for n, letter in enumerate(ids)]
    found = gno.find_communities(nodes, [(ids.index(pair[0]), ids.index(pair[1]), (how, 1, weight)) for pair, weight, how in edges])
    return ["".join(ids[n] for n in group) for group in found]


def test_communities():
    def links(weight, *pairs):
        return [(pair, weight, 0) for pair in pairs]
    rings, bridge = links(2, "ab", "bc", "ca", "de", "ef", "fd"), links(1, "cd")
    assert communities("abcdef", *rings, *bridge) == ["abc", "def"]
    assert communities("fedcba", *rings, *bridge) == ["cba", "fed"]                 # whatever the order of nodes ...
    assert communities("abcdef", *bridge, *reversed(rings)) == ["abc", "def"]       # ... and of edges
    assert communities("abcx", *links(1, "ab")) == ["ab", "c", "x"] and communities("") == []
    assert communities("abc", ("ab", 1, 0), ("bc", 3, 0)) == ["abc"]
    # b stands between the pairs a1 and c2: two sure links pull more than two guessed ones, or a similarity
    for weak in ((2, 2), (2, 3), (0.9, 4)):
        assert communities("a1bc2", ("a1", 9, 0), ("c2", 9, 0), ("ab", *weak), ("bc", 2, 0)) == ["bc2", "a1"], weak


def test_the_report_on_communities(kb, tmp_path):
    ring = {f"{a}{n}.md": f"# {a}{n}\n\n" + " ".join(f"[[{a}{m}]] " * 2 for m in range(n)) for a in "xy" for n in range(4)}
    add(kb, write(tmp_path / "n", ring | {"x0.md": ring["x0.md"] + " [[y0]]", "one.md": "1"}))
    result, text = ask(kb, "graph", linkedOnly=False)
    found = result["report"]["communities"]
    assert found["total"] == 3 and found["algorithm"] == "deterministic-label-propagation" and found["skipped"] is False
    assert [(c["id"], c["label"], c["size"], c["edgeCount"], c["density"]) for c in found["top"]] == [
        ("c1", "x0", 4, 6, 1.0), ("c2", "y0", 4, 6, 1.0), ("c3", "one", 1, 0, 0)]
    assert {n["relPath"]: n["communityId"] for n in result["nodes"]} == {name: {"x": "c1", "y": "c2", "o": "c3"}[name[0]]
                                                                         for name in [*ring, "one.md"]}
    assert found["assignments"] == {n["id"]: n["communityId"] for n in result["nodes"]} and "c1 x0: 4 nodes, 6 edges" in text
    assert found["top"][0]["topNodes"][0]["relPath"] == "x0.md"


def test_communities_are_skipped_above_the_cap(vault, monkeypatch):
    monkeypatch.setattr(gno, "COMMUNITY_NODES", 3)
    result, text = ask(vault, "graph")
    assert result["report"]["communities"] == {"total": 0, "algorithm": "deterministic-label-propagation", "skipped": True,
                                               "assignments": {}, "top": []}
    assert len(result["meta"]["warnings"]) == 1 and "communityId" not in result["nodes"][0] and "Note: communities" in text
    assert ask(vault, "graph", limit=3)[0]["report"]["communities"]["skipped"] is False


# ---- similarity ----------------------------------------------------------------------------------

@pytest.fixture
def alike(kb, tmp_path):
    "Four linked notes with vectors: a and b at 0.8, b and c at 0.96, a and c at 0.6, d across."
    add(kb, write(tmp_path / "n", {name + ".md": f"# {name}\n\n[[hub]]\n" for name in "abcd"} | {"hub.md": "# hub\n"}))
    card = gno.find_card(kb, "embed", "")
    with gno.transaction(kb.wdb):
        space = gno.fingerprint_id(kb.wdb, card, card.data["dims"])
        for name, axes in {"a": (100, 0, 0), "b": (80, 60, 0), "c": (60, 80, 0), "d": (0, 0, 100)}.items():
            (chunk,) = kb.wdb.execute("SELECT c.input_hash FROM chunks c JOIN documents d ON d.mirror_id = c.mirror_id WHERE d.path = ?",
                                      [name + ".md"]).fetchone()
            kb.wdb.execute("INSERT INTO vectors VALUES (?, ?, 1.0, ?)", [space, chunk, np.array(axes, np.int8).tobytes()])
    return kb


@pytest.mark.parametrize("arguments, expected", [
    ({}, {("a", "b"): 0.8, ("b", "c"): 0.96}), ({"threshold": 0.6}, {("a", "b"): 0.8, ("b", "c"): 0.96, ("a", "c"): 0.6}),
    ({"threshold": 0.6, "similarTopK": 1}, {("a", "b"): 0.8, ("b", "c"): 0.96}), ({"threshold": 0.97}, {}),
    ({"threshold": 0, "similarTopK": 20}, {("a", "b"): 0.8, ("b", "c"): 0.96, ("a", "c"): 0.6, ("a", "d"): 0, ("b", "d"): 0,
                                           ("c", "d"): 0})])
def test_similar(alike, arguments, expected):
    result, _ = ask(alike, "graph", includeSimilar=True, **arguments)
    edges = {tuple(sorted((s[6:-3], t[6:-3]))): edge for (s, t, kind), edge in graph_edges(result).items() if kind == "similar"}
    assert edges == {pair: (score, "similarity", {"resolution": "similarity", "score": score}) for pair, score in expected.items()}
    assert all(e["source"] < e["target"] for e in result["links"] if e["type"] == "similar")
    assert result["report"]["edgeTypes"] == {"wiki": 4, "markdown": 0, "similar": len(expected)}
    assert result["meta"]["totalEdges"] == 4 + len(expected)
    assert result["meta"]["includedSimilar"] and not result["meta"]["similarTruncatedByComputeBudget"] and result["nodes"][0]["degree"] == 4


def test_similarity_only_on_request_and_within_its_budget(alike, monkeypatch):
    result, _ = ask(alike, "graph")
    assert result["meta"]["similarAvailable"] and not result["meta"]["includedSimilar"] and len(result["links"]) == 4
    monkeypatch.setattr(gno, "SIMILAR_DOCS", 3)
    order = [n["relPath"] for n in result["nodes"]]
    result, _ = ask(alike, "graph", includeSimilar=True, similarTopK=1)
    assert result["meta"]["similarTruncatedByComputeBudget"] and order[0] == "hub.md"
    asked = set(order[:3])
    assert all({s[6:], t[6:]} & asked for s, t, kind in graph_edges(result) if kind == "similar")
    monkeypatch.setattr(gno, "missing_packages", lambda *names: list(names))
    result, _ = ask(alike, "graph", includeSimilar=True)
    assert not result["meta"]["similarAvailable"] and len(result["meta"]["warnings"]) == 1


def test_similar_neighbors_and_paths(alike):
    result, _ = ask(alike, "graph_neighbors", ref="b", includeSimilar=True)
    assert {(n["node"]["title"], n["direction"], n["edge"]["type"]) for n in result["neighbors"]} == {
        ("hub", "out", "wiki"), ("a", "out", "similar"), ("c", "out", "similar")}
    result, _ = ask(alike, "graph_neighbors", ref="b", includeSimilar=True, direction="in")
    assert {(n["node"]["title"], n["direction"]) for n in result["neighbors"]} == {("a", "in"), ("c", "in")}      # it has no direction
    assert ask(alike, "graph_path", **{"from": "a", "to": "b"})[0]["meta"]["hops"] == 2
    result, text = ask(alike, "graph_path", **{"from": "a", "to": "b"}, includeSimilar=True)
    assert result["meta"]["hops"] == 1 and result["path"]["edges"][0]["type"] == "similar" and "(similarity)" in text


# ---- neighbours and paths ------------------------------------------------------------------------

def test_neighbors(vault):
    result, text = ask(vault, "graph_neighbors", ref="notes/b.md")
    assert [(n["direction"], n["edge"]["type"], path_of(n["node"]["uri"]), n["node"]["degree"]) for n in result["neighbors"]] == [
        ("in", "markdown", "notes/home.md", 6), ("in", "wiki", "docs/gs.md", 2), ("in", "wiki", "notes/home.md", 6),
        ("out", "wiki", "notes/home.md", 6)]
    assert result["source"]["degree"] == 3 and result["source"]["id"] == DOCID["b"]
    assert {"direction": "both", "totalNeighbors": 4, "totalNodes": 3, "totalEdges": 4,
            "truncated": False}.items() <= result["meta"].items()
    assert text.startswith(f"Found 4 neighbors of gno://notes/b.md:\n\n  <- [markdown] [{DOCID['home']}] gno://notes/home.md \"Home\"\n")
    for direction, count in (("in", 3), ("out", 1)):
        result, _ = ask(vault, "graph_neighbors", ref="notes/b.md", direction=direction)
        assert [n["direction"] for n in result["neighbors"]] == [direction] * count and result["meta"]["totalNeighbors"] == count
    result, text = ask(vault, "graph_neighbors", ref="notes/home.md", limit=2, edgeLimit=3)
    assert result["meta"]["truncated"] and result["meta"]["totalNeighbors"] == 7 and "of 7" in text
    assert len(result["neighbors"]) == 3 and len({n["node"]["id"] for n in result["neighbors"]}) <= 2
    result, text = ask(vault, "graph_neighbors", ref="notes/b.md", collection="notes")
    assert {path_of(n["node"]["uri"]) for n in result["neighbors"]} == {"notes/home.md"}


@pytest.mark.parametrize("ref, path", [
    ("gno://docs/gs.md", "docs/gs.md"), ("docs/gs.md", "docs/gs.md"), ("gs.md", "docs/gs.md"), ("GETTING started", "docs/gs.md"),
    ("folder/Note.md", "notes/folder/Note.md"), ("sp ace.md", "notes/sp ace.md"), (DOCID["note"], "notes/folder/Note.md"),
    ("lonely", "notes/lonely.md"),
    (DOCID["twin"], "notes/t1.md"), ("t2.md", "notes/t2.md")])
def test_node_references(vault, ref, path):
    result, _ = ask(vault, "graph_neighbors", ref=ref)
    assert path_of(result["source"]["uri"]) == path
    assert ask(vault, "graph_path", **{"from": ref, "to": ref})[0]["path"]["nodes"] == [result["source"]]


def test_an_isolated_note_has_no_neighbours_and_no_paths(vault):
    result, text = ask(vault, "graph_neighbors", ref="notes/lonely.md")
    assert result["neighbors"] == [] and result["source"]["degree"] == 0 and text == "No neighbors of gno://notes/lonely.md"
    result, text = ask(vault, "graph_path", **{"from": "notes/lonely.md", "to": "notes/b.md"})
    assert result["path"] is None and {"found": False, "hops": 0, "maxDepth": 6}.items() <= result["meta"].items()
    assert text == "No path from gno://notes/lonely.md to gno://notes/b.md within 6 hops"


def test_paths(kb, tmp_path):
    "0 <-> 1 <-> 2 ...: a wiki link on, and at even numbers a Markdown link back."
    chain = {f"n{i:02}.md": f"# {i}\n\n[[n{i + 1:02}]]" + f" [x](n{i - 1:02}.md)" * (i % 2 == 0) for i in range(14)}
    add(kb, write(tmp_path / "n", chain))
    for hops in range(13):
        for start, goal in ((0, hops), (hops, 0)):
            arguments = {"from": f"n{start:02}.md", "to": f"n{goal:02}.md"}
            result, _ = ask(kb, "graph_path", **arguments, maxDepth=max(hops, 1))
            steps = range(start, goal + 1) if start <= goal else range(start, goal - 1, -1)
            assert [n["relPath"] for n in result["path"]["nodes"]] == [f"n{i:02}.md" for i in steps]
            assert result["meta"]["hops"] == hops == len(result["path"]["edges"]) and result["meta"]["found"]
            if hops > 1:
                assert ask(kb, "graph_path", **arguments, maxDepth=hops - 1)[0]["path"] is None
    result, text = ask(kb, "graph_path", **{"from": "n02.md", "to": "n00.md"})
    two, one, none = (f'[{n["id"]}] {n["uri"]} "{n["title"]}"' for n in result["path"]["nodes"])
    assert text == f"Path from gno://notes/n02.md to gno://notes/n00.md: 2 hops\n\n  {two}\n  -> [markdown] {one}\n  <- [wiki] {none}"
    result, _ = ask(kb, "graph_path", **{"from": "n00.md", "to": "n12.md"}, maxDepth=12, limit=1, edgeLimit=1)
    assert result["meta"]["hops"] == 12     # limits cut no path


# ---- typed edges ---------------------------------------------------------------------------------

@pytest.fixture
def people(kb, tmp_path):
    kb.edit_config(lambda text: 'version: "1.0"\ncontentTypes: [{id: org, prefixes: [org/], graphHints: [Part Of, x]}]\n')
    add(kb, write(tmp_path / "n", {
        "alice.md": "---\nrelations: {works-at: '[[Acme]]', knows: [bob.md]}\n---\n# Alice\n\n[[Bob]] [b](bob.md) [[Bob]] [[Acme]]\n",
        "bob.md": "# Bob\n\n[[Carol]]\n", "carol.md": "# Carol\n\n[[Bob]] [[carol]]\n", "org/acme.md": "# Acme\n\n[[Holding]]\n",
        "org/holding.md": "# Holding\n"}))
    return kb


def typed(result) -> list[tuple]:
    where = {node["id"]: node["relPath"] for node in result["nodes"]}
    assert all(e["relationType"] == e["edgeType"] for e in result["edges"])
    return [(where[e["source"]], where[e["target"]], e["edgeType"], e["confidence"], e["edgeSource"], e["depth"]) for e in result["edges"]]


A_ACME = [("alice.md", "org/acme.md", "mentions", "parsed", "wikilink", 1),
          ("alice.md", "org/acme.md", "works_at", "manual", "frontmatter-relation", 1)]
A_BOB = [("alice.md", "bob.md", "knows", "manual", "frontmatter-relation", 1), ("alice.md", "bob.md", "mentions", "parsed", "wikilink", 1),
         ("alice.md", "bob.md", "related_to", "parsed", "markdown-link", 1)]


@pytest.mark.parametrize("arguments, nodes, edges", [
    ({"ref": "notes/alice.md", "maxDepth": 1}, ["alice.md", "bob.md", "org/acme.md"], A_BOB + A_ACME),
    ({"ref": "notes/alice.md", "edgeType": " Works-At "}, ["alice.md", "org/acme.md"], A_ACME[1:]),
    ({"ref": "notes/org/acme.md", "relation": "works_at", "edgeType": "works_at", "direction": "in"}, ["org/acme.md", "alice.md"],
     A_ACME[1:]),
    ({"ref": "notes/org/acme.md", "relation": "works_at", "direction": "out"}, ["org/acme.md"], []),
    ({"ref": "notes/org/acme.md", "direction": "out", "depth": 6}, ["org/acme.md", "org/holding.md"],
     [("org/acme.md", "org/holding.md", "part_of", "configured", "wikilink", 1)]),
    ({"ref": "notes/org/holding.md", "direction": "in"}, ["org/holding.md", "org/acme.md", "alice.md"],
     [("org/acme.md", "org/holding.md", "part_of", "configured", "wikilink", 1), *[(*e[:5], 2) for e in A_ACME]]),
    ({"ref": "notes/bob.md", "direction": "out"}, ["bob.md", "carol.md"], [("bob.md", "carol.md", "mentions", "parsed", "wikilink", 1)]),
    ({"ref": "notes/bob.md", "edgeType": "mentions", "depth": 1}, ["bob.md", "alice.md", "carol.md"],
     [("bob.md", "carol.md", "mentions", "parsed", "wikilink", 1), A_BOB[1], ("carol.md", "bob.md", "mentions", "parsed", "wikilink", 1)]),
    ({"ref": "notes/bob.md", "edgeType": "unheard_of"}, ["bob.md"], [])])
def test_graph_query(people, arguments, nodes, edges):
    result, text = ask(people, "graph_query", **arguments)
    assert [n["relPath"] for n in result["nodes"]] == nodes and typed(result) == edges
    assert result["root"] == result["nodes"][0] and result["root"]["depth"] == 0 and result["schemaVersion"] == "1.0"
    assert all(n["graphHints"] == (["Part Of", "x"] if "org/" in n["relPath"] else []) for n in result["nodes"])
    assert text.startswith(f"Found {gno.plural(len(nodes), 'node')} around gno://{arguments['ref']}:")


def test_a_relation_that_is_taken_back(people, tmp_path):
    write(tmp_path / "n", {"alice.md": "# Alice\n"})
    run(people, "sync")
    assert typed(ask(people, "graph_query", ref="notes/org/acme.md", relation="works_at")[0]) == []


@pytest.mark.parametrize("arguments, count, warnings", [
    ({"maxDepth": 6}, 7, []), ({}, 7, []), ({"depth": 1}, 4, ["maxDepth reached"]), ({"maxDepth": 1, "frontierLimit": 2}, 3,
                                                                                       ["frontierLimit reached", "maxDepth reached"]),
    ({"maxNodes": 5}, 5, ["maxNodes reached"]), ({"visitedLimit": 5}, 5, ["visitedLimit reached"]),
    ({"frontierLimit": 2}, 5, ["frontierLimit reached"]), ({"frontierLimit": 3}, 7, []), ({"maxNodes": 1}, 1, ["maxNodes reached"])])
def test_caps_of_a_graph_query(kb, tmp_path, arguments, count, warnings):
    "root -> a, b, c; a -> d; b -> e; c -> f; d -> root."
    tree = {"root": "abc", "a": "d", "b": "e", "c": "f", "d": ["root"], "e": "", "f": ""}
    add(kb, write(tmp_path / "n", {f"{name}.md": f"# {name}\n\n" + " ".join(f"[[{to}]]" for to in below) for name, below in tree.items()}))
    result, text = ask(kb, "graph_query", ref="notes/root.md", direction="out", **arguments)
    assert len(result["nodes"]) == count == result["meta"]["returnedNodes"] and result["meta"]["warnings"] == warnings
    assert result["meta"]["truncated"] is bool(warnings) and all(w in text for w in warnings)
    assert [n["depth"] for n in result["nodes"]] == sorted(n["depth"] for n in result["nodes"])


# ---- all of them agree ---------------------------------------------------------------------------

@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(PATHS, TEXTS), min_size=3, max_size=8))
def test_all_tools_agree(files):
    with tempfile.TemporaryDirectory() as place:
        kb = new_kb(Path(place, "gno"))
        try:
            add(kb, write(Path(place, "n"), dict(files)))
            add(kb, write(Path(place, "two"), {"a.md": "# a\n\n[[b]] [[Twin]]", "twin.md": "# Twin\n\n[[notes:a]] [[c]] [[twin]]"}), "two")
            docs = [path_of(d["uri"]) for d in run(kb, "ls")["documents"]]
            lines = Counter()               # (source, target, kind, line, column) as links say it
            for doc in docs:
                result, _ = ask(kb, "links", ref=doc)
                lines.update((doc, path_of(link["resolved"]["uri"]), link["linkType"], *link["position"].values())
                             for link in result["links"] if link["resolved"])
            for doc in docs:
                result, _ = ask(kb, "backlinks", ref=doc)
                assert Counter({key: n for key, n in lines.items() if key[1] == doc}) == Counter(
                    (path_of(b["sourceDocUri"]), doc, b["linkType"], *b["position"].values()) for b in result["backlinks"])
            expected = Counter(key[:3] for key in lines.elements() if key[0] != key[1])
            whole, _ = ask(kb, "graph", linkedOnly=False)
            assert {key: edge[0] for key, edge in graph_edges(whole).items()} == expected and len(whole["nodes"]) == len(docs)
            near = {doc: {b if a == doc else a for a, b, _ in expected if doc in (a, b)} for doc in docs}
            for node in whole["nodes"]:
                doc = path_of(node["uri"])
                ends = {key[:2] for key in expected if doc in key[:2]}
                assert node["degree"] == len(ends)
                result, _ = ask(kb, "graph_neighbors", ref=doc)
                found = Counter()
                for n in result["neighbors"]:
                    pair = (path_of(n["node"]["uri"]), doc) if n["direction"] == "in" else (doc, path_of(n["node"]["uri"]))
                    found[*pair, n["edge"]["type"]] += n["edge"]["weight"]
                assert found == Counter({key: n for key, n in expected.items() if doc in key[:2]})
                assert result["source"]["degree"] == node["degree"]
                result, _ = ask(kb, "graph_query", ref=doc, maxDepth=1)
                assert {path_of(n["uri"]) for n in result["nodes"]} >= near[doc] | {doc}
                way, todo = {doc: 0}, deque([doc])
                while todo:
                    step = todo.popleft()
                    for other in near[step] - way.keys():
                        way[other] = way[step] + 1
                        todo.append(other)
                for goal in docs:
                    result, _ = ask(kb, "graph_path", **{"from": doc, "to": goal})
                    assert result["meta"]["found"] is (goal in way) and result["meta"]["hops"] == way.get(goal, 0)
                    for edge in result["path"]["edges"] if result["path"] else ():
                        assert edge in whole["links"]
        finally:
            kb.close()


@pytest.mark.parametrize("count", [10, 300])
def test_the_number_of_statements_does_not_grow(kb, tmp_path, count):
    "However many links there are; a graph query takes a few for each depth."
    add(kb, write(tmp_path / "n", {f"n{i}.md": f"# T{i}\n\n[[T{i + 1}]] [[n{i - 1}]] [x](n{i + 2}.md) [[gone]] [[hub]] [[same]]"
                                   for i in range(count)}
                  | {"hub.md": "# Hub", "same.md": "1", "x/same.md": "2"}))
    kb.refresh()
    for tool, arguments in [("links", {"ref": "notes/n1.md"}), ("backlinks", {"ref": "notes/hub.md"}), ("graph", {"includeSimilar": True}),
                            ("graph_query", {"ref": "notes/hub.md", "maxDepth": 6, "maxNodes": 1000, "frontierLimit": 1000,
                                             "visitedLimit": 5000}),
                            ("graph_neighbors", {"ref": "notes/hub.md"}),
                            ("graph_path", {"from": "notes/n0.md", "to": f"notes/n{count - 1}.md"})]:
        said: list[str] = []
        kb.db.set_trace_callback(said.append)
        run(kb, tool, **arguments)
        kb.db.set_trace_callback(None)
        assert 0 < len(said) <= (30 if tool == "graph_query" else 12), (tool, len(said))


# ---- drawings and the command line ---------------------------------------------------------------

DRAWN = {
    "dot": ['digraph gno {', '  node [shape=box];', '  n0 [label="a \\"b\\" \\\\n <i> #35; `c`", tooltip="gno://notes/a.md"];',
            '  n1 [label="Übung | x", tooltip="gno://notes/b.md"];', '  n0 -> n1 [label="wiki"];', '}'],
    "mermaid": ['flowchart LR', '  n0["a #34;b#34; #92;n #60;i#62; #35;35#59; #96;c#96;"]', '  n1["Übung #124; x"]', '  n0 -->|"wiki"| n1'],
}


@pytest.mark.parametrize("form", DRAWN)
def test_drawings(form):
    nodes = [{"id": "#1", "uri": "gno://notes/a.md", "title": 'a "b" \\n <i>\n#35; `c`'},
             {"id": "gno://notes/b.md", "uri": "gno://notes/b.md", "title": "Übung | x"}]
    assert gno.drawing({"nodes": nodes, "links": [{"source": "#1", "target": "gno://notes/b.md", "type": "wiki"}]},
                       form).split("\n") == DRAWN[form]


def test_command_line(tmp_path):
    write(tmp_path / "n", {"a.md": "---\nrelations: {near: b.md}\n---\n# A\n\n[[b]]\n", "b.md": "# Bee\n", "c.md": "# C\n"})
    folder = ("--folder", str(tmp_path / "n"), "--quiet")
    for words, said in [
            (("links", "n/a.md"), b"Found 1 outgoing link in gno://n/a.md:\n\n  [wiki] b (line 6) -> gno://n/b.md\n"),
            (("backlinks", "n/b.md"), b'Found 1 backlink to gno://n/b.md:\n\n  gno://n/a.md "A" (line 6)\n'),
            (("graph",), b"Knowledge Graph: 2 nodes, 1 edge\n"),
            (("graph", "n", "--no-linked-only"), b"Knowledge Graph: 3 nodes, 1 edge\n"),
            (("graph", "--dot"), b"digraph gno {\n"), (("graph", "--mermaid"), b"flowchart LR\n"),
            (("graph", "query", "n/a.md", "--edge-type", "near", "--mermaid"),
             b'flowchart LR\n  n0["A"]\n  n1["Bee"]\n  n0 -->|"near"| n1\n'),
            (("graph", "neighbors", "Bee"), b"Found 1 neighbor of gno://n/b.md:\n"),
            (("graph", "path", "b.md", "a.md"), b"Path from gno://n/b.md to gno://n/a.md: 1 hop\n")]:
        done = cli(tmp_path, *words, *folder)
        assert done.returncode == 0 and done.stdout.startswith(said), (words, done)
    assert json.loads(cli(tmp_path, "graph", "--json", *folder).stdout)["meta"]["totalNodes"] == 2
    assert b"no --dot" in cli(tmp_path, "links", "n/a.md", "--dot", *folder).stderr
