"""Hybrid query: how two rankings become one, what holds in both, and whether meta tells the truth."""
import re
import sqlite3

import jsonschema
import numpy as np
import pytest
from conftest import add, new_kb, run, write
from hypothesis import given, settings
from hypothesis import strategies as st

import gno

TOKENIZER = "porter unicode61 remove_diacritics 2"
NOTES = {
    "kiln.md": "# Kiln\n\nThe kiln reaches 1200 degrees and bakes the clay.\n\nIt cools for a day.\n",
    "oven.md": "# Pizza oven\n\nA stone oven for bread and pizza, heated with beech wood.\n",
    "wheel.md": "# Potter's wheel\n\nThrowing bowls on the wheel takes wet clay and patience.\n",
    "backup.md": "# Backups\n\nHow we restore the database after a crash: stop the server, copy the dump, start.\n",
    "deploy.md": "# Deployment\n\nThe release goes out on Tuesday with max_retry_count set to 5.\n",
    "violin.md": "# Violin\n\nThe luthier repaired the bridge and the strings of the old instrument.\n",
    "whale.md": "# Whales\n\nThe largest mammals of the ocean sing to each other.\n",
    "tax.md": "# Tax return\n\nThe form is due in May; receipts for travel belong to page three.\n",
    "thai.md": "# อาหารไทย\n\nร้านอาหารไทยอยู่ใกล้แม่น้ำ\n",
    "sub/garden.md": "# Garden\n\nTomatoes need warm nights and calcium.\n",
}


def query(kb, text, **arguments):
    return run(kb, "query", query=text, **arguments)


def paths(found) -> list[str]:
    return [h["source"]["relPath"] for h in found["results"]]


@pytest.fixture(scope="module")
def notes_kb(tmp_path_factory):
    "Ten notes, embedded."
    base = tmp_path_factory.mktemp("query")
    kb = new_kb(base / "gno")
    add(kb, write(base / "notes", NOTES))
    run(kb, "embed")
    yield kb
    kb.close()


@pytest.fixture(scope="module")
def words_kb(tmp_path_factory):
    "The same notes without a vector."
    base = tmp_path_factory.mktemp("query-words")
    kb = new_kb(base / "gno")
    add(kb, write(base / "notes", NOTES))
    yield kb
    kb.close()


# ---- fuse: 0.3 * bm25 / best bm25 + 0.7 * cosine ----

def fuse(words, near):
    "The two rankings of a plain query."
    return gno.fuse([(0.3, gno.best_is_one(words)), (0.7, near)])


def test_missing_from_an_extra_ranking_counts_0():
    assert gno.fuse([(1.0, [(1, 0.5), (2, 0.4)])], [(0.25, [(3, 1.0)]), (0.25, [])]) == [(1, 0.4), (2, 0.32), (3, pytest.approx(0.52))]


@pytest.mark.parametrize("words, near, expected", [
    ([], [], {}),
    ([(1, 8.0)], [(1, 0.5)], {1: 0.3 + 0.35}),
    # a document that is missing from a list gets that list's lowest value
    ([(1, 8.0), (2, 4.0)], [(2, 0.5)], {1: 0.3 + 0.35, 2: 0.15 + 0.35}),
    ([(1, 8.0), (2, 2.0)], [(3, 0.9), (1, 0.4)], {1: 0.3 + 0.28, 2: 0.075 + 0.28, 3: 0.075 + 0.63}),
    ([(1, 10.0), (2, 9.0), (3, 1.0)], [(4, 1.0), (3, 0.8), (2, 0.1)],
     {1: 0.3 + 0.07, 2: 0.27 + 0.07, 3: 0.03 + 0.56, 4: 0.03 + 0.7}),
    ([(1, 0.002)], [(2, 0.0)], {1: 0.3, 2: 0.3}),
    # one leg alone: its own order and proportions
    ([(1, 8.0), (2, 4.0), (3, 1.0)], [], {1: 1.0, 2: 0.5, 3: 0.125}),
    ([], [(1, 0.9), (2, 0.3), (3, 0.0)], {1: 0.9, 2: 0.3, 3: 0.0}),
])
def test_fuse_by_hand(words, near, expected):
    fused = fuse(words, near)
    assert dict(fused) == {doc: pytest.approx(score, abs=1e-9) for doc,
                           score in expected.items()} and len(fused) == len(expected)


RAW = st.lists(st.floats(1e-9, 60), max_size=30).map(lambda v: sorted(v, reverse=True))
COSINE = st.lists(st.floats(0, 1), max_size=30).map(lambda v: sorted(v, reverse=True))


@given(RAW, COSINE, st.permutations(range(60)))
def test_fused_scores_are_within_0_and_1_and_complete(raw, cosine, docs):
    words, near = list(zip(docs, raw, strict=False)), list(zip(docs[20:], cosine, strict=False))
    fused = dict(fuse(words, near))
    assert set(fused) == {d for d, _ in words} | {d for d, _ in near} and all(0 <= s <= 1 for s in fused.values())
    if words and near and words[0][0] == near[0][0]:
        assert fused[words[0][0]] == max(fused.values()), "first in both lists is first"


@pytest.mark.parametrize("text, words", [
    ("how do we restore the database", ["restore", "database"]), ("clay", ["clay"]),
    ("bread heated with wood", ["bread", "heated", "wood"]),
    ("musical instrument of wood", ["musical", "instrument", "wood"]),
    ("zeppelin", ["zeppelin"]), ("max_retry_count", ["max retry count"])])
def test_score_and_order_are_the_formula(notes_kb, text, words):
    "Against FTS5 itself for the words and float64 for the cosines."
    db = sqlite3.connect(":memory:")
    db.execute(f"CREATE VIRTUAL TABLE t USING fts5(title, path, body, cjk, tokenize='{TOKENIZER}')")
    for path, body in NOTES.items():
        title = body.split("\n")[0][2:]
        db.execute("INSERT INTO t VALUES (?, ?, ?, ?)", [title, path, body, gno.cjk(title, path, body)])
    match = " OR ".join(f'"{w}"' for w in words)
    raw = dict(db.execute("SELECT path, -bm25(t, 4.0, 1.5, 1.0, 1.0) FROM t WHERE t MATCH ?", [match]).fetchall())
    wanted = gno.load_embedder(notes_kb, gno.find_card(notes_kb, "embed", "")).embed(text, "query").astype(np.float64)
    cosine: dict[str, float] = {}
    with sqlite3.connect(notes_kb.db_path) as index:
        for path, data in index.execute("""
                SELECT d.path, v.embedding FROM documents d JOIN chunks c ON c.mirror_id = d.mirror_id
                JOIN vectors v ON v.input_hash = c.input_hash"""):
            row = np.frombuffer(data, np.int8).astype(np.float64)
            cosine[path] = max(cosine.get(path,
                                          0.0), float(row @ wanted / np.linalg.norm(row) / np.linalg.norm(wanted)))
    assert set(cosine) == set(NOTES)
    best, low = max(raw.values(), default=1), min(raw.values(), default=0)
    expected = {p: 0.3 * raw.get(p, low) / best + 0.7 * cosine[p] for p in NOTES} if raw else cosine
    found = query(notes_kb, text, limit=100, rerank=False)
    assert {h["source"]["relPath"]: h["score"] for h in found["results"]} == {p: pytest.approx(s, abs=2e-6) for p,
                                                                              s in expected.items()}
    scores = [h["score"] for h in found["results"]]
    assert scores == sorted(scores, reverse=True) and paths(found)[0] == max(expected, key=expected.get)


@pytest.mark.parametrize("text, first", [
    ("musical instrument", "violin.md"), ("baking pottery at high temperature", "kiln.md"),
    ("how do we recover from a failure", "backup.md"), ("marine animals", "whale.md"),
    ("income declaration deadline", "tax.md"), ("max_retry_count", "deploy.md"), ("1200 degrees", "kiln.md"),
    ("beech", "oven.md"), ("vegetables", "sub/garden.md")])
def test_meaning_and_words_are_both_found(notes_kb, text, first):
    assert paths(query(notes_kb, text))[0] == first


# ---- what was typed holds in both legs ----

def test_phrases_hold_in_both_legs(notes_kb):
    assert paths(query(notes_kb, '"wet clay" kiln pottery', limit=50)) == ["wheel.md"]
    assert query(notes_kb, '"clay wet" kiln pottery', limit=50)["results"] == []
    assert paths(query(notes_kb, '"restore the database"', limit=50)) == ["backup.md"]


def test_quotation_marks_in_running_text_only_quote(notes_kb):
    "A short query means its phrase; a paragraph with a quoted word in it does not hide all documents without that word."
    short = 'repairs of the "second hand" violin strings'
    long = 'who of us repaired the strings and the bridge of an old "second hand" violin, an instrument made long ago by a luthier'
    assert query(notes_kb, short)["results"] == [] and paths(query(notes_kb, long))[0] == "violin.md"
    assert "violin.md" not in paths(query(notes_kb, long + " -bridge", limit=50))


def test_exclusions_hold_in_both_legs(notes_kb):
    everything = paths(query(notes_kb, "pottery and clay", limit=50))
    assert len(everything) == len(NOTES)
    assert set(everything) - set(paths(query(notes_kb, "pottery and clay -wheel", limit=50))) == {"wheel.md"}
    assert set(everything) - set(paths(query(notes_kb, 'pottery and clay -"wet clay" -ovens',
                                             limit=50))) == {"wheel.md", "oven.md"}
    assert set(everything) - set(paths(query(notes_kb, "pottery", limit=50,
                                             exclude=["CLAY", "pizza"]))) == {"kiln.md", "wheel.md", "oven.md"}


@pytest.mark.parametrize("where", [{"collection": "notes", "tagsAll": ["none"]}, {"author": "nobody"},
                                   {"since": "2999-01-01"}, {"until": "1999-01-01"}, {"categories": ["meeting"]}])
def test_filters_hold_in_both_legs(notes_kb, where):
    assert query(notes_kb, "clay", **where)["results"] == []


@pytest.mark.parametrize("text", ["", "?", "-clay", '"', "🎉", "-\"wet clay\""])
def test_a_query_with_nothing_to_look_for_is_refused(notes_kb, text):
    with pytest.raises(gno.GnoError) as e:
        query(notes_kb, text)
    assert e.value.code == "INVALID_INPUT"


ODD = st.sampled_from(['"', "*", "(", "-", "NEAR", " ", "\x00", "c++", "東京", "ภาษา", "é", "\u0301", "😀", "ß",
                       "\u2028",
                       "½", "clay", "wet clay ", '"wet clay"', "[UNK]", "[CLS]", "##a", "\U0001e900"])


@pytest.mark.parametrize("tool", ["query", "vsearch"])
@settings(max_examples=60, deadline=None)
@given(text=st.one_of(st.text(max_size=40), st.lists(ODD, max_size=10).map("".join)))
def test_no_text_breaks_a_query(notes_kb, tool, text):
    try:
        found = run(notes_kb, tool, query=text)
    except gno.GnoError as e:
        assert e.code == "INVALID_INPUT"
    else:
        scores = [h["score"] for h in found["results"]]
        assert scores == sorted(scores, reverse=True) or found["meta"].get("order") == "recency"
        assert all(0 <= s <= 1 for s in scores)


@pytest.mark.parametrize("text", ["x" * 10000, "wet clay " * 1111, "".join(map(chr, range(0x4E00, 0x4E00 + 10000))),
                                  "😀a" * 5000])
def test_ten_thousand_characters(notes_kb, text):
    found = run(notes_kb, "vsearch", query=text)
    assert found["meta"]["query"] == text and len(found["results"]) == 5


# ---- limits, order ----

@pytest.mark.parametrize("limit", [1, 3, 5, 9])
def test_a_smaller_limit_gives_the_beginning_of_the_same_list(notes_kb, limit):
    assert query(notes_kb, "wet clay", limit=limit)["results"] == query(notes_kb, "wet clay",
                                                                        limit=100)["results"][:limit]


@pytest.mark.parametrize("least", [0, 0.2, 0.4, 0.9, 1])
def test_min_score_applies_to_the_shown_score(notes_kb, least):
    everything = query(notes_kb, "wet clay", limit=100)["results"]
    found = query(notes_kb, "wet clay", limit=100, minScore=least)
    assert found["results"] == [h for h in everything if h["score"] >= least]
    assert found["meta"]["totalResults"] == len(found["results"])


def test_the_same_files_give_the_same_answer_in_whatever_order_they_came(notes_kb, tmp_path):
    kb = new_kb(tmp_path / "gno")
    root = write(tmp_path / "notes", dict(list(NOTES.items())[:4]))
    add(kb, root)
    run(kb, "embed")
    write(root, NOTES)
    (root / "kiln.md").write_text("something else")
    run(kb, "index")
    write(root, {"kiln.md": NOTES["kiln.md"]})
    run(kb, "index")
    for text in ("wet clay", "the", "musical instrument", "pottery"):
        one, other = query(kb, text, limit=50), query(notes_kb, text, limit=50)
        assert [(h["uri"], h["score"], h["line"],
                 h["snippet"]) for h in one["results"]] == [(h["uri"], h["score"], h["line"],
                                                             h["snippet"]) for h in other["results"]]
        assert one == query(kb, text, limit=50) and one["meta"] == other["meta"]
    kb.close()


def test_equal_documents_stand_in_the_order_of_their_uris(kb, tmp_path):
    add(kb, write(tmp_path / "notes", {f"{n}.md": "the same clay" for n in "cadb"}))
    assert paths(query(kb, "clay")) == ["a.md", "b.md", "c.md", "d.md"]
    run(kb, "embed")
    found = query(kb, "clay", rerank=False)
    assert paths(found) == ["a.md", "b.md", "c.md", "d.md"] and found["meta"]["mode"] == "hybrid"


def test_one_hit_per_document_at_its_best_place(kb, tmp_path):
    filler = "\n\n".join(f"Paragraph {n} about taxes and forms, travel and receipts, page {n}." for n in range(60))
    add(kb, write(tmp_path / "notes",
                  {"a.md": f"# Taxes\n\n{filler}\n\nThe luthier repaired the strings of a violin.\n\n{filler}\n",
                   "b.md": "Other."}))
    run(kb, "embed")
    for text in ("luthier", "a repaired musical instrument", "violin strings"):
        found = query(kb, text, limit=50)
        assert sorted(paths(found)) == ["a.md", "b.md"]
        (hit,) = [h for h in found["results"] if h["source"]["relPath"] == "a.md"]
        line = run(kb, "get", ref=hit["uri"], fromLine=hit["line"], lineCount=1)["content"]
        assert hit["line"] == 123 and "violin" in line and "violin" in hit["snippet"], text


# ---- meta ----

def test_meta_of_a_hybrid_query(notes_kb):
    meta = query(notes_kb, "how do we restore the database?")["meta"]
    expected = {"query": "how do we restore the database?", "mode": "hybrid", "vectorsUsed": True, "expanded": False,
                "reranked": True, "totalResults": 5, "candidateLimit": 20}
    assert {key: meta[key] for key in expected} == expected
    graph = meta["graphExpansion"]
    assert graph["enabled"] is False and graph["candidateCount"] == 0 and graph["fallbackReasons"] == ["graph_disabled"]
    assert sorted(graph["edgeConfidence"]) == ["ambiguous", "explicit", "inferred",
                                               "similarity"] and set(graph["edgeConfidence"].values()) == {0}
    assert "notes" not in meta and "order" not in meta


def test_meta_without_vectors(words_kb):
    found = query(words_kb, "restore clay")
    meta = found["meta"]
    assert meta["mode"] == "bm25_only"
    assert meta["vectorsUsed"] is False and meta["reranked"] is False and meta["expanded"] is False
    assert sorted(paths(found)) == ["backup.md", "kiln.md", "wheel.md"] and found["results"][0]["score"] == 1.0
    assert len(meta["notes"]) == 1 and "gno index" in meta["notes"][0]


@pytest.mark.parametrize("arguments", [{"noGraph": True}, {"graph": True, "noGraph": True},
                                       {"graph": True, "fast": True}, {"graph": False}])
def test_graph_is_off_when_it_says_so(notes_kb, arguments):
    graph = query(notes_kb, "clay", **arguments)["meta"]["graphExpansion"]
    assert graph["enabled"] is False and graph["fallbackReasons"] == ["graph_disabled"] and graph["candidateCount"] == 0


@pytest.mark.parametrize("arguments", [{}, {"fast": True}, {"thorough": True}, {"expand": True}, {"rerank": True},
                                       {"rerank": False}, {"graph": True}, {"candidateLimit": 3},
                                       {"intent": "pottery"}])
def test_meta_claims_nothing_that_was_not_done(notes_kb, arguments):
    found, plain = query(notes_kb, "wet clay", limit=10, **arguments), query(notes_kb, "wet clay", limit=10, fast=True)
    meta = found["meta"]
    if meta["reranked"] is False and meta["expanded"] is False and not meta["graphExpansion"]["enabled"]:
        assert found["results"] == plain["results"]
    assert bool(meta["graphExpansion"]["fallbackReasons"]) is not meta["graphExpansion"]["enabled"]
    assert meta["candidateLimit"] == arguments.get("candidateLimit", 40 if arguments.get("thorough") else 20)
    assert plain["meta"]["reranked"] is False and plain["meta"]["expanded"] is False


@pytest.mark.parametrize("arguments", [{"limit": 0}, {"limit": 101}, {"candidateLimit": 0}, {"candidateLimit": 101},
                                       {"minScore": 2}, {"since": "whenever"}, {"expand": "yes"}])
def test_arguments_outside_their_bounds_are_refused(notes_kb, arguments):
    with pytest.raises(gno.GnoError) as e:
        query(notes_kb, "clay", **arguments)
    assert e.value.code == "INVALID_INPUT"


def test_unknown_collection(notes_kb):
    with pytest.raises(gno.GnoError) as e:
        query(notes_kb, "clay", collection="pots")
    assert e.value.code == "NOT_FOUND" and "notes" in e.value.hint


# ---- languages the model does not know ----

@pytest.mark.parametrize("text, found_path", [("ร้านอาหารไทย", "thai.md"),
                                              ("ร้านอาหารใกล้แม่น้ำอยู่ที่ไหน", "thai.md")])
def test_a_language_the_model_does_not_know_is_searched_by_words_alone(notes_kb, words_kb, text, found_path):
    found = query(notes_kb, text)
    meta = found["meta"]
    assert paths(found) == [found_path] and found["results"][0]["line"] in (1, 3)
    assert meta["mode"] == "bm25_only" and meta["vectorsUsed"] is False
    assert any("language" in note for note in meta["notes"])
    assert [h["score"] for h in found["results"]] == [h["score"] for h in query(words_kb, text)["results"]]


@pytest.mark.parametrize("text", ["Wie stellen wir die Datenbank wieder her?", "restaurer la base de données",
                                  "восстановить базу данных", "東京大学の本", "x"])
def test_other_languages_use_the_vectors_too(notes_kb, text):
    meta = query(notes_kb, text)["meta"]
    assert meta["mode"] == "hybrid" and meta["vectorsUsed"] is True and "notes" not in meta


# ---- shape ----

@pytest.mark.parametrize("tool", ["search", "vsearch", "query"])
@pytest.mark.parametrize("arguments", [
    {"query": "clay"}, {"query": "nothing at all like zeppelins", "minScore": 1},
    {"query": "latest clay", "limit": 100},
    {"query": "clay", "collection": "NOTES", "since": "2000-01-01", "until": "today", "author": "x",
     "categories": ["y"], "tagsAll": ["a"], "tagsAny": ["b"], "exclude": ["c"], "intent": "d", "lang": "en"}])
def test_results_are_what_the_output_schema_and_the_specification_say(notes_kb, words_kb, tool, arguments):
    schema = gno.output_schema(gno.TOOLS[tool])
    assert schema["$id"] == "gno://schemas/search-results@1.0"
    jsonschema.Draft202012Validator.check_schema(schema)
    for kb in (notes_kb,) if tool == "vsearch" else (notes_kb, words_kb):
        found = run(kb, tool, **arguments)
        jsonschema.validate(found, schema)
        assert {"query", "mode",
                "totalResults"} <= set(found["meta"]) and found["meta"]["totalResults"] == len(found["results"])
        if tool == "query":
            assert {"expanded", "reranked", "vectorsUsed"} <= set(found["meta"])
        for h in found["results"]:
            assert {"docid", "score", "uri", "line", "snippet", "contentType", "categories",
                    "source"} <= set(h) and "context" not in h
            assert {"absPath", "relPath", "mime", "ext"} <= set(h["source"]) and h["contentType"] in h["categories"]
            assert re.fullmatch(r"#[a-f0-9]{8}", h["docid"]) and re.fullmatch(r"gno://notes/\S+",
                                                                              h["uri"]) and 0 <= h["score"] <= 1
            assert None not in h.values()
            assert h["snippetRange"]["startLine"] <= h["line"] <= h["snippetRange"]["endLine"]
        assert None not in found["meta"].values()


@pytest.mark.parametrize("arguments, begins", [
    ({"query": "clay", "limit": 2}, 'Found 2 results for "clay"'),
    ({"query": "luthier", "limit": 1}, 'Found 1 result for "luthier"'),
    ({"query": "zeppelin", "minScore": 1}, 'No results found for "zeppelin"')])
def test_the_text_of_an_answer(notes_kb, arguments, begins):
    for tool in ("search", "query"):
        found = run(notes_kb, tool, **arguments)
        text = gno.text_of(gno.TOOLS[tool], found, arguments)
        assert text.startswith(begins)
        for n, h in enumerate(found["results"], 1):
            assert f"{n}. {h['docid']} - {h['source']['relPath']} ({h['score']:.2f})" in text


def test_recency_orders_a_hybrid_query(kb, tmp_path):
    add(kb, write(tmp_path / "notes",
                  {"a.md": "---\ndate: 2024-01-01\n---\nclay news",
                   "b.md": "---\ndate: 2026-01-01\n---\nclay news, long ago and many words",
                   "c.md": "---\ndate: 2025-01-01\n---\nclay news"}))
    run(kb, "embed")
    found = query(kb, "latest clay news", limit=3)
    assert paths(found) == ["b.md", "c.md",
                            "a.md"] and found["meta"]["order"] == "recency" and "since" not in found["meta"]
    assert "order" not in query(kb, "clay news")["meta"]


# ---- modes and structured queries ----

@pytest.mark.parametrize("text, modes, expected", [
    ("auth flow\nterm: jwt\nintent: rotation", [], ("auth flow", [("term", "jwt"), ("intent", "rotation")])),
    ("auth flow\n\n  TERM:  jwt tokens \nwith cookies", [], ("auth flow with cookies", [("term", "jwt tokens")])),
    ("term: a\nterm: b\nintent: c", [], ("a b", [("term", "a"), ("term", "b"), ("intent", "c")])),
    ("intent: c\nhyde: d", [], ("c", [("intent", "c"), ("hyde", "d")])),
    # typed lines come before the explicit entries, and each entry once
    ("x\nterm: a", [("term", "b"), ("term", " a ")], ("x", [("term", "a"), ("term", "b")])),
    ("plain", [("term", " x ")], ("plain", [("term", "x")])),
    # no document of lines: nothing is taken apart
    ("term: jwt", [], ("term: jwt", [])), ("note: this\nand that", [], ("note: this\nand that", [])),
    ("see\nhttp://example.org/a\nterm: b", [], ("see http://example.org/a", [("term", "b")])),
    ("q", [("term", f"t{n}") for n in range(7)], ("q", [("term", f"t{n}") for n in range(5)])),
])
def test_a_query_is_taken_apart(text, modes, expected):
    plan = gno.plan_query(text, gno.Depth(query_modes=[{"mode": m, "text": t} for m, t in modes]))
    assert (plan.text, list(plan.modes)) == expected and plan.expand is False


@pytest.mark.parametrize("text, modes, says", [
    ("term: a\nvector: b", [], ("line 2", "vector")), ("a\nterm:\nb", [], ("line 2", "term")),
    ("hyde: x\n", [], ("hyde",)), ("a\nhyde: x\nhyde: y", [], ("hyde",)), ("a\nhyde: x", [("hyde", "y")], ("hyde",)),
    ("a", [("hyde", "x"), ("hyde", "y")], ("hyde",)), ("a", [("term", "   ")], ("queryModes",)), ("a", [("term", "??")], ("queryModes",)),
    ("a", [("term", "")], ("queryModes",)), ("a", [("nosuch", "x")], ("queryModes",)), ("a", "term", ("queryModes",)), ("a", [{}], ("queryModes",))])
def test_a_malformed_query_is_refused_by_all_tools(notes_kb, text, modes, says):
    entries = [m if isinstance(m, dict) else {"mode": m[0], "text": m[1]} for m in modes] if isinstance(modes, list) else modes
    for tool, more in (("query", {}), ("query_diagnose", {"target": "notes/kiln.md"})):
        with pytest.raises(gno.GnoError) as e:
            run(notes_kb, tool, query=text, queryModes=entries, **more)
        assert e.value.code == "INVALID_INPUT" and all(word in e.value.message for word in says)


@pytest.mark.parametrize("depth, expected", [
    ({}, (False, True, False, 20)), ({"fast": True}, (False, False, False, 20)), ({"thorough": True}, (True, True, False, 40)),
    ({"fast": True, "thorough": True, "graph": True, "rerank": True, "expand": True}, (False, False, False, 20)),
    ({"rerank": False, "expand": True, "candidate_limit": 7}, (True, False, False, 7)),
    ({"rerank": False, "thorough": True, "candidate_limit": 7, "graph": True}, (True, True, True, 7)),
    ({"expand": True, "query_modes": [{"mode": "term", "text": "x"}]}, (False, True, False, 20)),
    ({"graph": True, "no_graph": True}, (False, True, False, 20))])
def test_depth(depth, expected):
    plan = gno.plan_query("q", gno.Depth(**depth))
    assert (plan.expand, plan.rerank, plan.graph, plan.candidate_limit) == expected


def test_meta_tells_the_modes(notes_kb):
    meta = query(notes_kb, "auth flow\nterm: jwt\nintent: rotation")["meta"]
    assert meta["query"] == "auth flow" and meta["queryModes"] == {"term": 1, "intent": 1, "hyde": False} and meta["expanded"] is True
    assert "queryModes" not in query(notes_kb, "auth flow")["meta"]


@pytest.mark.parametrize("modes, found", [
    ([("term", "zeppelin violin")], "violin.md"), ([("intent", "a musical instrument made by hand")], "violin.md"),
    ([("hyde", "The luthier repaired the old violin, its bridge and its strings.")], "violin.md")])
def test_each_mode_lifts_what_it_names(notes_kb, modes, found):
    "The place of a document among all, with the mode and without it."
    def place(**arguments):
        return paths(query(notes_kb, "repairs", limit=100, fast=True, **arguments)).index(found)
    plain = paths(query(notes_kb, "clay", limit=100, fast=True))
    modes = [{"mode": m, "text": t} for m, t in modes]
    lifted = paths(query(notes_kb, "clay", limit=100, fast=True, queryModes=modes))
    assert lifted.index(found) < plain.index(found) and lifted[0] in ("kiln.md", "wheel.md")
    assert place(queryModes=modes) <= place()


def test_modes_respect_exclusions_and_filters(notes_kb):
    modes = [{"mode": "term", "text": "violin"}, {"mode": "intent", "text": "violin"}]
    assert "violin.md" not in paths(query(notes_kb, "clay -strings", limit=50, queryModes=modes))
    assert query(notes_kb, "clay", queryModes=modes, author="nobody")["results"] == []


def test_keywords_alone_with_modes(words_kb):
    found = query(words_kb, "clay", queryModes=[{"mode": "term", "text": "luthier"}, {"mode": "intent", "text": "whales"}])
    assert sorted(paths(found)) == ["kiln.md", "violin.md", "wheel.md"] and found["meta"]["mode"] == "bm25_only"


# ---- intent ----

def test_an_intent_is_never_searched_and_steers_the_place(kb, tmp_path):
    filler = "Nothing of note happened on that day, and the days after it were much the same. " * 12
    text = f"# Jaguar\n\nThe jaguar hunts at night in the forest of the river.\n\n{filler}\n\nThe jaguar engine of the car has six cylinders.\n"
    add(kb, write(tmp_path / "notes", {"jaguar.md": text, "prices.md": "Prices of a car brand, to compare."}))
    for tool, more in (("search", {}), ("query", {"fast": True}), ("query", {})):
        for intent, line in (("the animal of the forest", 3), ("the car and its engine", 7)):
            found = run(kb, tool, query="jaguar", intent=intent, **more)
            assert paths(found) == ["jaguar.md"] and found["results"][0]["line"] == line, (tool, intent)
            assert found["meta"]["intent"] == intent
    run(kb, "embed")
    for tool, more in (("vsearch", {"minScore": 0.3}), ("query", {"fast": True, "limit": 1}), ("query", {"limit": 1})):
        for intent, line in (("the animal of the forest", 3), ("the car and its engine", 7)):
            found = run(kb, tool, query="jaguar", intent=intent, **more)
            assert found["results"][0]["line"] == line, (tool, intent)


# ---- rerank ----

@pytest.mark.parametrize("ranked, scores, expected", [
    # both scaled to 0..1 over the scored ones, halved, then stretched over 0.4..0.8
    ([(1, 0.8), (2, 0.6), (3, 0.4)], {1: 0.0, 2: 1.0, 3: 0.5}, [(2, 0.7), (1, 0.6), (3, 0.5)]),
    ([(1, 0.8), (2, 0.4), (3, 0.3)], {1: 5.0, 2: 1.0}, [(1, 0.8), (2, 0.4), (3, 0.3)]),
    ([(1, 0.8), (2, 0.4), (3, 0.3)], {1: 1.0, 2: 5.0}, [(1, 0.6), (2, 0.6), (3, 0.3)]),
    ([(1, 0.5)], {1: 0.1}, [(1, 0.5)]), ([(1, 0.5), (2, 0.5)], {1: 0.1, 2: 0.9}, [(2, 0.5), (1, 0.5)])])
def test_blend_by_hand(ranked, scores, expected):
    assert gno.blend(ranked, scores) == [(doc, pytest.approx(score)) for doc, score in expected]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(-5, 5)), min_size=1, max_size=40), st.integers(1, 50))
def test_blend_keeps_documents_bounds_and_order(pairs, most):
    fused = sorted((f for f, _ in pairs), reverse=True)
    ranked = list(enumerate(fused))
    scores = {n: pairs[n][1] for n in range(min(most, len(ranked)))}
    new = gno.blend(ranked, scores)
    values = [score for _, score in new]
    assert sorted(doc for doc, _ in new) == list(range(len(ranked))) and new[len(scores):] == ranked[len(scores):]
    assert all(a >= b - 1e-8 for a, b in zip(values, values[1:], strict=False)) and fused[-1] - 1e-8 <= values[-1] and values[0] <= fused[0] + 1e-8


@pytest.mark.parametrize("intent", [None, "data loss"])
def test_maxsim_against_its_definition(notes_kb, intent):
    "The mean of each word piece's best cosine, from the model's own outputs; pieces of the intent count half."
    model, text = gno.load_embedder(notes_kb, gno.find_card(notes_kb, "embed", "")), "restore the databases"
    passages = ["Backups\nHow we restore the database after a crash.", "The kiln bakes clay."]
    found = gno.late_interaction(notes_kb, text, intent, passages)

    def states(t):
        ids = model.tokenizer.encode(t).ids
        out = model.session.run(["last_hidden_state"], {"input_ids": [ids], "attention_mask": [[1] * len(ids)]})[0][0][1:-1]
        return out / np.linalg.norm(out, axis=1, keepdims=True)
    for passage in passages:
        best = (states(text) @ states(passage).T).max(axis=1)
        assert len(best) == 3
        meant = (states(intent) @ states(passage).T).max(axis=1) if intent else np.array([])
        assert found[passage] == pytest.approx((best.sum() + 0.5 * meant.sum()) / (3 + 0.5 * len(meant)), abs=1e-5)
    assert found[passages[0]] > found[passages[1]]


def test_the_reranker_sees_candidate_limit_documents_and_each_text_once(notes_kb, monkeypatch, kb, tmp_path):
    seen, real = [], gno.late_interaction
    monkeypatch.setattr(gno, "late_interaction", lambda kb, text, intent, passages: seen.append(list(passages)) or real(kb, text, intent, passages))
    for most in (1, 3, 100):
        found = query(notes_kb, "wet clay", limit=100, candidateLimit=most)
        assert len(seen.pop()) == min(most, len(NOTES)) and found["meta"]["candidateLimit"] == most and found["meta"]["reranked"]
    assert query(notes_kb, "wet clay", fast=True)["meta"]["reranked"] is False and query(notes_kb, "clay", rerank=False) and not seen
    add(kb, write(tmp_path / "notes", {f"{n}/same.md": "# Clay\n\nThe same wet clay." for n in "abc"}))
    run(kb, "embed")
    assert len(query(kb, "wet clay")["results"]) == 3 and len(seen.pop()) == 1


def test_slow_reranking_stops_in_time_and_says_so(notes_kb, monkeypatch):
    monkeypatch.setattr(gno, "RERANK_S", -1.0)
    found, plain = query(notes_kb, "wet clay"), query(notes_kb, "wet clay", rerank=False)
    assert found["results"] == plain["results"] and found["meta"]["reranked"] is False
    assert any("scored within" in note for note in found["meta"]["notes"])


@pytest.mark.parametrize("text, first", [("max_retry_count", "deploy.md"), ('"wet clay"', "wheel.md"), ("1200", "kiln.md")])
def test_a_reranker_cannot_take_the_first_place_from_an_exact_match(notes_kb, monkeypatch, text, first):
    monkeypatch.setattr(gno, "late_interaction", lambda kb, text, intent, passages: {p: float("clay" not in p and "retry" not in p and "1200" not in p)
                                                                                     for p in passages})
    assert paths(query(notes_kb, text))[0] == first


@pytest.mark.parametrize("text, expected", [("max_retry_count", True), ("DEC-0054", True), ('"wet clay"', True), ("c++", True), ("v2", True),
                                            ("gno.py", True), ("wet clay", False), ("clay 1200", False), ('"wet clay" kiln', False)])
def test_what_counts_as_an_identifier(text, expected):
    assert gno.is_identifier(gno.parse_query(text)) is expected


# ---- explain ----

def test_explain_is_made_of_the_same_numbers(notes_kb):
    found = query(notes_kb, "wet clay", explain=True)
    plain = query(notes_kb, "wet clay", rerank=False, explain=True)
    assert [s["stage"] for s in found["explain"]["stages"]] == ["lang", "query_modes", "expansion", "bm25", "vector", "graph", "fusion", "rerank",
                                                               "timings", "counters"]
    rows = found["explain"]["results"]
    assert [(r["rank"], r["docid"], r["score"]) for r in rows] == [(n, h["docid"], h["score"]) for n, h in enumerate(found["results"], 1)]
    assert all(r["rerankScore"] == r["score"] for r in rows)
    best = max(r.get("bm25Score", 0) for r in rows)
    for r in plain["explain"]["results"]:
        assert "rerankScore" not in r and r["score"] == r["fusionScore"]
        if "bm25Score" in r:
            assert r["fusionScore"] == pytest.approx(0.3 * r["bm25Score"] / best + 0.7 * r["vecScore"], abs=2e-6)
    assert "explain" not in query(notes_kb, "wet clay")
    text = gno.text_of(gno.TOOLS["query"], found, {})
    assert "timings: bm25 " in text and f"#1 {rows[0]['docid']} score {rows[0]['score']:.4f} fusionScore" in text


# ---- diagnose ----

def diagnose(kb, text, target, **arguments):
    found = run(kb, "query_diagnose", query=text, target=target, **arguments)
    jsonschema.validate(found, gno.output_schema(gno.TOOLS["query_diagnose"]))
    return found


def test_a_diagnosis_shows_each_stage(notes_kb):
    found = diagnose(notes_kb, "wet clay", "notes/wheel.md")
    assert found["target"]["status"] == "diagnosed" and found["target"]["uri"] == "gno://notes/wheel.md" and found["target"]["chunkCount"] == 1
    assert found["meta"] == {"mode": "hybrid", "vectorsUsed": True, "reranked": True, "totalResults": 5}
    stages = {s["id"]: s for s in found["stages"]}
    assert list(stages) == ["bm25", "vector", "fusion", "graph", "rerank"]
    assert stages["bm25"] | {"score": 0} == {"id": "bm25", "status": "active", "sourceCount": 2, "present": True, "rank": 1, "score": 0,
                                             "survived": True, "dropReason": None} and stages["bm25"]["score"] < 0
    assert stages["vector"]["sourceCount"] == len(NOTES) and 0 < stages["vector"]["score"] < 1 and stages["vector"]["rank"] == 1
    assert stages["graph"]["status"] == "skipped" and stages["graph"]["dropReason"] == "skipped" and stages["graph"]["reason"] == "graph_disabled"
    assert stages["rerank"]["rank"] == 1 and stages["rerank"]["score"] == query(notes_kb, "wet clay")["results"][0]["score"]
    assert found["chunk"] == {"seq": 0, "startLine": 1, "endLine": 3, "language": "en"}
    text = gno.text_of(gno.TOOLS["query_diagnose"], found, {})
    assert text.startswith("gno://notes/wheel.md (hybrid, 5 results)\n\nbm25") and len(text.split("\n")) == 7


def test_drop_reasons(notes_kb):
    stages = {s["id"]: s for s in diagnose(notes_kb, "wet clay", "notes/tax.md", candidateLimit=1)["stages"]}
    assert stages["bm25"]["dropReason"] == "not_in_candidate_set" and stages["bm25"]["rank"] is None and stages["bm25"]["score"] is None
    assert stages["fusion"]["present"] and stages["rerank"]["dropReason"] == "below_cutoff" and stages["rerank"]["sourceCount"] == 1


def test_a_fast_diagnosis_loads_no_model(notes_kb, monkeypatch):
    monkeypatch.setattr(gno, "load_embedder", None)
    found = diagnose(notes_kb, "wet clay", "notes/wheel.md", fast=True)
    assert found["meta"] == {"mode": "bm25_only", "vectorsUsed": False, "reranked": False, "totalResults": 2}
    assert [s["status"] for s in found["stages"]] == ["active", "skipped", "active", "skipped", "skipped"]


def test_targets_that_are_no_candidates(kb, tmp_path):
    root = write(tmp_path / "notes", {"a.md": "---\ntags: [red]\nauthor: Ann\n---\nclay", "gone.md": "clay", "empty.md": "", "b.md": "kiln"})
    add(kb, root)
    (root / "gone.md").unlink()
    run(kb, "sync")
    assert diagnose(kb, "clay", "notes/nosuch.md")["target"] | {"ref": ""} == {
        "ref": "", "status": "not_found", "docid": None, "uri": None, "title": None, "contentType": None, "contentTypeSource": None, "categories": [],
        "graphHints": [], "contentTypeRulesFingerprint": None, "contentTypeFingerprintMatches": None, "mirrorHash": None, "chunkCount": 0,
        "filterReasons": []}
    assert diagnose(kb, "clay", "?")["target"]["status"] == "not_found"
    assert diagnose(kb, "clay", "notes/gone.md")["target"]["status"] == "inactive"
    assert diagnose(kb, "clay", "notes/empty.md")["target"]["status"] == "no_indexed_content"
    for filters, reasons in (({"categories": ["meeting"]}, ["category"]), ({"tagsAll": ["red", "blue"]}, ["tagsAll"]), ({"tagsAny": ["blue"]}, ["tagsAny"]),
                             ({"author": "Bob"}, ["author"]), ({"since": "2999-01-01"}, ["date"]), ({"until": "1999-01-01"}, ["date"]),
                             ({"exclude": ["CLAY"]}, ["exclude"]), ({"author": "Bob", "exclude": ["clay"], "since": "2999-01-01"}, ["date", "author", "exclude"])):
        found = diagnose(kb, "clay", "notes/a.md", **filters)
        assert found["target"]["status"] == "filtered_out" and found["target"]["filterReasons"] == reasons and found["stages"] == []
        assert found["chunk"] == dict.fromkeys(("seq", "startLine", "endLine", "language"))
    add(kb, write(tmp_path / "more", {"x.md": "clay"}), name="more")
    assert diagnose(kb, "clay", "more/x.md", collection="notes")["target"]["filterReasons"] == ["collection"]
    assert diagnose(kb, "clay", "notes/a.md", author="ann", tagsAll=["red"])["target"]["status"] == "diagnosed"
    with pytest.raises(gno.GnoError) as e:
        diagnose(kb, "clay", "notes/a.md", collection="nosuch")
    assert e.value.code == "NOT_FOUND"


# ---- graph expansion ----

def test_a_linked_document_comes_with_the_one_that_matches(kb, tmp_path):
    root = write(tmp_path / "notes", {
        "atlas.md": "# Atlas\n\nThe Atlas project ships in May. See [[Budget]] and [the plan](sub/plan.md) and [[hidden]].\n",
        "budget.md": "# Budget\n\nMoney for the year.\n", "sub/plan.md": "# Plan\n\nSteps.\n", "alone.md": "# Alone\n\nNobody links here.\n",
        "into.md": "# Into\n\nAll about [[atlas]], [[Atlas]] and more.\n", "hidden.md": "---\ntags: [secret]\n---\n# Hidden\n\nPrivate.\n"})
    add(kb, root)
    plain = query(kb, "ships in May", limit=50)
    assert paths(plain) == ["atlas.md"] and plain["meta"]["graphExpansion"]["fallbackReasons"] == ["graph_disabled"]
    found = query(kb, "ships in May", limit=50, graph=True)
    graph = found["meta"]["graphExpansion"]
    assert paths(found)[0] == "atlas.md" and sorted(paths(found)[1:]) == ["budget.md", "hidden.md", "into.md", "sub/plan.md"]
    assert graph == {"enabled": True, "seedCount": 1, "candidateCount": 4, "maxCandidates": 20, "fallbackReasons": [],
                     "edgeConfidence": {"explicit": 4, "inferred": 0, "ambiguous": 0, "similarity": 0}}
    assert paths(found)[1] == "into.md", "two links weigh more than one"
    assert sorted(paths(query(kb, "ships in May -private", graph=True))) == ["atlas.md", "budget.md", "into.md", "sub/plan.md"]
    assert sorted(paths(query(kb, "ships in May", graph=True, exclude=["money", "steps"]))) == ["atlas.md", "hidden.md", "into.md"]
    assert sorted(paths(query(kb, "private", graph=True, tagsAll=["secret"]))) == ["hidden.md"], "filters hold"
    assert query(kb, "private", graph=True, tagsAll=["secret"])["meta"]["graphExpansion"]["fallbackReasons"] == ["graph_no_new_candidates"]
    assert len(paths(query(kb, "ships in May", graph=True, candidateLimit=2))) == 3
    for text, reason in (("nobody", "graph_empty"), ("zeppelin", "graph_no_seed_candidates")):
        assert query(kb, text, graph=True)["meta"]["graphExpansion"]["fallbackReasons"] == [reason]
    stages = {s["id"]: s for s in diagnose(kb, "ships in May", "notes/budget.md", graph=True)["stages"]}
    assert stages["graph"]["present"] and stages["graph"]["score"] == stages["graph"]["rank"] and stages["bm25"]["dropReason"] == "not_in_candidate_set"
    run(kb, "embed")
    both = query(kb, "ships in May", limit=50, graph=True)
    assert both["meta"]["mode"] == "hybrid" and both["meta"]["graphExpansion"]["candidateCount"] == 1, "five of six are seeds"


# ---- no model ----

def test_without_a_model_keywords_answer_and_say_why(notes_kb, monkeypatch):
    monkeypatch.setattr(gno, "model_folders", lambda kb: [])
    for arguments in ({}, {"thorough": True}, {"intent": "pottery"}, {"queryModes": [{"mode": "hyde", "text": "clay"}]}):
        found = query(notes_kb, "wet clay", **arguments)
        meta = found["meta"]
        assert (meta["mode"], meta["vectorsUsed"], meta["reranked"]) == ("bm25_only", False, False) and len(found["results"]) == 2
        assert any("no embed model found" in note for note in meta["notes"])
