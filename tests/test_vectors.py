"""Vectors: how texts are embedded and stored, and how the nearest are found, by either engine alike."""
import hashlib
import json
import os
import shutil
import sqlite3
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, VAULT, add, cli, new_kb, run, write

import gno

MODELS = Path(gno.__file__).parent / "models"
WHO = ["the gardener", "a surgeon", "my grandmother", "the ship's captain", "an accountant", "the choir", "a beekeeper",
       "the volcano"]
DOES = ["repairs", "forgets", "paints", "sells", "measures", "dreams about", "hides", "inherits"]
WHAT = ["an old bicycle", "the tax form", "seven lemons", "a northern lighthouse", "the wedding cake",
        "a broken violin", "the winter coat"]
SENTENCES = [f"{who} {does} {what}" for who in WHO for does in DOES for what in WHAT]           # 448
QUERIES = ["musical instrument", "someone who looks after bees", "beacon for ships at sea", "citrus fruit",
           "paying money to the state",
           "the violin that the doctor mends", "zzzz", "bike"]


def files() -> dict[str, str]:
    "A note for each sentence, long notes of many chunks, notes with the same text."
    notes = {f"{n % 7}/{n:03}.md": f"{text} #{'rare' if n % 50 == 0 else 'often'}" for n, text in enumerate(SENTENCES)}
    notes |= {f"long{k}.md": f"# Long {k}\n\n" + "\n\n".join(f"{text} in year {n}, once more and again" for n,
                                                             text in enumerate(SENTENCES[k::16]))
              for k in range(3)}
    return notes | {f"{name} twin.md": "A lighthouse keeper wrote to his twin." for name in "cab"}


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    "A knowledge base of a few hundred short notes, embedded once."
    base = tmp_path_factory.mktemp("vectors")
    kb = new_kb(base / "gno")
    add(kb, write(base / "notes", files()))
    report = run(kb, "embed")
    assert report["errors"] == 0 and report["embedded"] > 450
    yield kb
    kb.close()


def vsearch(kb, query, **arguments):
    return run(kb, "vsearch", query=query, **arguments)


def paths(found) -> list[str]:
    return [h["source"]["relPath"] for h in found["results"]]


def stored(kb) -> dict[bytes, tuple[float, bytes]]:
    "All vectors of the index file: {hash of the text: (scale, int8 values)}, read by SQLite alone."
    with sqlite3.connect(kb.db_path) as db:
        return {h: (scale, data) for h, scale, data in db.execute("SELECT input_hash, scale, embedding FROM vectors")}


def cosines(kb, query: str, condition="1") -> list[tuple[str, float]]:
    "Every document and the cosine of its best chunk, best first, ties by path: float64, straight from the stored rows."
    wanted = gno.load_embedder(kb, gno.find_card(kb, "embed", "")).embed(query, "query").astype(np.float64)
    best: dict[str, float] = {}
    with sqlite3.connect(kb.db_path) as db:
        rows = db.execute(f"""
            SELECT d.path, v.embedding FROM documents d JOIN chunks c ON c.mirror_id = d.mirror_id AND c.cut = d.cut
            JOIN vectors v ON v.input_hash = c.input_hash WHERE d.active AND {condition}""").fetchall()
    for path, data in rows:
        row = np.frombuffer(data, np.int8).astype(np.float64)
        score = round(float(np.dot(row, wanted) / np.sqrt(np.dot(row, row)) / np.sqrt(np.dot(wanted, wanted))), 6)
        best[path] = max(best.get(path, -1.0), score)
    return sorted(best.items(), key=lambda pair: (-pair[1], pair[0]))


def stem(path: str) -> str:
    return path.removesuffix(".md")


# ---- arithmetic ----

@pytest.mark.parametrize("vector, scale, values", [
    ([1, 0, -1], 1 / 127, [127, 0, -127]), ([0.5, 0.25, -0.125], 0.5 / 127, [127, 64, -32]),
    ([-2, 1, 0], 2 / 127, [-127, 64, 0]), ([0, 0, 0], None, [0, 0, 0]),
    ([127, 1.4, 1.6], 1, [127, 1, 2])])
def test_quantise_by_hand(vector, scale, values):
    got_scale, data = gno.quantise(np, np.array(vector, np.float32))
    assert list(np.frombuffer(data, np.int8)) == values
    assert scale is None or got_scale == pytest.approx(scale, rel=1e-6)


def test_quantise_is_off_by_half_a_step_at_most():
    rng = np.random.default_rng(1)
    for _ in range(200):
        vector = rng.normal(size=384).astype(np.float32) * np.float32(rng.choice([1e-3, 0.05, 1, 40]))
        scale, data = gno.quantise(np, vector)
        assert np.abs(np.frombuffer(data, np.int8) * scale - vector).max() <= scale * 0.5001


@pytest.mark.parametrize("query, row, expected", [
    ([1, 0], [127, 0], 1.0), ([1, 0], [0, 127], 0.0), ([0, 2], [0, -127], -1.0), ([3, 4], [100, 0], 0.6),
    ([3, 4], [127, 127], 0.989949), ([1, 1], [1, 0], 0.707107), ([1, 0], [0, 0], 0.0),
    ([0, 0], [5, 5], 0.0)])
def test_exact_scores_by_hand(query, row, expected):
    assert gno.exact_scores(np, np.array(query, np.float32),
                            [np.array(row, np.int8).tobytes()]) == [pytest.approx(expected, abs=1e-12)]


def test_exact_scores_are_those_of_float64_and_do_not_depend_on_their_neighbours():
    rng = np.random.default_rng(2)
    query, rows = rng.normal(size=384).astype(np.float32), rng.integers(-127, 128, (300, 384)).astype(np.int8)
    blobs = [r.tobytes() for r in rows]
    scores = gno.exact_scores(np, query, blobs)
    r, q = rows.astype(np.float64), query.astype(np.float64)
    exact = r @ q / np.linalg.norm(r, axis=1) / np.linalg.norm(q)
    assert scores == pytest.approx(exact, abs=6e-7)
    assert scores == [gno.exact_scores(np, query, [b])[0] for b in blobs] == gno.exact_scores(np, query,
                                                                                              blobs[::-1])[::-1]


# ---- the nearest ----

@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("limit", [1, 5, 20])
def test_both_engines_give_the_exact_nearest_documents(embedded, engine, query, limit):
    found = vsearch(embedded, query, limit=limit)
    expected = [(path, max(score, 0.0)) for path, score in cosines(embedded, query)][:limit]
    assert [(h["source"]["relPath"], h["score"]) for h in found["results"]] == expected
    meta = found["meta"]
    assert meta["mode"] == "vector" and meta["vectorsUsed"] is True and meta["totalResults"] == limit


IS_RARE = "EXISTS (SELECT 1 FROM tags t WHERE t.doc_id = d.id AND t.tag = 'rare')"
NO_LIGHTHOUSE = """NOT EXISTS (SELECT 1 FROM mirrors m WHERE m.id = d.mirror_id
                               AND (instr(m.body, 'lighthouse') OR instr(m.body, 'choir')))"""


@pytest.mark.parametrize("arguments, condition", [
    ({"tagsAll": ["rare"]}, IS_RARE), ({"tagsAny": ["rare", "none"], "limit": 3}, IS_RARE),
    ({"exclude": ["lighthouse", "CHOIR"], "limit": 20}, NO_LIGHTHOUSE),
    ({"tagsAll": ["rare", "often"]}, "0"), ({"until": "1999-01-01"}, "0"), ({"author": "nobody"}, "0"),
    ({"categories": ["nothing"]}, "0")])
def test_filters_hold_inside_the_vector_search(embedded, engine, arguments, condition):
    found = vsearch(embedded, "beacon for ships at sea", **arguments)
    expected = cosines(embedded, "beacon for ships at sea", condition)[:arguments.get("limit", 5)]
    assert [(h["source"]["relPath"], h["score"]) for h in found["results"]] == expected


def test_ties_stand_in_the_order_of_their_paths(embedded, engine):
    found = vsearch(embedded, "a lighthouse keeper's letter to a twin", limit=3)
    assert paths(found) == ["a twin.md", "b twin.md", "c twin.md"] and len({h["score"] for h in found["results"]}) == 1


@pytest.mark.parametrize("least", [0, 0.2, 0.5, 1])
def test_min_score_is_the_cosine(embedded, least):
    found = vsearch(embedded, "citrus fruit", limit=100, minScore=least)
    assert [h["score"] for h in found["results"]] == [s for _,
                                                      s in cosines(embedded, "citrus fruit") if s >= least][:100]


@pytest.mark.parametrize("query, word", [("musical instrument", "violin"), ("beacon for ships at sea", "lighthouse"),
                                         ("citrus fruit", "lemons"), ("income declaration", "tax"),
                                         ("clothes against the cold", "coat"),
                                         ("two-wheeled vehicle", "bicycle"), ("dessert for a bride", "cake")])
def test_meaning_is_found_without_a_common_word(embedded, query, word):
    assert all(word in h["snippet"] for h in vsearch(embedded, query)["results"])


def test_engine_is_what_the_process_has(kb, monkeypatch):
    "A server scans its matrix; a command takes sqlite-vec where it loads, else numpy; without onnxruntime a server does too."
    assert gno.engine(kb) is (gno.propose_sqlite_vec if gno.vec_loaded(kb.db) else gno.propose_numpy)
    monkeypatch.setattr(gno, "vec_loaded", lambda db: False)
    assert gno.engine(kb) is gno.propose_numpy
    kb.mode = "stdio"
    assert gno.engine(kb) is gno.propose_matrix
    with monkeypatch.context() as without:
        without.setattr(gno, "missing_packages", lambda *names: list(names))
        assert gno.engine(kb) is gno.propose_numpy
    monkeypatch.setattr(gno, "model_folders", lambda kb: ["/nowhere"])
    assert gno.engine(kb) is gno.propose_numpy


def test_a_servers_matrix_follows_what_other_processes_change(kb, tmp_path):
    root = write(tmp_path / "notes", {"a.md": "A violin.", "b.md": "A lighthouse."})
    add(kb, root)
    run(kb, "embed")
    server = new_kb(tmp_path / "gno", mode="stdio")
    assert paths(vsearch(server, "music")) == ["a.md", "b.md"]
    (matrix,) = [v for k, v in server.models.items() if k[0] == "matrix"]
    run(kb, "index")
    vsearch(server, "ships")
    assert matrix in server.models.values(), "nothing changed, so it is kept"
    write(root, {"c.md": "An orchestra plays a symphony.", "b.md": "A lighthouse with a piano."})
    (root / "a.md").unlink()
    run(kb, "sync")
    assert paths(vsearch(server, "music")) == []
    run(kb, "embed")
    assert sorted(paths(vsearch(server, "music"))) == ["b.md", "c.md"]
    run(kb, "remove_collection", collection="notes")
    add(kb, root, name="again")
    assert sorted(h["uri"] for h in vsearch(server, "music")["results"]) == ["gno://again/b.md", "gno://again/c.md"]
    server.close()


@pytest.mark.parametrize("dims", [8, 384, 1000])
def test_the_matrix_scans_vectors_of_any_size(kb, monkeypatch, dims):
    "Scores against float64, off by no more than 7 bits of the query allow; row numbers across blocks."
    monkeypatch.setattr(gno, "MATRIX_BLOCK", 1024)
    rng = np.random.default_rng(dims)
    vectors = rng.normal(size=(3000, dims))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    card = gno.find_card(kb, "embed", "")
    with gno.transaction(kb.wdb) as _:
        db = kb.wdb
        fp = gno.fingerprint_id(db, card, card.data["dims"])
        for n, v in enumerate(vectors):
            key = bytes([n % 256, n // 256]) + bytes(30)          # zeros at its end
            db.execute("INSERT INTO vectors VALUES (?, ?, ?, ?)", [fp, key, *gno.quantise(np, v.astype(np.float32))])
            db.execute("INSERT INTO chunks VALUES (?, '', 0, ?, ?, 1, 1, ?)", [n, n, n + 1, key])
            db.execute("""INSERT INTO documents(id, collection, path, docid, source_hash, mirror_id, cut, mime, ext, size, mtime_ns, ctime_ns,
                inode, title, lang, content_type, categories, author, document_date, meta, converter, warnings, active, indexed_at)
                VALUES (?, 'c', ?, '', '', ?, '', '', '', 0, 0, 0, 0, '', '', '', '[]', '', '', '{}', '', '', 1, '')""", [n + 1, str(n), n])
    query = vectors[7].astype(np.float32)
    matrix = gno.Matrix.of(kb, fp)
    exact, found = vectors @ vectors[7], matrix.scores(query)
    assert np.abs(found / found.max() - exact).max() < 0.02 and found.argmax() == 7
    rows = matrix.rows(kb.db, fp, np.array([0, 2999]))
    assert [row[:3] for row in rows] == [(1, 0, 1), (3000, 2999, 3000)] and rows[1][3] == gno.quantise(np, vectors[2999].astype(np.float32))[1]


def test_a_document_of_very_many_near_chunks_does_not_crowd_out_the_others(kb, tmp_path, engine):
    part = "# Lighthouse\n\n" + "A northern lighthouse, a beacon for all ships at sea, in a storm. " * 6 + "\n\n"
    add(kb, write(tmp_path / "notes",
                  {"crowd.md": part * 700} | {f"{n}.md": f"{text}\n" for n, text in enumerate(SENTENCES[:30])}))
    assert run(kb, "embed")["embedded"] < 40                                  # equal texts are embedded once
    assert len(kb.db.execute("SELECT 1 FROM chunks").fetchall()) > 700
    found = vsearch(kb, "beacon for all ships at sea", limit=20)
    assert len(paths(found)) == 20 and paths(found)[0] == "crowd.md"
    assert [(h["source"]["relPath"],
             h["score"]) for h in found["results"]] == [(p, max(s, 0.0)) for p,
                                                        s in cosines(kb, "beacon for all ships at sea")][:20]


def test_the_hit_shows_the_chunk_that_is_near(embedded):
    "Without a word in common the place lies in the best chunk."
    (hit,) = [h for h in vsearch(embedded, "mending a cello",
                                 limit=100)["results"] if h["source"]["relPath"] == "long1.md"] or [None]
    text = run(embedded, "get", ref="notes/long1.md")["content"].split("\n")
    first, last = hit["snippetRange"]["startLine"], hit["snippetRange"]["endLine"]
    shown = hit["snippet"].removeprefix("…").removesuffix("…")
    assert first <= hit["line"] <= last and shown in "\n".join(text[first - 1:last]) and len(hit["snippet"]) <= 400
    with sqlite3.connect(embedded.db_path) as db:
        rows = db.execute("""
            SELECT c.start_line, c.end_line, v.embedding FROM documents d JOIN chunks c ON c.mirror_id = d.mirror_id
            JOIN vectors v ON v.input_hash = c.input_hash WHERE d.path = 'long1.md'""").fetchall()
    wanted = gno.load_embedder(embedded, gno.find_card(embedded, "embed", "")).embed("mending a cello", "query").astype(np.float64)
    near = max(rows, key=lambda r: np.dot(v := np.frombuffer(r[2], np.int8).astype(np.float64),
                                          wanted) / np.linalg.norm(v))
    assert near[0] <= hit["line"] <= near[1]


@pytest.mark.parametrize("query", ["?", "  ", "🎉"])
def test_a_query_without_a_word_is_refused(embedded, query):
    with pytest.raises(gno.GnoError) as e:
        vsearch(embedded, query)
    assert e.value.code == "INVALID_INPUT"


def test_where_no_vector_can_be_made_the_error_names_the_package(kb, tmp_path, monkeypatch):
    "And not the command that would fail for the same reason."
    add(kb, write(tmp_path / "notes", {"a.md": "kiln"}))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(gno.GnoError) as e:
        vsearch(kb, "kiln")
    assert e.value.code == "MISSING_PACKAGE" and "onnxruntime" in e.value.message and "pip install onnxruntime" in e.value.hint


def test_without_vectors_the_error_says_how_to_make_them(kb, tmp_path):
    add(kb, write(tmp_path / "notes", {"a.md": "kiln"}))
    with pytest.raises(gno.GnoError) as e:
        vsearch(kb, "kiln")
    assert e.value.code == "NOT_FOUND" and "Vectors not available" in e.value.message and "gno index" in e.value.hint


# ---- embedding ----

TEXTS = ["A kiln is an oven for clay.", "x", "東京", "word " * 90, "Seven lemons, and the tax form; a broken violin?",
         "1 + 1 = 2"]


def test_a_vector_is_unit_length_and_always_the_same(embedded):
    model = gno.load_embedder(embedded, gno.find_card(embedded, "embed", ""))
    alone = {t: model.embed(t).tobytes() for t in TEXTS}
    for t in TEXTS[::-1] + TEXTS:
        assert model.embed(t).tobytes() == alone[t]
        assert np.linalg.norm(model.embed(t).astype(np.float64)) == pytest.approx(1, abs=1e-5)
    other = gno.Embedder(gno.find_card(embedded, "embed", ""))                            # loaded anew
    assert {t: other.embed(t).tobytes() for t in TEXTS} == alone


def test_stored_bytes_do_not_depend_on_what_is_embedded_beside(tmp_path):
    alone: dict[bytes, tuple] = {}
    for n, text in enumerate(TEXTS):
        kb = new_kb(tmp_path / f"gno{n}")
        add(kb, write(tmp_path / f"notes{n}", {"a.md": text}))
        run(kb, "embed")
        alone |= stored(kb)
        kb.close()
    together = new_kb(tmp_path / "gno")
    add(together, write(tmp_path / "notes",
                        {f"{n}.md": t for n, t in enumerate(TEXTS)} | {f"o{n}.md": t for n,
                                                                       t in enumerate(SENTENCES[:20])}))
    run(together, "embed")
    run(together, "add_collection", path=str(write(tmp_path / "later", {"l.md": "Later."})))
    run(together, "embed")
    assert len(alone) == len(TEXTS) and {h: v for h, v in stored(together).items() if h in alone} == alone
    together.close()


def test_stored_vectors_are_close_to_the_models(embedded):
    model, vectors = gno.load_embedder(embedded, gno.find_card(embedded, "embed", "")), stored(embedded)
    for text in SENTENCES[:20]:
        n = SENTENCES.index(text)
        body = run(embedded, "get", ref=f"notes/{n % 7}/{n:03}.md")["content"]
        data = vectors[hashlib.sha256(gno.chunk_input("", body).encode()).digest()][1]
        row, exact = np.frombuffer(data,
                                   np.int8).astype(np.float64), model.embed(gno.chunk_input("",
                                                                                            body)).astype(np.float64)
        assert np.dot(row, exact) / np.linalg.norm(row) > 0.9995


def test_a_text_longer_than_the_window_is_the_mean_of_its_windows(embedded):
    model = gno.load_embedder(embedded, gno.find_card(embedded, "embed", ""))
    text = "lemons and violins " * 400
    ids = model.pieces(text)
    assert len(ids) > 2 * model.window
    windows = [model.run(ids[i:i + model.window]) for i in range(0, len(ids), model.window)]
    mean, total = np.mean(windows, axis=0, dtype=np.float64), model.embed(text).astype(np.float64)
    assert np.linalg.norm(total) == pytest.approx(1, abs=1e-5)
    assert np.dot(total, mean) / np.linalg.norm(mean) == pytest.approx(1, abs=1e-5)


def test_embedding_goes_on_where_it_was_stopped(kb, tmp_path):
    add(kb, write(tmp_path / "notes", {f"{n:03}.md": text for n, text in enumerate(SENTENCES[:200])}))
    stop = gno.Progress(lambda p: p.cancelled.set() if p.current >= 64 else None)
    with pytest.raises(gno.GnoError) as e:
        gno.call(kb, "embed", {}, inline=stop)
    assert e.value.code == "CANCELLED"
    done = stored(kb)
    assert 64 <= len(done) < 200
    assert run(kb, "status")["embeddingBacklog"] == 200 - len(done)
    assert run(kb, "embed")["embedded"] == 200 - len(done)                    # only the rest
    assert len(stored(kb)) == 200 and stored(kb).items() >= done.items()
    assert run(kb, "embed")["embedded"] == 0 and run(kb, "status")["embeddingBacklog"] == 0


def test_collections_with_the_same_text_share_its_vector(kb, tmp_path):
    add(kb, write(tmp_path / "notes", {"a.md": "A kiln.", "b.md": "Clay."}))
    assert run(kb, "embed")["embedded"] == 2
    add(kb, write(tmp_path / "second", {"deep/copy.md": "A kiln.", "c.md": "Glaze."}), name="second")
    counts = {c["name"]: (c["chunkCount"], c["embeddedCount"]) for c in run(kb, "status")["collections"]}
    assert counts == {"notes": (2, 2), "second": (2, 1)} and run(kb, "status")["embeddingBacklog"] == 1
    assert run(kb, "embed", collection="second")["embedded"] == 1
    assert [h["uri"] for h in vsearch(kb, "A kiln.", limit=2)["results"]] == ["gno://notes/a.md",
                                                                              "gno://second/deep/copy.md"]


def test_the_file_name_is_no_part_of_what_is_embedded(kb, tmp_path):
    add(kb, write(tmp_path / "notes", {"a.md": "A kiln without a heading."}))
    assert run(kb, "embed")["embedded"] == 1
    os.rename(tmp_path / "notes" / "a.md", tmp_path / "notes" / "entirely different.md")
    run(kb, "sync")
    assert run(kb, "status")["embeddingBacklog"] == 0 and run(kb, "embed")["embedded"] == 0
    assert paths(vsearch(kb, "kiln")) == ["entirely different.md"]


def section(n: int, word: str) -> str:
    return f"## Part {n}\n\n" + " ".join(f"Sentence {i} of part {n} is about {word}." for i in range(10)) + "\n\n"


def test_an_edit_embeds_only_the_chunks_it_touched(kb, tmp_path):
    parts = [section(n, "clay") for n in range(12)]
    note = tmp_path / "notes" / "a.md"
    add(kb, write(tmp_path / "notes", {"a.md": "# Book\n\n" + "".join(parts)}))
    total = run(kb, "embed")["embedded"]
    assert total >= 12
    note.write_text("# Book\n\n" + "".join(parts[:6]) + section(6, "porcelain") + "".join(parts[7:]))
    run(kb, "sync")
    assert run(kb, "status")["embeddingBacklog"] == 1 == run(kb, "embed")["embedded"]
    note.write_text("# Book\n\n" + "".join(parts[:3]) + section(99, "a new part") + "".join(parts[3:]))
    run(kb, "sync")
    assert run(kb, "embed")["embedded"] <= 2                                  # the old part 6 was kept
    found = vsearch(kb, "porcelain")
    assert found["results"] and run(kb, "status")["embeddingBacklog"] == 0


def test_backlog_and_capabilities_in_status(kb, tmp_path):
    add(kb, write(tmp_path / "notes", {"a.md": "A kiln.", "b.md": "Clay.", "empty.md": "", "blank.md": "\n \n"}))
    status = run(kb, "status")
    assert (status["totalChunks"], status["embeddingBacklog"], status["capabilities"]["vector"]) == (2, 2, False)
    run(kb, "embed")
    status = run(kb, "status")
    assert (status["totalChunks"], status["embeddingBacklog"], status["capabilities"]["vector"]) == (2, 0, True)
    (tmp_path / "notes" / "b.md").unlink()
    run(kb, "sync")
    assert run(kb, "status")["totalChunks"] == 1 and paths(vsearch(kb, "clay")) == ["a.md"]


def test_every_chunk_of_every_format_gets_its_vector(kb):
    add(kb, VAULT, "vault")
    chunks = run(kb, "status")["totalChunks"]
    assert run(kb, "embed")["errors"] == 0
    status = run(kb, "status")
    assert status["totalChunks"] == chunks > 50 and status["embeddingBacklog"] == 0


def test_index_syncs_and_embeds(kb, tmp_path):
    root = write(tmp_path / "notes", {"a.md": "A kiln."})
    add(kb, root)
    write(root, {"b.md": "Clay."})
    report = run(kb, "index")
    assert report["sync"]["totalFilesAdded"] == 1 and report["embed"]["embedded"] == 2
    assert "embed" not in run(kb, "index", noEmbed=True)


# ---- models that are damaged, missing or others ----

def with_models(kb, folder: Path):
    "Let the configuration name a model folder."
    config = Path(kb.config_path)
    config.write_text(config.read_text() + f"\nmodels:\n  dir: {json.dumps(str(folder))}\n")


@pytest.fixture
def own_models(kb, tmp_path):
    "A knowledge base of two embedded notes that uses its own copy of the model."
    folder = tmp_path / "models"
    shutil.copytree(MODELS, folder, ignore=shutil.ignore_patterns("source", ".*"))
    add(kb, write(tmp_path / "notes", {"a.md": "A kiln.", "b.md": "Clay."}))
    with_models(kb, folder)
    assert run(kb, "embed")["embedded"] == 2
    return folder


def truncate(path: Path):
    os.truncate(path, path.stat().st_size // 2)


def garble(path: Path):
    path.write_bytes(b"\x00" * path.stat().st_size)


@pytest.mark.parametrize("damage", [truncate, os.unlink, garble], ids=["cut short", "missing", "garbled"])
@pytest.mark.parametrize("name", ["all-minilm-l6-v2.int8.onnx", "tokenizer.json"])
def test_a_damaged_model_is_named_and_keyword_search_goes_on(own_models, tmp_path, damage, name):
    damage(own_models / name)
    kb = new_kb(tmp_path / "gno")                                             # nothing loaded yet
    try:
        for tool, arguments in (("vsearch", {"query": "kiln"}), ("embed", {})):
            with pytest.raises(gno.GnoError) as e:
                run(kb, tool, **arguments)
            assert e.value.code == "MODEL_NOT_FOUND" and str(own_models / name) in e.value.message and e.value.hint
        found = run(kb, "query", query="kiln")
        assert paths(found) == ["a.md"]
        assert found["meta"]["mode"] == "bm25_only" and found["meta"]["vectorsUsed"] is False
        assert any(name in note for note in found["meta"]["notes"])
        write(tmp_path / "notes", {"c.md": "A new kiln."})
        report = run(kb, "index")
        assert report["sync"]["totalFilesAdded"] == 1
        assert name in report["failed"] and "MODEL_NOT_FOUND" in report["failed"]
        assert len(run(kb, "search", query="kiln")["results"]) == 2 and run(kb, "status")["totalDocuments"] == 3
    finally:
        kb.close()


@pytest.mark.parametrize("card", [b"", b"{", b"[]", b'{"name": "x"}', b"\xff"])
def test_a_card_that_is_none_is_named(own_models, kb, card):
    (own_models / "card.json").write_bytes(card)
    with pytest.raises(gno.GnoError) as e:
        vsearch(kb, "kiln")
    assert e.value.code == "MODEL_NOT_FOUND" and "card.json" in e.value.message
    assert run(kb, "query", query="kiln")["meta"]["mode"] == "bm25_only" and run(kb, "status")["totalDocuments"] == 2


def test_vectors_of_another_model_are_never_searched(own_models, kb):
    before = stored(kb)
    card = json.loads((own_models / "card.json").read_text())
    (own_models / "card.json").write_text(json.dumps(card | {"name": "another"}))
    with pytest.raises(gno.GnoError) as e:
        vsearch(kb, "kiln")
    assert e.value.code == "NOT_FOUND"
    assert run(kb, "query", query="kiln")["meta"]["vectorsUsed"] is False
    status = run(kb, "status")
    assert status["embeddingBacklog"] == 2
    assert status["healthy"] is False, "the chunks have vectors of another model, and status says so"
    assert run(kb, "embed")["embedded"] == 2 and paths(vsearch(kb, "kiln"))[0] == "a.md"
    status = run(kb, "status")
    assert status["healthy"] is True and [c["status"] for c in status["health"]["checks"] if c["id"] == "vectors"] == ["warn"]
    with sqlite3.connect(kb.db_path) as db:
        assert db.execute("SELECT count(*) FROM vectors").fetchone() == (4,)
    assert stored(kb) == before, "the same texts, the same weights, the same bytes"


# ---- without the packages, without extensions ----

WITHOUT = '''
import os, sys
class Without:
    "Finds modules as before, but none of these."
    def __init__(self, finders): self.finders = finders
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["WITHOUT"].split(","): return None
        return next((s for s in (f.find_spec(name, path, target) for f in self.finders) if s), None)
sys.meta_path[:] = [Without(sys.meta_path[:])]
'''


EVERYTHING = "numpy,onnxruntime,tokenizers,sqlite_vec,pypdfium2"


@pytest.mark.parametrize("missing", ["onnxruntime", "tokenizers", "numpy", EVERYTHING])
def test_without_packages_keywords_go_on_and_the_answer_says_what_is_missing(tmp_path, missing):
    base = tmp_path / "gno"
    kb = new_kb(base)
    root = write(tmp_path / "notes", {"a.md": "# Kiln\n\nA kiln is an oven."})
    add(kb, root)
    run(kb, "embed")
    kb.close()
    write(tmp_path / "site", {"sitecustomize.py": WITHOUT})
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)]), "WITHOUT": missing}

    def gno_cli(*words, code=0):
        done = cli(base, *words, "--json", env=env)
        assert done.returncode == code, done.stderr.decode()
        return json.loads(done.stdout)
    named = missing.split(",")[0]
    found = gno_cli("query", "kiln")
    assert found["meta"]["mode"] == "bm25_only" and found["meta"]["vectorsUsed"] is False
    assert paths(found) == ["a.md"]
    assert any(named in note and "pip install" in note for note in found["meta"]["notes"])
    error = gno_cli("vsearch", "kiln", code=2)["error"]
    assert error["code"] == "MISSING_PACKAGE" and named in error["message"] and "pip install" in error["hint"]
    if missing != EVERYTHING:
        return
    write(root, {"b.md": "Another kiln."})
    report = gno_cli("index")
    assert report["sync"]["totalFilesAdded"] == 1
    assert "MISSING_PACKAGE" in report["failed"] and named in report["failed"]
    assert len(gno_cli("search", "kiln")["results"]) == 2
    assert gno_cli("get", "notes/a.md:3")["content"] == "A kiln is an oven.\n"
    status = gno_cli("status")
    capable = {key: status["capabilities"][key] for key in ("bm25", "vector", "hybrid")}
    assert capable == {"bm25": True, "vector": False, "hybrid": False}
    assert any(named in c["detail"] for c in status["health"]["checks"])


class Plain(sqlite3.Connection):
    "A connection of a Python whose SQLite was built without loadable extensions."

    @property
    def enable_load_extension(self):
        raise AttributeError("enable_load_extension")


def test_an_sqlite_that_loads_no_extensions_gives_the_same_answers(embedded, monkeypatch):
    expected = {q: vsearch(embedded, q, limit=20)["results"] for q in QUERIES}
    connect = sqlite3.connect
    monkeypatch.setattr(gno.sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=Plain))
    kb = gno.KB(dirs=embedded.dirs)
    try:
        assert not hasattr(kb.db, "enable_load_extension") and gno.vec_loaded(kb.db) is False
        assert {q: vsearch(kb, q, limit=20)["results"] for q in QUERIES} == expected
        assert run(kb, "query", query="lemons")["meta"]["vectorsUsed"] is True
        assert all("enable_load_extension" not in c["detail"] for c in run(kb, "status")["health"]["checks"])
    finally:
        kb.close()


def test_reading_needs_no_write_access_and_leaves_no_extension_door_open(embedded):
    kb = gno.KB(dirs=embedded.dirs)
    try:
        vsearch(kb, "lemons")
        with pytest.raises(sqlite3.OperationalError):
            kb.db.execute("SELECT load_extension('nothing')")
        with pytest.raises(sqlite3.OperationalError):
            kb.db.execute("DELETE FROM vectors")
    finally:
        kb.close()


# ---- similar documents ----

def similar(kb, ref, **arguments):
    return run(kb, "similar", ref=ref, **arguments)


def test_similar_is_the_cosine_of_the_mean(embedded, monkeypatch):
    "Against float64; and no model is loaded."
    monkeypatch.setattr(gno, "load_embedder", None)
    with sqlite3.connect(embedded.db_path) as db:
        rows = db.execute("SELECT d.path, v.embedding FROM documents d JOIN chunks c ON c.mirror_id = d.mirror_id "
                          "JOIN vectors v ON v.input_hash = c.input_hash").fetchall()
    units = [(path, (v := np.frombuffer(data, np.int8).astype(np.float64)) / np.linalg.norm(v)) for path, data in rows]
    wanted = np.mean([v for path, v in units if path == "long1.md"], axis=0)
    best: dict[str, float] = {}
    for path, v in units:
        best[path] = max(best.get(path, -1), float(v @ wanted / np.linalg.norm(wanted)))
    expected = sorted(((s, p) for p, s in best.items() if p != "long1.md"), reverse=True)
    found = similar(embedded, "notes/long1.md", limit=50)
    assert [r["score"] for r in found["similar"]] == [pytest.approx(max(s, 0), abs=2e-6) for s, _ in expected[:50]]
    assert found["meta"] == {"docid": found["meta"]["docid"], "uri": "gno://notes/long1.md", "title": found["meta"]["title"], "totalSimilar": 50,
                             "totalResults": 50, "limit": 50, "threshold": None, "crossCollection": False}
    text = gno.text_of(gno.TOOLS["similar"], found, {})
    first = found["similar"][0]
    assert text.startswith(f"Found 50 similar documents for gno://notes/long1.md:\n\n  [{first['docid']}] {first['uri']} ({first['score']:.2f})")


def test_similar_leaves_out_twins_other_collections_and_what_is_below_the_threshold(kb, tmp_path):
    add(kb, write(tmp_path / "one", {"a.md": "# Violin\n\nA violin is a string instrument.", "twin.md": "# Violin\n\nA violin is a string instrument.",
                                     "b.md": "The cello is a large string instrument.", "c.md": "Taxes are due in May.", "e.md": ""}), name="one")
    add(kb, write(tmp_path / "two", {"d.md": "The viola is a string instrument.", "f.md": "# Violin\n\nA violin is a string instrument."}), name="two")
    with pytest.raises(gno.GnoError) as e:
        similar(kb, "one/a.md")
    assert e.value.code == "NOT_FOUND" and "gno index" in e.value.hint
    run(kb, "embed")
    assert [r["relPath"] for r in similar(kb, "one/a.md")["similar"]] == ["b.md", "c.md"]
    across = similar(kb, "one/a.md", crossCollection=True, limit=50)["similar"]
    assert [r["uri"] for r in across][2:] == ["gno://one/c.md"] and {r["uri"] for r in across[:2]} == {"gno://one/b.md", "gno://two/d.md"}
    high = similar(kb, "one/a.md", crossCollection=True, threshold=across[1]["score"])
    assert high["similar"] == across[:2] and high["meta"]["threshold"] == across[1]["score"]
    assert similar(kb, "one/a.md", threshold=1)["similar"] == [] and len(similar(kb, across[0]["docid"], limit=1)["similar"]) == 1
    for ref in ("one/nosuch.md", "one/e.md"):
        with pytest.raises(gno.GnoError) as e:
            similar(kb, ref)
        assert e.value.code == "NOT_FOUND"
