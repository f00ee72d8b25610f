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
    fused = gno.fuse(words, near)
    assert dict(fused) == {doc: pytest.approx(score, abs=1e-9) for doc,
                           score in expected.items()} and len(fused) == len(expected)


RAW = st.lists(st.floats(1e-9, 60), max_size=30).map(lambda v: sorted(v, reverse=True))
COSINE = st.lists(st.floats(0, 1), max_size=30).map(lambda v: sorted(v, reverse=True))


@given(RAW, COSINE, st.permutations(range(60)))
def test_fused_scores_are_within_0_and_1_and_complete(raw, cosine, docs):
    words, near = list(zip(docs, raw, strict=False)), list(zip(docs[20:], cosine, strict=False))
    fused = dict(gno.fuse(words, near))
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
    wanted = gno.load_embedder(notes_kb, gno.first_card(notes_kb)).embed(text, "query").astype(np.float64)
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
    found = query(notes_kb, text, limit=100)
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
    found = query(kb, "clay")
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
                "reranked": False, "totalResults": 5, "candidateLimit": 20}
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
