"""MCP over stdio: messages as a table of pairs, then a real `gno mcp` process over real pipes."""
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import jsonschema
import pytest
from conftest import ROOT, add, cli, environment, new_kb, run, write

import gno

os.environ.pop("PYTHONUNBUFFERED", None)                             # commands buffer their output, as they do for everybody

READ = {"gno_" + name for name in (
    "context", "context_verify", "ask", "search", "vsearch", "query", "query_diagnose", "get", "multi_get", "status",
    "trace_list", "trace_show", "list_tags", "links", "backlinks", "similar", "graph", "graph_query", "graph_neighbors",
    "graph_path", "job_status", "list_jobs")}
WRITE = {"gno_" + name for name in (
    "capture", "add_collection", "sync", "embed", "index", "remove_collection", "clear_collection_embeddings", "create_folder",
    "rename_note", "move_note", "duplicate_note", "trace_label", "trace_export", "trace_delete", "trace_purge")}
BASIC = {"gno_search", "gno_vsearch", "gno_query", "gno_get", "gno_multi_get", "gno_status", "gno_list_tags", "gno_job_status",
    "gno_list_jobs"}
BASIC_WRITE = {"gno_add_collection", "gno_sync", "gno_embed", "gno_index", "gno_remove_collection"}

WORK = {
    "doc.md": "# Document Title\n\nContent here about the quorum.\n",
    "contracts/nda.md": "# Contract\n\nThis Non-Disclosure Agreement...\n",
    "My Documents/file name.md": "# Spaces\n\nA quorum of spaces.\n",
    "größe.md": "# Größe\n\nDie Übergröße zählt, 東京都 auch.\n",
}
NOTES = {
    "one.md": "---\ntags: [work, personal]\n---\n# One\n\nOne quorum.\n",
    "two.md": "---\ntags: [work]\n---\n# Two\n\nNothing at all.\n",
    "deep/three.md": "---\ntags: [work/project]\n---\n# Three\n\nA workshop.\n",
    "endless.md": "x" * 20000 + "\n",
}


def docid(text: str) -> str:
    return "#" + hashlib.sha256(text.encode()).hexdigest()[:8]


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    "A knowledge base of two embedded collections, for reading only."
    base = tmp_path_factory.mktemp("sample")
    kb = new_kb(base)
    add(kb, write(base / "files" / "work", WORK), "work")
    add(kb, write(base / "files" / "notes", NOTES), "notes")
    run(kb, "embed")
    kb.close()
    return base


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    "1,100 notes, keyword index only, for reading."
    base = tmp_path_factory.mktemp("many")
    kb = new_kb(base)
    add(kb, write(base / "files", {f"{n % 7}/note {n:04}.md": f"# Note {n}\n\n" + f"lorem{n} ipsum dolor\n" * 40 for n in range(1100)}),
        "big")
    kb.close()
    return base


@pytest.fixture(scope="module")
def reader(sample):
    "An initialized session on the sample, without a process."
    kb = new_kb(sample)
    kb.writable = False
    session = gno.Session(kb)
    ask(session, "initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}})
    yield session
    kb.close()


def ask(session, method, params=..., id=1):
    "The reply to one request."
    return gno.mcp_handle(session, {"jsonrpc": "2.0", "id": id, "method": method} | ({} if params is ... else {"params": params}))


def tool(session, name, **arguments):
    "The result of a tool call."
    reply = ask(session, "tools/call", {"name": name, "arguments": arguments})
    assert "result" in reply, reply
    return reply["result"]


def strict(line: bytes) -> dict:
    "A line of stdout as the strictest client reads it: UTF-8, JSON without NaN, no lone surrogates, one object."
    def refuse(name):
        raise ValueError(name)
    message = json.loads(line.decode("utf-8"), parse_constant=refuse)
    json.dumps(message, ensure_ascii=False).encode("utf-8")
    assert message["jsonrpc"] == "2.0"
    return message


def talk(base, data: bytes, *arguments, env=None, timeout=30):
    "Feed a server process these bytes and end its input -> (its messages, exit code, stderr)."
    base.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([sys.executable, str(ROOT / "gno.py"), "mcp", *arguments], input=data, capture_output=True, cwd=base,
                          timeout=timeout, env=environment(base, **(env or {})))
    return [strict(line) for line in done.stdout.splitlines()], done.returncode, done.stderr


def lines(*messages) -> bytes:
    return b"".join(json.dumps({"jsonrpc": "2.0"} | m).encode() + b"\n" for m in messages)


HELLO = lines({"id": "hello", "method": "initialize", "params": {"protocolVersion": "2025-11-25", "capabilities": {},
    "clientInfo": {"name": "t", "version": "1"}}},
              {"method": "notifications/initialized"})


def files_below(base) -> set[str]:
    "Every file and folder below base."
    return {os.path.relpath(os.path.join(d, n), base) for d, ds, fs in os.walk(base) for n in ds + fs}


# ---- messages: no process, no I/O ----

@pytest.mark.parametrize("asked, answered", [
    ("2025-11-25", "2025-11-25"), ("2025-06-18", "2025-06-18"), ("2025-03-26", "2025-03-26"), ("2024-11-05", "2024-11-05"),
    ("2026-07-28", "2025-11-25"), ("1.0", "2025-11-25"), ("", "2025-11-25"), (None, "2025-11-25"), (5, "2025-11-25"), ([], "2025-11-25"),
    ({}, "2025-11-25"), (..., "2025-11-25"),
])
def test_initialize_negotiates_the_version(kb, asked, answered):
    params = {"capabilities": {}, "clientInfo": {"name": "t", "version": "1"}} | ({} if asked is ... else {"protocolVersion": asked})
    result = ask(gno.Session(kb), "initialize", params)["result"]
    assert result["protocolVersion"] == answered
    assert result["serverInfo"]["name"] == "gno" and result["serverInfo"]["version"] == "1.0.0"
    assert result["capabilities"] == {"tools": {"listChanged": False}, "resources": {"subscribe": False, "listChanged": False}}
    assert 0 < len(result["instructions"]) < 1500


def test_before_initialize_only_ping_and_the_probe_of_later_revisions_get_an_answer(kb):
    session = gno.Session(kb)
    assert ask(session, "ping")["result"] == {}
    assert ask(session, "server/discover", {"_meta": {}})["error"]["code"] == -32601
    for method in ("tools/list", "tools/call", "resources/list", "resources/read", "prompts/list", "nonsense"):
        assert "error" in ask(session, method, {"name": "gno_status"}), method
    for params in ([], "x", 5):
        assert ask(session, "initialize", params)["error"]["code"] == -32602
    assert ask(session, "initialize", {"protocolVersion": "2025-11-25"})["result"]["protocolVersion"] == "2025-11-25"
    assert ask(session, "tools/list")["result"]["tools"]


def test_initialize_without_params_and_a_second_one(kb):
    session = gno.Session(kb)
    assert ask(session, "initialize")["result"]["protocolVersion"] == "2025-11-25"
    assert ask(session, "initialize", {"protocolVersion": "2025-11-25"})["error"]["code"] == -32600
    assert ask(session, "ping")["result"] == {} and "result" in ask(session, "tools/list")


@pytest.mark.parametrize("id", [0, 1, -1, 2 ** 53 + 1, 10 ** 30, "", "0", "ä 東京", "a/b", "x" * 1000])
def test_ids_come_back_as_they_were_sent(reader, id):
    for method in ("ping", "nonsense", "tools/list", "tools/call"):
        reply = ask(reader, method, id=id)
        assert reply["id"] == id and type(reply["id"]) is type(id) and reply["jsonrpc"] == "2.0"
        assert ("result" in reply) != ("error" in reply)


@pytest.mark.parametrize("id", [None, True, False, 1.5, [], {}, [1]])
def test_ids_that_are_none(reader, id):
    reply = ask(reader, "ping", id=id)
    assert reply["error"]["code"] == -32600 and reply["id"] is None


@pytest.mark.parametrize("message", [
    {"method": "notifications/initialized"}, {"method": "notifications/cancelled"}, {"method": "notifications/cancelled", "params": []},
    {"method": "notifications/cancelled", "params": {"requestId": 99}}, {"method": "notifications/cancelled", "params": {"requestId": [1]}},
    {"method": "notifications/cancelled", "params": {"requestId": {}}},
    {"method": "notifications/cancelled", "params": {"requestId": None}},
    {"method": "notifications/cancelled", "params": {"requestId": "x", "reason": 5}},
    {"method": "notifications/unknown", "params": {"a": 1}},
    {"method": "ping"}, {"method": "tools/call", "params": {"name": "gno_status"}}, {"method": "tools/call"}, {"method": "initialize"},
    {"method": "nonsense", "params": "x"}, {"method": "resources/read", "params": 5},
    {"id": 1, "result": {}}, {"id": "x", "result": None}, {"id": 1, "error": {"code": -32601, "message": "no"}}, {"id": 0, "result": 5},
])
def test_notifications_and_responses_are_never_answered(reader, message):
    assert gno.mcp_handle(reader, {"jsonrpc": "2.0"} | message) is None


@pytest.mark.parametrize("wanted", [True, 1.0, "1", None, [1], {"id": 1}])
def test_a_malformed_cancellation_cancels_nothing(kb, wanted):
    session = gno.Session(kb)
    session.running[1] = gno.Progress()
    gno.mcp_handle(session, {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": wanted}})
    assert not session.running[1].cancelled.is_set()
    gno.mcp_handle(session, {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}})
    assert session.running[1].cancelled.is_set()


PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}


@pytest.mark.parametrize("message", [
    [], [PING], [PING, PING], None, True, 5, 1.5, "ping", {}, {"jsonrpc": "2.0"}, {"id": 1, "method": "ping"}, PING | {"jsonrpc": "1.0"},
    PING | {"jsonrpc": 2.0}, PING | {"jsonrpc": None}, PING | {"method": 5}, PING | {"method": None}, PING | {"method": ["ping"]},
    {"jsonrpc": "2.0", "id": 1}, {"jsonrpc": "2.0", "id": 1, "params": {}},
])
def test_invalid_requests(reader, message):
    reply = gno.mcp_handle(reader, message)
    assert reply["error"]["code"] == -32600 and reply["id"] in (1, None) and "result" not in reply


@pytest.mark.parametrize("method", [
    "nonsense", "", "Tools/List", "tools/list/", "server/discover", "logging/setLevel", "completion/complete", "resources/subscribe",
    "resources/unsubscribe", "prompts/get", "tasks/list", "tasks/get", "roots/list", "sampling/createMessage", "elicitation/create",
    "notifications/initialized", "__init__", "x" * 5000, "\ud800",
])
def test_unknown_and_undeclared_methods(reader, method):
    error = ask(reader, method, {"level": "info"})["error"]
    assert error["code"] == -32601 and len(error["message"]) < 200 and "\n" not in error["message"]


@pytest.mark.parametrize("method, params, code", [
    ("tools/call", ..., -32602), ("tools/call", {}, -32602), ("tools/call", None, -32602), ("tools/call", [], -32602),
    ("tools/call", "gno_status", -32602),
    ("tools/call", {"name": 5}, -32602), ("tools/call", {"name": None}, -32602), ("tools/call", {"name": ["gno_status"]}, -32602),
    ("tools/call", {"name": "gno_nope", "arguments": {}}, -32602), ("tools/call", {"name": "search", "arguments": {"query": "x"}}, -32602),
    ("tools/call", {"name": "gno_"}, -32602), ("tools/call", {"name": ""}, -32602), ("tools/call", {"name": "gno_doctor"}, -32602),
    ("tools/call", {"name": "gno_setup", "arguments": {"path": ["/"]}}, -32602),
    ("tools/call", {"name": "gno_status", "arguments": []}, -32602), ("tools/call", {"name": "gno_status", "arguments": "x"}, -32602),
    ("tools/call", {"name": "gno_status", "arguments": 5}, -32602), ("tools/call", {"name": "gno_sync", "arguments": {}}, -32602),
    ("tools/list", [], -32602), ("ping", [], -32602), ("resources/list", "x", -32602),
    ("resources/read", ..., -32602), ("resources/read", {}, -32602), ("resources/read", {"uri": 5}, -32602),
    ("resources/read", {"uri": None}, -32602),
    ("resources/read", {"uri": "gno://notes/none.md"}, -32002), ("resources/read", {"uri": "gno://nowhere/one.md"}, -32002),
    ("resources/read", {"uri": "gno://notes/one.md?index=nowhere"}, -32002),
    ("resources/read", {"uri": "gno://tags?collection=nowhere"}, -32002),
])
def test_bad_params_have_codes(reader, method, params, code):
    reply = ask(reader, method, params)
    assert reply["error"]["code"] == code and "\n" not in reply["error"]["message"] and "Traceback" not in reply["error"]["message"]
    if code == -32002:
        assert reply["error"]["data"]["uri"] == params["uri"]


@pytest.mark.parametrize("uri", [
    "", "notes/one.md", "file:///etc/passwd", "http://localhost/", "gno:/notes/one.md", "gno://", "gno://notes", "gno://notes/",
    "gno:///one.md",
    "gno://notes/../notes/one.md", "gno://notes/%2e%2e/%2e%2e/etc/passwd", "gno://notes//etc/passwd", "gno://notes/one.md%00",
    "gno://notes/a%2Fb",
    "gno://notes/%zz", "gno://notes/%c0%ae%c0%ae/x", "gno://notes/one.md?index=../../x", "gno://notes/one.md?index=",
    "gno://tags?prefix=%zz",
    "gno://notes/" + "a/" * 5000, "\ud800",
])
def test_uris_that_lead_nowhere_are_errors(reader, uri):
    error = ask(reader, "resources/read", {"uri": uri})["error"]
    assert error["code"] in (-32002, -32602) and len(error["message"]) < 400


@pytest.mark.parametrize("method", ["ping", "tools/list", "resources/list", "resources/templates/list", "prompts/list"])
@pytest.mark.parametrize("params", [..., None, {}, {"unknown": 1}, {"_meta": {"progressToken": 0, "example.com/x": []}}, {"_meta": None},
    {"task": {"ttl": 5}}])
def test_params_may_be_absent_null_or_hold_more(reader, method, params):
    assert isinstance(ask(reader, method, params)["result"], dict)


def test_lists(reader):
    assert ask(reader, "ping")["result"] == {}
    assert ask(reader, "prompts/list")["result"] == {"prompts": []}
    templates = ask(reader, "resources/templates/list")["result"]["resourceTemplates"]
    assert {"gno://tags{?collection,prefix}", "gno://{collection}/{+path}"} <= {t["uriTemplate"] for t in templates}
    assert all(t["name"] and t["mimeType"] for t in templates)
    listed = ask(reader, "resources/list")["result"]
    assert "nextCursor" not in listed
    by_uri = {r["uri"]: r for r in listed["resources"]}
    assert set(by_uri) == {"gno://tags", "gno://work/doc.md", "gno://work/contracts/nda.md", "gno://work/My%20Documents/file%20name.md",
                           "gno://work/gr%C3%B6%C3%9Fe.md", "gno://notes/one.md", "gno://notes/two.md", "gno://notes/deep/three.md",
                           "gno://notes/endless.md"}
    assert by_uri["gno://tags"]["name"] == "tags" and by_uri["gno://tags"]["mimeType"] == "application/json"
    nda = by_uri["gno://work/contracts/nda.md"]
    assert nda["name"] == "contracts/nda.md" and nda["mimeType"] == "text/markdown" and nda["size"] == len(WORK["contracts/nda.md"])


@pytest.mark.parametrize("cursor", [
    "", "x", "zz", "[]", "5b5d", 5, 0, True, [], {}, b'{"a":1}'.hex(), b'["a"]'.hex(), b'["a","b","c"]'.hex(), b'[1,{}]'.hex(),
    b'[["a"],"b"]'.hex(),
    b"\xff".hex(), (b"[" * 3000).hex(), "ä",
])
def test_invalid_cursors(reader, cursor):
    assert ask(reader, "resources/list", {"cursor": cursor})["error"]["code"] == -32602


# ---- tools ----

def test_every_tool_of_the_list_is_one_of_the_specification(reader, kb):
    names = [t["name"] for t in ask(reader, "tools/list")["result"]["tools"]]
    assert len(names) == len(set(names)) and BASIC <= set(names) <= READ
    session = gno.Session(kb)                                        # writable
    ask(session, "initialize")
    entries = ask(session, "tools/list")["result"]["tools"]
    assert entries == ask(session, "tools/list")["result"]["tools"]
    names = {t["name"] for t in entries}
    assert BASIC | BASIC_WRITE <= names <= READ | WRITE
    for t in entries:
        hints = t["annotations"]
        assert hints["readOnlyHint"] == (t["name"] in READ) and hints["openWorldHint"] is False
        assert {"destructiveHint", "idempotentHint"} <= set(hints)
        assert t["inputSchema"]["type"] == "object" and t["outputSchema"]["type"] == "object" and t["title"] and t["description"]


def test_resource_shape_is_the_specifications(reader, sample):
    uri = "gno://work/contracts/nda.md"
    content, = ask(reader, "resources/read", {"uri": uri})["result"]["contents"]
    assert content["uri"] == uri and content["mimeType"] == "text/markdown"
    head, _, body = content["text"].partition("-->\n")
    assert head.split("\n")[:4] == [f"<!-- {uri}", f"     docid: {docid(WORK['contracts/nda.md'])}",
                                    f"     source: {sample}/files/work/contracts/nda.md", "     mime: text/markdown"]
    assert all(line.startswith("     language: ") for line in head.split("\n")[4:-1])
    assert [line.rstrip() for line in body.rstrip("\n").split("\n")] == ["", "1: # Contract", "2:", "3: This Non-Disclosure Agreement..."]


@pytest.mark.parametrize("uri, first", [
    ("gno://work/My%20Documents/file%20name.md", "1: # Spaces"), ("gno://work/My Documents/file name.md", "1: # Spaces"),
    ("gno://work/gr%C3%B6%C3%9Fe.md", "1: # Größe"), ("gno://work/gr%c3%b6%c3%9fe.md", "1: # Größe"), ("gno://work/größe.md", "1: # Größe"),
    ("gno://work/gro\u0308ße.md", "1: # Größe"), ("gno://WORK/doc.md", "1: # Document Title"), ("GNO://work/doc.md", "1: # Document Title"),
    ("gno://work/doc.md?index=default", "1: # Document Title"),
])
def test_resources_are_found_in_every_spelling_of_their_uri(reader, uri, first):
    content, = ask(reader, "resources/read", {"uri": uri})["result"]["contents"]
    assert content["uri"] == uri and f"-->\n\n{first}\n" in content["text"]


@pytest.mark.parametrize("query, tags, collection", [
    ("", [("work", 2), ("personal", 1), ("work/project", 1)], None),
    ("?", [("work", 2), ("personal", 1), ("work/project", 1)], None),
    ("?collection=notes&prefix=work/", [("work", 2), ("work/project", 1)], "notes"),
    ("?collection=NOTES", [("work", 2), ("personal", 1), ("work/project", 1)], "notes"),
    ("?prefix=work%2Fproject", [("work/project", 1)], None), ("?collection=work", [], "work"), ("?prefix=works", [], None),
])
def test_tags_resource(reader, query, tags, collection):
    content, = ask(reader, "resources/read", {"uri": "gno://tags" + query})["result"]["contents"]
    assert content["uri"] == "gno://tags" + query and content["mimeType"] == "application/json"
    body = json.loads(content["text"])
    assert body["tags"] == [{"tag": t, "count": n} for t, n in tags]
    assert body["meta"]["collection"] == collection and body["meta"]["totalTags"] == len(tags)
    assert body["meta"]["prefix"] is None if "prefix" not in query else body["meta"]["prefix"].startswith("work")


def test_a_source_path_is_shown_as_it_is_unless_it_would_end_the_comment(kb, tmp_path):
    root = write(tmp_path / "old--new", {"a--b.md": "text\n", "c-->d.md": "text two\n"})
    add(kb, root, "n")
    session = gno.Session(kb)
    ask(session, "initialize")
    text = ask(session, "resources/read", {"uri": "gno://n/a--b.md"})["result"]["contents"][0]["text"]
    assert f"     source: {root}/a--b.md\n" in text
    text = ask(session, "resources/read", {"uri": "gno://n/c--%3Ed.md"})["result"]["contents"][0]["text"]
    assert text.index("-->") == text.index("-->\n\n1: text two")


@pytest.mark.parametrize("name, arguments, code, said", [
    ("gno_search", {}, "INVALID_INPUT", "query"), ("gno_search", {"query": ""}, "INVALID_INPUT", "query"),
    ("gno_search", {"query": None}, "INVALID_INPUT", "query"),
    ("gno_search", {"query": 5}, "INVALID_INPUT", "query"), ("gno_search", {"query": "  "}, "INVALID_INPUT", ""),
    ("gno_search", {"query": "-foo"}, "INVALID_INPUT", ""),
    ("gno_search", {"query": "x", "limit": 0}, "INVALID_INPUT", "limit"),
    ("gno_search", {"query": "x", "limit": 101}, "INVALID_INPUT", "limit"),
    ("gno_search", {"query": "x", "limit": "5"}, "INVALID_INPUT", "limit"),
    ("gno_search", {"query": "x", "limit": 10 ** 4000}, "INVALID_INPUT", "limit"),
    ("gno_search", {"query": "x", "limit": float("inf")}, "INVALID_INPUT", "limit"),
    ("gno_search", {"query": "x", "limit": True}, "INVALID_INPUT", "limit"),
    ("gno_search", {"query": "x", "minScore": 1.5}, "INVALID_INPUT", "minScore"),
    ("gno_search", {"query": "x", "minScore": -0.1}, "INVALID_INPUT", "minScore"),
    ("gno_search", {"query": "x", "collection": "nowhere"}, "NOT_FOUND", "nowhere"),
    ("gno_search", {"query": "x", "since": "garbage"}, "INVALID_INPUT", "garbage"),
    ("gno_search", {"query": "x", "tagsAll": "work"}, "INVALID_INPUT", "tagsAll"),
    ("gno_search", {"query": "x", "tagsAll": [1]}, "INVALID_INPUT", "tagsAll"),
    ("gno_search", {"query": "x", "tagsAll": "[" * 100_000}, "INVALID_INPUT", "tagsAll"),
    ("gno_search", {"query": "x", "tagsAll": "[NaN]"}, "INVALID_INPUT", "tagsAll"),
    ("gno_search", {"query": "x", "tagsAll": f"[{'9' * 5000}]"}, "INVALID_INPUT", "tagsAll"),
    ("gno_get", {}, "INVALID_INPUT", "ref"), ("gno_get", {"ref": "doc.md"}, "INVALID_INPUT", "doc.md"),
    ("gno_get", {"ref": "#xyz"}, "INVALID_INPUT", "#xyz"),
    ("gno_get", {"ref": "#12345678"}, "NOT_FOUND", "Document not found: #12345678"),
    ("gno_get", {"ref": "notes/none.md"}, "NOT_FOUND", "Document not found: notes/none.md"),
    ("gno_get", {"ref": "notes/one.md", "fromLine": 0}, "INVALID_INPUT", "fromLine"),
    ("gno_get", {"ref": "notes/one.md", "lineCount": -1}, "INVALID_INPUT", "lineCount"),
    ("gno_get", {"ref": "notes/one.md", "fromLine": 1.5}, "INVALID_INPUT", "fromLine"),
    ("gno_get", {"ref": "notes/one.md", "lineNumbers": "no"}, "INVALID_INPUT", "lineNumbers"),
    ("gno_multi_get", {}, "INVALID_INPUT", "refs"), ("gno_multi_get", {"refs": ["a/b"], "pattern": "*"}, "INVALID_INPUT", "refs"),
    ("gno_multi_get", {"refs": []}, "INVALID_INPUT", "refs"), ("gno_multi_get", {"pattern": "*", "maxBytes": 0}, "INVALID_INPUT",
        "maxBytes"),
    ("gno_list_tags", {"collection": "nowhere"}, "NOT_FOUND", "nowhere"), ("gno_list_tags", {"prefix": "a b!"}, "INVALID_INPUT", ""),
    ("gno_job_status", {}, "INVALID_INPUT", "jobId"), ("gno_job_status", {"jobId": "0"}, "NOT_FOUND", "0"),
    ("gno_list_jobs", {"limit": 0}, "INVALID_INPUT", "limit"),
])
def test_tool_errors_are_results_with_a_code(reader, name, arguments, code, said):
    result = tool(reader, name, **arguments)
    assert result["isError"] is True and result["structuredContent"]["error"] == code, result
    text = result["content"][0]["text"]
    assert text.startswith("Error: ") and said in text and len(text) < 1000
    assert text.split("\n")[0] == "Error: " + result["structuredContent"]["message"]


@pytest.mark.parametrize("since, until, found", [("0001-01-01", None, 3), (None, "9999-12-31", 3),
    ("0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", 3), (None, "0001-01-01", 0), ("9999-12-31", None, 0)])
@pytest.mark.parametrize("name", ["gno_search", "gno_query"])
def test_dates_at_the_ends_of_the_calendar(reader, name, since, until, found):
    hits = tool(reader, name, query="quorum", since=since, until=until, limit=3)
    assert not hits.get("isError") and len(hits["structuredContent"]["results"]) == found, hits


def test_arguments_may_be_absent_null_more_or_json_text(reader):
    for arguments in ({}, {"arguments": None}, {"arguments": {}}, {"arguments": {"unknown": 1}},
        {"arguments": {}, "task": {"ttl": 1}, "_meta": None}):
        assert "isError" not in ask(reader, "tools/call", {"name": "gno_status"} | arguments)["result"], arguments
    found = tool(reader, "gno_search", query="quorum", tagsAll='["work", "personal"]', limit=5.0, lang=None)
    assert [h["uri"] for h in found["structuredContent"]["results"]] == ["gno://notes/one.md"]



@pytest.mark.parametrize("name, arguments, beginning", [
    ("gno_search", {"query": "quorum"}, r'Found 3 results for "quorum"\n\n1\. #[0-9a-f]{8} - \S.*\.md \([01]\.\d\d\)\n'),
    ("gno_search", {"query": "personal", "collection": "notes", "tagsAny": ["personal"]},
        r'Found 1 result for "personal"\n\n1\. #[0-9a-f]{8} - one\.md \(1\.00\)'),
    ("gno_search", {"query": "zebra"}, r'No results found for "zebra"'),
    ("gno_get", {"ref": "work/doc.md"}, r"1: # Document Title\n2: \n3: Content here about the quorum\.$"),
    ("gno_get", {"ref": "work/doc.md", "lineNumbers": False}, r"# Document Title\n\nContent here about the quorum\.$"),
    ("gno_get", {"ref": "work/doc.md:3"}, r"3: Content here"),
    ("gno_multi_get", {"refs": ["work/doc.md", "work/contracts/nda.md", "notes/one.md", "notes/endless.md"]},
        r"Retrieved 3 documents \(1 skipped due to size limit\)"),
    ("gno_multi_get", {"pattern": "work/**"}, r"Retrieved 4 documents(?! \()"),
    ("gno_status", {}, r"Index: default\nCollections: 2\nDocuments: 8\nChunks: \d+\nEmbedding backlog: 0(\n|$)"),
    ("gno_list_tags", {}, r"Found 3 tags:\n\n  work \(2\)\n  personal \(1\)\n  work/project \(1\)"),
    ("gno_list_tags", {"collection": "work"}, r"No tags found"),
])
def test_text_begins_as_the_specifications_samples(reader, name, arguments, beginning):
    text = tool(reader, name, **arguments)["content"][0]["text"]
    assert re.match(beginning, text), text


@pytest.mark.parametrize("text, query", [
    ("Die Übergröße", "übergröße"), ("Die Übergröße", "ÜBERGRÖßE"), ("Die U\u0308bergro\u0308ße", "Übergröße"), ("Σωκράτης σοφός", "σοφός"),
    ("Σωκράτης σοφός", "σωκράτης"), ("ΟΔΥΣΣΕΥΣ", "ΟΔΥΣΣΕΥΣ"), ("ﬁrst ligature", "ﬁrst"), ("İstanbul", "İstanbul"), ("DŽ ǅ ǆ", "ǅ"),
    ("naïve CAFÉ", "naive café"),
])
def test_a_word_is_found_as_it_is_written(kb, tmp_path, text, query):
    add(kb, write(tmp_path / "n", {"a.md": f"# Title\n\n{text} here\n"}), "n")
    assert [h["line"] for h in run(kb, "search", query=query)["results"]] == [3]


def test_structured_content_of_the_samples(reader, sample):
    hits = tool(reader, "gno_search", query="quorum")["structuredContent"]
    assert {h["docid"] for h in hits["results"]} == {docid(WORK["doc.md"]), docid(WORK["My Documents/file name.md"]),
        docid(NOTES["one.md"])}
    assert hits["meta"]["query"] == "quorum" and hits["meta"]["mode"] == "bm25" and hits["meta"]["totalResults"] == 3
    one = next(h for h in hits["results"] if h["uri"] == "gno://notes/one.md")
    assert one["line"] == 6 and one["source"]["absPath"] == f"{sample}/files/notes/one.md" and one["source"]["relPath"] == "one.md"
    got = tool(reader, "gno_get", ref="work/doc.md")["structuredContent"]
    assert got["content"] == WORK["doc.md"] and got["totalLines"] == 3 and got["returnedLines"] == {"start": 1, "end": 3}
    assert got["docid"] == docid(WORK["doc.md"]) and got["uri"] == "gno://work/doc.md" and got["title"] == "Document Title"
    assert {k: got["capabilities"][k] for k in ("editable", "tagsEditable", "tagsWriteback", "canCreateEditableCopy", "mode")} == {
        "editable": True, "tagsEditable": True, "tagsWriteback": True, "canCreateEditableCopy": False, "mode": "editable"}
    status = tool(reader, "gno_status")["structuredContent"]
    assert status["indexName"] == "default" and status["totalDocuments"] == 8 and status["embeddingBacklog"] == 0
    assert status["healthy"] is True
    assert {c["name"]: c["documentCount"] for c in status["collections"]} == {"work": 4, "notes": 4}
    assert all(c["chunkCount"] == c["embeddedCount"] > 0 for c in status["collections"])
    tags = tool(reader, "gno_list_tags")["structuredContent"]
    assert tags["meta"] == {"collection": None, "prefix": None, "totalTags": 3}


CALLS = {
    "gno_search": [{"query": "quorum"}, {"query": "zebra"}, {"query": "latest quorum 東京", "limit": 1, "tagsAny": ["work"],
        "since": "2000-01-01", "exclude": ["x"]}],
    "gno_vsearch": [{"query": "a legal agreement"}], "gno_query": [{"query": "which agreement is confidential"},
        {"query": "quorum", "fast": True, "lang": "en"}],
    "gno_get": [{"ref": "work/doc.md"}, {"ref": "notes/one.md", "fromLine": 99}, {"ref": docid(NOTES["endless.md"])}],
    "gno_multi_get": [{"pattern": "**"}, {"refs": ["work/doc.md", "notes/none.md", "odd", "#000000"], "maxBytes": 20}],
    "gno_status": [{}], "gno_list_tags": [{}, {"collection": "notes", "prefix": "work"}], "gno_list_jobs": [{}],
}


@pytest.mark.parametrize("name", CALLS)
def test_results_satisfy_their_own_output_schema(reader, name):
    schema = next(t["outputSchema"] for t in ask(reader, "tools/list")["result"]["tools"] if t["name"] == name)
    for arguments in CALLS[name]:
        result = tool(reader, name, **arguments)
        assert not result.get("isError"), result
        jsonschema.Draft202012Validator(schema).validate(result["structuredContent"])
        assert result["content"] and all(c["type"] == "text" and c["text"] for c in result["content"])


def test_job_tools_satisfy_their_schemas_and_samples(tmp_path, client):
    root = write(tmp_path / "work", WORK | {"more.txt": "more\n"})
    c = client("--enable-write")
    schemas = {t["name"]: jsonschema.Draft202012Validator(t["outputSchema"]) for t in c.request("tools/list")["result"]["tools"]}

    def check(name, beginning="", **arguments):
        result = c.call(name, **arguments)
        assert not result.get("isError"), result
        schemas[name].validate(result["structuredContent"])
        text = result["content"][0]["text"]
        assert re.match(beginning, text), text
        job = result["structuredContent"].get("jobId")
        while job:
            state = c.call("gno_job_status", jobId=job)["structuredContent"]
            schemas["gno_job_status"].validate(state)
            if state["status"] != "running":
                assert state["status"] == "completed" and state["completedAt"] >= state["startedAt"], state
                break
            time.sleep(0.01)
        return result["structuredContent"]
    uuid = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    added = check("gno_add_collection", rf"Job: {uuid}\nStatus: started", path=str(root))
    assert added["collection"] == "work" and added["status"] == "started"
    assert [h["uri"] for h in check("gno_search", query="agreement")["results"]] == ["gno://work/contracts/nda.md"]
    assert check("gno_sync", rf"Job: {uuid}\nStatus: started", collection="WORK") | {"jobId": ""} == {
        "jobId": "", "status": "started", "collections": ["work"], "options": {"gitPull": False, "runUpdateCmd": False}}
    assert check("gno_embed", rf"Job: {uuid}\nStatus: started\nModel: \S+")["status"] == "started"
    assert check("gno_index", rf"Job: {uuid}\nStatus: started\nCollections: work\nPhases: sync → embed") | {"jobId": ""} == {
        "jobId": "", "status": "started", "collections": ["work"], "phases": ["sync", "embed"],
        "options": {"gitPull": False, "runUpdateCmd": False}}
    jobs = check("gno_list_jobs", limit=3)
    assert [j["type"] for j in jobs["recent"]] == ["index", "embed", "sync"] and jobs["active"] == []
    removed = check("gno_remove_collection", collection="Work")
    assert {k: removed[k] for k in ("removed", "collection", "configUpdated", "indexedDataRetained")} == {
        "removed": True, "collection": "work", "configUpdated": True, "indexedDataRetained": True}
    assert check("gno_status")["totalDocuments"] == 0 and (root / "doc.md").exists()
    assert c.close() == 0


# ---- a real process ----

ROBUST = [                                                            # bytes -> what comes back
    (b"\n\r\n   \n\t\r\n", None), (b'{"jsonrpc":"2.0","id":1,"method":"ping"}\r\n', {}),
    (b' \t{"jsonrpc":"2.0","id":2,"method":"ping"} \n', {}),
    (b"{\n", -32700), (b"ping\n", -32700), (b"\0\0\n", -32700), (b'{"jsonrpc":"2.0","id":3,"method":"ping"}}\n', -32700),
    (b'{"jsonrpc":"2.0","id":4,"method":"ping"}{"jsonrpc":"2.0","id":4,"method":"ping"}\n', -32700),
    (b'\xff\xfe{"jsonrpc":"2.0","id":5,"method":"ping"}\n', -32700), (b'{"jsonrpc":"2.0","id":6,"method":"p\xc3"}\n', -32700),
    (b'{"jsonrpc":"2.0","id":7,"method":"\xed\xa0\x80"}\n', -32700), (b'{"jsonrpc":"2.0","id":8,"method":"a\x01b"}\n', -32700),
    (b'{"jsonrpc":"2.0","id":NaN,"method":"ping"}\n', -32700), (b'{"jsonrpc":"2.0","id":9,"method":"ping","params":{"x":Infinity}}\n',
        -32700),
    (b'{"jsonrpc":"2.0","id":10,"method":"ping","params":{"x":-Infinity}}\n', -32700),
    (b"[" * 100_000 + b"\n", -32700), (b'{"a":' * 100_000 + b"\n", -32700), (b"[" * 100_000 + b"]" * 100_000 + b"\n", -32700),
    (b'{"jsonrpc":"2.0","id":' + b"9" * 5000 + b',"method":"ping"}\n', (-32700, -32600)),
    (b'{"jsonrpc":"2.0","id":11,"method":"ping","params":{"x":-' + b"1" * 5000 + b"}}\n", (-32700, -32600)),
    (b'{"jsonrpc":"2.0","id":1e400,"method":"ping"}\n', (-32700, -32600)), (b"[]\n", -32600), (b"null\n", -32600), (b"5\n", -32600),
    (b'"ping"\n', -32600),
    (b'[{"jsonrpc":"2.0","id":12,"method":"ping"}]\n', -32600), (b'{"jsonrpc":"2.0","id":13,"method":"\\ud800\\u0000"}\n', -32601),
    (b'{"jsonrpc":"2.0","id":"\\udc00","method":"ping"}\n', ({}, -32600)),
    (b'{"jsonrpc":"2.0","method":"notifications/x","params":{"\\ud800":1}}\n', None),
    ('{"jsonrpc":"2.0","id":"é\u2028\u0085","method":"ping"}\n'.encode(), {}),
    (b'{"jsonrpc":"2.0","id":14,"method":"ping","params":{"pad":"' + b"x" * 2_000_000 + b'"}}\n', {}),
    (b'{"jsonrpc":"2.0","id":15,"id":16,"method":"ping"}\n', {}),
]


def test_odd_bytes_are_answered_in_order_and_the_server_lives_on(tmp_path):
    replies, code, _ = talk(tmp_path / "gno", HELLO + b"".join(data for data, _ in ROBUST) + lines({"id": "end", "method": "ping"}))
    assert code == 0 and replies[0]["id"] == "hello" and replies[-1]["id"] == "end"
    expected = [(data[:80], want if isinstance(want, tuple) else (want,)) for data, want in ROBUST if want is not None]
    assert len(replies) == len(expected) + 2
    for (data, allowed), reply in zip(expected, replies[1:-1], strict=True):
        assert reply.get("result", reply.get("error", {}).get("code")) in allowed, (data, reply)
        if reply.get("error", {}).get("code") == -32700:
            assert reply["id"] is None


def test_tool_calls_with_odd_text(sample):
    odd = ["\ud800", "a\udfffb", "\0", "x\u2028y", "\U0001f600", "\ufeff", "'; DROP TABLE documents; --", '"', "*", "NEAR(", "a" * 9_999]
    calls = [{"id": n, "method": "tools/call", "params": {"name": "gno_search", "arguments": {"query": q}}} for n, q in enumerate(odd)]
    calls += [{"id": 100 + n, "method": "tools/call", "params": {"name": "gno_get", "arguments": {"ref": "notes/" + q}}} for n,
        q in enumerate(odd)]
    calls.append({"id": 999, "method": "tools/call", "params": {"name": "gno_search", "arguments": {"query": "quorum"}}})
    replies, code, _ = talk(sample, HELLO + lines(*calls))
    assert code == 0 and len(replies) == len(calls) + 1
    assert all("result" in r for r in replies), [r for r in replies if "error" in r]
    assert len(replies[-1]["result"]["structuredContent"]["results"]) == 3


def test_a_message_may_arrive_in_two_parts_split_anywhere_and_many_at_once(tmp_path, client):
    c = client()
    message = '{"jsonrpc":"2.0","id":"ä東","method":"ping"}\n'.encode()
    for at in range(1, len(message)):
        c.raw(message[:at])
        time.sleep(0.001)
        c.raw(message[at:])
        assert c.receive() == {"jsonrpc": "2.0", "id": "ä東", "result": {}}, at
    for byte in message:
        c.raw(bytes([byte]))
    assert c.receive()["result"] == {}
    c.raw(lines(*({"id": n, "method": "ping"} for n in range(500))))
    assert [c.receive()["id"] for _ in range(500)] == list(range(500))
    assert c.close() == 0 and c.errors == []


def test_replies_in_flight_are_flushed_at_the_end_of_input(sample):
    calls = [{"id": n, "method": "tools/call", "params": {"name": "gno_get", "arguments": {"ref": "work/doc.md", "fromLine": 1 + n % 3}}}
        for n in range(300)]
    begun = time.monotonic()
    replies, code, stderr = talk(sample, HELLO + lines(*calls)[:-1])          # the last line has no line feed
    assert code == 0 and stderr == b"" and time.monotonic() - begun < 10
    assert [r["id"] for r in replies] == ["hello", *range(300)]
    assert all(not r["result"].get("isError") for r in replies)


def test_end_of_input_ends_the_process(tmp_path):
    assert talk(tmp_path / "gno", b"") == ([], 0, b"")
    assert talk(tmp_path / "gno", HELLO)[1:] == (0, b"")
    assert files_below(tmp_path / "gno") == {"home"}


def slow_call(id, token=None):
    "A read that takes a good part of a second: 10,000 references."
    refs = [f"gno://big/{n % 7}/note%20{n % 1100:04}.md" for n in range(10_000)]
    return {"id": id, "method": "tools/call", "params": {"name": "gno_multi_get", "arguments": {"refs": refs, "maxBytes": 10}} | (
        {} if token is None else {"_meta": {"progressToken": token}})}


def test_ping_progress_and_cancellation_while_a_slow_tool_runs(many, client):
    c = client(base=many)
    for token in (0, "tök"):
        c.raw(lines(slow_call(1, token)) + lines({"id": 2, "method": "ping"},
            {"id": 3, "method": "tools/call", "params": {"name": "gno_list_jobs"}}))
        got = [c.receive()]
        while got[-1].get("id") != 1:
            got.append(c.receive())
        order = [m.get("id") for m in got]
        assert order.index(2) < order.index(1) and order.index(3) < order.index(1)
        notes = [m["params"] for m in got if "method" in m]
        assert notes and all(m["method"] == "notifications/progress" for m in got if "method" in m)
        assert all(n["progressToken"] == token and type(n["progressToken"]) is type(token) for n in notes)
        assert all(a["progress"] < b["progress"] for a, b in itertools.pairwise(notes))
        assert got[-1]["result"]["structuredContent"]["meta"]["requested"] == 10_000
        c.raw(lines({"id": 4, "method": "ping"}))
        assert c.receive()["id"] == 4                                 # nothing came after the response
    for token in (True, 1.5, [], {}):                                 # no valid token: no progress
        c.raw(lines(slow_call(5, token)))
        assert c.receive()["id"] == 5
    c.raw(lines(slow_call(6, 6), slow_call(7, 7), {"method": "notifications/cancelled", "params": {"requestId": 6, "reason": "user"}},
                {"method": "notifications/cancelled", "params": {"requestId": 7}},
                {"method": "notifications/cancelled", "params": {"requestId": 6}}))
    begun = time.monotonic()
    got = [c.request("tools/call", {"name": "gno_get", "arguments": {"ref": "big/0/note 0000.md"}})]
    assert not got[0]["result"].get("isError") and time.monotonic() - begun < 5
    assert [m for m in c.notes if "method" not in m] == []            # neither 6 nor 7 was answered
    c.raw(lines({"method": "notifications/cancelled", "params": {"requestId": 6}}, {"id": 6, "method": "ping"}))
    assert c.receive() == {"jsonrpc": "2.0", "id": 6, "result": {}}   # an id may be used again
    c.raw(lines(slow_call(8)))                                        # end of input in the middle of a call
    assert c.close() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_process(sample, client, number):
    c = client(base=sample)
    c.call("gno_search", query="quorum")
    c.proc.send_signal(number)
    assert c.proc.wait(5) == 0


def test_a_closed_stdout_ends_the_process_quietly(sample):
    proc = subprocess.Popen([sys.executable, str(ROOT / "gno.py"), "mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
                            cwd=sample, env=environment(sample))
    proc.stdin.write(HELLO)
    proc.stdin.flush()
    proc.stdout.readline()
    proc.stdout.close()
    until = time.monotonic() + 5
    while proc.poll() is None and time.monotonic() < until:
        try:
            proc.stdin.write(lines({"id": 1, "method": "ping"}))
            proc.stdin.flush()
        except BrokenPipeError:
            break
        time.sleep(0.05)
    assert proc.wait(5) == 0 and proc.stderr.read() == b""


@pytest.mark.parametrize("env", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "cp1252"}])
def test_utf8_whatever_the_locale(sample, env):
    calls = [{"id": 1, "method": "tools/call", "params": {"name": "gno_search", "arguments": {"query": "zählt 東京都"}}},
             {"id": 2, "method": "tools/call", "params": {"name": "gno_get", "arguments": {"ref": "work/größe.md"}}},
             {"id": 3, "method": "resources/read", "params": {"uri": "gno://work/größe.md"}}]
    data = HELLO + b"".join(json.dumps({"jsonrpc": "2.0"} | c, ensure_ascii=False).encode() + b"\n" for c in calls)
    (_, found, got, read), code, stderr = talk(sample, data, env=env)
    assert code == 0 and stderr == b""
    assert found["result"]["structuredContent"]["results"][0]["source"]["relPath"] == "größe.md"
    assert got["result"]["structuredContent"]["content"] == WORK["größe.md"] and "東京都" in read["result"]["contents"][0]["text"]


def test_files_with_unicode_names_are_indexed_whatever_the_locale(tmp_path, client):
    root = write(tmp_path / "notizen", {"größe.md": "# Größe\n\nZählt\n", "plain.md": "plain, zählt\n"})
    c = client("--enable-write", env={"LC_ALL": "C", "PYTHONUTF8": "0"})
    state = c.job("gno_add_collection", path=str(root))
    assert state["status"] == "completed", state
    hits = c.call("gno_search", query="zählt")["structuredContent"]["results"]
    assert {h["uri"] for h in hits} >= {"gno://notizen/plain.md"}
    problems = state["result"]["collections"][0]["errors"] + state["result"]["collections"][0]["warnings"]
    assert "gno://notizen/gr%C3%B6%C3%9Fe.md" in {h["uri"] for h in hits} or problems, state


@pytest.mark.parametrize("arguments, env, writing", [
    ((), {}, False), (("--enable-write",), {}, True), ((), {"GNO_MCP_ENABLE_WRITE": "1"}, True),
    ((), {"GNO_MCP_ENABLE_WRITE": "TRUE"}, True),
    ((), {"GNO_MCP_ENABLE_WRITE": "yes"}, True), ((), {"GNO_MCP_ENABLE_WRITE": "0"}, False), ((), {"GNO_MCP_ENABLE_WRITE": ""}, False),
    ((), {"GNO_MCP_ENABLE_WRITE": "no"}, False),
])
def test_write_tools_exist_only_when_asked_for(tmp_path, arguments, env, writing):
    folder = str(write(tmp_path / "x", {"a.md": "a\n"}))
    replies, code, _ = talk(tmp_path / "gno", HELLO + lines(
        {"id": 1, "method": "tools/list"}, {"id": 2, "method": "tools/call",
            "params": {"name": "gno_remove_collection", "arguments": {"collection": "x"}}},
        {"id": 3, "method": "tools/call", "params": {"name": "gno_add_collection", "arguments": {"path": folder + "/nowhere"}}}),
        *arguments, env=env)
    names = {t["name"] for t in replies[1]["result"]["tools"]}
    assert code == 0 and names.issuperset(BASIC) and bool(names & WRITE) is writing and names.issuperset(BASIC_WRITE) is writing
    if writing:
        assert replies[2]["result"]["structuredContent"]["error"] == "NOT_FOUND"
        assert replies[3]["result"]["structuredContent"]["error"] == "PATH_NOT_FOUND"
    else:
        assert all(r["error"]["code"] == -32602 and "--enable-write" in r["error"]["message"] for r in replies[2:])
        assert files_below(tmp_path / "gno") == {"home"}


def test_resources_are_listed_in_pages_each_exactly_once(many, client):
    c = client(base=many)

    def pages():
        cursor, out = {}, []
        while cursor is not None:
            result = c.request("resources/list", cursor)["result"]
            out.append([r["uri"] for r in result["resources"]])
            cursor = {"cursor": result["nextCursor"]} if "nextCursor" in result else None
        return out
    first = pages()
    uris = [uri for page in first for uri in page]
    assert len(first) >= 3 and len(uris) == len(set(uris)) == 1101
    assert set(uris) == {"gno://tags"} | {f"gno://big/{n % 7}/note%20{n:04}.md" for n in range(1100)}
    assert pages() == first and c.close() == 0


def test_a_server_without_configuration_answers_creates_nothing_and_says_what_to_do(tmp_path):
    base = tmp_path / "gno"
    calls = [("gno_search", {"query": "x"}), ("gno_query", {"query": "x"}), ("gno_vsearch", {"query": "x"}), ("gno_status", {}),
        ("gno_multi_get", {"pattern": "**"}),
             ("gno_list_tags", {}), ("gno_get", {"ref": "notes/a.md"}), ("gno_list_jobs", {})]
    replies, code, stderr = talk(base, HELLO + lines(*(
        {"id": n, "method": "tools/call", "params": {"name": name, "arguments": arguments}} for n, (name, arguments) in enumerate(calls)),
        {"id": "list", "method": "resources/list"}))
    by_id = {r["id"]: r["result"] for r in replies}
    assert code == 0 and stderr == b"" and files_below(base) == {"home"}
    for n, (name, _) in enumerate(calls):
        text = by_id[n]["content"][0]["text"]
        assert bool(by_id[n].get("isError")) == (name == "gno_get"), (name, text)
        if name in ("gno_search", "gno_query", "gno_vsearch", "gno_status", "gno_get"):
            assert "gno setup" in text, (name, text)
    assert by_id[0]["structuredContent"]["results"] == [] and by_id[3]["structuredContent"]["totalDocuments"] == 0
    assert [r["uri"] for r in by_id["list"]["resources"]] == ["gno://tags"]


def test_a_broken_configuration_is_an_error_of_each_call_that_names_the_file(tmp_path):
    base = tmp_path / "gno"
    write(base, {"config/index.yml": "version: '1.0'\ncollections: [\n"})
    replies, code, _ = talk(base, HELLO + lines({"id": 1, "method": "tools/call",
        "params": {"name": "gno_search", "arguments": {"query": "x"}}},
                                                {"id": 2, "method": "resources/list"}, {"id": 3, "method": "ping"}))
    by_id = {r["id"]: r for r in replies}
    assert code == 0 and by_id[1]["result"]["isError"] and "index.yml" in by_id[1]["result"]["content"][0]["text"]
    assert "error" in by_id[2] and by_id[3]["result"] == {}


def test_folders_are_served_without_any_configuration(tmp_path, client):
    base, root = tmp_path / "gno", write(tmp_path / "My Notes", {f"n{n}.md": f"# Note {n}\n\nA zebra number{n} runs.\n" for n in range(30)})

    def until(test, seconds):
        end = time.monotonic() + seconds
        while not (value := test()) and time.monotonic() < end:
            time.sleep(0.05)
        return value
    one, two = client(str(root), base=base), client(str(root), base=base)     # some clients start a server twice
    for c in (one, two):
        hits = until(lambda c=c: c.call("gno_search", query="number7")["structuredContent"]["results"], 10)
        assert hits[0]["uri"] == "gno://my-notes/n7.md" and {t["name"] for t in c.request("tools/list")["result"]["tools"]} <= READ
    for c in (one, two):
        assert until(lambda c=c: c.call("gno_status")["structuredContent"]["embeddingBacklog"] == 0, 20)
        assert c.call("gno_vsearch", query="a striped animal")["structuredContent"]["results"]
    write(root, {"late.md": "# Late\n\nA giraffe comes.\n"})
    found = until(lambda: one.call("gno_search", query="giraffe")["structuredContent"]["results"], 15)
    assert found and found[0]["uri"] == "gno://my-notes/late.md", "a new file is not taken up within 15 s"
    assert two.call("gno_search", query="giraffe")["structuredContent"]["results"]
    assert one.close() == 0 and two.close() == 0
    made = files_below(base)
    assert not any(name.startswith("config") for name in made)
    assert [name for name in made if re.fullmatch(r"data/index-folder-[0-9a-f]{12}\.sqlite", name)]


@pytest.mark.parametrize("how", ["end of input", signal.SIGTERM, signal.SIGINT])
def test_a_server_that_embeds_in_the_background_ends_cleanly(tmp_path, client, how):
    root = write(tmp_path / "notes", {f"n{n}.md": f"# Note {n}\n\n" + f"Some words number{n} to be embedded\n" * 12 for n in range(600)})
    c = client(str(root))
    until = time.monotonic() + 20
    while not any(x["embeddedCount"] for x in c.call("gno_status")["structuredContent"]["collections"]) and time.monotonic() < until:
        time.sleep(0.02)
    status = c.call("gno_status")["structuredContent"]
    assert 0 < status["embeddingBacklog"] < status["totalChunks"]
    if how == "end of input":
        c.proc.stdin.close()
    else:
        c.proc.send_signal(how)
    assert c.proc.wait(10) == 0 and c.errors == []


def test_a_running_server_sees_what_the_command_line_does(tmp_path, client):
    base, root = tmp_path / "gno", write(tmp_path / "notes", {"a.md": "zebra\n"})
    c = client(base=base)

    def found():
        return [h["uri"] for h in c.call("gno_search", query="zebra")["structuredContent"]["results"]]
    assert found() == []
    assert cli(base, "setup", str(root), "--no-embed").returncode == 0
    assert found() == ["gno://notes/a.md"]
    (root / "b.md").write_text("zebra\n")
    assert cli(base, "sync").returncode == 0
    assert len(found()) == 2
    for path in (base / "data").glob("index-*"):                      # the index is thrown away and built anew
        path.unlink()
    (root / "a.md").unlink()
    assert cli(base, "sync").returncode == 0
    assert found() == ["gno://notes/b.md"]
    assert cli(base, "collection", "remove", "notes", "--yes").returncode == 0
    assert found() == [] and c.close() == 0


@pytest.mark.parametrize("arguments", [("no such folder",), ("--no-such-option",), ("--index", "../x")])
def test_a_server_that_cannot_start_says_so_on_stderr_only(tmp_path, arguments):
    replies, code, stderr = talk(tmp_path / "gno", HELLO, *arguments)
    assert replies == [] and code in (1, 2) and b"Traceback" not in stderr and stderr
    assert files_below(tmp_path / "gno") == {"home"}


# ---- what is loaded ----

def loaded(stderr: bytes) -> set[str]:
    "Top-level modules in a -X importtime log."
    return {m.decode().split(".")[0] for m in re.findall(rb"(?m)^import time: +\d+ \| +\d+ \| +([\w.]+)\s*$", stderr)}


def test_import_loads_only_the_standard_library(tmp_path):
    code = "import sys; before = set(sys.modules); import gno; print('\\n'.join(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment(tmp_path))
    extra = {m.split(".")[0] for m in done.stdout.split()} - sys.stdlib_module_names - {"gno"}
    assert done.returncode == 0 and extra == set(), done.stderr
    assert not {"asyncio", "urllib", "zipfile", "email", "html", "argparse", "concurrent"} & {m.split(".")[0] for m in done.stdout.split()}


def test_a_server_starts_with_the_standard_library_and_loads_yaml_when_a_tool_needs_it(sample):
    plain = loaded(subprocess.run([sys.executable, "-X", "importtime", "-c", "pass"], capture_output=True, env=environment(sample)).stderr)
    env = {"PYTHONPROFILEIMPORTTIME": "1"}
    listing = lines({"id": 1, "method": "tools/list"}, {"id": 2, "method": "prompts/list"}, {"id": 3, "method": "ping"})
    replies, _, stderr = talk(sample, HELLO + listing, env=env)
    assert len(replies) == 4
    extra = loaded(stderr) - plain - sys.stdlib_module_names
    assert extra == set() and "asyncio" not in loaded(stderr)
    search = lines({"id": 1, "method": "tools/call", "params": {"name": "gno_search", "arguments": {"query": "quorum"}}})
    replies, _, stderr = talk(sample, HELLO + search, env=env)
    extra = loaded(stderr) - plain - sys.stdlib_module_names
    assert len(replies[1]["result"]["structuredContent"]["results"]) == 3
    assert "yaml" in extra and extra <= {"yaml", "_yaml"}


def test_two_sessions_in_one_process_do_not_share_state(sample):
    kb = new_kb(sample)
    first, second = gno.Session(kb), gno.Session(kb)
    ask(first, "initialize")
    assert "error" in ask(second, "tools/list") and "result" in ask(first, "tools/list")
    results = []
    threads = [threading.Thread(target=lambda: (results.append(tool(first, "gno_search",
        query="quorum")["structuredContent"]["meta"]["totalResults"]), kb.close()))
               for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [3] * 8
    kb.close()
