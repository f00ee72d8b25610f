"""How fast gno is, as ratios to the least the same work can cost on this machine, measured in the same run.

    python tests/bench.py [--notes 10000] [--only row,...] [--corpus DIR] [--json FILE]

Machines differ and are noisy, so no row is a wall time: `ours` is what gno takes, `baseline` the bare minimum (raw FTS5
behind a bare JSON loop, a bare directory walk, one run of the model, the bare matrix products), both medians of runs
that alternate; `ratio` is ours / baseline, or the share of the baseline's rate where the bound is written >=. A row is
`over` when its ratio misses the bound, and then the exit code is 1. Rows without a bound are for information.

Without --corpus the notes are made here, the same ones every time: Markdown of about 4.6 kB with headings, paragraphs
of a Zipf-like vocabulary, lists, code, links, and front matter on every fourth. With --corpus the .md files of a folder
are copied. Everything lies in a temporary folder that is removed at the end.
"""
import argparse
import itertools
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
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = "import sys, gno; sys.exit(gno.main())"
HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}
TOKENIZE = "porter unicode61 remove_diacritics 2"

# The floor under any server on SQLite: raw FTS5 behind a loop that reads and writes JSON lines, and nothing else.
FLOOR = r'''
import json, sqlite3, sys

def search(db, query):
    parts = query.split('"')
    match = " ".join(f'"{p}"' if i % 2 else " ".join(f'"{w}"' for w in p.split()) for i, p in enumerate(parts))
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
        if "id" not in message:
            continue
        if message["method"] == "initialize":
            result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": {"name": "floor", "version": "0"}}
        else:
            arguments = message["params"]["arguments"]
            found = search(db, arguments["query"]) if "query" in arguments else get(db, arguments["ref"])
            result = {"content": [{"type": "text", "text": found if isinstance(found, str) else f"{len(found)} results"}],
                      "structuredContent": {"results": found}}
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}) + "\n")
        sys.stdout.flush()
'''


# ---- the notes --------------------------------------------------------------------------------

COMMON = """the of and to in a is that for it as with be on are this by not or from at an which can has when if will one all we use
file data note time page more line into other than then there each only work system value state name open set read list key result
new first path test order server index change day meeting project plan""".split()


def vocabulary(rng: random.Random, size: int) -> tuple[list[str], list[float]]:
    "Words, commonest first, and their cumulative Zipf weights: some English ones, the rest invented."
    words = dict.fromkeys(COMMON)
    while len(words) < size:
        words["".join(rng.choice("bcdfghklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(1, 4))) + rng.choice(["", "n", "r", "s"])] = None
    return list(words), list(itertools.accumulate(1 / (rank + 3) for rank in range(size)))


def make_notes(folder: Path, count: int):
    "Write `count` notes, spread over folders of fifty."
    rng = random.Random(20260101)
    words, weights = vocabulary(rng, 6000)
    stock = (word for _ in itertools.count() for word in rng.choices(words, cum_weights=weights, k=5000))

    def sentence(least=6, most=18):
        return " ".join(itertools.islice(stock, rng.randint(least, most))).capitalize() + "."
    for n in range(count):
        title = f"{' '.join(itertools.islice(stock, 3)).title()} {n}"
        out = [f"---\ntitle: {title}\ntags: [{next(stock)}, {next(stock)}]\ndate: 2025-{n % 12 + 1:02}-{n % 28 + 1:02}\n---\n"] if n % 4 == 0 else []
        out.append(f"# {title}\n")
        while sum(map(len, out)) < 4300:
            out.append(f"## {sentence(2, 5)[:-1]}\n")
            for _ in range(rng.randint(1, 3)):
                out.append(" ".join(sentence() for _ in range(rng.randint(3, 6))) + "\n")
            kind = rng.randrange(4)
            if kind == 0:
                out.append("".join(f"- {sentence(3, 9)}\n" for _ in range(rng.randint(2, 5))))
            elif kind == 1:
                out.append("```python\n" + "".join(f"{next(stock)}_{next(stock)} = {next(stock)}({rng.randint(0, 99)})\n" for _ in range(4)) + "```\n")
            elif kind == 2:
                out.append(f"See [[{next(stock)}]] and [{next(stock)}](note-{rng.randrange(count):05}.md#part).\n")
        path = folder / f"part-{n // 50:03}" / f"note-{n:05}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(out), encoding="utf-8")


def copy_notes(source: Path, folder: Path, count: int):
    "Copy at most `count` of the .md files of a folder, evenly chosen."
    files = sorted(source.rglob("*.md"))
    step = max(1.0, len(files) / count)
    for i in range(min(count, len(files))):
        path = files[int(i * step)]
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def queries(folder: Path, count: int) -> list[str]:
    "Searches of one to three words or a phrase, each taken from one line of some note."
    rng, files, out = random.Random(7), sorted(folder.rglob("*.md")), []
    while len(out) < count:
        lines = rng.choice(files).read_text("utf-8", "replace").split("\n")
        words = re.findall(r"[a-z]{3,}", rng.choice(lines).lower())
        if len(words) >= 4:
            at, n = rng.randrange(len(words) - 2), len(out) % 4
            out.append(f'"{words[at]} {words[at + 1]}"' if n == 3 else " ".join(rng.sample(words, n + 1)))
    return out


# ---- measuring --------------------------------------------------------------------------------

def timed(action) -> float:
    "Seconds that action() takes."
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def versus(ours, baseline, runs: int) -> tuple[float, float]:
    "Medians of the seconds of two actions that alternate."
    pairs = [(timed(baseline), timed(ours)) for _ in range(runs)]
    return median(b for _, b in pairs), median(a for a, _ in pairs)


class Loop:
    "A server over pipes, spoken to in JSON lines."

    def __init__(self, bench, code: str, *arguments: str):
        self.proc, self.ids = subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                               stderr=subprocess.DEVNULL, env=bench.env, cwd=bench.base), 0
        self.request("initialize", HELLO)

    def request(self, method: str, params: dict) -> dict:
        self.ids += 1
        self.proc.stdin.write(json.dumps({"jsonrpc": "2.0", "id": self.ids, "method": method, "params": params}).encode() + b"\n")
        self.proc.stdin.flush()
        while (reply := json.loads(self.proc.stdout.readline())).get("id") != self.ids:
            pass
        if "error" in reply or reply["result"].get("isError"):
            raise SystemExit(f"{params}: {reply}")
        return reply["result"]

    def call(self, name: str, **arguments) -> float:
        "Seconds of one tool call."
        return timed(lambda: self.request("tools/call", {"name": name, "arguments": arguments}))

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
    "The corpus, its index and the floor's, in one temporary folder; `rows` is the outcome."

    def __init__(self, base: Path, options):
        self.base, self.options, self.rows = base, options, []
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("GNO_", "PYTHON"))} | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{base}", "PYTHONPYCACHEPREFIX": str(base / "pycache"), "HOME": str(base)} | {
            f"GNO_{kind.upper()}_DIR": str(base / kind) for kind in ("config", "data", "cache")}
        (base / "floor.py").write_text(FLOOR)
        self.large, self.small = base / "notes", base / "some"
        for folder, count in ((self.large, options.notes), (self.small, min(1000, options.notes))):
            copy_notes(options.corpus, folder, count) if options.corpus else make_notes(folder, count)
        self.files = sorted(self.large.rglob("*.md"))
        self.text_bytes = sum(p.stat().st_size for p in self.files)
        sys.pycache_prefix = str(base / "pycache")
        sys.path.insert(0, str(ROOT))
        import gno
        self.gno, self.cold_s = gno, 0.0
        self.kb = self.new_kb("large", self.large)

    def row(self, name, ours, baseline, ratio=None, bound=None, least=False):
        "Add a row and show it."
        good = None if bound is None else ratio >= bound if least else ratio <= bound
        limit = "" if bound is None else f">= {bound:.0%}" if least else f"<= {bound:g}x" if not name.startswith("memory") else f"<= {bound:g} MB"
        shown = "" if ratio is None else f"{ratio:.0%}" if least else f"{ratio:.2f}x" if not name.startswith("memory") else f"{ratio:.0f} MB"
        self.rows.append({"row": name, "ours": ours, "baseline": baseline, "ratio": ratio, "bound": limit, "ok": good})
        print(f"{name:<22} {ours:>22} {baseline:>24} {shown:>8} {limit:>9}  {'' if good is None else 'ok' if good else 'OVER'}", flush=True)

    def new_kb(self, name: str, folder: Path):
        "A knowledge base of one folder with an empty index."
        dirs = {kind: str(self.base / kind) for kind in ("config", "data", "cache")}
        os.makedirs(dirs["config"], exist_ok=True)
        config = Path(dirs["config"], "index.yml" if name == "large" else f"{name}.yml")
        config.write_text(f'version: "1.0"\ncollections:\n- name: notes\n  path: {json.dumps(str(folder))}\n')
        return self.gno.KB("default" if name == "large" else name, config_path=str(config), dirs=dirs, writable=True)

    def sync(self, kb) -> dict:
        return self.gno.call(kb, "sync", {}, inline=self.gno.Progress())["collections"][0]

    def raw_index(self, folder: Path, name="raw"):
        "The floor's index: read every file, FTS5 with the same tokenizer, one transaction."
        path = self.base / f"{name}.db"
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        db = sqlite3.connect(path, isolation_level=None)
        db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; BEGIN; CREATE TABLE d(id INTEGER PRIMARY KEY, path TEXT);"
                         f"CREATE VIRTUAL TABLE f USING fts5(title, body, tokenize='{TOKENIZE}')")
        n = 0
        for base, folders, names in os.walk(folder):
            folders.sort()
            for file in sorted(names):
                n += 1
                with open(os.path.join(base, file), "rb") as f:
                    body = f.read().decode("utf-8", "replace")
                db.execute("INSERT INTO d VALUES (?, ?)", [n, os.path.relpath(os.path.join(base, file), folder)])
                db.execute("INSERT INTO f(rowid, title, body) VALUES (?, ?, ?)", [n, file[:-3], body])
        db.execute("COMMIT")
        db.close()

    def indexed(self):
        "Make sure that the large index is there."
        if not os.path.exists(self.kb.db_path):
            self.cold_s = timed(lambda: self.sync(self.kb))
        if not (self.base / "raw.db").exists():
            self.raw_index(self.large)

    def walk_s(self, folder) -> int:
        "A bare walk: scandir and stat of every entry."
        return sum(self.walk_s(e.path) if e.is_dir() else bool(e.stat().st_mtime_ns) for e in os.scandir(folder))


# ---- the rows ---------------------------------------------------------------------------------

def cold(b: Bench, name: str, folder: Path, runs: int):
    "Keyword index of an unseen folder."
    count = sum(1 for _ in folder.rglob("*.md"))
    made = []

    def ours():
        kb = b.new_kb(f"cold{len(made)}", folder)
        made.append(kb)
        assert b.sync(kb)["filesAdded"] == count
    own, base = versus(ours, lambda: b.raw_index(folder, "cold"), runs)
    for kb in made:
        kb.close()
        for suffix in ("", "-wal", "-shm"):
            Path(kb.db_path + suffix).unlink(missing_ok=True)
    if folder == b.large:
        b.cold_s = own
    b.row(name, f"{count / own:,.0f} notes/s", f"{count / base:,.0f} notes/s", base / own, 0.15, least=True)


def unchanged(b: Bench):
    "A second sync, and what the whole command takes."
    b.indexed()
    assert b.sync(b.kb)["filesUnchanged"] == len(b.files)
    own, base = versus(lambda: b.sync(b.kb), lambda: b.walk_s(b.large), 9)
    b.row("unchanged", f"{own * 1e3:.1f} ms", f"{base * 1e3:.1f} ms", own / base, 4)
    whole = median(timed(lambda: subprocess.run([sys.executable, "-c", LAUNCH, "index", "--no-embed"], env=b.env, cwd=b.base, check=True,
                                                stdout=subprocess.DEVNULL)) for _ in range(3))
    b.row("  the whole command", f"{whole * 1e3:.0f} ms", "")


def changed(b: Bench):
    "Every hundredth note edited, against its share of the cold index and the walk."
    b.indexed()
    if not b.cold_s:
        cold(b, "cold", b.large, 1)
    b.sync(b.kb)
    own, some = [], b.files[::100]
    for n in range(5):
        for path in some:
            path.write_bytes(path.read_bytes() + b"\nOne more line.\n")
        own.append(timed(lambda: b.sync(b.kb)))
    base = b.cold_s * len(some) / len(b.files) + median(timed(lambda: b.walk_s(b.large)) for _ in range(9))
    b.row("changed 1 %", f"{median(own) * 1e3:.0f} ms", f"{base * 1e3:.0f} ms", median(own) / base, 2)


def start(b: Bench):
    "From spawning the server to its answer to `initialize`."
    b.indexed()

    def first_answer(code, *arguments):
        with Loop(b, code, *arguments):
            times.append(time.perf_counter() - begun)
    own, base = [], []
    for _ in range(16):
        for times, code in ((base, ("import floor; floor.main()", b.kb.db_path)), (own, (LAUNCH, "mcp"))):
            begun = time.perf_counter()
            first_answer(*code)
    own, base = median(own[1:]), median(base[1:])
    b.row("start", f"{own * 1e3:.1f} ms", f"{base * 1e3:.1f} ms", own / base, 3)


def calls(b: Bench):
    "gno_search and gno_get over stdio against the floor."
    b.indexed()
    asked = queries(b.large, 200)
    paths = [str(p.relative_to(b.large)) for p in random.Random(3).sample(b.files, min(200, len(b.files)))]
    with sqlite3.connect(b.base / "texts.db") as db:
        db.execute("CREATE TABLE t(path TEXT PRIMARY KEY, body TEXT)")
        db.executemany("INSERT INTO t VALUES (?, ?)", ((str(p.relative_to(b.large)), p.read_text("utf-8", "replace")) for p in b.files))
    db.close()
    with Loop(b, LAUNCH, "mcp") as gno, Loop(b, "import floor; floor.main()", str(b.base / "raw.db")) as floor, \
            Loop(b, "import floor; floor.main()", str(b.base / "texts.db")) as table:
        times = []
        for _ in range(2):                  # the first round warms up
            times = [(gno.call("gno_search", query=q), floor.call("search", query=q)) for q in asked]
        own, base = (sorted(t) for t in zip(*times))
        for name, part in (("p50", 0.5), ("p95", 0.95)):
            a, c = own[int(len(own) * part)], base[int(len(base) * part)]
            b.row(f"search {name}", f"{a * 1e3:.2f} ms", f"{c * 1e3:.2f} ms", a / c, 2)
        for _ in range(2):
            times = [(gno.call("gno_get", ref=f"notes/{p}", fromLine=10, lineCount=40), table.call("get", ref=p)) for p in paths]
        a, c = (median(t) for t in zip(*times))
        b.row("get 40 lines", f"{a * 1e3:.2f} ms", f"{c * 1e3:.2f} ms", a / c, 3)


def embed_query(b: Bench):
    "A query of ten words, against one run of the model on the same tokens."
    model, texts = b.gno.embedder(b.kb), queries(b.large, 400)
    texts = [" ".join(re.findall(r"\w+", " ".join(texts[i:i + 9]))[:10]) for i in range(200)]
    pieces = {t: model.pieces(t) for t in texts}
    times = [(timed(lambda: model.embed(t, "query")), timed(lambda: model.run(pieces[t]))) for t in texts * 2][200:]
    own, base = (median(t) for t in zip(*times))
    b.row("embed query", f"{own * 1e3:.2f} ms", f"{base * 1e3:.2f} ms", own / base, 1.2)


def integer_products(shapes: list[tuple[int, int]], rows: int):
    "A function that runs bare MatMulInteger products, uint8 [rows, n] by int8 [n, m], on one thread; the protobuf is written by hand."
    import numpy as np
    import onnxruntime

    def varint(n):
        return bytes([n & 0x7F | 0x80]) + varint(n >> 7) if n > 0x7F else bytes([n])

    def field(number, value):
        value = value.encode() if isinstance(value, str) else value
        return varint(number << 3) + varint(value) if isinstance(value, int) else varint(number << 3 | 2) + varint(len(value)) + value

    def tensor(name, kind, *dims):
        return field(1, name) + field(2, field(1, field(1, kind) + field(2, b"".join(field(1, field(1, d)) for d in dims))))
    graph, feed = field(2, "products"), {}
    for i, (n, m) in enumerate(shapes):
        weights = np.random.default_rng(i).integers(-63, 64, (n, m), np.int8).tobytes()
        graph += field(1, field(1, f"a{i}") + field(1, f"w{i}") + field(2, f"y{i}") + field(4, "MatMulInteger"))
        graph += field(5, field(1, n) + field(1, m) + field(2, 3) + field(8, f"w{i}") + field(9, weights))
        graph += field(11, tensor(f"a{i}", 2, rows, n)) + field(12, tensor(f"y{i}", 6, rows, m))
        feed[f"a{i}"] = np.random.default_rng(i).integers(0, 256, (rows, n), np.uint8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(field(1, 9) + field(8, field(2, 20)) + field(7, graph), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feed)


def embed_chunks(b: Bench):
    """gno_embed on chunks of 256 tokens: the model's matrix products (21.2 MFLOP a token and 9,216 a token pair) against the
    rate at which onnxruntime, one session a core, does nothing but the model's own integer products."""
    rng, notes, cores = random.Random(5), 200, min(2, os.cpu_count())
    for i in range(notes):                  # single letters are one token each, so a note is one chunk of 254 and the two marks
        (b.base / "letters").mkdir(exist_ok=True)
        (b.base / "letters" / f"{i}.md").write_text(" ".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=254)))
    kb = b.new_kb("letters", b.base / "letters")
    b.sync(kb)
    b.gno.embedder(kb)
    own = timed(lambda: b.gno.call(kb, "embed", {}, inline=b.gno.Progress()))
    assert kb.db.execute("SELECT count(*) FROM vectors").fetchone() == (notes,)
    kb.close()
    shapes, runs = [(384, 1152), (384, 384), (384, 1536), (1536, 384)], 120         # one layer of six
    products = integer_products(shapes, 256)
    with ThreadPoolExecutor(cores) as pool:
        base = median(timed(lambda: list(pool.map(lambda _: products(), range(runs)))) for _ in range(5))
    own_rate, rate = 256 * (21.2e6 + 9216 * 256) * notes / own, runs * 256 * 2 * sum(n * m for n, m in shapes) / base
    b.row("embed 256 tokens", f"{own_rate / 1e9:,.0f} G/s", f"{rate / 1e9:,.0f} G/s int8", own_rate / rate, 0.35, least=True)
    b.row("  chunks a second", f"{notes / own:.0f}", "")


def memory(b: Bench):
    "Resident memory of a server, before and after it used the model; the vectors are random, as many as there are chunks."
    import numpy as np
    b.indexed()
    card, db, rng = b.gno.model_card(b.kb), b.kb.wdb, np.random.default_rng(1)
    with b.gno.transaction(db):
        number = b.gno.fingerprint_id(db, card, create=True)
        hashes = [r[0] for r in db.execute("SELECT DISTINCT input_hash FROM chunks")]
        db.executemany("INSERT OR IGNORE INTO vectors VALUES (?, ?, ?, ?)", (
            (number, h, *b.gno.quantise(np, v)) for h in hashes for v in [rng.standard_normal(card.data["dims"], np.float32)]))
    asked = queries(b.large, 50)
    with Loop(b, LAUNCH, "mcp") as gno:
        for q in asked:
            gno.call("gno_search", query=q)
        gno.call("gno_status")
        without = gno.resident_mb()
        for q in asked:
            gno.call("gno_vsearch", query=q)
        b.row("memory without model", f"{without:.0f} MB", f"{len(b.files):,} notes", without, 60)
        full = gno.resident_mb()
        b.row("memory with model", f"{full:.0f} MB", f"{len(hashes):,} vectors", full, 220)


def size(b: Bench):
    "The index on disk, without vectors, against the text indexed."
    kb = b.new_kb("size", b.large)
    b.sync(kb)
    kb.close()
    own = os.path.getsize(kb.db_path)
    b.row("size on disk", f"{own / 1e6:.1f} MB", f"{b.text_bytes / 1e6:.1f} MB", own / b.text_bytes, 2.5)


ROWS = {
    "cold1k": lambda b: cold(b, f"cold {min(1000, b.options.notes):,}", b.small, 5),
    "cold": lambda b: cold(b, f"cold {len(b.files):,}", b.large, 3),
    "size": size, "unchanged": unchanged, "changed": changed, "start": start, "calls": calls, "embed-query": embed_query,
    "embed-chunks": embed_chunks, "memory": memory,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notes", type=int, default=10000)
    parser.add_argument("--only", default="", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--corpus", type=Path, help="a folder of .md files instead of notes made here")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    chosen = [name for name in options.only.split(",") if name] or list(ROWS)
    if set(chosen) - set(ROWS):
        parser.error(f"--only takes {', '.join(ROWS)}")
    with tempfile.TemporaryDirectory(prefix="gno-bench-", ignore_cleanup_errors=True) as base:
        b = Bench(Path(base), options)
        print(f"{len(b.files):,} notes, {b.text_bytes / 1e6:.1f} MB\n{'row':<22} {'ours':>22} {'baseline':>24} {'ratio':>8} {'bound':>9}")
        for name in chosen:
            ROWS[name](b)
        b.kb.close()
    if options.json:
        options.json.write_text(json.dumps(b.rows, indent=1) + "\n")
    sys.exit(any(r["ok"] is False for r in b.rows))


if __name__ == "__main__":
    main()
