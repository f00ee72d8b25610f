"""Guidance: what index.yml says about everything, a collection or a folder, and which results carry it."""
import json
from pathlib import Path

import jsonschema
import pytest
from conftest import add, cli, new_kb, run, write

import gno

SCHEMA = {"type": "array", "items": {"type": "object", "required": ["scope", "text"], "additionalProperties": False,
                                     "properties": {"scope": {"type": "string"}, "text": {"type": "string"}}}}


def contexts(*pairs: tuple[str, str]) -> tuple[gno.Context, ...]:
    "Contexts as index.yml gives them; none of them may be refused."
    found, warnings = gno.read_contexts([{"scopeKey": scope, "text": text} for scope, text in pairs])
    assert warnings == []
    return found


def configure(kb, more: str) -> Path:
    "Add lines to index.yml."
    path = Path(kb.config_path)
    path.write_text(path.read_text("utf-8") + more, "utf-8")
    kb.refresh()
    return path


def refused(code, kb, tool, **arguments):
    "The call fails with this code and index.yml stays as it is."
    before = Path(kb.config_path).read_bytes()
    with pytest.raises(gno.GnoError) as e:
        run(kb, tool, **arguments)
    assert e.value.code == code and Path(kb.config_path).read_bytes() == before
    return e.value


# ---- which texts, in which order ----

ALL = [("gno://notes/a/b", "deep"), ("gno://notes/a", "folder"), ("notes:", "collection"), ("/", "global"), ("work:", "other")]


@pytest.mark.parametrize("pairs, place, expected", [
    (ALL, "notes/a/b/c.md", "global\n\ncollection\n\nfolder\n\ndeep"),
    (ALL, "notes/a/x.md", "global\n\ncollection\n\nfolder"), (ALL, "notes/x.md", "global\n\ncollection"),
    (ALL, "work/a/b/c.md", "global\n\nother"), (ALL, "third/a/b/c.md", "global"), (ALL[:3], "third/a/b/c.md", ""), ([], "notes/a.md", ""),
    # whole segments
    ([("gno://notes/proj", "t")], "notes/projects/a.md", ""), ([("gno://notes/proj", "t")], "notes/proj/a.md", "t"),
    ([("gno://notes/a.md", "t")], "notes/a.md", "t"), ([("gno://notes/a", "t")], "notes/a.md", ""),
    ([("gno://notes/a", "t")], "notes/A/x.md", ""), ([("gno://notes/b", "t")], "notes/a/b/x.md", ""),
    ([("gno://notes/a/b/c.md", "t")], "notes/a/b", ""), ([("gno://note", "t")], "notes/a.md", ""),
    ([("gno://notes", "t")], "notes/a.md", "t"), ([("gno://notes/", "t")], "notes/a.md", "t"),
    # one text once, where it stands first
    ([("/", "t"), ("notes:", "u"), ("gno://notes/a", "t")], "notes/a/x.md", "t\n\nu"),
    ([("notes:", " t\r\n"), ("gno://notes/a", "\ufefft")], "notes/a/x.md", "t"),
    # in one scope by text; prefixes of a depth are one folder
    ([("/", "b"), ("/", "a"), ("notes:", "d"), ("notes:", "c")], "notes/x.md", "a\n\nb\n\nc\n\nd"),
    # percent-encoded or not, in either normal form, any spelling of the path and of the collection
    ([("gno://notes/a%20b", "t")], "notes/a b/x.md", "t"), ([("gno://notes/a b", "t")], "notes/a b/x.md", "t"),
    ([("gno://notes/caf%C3%A9", "t")], "notes/cafe\u0301/x.md", "t"), ([("gno://notes/cafe\u0301", "t")], "notes/caf\u00e9/x.md", "t"),
    ([("gno://notes/a%2Fb", "t")], "notes/a/b/x.md", "t"), ([("gno://notes/100%25", "t")], "notes/100%/x.md", "t"),
    ([("gno://notes/./a//b/", "t")], "notes/a/b/x.md", "t"), ([("gno://notes/a\\b", "t")], "notes/a/b/x.md", "t"),
    ([("GNO://Notes/a", "t"), ("NOTES:", "u")], "notes/a/x.md", "u\n\nt"), ([("gno://notes/a?index=work", "t")], "notes/a/x.md", "t"),
    ([("gno://notes/a", "t")], "notes/a\\x.md", "t"), ([("gno://notes/a", "t")], "notes/./a//x.md", "t"),
    # a path that is none has no guidance at all
    (ALL, "notes/../a.md", ""), (ALL, "notes/a/../../x.md", ""), (ALL, "notes//a.md", ""), (ALL, "notes/a\0.md", ""), (ALL, "notes/..\\a.md", ""),
    ([("/", "global")], "notes/a..b/...md", "global"),
    # texts
    ([("/", "\ufeff  one\r\ntwo \r\n\r\n")], "notes/a.md", "one\ntwo"), ([("/", "cafe\u0301")], "notes/a.md", "caf\u00e9"),
])
def test_the_guidance_of_a_document(pairs, place, expected):
    collection, _, path = place.partition("/")
    assert gno.guidance(contexts(*pairs), collection, path) == expected
    assert gno.guidance(contexts(*pairs)[::-1], collection, path) == expected


@pytest.mark.parametrize("scope", ["", "notes", "//", "/notes", ":", "no tes:", "notes::", "-x:", "x" * 65 + ":", "gno://", "gno:///a", "gno:notes/a",
    "http://notes/a", "gno://no tes/a", "gno://notes/../a", "gno://notes/a/..", "gno://notes/%2e%2e/a", "gno://notes//a", "gno://notes/%2Fa",
    "gno://notes/\\a", "gno://notes/a%00", "gno://notes/a\0", "gno://notes/100%", "gno://notes/%ff", "gno://%6eotes/a", " /", "*"])
def test_what_is_no_scope(scope):
    with pytest.raises(gno.GnoError) as e:
        gno.parse_scope(scope)
    assert e.value.code == "INVALID_INPUT" and e.value.hint
    good, (warning,) = gno.read_contexts([{"scopeKey": scope, "text": "t"}, {"scopeKey": "/", "text": "t"}])
    assert len(good) == 1 and warning.startswith("contexts[0] ")


@pytest.mark.parametrize("written, count", [
    ("5", 1), ("text", 1), ("{scopeKey: /, text: t}", 1), ("[]", 0), ("", 0), ("~", 0), ("[5, ~, [], text, {}]", 5),
    ("[{scopeKey: /}]", 1), ("[{scopeKey: /, text: }]", 1), ("[{scopeKey: /, text: ''}]", 1), ("[{scopeKey: /, text: '  '}]", 1),
    ("[{scopeKey: /, text: 5}]", 1), ("[{scopeKey: 5, text: t}]", 1), ("[{scopeKey: [/], text: [t]}]", 1), ("[{text: t}]", 1),
    ("[{scopeType: prefix, scopeKey: /, text: t}]", 1), ("[{scopeType: collection, scopeKey: 'gno://more/a', text: t}]", 1),
    ("[{scopeType: [global], scopeKey: /, text: t}]", 1), ("[{scopeType: global, scopeKey: 'notes', text: t}]", 1),
])
def test_entries_that_cannot_be_used_are_warnings(kb, tmp_path, written, count):
    add(kb, write(tmp_path / "n", {"a.md": "alpha"}))
    configure(kb, f"contexts: {written}\n")
    assert [w for w in kb.config.warnings if w.startswith("contexts")] == list(kb.config.warnings) and len(kb.config.warnings) == count
    (hit,) = run(kb, "search", query="alpha")["results"]
    assert "context" not in hit and run(kb, "context_list") == []
    status, checked = run(kb, "status"), run(kb, "context_check")
    assert [c["detail"] for c in status["health"]["checks"] if c["id"] == "config"] == list(kb.config.warnings)
    assert checked["healthy"] == (count == 0) and [c["detail"] for c in checked["checks"]] == list(kb.config.warnings)
    run(kb, "remove_collection", collection="notes")


def test_every_search_tool_shows_it(kb, tmp_path):
    add(kb, write(tmp_path / "n", {"a b/x.md": "the kiln is hot", "y.md": "the kiln is cold"}))
    add(kb, write(tmp_path / "m", {"z.md": "the kiln is old"}), "more")
    run(kb, "embed")
    plain = {tool: run(kb, tool, query="kiln") for tool in ("search", "vsearch", "query")}
    configure(kb, "contexts:\n- {scopeType: prefix, scopeKey: 'gno://notes/a%20b', text: Project}\n"
                  "- {scopeType: collection, scopeKey: 'notes:', text: Workspace}\n")
    wanted = {"gno://notes/a%20b/x.md": "Workspace\n\nProject", "gno://notes/y.md": "Workspace", "gno://more/z.md": None}
    for tool, before in plain.items():
        found = run(kb, tool, query="kiln")
        assert {h["uri"]: h.get("context") for h in found["results"]} == wanted, tool
        assert [{k: v for k, v in h.items() if k != "context"} for h in found["results"]] == before["results"], tool
        assert all("context" not in h for h in before["results"])


# ---- the commands ----

@pytest.fixture
def base(tmp_path):
    "A place with the collection `notes` and a commented index.yml."
    kb = new_kb(tmp_path / "gno")
    add(kb, write(tmp_path / "n", {"a b/x.md": "alpha", "y.md": "beta"}))
    path = configure(kb, "# what agents must know\ncontexts:\n  # the one about all\n"
                         "  - {scopeType: global, scopeKey: /, text: Everything}   # keep\n# the end\n")
    kb.close()
    assert path.read_text().startswith("version")
    return tmp_path / "gno"


COMMENTS = ("# what agents must know", "# the one about all", "# keep", "# the end")


def said(base, code, *words) -> str:
    "What a command prints; its exit code is the expected one."
    done = cli(base, *words)
    assert done.returncode == code and b"Traceback" not in done.stderr, done
    return (done.stdout if code == 0 or done.stdout else done.stderr).decode()


def listed(base) -> list[tuple[str, str]]:
    rows = json.loads(said(base, 0, "context", "list", "--json"))
    assert all(set(row) == {"scope", "text"} for row in rows)
    return [(row["scope"], row["text"]) for row in rows]


def test_the_commands(base):
    config = base / "config" / "index.yml"
    original = config.read_text()
    assert "gno://notes/a%20b" in said(base, 0, "context", "add", "gno://Notes/a b/", "Project", "alpha: #1")
    assert "Collection" in said(base, 0, "context", "add", "NOTES:", 'Collection\nof "notes"')
    assert listed(base) == [("/", "Everything"), ("notes:", 'Collection\nof "notes"'), ("gno://notes/a%20b", "Project alpha: #1")]
    assert all(config.read_text().count(comment) == 1 for comment in COMMENTS)
    shown = said(base, 0, "context", "list")
    assert [line.split()[0] for line in shown.splitlines()] == ["/", "notes:", "gno://notes/a%20b"] and 'Collection of "notes"' in shown
    assert said(base, 0, "context", "list", "--md") == shown
    assert "ok" in said(base, 0, "context", "check")
    (hit,) = json.loads(said(base, 0, "search", "alpha", "--json"))["results"]
    assert hit["context"] == 'Everything\n\nCollection\nof "notes"\n\nProject alpha: #1'
    said(base, 0, "context", "rm", "gno://notes/a b", "Project", "alpha: #1")
    said(base, 0, "context", "rm", "notes:")
    assert config.read_text() == original and listed(base) == [("/", "Everything")]
    said(base, 0, "context", "rm", "/", "--text", "Everything")
    assert listed(base) == [] and "contexts: []" in config.read_text() and "no contexts" in said(base, 0, "context", "list")


@pytest.mark.parametrize("words, code, error", [
    (["add", "none:", "t"], 2, "NOT_FOUND"), (["add", "gno://none/a", "t"], 2, "NOT_FOUND"), (["add", "notes", "t"], 1, "INVALID_INPUT"),
    (["add", "gno://notes/../a", "t"], 1, "INVALID_INPUT"), (["add", "notes:", " "], 1, "INVALID_INPUT"), (["add", "notes:"], 1, "INVALID_INPUT"),
    (["add"], 1, "INVALID_INPUT"), (["add", "/", " Everything\r\n"], 1, "DUPLICATE"), (["rm", "notes:"], 2, "NOT_FOUND"),
    (["rm", "/", "Something"], 2, "NOT_FOUND"), (["rm", "/", ""], 2, "NOT_FOUND"), (["rm", "gno://notes/../a"], 2, "NOT_FOUND"),
    (["rm"], 1, "INVALID_INPUT"), (["list", "x"], 1, "INVALID_INPUT"), (["list", "--csv"], 1, "INVALID_INPUT"),
])
def test_the_commands_refuse(base, words, code, error, monkeypatch, capsys):
    for kind in ("config", "data", "cache"):
        monkeypatch.setenv(f"GNO_{kind.upper()}_DIR", str(base / kind))
    before = (base / "config" / "index.yml").read_bytes()
    assert gno.main(["context", *words]) == code
    assert capsys.readouterr().err.startswith(f"gno: {error}: ") and (base / "config" / "index.yml").read_bytes() == before


def test_adding_to_an_empty_configuration(kb):
    assert run(kb, "context_add", scope="/", text="t") == {"added": "/", "text": "t"}
    assert run(kb, "context_list") == [{"scope": "/", "text": "t"}] and gno.load_config(kb.config_path).warnings == ()
    refused("DUPLICATE", kb, "context_add", scope="/", text="t")
    run(kb, "context_add", scope="/", text="5")
    assert [row["text"] for row in run(kb, "context_list")] == ["5", "t"]


def test_check_tells_what_is_wrong(base):
    config = base / "config" / "index.yml"
    config.write_text(config.read_text().replace("# the end", """\
  - {scopeKey: /, text: "Everything "}
  - {scopeKey: "none:", text: t}
  - {scopeKey: "gno://none/a", text: t}
  - {scopeKey: "gno://notes/a", text: t}
  - {scopeKey: "gno://notes/a%20b", text: t}
  - {scopeKey: "gno://notes/y.md", text: t}
  - {scopeKey: "notes:", text: ""}
  - {scopeKey: "gno://notes/..", text: t}
# the end"""))
    done = json.loads(said(base, 1, "context", "check", "--json"))
    assert done["healthy"] is False
    assert [(c["id"], c["status"]) for c in done["checks"]] == [
        ("index.yml", "error"), ("index.yml", "error"), ("/", "ok"), ("/", "error"), ("none:", "error"), ("gno://none/a", "error"),
        ("gno://notes/a", "error"), ("gno://notes/a%20b", "ok"), ("gno://notes/y.md", "ok")]
    assert [c["detail"].split()[0] for c in done["checks"][:2]] == ["contexts[7]", "contexts[8]"]
    shown = said(base, 1, "context", "check")
    assert shown.count("BAD") == 6 and "no such collection" in shown and "no indexed document" in shown and "twice" in shown
    for scope in ("/", "none:", "gno://none/a", "gno://notes/a", "notes:", "gno://notes/.."):
        said(base, 0, "context", "rm", scope)
    said(base, 0, "context", "check")
    assert listed(base) == [("gno://notes/a%20b", "t"), ("gno://notes/y.md", "t")]


def test_rm_takes_only_the_text_that_was_named(kb, tmp_path):
    add(kb, write(tmp_path / "n", {"a.md": "alpha"}))
    path = configure(kb, "contexts:\n- {scopeKey: 'Notes:', text: one}\n- {scopeKey: 'notes:', text: 'two '}   # second\n- {scopeKey: /, text: two}\n")
    assert run(kb, "context_rm", scope="NOTES:", text="two") == {"removed": 1, "scope": "notes:"}
    assert run(kb, "context_list") == [{"scope": "/", "text": "two"}, {"scope": "notes:", "text": "one"}]
    refused("NOT_FOUND", kb, "context_rm", scope="notes:", text="two")
    assert run(kb, "context_rm", scope="notes:")["removed"] == 1 and "scopeKey: /" in path.read_text()


def test_the_list_is_what_its_schema_says(kb, tmp_path):
    add(kb, write(tmp_path / "n", {"a.md": "alpha"}))
    for scope, text in (("gno://notes/a.md", "x"), ("/", "y")):
        run(kb, "context_add", scope=scope, text=text)
    jsonschema.validate(run(kb, "context_list"), SCHEMA)
    assert [t.only for name, t in gno.TOOLS.items() if name.startswith("context_")] == ["cli"] * 4
