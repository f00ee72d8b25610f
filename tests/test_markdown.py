"""Front matter, links and tags: tables worked out by hand from CommonMark, YAML 1.1 and notes found in real vaults."""
import json
import re
import sys

import pytest
from hypothesis import given, settings, strategies as st

import gno

def head(*lines: str) -> str:
    return "---\n" + "\n".join(lines) + "\n---\n\nbody\n"

def meta_of(*lines: str) -> dict:
    meta, _, warning = gno.front_matter(head(*lines))
    assert warning == "", warning
    return meta

def links(text: str) -> list:
    return gno.find_links(text, gno.mask(text, 0))

def tags(text: str, **meta) -> list[str]:
    return gno.find_tags(gno.mask(text, 0), meta, 0)

# ---- front matter ----------------------------------------------------------------------------

def test_front_matter_fences():
    for text, meta, body in [
        ("---\ntitle: A\n---\nbody\n",              {"title": "A"}, "body\n"),
        ("---\ntitle: A\n...\nbody\n",              {"title": "A"}, "body\n"),
        ("---\ntitle: A\n---",                      {"title": "A"}, ""),           # the file may end at the fence
        ("---\n---\nbody\n",                        {}, "body\n"),
        ("---\n# only a comment\n---\nbody\n",      {}, "body\n"),
        ("---\ntext: |\n  a\n   ---\n  b\n---\nx",  {"text": "a\n ---\nb\n"}, "x"),     # an indented --- is text
        ("---yaml\na: b\n---\n",                    {}, "---yaml\na: b\n---\n"),
        ("\n---\na: b\n---\n",                      {}, "\n---\na: b\n---\n"),
        (" ---\na: b\n---\n",                       {}, " ---\na: b\n---\n"),
        ("+++\na = 1\n+++\n",                       {}, "+++\na = 1\n+++\n"),
        ("# A\n\n```yaml\n---\nv: 1\n---\n```\n",   {}, "# A\n\n```yaml\n---\nv: 1\n---\n```\n"),
        ("", {}, ""), ("---", {}, "---"),
    ]:
        found, offset, warning = gno.front_matter(text)
        assert (found, text[offset:], warning) == (meta, body, ""), text

def test_front_matter_that_is_body():
    for text in ["---\ntitle: never closed\n\nBody.\n", "---\n", "---\n\nprose between rules\n\n---\n", "---\n- a\n- b\n---\n"]:
        meta, offset, warning = gno.front_matter(text)
        assert (meta, offset) == ({}, 0) and warning.startswith("front matter: "), text

def test_scalars_stay_as_written():
    for written, value in [
        ("NO", "NO"), ("off", "off"), ("yes", "yes"), ("true", "true"), ("22:30", "22:30"), ("1.10", "1.10"), ("0755", "0755"),
        ("0x1F", "0x1F"), ("007", "007"), ("1e3", "1e3"), ("2024-02-30", "2024-02-30"), ("12/31/2024", "12/31/2024"),
        ("2024-06-29T10:00:00Z", "2024-06-29T10:00:00Z"), ("=", "="), ("<<", "<<"),
        ("", None), ("~", None), ("null", None), ("Null", None), ("NULL", None), ("nULL", "nULL"),
        ('""', ""), ('"null"', "null"), ("'~'", "~"), ("!!str null", "null"), ("!!int 7", "7"),
        ("!!python/object/apply:os.getcwd []", []), ("[1, [2, ~]]", ["1", ["2", None]]), ("{a: {b: 1}}", {"a": {"b": "1"}}),
        (">-\n  two\n  lines", "two lines"), ("|\n  two\n  lines", "two\nlines\n"), ("a # comment", "a"), ("日本 🚀", "日本 🚀"),
    ]:
        assert meta_of(f"key: {written}") == {"key": value}, written

def test_keys():
    for lines, meta in [
        (["1: num"],                        {"1": "num"}),
        (["? [a]", ": b", "c: d"],          {"c": "d"}),            # a list is no key
        (["? {a: 1}", ": b"],               {}),
        (["a: 1", "a: 2"],                  {"a": "2"}),
        (["__class__: q", "path: /etc"],    {"__class__": "q", "path": "/etc"}),
        (["~: x"],                          {"~": "x"}),
        (["a: &k word", "*k : x"],          {"a": "word", "word": "x"}),
    ]:
        assert meta_of(*lines) == meta, lines
    wide = meta_of("title: Wide", *(f"k{i}: v{i}" for i in range(2000)))
    assert len(wide) == 2001 and wide["k1999"] == "v1999"

def test_aliases():
    assert meta_of("base: &b {k: v}", "use: *b") == {"base": {"k": "v"}, "use": {"k": "v"}}
    assert meta_of("a: &x [1, 2]", *(f"k{i}: *x" for i in range(500)))["k499"] == ["1", "2"]
    bomb = ["title: Bomb", "a0: &a0 [x,x,x,x,x,x,x,x,x]"] + [f"a{i}: &a{i} [{','.join([f'*a{i-1}'] * 9)}]" for i in range(1, 10)]
    for lines, line in [(bomb, 7), (["title: Bomb", "x: &x [*x]"], 3), (["title: Bomb", "x: *nowhere"], 3), (["title: Bomb", "x: &x {y: *x}"], 3)]:
        text = head(*lines)
        meta, offset, warning = gno.front_matter(text)
        assert (meta, text[offset:]) == ({"title": "Bomb"}, "\nbody\n"), lines
        assert re.fullmatch(rf"front matter: .*alias.* \(line {line}\)", warning), warning

def test_depth_and_size():
    assert meta_of("d: " + "[" * 90 + "]" * 90)
    for opening, closing in ("[]", "{}", ("{a: ", "}"), ("- ", ""), ("? ", "")):
        for depth in (200, 5000, 60_000 // len(opening + closing)):
            text = f"---\ntitle: Deep\nd:\n  {opening * depth}x{closing * depth}\n---\nbody\n"
            meta, offset, warning = gno.front_matter(text)
            assert (meta, text[offset:]) == ({"title": "Deep"}, "body\n") and warning, (opening, depth)
    text = "---\ntitle: Big\nk: " + "é" * 33_000 + "\n---\nbody\n"
    meta, offset, warning = gno.front_matter(text)
    assert (meta, text[offset:]) == ({}, "body\n") and "64 KiB" in warning

def test_broken_yaml_keeps_what_can_be_read():
    for lines, meta, line in [
        ([r"key: `C:\agent\run: now`"],                             {}, 2),
        (["title: *Italic*"],                                       {"title": "*Italic*"}, 2),
        (["related:", "  - [[other]]suffix"],                       {}, 3),
        (["title: ok", "\tnested: tab"],                            {"title": "ok"}, 3),
        (["title: Plan: the second", "tags:", "  - a", "- b"],      {"title": "Plan: the second"}, 2),
        (["title: Plan: two", "tags:", "- a", "- 'b'", "date: 2024-01-05"], {"title": "Plan: two", "tags": ["a", "b"], "date": "2024-01-05"}, 2),
        (["title: [unclosed", "tags: : :"],                         {"tags": ": :"}, None),
        (["author: 'A' and B", "aliases: [x, y]", "other: z"],      {"author": "A' and B", "aliases": ["x", "y"]}, 2),
        (["title: a: 1", "title: b: 2"],                            {"title": "b: 2"}, 2),
        (["tags: {a: 1", "x: @"],                                   {}, None),
    ]:
        text = head(*lines)
        found, offset, warning = gno.front_matter(text)
        assert text[offset:] == "\nbody\n" and warning.startswith("front matter: "), lines
        assert {key: value for key, value in found.items() if key != "tags" or "  - a" not in lines} == meta, lines
        assert line is None or warning.endswith(f"(line {line})"), warning

def test_only_lf_ends_a_line():
    for odd in "\u2028\u2029\x85\x0c\ufeff\ud800":
        meta, _, warning = gno.front_matter(f"---\ntitle: a{odd}b\ndate: 1\n---\n")
        assert (meta["title"].split(), meta["date"], warning) == (["a", "b"], "1", "")

def test_yaml_readers(monkeypatch):
    yaml = pytest.importorskip("yaml")
    texts = [head("a: [1, {b: ~}]", "c: &x {d: e}", "f: *x"), head("x: &x [*x]"), head("a: @"), head("title: a: b", "tags: [x, y]")]
    with_c = [gno.front_matter(text)[:2] for text in texts]
    monkeypatch.delattr(yaml, "CBaseLoader", raising=False)
    assert [gno.front_matter(text)[:2] for text in texts] == with_c

def test_without_pyyaml(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    text = head('title: "A note"', "tags: [a, 'b']", "aliases:", "  - x", "  - \"y\"", "status: open")
    meta, offset, warning = gno.front_matter(text)
    assert meta == {"title": "A note", "tags": ["a", "b"], "aliases": ["x", "y"]}
    assert text[offset:] == "\nbody\n" and "PyYAML" in warning

# ---- what metadata says ----------------------------------------------------------------------

def test_title():
    for lines, body, title in [
        (["title: A"],              "# H\n", "A"),
        (["title: 2024"],           "# H\n", "2024"),
        (["title: '  a \t b '"],    "# H\n", "a b"),
        (["Title: A"],              "# H\n", "A"),
        (["title:"],                "# H\n", "H"),
        (["title: ''"],             "# H\n", "H"),
        (["title: [A, B]"],         "# H\n", "H"),
        (["title: {a: b}"],         "# H\n", "H"),
        (["title: " + "long " * 1000], "# H\n", ("long " * 60).strip()),
        ([], "text\n\n# H\n",                           "H"),
        ([], "   # H\n",                                "H"),
        ([], "    # code\n\n# H\n",                     "H"),
        ([], "#H\n## Two\n# One #\n",                   "One"),
        ([], "# H ##\n", "H"), ([], "# C#\n", "C#"), ([], "#\tTab\n", "Tab"),
        ([], "#\n# \n# #\n",                            ""),
        ([], "## Two\n",                                ""),
        ([], "```\n# code\n```\n# H\n",                 "H"),
        ([], "~~~\n# code\n~~~\n",                      ""),
        ([], "<!--\n# comment\n-->\n# H\n",             "H"),
        ([], "Under\n===\n\n# Later\n",                 "Under"),
        ([], "Two\nlines\n=\n",                         "Two lines"),
        ([], "# First\n\nUnder\n===\n",                 "First"),
        ([], "\n===\n",                                 ""),
        ([], "Two\n---\n",                              ""),
        ([], "```\na\n===\n```\n",                      ""),
        ([], "# The *big* **bold** ~~old~~ _one_\n",    "The big bold old one"),
        ([], "# ***Both***\n",                          "Both"),
        ([], "# snake_case_name 2 * 3 * 4 C*\n",        "snake_case_name 2 * 3 * 4 C*"),
        ([], "# `__init__` and ``a ` b``\n",            "__init__ and a ` b"),
        ([], "# A [link](a_(1).md) [[Page]] [[p|Shown]] ![alt](i.png) [r][1]\n", "A link Page Shown alt r"),
        ([], "# [`code`](x.md) \\# \\*kept\\*\n",       "code # *kept*"),
        ([], "# 日本語 🚀\n",                            "日本語 🚀"),
        ([], "# " + "w" * 400 + "\n",                   "w" * 300),
    ]:
        text = ("---\n" + "\n".join(lines) + "\n---\n" if lines else "") + body
        meta, offset, _ = gno.front_matter(text)
        assert gno.title_of(meta, text, offset) == title, (lines, body)

def test_title_ignores_a_comment_line_in_front_matter():
    text = "---\n# not a title\nkey: value\n---\nbody\n"
    meta, offset, _ = gno.front_matter(text)
    assert gno.title_of(meta, text, offset) == ""

def test_dates():
    for written, iso in [
        ("2024-06-29",                      "2024-06-29T00:00:00.000Z"),
        ("2024-1-5",                        "2024-01-05T00:00:00.000Z"),
        ("2024/01/05",                      "2024-01-05T00:00:00.000Z"),
        ("2024-06-29T10:11",                "2024-06-29T10:11:00.000Z"),
        ("2024-06-29 10:11:12",             "2024-06-29T10:11:12.000Z"),
        ("2024-06-29T10:11:12.3456Z",       "2024-06-29T10:11:12.345Z"),
        ("2024-06-29T00:30:00+02:00",       "2024-06-28T22:30:00.000Z"),
        ("2024-06-29T23:30:00 -0130",       "2024-06-30T01:00:00.000Z"),
        ("2001-12-14 21:59:43.10 -5",       "2001-12-15T02:59:43.100Z"),
        ("0099-01-02",                      "0099-01-02T00:00:00.000Z"),
        ("2024-02-30", ""), ("12/31/2024", ""), ("2024-13-01", ""), ("2024-01/05", ""), ("2024-01-05T25:00", ""), ("2024-01-05T10:00:60", ""),
        ("0000-01-01", ""), ("0001-01-01T00:00+01:00", ""), ("9999-12-31T23:00-02:00", ""), ("2024", ""), ("tomorrow", ""), ("", ""),
        ("٢٠٢٤-٠١-٠٥", ""),
    ]:
        assert gno.iso_date(written) == iso, written

def test_doc_meta():
    nothing = {"author": "", "date": "", "categories": [], "type": "", "lang": ""}
    for lines, said in [
        (["x: y"],                                          {}),
        (["author: 007"],                                   {"author": "007"}),
        (["author: [Ann  Example, Bo Example]"],            {"author": "Ann Example; Bo Example"}),
        (["author:", "by: B", "creator: C"],                {"author": "B"}),
        (["author: {name: A}", "owner: O"],                 {"author": "O"}),
        (["date: 12/31/2024", "createdAt: 2024-1-5"],       {"date": "2024-01-05T00:00:00.000Z"}),
        (["updated_at: 2025-01-01", "published: 2024-01-01"], {"date": "2024-01-01T00:00:00.000Z"}),
        (["Published At: 2024-01-01"],                      {"date": "2024-01-01T00:00:00.000Z"}),
        (["date: [2024-01-01]", "created: 2023-01-01"],     {"date": "2023-01-01T00:00:00.000Z"}),
        (["type: Meeting"],                                 {"type": "meeting", "categories": ["meeting"]}),
        (["type: note", "category: 'A, b , a'"],            {"type": "note", "categories": ["a", "b"]}),
        (["categories: [X, Y, x]"],                         {"categories": ["x", "y"]}),
        (["type: [a, b]"],                                  {"categories": ["a", "b"]}),
        (["lang: de-CH"],                                   {"lang": "de-CH"}),
        (["language: en"],                                  {"lang": "en"}),
        (["language: english"],                             {}),
    ]:
        assert gno.doc_meta(meta_of(*lines)) == nothing | said, lines

def test_relations():
    for lines, relations in [
        (["relations: {works-at: '[[Acme]]'}"],             [("works_at", "[[Acme]]")]),
        (["relations:", "  related_to: [a/b, c]", "  Part Of: d"], [("related_to", "a/b"), ("related_to", "c"), ("part_of", "d")]),
        (["relations:", "  knows: [[Acme]]"],               [("knows", "[[Acme]]")]),       # a list in a list to YAML
        (["relations:", "  knows:", "    - [[A]]", "    - '[[B]]'"], [("knows", "[[A]]"), ("knows", "[[B]]")]),
        (["relations: {9x: a, '': b, 'ü': c, ok: ~, no: {a: b}, e: ''}"], []),
        (["relations: text"], []), (["relations: [a]"], []), (["x: y"], []),
    ]:
        assert gno.relations_of(meta_of(*lines)) == relations, lines

# ---- mask ------------------------------------------------------------------------------------

def test_mask_hides_code_and_keeps_prose():
    for text in [       # `show` stays, `hide` goes
        "show\n```\nhide\n```\nshow\n",
        "show\n~~~ hide\nhide\n~~~\nshow\n",
        "```\nhide\n~~~\nhide\n```\nshow\n",
        "````\n```\nhide\n```\n````\nshow\n",
        "```\nhide\n````\nshow\n",                      # a longer run closes too
        "```\nhide\n``` hide\nhide\n",                  # a closing fence says nothing more; open to the end
        "   ```\n   hide\n  ```\nshow\n",
        "```\nhide\n    ```\nhide\n",                   # four columns in is no fence
        "``` a`b\nshow\n",                              # no backtick in an info string
        "para\n```\nhide\n```\nshow\n",
        "- show\n\n  ```\n  hide\n  ```\n- show\n",
        "- show\n  ```\n  hide\nshow\n",                # the list ends, so does the fence
        "1. ```\n   hide\n   ```\n   show\n",
        "- - ```\n    hide\n    ```\n  show\n",
        "> ```\n> hide\n> ```\n> show\n",
        "> ```\n> hide\nshow\n",
        "> ```\n> hide\n\n> show\n",
        "```\n> ```\nhide\n```\nshow\n",
        "> - ```\n>   hide\n>   ```\n>   show\n",
        "- > ```\n  > hide\n  show\n",
        "show\n\n    hide\n\n    hide\n\nshow\n",
        "show\n\n\thide\nshow\n",
        "    hide\nshow\n",
        "# show\n    hide\n",                           # only a paragraph goes on in an indented line
        "show\n    show\n",
        "- show\n    - show\n        - show\n",
        "- show\n\n    - show\n\n        - show\n",
        "- show\n\n      hide\n",
        "- show\n\n\tshow\n\n\t\thide\n",
        "1. show\n\n    show\n",
        "10. show\n\n    show\n\n         hide\n",
        "- show\n\nshow\n\n    hide\n",
        "- show\n## show\n\n    hide\n",
        "-     hide\n",
        "* * *\n    hide\n",
        "> show\n>\n>     hide\n",
        "- > show\n\n    show\n",
        "- show `hide` show\n",
        "show ``hide ` hide`` show\n",
        "show ` show\n\nshow ` show\n",                 # no span over a blank line
        "show `hide\nhide` show\n",
        "- show ` show\n- show ` show\n",
        "# show ` show\nshow ` show\n",
        "show ` show\n> show ` show\n",
        "> show `hide\n> hide` show\n",
        "show `` show ` show\n",
        "show ``` show\n",
        "show \\`show\\` `hide\\` show\n",             # a backslash hides a tick before a span, not in one
        "show <!-- hide --> show\n",
        "show\n<!--\nhide\n\nhide\n-->\nshow\n",
        "show <!-- hide\n\nhide\n",
        "<!-- ` hide --> show ` show\n",
        "show `<!-- hide` show -->\n",
        "<!--> show -->\n",
        "```\n<!-- hide\n```\nshow\n",
        "<!--\n```\nhide\n-->\nshow\n",
    ]:
        masked = gno.mask(text, 0)
        assert [len(line) for line in masked.split("\n")] == [len(line) for line in text.split("\n")], text
        assert "hide" not in masked and masked.count("show") == text.count("show"), f"{text}\n->\n{masked}"

def test_mask_blanks():
    for text, masked in [
        ("a \\[b\\] \\\\ \\a c\n",      "a   b      \\a c\n"),
        ("| [[a\\|b]] |\n",             "| [[a\\|b]] |\n"),        # a table's wiki link keeps its pipe
        ("a `b` c\n",                   "a     c\n"),
        ("a\u2028`b\x85c`\n",           "a\u2028     \n"),         # these end no line
        ("no marks\n",                  "no marks\n"), ("", ""),
    ]:
        assert gno.mask(text, 0) == masked, text
    text = "---\na: '[[x]]'\n---\n[[y]]\n"
    assert gno.mask(text, gno.front_matter(text)[1]) == "   \n" + " " * 10 + "\n   \n[[y]]\n"

# ---- links -----------------------------------------------------------------------------------

def test_link_forms():
    for text, expected in [     # (kind, target, anchor, alias, embed)
        ("[[Note]]",                        [("wiki", "Note", "", "", False)]),
        ("[[Note|nice]]",                   [("wiki", "Note", "", "nice", False)]),
        ("[[ Note | nice ]]",               [("wiki", "Note", "", "nice", False)]),
        ("[[Note|Note]]",                   [("wiki", "Note", "", "", False)]),
        ("[[Note#H 1|s]]",                  [("wiki", "Note", "H 1", "s", False)]),
        ("[[Note#H#I]]",                    [("wiki", "Note", "H#I", "", False)]),
        ("![[Note#^b1]]",                   [("wiki", "Note", "^b1", "", True)]),
        ("![[pic.png|100]]",                [("wiki", "pic.png", "", "100", True)]),
        ("\\![[Note]]",                     [("wiki", "Note", "", "", False)]),
        ("[[work:Launch List#a]]",          [("wiki", "work:Launch List", "a", "", False)]),
        ("[[a.b/c d]] [[日本 🚀]]",          [("wiki", "a.b/c d", "", "", False), ("wiki", "日本 🚀", "", "", False)]),
        ("| [[sub/foo\\|Foo]] | ![[foo#P\\|100]] |", [("wiki", "sub/foo", "", "Foo", False), ("wiki", "foo", "P", "100", True)]),
        ("[[#h]] [[ ]] [[]] [[|x]] [[https://e.test/x]] [[mailto:a@b.test]] [[//e.test]]", []),
        ("[[a\nb]] [[a]", []), ("\\[[a]] [\\[a]] [[a\\]]", []), ("`[[a]]` [[`a`]]", []),
        ("[[[a]]]",                         [("wiki", "a", "", "", False)]),
        ("[text]([[Page]])",                [("wiki", "Page", "", "text", False)]),
        ("[text]([[Page#h|shown]])",        [("wiki", "Page", "h", "shown", False)]),
        ("[[a]]: text",                     [("wiki", "a", "", "", False)]),
        ("[[a]](b and c)",                  [("wiki", "a", "", "", False)]),
        ("[[1]](https://e.test)",           []),                    # a numbered citation
        ("see [[a]](b.md)",                 [("markdown", "b.md", "", "[a]", False)]),
        ("[x](a.md)",                       [("markdown", "a.md", "", "x", False)]),
        ("[](a.md) [y]( a.md )",            [("markdown", "a.md", "", "", False), ("markdown", "a.md", "", "y", False)]),
        ("[x](My%20Note.md#a%20b)",         [("markdown", "My%20Note.md", "a%20b", "x", False)]),
        ("[x](<My Note.md#h>)",             [("markdown", "My Note.md", "h", "x", False)]),
        ("[x](My Note.md)",                 []),
        ("[x](a_(1).md) [y](a((b)c).md)",   [("markdown", "a_(1).md", "", "x", False), ("markdown", "a((b)c).md", "", "y", False)]),
        ("[x](a\\_\\).md)",                 [("markdown", "a\\_\\).md", "", "x", False)]),
        ("""[a](a.md "t") [b](b.md 't') [c](c.md (t))""", [("markdown", f"{c}.md", "", c, False) for c in "abc"]),
        ('[a](a.md "t\\" [b](b.md)")',      [("markdown", "a.md", "", "a", False)]),
        ("[two\nlines](\n  a.md\n  'title')", [("markdown", "a.md", "", "two lines", False)]),
        ("[no\n\nlink](a.md)",              []),
        ("[`code` \\[x\\]](a.md)",          [("markdown", "a.md", "", "`code` [x]", False)]),
        ("[a [b] c](n.md)",                 [("markdown", "n.md", "", "a [b] c", False)]),
        ("[a [b](c.md) d](e.md)",           [("markdown", "c.md", "", "b", False)]),      # links do not nest
        ("[![alt](i.png)](a.md)",           [("markdown", "a.md", "", "![alt](i.png)", False)]),
        ("![alt](a.md) ![x][1]",            []),
        ("[x](https://e.test/a.md) [m](mailto:a@b.test) [h](#h) [p](//e.test) [e]() [c](work:a.md)", []),
        ("[pdf](paper.pdf) [up](../n.md)",  [("markdown", "paper.pdf", "", "pdf", False), ("markdown", "../n.md", "", "up", False)]),
        ("- [ ] todo\n- [x] done (a)\n",    []),
        ("[1]: ../idea.md 't'\n\n  [b c]: <My Note.md#h>\n", [("markdown", "../idea.md", "", "", False), ("markdown", "My Note.md", "h", "", False)]),
        ("[1]: https://e.test\n[^1]: note.md\n[2]: two words\ntext [3]: a.md\n    [4]: a.md\n", []),
        ("[^1]: see [x](a.md)\n",           [("markdown", "a.md", "", "x", False)]),
        ("[a]\n(b.md) [a] (b.md) a](b.md)", []),
        ("[x](" + "a" * 300 + ".md)",       [("markdown", "a" * 300 + ".md", "", "x", False)]),
        ("[" + "x" * 300 + "](a.md)",       [("markdown", "a.md", "", "x" * 256, False)]),
        ("<a.md> http://e.test/[[x",        []),
    ]:
        assert [link[:5] for link in links(text)] == expected, text

def test_link_places():
    text = "# 🚀 [[a]] ![[b|c]]\n\n- é [x](<y z.md#h> 't')  [[ w#h | v ]]\n"
    assert [(link.line, link.col, text[link.start:link.end], text[link.target_start:link.target_end]) for link in links(text)] == [
        (1, 6, "[[a]]", "a"),               # the rocket is two UTF-16 units
        (1, 12, "![[b|c]]", "b"),
        (3, 5, "[x](<y z.md#h> 't')", "y z.md"),
        (3, 26, "[[ w#h | v ]]", "w"),
    ]
    text = "a\u2028b\x85c\x0cd [[x]]\n"     # one line
    assert [(link.line, link.col) for link in links(text)] == [(1, 9)]

def test_links_after_front_matter_and_code():
    text = "---\nup: '[[no]]'\n---\n\nReal [[target]].\n\n```sh\nif [[ -n \"$x\" ]]; then echo [[target]]; fi\n```\n\n~~~toml\n[[bin]]\n~~~\n"
    text += "\nInline `[[target]]` and ``a ` [[target]] b``.\n\n    indented [[target]]\n\n<!-- [[target]] -->\n\n```\nopen [[target]]\n"
    found = gno.find_links(text, gno.mask(text, gno.front_matter(text)[1]))
    assert [(link.target, link.line, link.col) for link in found] == [("target", 5, 6)]

# ---- tags ------------------------------------------------------------------------------------

def test_front_matter_tags():
    for lines, expected in [
        (["tags: work"],                    ["work"]),
        (["tags: work, home"],              ["home", "work"]),
        (["tags: [work, '#home']"],         ["home", "work"]),
        (["tags:", "  - work", "  - 2024"], ["2024", "work"]),
        (["tags: '[\"a\",\"b\"]'"],         ["a", "b"]),
        (["tags: '[a, b]'"],                ["a", "b"]),
        (["tags: '\"a\", b'"],              ["a", "b"]),
        (["tags: '#a #b'"],                 ["a", "b"]),
        (["tags: null"], []), (["tags: []"], []), (["tags: [~, '']"], []), (["tags: {a: 1}"], []),
        (["tags: [[nested], [a, [b]]]"],    ["a", "b", "nested"]),
        (["tags: Work/Project"],            ["work/project"]),
        (["tags: [x, X, '#x', 'x/']"],      ["x"]),
        (["tags: [1.0, 08, v1.2-rc]"],      ["08", "1.0", "v1.2-rc"]),
        (["tag: a", "Tags: [b]"],           ["a", "b"]),
        (["tags:: a, b"],                   ["a", "b"]),
        (["tags: [two words, a_b, a//b, -a, .a, 'a:b', '/a']"], []),
        (["tags: [ÜBER, 日本語, हिन्दी]"],    ["über", "हिन्दी", "日本語"]),
    ]:
        assert gno.find_tags("", meta_of(*lines), 0) == expected, lines

def test_inline_tags():
    for text, expected in [
        ("# Heading #real-tag\n",               ["real-tag"]),
        ("Phase #1, #0033cc and #fff, #12-34",  []),
        ("#e2e #b2b #decade #v2 #2nd",          ["2nd", "b2b", "decade", "e2e", "v2"]),
        ("\\#notag #nested/tag-2, #日本語, # , ##, #a", ["a", "nested/tag-2", "日本語"]),
        ("(#paren) #end. #x_y #Up/Per/ 「#引用」", ["end", "paren", "up/per", "x", "引用"]),
        ("#हिन्दी #café #re\u0301sume\u0301",     ["café", "résumé", "हिन्दी"]),
        ("a#b /#c ##d &#x41; é#f 日#g",          []),
        ("http://x.test/a#frag http://x.test/?#q x://y/-#z", []),
        ("[x](a.md#frag) [y](#top) [z](<a b #c>) [[#head]] [[Note #h]] <a href=\"#i\">", []),
        ("[[a]] #after [x](y) #more",           ["after", "more"]),
        ("| #cell | b |\n|---|---|\n| x | #incell |\n", ["cell", "incell"]),
        ("```css\na { color: #abcabd } /* #incode */\n```\n`#inline` <!-- #gone -->\n", []),
        ("#-a #/a #a/-b",                       []),
        ("tags:: a, b",                         ["a", "b"]),
        ("- tags:: [[Two]], #b\n",              ["b", "two"]),
        ("\n" * 9 + "tags:: a\n",               ["a"]),
        ("\n" * 10 + "tags:: a\n",              []),
        ("my tags:: a\n",                       []),
    ]:
        assert tags(text) == expected, text

def test_normal_tag():
    for text, tag in [("Work/Project", "work/project"), (" #A/ ", "a"), ("e\u0301", "é"), ("1.0", "1.0"), ("a-", "a-"),
                      ("", ""), ("#", ""), ("/", ""), ("a b", ""), ("a_b", ""), ("a,b", ""), ("-a", ""), ("a/.b", ""), ("🚀", "")]:
        assert gno.normal_tag(text) == tag, text

# ---- properties ------------------------------------------------------------------------------

PIECES = ["a", "b c", " ", "    ", "\n", "\n\n", "\t", "`", "``", "```", "~~~", "[", "]", "[[", "]]", "(", ")", "](", "]: ", "|", "\\", "\\|", "#",
          "# ", "##", "-", "- ", "1. ", "> ", "<!--", "-->", "!", "![[", "<", ">", '"', "'", "*", "_", "=", "===", "---", "...", ":", "tags:: ", ", ",
          "://", "[x](a.md)", "[[a|b]]", "é", "日", "🚀", "\u2028", "\x85", "&", "{", "}", "title: ", "tags: ", "&x ", "*x", "~"]
notes = st.one_of(st.lists(st.sampled_from(PIECES), max_size=40).map("".join), st.text(max_size=60),
                  st.lists(st.sampled_from(PIECES), max_size=20).map(lambda pieces: "---\n" + "".join(pieces) + "\n---\n[[x]] #y\n"))

@settings(max_examples=500, deadline=None)
@given(notes)
def test_any_text(text):
    meta, offset, warning = gno.front_matter(text)
    assert json.loads(json.dumps(meta)) == meta and 0 <= offset <= len(text) and isinstance(warning, str)
    assert offset == 0 or text[:offset].endswith("\n") or offset == len(text)
    masked = gno.mask(text, offset)
    assert [len(line) for line in masked.split("\n")] == [len(line) for line in text.split("\n")]
    assert all(new in (old, " ") for old, new in zip(text, masked, strict=True)) and not masked[:offset].strip()
    last = -1
    for link in gno.find_links(text, masked):
        assert text[link.target_start:link.target_end] == link.target == link.target.strip() != ""
        assert last <= link.start <= link.target_start <= link.target_end <= link.end and link.start >= offset
        last = link.end
        before = text[:link.start]
        assert link.line == before.count("\n") + 1
        assert link.col == len(before.rpartition("\n")[2].encode("utf-16-le")) // 2 + 1
        assert text[link.start] in "![" and link.embed == (link.kind == "wiki" and text[link.start] == "!") and len(link.alias) <= 256
    found = gno.find_tags(masked, meta, offset)
    assert found == sorted(set(found)) and all(gno.normal_tag(tag) == tag for tag in found)
    title = gno.title_of(meta, text, offset)
    assert title == " ".join(title.split()) and len(title) <= 300
    said = gno.doc_meta(meta)
    assert said["date"] == "" or gno.iso_date(said["date"]) == said["date"]
    assert all(re.fullmatch("[a-z][a-z0-9_]*", kind) and target for kind, target in gno.relations_of(meta))

yaml_values = st.recursive(st.none() | st.text("ab1:-#é ", max_size=6),
                           lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3), max_leaves=8)

@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text("abcé", min_size=1, max_size=5), yaml_values, min_size=1, max_size=4))
def test_what_is_written_is_read(meta):
    assert gno.front_matter("---\n" + json.dumps(meta) + "\n---\n") == (meta, len(json.dumps(meta)) + 9, "")

# A quadratic step makes any of these take minutes.
HOSTILE = ["(", "](", "[x](", "[x](a", '[x](a "', "[x](((", "[x]( ", "[a](b)", "[[a", "[[a]](", "[x]([[", "[a [b](c) ](d e)", "\n[a]: x '", "![", "#a", "# #\n", "a\n=\n",
           "`a` ``", "`a\n", "```\n", "> ```a\nx\n", "- ```a\n  x\n", "\n- a\n\n    x", "    x\n\n", "- - - x\n  y\n", "\\`", "<!--", "<!-", "> ", "_a_", "://", "\\|", "é#é"]

@pytest.mark.parametrize("text", ["#" * 1_000_000, "[" * 1_000_000, "`" * 1_000_000, "[[" * 500_000, "(" * 1_000_000, "- " * 200_000 + "x\n    y\n",
                                  "[" * 500_000 + "]" * 500_000, "".join("`" * n + " " for n in range(1400)), "[x](" + " " * 1_000_000 + ")",
                                  "[[a]] 🚀 " * 50_000, *(piece * (150_000 // len(piece)) for piece in HOSTILE)], ids=lambda text: repr(text[:12]))
def test_hostile_text_ends(text):
    masked = gno.mask(text, 0)
    assert len(masked) == len(text)
    for structure in (masked, text):
        gno.find_links(text, structure)
        gno.find_tags(structure, {}, 0)
    gno.title_of({}, text, 0)
    gno.front_matter("---\n" + text)
    gno.front_matter("---\n" + text[:60_000] + "\n---\n")
