"""Models: which one a collection has, servers on a real socket that misbehave in every way, a real ONNX cross-encoder."""
import json
import math
import os
import shutil
import sqlite3
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from conftest import cli, new_kb, run, write

import gno

MODELS = Path(gno.__file__).parent / "models"
WORDS = ["kiln", "clay", "apples", "engines", "lemons", "glaze", "violin", "oven"]
HANG, BREAK, CUT = "hang", "break", "cut"      # no answer until the test ends; no answer at all; half an answer


class Server(ThreadingHTTPServer):
    """A model server. `script` holds the next replies (status, headers, body) or HANG, BREAK, CUT; then it answers well.

    `asked` is what it was sent: (path, headers, body). A vector counts the words of WORDS, `turn` places further on.
    """
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.asked, self.dims, self.turn, self.released = [], [], 9, 0, threading.Event()
        self.refuses = lambda text: False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        "A client that hangs up is part of the tests."

    def vector(self, text: str) -> list[float]:
        counts = [3.0 * text.lower().count(w) for w in WORDS]
        return (counts[self.turn:] + counts[:self.turn] + [0.0] * self.dims)[:self.dims - 1] + [0.25]

    def answer(self, path: str, body: dict):
        if path.endswith("/embeddings"):
            if any(map(self.refuses, body["input"])):
                return 400, {"error": {"message": "input is too long"}}
            return 200, {"data": [{"index": n, "embedding": self.vector(t)} for n, t in enumerate(body["input"])][::-1]}
        if path.endswith("/rerank"):
            rows = [{"index": n, "relevance_score": len(d) / 100} for n, d in enumerate(body["documents"])]
            return 200, {"results": sorted(rows, key=lambda r: -r["relevance_score"])}
        return 200, {"choices": [{"message": {"role": "assistant", "content": "an answer"}}]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, dict(self.headers), body))
        step = self.server.script.pop(0) if self.server.script else None
        if callable(step):
            step = step()
        if step == HANG:
            self.server.released.wait(30)
        if step in (HANG, BREAK):
            self.close_connection = True
            return
        if step in (None, CUT):
            (status, data), headers = self.server.answer(self.path, body), {}
        else:
            status, headers, data = step
        raw = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw[:len(raw) // 2] if step == CUT else raw)
        self.close_connection = step == CUT

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    s = Server()
    yield s
    s.released.set()
    s.shutdown()
    s.server_close()


@pytest.fixture
def waits(monkeypatch):
    "What was slept between tries, in seconds, without sleeping."
    slept: list[float] = []
    monkeypatch.setattr(gno.time, "sleep", slept.append)
    return slept


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for name in [n for n in os.environ if n.startswith("GNO_") or n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def configure(kb, roots: dict[str, Path], own: dict[str, dict] | None = None, **models):
    "Write index.yml: these collections, models of their own, the models section."
    own = own or {}
    collections = [{"name": n, "path": str(p)} | ({"models": own[n]} if n in own else {}) for n, p in roots.items()]
    config = Path(kb.config_path)
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps({"version": "1.0", "collections": collections} | ({"models": models} if models else {})))
    kb.refresh()


def preset(**refs) -> dict:
    return {"activePreset": "mine", "presets": [{"id": "mine", "name": "My models"} | refs]}


def failure(call, *arguments, **named) -> gno.GnoError:
    with pytest.raises(gno.GnoError) as e:
        call(*arguments, **named)
    return e.value


def check_of(status, name: str) -> list[tuple[str, str]]:
    return [(c["status"], c["detail"]) for c in status["health"]["checks"] if c["id"] == name]


def paths(found) -> list[str]:
    return [h["source"]["relPath"] for h in found["results"]]


def stored(kb) -> dict[str, int]:
    "How many vectors of each model the index file holds, read by SQLite alone."
    with sqlite3.connect(kb.db_path) as db:
        return dict(db.execute("""SELECT f.model || '/' || f.dims, count(*) FROM vectors v JOIN fingerprints f ON f.id = v.fingerprint
                                  WHERE length(v.embedding) = f.dims GROUP BY f.id"""))


def own_card(folder: Path, **changes) -> Path:
    "A copy of the shipped model with another card."
    shutil.copytree(MODELS, folder, ignore=shutil.ignore_patterns("source", "__pycache__", ".*"))
    card = json.loads((folder / "card.json").read_text()) | changes
    (folder / "card.json").write_text(json.dumps(card))
    return folder


# ---- which model ----

SHIPPED = json.loads((MODELS / "card.json").read_text())["name"]
URI = "http://gpu.lan:8080#bge-m3"


@pytest.mark.parametrize("role, collection, own, given, expected", [
    ("embed", None, {}, {}, SHIPPED), ("embed", "notes", {}, {}, SHIPPED), ("embed", "notes", {"embed": URI}, {}, "bge-m3"),
    ("embed", "other", {"embed": URI}, {}, SHIPPED), ("embed", None, {"embed": URI}, {}, SHIPPED),
    ("embed", "notes", {}, {"embed": "http://h/v1#p"}, "p"), ("embed", "notes", {"embed": URI}, {"embed": "http://h/v1#p"}, "bge-m3"),
    ("embed", "notes", {"embed": SHIPPED}, {"embed": URI}, SHIPPED), ("embed", "notes", {"embed": str(MODELS)}, {"embed": URI}, SHIPPED),
    ("embed", "notes", {"embed": f"file:{MODELS}"}, {"embed": URI}, SHIPPED), ("embed", None, {}, {"embed": f"file://{MODELS}"}, SHIPPED),
    ("rerank", "notes", {}, {}, None), ("rerank", "notes", {}, {"rerank": URI}, "bge-m3"), ("judge", None, {}, {}, None),
    ("gen", None, {}, {}, None), ("expand", None, {}, {}, None), ("expand", None, {}, {"gen": "http://h#g"}, "g"),
    ("expand", None, {}, {"gen": "http://h#g", "expand": "http://h#e"}, "e"), ("gen", None, {}, {"expand": "http://h#e"}, None),
    ("expand", "notes", {"gen": "http://h#own"}, {"expand": "http://h#e"}, "e"),
    ("expand", "notes", {"gen": "http://h#own"}, {"gen": "http://h#g"}, "own")])
def test_the_collections_model_then_the_presets_then_the_shipped(kb, tmp_path, role, collection, own, given, expected):
    configure(kb, {"notes": tmp_path, "other": tmp_path}, {"notes": own} if own else {}, **(preset(**given) if given else {}))
    card = gno.collection_model(kb, role, collection)
    assert (card.name if card else None) == expected and kb.config.warnings == ()


def test_groups_keep_the_order_of_the_names_and_share_a_model_however_it_is_called(kb, tmp_path):
    own = {"a": {"embed": "http://h#x"}, "c": {"embed": str(MODELS)}, "d": {"embed": "http://h#x"}, "e": {"embed": "http://h/v1#x"}}
    configure(kb, dict.fromkeys("abcde", tmp_path), own)
    assert [(c.data.get("uri", c.name), names) for c, names in gno.embed_groups(kb, list("abcde"))] == \
        [("http://h#x", ["a", "d"]), (SHIPPED, ["b", "c"]), ("http://h/v1#x", ["e"])]
    assert [names for _, names in gno.embed_groups(kb, ["c", "a"])] == [["c"], ["a"]] and gno.embed_groups(kb, []) == []


@pytest.mark.parametrize("ref, said", [
    ("no-such-model", "'no-such-model'"), ("/no/such/folder", "/no/such/folder"), ("file:/no/such", "/no/such"), ("org/repo", "org/repo")])
def test_a_model_that_is_named_and_not_there_is_an_error_and_other_collections_go_on(kb, tmp_path, ref, said):
    configure(kb, {"bad": write(tmp_path / "b", {"b.md": "clay"}), "good": write(tmp_path / "g", {"g.md": "kiln"})},
            {"bad": {"embed": ref}})
    error = failure(gno.collection_model, kb, "embed", "bad")
    assert error.code == "MODEL_NOT_FOUND" and said in error.message and error.hint
    assert failure(gno.embed_groups, kb, ["good", "bad"]).message == error.message
    report = run(kb, "index")
    assert report["embed"]["embedded"] == 1 and report["embed"]["model"] == SHIPPED and said in report["failed"]
    status = run(kb, "status")
    assert status["embeddingBacklog"] == 1 and said in check_of(status, "model")[0][1] and not check_of(status, "vectors")


def test_a_model_is_for_its_role(kb, tmp_path):
    configure(kb, {}, **preset(rerank=SHIPPED, gen=SHIPPED))
    for role in ("rerank", "gen"):
        assert "not for " + role in failure(gno.collection_model, kb, role).message


@pytest.mark.parametrize("models, active, warned", [
    ({}, "shipped", []), ({"activePreset": "shipped"}, "shipped", []), (preset(embed=URI), "mine", []),
    ({"activePreset": "slim-tuned"}, "shipped", ["'slim-tuned'"]), ({"activePreset": ["x"]}, "shipped", ["no preset"]),
    (preset(embed="hf:org/repo/model.Q8_0.gguf", rerank="hf:org/repo"), "mine", ["embed model 'hf:org", "rerank model 'hf:org"]),
    (preset(embed="file:/models/x.gguf"), "mine", ["x.gguf"]), (preset(embed="ollama:nomic"), "mine", ["ollama:nomic"]),
    (preset(embed="http://gpu.lan:8080/v1"), "mine", ["http://gpu.lan:8080"]), (preset(embed=["x"]), "mine", ["embed"]),
    (preset(embedding="x"), "mine", ["'embedding' is no role"]),
    ({"presets": [{"name": "x"}, 7, {"id": "y", "embed": "hf:z"}]}, "shipped", ["without an id", "without an id"]),
    ({"presets": 3}, "shipped", []),
    ([1], "shipped", ["mapping"])])
def test_what_cannot_be_used_is_a_warning_and_the_shipped_model_stays(kb, tmp_path, models, active, warned):
    configure(kb, {})
    config = json.loads(Path(kb.config_path).read_text()) | {"models": models}
    Path(kb.config_path).write_text(json.dumps(config))
    status = run(kb, "status")
    details = [detail for level, detail in check_of(status, "config")]
    assert len(details) == len(warned) and all(w in d for w, d in zip(warned, details, strict=True)), details
    assert status["activePreset"]["id"] == active
    assert gno.collection_model(kb, "embed").name == (SHIPPED if models != preset(embed=URI) else "bge-m3")


def test_a_collections_unusable_model_is_named_with_it_and_passwords_are_not_shown(kb, tmp_path):
    configure(kb, {"notes": tmp_path},
            {"notes": {"embed": "hf:a/b", "rerank": "http://me:hunter2@h/v1#m", "gen": "https://h/v1?key=hunter2#m"}})
    assert [w.partition(":")[0] for w in kb.config.warnings] == ["collection notes"] * 3 and "hunter2" not in str(kb.config.warnings)
    assert gno.collection_model(kb, "embed", "notes").name == SHIPPED


def test_models_list_says_where_each_comes_from(tmp_path, kb):
    configure(kb, {"notes": tmp_path}, {"notes": {"embed": "nowhere"}}, **preset(gen=URI))
    rows = {(m["role"], m["from"]): (m["model"], m["usable"]) for m in run(kb, "models_list")["models"]}
    assert rows == {("embed", "found"): (SHIPPED, True), ("rerank", "-"): ("", False), ("expand", "preset mine"): ("bge-m3", True),
                    ("gen", "preset mine"): ("bge-m3", True), ("judge", "-"): ("", False),
                    ("embed", "collection notes"): ("nowhere", False)}
    shown = cli(tmp_path / "gno", "models", "list").stdout.decode()
    assert len(shown.splitlines()) == 6 and URI in shown and "no model named 'nowhere' found" in shown


def test_status_names_the_active_preset(kb, tmp_path):
    configure(kb, {"notes": tmp_path})
    assert run(kb, "status")["activePreset"] == {"id": "shipped", "name": SHIPPED}
    configure(kb, {"notes": tmp_path}, **preset(gen=URI))
    assert run(kb, "status")["activePreset"] == {"id": "mine", "name": "My models"}


# ---- a server ----

def post(server, body=None, **options):
    return gno.post_json(f"{server.base}#m", "/embeddings", body or {"input": ["kiln"]}, **{"timeout_s": 10} | options)


@pytest.mark.parametrize("base, path",
        [("", "/v1/x"), ("/", "/v1/x"), ("/v1", "/v1/x"), ("/v1/", "/v1/x"), ("/api", "/api/v1/x"), ("/openai/v1", "/openai/v1/x")])
def test_v1_is_added_where_it_is_missing(server, base, path):
    gno.post_json(f"{server.base}{base}#org/a:b", "/x", {}, timeout_s=10)
    assert [p for p, *_ in server.asked] == [path]


OK = (200, {}, {"fine": True})


@pytest.mark.parametrize("script, slept", [
    ([OK], []), ([(503, {}, b""), OK], [0.5]), ([(503, {}, b""), (502, {}, b"<html>"), OK], [0.5, 1.0]), ([(504, {}, b""), OK], [0.5]),
    ([(429, {"Retry-After": "7"}, b""), OK], [7]), ([(429, {"Retry-After": "3600"}, b""), OK], [10]),
    ([(429, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, b""), OK], [0.5]), ([(429, {"Retry-After": "-1"}, b""), OK], [0.5]),
    ([BREAK, BREAK, OK], [0.5, 1.0]), ([CUT, OK], [0.5])])
def test_a_busy_server_is_asked_again(server, waits, script, slept):
    server.script = list(script)
    assert post(server) == {"fine": True} and waits == slept and len(server.asked) == len(script)


@pytest.mark.parametrize("script, said, hint, asked", [
    ([(503, {}, b"")] * 5, "HTTP 503", "log", 3), ([(429, {}, b"")] * 5, "HTTP 429", "log", 3),
    ([BREAK] * 5, "cannot be reached", "start", 3),
    ([(500, {}, b"out of memory")], "HTTP 500: out of memory", "log", 1),
    ([(404, {}, b'{"error": "no such model"}')], "no such model", "index.yml", 1),
    ([(400, {}, b"a\x1b[31m\nb")], "HTTP 400: a [31m b", "log", 1), ([(401, {}, b"no")], "wants an API key", "GNO_API_KEY_127_0_0_1", 1),
    ([(200, {}, b"<html>")], "no JSON", "log", 1), ([(200, {}, b"\xff")], "no JSON", "log", 1),
    ([(200, {}, b'{"a": NaN}')], "no JSON", "log", 1),
    ([(200, {}, b"[" * 100_000)], "no JSON", "log", 1), ([(200, {}, b"")], "no JSON", "log", 1), ([(204, {}, b"")], "no JSON", "log", 1)])
def test_what_a_server_does_wrong_is_one_clear_error(server, waits, script, said, hint, asked):
    server.script = list(script)
    error = failure(post, server)
    assert error.code == "MODEL_NOT_FOUND" and said in error.message and hint in error.hint and len(server.asked) == asked
    assert f"model m at 127.0.0.1:{server.server_port}" in error.message and error.message.isprintable()


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(server, waits, code):
    other = Server()
    server.script = [(code, {"Location": f"{other.base}/v1/embeddings"}, b"")]
    error = failure(post, server)
    other.shutdown()
    other.server_close()
    assert f"HTTP {code}" in error.message and "redirects" in error.hint and other.asked == [] and waits == []


def test_a_server_that_hangs_is_given_up_after_the_timeout_and_not_asked_again(server, waits):
    server.script = [HANG]
    assert "does not answer within 0.2 s" in failure(post, server, timeout_s=0.2).message and len(server.asked) == 1 and waits == []


def test_a_huge_reply_is_not_read(server, monkeypatch, waits):
    monkeypatch.setattr(gno, "REPLY_MAX_BYTES", 1000)
    server.script = [(200, {}, b'"' + b"a" * 998 + b'"'), (200, {}, b'"' + b"a" * 999 + b'"')]
    assert len(post(server)) == 998 and "gave more than" in failure(post, server).message and waits == []


@pytest.mark.parametrize("uri", ["http://127.0.0.1:1#m", "http://127.0.0.1:99999#m", "https://127.0.0.1:1#m"])
def test_a_server_that_is_not_there_is_an_error_at_once(waits, uri):
    error = failure(gno.post_json, uri, "/embeddings", {}, timeout_s=10)
    assert error.code == "MODEL_NOT_FOUND" and "cannot be reached" in error.message and "index.yml" in error.hint and waits == []


def test_cancelling_ends_the_tries(server, waits):
    progress = gno.Progress()
    server.script = [lambda: progress.cancelled.set() or (503, {}, b"")] + [(503, {}, b"")] * 5
    assert failure(post, server, progress=progress).code == "CANCELLED" and len(server.asked) == 1


def test_proxies_of_the_environment_are_for_https_elsewhere(server, monkeypatch):
    for name in ("http_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert post(server)["data"]
    assert [gno.https_proxy(h) for h in ("localhost", "127.0.0.1", "127.9.9.9", "::1", "inside.example", "api.example")] == \
        [""] * 5 + ["http://127.0.0.1:1"]


def test_https_goes_through_the_proxy_by_connect(server, monkeypatch, waits):
    seen = []
    monkeypatch.setattr(Handler, "do_CONNECT", lambda self: (seen.append(self.path), self.send_error(403, "no way out")), raising=False)
    monkeypatch.setenv("https_proxy", server.base)
    error = failure(gno.post_json, "https://api.example#m", "/embeddings", {}, timeout_s=10)
    assert seen == ["api.example:443"] and "no way out" in error.message


# ---- keys ----

def ask(kb, server, **options):
    return gno.ask_endpoint(kb, gno.find_card(kb, "embed", f"{server.base}#m"), "/embeddings", {"input": ["kiln"]}, **options)


@pytest.mark.parametrize("env, sent", [
    ({}, None), ({"GNO_MODEL_API_KEY": "sk-1"}, "Bearer sk-1"), ({"GNO_API_KEY_127_0_0_1": " sk-2\n"}, "Bearer sk-2"),
    ({"GNO_MODEL_API_KEY": "sk-1", "GNO_API_KEY_127_0_0_1": "sk-2"}, "Bearer sk-2"), ({"GNO_API_KEY_OTHER": "sk-3"}, None)])
def test_keys_come_from_the_environment(kb, server, monkeypatch, env, sent):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    ask(kb, server)
    (_, headers, body), = server.asked
    assert headers.get("Authorization") == sent and body["model"] == "m"


@pytest.mark.parametrize("uri, name",
        [("https://api.example.com/v1#m", "GNO_API_KEY_API_EXAMPLE_COM"), ("http://gpu-1:80#m", "GNO_API_KEY_GPU_1"),
                                       ("http://[::1]:80/v1#m", "GNO_API_KEY_1")])
def test_the_name_of_a_key(uri, name):
    assert gno.key_names(uri) == (name, "GNO_MODEL_API_KEY")


@pytest.mark.parametrize("key", ["hunter\n2", "hunter2é", "hunter2 \x00"])
def test_a_key_that_no_header_can_carry_is_an_error_without_it(kb, server, monkeypatch, key):
    monkeypatch.setattr(os, "environ", os.environ | {"GNO_MODEL_API_KEY": key})
    error = failure(ask, kb, server)
    said = error.message + error.hint
    assert error.code == "MODEL_NOT_FOUND" and "GNO_MODEL_API_KEY" in said and "hunter" not in said


@pytest.mark.parametrize("status", [401, 403, 404, 500, 503])
def test_no_error_shows_the_key(kb, server, monkeypatch, waits, status):
    monkeypatch.setenv("GNO_MODEL_API_KEY", "sk-hunter2")
    server.script = [(status, {}, b"the key sk-hunter2 is wrong")] * 3
    error = failure(ask, kb, server)
    assert "hunter2" not in error.message + error.hint and str(status) in error.message


def test_timeouts_are_those_of_the_configuration(kb, server, monkeypatch):
    given = []
    monkeypatch.setattr(gno, "post_json", lambda *a, timeout_s, **k: given.append(timeout_s))
    for models in ({}, {"loadTimeout": 5000, "inferenceTimeout": 1500}, {"loadTimeout": "x", "inferenceTimeout": -1}):
        kb.models.clear()
        configure(kb, {}, **models)
        ask(kb, server), ask(kb, server), ask(kb, server, timeout_s=4)
    assert given == [60, 30, 4, 5, 1.5, 4, 60, 30, 4]


# ---- vectors from a server ----

def endpoint(kb, server, model="m"):
    return gno.load_embedder(kb, gno.find_card(kb, "embed", f"{server.base}#{model}"))


def test_vectors_come_in_the_order_of_the_texts_and_have_unit_length(kb, server):
    model = endpoint(kb, server)
    got = model.embed_many(["kiln clay", "kiln", "nothing"])
    by_hand = [[3, 3, 0, 0, 0, 0, 0, 0, .25], [3, 0, 0, 0, 0, 0, 0, 0, .25], [0] * 8 + [.25]]
    for vector, row in zip(got, by_hand, strict=True):
        assert vector.dtype == np.float32 and vector.tolist() == pytest.approx([x / math.sqrt(sum(y * y for y in row)) for x in row],
                abs=1e-6)
    assert model.embed("kiln", "query").tolist() == got[1].tolist() and model.unknown_share("ไทย") == 0.0
    assert server.asked[0][0] == "/v1/embeddings" and server.asked[0][2] == {"model": "m", "input": ["kiln clay", "kiln", "nothing"]}
    assert endpoint(kb, server) is model, "loaded once"


def embeddings(*rows, **more):
    return 200, {}, {"data": [{"embedding": row} | more for row in rows]}


@pytest.mark.parametrize("reply, said", [
    (embeddings([1, 0]), "one vector for each of 2 texts"), (embeddings([1, 0], [0, 1], [1, 1]), "not asked for"),
    (embeddings([1, 0], [0]), "one vector"),
    (embeddings([1, 0], [0, 1], index=0), "one vector"), (embeddings([1, 0], [0, 1], index=[0]), "one vector"),
    (embeddings([0, 0], [0, 1]), "all zero"),
    (embeddings([1, 0], [None, 1]), "not a number"), (embeddings(["a", 0], [0, 1]), "one vector"), (embeddings([], []), "is none"),
    (embeddings(1, 2), "is none"), (embeddings([[1, 0]], [[0, 1]]), "is none"), ((200, {}, {"data": 3}), "one vector"),
    ((200, {}, []), "one vector"),
    ((200, {}, None), "one vector"), ((200, {}, b'{"data": [{"embedding": [1e999, 1]}, {"embedding": [1, 1]}]}'), "not a number"),
    (embeddings([1, 0, 0], [0, 1, 0]), "gave vectors of 3 numbers, those in use have 9")])
def test_replies_that_are_no_vectors_are_refused(kb, server, reply, said):
    model = endpoint(kb, server)
    model.embed("kiln")
    server.script = [reply]
    error = failure(model.embed_many, ["a", "b"])
    assert error.code == "MODEL_NOT_FOUND" and said in error.message and f"127.0.0.1:{server.server_port}" in error.message
    assert model.dims == 9 and len(model.embed("clay")) == 9


@pytest.mark.parametrize("kind, sent", [("query", "q: kiln"), ("doc", "d: kiln")])
def test_a_server_may_have_a_card_with_prefixes_and_is_used_only_where_it_is_named(kb, server, tmp_path, kind, sent):
    card = {"name": "e5", "role": "embed", "uri": f"{server.base}#e5", "queryPrefix": "q: ", "documentPrefix": "d: "}
    write(tmp_path / "cards", {"e5/card.json": json.dumps(card), "bad.json": ""})
    configure(kb, {"notes": tmp_path}, {"notes": {"embed": "e5"}}, dir=str(tmp_path / "cards"))
    assert gno.collection_model(kb, "embed").name == SHIPPED
    found = gno.collection_model(kb, "embed", "notes")
    gno.load_embedder(kb, found).embed("kiln", kind)
    assert server.asked[0][2]["input"] == [sent]
    write(tmp_path / "cards", {"e5/card.json": json.dumps(card | {"queryPrefix": "Q: "})})
    assert gno.collection_model(kb, "embed", "notes").fingerprint != found.fingerprint


NOTES = {"a.md": "A kiln is hot.", "b.md": "Clay is soft.", "c.md": "A violin, some glaze."}


def test_a_collection_is_embedded_and_searched_by_its_server(kb, server, tmp_path, engine):
    configure(kb, {"notes": write(tmp_path / "n", NOTES)}, {"notes": {"embed": f"{server.base}#m"}})
    report = run(kb, "index")
    assert report["embed"] == report["embed"] | {"embedded": 3, "errors": 0, "model": "m"} and "failed" not in report
    assert stored(kb) == {"m/9": 3} and paths(run(kb, "vsearch", query="clay"))[0] == "b.md"
    found = run(kb, "query", query="violin")
    assert found["meta"]["vectorsUsed"] is True and paths(found)[0] == "c.md"
    assert all(0 <= h["score"] <= 1 for h in run(kb, "vsearch", query="kiln")["results"])
    status = run(kb, "status")
    assert status["healthy"] is True and status["capabilities"]["vector"] is True and status["embeddingBacklog"] == 0


def test_texts_go_in_batches_and_only_those_refused_are_left_out(kb, server, tmp_path):
    configure(kb, {"notes": write(tmp_path / "n", {f"{n:02}.md": f"text {n} {'long' if n in (3, 40) else 'kiln'}" for n in range(70)})},
              **preset(embed=f"{server.base}#m"))
    server.refuses = lambda text: "long" in text
    report = run(kb, "index")["embed"]
    assert (report["embedded"], report["errors"]) == (68, 2) and stored(kb) == {"m/9": 68}
    assert sorted(len(body["input"]) for *_, body in server.asked) == [1] * 64 + [6, 32, 32]
    assert run(kb, "status")["embeddingBacklog"] == 2
    server.refuses = lambda text: False
    assert run(kb, "embed")["embedded"] == 2


def test_a_server_that_refuses_everything_is_not_asked_forever(kb, server, tmp_path):
    configure(kb, {"notes": write(tmp_path / "n", {f"{n:03}.md": f"text {n}" for n in range(200)})}, **preset(embed=f"{server.base}#m"))
    server.refuses = lambda text: True
    report = run(kb, "index")
    assert report["embed"]["embedded"] == 0 and "refused in a row" in report["failed"] and "input is too long" in report["failed"]
    assert len(server.asked) == 33, "one batch, and its texts alone"


def test_one_model_that_fails_stops_no_other(kb, server, tmp_path, waits):
    roots = {n: write(tmp_path / n, {f"{n}.md": f"kiln {n}"}) for n in ("down", "up", "plain")}
    configure(kb, roots, {"down": {"embed": "http://127.0.0.1:1#gone"}, "up": {"embed": f"{server.base}#m"}})
    report = run(kb, "index")
    assert report["sync"]["totalFilesAdded"] == 3 and report["embed"]["embedded"] == 2 and stored(kb) == {"m/9": 1, f"{SHIPPED}/384": 1}
    assert "model gone at 127.0.0.1:1" in report["failed"] and "MODEL_NOT_FOUND" in report["failed"]
    status = run(kb, "status")
    assert {c["name"]: c["embeddedCount"] for c in status["collections"]} == {"down": 0, "up": 1, "plain": 1}
    assert not check_of(status, "vectors") and len(kb.models) >= 2, "two models in use are no mixture, and both stay loaded"
    shown = cli(tmp_path / "gno", "embed", timeout=60).stdout.decode()
    assert "not embedded: MODEL_NOT_FOUND: model gone at 127.0.0.1:1" in shown


def test_what_was_embedded_before_a_server_died_stays(kb, server, tmp_path, waits):
    configure(kb, {"notes": write(tmp_path / "n", {f"{n:03}.md": f"text {n}" for n in range(100)})}, **preset(embed=f"{server.base}#m"))
    good = [None] * 2
    server.script = [*good, *[(503, {}, b"")] * 3]
    report = run(kb, "index")
    assert report["embed"]["embedded"] == 64 and "HTTP 503" in report["failed"] and stored(kb) == {"m/9": 64}
    assert run(kb, "embed")["embedded"] == 36


def test_a_server_that_is_down_leaves_keyword_search(kb, server, tmp_path, waits):
    configure(kb, {"notes": write(tmp_path / "n", NOTES)}, **preset(embed=f"{server.base}#m"))
    run(kb, "index")
    server.script = [(503, {}, b"")] * 6
    found = run(kb, "query", query="kiln")
    assert found["meta"]["mode"] == "bm25_only" and paths(found) == ["a.md"] and any("HTTP 503" in n for n in found["meta"]["notes"])
    assert failure(run, kb, "vsearch", query="kiln").code == "MODEL_NOT_FOUND"


# ---- another model (field reports F20, F21, F80) ----

@pytest.mark.parametrize("dims, turn", [(17, 0), (9, 3)], ids=["other length", "same length"])
def test_another_model_starts_anew_and_the_old_vectors_stay_until_cleared(kb, server, tmp_path, engine, dims, turn):
    roots = {"notes": write(tmp_path / "n", NOTES)}
    configure(kb, roots, **preset(embed=f"{server.base}#old"))
    run(kb, "index")
    server.dims, server.turn = dims, turn
    configure(kb, roots, **preset(embed=f"{server.base}#new"))
    status = run(kb, "status")
    assert status["embeddingBacklog"] == 3 and status["healthy"] is False and status["capabilities"]["vector"] is False
    (level, detail), = check_of(status, "vectors")
    assert level == "error" and "old (9 dimensions)" in detail and "gno embed" in detail
    error = failure(run, kb, "vsearch", query="kiln")
    assert error.code == "NOT_FOUND" and "old (9 dimensions)" in error.message and "new" in error.message and "gno embed" in error.hint
    found = run(kb, "query", query="kiln")
    assert found["meta"]["vectorsUsed"] is False and paths(found) == ["a.md"] and any("old (9" in n for n in found["meta"]["notes"])
    assert run(kb, "embed")["embedded"] == 3
    assert stored(kb) == {"old/9": 3, f"new/{dims}": 3} and paths(run(kb, "vsearch", query="clay"))[0] == "b.md"
    status = run(kb, "status")
    assert status["embeddingBacklog"] == 0 and status["healthy"] is True and check_of(status, "vectors")[0][0] == "warn"
    configure(kb, roots, **preset(embed=f"{server.base}#old"))
    assert run(kb, "status")["embeddingBacklog"] == 0, "going back costs nothing"
    configure(kb, roots, **preset(embed=f"{server.base}#new"))
    assert run(kb, "cleanup")["vectors"] == 3 and stored(kb) == {f"new/{dims}": 3} and not check_of(run(kb, "status"), "vectors")


def test_cleanup_keeps_vectors_while_a_model_cannot_be_found(kb, server, tmp_path):
    roots = {"notes": write(tmp_path / "n", NOTES)}
    configure(kb, roots, **preset(embed=f"{server.base}#m"))
    run(kb, "index")
    configure(kb, roots, **preset(embed="mistyped"))
    assert run(kb, "cleanup")["vectors"] == 0 and stored(kb) == {"m/9": 3}


def test_an_onnx_model_with_another_card_is_another_model(kb, tmp_path):
    roots = {"notes": write(tmp_path / "n", {"a.md": "A kiln."})}
    configure(kb, roots)
    run(kb, "index")
    configure(kb, roots, {"notes": {"embed": str(own_card(tmp_path / "mine", name="mine"))}})
    assert run(kb, "status")["embeddingBacklog"] == 1 and failure(run, kb, "vsearch", query="kiln").code == "NOT_FOUND"
    assert run(kb, "embed")["embedded"] == 1 and stored(kb) == {f"{SHIPPED}/384": 1, "mine/384": 1}
    assert paths(run(kb, "vsearch", query="kiln")) == ["a.md"]


def test_a_server_whose_model_was_changed_under_its_name_spoils_nothing(kb, server, tmp_path, engine):
    configure(kb, {"notes": write(tmp_path / "n", NOTES)}, **preset(embed=f"{server.base}#m"))
    run(kb, "index")
    server.dims = 17
    write(tmp_path / "n", {"d.md": "An oven."})
    for other in (kb, new_kb(tmp_path / "gno")):                       # the process that embedded, and one that starts now
        report = run(other, "index")
        assert report["embed"]["embedded"] == 0 and "vectors of 17 numbers, those in use have 9" in report["failed"]
        assert "9" in failure(run, other, "vsearch", query="kiln").message
        assert run(other, "query", query="oven")["meta"]["vectorsUsed"] is False and stored(other) == {"m/9": 3}
        if other is not kb:
            other.close()
    server.dims = 9
    assert run(kb, "embed")["embedded"] == 1 and paths(run(kb, "vsearch", query="oven"))[0] == "d.md"


def test_an_edited_note_waits_at_once_and_its_old_vector_never_answers(kb, server, tmp_path, engine):
    root = write(tmp_path / "n", {"a.md": "apples", "b.md": "lemons"})
    configure(kb, {"notes": root}, **preset(embed=f"{server.base}#m"))
    run(kb, "index")
    write(root, {"a.md": "engines"})
    run(kb, "sync")
    status = run(kb, "status")
    with sqlite3.connect(kb.db_path) as db:
        waiting, = db.execute("""SELECT count(*) FROM documents d JOIN chunks c ON c.mirror_id = d.mirror_id AND c.cut = d.cut
            WHERE d.active AND c.input_hash NOT IN (SELECT input_hash FROM vectors)""").fetchone()
    assert status["embeddingBacklog"] == waiting == 1
    assert paths(run(kb, "vsearch", query="apples")) == ["b.md"]
    assert run(kb, "embed")["embedded"] == 1
    assert run(kb, "vsearch", query="engines")["results"][0]["score"] == pytest.approx(1, abs=0.001)


# ---- reranking ----

def test_scores_of_a_server_stand_in_the_order_of_the_passages(kb, server):
    card = gno.find_card(kb, "rerank", f"{server.base}#r")
    assert gno.rerank_scores(kb, card, "q", ["abc", "a", "ab"]) == [0.03, 0.01, 0.02]
    assert server.asked[0][0] == "/v1/rerank" and server.asked[0][2] == {"model": "r", "query": "q", "documents": ["abc", "a", "ab"],
            "top_n": 3}
    server.script = [(200, {}, [{"index": 1, "score": -2.5}, {"index": 0, "score": 4}])]       # text-embeddings-inference
    assert gno.rerank_scores(kb, card, "q", ["a", "b"]) == [4, -2.5]
    assert gno.rerank_scores(kb, card, "q", []) == [] and len(server.asked) == 2


@pytest.mark.parametrize("reply",
        [[], {"results": [{"index": 0, "relevance_score": 1}]}, {"results": [{"index": 0, "score": 1}] * 2}, {}, None, 3,
                                   [{"index": 0, "score": 1}, {"index": 1}], [{"index": 0, "score": 1}, {"index": 1, "score": "x"}],
                                           ["a", "b"]])
def test_replies_that_are_no_scores_are_refused(kb, server, reply):
    server.script = [(200, {}, reply)]
    error = failure(gno.rerank_scores, kb, gno.find_card(kb, "rerank", f"{server.base}#r"), "q", ["a", "b"])
    assert error.code == "MODEL_NOT_FOUND" and "one score for each of 2 passages" in error.message


def field(number: int, value) -> bytes:
    "One field of a protocol buffer message: an int as a varint, bytes and text by length, a list as repeated fields."
    def varint(n):
        return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)
    if isinstance(value, list):
        return b"".join(field(number, v) for v in value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def node(kind: str, inputs: list[str], output: str, **integers: int) -> bytes:
    attributes = [field(1, k) + field(3, v) + field(20, 2) for k, v in integers.items()]
    return field(1, inputs) + field(2, output) + field(4, kind) + field(5, attributes)


def tensor(name: str, shape: list[int], kind: int, data: bytes) -> bytes:
    return field(1, shape) + field(2, kind) + field(8, name) + field(9, data)


def value_info(name: str, kind: int) -> bytes:
    dims = [field(1, field(2, d)) for d in ("batch", "n")]
    return field(1, name) + field(2, field(1, field(1, kind) + field(2, b"".join(dims))))


VOCABULARY = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "good": 4, "bad": 5, "meh": 6, "what": 7}
WORTH = [0, -1, 0, 0, 2, -3, 0.5, 100]         # what a word adds to the logit


def cross_encoder(folder: Path, types=True, labels=None, window=16, extra: str = "", processor="template") -> Path:
    "A model whose logit is the sum of its words' worth: the passage's words, or without token types those of both texts."
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if types else []), *([extra] if extra else [])]
    steps = [node("Gather", ["worth", "input_ids"], "each", axis=0), node("Cast", [names[2] if types else names[1]], "mask", to=1),
             node("Mul", ["each", "mask"], "kept"), node("ReduceSum", ["kept", "one"], "sum", keepdims=1)]
    steps += [node("Concat", ["sum", "zero"], "both", axis=1)] if labels else []
    constants = [tensor("worth", [8], 1, struct.pack("<8f", *WORTH)), tensor("one", [1], 7, struct.pack("<q", 1)),
                 tensor("zero", [1, 1], 1, struct.pack("<f", 0))]
    graph = field(1, steps) + field(2, "g") + field(5, constants) + field(11, [value_info(n, 7) for n in names]) + \
        field(12, value_info("both" if labels else "sum", 1))
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3),
            ("[CLS]", 2)) if processor == "bert" else processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.enable_truncation(4)             # published tokenizers often come set to cut and pad
    tokenizer.enable_padding(length=12)
    files = {"model": ("m.onnx", field(1, 8) + field(7, graph) + field(8, field(1, "") + field(2, 17))),
             "tokenizer": ("tokenizer.json", tokenizer.to_str().encode())}
    write(folder, dict(files.values()))
    card = {"name": "tiny", "role": "rerank", "maxTokens": window, "files": {k: {"path": n, "bytes": len(d), "sha256": gno.sha256(d)}
                                                                             for k, (n, d) in files.items()}}
    write(folder, {"card.json": json.dumps(card | ({"labels": labels} if labels else {}))})
    return folder


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


PASSAGES = ["good", "good bad", "", "meh " * 9 + "good", "meh " * 11 + "bad bad", "unknown"]


@pytest.mark.parametrize("options", [{}, {"processor": "bert"}, {"labels": ["relevant", "irrelevant"]}])
def test_a_cross_encoder_scores_pairs_and_cuts_the_passage_at_its_end(kb, tmp_path, options):
    configure(kb, {}, **preset(rerank=str(cross_encoder(tmp_path / "r", **options))))
    card = gno.collection_model(kb, "rerank")
    # 16 tokens: [CLS] what what [SEP] and the last [SEP] leave 11 for the passage
    logits = [2, -1, 0, 9 * 0.5 + 2, 11 * 0.5, -1]
    assert gno.rerank_scores(kb, card, "what what", PASSAGES) == pytest.approx([sigmoid(x) for x in logits], abs=1e-6)
    assert gno.rerank_scores(kb, card, "what", []) == []


def test_a_query_longer_than_the_window_leaves_half_of_it_to_the_passage(kb, tmp_path):
    card = gno.find_card(kb, "rerank", str(cross_encoder(tmp_path / "r")))
    assert gno.rerank_scores(kb, card, "what " * 50, ["meh " * 7 + "bad"]) == pytest.approx([sigmoid(3.5)], abs=1e-6)


def test_a_cross_encoder_is_given_only_what_it_asks_for_and_labels_are_read_from_the_card(kb, tmp_path):
    card = gno.find_card(kb, "rerank", str(cross_encoder(tmp_path / "r", types=False)))
    assert gno.rerank_scores(kb, card, "bad", ["good", "meh"]) == pytest.approx([sigmoid(-1), sigmoid(-2.5)], abs=1e-6)
    card = gno.find_card(kb, "rerank", str(cross_encoder(tmp_path / "l", labels=["irrelevant", "relevant"])))
    assert gno.rerank_scores(kb, card, "what", ["good"]) == pytest.approx([sigmoid(-2)], abs=1e-6)


@pytest.mark.parametrize("options, said", [({"extra": "pixels"}, "pixels"), ({"labels": ["yes", "no"]}, "yes, no"),
                                           ({"labels": ["relevant", "b", "c"]}, "gives 2 logits")])
def test_a_model_that_is_no_cross_encoder_is_named(kb, tmp_path, options, said):
    error = failure(gno.rerank_scores, kb, gno.find_card(kb, "rerank", str(cross_encoder(tmp_path / "r", **options))), "what", ["good"])
    assert error.code == "MODEL_NOT_FOUND" and "tiny" in error.message and said in error.message


def test_a_rerank_card_in_the_models_folder_is_found(kb, tmp_path):
    cross_encoder(tmp_path / "models" / "r")
    configure(kb, {}, dir=str(tmp_path / "models"))
    assert gno.collection_model(kb, "rerank").name == "tiny" and gno.collection_model(kb, "embed").name == SHIPPED


# ---- generation ----

def test_generate_asks_for_the_likeliest_answer(kb, server):
    card = gno.find_card(kb, "gen", f"{server.base}#g")
    messages = [{"role": "user", "content": "hello"}]
    assert gno.generate(kb, card, messages, max_tokens=7, timeout_s=5) == "an answer"
    schema = {"type": "object"}
    gno.generate(kb, card, messages, max_tokens=7, timeout_s=5, json_schema=schema)
    body = {"model": "g", "messages": messages, "max_tokens": 7, "temperature": 0}
    assert [(p, b) for p, _, b in server.asked] == [("/v1/chat/completions", body), ("/v1/chat/completions", body | {
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}})]


@pytest.mark.parametrize("reply",
        [{}, [], {"choices": []}, {"choices": [{"message": {"content": None}}]}, {"choices": [{"text": "x"}]}, None])
def test_replies_without_text_are_refused(kb, server, reply):
    server.script = [(200, {}, reply)]
    error = failure(gno.generate, kb, gno.find_card(kb, "gen", f"{server.base}#g"), [], max_tokens=7, timeout_s=5)
    assert error.code == "MODEL_NOT_FOUND" and "gave no text" in error.message


# ---- reranking and expansion in gno_query ----

NOTES = {"a.md": "# Kiln\n\nA kiln bakes clay and more clay.", "b.md": "# Clay\n\nClay, and a little more of it: good good good clay.",
         "c.md": "# Boats\n\nSails and ropes."}


def found(kb, text, **arguments):
    answer = run(kb, "query", query=text, **arguments)
    return [h["source"]["relPath"] for h in answer["results"]], answer["meta"]


def test_a_configured_reranker_orders_keyword_hits_too(kb, server, tmp_path):
    configure(kb, {"notes": write(tmp_path / "notes", NOTES)}, **preset(rerank=f"{server.base}#r"))
    run(kb, "sync")
    paths, meta = found(kb, "clay kiln", intent="pottery")
    (path, _, body), = server.asked
    assert path == "/v1/rerank" and body["query"] == "Intent: pottery\nQuery: clay kiln" and sorted(body["documents"]) == [
        "Clay\n# Clay\n\nClay, and a little more of it: good good good clay.", "Kiln\n# Kiln\n\nA kiln bakes clay and more clay."]
    assert sorted(paths) == ["a.md", "b.md"] and meta["reranked"] is True and meta["mode"] == "bm25_only"
    server.asked.clear()
    assert found(kb, "clay kiln", fast=True)[1]["reranked"] is False and not server.asked


def test_a_reranker_that_fails_costs_only_its_stage(kb, server, tmp_path, waits):
    configure(kb, {"notes": write(tmp_path / "notes", NOTES)}, **preset(rerank=f"{server.base}#r"))
    run(kb, "sync")
    server.script = [(400, {}, {"error": "no"})] * 3
    paths, meta = found(kb, "clay kiln")
    assert sorted(paths) == ["a.md", "b.md"] and meta["reranked"] is False and any("127.0.0.1" in note for note in meta["notes"])


def reply(**expansion) -> tuple:
    return 200, {}, {"choices": [{"message": {"content": "Here it is: " + json.dumps(expansion)}}]}


def test_a_language_model_expands_a_query(kb, server, tmp_path):
    configure(kb, {"notes": write(tmp_path / "notes", NOTES)}, **preset(gen=f"{server.base}#g"))
    run(kb, "sync")
    paths, meta = found(kb, "clay ropes")
    assert meta["expanded"] is False and not server.asked, "off unless asked for"
    server.script = [reply(lexicalQueries=["clay sails", "unrelated words"], vectorQueries=["what is clay"], hyde="Clay is earth.")]
    paths, meta = found(kb, "clay", expand=True)
    assert sorted(paths) == ["a.md", "b.md", "c.md"] and meta["expanded"] is True, "sails brought the boats in"
    (path, _, body), = server.asked
    assert path == "/v1/chat/completions" and "Query: clay" in body["messages"][0]["content"]
    assert found(kb, "clay", thorough=True)[0] == paths and len(server.asked) == 1, "equal questions are asked once"
    server.script = [reply(lexicalQueries=[], vectorQueries=[])]
    found(kb, "clay", expand=True, intent="pottery")
    assert "Intent: pottery" in server.asked[-1][2]["messages"][0]["content"]
    assert found(kb, "clay", expand=True, fast=True)[1]["expanded"] is False and len(server.asked) == 2
    assert found(kb, "clay", expand=True, queryModes=[{"mode": "term", "text": "kiln"}])[1]["expanded"] is True and len(server.asked) == 2


@pytest.mark.parametrize("script", [[(500, {}, {"error": "no"})] * 3, [reply(), reply()], [(200, {}, {"choices": [{"message": {"content": "no JSON"}}]})],
                                    [(200, {}, {"choices": [{"message": {"content": '{"lexicalQueries": 5}'}}]})]])
def test_a_language_model_that_fails_costs_only_the_expansion(kb, server, tmp_path, waits, script):
    configure(kb, {"notes": write(tmp_path / "notes", NOTES)}, **preset(expand=f"{server.base}#g"))
    run(kb, "sync")
    server.script = list(script)
    paths, meta = found(kb, "clay", expand=True)
    assert sorted(paths) == ["a.md", "b.md"] and meta["expanded"] is False


def test_expanding_without_a_language_model_says_what_is_missing(kb, tmp_path):
    configure(kb, {"notes": write(tmp_path / "notes", NOTES)})
    run(kb, "sync")
    meta = found(kb, "clay", expand=True)[1]
    assert meta["expanded"] is False and any("no language model is configured" in note for note in meta["notes"])


@pytest.mark.parametrize("query, expansion, kept", [
    # names, numbers and phrases of the query come first; what shares no word with it goes
    ("how does Kiln v2 fire clay", {"lexicalQueries": ["fire clay slowly", "boats"], "vectorQueries": ["how clay is fired"]},
     [("term", "Kiln v2"), ("term", "fire clay slowly"), ("intent", "how clay is fired")]),
    ("clay", {"lexicalQueries": ["Clay", " clay pot "], "vectorQueries": [], "hyde": "nothing of it"}, [("term", "clay pot")]),
    ("clay", {"lexicalQueries": [7, None, "clay a"], "vectorQueries": None, "hyde": "clay is wet"}, [("term", "clay a"), ("hyde", "clay is wet")]),
    ("clay", {"lexicalQueries": [f"clay {n}" for n in range(9)], "vectorQueries": []}, [("term", f"clay {n}") for n in range(5)]),
    ('"wet clay" -Boats oven', {"lexicalQueries": [], "vectorQueries": []}, [("term", '"wet clay"')])])
def test_an_expansion_is_cleaned(query, expansion, kept):
    assert list(gno.guarded(query, json.dumps(expansion))) == kept
