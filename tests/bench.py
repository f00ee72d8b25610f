"""How fast gno is, as ratios to the least that the same work can cost on this machine, measured in the same run.

    python tests/bench.py [--notes 10000] [--only row,...] [--corpus DIR] [--json FILE]

Machines differ and are noisy, so nothing here is judged by wall time. `ours` is what gno takes and `baseline` the bare
minimum: raw FTS5 behind a loop that reads and writes JSON lines, a directory walk, one run of the model, its matrix
products alone. Both are medians of runs that alternate. `ratio` is ours / baseline, or, where the bound says >=, ours as
a share of the baseline's rate. A row that misses its bound is `OVER` and makes the exit code 1; rows without a bound are
for information. The bounds are meant for 10,000 notes, where fixed costs no longer show. Other work on the machine blurs
the small rows most: run it again before believing a bad one.

Without --corpus the notes are made here, the same every time: Markdown of about 4.6 kB with headings, paragraphs of a
Zipf-like vocabulary, lists, code, links, and front matter on every fourth. With --corpus the .md files of a folder are
copied. Everything lies in a temporary folder that is removed at the end.
"""
import argparse
import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, count, islice
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
GNO = "import sys, gno; sys.exit(gno.main())"      # so that its bytecode is cached, as in an installed gno
FLOOR = "import floor; floor.main()"
FLOOR_SOURCE = r'''
import json, sqlite3, sys

def search(db, query):
    match = " ".join(f'"{p}"' if i % 2 else " ".join(f'"{w}"' for w in p.split()) for i, p in enumerate(query.split('"')))
    hits = []
    for doc, rank in db.execute("SELECT rowid, rank FROM f WHERE f MATCH ? ORDER BY rank LIMIT 5", [match]).fetchall():
        path, text = db.execute("SELECT d.path, highlight(f, 1, '\x01', '\x02') FROM f JOIN d ON d.id = f.rowid "
                                "WHERE f MATCH ? AND f.rowid = ?", [match, doc]).fetchone()
        at = max(0, text.find("\x01") - 100)
        hits.append({"uri": path, "score": -rank, "snippet": text[at:at + 400]})
    return hits

def get(db, path):
    (body,) = db.execute("SELECT body FROM t WHERE path = ?", [path]).fetchone()
    return "\n".join(body.split("\n")[9:49])

def main():
    db = sqlite3.connect(sys.argv[1])
    db.execute("PRAGMA schema_version").fetchone()
    for line in sys.stdin.buffer:
        message = json.loads(line)
        if message["method"] == "initialize":
            result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": {"name": "floor", "version": "0"}}
        else:
            wanted = message["params"]["arguments"]
            found = search(db, wanted["query"]) if "query" in wanted else get(db, wanted["ref"])
            result = {"content": [{"type": "text", "text": found if isinstance(found, str) else f"{len(found)} results"}],
                      "structuredContent": {"results": found}}
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}) + "\n")
        sys.stdout.flush()
'''


# ---- the notes --------------------------------------------------------------------------------

COMMON = """the of and to in a is that for it as with be on are this by not or from at an which can has when if will one all we use file
data note time page more line into other than then there each only work system value state name open set read list key result new first
path test order server index change day meeting project plan"""


def make_notes(folder: Path, notes: int):
    "Write notes in folders of fifty; the words are common English ones and invented ones, the n-th as likely as 1 / (n + 3)."
    rng, words = random.Random(20260101), dict.fromkeys(COMMON.split())
    while len(words) < 6000:
        syllables = (rng.choice("bcdfghklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(1, 4)))
        words["".join(syllables) + rng.choice(["", "n", "r", "s"])] = None
    known, weights = list(words), list(accumulate(1 / (n + 3) for n in range(len(words))))
    stream = (word for _ in count() for word in rng.choices(known, cum_weights=weights, k=5000))

    def sentence(least, most):
        return " ".join(islice(stream, rng.randint(least, most))).capitalize()
    for n in range(notes):
        head = f"---\ntitle: Note {n}\ntags: [{next(stream)}, {next(stream)}]\ndate: 2025-{n % 12 + 1:02}-{n % 28 + 1:02}\n---\n"
        out = [head if n % 4 == 0 else "", f"# {sentence(2, 4)} {n}\n"]
        while sum(map(len, out)) < 4300:
            out.append(f"## {sentence(2, 5)}\n")
            out += [" ".join(sentence(6, 18) + "." for _ in range(rng.randint(3, 6))) + "\n" for _ in range(rng.randint(1, 3))]
            out.append(rng.choice([
                "", "".join(f"- {sentence(3, 9)}\n" for _ in range(rng.randint(2, 5))),
                "```python\n" + "".join(f"{next(stream)}_{next(stream)} = {next(stream)}({n})\n" for _ in range(4)) + "```\n",
                f"See [[{next(stream)}]] and [{next(stream)}](note-{rng.randrange(notes):05}.md#part).\n"]))
        path = folder / f"part-{n // 50:03}" / f"note-{n:05}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(out), encoding="utf-8")


def copy_notes(source: Path, folder: Path, notes: int):
    "Copy at most so many of the .md files of a folder, evenly chosen."
    files = sorted(source.rglob("*.md"))
    for n in range(min(notes, len(files))):
        path = files[n * len(files) // min(notes, len(files))]
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def make_queries(files: list[Path], number: int) -> list[str]:
    "Searches of one to three words or a phrase, each taken from one line of some note."
    rng, out = random.Random(7), []
    while len(out) < number:
        words = re.findall(r"[a-z]{3,}", rng.choice(rng.choice(files).read_text("utf-8", "replace").split("\n")).lower())
        if len(words) >= 4:
            kind, at = len(out) % 4, rng.randrange(len(words) - 2)
            out.append(f'"{words[at]} {words[at + 1]}"' if kind == 3 else " ".join(rng.sample(words, kind + 1)))
    return out


# ---- measuring --------------------------------------------------------------------------------

def timed(action, *arguments) -> float:
    "Seconds that a call takes."
    start = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - start


def versus(ours, baseline, runs: int) -> tuple[float, float]:
    "Median seconds of two actions that alternate."
    pairs = [(timed(baseline), timed(ours)) for _ in range(runs)]
    return median(own for _, own in pairs), median(base for base, _ in pairs)


def walk(folder) -> int:
    "A bare walk: scandir and stat of every entry."
    return sum(walk(e.path) if e.is_dir() else bool(e.stat().st_mtime_ns) for e in os.scandir(folder))


class Loop:
    "A server over pipes, spoken to in JSON lines; `start_s` is how long it took to answer `initialize`."

    def __init__(self, bench: "Bench", code: str, *arguments: str):
        begun, self.ids = time.perf_counter(), 0
        self.proc = subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                     stderr=subprocess.DEVNULL, env=bench.env, cwd=bench.base)
        self.request("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}})
        self.start_s = time.perf_counter() - begun

    def request(self, method: str, params: dict):
        self.ids += 1
        self.proc.stdin.write(json.dumps({"jsonrpc": "2.0", "id": self.ids, "method": method, "params": params}).encode() + b"\n")
        self.proc.stdin.flush()
        while (reply := json.loads(self.proc.stdout.readline())).get("id") != self.ids:
            pass
        if "error" in reply or reply["result"].get("isError"):
            raise SystemExit(f"{params}: {reply}")

    def call(self, name: str, **arguments) -> float:
        "Seconds of one tool call."
        return timed(self.request, "tools/call", {"name": name, "arguments": arguments})

    def resident_mb(self) -> float:
        return int(subprocess.run(["ps", "-o", "rss=", "-p", str(self.proc.pid)], capture_output=True, check=True).stdout) / 1024

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.proc.stdin.close()
        try:
            self.proc.wait(10)
        finally:
            self.proc.kill()
            self.proc.wait()


class Bench:
    "Notes, their index and the floor's, all below one temporary folder; `rows` is the outcome."

    def __init__(self, base: Path, options):
        self.base, self.rows, self.cold_s = base, [], 0.0
        self.dirs = {kind: str(base / kind) for kind in ("config", "data", "cache")}
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("GNO_", "PYTHON"))} | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{base}", "PYTHONPYCACHEPREFIX": str(base / "pycache"), "HOME": str(base)} | {
            f"GNO_{kind.upper()}_DIR": folder for kind, folder in self.dirs.items()}
        (base / "config").mkdir()
        (base / "floor.py").write_text(FLOOR_SOURCE)
        self.notes, self.some = base / "notes", base / "some"
        for folder, number in ((self.notes, options.notes), (self.some, min(1000, options.notes))):
            if options.corpus:
                copy_notes(options.corpus, folder, number)
            else:
                make_notes(folder, number)
        self.files = sorted(self.notes.rglob("*.md"))
        self.text_bytes = sum(p.stat().st_size for p in self.files)
        sys.pycache_prefix = str(base / "pycache")
        sys.path.insert(0, str(ROOT))
        import gno
        self.gno, self.kb = gno, None

    def row(self, name: str, ours: str, baseline="", ratio=None, bound="", good=None):
        "Add a row and show it; `bound` is such as `<= 2x`, `>= 15%`, `<= 60 MB`."
        if bound:
            sign, limit, unit = re.fullmatch(r"(<=|>=) ([\d.]+)(.*)", bound).groups()
            value = ratio * 100 if unit == "%" else ratio
            good = value >= float(limit) if sign == ">=" else value <= float(limit)
            ratio = f"{value:.{2 if unit == 'x' else 0}f}{unit}"
        self.rows.append({"row": name.strip(), "ours": ours, "baseline": baseline, "ratio": ratio, "bound": bound, "ok": good})
        verdict = "" if good is None else "ok" if good else "OVER"
        print(f"{name:<22} {ours:>14} {baseline:>16} {ratio or '':>8} {bound:>9}  {verdict}", flush=True)

    def new_kb(self, index: str, folder: Path):
        "A knowledge base of one folder, not indexed yet."
        config = self.base / "config" / ("index.yml" if index == "default" else f"{index}.yml")
        config.write_text(f'version: "1.0"\ncollections:\n- name: notes\n  path: {json.dumps(str(folder))}\n')
        return self.gno.KB(index, config_path=str(config), dirs=self.dirs, writable=True)

    def run(self, kb, name: str) -> dict:
        return self.gno.call(kb, name, {}, inline=self.gno.Progress())

    def sync(self, kb) -> dict:
        return self.run(kb, "sync")["collections"][0]

    def raw_index(self, folder: Path, name: str):
        "The floor's index: read every file, FTS5 with the same tokenizer, one transaction."
        db = self.fresh_db(name, "BEGIN; CREATE TABLE d(id INTEGER PRIMARY KEY, path TEXT);"
                           "CREATE VIRTUAL TABLE f USING fts5(title, body, tokenize='porter unicode61 remove_diacritics 2')")
        paths = (os.path.join(where, file) for where, _, files in os.walk(folder) for file in files)
        for n, path in enumerate(paths):
            with open(path, "rb") as f:
                body = f.read().decode("utf-8", "replace")
            db.execute("INSERT INTO d VALUES (?, ?)", [n, os.path.relpath(path, folder)])
            db.execute("INSERT INTO f(rowid, title, body) VALUES (?, ?, ?)", [n, os.path.basename(path)[:-3], body])
        db.execute("COMMIT")
        db.close()

    def fresh_db(self, name: str, schema: str) -> sqlite3.Connection:
        for suffix in ("", "-wal", "-shm"):
            (self.base / f"{name}{suffix}").unlink(missing_ok=True)
        db = sqlite3.connect(self.base / name, isolation_level=None)
        db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;" + schema)
        return db

    def indexed(self):
        "The large index, made once."
        if self.kb is None:
            self.kb = self.new_kb("default", self.notes)
            self.cold_s = self.cold_s or timed(self.sync, self.kb)
            self.sync(self.kb)
        return self.kb

    def embedded(self):
        "The large index with a random vector for each chunk."
        import numpy as np
        kb, rng = self.indexed(), np.random.default_rng(1)
        card, db = self.gno.find_card(kb, "embed", ""), kb.wdb
        if not self.gno.embedded(db, card):
            with self.gno.transaction(db):
                model = self.gno.fingerprint_id(db, card, card.data["dims"])
                chunks = [row[0] for row in db.execute("SELECT DISTINCT input_hash FROM chunks")]
                vectors = ((model, chunk, *self.gno.quantise(np, rng.standard_normal(card.data["dims"], np.float32))) for chunk in chunks)
                db.executemany("INSERT INTO vectors VALUES (?, ?, ?, ?)", vectors)
        return kb


# ---- the rows ---------------------------------------------------------------------------------

def cold(b: Bench, folder: Path, runs: int):
    "Keyword index of a folder never seen, against FTS5 in one transaction; its size on disk against the text."
    files, made = list(folder.rglob("*.md")), []

    def ours():
        made.append(b.new_kb(f"cold{len(made)}", folder))
        assert b.sync(made[-1])["filesAdded"] == len(files)
    own, base = versus(ours, lambda: b.raw_index(folder, "cold.db"), runs)
    for kb in made:
        kb.close()
    b.row(f"cold {len(files):,} notes", f"{len(files) / own:,.0f} /s", f"{len(files) / base:,.0f} /s", base / own, ">= 15%")
    if folder == b.notes:
        b.cold_s, size = own, os.path.getsize(made[0].db_path)
        b.row("size on disk", f"{size / 1e6:.1f} MB", f"{b.text_bytes / 1e6:.1f} MB", size / b.text_bytes, "<= 2.5x")
    for kb in made:
        for suffix in ("", "-wal", "-shm"):
            Path(kb.db_path + suffix).unlink(missing_ok=True)


def unchanged(b: Bench):
    "A sync that finds nothing new, against the walk."
    kb = b.indexed()
    assert b.sync(kb)["filesUnchanged"] == len(b.files)
    own, base = versus(lambda: b.sync(kb), lambda: walk(b.notes), 9)
    b.row("nothing changed", f"{own * 1e3:.1f} ms", f"{base * 1e3:.1f} ms", own / base, "<= 4x")
    command = [sys.executable, "-c", GNO, "index", "--no-embed", "--quiet"]
    whole = median(timed(lambda: subprocess.run(command, env=b.env, cwd=b.base, check=True, stdout=subprocess.DEVNULL)) for _ in range(3))
    b.row("  the whole command", f"{whole * 1e3:.0f} ms")


def changed(b: Bench):
    "Every hundredth note edited, against its share of the cold index and the walk."
    kb, some, own = b.indexed(), b.files[::100], []
    for _ in range(5):
        for path in some:
            path.write_bytes(path.read_bytes() + b"\nOne more line.\n")
        own.append(timed(b.sync, kb))
    base = b.cold_s * len(some) / len(b.files) + median(timed(walk, b.notes) for _ in range(9))
    b.row("1 % changed", f"{median(own) * 1e3:.0f} ms", f"{base * 1e3:.0f} ms", median(own) / base, "<= 2x")


def start(b: Bench):
    "From spawning the server to its answer to `initialize`, against the bare loop on the same file."
    kb, own, base = b.indexed(), [], []
    for _ in range(16):                     # the first ones compile
        with Loop(b, FLOOR, kb.db_path) as floor, Loop(b, GNO, "mcp") as server:
            base.append(floor.start_s)
            own.append(server.start_s)
    own_s, base_s = median(own[1:]), median(base[1:])
    b.row("start", f"{own_s * 1e3:.1f} ms", f"{base_s * 1e3:.1f} ms", own_s / base_s, "<= 3x")


def calls(b: Bench):
    "gno_search and gno_get over stdio, against the bare loop on raw FTS5 and on a table of texts."
    b.indexed()
    b.raw_index(b.notes, "raw.db")
    paths = [str(p.relative_to(b.notes)) for p in b.files]
    db = b.fresh_db("texts.db", "CREATE TABLE t(path TEXT PRIMARY KEY, body TEXT); BEGIN")
    db.executemany("INSERT INTO t VALUES (?, ?)", ((path, (b.notes / path).read_text("utf-8", "replace")) for path in paths))
    db.execute("COMMIT")
    db.close()
    asked, read = make_queries(b.files, 200), random.Random(3).choices(paths, k=200)
    with Loop(b, GNO, "mcp") as gno, Loop(b, FLOOR, str(b.base / "raw.db")) as raw, Loop(b, FLOOR, str(b.base / "texts.db")) as texts:
        for _ in range(2):                  # the first round warms up
            searches = [(gno.call("gno_search", query=q), raw.call("search", query=q)) for q in asked]
            gets = [(gno.call("gno_get", ref=f"notes/{p}", fromLine=10, lineCount=40), texts.call("get", ref=p)) for p in read]
    for name, times, part, bound in (("search p50", searches, 0.5, "<= 2x"), ("search p95", searches, 0.95, "<= 2x"),
                                     ("get 40 lines", gets, 0.5, "<= 3x")):
        own, base = (sorted(t)[int(len(t) * part)] for t in zip(*times, strict=True))
        b.row(name, f"{own * 1e3:.2f} ms", f"{base * 1e3:.2f} ms", own / base, bound)


def embed_query(b: Bench):
    "A query of ten words as a vector, against one run of the model on the same tokens."
    model, words, times = b.gno.load_embedder(b.indexed(), b.gno.find_card(b.indexed(), "embed", "")), " ".join(make_queries(b.files, 1500)).replace('"', "").split(), []
    for n in range(0, 2000, 10):
        text = " ".join(words[n:n + 10])
        times.append((timed(model.embed, text, "query"), timed(model.run, model.pieces(text))))
    own, base = (median(t) for t in zip(*times[20:], strict=True))
    b.row("embed query", f"{own * 1e3:.2f} ms", f"{base * 1e3:.2f} ms", own / base, "<= 1.2x")


def rerank(b: Bench):
    "The reranker on 20 candidates of a chunk's length, against embedding the same texts on as many threads."
    kb = b.indexed()
    model, times, cores = b.gno.load_embedder(kb, b.gno.find_card(kb, "embed", "")), [], os.cpu_count()
    texts = [row[0] for row in kb.db.execute("SELECT substr(m.body, 1 + c.start, c.end - c.start) FROM chunks c JOIN mirrors m ON m.id = c.mirror_id "
                                             "WHERE c.end - c.start > 300 LIMIT 400")]
    with ThreadPoolExecutor(cores) as pool:
        for n, query in enumerate(make_queries(b.files, len(texts) // 20)):
            some = texts[20 * n:20 * n + 20]
            times.append((timed(b.gno.late_interaction, kb, query, None, some), timed(lambda some: list(pool.map(model.embed, some)), some)))
    own, base = (median(t) for t in zip(*times[2:], strict=True))
    b.row("rerank 20", f"{own * 1e3:.0f} ms", f"{base * 1e3:.0f} ms", own / base, "<= 1.2x")


def scan(b: Bench):
    """The vector scan of a warm server and its choice of the 400 best, against one float32 product of the same shape on one
    thread; the same with the exact scores of these 400, whose vectors are read from the store; recall of the ten best."""
    import numpy as np
    try:
        from threadpoolctl import threadpool_limits
        threadpool_limits(1)
    except ImportError:
        pass                                # a matrix times a vector keeps to one thread mostly
    kb, gno, rng = b.indexed(), b.gno, np.random.default_rng(2)
    card = gno.find_card(kb, "embed", "")
    seeds = rng.normal(size=(2000, card.data["dims"])).astype(np.float32)
    seeds /= np.linalg.norm(seeds, axis=1, keepdims=True)
    queries = [seeds[n] + rng.normal(0, 0.03, seeds.shape[1]).astype(np.float32) for n in range(40)]
    fp, bounds = gno.fingerprint_id(kb.wdb, card, card.data["dims"]), gno.where_sql(kb, gno.Where())
    for number, bound in ((100_000, "<= 1x"), (1_000_000, "<= 0.7x")):
        vectors = np.empty((number, seeds.shape[1]), np.float32)
        for at in range(0, number, 10_000):     # topics mixed in pairs, and noise
            one, two = rng.integers(0, len(seeds), (2, 10_000))
            part = seeds[one] + rng.random((10_000, 1), np.float32) * seeds[two] + rng.normal(0, 0.02, (10_000, seeds.shape[1])).astype(np.float32)
            vectors[at:at + 10_000] = part / np.linalg.norm(part, axis=1, keepdims=True)
        rows = ((n, 0, 1, scale, n.to_bytes(32), row) for n, (scale, row) in enumerate(gno.quantise(np, v) for v in vectors))
        with gno.transaction(kb.wdb):
            kb.wdb.execute("DELETE FROM vectors")
            kb.wdb.executemany("INSERT INTO vectors VALUES (?, ?, ?, ?)", ((fp, key, scale, row) for *_, scale, key, row in rows))
        stored = kb.db.execute("SELECT input_hash, scale, embedding FROM vectors ORDER BY input_hash")
        matrix = gno.Matrix(kb, ((int.from_bytes(key), 0, 1, scale, key, row) for key, scale, row in stored), kb.get_meta("generation"))
        matrix.masks[bounds.sql, *bounds.values] = np.ones(number, bool)
        kb.models["matrix", fp] = matrix

        def ours(query):
            rows = gno.propose_matrix(np, kb, query, fp, bounds)(400)
            return sorted(zip(gno.exact_scores(np, query, [r[3] for r in rows]), (r[0] for r in rows), strict=True), reverse=True)[:10]
        def scores(query):
            found = matrix.scores(query)
            return np.argpartition(found, len(found) - 400)[len(found) - 400:]
        times = [(timed(scores, q), timed(ours, q), timed(lambda q: vectors @ q, q)) for q in queries]
        own, exact, base = (median(t) for t in zip(*times[5:], strict=True))
        hits = [len({doc for _, doc in ours(q)} & set(np.argpartition(vectors @ -q, 10)[:10].tolist())) / 10 for q in queries]
        b.row(f"scan {number:,}", f"{own * 1e3:.2f} ms", f"{base * 1e3:.2f} ms", own / base, bound)
        b.row("  with exact scores", f"{exact * 1e3:.2f} ms")
        b.row("  recall@10", f"{sum(hits) / len(hits):.3f}", "", round(sum(hits) / len(hits), 6), ">= 0.99")
    kb.models.clear()
    with gno.transaction(kb.wdb):
        kb.wdb.execute("DELETE FROM vectors")


def query(b: Bench):
    "gno_query without rerank in a server, against its parts: query embedding, vector scan, keyword ranking."
    kb, gno, times = b.embedded(), b.gno, []
    kb.mode, model, bounds = "stdio", gno.load_embedder(kb, gno.find_card(kb, "embed", "")), gno.where_sql(kb, gno.Where())

    def parts(text):
        gno.knn(kb, model.card, model.embed(text, "query"), bounds, 100)
        gno.bm25(kb, gno.match_any(gno.parse_query(text)), bounds, 100)
    for text in make_queries(b.files, 120):
        times.append((timed(gno.call, kb, "query", {"query": text, "rerank": False}), timed(parts, text)))
    own, base = (median(t) for t in zip(*times[20:], strict=True))
    b.row("query, no rerank", f"{own * 1e3:.1f} ms", f"{base * 1e3:.1f} ms", own / base, "<= 1.3x")
    kb.mode = "direct-cli"


def integer_products(shapes: list[tuple[int, int]], rows: int):
    "A function that runs bare MatMulInteger products, uint8 [rows, n] by int8 [n, m], on one thread. The ONNX protobuf is written by hand."
    import numpy as np
    import onnxruntime
    options, graph, feed = onnxruntime.SessionOptions(), b"", {}
    options.intra_op_num_threads = options.inter_op_num_threads = 1

    def varint(n):
        return bytes([n & 0x7F | 0x80]) + varint(n >> 7) if n > 0x7F else bytes([n])

    def field(number, value):
        value = value.encode() if isinstance(value, str) else value
        return varint(number << 3) + varint(value) if isinstance(value, int) else varint(number << 3 | 2) + varint(len(value)) + value

    def tensor(name, kind, *dims):
        return field(1, name) + field(2, field(1, field(1, kind) + field(2, b"".join(field(1, field(1, d)) for d in dims))))
    for i, (n, m) in enumerate(shapes):
        rng = np.random.default_rng(i)
        graph += field(1, field(1, f"a{i}") + field(1, f"w{i}") + field(2, f"y{i}") + field(4, "MatMulInteger"))
        weights = rng.integers(-63, 64, (n, m), np.int8).tobytes()
        graph += field(5, field(1, n) + field(1, m) + field(2, 3) + field(8, f"w{i}") + field(9, weights))
        graph += field(11, tensor(f"a{i}", 2, rows, n)) + field(12, tensor(f"y{i}", 6, rows, m))
        feed[f"a{i}"] = rng.integers(0, 256, (rows, n), np.uint8)
    model = field(1, 9) + field(8, field(2, 20)) + field(7, field(2, "products") + graph)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda _: session.run(None, feed)


def embed_chunks(b: Bench):
    """gno_embed on chunks of 256 tokens: the model's products (21.2 MFLOP a token and 9,216 a token pair) a second, against the
    rate of nothing but its own integer products with a thread on every core: the most they can give."""
    rng, notes, folder = random.Random(5), 120, b.base / "letters"
    folder.mkdir()
    for n in range(notes):                  # a single letter is a token, so each note is one chunk of 254 and the two marks
        (folder / f"{n}.md").write_text(" ".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=254)))
    kb, shapes, runs = b.new_kb("letters", folder), [(384, 1152), (384, 384), (384, 1536), (1536, 384)], 120
    b.sync(kb)
    b.gno.load_embedder(kb, b.gno.find_card(kb, "embed", ""))
    products = integer_products(shapes, 256)

    def ours():
        kb.wdb.execute("DELETE FROM vectors")
        assert b.run(kb, "embed")["embedded"] == notes

    def baseline():
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(products, range(runs)))
    own, base = versus(ours, baseline, 3)
    kb.close()
    own_rate, rate = 256 * (21.2e6 + 9216 * 256) * notes / own, 256 * 2 * sum(n * m for n, m in shapes) * runs / base
    b.row("embed 256 tokens", f"{own_rate / 1e9:,.0f} Gop/s", f"{rate / 1e9:,.0f} Gop/s", own_rate / rate, ">= 35%")
    b.row("  chunks a second", f"{notes / own:.0f}")


def graph_tools(b: Bench):
    "The graph tools on 5,000 notes with six links each, one in ten to nothing and 3,000 to a hub, against reading all link rows once."
    rng, count, folder = random.Random(11), 5000, b.base / "linked"
    folder.mkdir()
    (folder / "hub.md").write_text("# Hub\n")
    for n in range(count):
        near = [min(max(n + rng.randint(-20, 20), 0), count - 1) for _ in range(3)] + rng.choices(range(count), k=2)
        targets = [f"[[n{m}]]" if rng.random() < 0.7 else f"[x](n{m}.md)" for m in near] + ["[[hub]]" if n < 3000 else f"[[n{n // 2}|up]]"]
        targets[:n % 5 < 3] = [f"[[missing {n}]]"] * (n % 5 < 3)
        (folder / f"n{n}.md").write_text(f"# Note {n}\n\n" + "\n".join(targets) + "\n")
    kb = b.new_kb("linked", folder)
    b.sync(kb)
    kb.refresh()
    assert kb.db.execute("SELECT count(*), sum(target IS NULL) FROM edges").fetchone() == (30000, 3000)
    far = {"from": "notes/n5.md", "to": f"notes/n{count - 5}.md", "maxDepth": 12}
    for name, arguments in {"links": {"ref": "notes/n10.md"}, "backlinks": {"ref": "notes/hub.md"}, "graph": {}, "graph_query": {"ref": "notes/hub.md"},
                            "graph_neighbors": {"ref": "notes/hub.md"}, "graph_path": far}.items():
        own, base = versus(lambda: b.gno.call(kb, name, arguments), lambda: kb.db.execute("SELECT * FROM links").fetchall(), 9)
        b.row(name, f"{own * 1e3:.1f} ms", f"{base * 1e3:.1f} ms", own / base, "<= 10x")
    kb.close()


def memory(b: Bench):
    "Resident memory of a server before and after it used the model; the vectors are random, one a chunk."
    b.embedded()
    asked, chunks = make_queries(b.files, 50), b.kb.db.execute("SELECT count(*) FROM vectors").fetchone()[0]
    with Loop(b, GNO, "mcp") as server:
        for tool, name, size, bound in (("gno_search", "without", f"{len(b.files):,} notes", "<= 60 MB"),
                                        ("gno_vsearch", "with", f"{chunks:,} vectors", "<= 220 MB")):
            for query in asked:
                server.call(tool, query=query)
            used = server.resident_mb()
            b.row(f"memory {name} model", f"{used:.0f} MB", size, used, bound)


ROWS = {"cold-1k": lambda b: cold(b, b.some, 5), "cold": lambda b: cold(b, b.notes, 3), "unchanged": unchanged, "changed": changed,
        "start": start, "calls": calls, "embed-query": embed_query, "embed-chunks": embed_chunks, "rerank": rerank, "scan": scan,
        "query": query, "graph": graph_tools, "memory": memory}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notes", type=int, default=10000)
    parser.add_argument("--only", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--corpus", type=Path, help="a folder of .md files to copy instead of notes made here")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    if set(options.only.split(",")) - set(ROWS):
        parser.error(f"--only takes {', '.join(ROWS)}")
    with tempfile.TemporaryDirectory(prefix="gno-bench-", ignore_cleanup_errors=True) as base:
        b = Bench(Path(base), options)
        print(f"{len(b.files):,} notes, {b.text_bytes / 1e6:.1f} MB\n{'row':<22} {'ours':>14} {'baseline':>16} {'ratio':>8} {'bound':>9}")
        for name in options.only.split(","):
            ROWS[name](b)
        if b.kb:
            b.kb.close()
    if options.json:
        options.json.write_text(json.dumps(b.rows, indent=1) + "\n")
    sys.exit(any(row["ok"] is False for row in b.rows))


if __name__ == "__main__":
    main()
