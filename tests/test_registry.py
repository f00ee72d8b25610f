"""The registry: one declaration gives schemas, binding, errors and the one door."""
import ast
import inspect
import json
from pathlib import Path
from typing import Annotated, Literal, NotRequired

import jsonschema
import pytest
from conftest import ROOT, run
from hypothesis import given
from hypothesis import strategies as st

import gno


class Inner(gno.TypedDict):
    "A nested record."
    mode: Literal["term", "hyde"]
    text: Annotated[str, gno.Arg("", 1)]
    note: NotRequired[str]


def sample(kb, word: Annotated[str, gno.Arg("a word", 1, 5)], count: Annotated[int, gno.Arg("how many", 1, 9)] = 3,
           share: Annotated[float | None, gno.Arg("part", 0, 1)] = None, deep: bool = False, items: list[str] = (),
           modes: list[Inner] = (), sure: Literal[True] | None = None, from_: str | None = None,
           where: gno.Where = gno.Where()) -> dict:
    "A sample."


TOOL = gno.Tool("sample", "sample", sample, "read", False, False, "", "", None, (), "Sample")
CLOSED = TOOL._replace(closed=True)


def test_input_schema_is_plain_and_complete():
    schema = gno.input_schema(TOOL)
    assert schema["type"] == "object" and schema["required"] == ["word"]
    assert schema["properties"]["word"] == {"type": "string", "minLength": 1, "maxLength": 5, "description": "a word"}
    assert schema["properties"]["count"] == {"type": "integer", "minimum": 1, "maximum": 9, "description": "how many", "default": 3}
    assert schema["properties"]["share"]["type"] == "number"          # optional, but never a type array
    assert schema["properties"]["sure"] == {"const": True}
    assert schema["properties"]["modes"]["items"]["required"] == ["mode", "text"]
    assert {"collection", "tagsAll", "since"} <= set(schema["properties"]) and "where" not in schema["properties"]
    assert "from" in schema["properties"]                             # a trailing underscore is not on the wire
    assert gno.input_schema(CLOSED)["additionalProperties"] is False


@pytest.mark.parametrize("raw, name, value", [
    ({"word": "a"}, "count", 3),                                      # default
    ({"word": "a", "count": None}, "count", 3),                       # null means not given
    ({"word": "a", "count": 4.0}, "count", 4),                        # JSON has one number type
    ({"word": "a", "items": '["x", "y"]'}, "items", ["x", "y"]),      # a list sent as JSON text
    ({"word": "a", "modes": [{"mode": "term", "text": "t", "odd": 1}]}, "modes", [{"mode": "term", "text": "t"}]),
    ({"word": "a", "from": "b"}, "from_", "b"),
    ({"word": "a", "unknown": 1}, "word", "a"),                       # ignored on an open tool
    ({"word": "a", "tagsAll": ["t"]}, "where", gno.Where(tags_all=["t"])),
    ({"word": "\ud800"}, "word", "?"),                                # a lone surrogate could never be sent back
])
def test_bind_accepts(raw, name, value):
    assert gno.bind(TOOL, raw)[name] == value


@pytest.mark.parametrize("raw, said", [
    ({}, "word is required"), ({"word": ""}, "word is empty"), ({"word": "abcdef"}, "word"), ({"word": 5}, "text"),
    ({"word": "a", "count": 0}, "count"), ({"word": "a", "count": "3"}, "whole number"), ({"word": "a", "count": True}, "whole number"),
    ({"word": "a", "count": 2.5}, "whole number"), ({"word": "a", "share": 2}, "share"), ({"word": "a", "deep": "true"}, "true or false"),
    ({"word": "a", "items": "x"}, "a list"), ({"word": "a", "items": [1]}, "items[0]"), ({"word": "a", "items": "[1"}, "JSON"),
    ({"word": "a", "modes": [{"mode": "term"}]}, "modes[0].text"), ({"word": "a", "modes": [{"mode": "x", "text": "t"}]}, "one of"),
    ({"word": "a", "modes": [{"mode": "term", "text": ""}]}, "empty"), ({"word": "a", "sure": False}, "sure"), ({"word": "a", "sure": 1}, "sure"),
])
def test_bind_refuses(raw, said):
    with pytest.raises(gno.GnoError) as e:
        gno.bind(TOOL, raw)
    assert e.value.code == "INVALID_INPUT" and said in e.value.message


def test_closed_tools_refuse_unknown_arguments_and_name_the_known_ones():
    with pytest.raises(gno.GnoError) as e:
        gno.bind(CLOSED, {"word": "a", "wrod": "b"})
    assert "wrod" in e.value.message and "word" in e.value.hint


@pytest.mark.parametrize("raw, name, value", [
    ({"word": "a", "count": "4"}, "count", 4), ({"word": "a", "share": "0.5"}, "share", 0.5), ({"word": "a", "deep": "true"}, "deep", True),
    ({"word": "a", "items": "x, y"}, "items", ["x", "y"]), ({"word": "a", "sure": "true"}, "sure", True),
])
def test_bind_reads_text_of_a_command_line(raw, name, value):
    assert gno.bind(TOOL, raw, text=True)[name] == value


@given(st.dictionaries(st.sampled_from(["word", "count", "share", "deep", "items", "sure", "from"]),
                       st.none() | st.booleans() | st.integers(-3, 12) | st.floats(0, 2, width=16) | st.text(max_size=7)
                       | st.lists(st.text(max_size=3), max_size=3), max_size=7))
def test_schema_and_bind_accept_the_same_input(raw):
    "Apart from what bind accepts for the sake of careless clients: null, and lists sent as JSON text."
    given_ = {k: v for k, v in raw.items() if v is not None}
    if any(isinstance(v, str) and v.lstrip()[:1] in ("[", "{") for v in given_.values()):
        return
    schema = gno.input_schema(TOOL)
    valid = not list(jsonschema.Draft202012Validator(schema).iter_errors(given_)) and all(
        v is True for k, v in given_.items() if k == "sure")          # in JSON Schema 1 equals true
    try:
        gno.bind(TOOL, raw)
        bound = True
    except gno.GnoError:
        bound = False
    assert bound == valid, raw


@pytest.mark.parametrize("t", gno.TOOLS.values(), ids=lambda t: t.name)
def test_every_tool_suits_the_strictest_client(t):
    schema, flat = gno.input_schema(t), json.dumps(gno.input_schema(t))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["type"] == "object" and isinstance(schema["properties"], dict) and isinstance(schema["required"], list)
    assert set(schema["required"]) <= set(schema["properties"])
    assert not {"anyOf", "oneOf", "allOf", "not", "enum", "$schema"} & set(schema) and '"$ref"' not in flat and '"type": [' not in flat
    assert len(f"mcp__gno__gno_{t.name}") <= 60 and 0 < len(t.summary) < 1024
    for name, prop in schema["properties"].items():
        assert isinstance(prop, dict) and (prop.get("description") or "const" in prop), f"{t.name}.{name} has no help"
    out = gno.output_schema(t)
    if not t.only:
        assert out and out["type"] == "object" and out["$id"].startswith("gno://schemas/")
        jsonschema.Draft202012Validator.check_schema(out)


def test_wire_contract_is_the_reviewed_one():
    "tests/tools.json is the whole wire contract; run this file as a program to accept a change after reading its diff."
    assert wire_contract() == json.loads((ROOT / "tests" / "tools.json").read_text("utf-8"))


def wire_contract():
    kb = gno.KB.__new__(gno.KB)
    kb.writable = True
    return gno.mcp_tools(kb)


def test_call_gates_writing(kb):
    kb.writable = False
    with pytest.raises(gno.GnoError) as e:
        run(kb, "sync")
    assert e.value.code == "WRITE_DISABLED" and "--enable-write" in e.value.hint
    with pytest.raises(gno.GnoError) as e:
        run(kb, "no_such_tool")
    assert e.value.code == "NOT_FOUND"


def test_every_error_code_raised_in_the_source_is_declared():
    tree = ast.parse(Path(gno.__file__).read_text("utf-8"))
    codes = {n.args[0].value for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "GnoError"
             and n.args and isinstance(n.args[0], ast.Constant)}
    assert codes and codes <= set(gno.ERRORS)


def test_locals_do_not_shadow_tools():
    "Tool names are module names: a local of that name would hide the tool. Wire arguments of tools are the exception."
    tree = ast.parse(Path(gno.__file__).read_text("utf-8"))
    bad = []
    for fn in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name not in gno.TOOLS):
        names = {a.arg for a in fn.args.args + fn.args.kwonlyargs}
        names |= {n.id for n in ast.walk(fn) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        bad += [f"{fn.name}: {name}" for name in names & set(gno.TOOLS)]
    assert bad == []


def test_public_functions_have_docstrings():
    missing = [n for n, f in vars(gno).items() if (inspect.isfunction(f) or inspect.isclass(f)) and f.__module__ == "gno"
               and not n.startswith("_") and not f.__doc__]
    assert missing == []


if __name__ == "__main__":
    (ROOT / "tests" / "tools.json").write_text(json.dumps(wire_contract(), ensure_ascii=False, indent=1) + "\n", "utf-8")
