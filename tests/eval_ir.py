"""How well gno finds, on public retrieval collections: nDCG@10, recall@100 and MRR@10 of each way to search.

    python tests/eval_ir.py DIR... [--methods search,vsearch,query,rerank] [--keep FOLDER] [--jobs 2] [--half tune|test] [--queries N]

A DIR holds corpus.jsonl (_id, title, text), queries.jsonl (_id, text) and qrels.tsv (query-id, corpus-id, score, with a
header). Every document becomes a Markdown file of a real knowledge base, and every answer comes through the one door;
`query` is without rerank, `rerank` the same with it. The collections date nothing, so all files are of the same age, and
words such as "recent" do not reorder. The file names, which are the titles of untitled documents, say nothing either.

nDCG is trec_eval's: gain is the judged grade, discount log2(rank + 1), the ideal is over all judged documents. Queries
without a relevant document are left out; one that is refused found nothing. The macro mean is over collections. Five
collections of 20,000 documents take about 20 minutes, most of it to embed; --keep keeps the indexes for the next time.
Tune with --half tune, then judge once with --half test.
"""
import argparse
import hashlib
import json
import math
import os
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import gno

METHODS = {"search": ("search", {}), "vsearch": ("vsearch", {}), "query": ("query", {"rerank": False}),
           "rerank": ("query", {"rerank": True})}
MTIME = 1_700_000_000            # of every file


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def load(folder: Path, half: str | None, most: int | None) -> tuple[list[dict], dict[str, str], dict[str, dict[str, int]]]:
    "A collection: documents, the chosen queries {id: text} that have a relevant document, {query id: {document id: grade > 0}}."
    docs, asked = ([json.loads(line) for line in (folder / name).read_bytes().splitlines()] for name in ("corpus.jsonl", "queries.jsonl"))
    grades = defaultdict(dict)
    for line in (folder / "qrels.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        query, doc, grade = line.split("\t")
        if int(grade) > 0:
            grades[query][doc] = int(grade)
    queries = {q["_id"]: q["text"] for q in asked if q["_id"] in grades}
    chosen = sorted((q for q in queries if not half or (int(digest(q), 16) % 2 == 0) == (half == "tune")), key=digest)
    return docs, {q: queries[q] for q in chosen[:most]}, grades


def scores(found: list[str], grades: dict[str, int]) -> tuple[float, float, float]:
    """nDCG@10, recall@100 and MRR@10 of a ranking without repeats.

    >>> [round(score, 4) for score in scores(["x", "b", "a"], {"a": 2, "b": 1, "c": 1})]
    [0.5209, 0.6667, 0.5]
    """
    def dcg(gains):
        return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, 1))
    gains = [grades.get(doc, 0) for doc in found[:10]]
    return (dcg(gains) / dcg(sorted(grades.values(), reverse=True)[:10]), len(grades.keys() & set(found[:100])) / len(grades),
            max((1 / rank for rank, gain in enumerate(gains, 1) if gain), default=0.0))


def knowledge_base(base: Path, docs: list[dict], name: str) -> gno.KB:
    "The documents as files below base, indexed and embedded; what is there already is used. x17.md is docs[17]."
    def tell(p):
        if p.steps % (10 if p.phase == "embed" else 1000) == 0:
            print(f"{name}: {p.phase} {p.current}/{p.total}", file=sys.stderr, flush=True)
    notes, part = base / "notes", base / "part"
    if not notes.exists():                  # `part` takes its place once every file is written
        part.mkdir(parents=True, exist_ok=True)
        for n, doc in enumerate(docs):
            title = " ".join((doc.get("title") or "").split())
            path = part / f"x{n}.md"
            path.write_bytes(((f"# {title}\n\n" if title else "") + doc["text"] + "\n").encode())
            os.utime(path, (MTIME, MTIME))
        part.rename(notes)
    kb = gno.KB(dirs={kind: str(base / kind) for kind in ("config", "data", "cache")}, writable=True)
    kb.refresh()
    if not kb.config.collections:
        gno.call(kb, "add_collection", {"path": str(notes), "name": "docs"}, inline=gno.Progress(tell))
    gno.call(kb, "index", {}, inline=gno.Progress(tell))
    return kb


def evaluate(folder: Path, options) -> tuple[str, dict[str, tuple[float, float, float]], list[str]]:
    "One collection: its heading, {method: mean scores}, and what a reader of the scores must know."
    docs, queries, grades = load(folder, options.half, options.queries)
    means, notes, key = {}, [], digest((folder / "corpus.jsonl").read_text(encoding="utf-8"))[:8]
    with tempfile.TemporaryDirectory(prefix="gno-ir-", ignore_cleanup_errors=True) as temporary:
        kb = knowledge_base(options.keep / f"{folder.name}-{key}" if options.keep else Path(temporary), docs, folder.name)
        for method in options.methods:
            (tool, arguments), found, odd = METHODS[method], [], Counter()
            for query, text in queries.items():
                try:
                    answer = gno.call(kb, tool, {"query": text, "limit": 100} | arguments)
                except gno.GnoError as e:
                    if e.code != "INVALID_INPUT":
                        raise
                    answer = {"results": [], "meta": {}}
                    odd[f"refused ({e.message})"] += 1
                odd["no vectors used"] += answer["meta"].get("mode") == "bm25_only"
                odd["not reranked"] += method == "rerank" and not answer["meta"].get("reranked")
                ranking = [docs[int(Path(hit["source"]["relPath"]).stem[1:])]["_id"] for hit in answer["results"]]
                assert len(set(ranking)) == len(ranking), f"{folder.name} {method} {query}: a document is listed twice"
                found.append(scores(ranking, grades[query]))
                if len(found) % 100 == 0:
                    print(f"{folder.name}: {method} {len(found)}/{len(queries)}", file=sys.stderr, flush=True)
            means[method] = tuple(map(mean, zip(*found, strict=True)))
            notes += [f"- {folder.name}, {method}: {what}, {n} of {len(queries)} queries" for what, n in odd.items() if n]
        kb.close()
    return f"{folder.name} ({len(docs):,} docs, {len(queries):,} queries)", means, notes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS), help=f"of {','.join(METHODS)}")
    parser.add_argument("--queries", type=int, metavar="N", help="only the first N by hash, for a quick look")
    parser.add_argument("--half", choices=("tune", "test"), help="half of the queries by hash of their id")
    parser.add_argument("--keep", type=lambda text: Path(text).resolve(), metavar="FOLDER", help="keep the indexes here and use those kept")
    parser.add_argument("--jobs", type=int, default=1, help="collections at a time (default 1)")
    options = parser.parse_args()
    if set(options.methods) - METHODS.keys():
        parser.error(f"--methods takes {','.join(METHODS)}")
    with ProcessPoolExecutor(options.jobs) as pool:
        done = list(pool.map(evaluate, options.folders, [options] * len(options.folders)))
    print("| nDCG@10 / recall@100 / MRR@10 |", " | ".join(heading for heading, *_ in done), "| macro |\n" + "|---" * (len(done) + 2) + "|")
    for method in options.methods:
        each = [means[method] for _, means, _ in done]
        cells = [" / ".join(f"{score:.3f}" for score in cell) for cell in [*each, map(mean, zip(*each, strict=True))]]
        print(f"| {method} |", " | ".join(cells), "|")
    print("", *(note for *_, notes in done for note in notes), sep="\n")


if __name__ == "__main__":
    main()
