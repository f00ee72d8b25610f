"""Many processes on one index: python tests/campaign.py [--seconds 60] [--kills 0] [--seed 1] [--notes 60]

Three servers read in a loop while a fourth one syncs, embeds and clears, and files come, change, move and go under all of
them. No read may fail, every note must be found once a sync ended, and at the end the index must be what a new one of the
same folders would be. With --kills the writing server is instead ended with SIGKILL at random moments, that many times.

The writer's repertoire are the tables DEEDS (one step on the folder, or one call of a tool that answers at once) and JOBS. A
deed is a function of the world with a weight; it keeps `world.notes` true: path -> the word that only this note holds.
"""
from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from conftest import Client, new_kb, run, write  # noqa: E402
from test_sync import sound, visible  # noqa: E402

import gno  # noqa: E402

STABLE = 8                                  # notes of a collection that nobody touches: every read of them has one right answer
TOPICS = ["kilns and glaze", "bees in winter", "a broken violin", "tide tables", "sourdough", "the observatory dome", "tax forms"]


class World:
    "Two folders, what is in them, and who works on them."

    def __init__(self, base: Path, seed: int, notes: int):
        self.base, self.root, self.chance = base / "gno", base / "notes", random.Random(seed)
        self.notes: dict[str, str] = {}     # path below notes/ -> its own word
        self.gone: list[str] = []           # words that were on disk once
        self.made, self.floor = 0, notes // 2
        self.writer: Client | None = None
        write(base / "stable", {f"s{n}.md": stable_note(n) for n in range(STABLE)})
        self.root.mkdir()
        write(self.base / "config", {"index.yml": 'version: "1.0"\ncollections:\n' + "".join(
            f"- name: {name}\n  path: {base / name}\n" for name in ("notes", "stable"))})
        for _ in range(notes):
            add_file(self)

    def new_text(self) -> tuple[str, str]:
        "(word, text) of a note that was never there: a few links, a tag, one to three paragraphs."
        self.made += 1
        word, topic = f"w{self.made}q", self.chance.choice(TOPICS)
        links = " ".join(f"[[{Path(p).stem}]]" for p in self.some(2)) + " [out](../../stable/s0.md) [[stable:s1]]"
        body = "\n\n".join(f"Paragraph {n} of {word} tells about {topic} and {self.chance.choice(TOPICS)}. " * 6
                           for n in range(self.chance.randint(1, 3)))
        return word, f"# Note {word}\n\ncommon {word} #tag{self.made % 7}\n\n{links}\n\n{body}\n"

    def some(self, most: int) -> list[str]:
        "Paths of up to that many notes."
        return self.chance.sample(sorted(self.notes), min(most, len(self.notes)))

    def put(self, path: str, word: str | None):
        "Note what is on disk now at a path; None: nothing."
        old = self.notes.pop(path, None)
        if old and old not in self.notes.values():
            self.gone.append(old)
        if word:
            self.notes[path] = word


def stable_note(n: int) -> str:
    return f"# Stable {n}\n\nanchor{n} common #fixed\n\nSee [[s{(n + 1) % STABLE}]]. It tells about {TOPICS[n % len(TOPICS)]}.\n"


# ---- the repertoire ----

def add_file(w: World):
    word, text = w.new_text()
    path = f"{w.chance.choice('abc')}/n{w.made}.md"
    write(w.root, {path: text})
    w.put(path, word)


def edit_in_place(w: World):
    for path in w.some(1):
        word, text = w.new_text()
        (w.root / path).write_text(text)
        w.put(path, word)


def save_like_an_editor(w: World):
    for path in w.some(1):
        word, text = w.new_text()
        temp = w.root / f"{path}.tmp"
        temp.write_text(text)
        temp.replace(w.root / path)
        w.put(path, word)


def rename_file(w: World):
    for path in w.some(1):
        w.made += 1
        word, to = w.notes.pop(path), f"{w.chance.choice('abcd')}/moved{w.made}.md"
        (w.root / to).parent.mkdir(exist_ok=True)
        (w.root / path).rename(w.root / to)
        w.put(to, word)


def delete_file(w: World):
    for path in w.some(1) if len(w.notes) > w.floor else ():
        (w.root / path).unlink()
        w.put(path, None)


def touch_file(w: World):
    for path in w.some(1):
        os.utime(w.root / path)


def clear_embeddings(w: World):
    if w.writer:
        cleared = w.writer.call("gno_clear_collection_embeddings", collection="notes", mode=w.chance.choice(["stale", "all"]))
        assert not cleared.get("isError"), cleared


def capture(w: World):
    if w.writer:
        word, text = w.new_text()
        path = f"{w.chance.choice('abc')}/n{w.made}.md"
        written(w, "gno_capture", collection="notes", path=path, content=text)
        w.put(path, word)


def rename_note(w: World):
    for path in w.some(1) if w.writer else ():
        w.made += 1
        answer = written(w, "gno_rename_note", ref=f"gno://notes/{path}", name=f"renamed{w.made}")
        w.notes[answer["relPath"]] = w.notes.pop(path)


def move_note(w: World):
    for path in w.some(1) if w.writer else ():
        w.made += 1
        answer = written(w, "gno_move_note", ref=f"gno://notes/{path}", folderPath=w.chance.choice("abcd"), name=f"moved{w.made}.md")
        w.notes[answer["relPath"]] = w.notes.pop(path)


def written(w: World, tool: str, **arguments) -> dict:
    "The answer of a tool that writes a note."
    answer = w.writer.call(tool, **arguments)
    assert not answer.get("isError"), (tool, arguments, answer["content"])
    return answer["structuredContent"]


CALLS = {clear_embeddings: 1, capture: 3, rename_note: 2, move_note: 2}
ON_DISK = {add_file: 4, edit_in_place: 4, save_like_an_editor: 3, rename_file: 3, delete_file: 3, touch_file: 2}     # also while a job runs
DEEDS = ON_DISK | CALLS
JOBS = {("gno_sync", "{}"): 6, ("gno_index", "{}"): 3, ("gno_embed", "{}"): 2, ("gno_sync", '{"full": true}'): 1,
        ("gno_sync", '{"collection": "notes"}'): 2}


def deeds(w: World, most: int, chosen=DEEDS):
    for deed in w.chance.choices([*chosen], [*chosen.values()], k=w.chance.randint(1, most)):
        deed(w)


def start_job(w: World, chosen=JOBS) -> str:
    (tool, arguments), = w.chance.choices([*chosen], [*chosen.values()])
    started = w.writer.call(tool, **json.loads(arguments))
    assert not started.get("isError"), started
    return started["structuredContent"]["jobId"]


# ---- reading ----

class Reader:
    "A server that only reads, asked in a loop by a thread of its own; what went wrong stands in `failures`."

    def __init__(self, base: Path, seed: int):
        self.client, self.chance, self.mutex = Client(base), random.Random(seed), threading.Lock()
        self.failures, self.reads, self.stop = [], 0, threading.Event()
        self.thread = threading.Thread(target=self.loop, daemon=True)

    def call(self, tool: str, **arguments) -> dict:
        with self.mutex:
            reply = self.client.request("tools/call", {"name": tool, "arguments": arguments}, timeout=60)
        result = reply.get("result", reply)
        assert "error" not in reply and not result.get("isError"), (tool, arguments, reply)
        self.reads += 1
        return result["structuredContent"]

    def loop(self):
        while not self.stop.is_set():
            try:
                self.read(self.chance.randrange(STABLE))
            except Exception as e:          # whatever it is, it is what the campaign looks for
                self.failures.append(e)
                return

    def read(self, n: int):
        "One random read of a stable note, or of all."
        kind = self.chance.randrange(9)
        uri = f"gno://stable/s{n}.md"
        if kind < 2:
            assert [h["uri"] for h in self.call("gno_search", query=f"anchor{n}")["results"]] == [uri]
        elif kind == 2:
            found = self.call("gno_search", query="common", limit=100)["results"]
            assert {f"gno://stable/s{k}.md" for k in range(STABLE)} <= {h["uri"] for h in found} or len(found) == 100
        elif kind == 3:
            found = self.call("gno_vsearch", query=TOPICS[n % len(TOPICS)], collection="stable", limit=STABLE)
            assert found["meta"]["totalResults"] == STABLE
        elif kind == 4:
            assert self.call("gno_query", query=f"anchor{n} {TOPICS[n % len(TOPICS)]}", collection="stable")["results"]
        elif kind == 5:
            assert self.call("gno_get", ref=f"stable/s{n}.md")["content"] == stable_note(n)
        elif kind == 6:
            got = self.call("gno_multi_get", pattern="stable/*.md")["documents"]
            assert sorted(d["content"] for d in got) == sorted(map(stable_note, range(STABLE)))
        elif kind == 7:
            status = self.call("gno_status")
            assert status["healthy"] and status["totalDocuments"] >= STABLE, status["health"]
        else:
            assert {t["tag"]: t["count"] for t in self.call("gno_list_tags")["tags"]}["fixed"] == STABLE

    def end(self) -> int:
        "Stop reading -> how many reads succeeded. Raises the first failure."
        self.stop.set()
        if self.thread.ident:
            self.thread.join(60)
        assert not self.failures, self.failures[0]
        assert self.client.close() == 0 and not self.client.errors, self.client.errors
        return self.reads


# ---- checks ----

def ended(w: World, job: str) -> dict:
    "The record of a job once it ended; it must have succeeded."
    until = time.monotonic() + 120
    while (state := w.writer.call("gno_job_status", jobId=job)["structuredContent"])["status"] == "running":
        assert time.monotonic() < until, state
        time.sleep(0.01)
    assert state["status"] == "completed", state
    return state


def nothing_lost(w: World, search):
    "Notes on disk are found under their paths, earlier words no more; `search(word)` -> uris."
    for path in w.some(5):
        assert search(w.notes[path]) == [f"gno://notes/{path}"], (path, w.notes[path], search(w.notes[path]))
    for word in w.chance.sample(w.gone, min(3, len(w.gone))):
        assert search(word) == [], word


def everything(kb: gno.KB) -> tuple:
    "All that an index holds of the visible documents, with documents by path: texts, chunks, tags, links; edges; vectors."
    name = {r[0]: r[1:] for r in kb.wdb.execute("SELECT id, collection, path FROM documents WHERE active")}
    edges = sorted(repr((name[source], name.get(target), *rest)) for source, target, *rest in kb.wdb.execute(
        "SELECT source, target, seq, key, edge_type, edge_source, confidence, resolution, match_count FROM edges") if source in name)
    vectors = dict(kb.wdb.execute("""
        SELECT v.input_hash, v.embedding FROM vectors v WHERE input_hash IN (SELECT c.input_hash FROM documents d
        JOIN chunks c ON c.mirror_id = d.mirror_id AND c.cut = d.cut WHERE d.active)""").fetchall())
    return visible(kb), edges, vectors


def as_new(w: World):
    "After one more sync and embed the index is what a new one of the folders would be."
    kb, fresh = new_kb(w.base), new_kb(w.base / "fresh", config_path=str(w.base / "config" / "index.yml"))
    try:
        for one in (kb, fresh):
            run(one, "index")
        got, wanted = everything(kb), everything(fresh)
        assert got[0].keys() == wanted[0].keys() == {("notes", p) for p in w.notes} | {("stable", f"s{n}.md") for n in range(STABLE)}
        for part, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
            assert ours == theirs, ("documents", "edges", "vectors")[part]
        assert len(got[1]) > len(w.notes) and got[2]
        status = run(kb, "status")
        assert status["embeddingBacklog"] == 0 and status["healthy"], status
        with kb.lock(0):
            pass
    finally:
        kb.close()
        fresh.close()


# ---- the two campaigns ----

def four_processes(base: Path, seconds: float, seed=1, notes=60) -> dict:
    "Three readers, a writer, and a folder that never rests -> counts."
    w, jobs = World(base, seed, notes), 0
    w.writer = Client(w.base, "--enable-write")
    ended(w, w.writer.call("gno_index")["structuredContent"]["jobId"])
    readers = [Reader(w.base, seed + n) for n in range(3)]
    try:
        for r in readers:
            r.thread.start()
        until = time.monotonic() + seconds
        while time.monotonic() < until and not any(r.failures for r in readers):
            deeds(w, 6)
            job = start_job(w)
            if w.chance.random() < 0.5:
                deeds(w, 4, ON_DISK)
            ended(w, job)
            ended(w, w.writer.call("gno_sync")["structuredContent"]["jobId"])
            jobs += 2
            nothing_lost(w, lambda word: [h["uri"] for h in w.chance.choice(readers).call("gno_search", query=word)["results"]])
        reads = [r.end() for r in readers]
        assert w.writer.close() == 0 and not w.writer.errors, w.writer.errors
    finally:
        for client in (w.writer, *(r.client for r in readers)):
            client.proc.kill()
    as_new(w)
    return {"reads": sum(reads), "jobs": jobs, "files written": w.made, "notes": len(w.notes)}


def kills(base: Path, times: int, seed=1, notes=80) -> dict:
    "A writer that is killed at random moments of its jobs, next to a reader that goes on -> counts."
    w, phases = World(base, seed, notes), {}
    first = new_kb(w.base)
    run(first, "index", collection="stable")
    first.close()
    reader = Reader(w.base, seed)
    reader.thread.start()
    try:
        for turn in range(times):
            w.writer = Client(w.base, "--enable-write")
            deeds(w, 40)
            job = start_job(w, JOBS | {("gno_index", "{}"): 12})
            time.sleep(0.6 * w.chance.random() ** 3)        # a sync takes some hundredths of a second, embedding longer
            state = w.writer.call("gno_job_status", jobId=job)["structuredContent"]
            w.writer.proc.kill()
            w.writer.proc.wait()
            at = state["progress"]["phase"] if state["status"] == "running" else "ended"
            phases[at] = phases.get(at, 0) + 1
            w.writer = None
            kb = new_kb(w.base)
            try:
                with kb.lock(0):                # the lock died with its holder
                    sound(kb)
                report = run(kb, "sync")
                assert not report["totalFilesErrored"], (turn, report)
                nothing_lost(w, lambda word, kb=kb: [h["uri"] for h in run(kb, "search", query=word)["results"]])
            finally:
                kb.close()
            assert not reader.failures, (turn, reader.failures[0])
        reads = reader.end()
    finally:
        for client in (reader.client, w.writer):
            if client:
                client.proc.kill()
    as_new(w)
    return {"kills": times, "killed in": phases, "reads": reads, "files written": w.made, "notes": len(w.notes)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--notes", type=int, default=0)
    given = parser.parse_args()
    more = {"notes": given.notes} if given.notes else {}
    with tempfile.TemporaryDirectory() as place:
        print(kills(Path(place), given.kills, given.seed, **more) if given.kills
              else four_processes(Path(place), given.seconds, given.seed, **more))


if __name__ == "__main__":
    main()
