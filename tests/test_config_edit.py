"""Edits of index.yml as text: what was asked for changes, and nothing else does."""
import difflib

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import gno

CONFIG = """\
# My notes. Do not lose this comment.
version: "1.0"          # quoted on purpose

collections:
  # work
  - name: work
    path: /data/work    # the big one
    pattern: '**/*.md'
    include: [md, "txt"]
    # exclude: [drafts]

  # home, the small one
  # (two lines)
  - path: "/data/home"
    name: 'home'
    models:
      embed: file:/m/embed

# what follows is not for the program
zip: 00123
odd: {a: [1, 2], b: yes}
contexts: []
models:
  activePreset: shipped
  # loadTimeout: 1
"""


def edits(old: str, new: str) -> tuple[list[str], list[str]]:
    "(lines gone, lines added), blank ones and the kind of line end apart."
    before, after = ([line for line in text.replace("\r\n", "\n").split("\n") if line] for text in (old, new))
    gone, added = [], []
    for kind, start, end, first, last in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind != "equal":
            gone += before[start:end]
            added += after[first:last]
    return gone, added


def both(text: str):
    return yaml.load(text, yaml.BaseLoader)


@pytest.mark.parametrize("old, new", [
    ("", 'version: "1.0"\ncollections:\n  - name: n\n    path: /p\n'),
    ("\n", '\nversion: "1.0"\ncollections:\n  - name: n\n    path: /p\n'),
    ("# mine", '# mine\nversion: "1.0"\ncollections:\n  - name: n\n    path: /p\n'),
    ("---\n", '---\nversion: "1.0"\ncollections:\n  - name: n\n    path: /p\n'),
    ("\ufeff", '\ufeffversion: "1.0"\ncollections:\n  - name: n\n    path: /p\n'),
    ("\ufeffa: 1\r\n", "\ufeffa: 1\r\ncollections:\r\n  - name: n\r\n    path: /p\r\n"),
    ("a: 1", "a: 1\ncollections:\n  - name: n\n    path: /p\n"),
    ("a: 1\n# end\n", "a: 1\n# end\ncollections:\n  - name: n\n    path: /p\n"),
    ("  a: 1\n", "  a: 1\n  collections:\n    - name: n\n      path: /p\n"),
    ("collections:", "collections:\n  - name: n\n    path: /p\n"),
    ("collections: []\nb: 1\n", "collections:\n  - name: n\n    path: /p\nb: 1\n"),
    ("collections: [ ]   # none\nb: 1\n", "collections:   # none\n  - name: n\n    path: /p\nb: 1\n"),
    ("collections: ~\n", "collections:\n  - name: n\n    path: /p\n"),
    ("collections: null # x\r\n", "collections: # x\r\n  - name: n\r\n    path: /p\r\n"),
    ("collections:\n  []\nb: 1\n", "collections:\n  - name: n\n    path: /p\nb: 1\n"),
    ("collections:\n  # - name: sample\nb: 1\n", "collections:\n  - name: n\n    path: /p\n  # - name: sample\nb: 1\n"),
    ('"collections" : {}\n', '"collections":\n  - name: n\n    path: /p\n'),
    ("collections:\n- name: a\nb: 1\n", "collections:\n- name: a\n- name: n\n  path: /p\nb: 1\n"),
    ("collections:\n-   name: a\n    path: /a", "collections:\n-   name: a\n    path: /a\n-   name: n\n    path: /p\n"),
    ("collections:\n    -\n      name: a\n", "collections:\n    -\n      name: a\n    - name: n\n      path: /p\n"),
    ("collections:\n  - name: a # x - y\n    # more: 1\n  # next\n\nb: 1\n",
     "collections:\n  - name: a # x - y\n    # more: 1\n  - name: n\n    path: /p\n  # next\n\nb: 1\n"),
    ("collections:\n  - name: a\n    text: |\n      one\n\n      # two\n# end\n",
     "collections:\n  - name: a\n    text: |\n      one\n\n      # two\n  - name: n\n    path: /p\n# end\n"),
    ("collections:\n  - name: a\n    empty:\n  -\n", "collections:\n  - name: a\n    empty:\n  -\n  - name: n\n    path: /p\n"),
    ("collections: [{name: a}]\n", 'collections: [{name: a}, {"name": "n", "path": "/p"}]\n'),
    ("collections: [\n  {name: a}, # x\n]\n", 'collections: [\n  {name: a}, {"name": "n", "path": "/p"}, # x\n]\n'),
    ("collections:\n  - name: a\n...\n", "collections:\n  - name: a\n  - name: n\n    path: /p\n...\n"),
])
def test_add(old, new):
    assert gno.yaml_add(old, "collections", {"name": "n", "path": "/p"}) == new


def test_add_keeps_every_line():
    item = {"name": "third", "path": "C:\\notes", "pattern": "**/*.md", "include": ["md", "*.txt"], "exclude": [], "gitignore": False,
            "models": {"embed": "file:/m", "more": {"x": "y"}}, "text": "a: b # c", "empty": {}}
    text = gno.yaml_add(CONFIG, "collections", item)
    gone, added = edits(CONFIG, text)
    assert gone == [] and added == [
        "  - name: third", "    path: C:\\notes", '    pattern: "**/*.md"', '    include: [md, "*.txt"]', "    exclude: []", "    gitignore: false",
        "    models:", "      embed: file:/m", "      more:", "        x: y", '    text: "a: b # c"', "    empty: {}"]
    assert yaml.safe_load(text)["collections"][2] == item
    assert text.index("(two lines)") < text.index("third") < text.index("# what follows")


@pytest.mark.parametrize("match, old, new", [
    ({"name": "a"}, "collections:\n  - name: a\n", "collections: []\n"),
    ({"name": "a"}, "collections: # mine\n  - name: a\nb: 1", "collections: [] # mine\nb: 1"),
    ({"name": "a"}, "collections:\r\n- name: a\r\n  path: /a\r\n- name: b\r\n", "collections:\r\n- name: b\r\n"),
    ({"name": "b"}, "collections:\n- name: a\n- name: b", "collections:\n- name: a\n"),
    ({"name": "b"}, "collections:\n- name: a\n  # of a\n\n# of b\n# too\n- name: b\n  # within\n# end\n",
     "collections:\n- name: a\n  # of a\n\n# end\n"),
    ({"name": "b"}, "collections:\n  - name: a\n    # of a\n  - name: b\n", "collections:\n  - name: a\n    # of a\n"),
    ({"name": "a"}, "collections:\n  # header\n\n  - name: a\n  - name: b\n", "collections:\n  # header\n\n  - name: b\n"),
    ({"name": "a"}, "collections:\n  - name: a\n    text: |\n      # in the text\n  - name: b\n", "collections:\n  - name: b\n"),
    ({"name": "a", "path": "/2"}, "collections:\n- {name: a, path: /1}\n- {name: a, path: /2}\n", "collections:\n- {name: a, path: /1}\n"),
    ({"on": True}, "collections:\n- on: false\n- on: true\n- on: true\n", "collections:\n- on: false\n"),
    ({"name": "1"}, "collections:\n- name: 1\n- name: 2\n", "collections:\n- name: 2\n"),
    ({"name": "a"}, "collections: [{name: a}, {name: b}]\n", "collections: [{name: b}]\n"),
    ({"name": "b"}, "collections: [{name: a}, {name: b}]\n", "collections: [{name: a}]\n"),
    ({"name": "b"}, "collections: [{name: a}, {name: b}, {name: b}, {name: c}]\n", "collections: [{name: a}, {name: c}]\n"),
    ({"name": "a"}, "collections: [ {name: a}, ]\n", "collections: [ ]\n"),
    ({"name": "a"}, "collections: [\n  {name: a}, # of a\n  {name: b}\n]\n", "collections: [\n  # of a\n  {name: b}\n]\n"),
    ({"name": "x"}, "collections:\n- name: a\n", "collections:\n- name: a\n"),
    ({"name": "x"}, "a: 1", "a: 1"),
    ({"name": "x"}, "collections:\n", "collections:\n"),
    ({"name": "a"}, "other: 1\ncollections:\n  -\n    name: a\n  - # of b\n    name: b\n", "other: 1\ncollections:\n  - # of b\n    name: b\n"),
    ({"name": "b"}, "collections:\n  - name: a\n  - # of - b\n    name: b\nc: 1\n", "collections:\n  - name: a\nc: 1\n"),
])
def test_remove(match, old, new):
    assert gno.yaml_remove(old, "collections", match) == new


def test_remove_keeps_the_other_lines():
    text = gno.yaml_remove(CONFIG, "collections", {"name": "home"})
    gone, added = edits(CONFIG, text)
    assert added == [] and gone == ["  # home, the small one", "  # (two lines)", '  - path: "/data/home"', "    name: 'home'", "    models:",
                                    "      embed: file:/m/embed"]
    assert gno.yaml_remove(gno.yaml_remove(CONFIG, "collections", {"name": "work"}), "collections", {"name": "home"}).count("collections: []") == 1


@pytest.mark.parametrize("field, value, old, new", [
    ("path", "/new", "c:\n- name: a\n  path: /old   # why\n", "c:\n- name: a\n  path: /new   # why\n"),
    ("path", "a: b", "c:\n- name: a\n  path: '/old'\n", 'c:\n- name: a\n  path: "a: b"\n'),
    ("name", "b", "c:\r\n- name: a # x\r\n", "c:\r\n- name: b # x\r\n"),
    ("path", "/n", "c:\n  - name: a # first\n    # note\n    z: 1\n", "c:\n  - name: a # first\n    path: /n\n    # note\n    z: 1\n"),
    ("path", "/n", "c:\n  - name: a", "c:\n  - name: a\n    path: /n\n"),
    ("path", "/n", "c:\n  - z:\n      - 1\n    name: a\n", "c:\n  - z:\n      - 1\n    path: /n\n    name: a\n"),
    ("on", False, "c:\n- name: a\n  on: yes\n", "c:\n- name: a\n  on: false\n"),
    ("on", True, "c:\n- name: a\n  on:\n  x: 1\n", "c:\n- name: a\n  on: true\n  x: 1\n"),
    ("path", "/n", "c: [{name: a}, {name: b}]\n", 'c: [{name: a, "path": "/n"}, {name: b}]\n'),
    ("path", "/n", "c: [{name: a, path: /o}]\n", 'c: [{name: a, path: "/n"}]\n'),
    ("path", "/n", "c:\n- {name: a, path: }\n", 'c:\n- {name: a, path: "/n" }\n'),
    ("path", "x", "c:\n- name: a\n  path: two\n    lines\n  z: 1\n", "c:\n- name: a\n  path: x\n  z: 1\n"),
])
def test_set(field, value, old, new):
    assert gno.yaml_set(old, "c", {"name": "a"}, field, value) == new


def test_set_of_nothing_is_an_error():
    with pytest.raises(gno.GnoError) as error:
        gno.yaml_set(CONFIG, "collections", {"name": "none"}, "path", "/x")
    assert error.value.code == "NOT_FOUND"


@pytest.mark.parametrize("path, value, old, new", [
    ("models activePreset", "fast", "models:\n  activePreset: shipped # x\n", "models:\n  activePreset: fast # x\n"),
    ("models activePreset", "fast", "", 'version: "1.0"\nmodels:\n  activePreset: fast\n'),
    ("models activePreset", "fast", "models:\n# end", "models:\n  activePreset: fast\n# end"),
    ("models activePreset", "fast", "models: {}\nz: 1\n", "models:\n  activePreset: fast\nz: 1\n"),
    ("models activePreset", "fast", "models:\n    presets:\n    - id: x\n    # more\n\nz: 1\n",
     "models:\n    presets:\n    - id: x\n    # more\n    activePreset: fast\n\nz: 1\n"),
    ("models activePreset", "fast", "models: {a: 1}\n", 'models: {a: 1, "activePreset": "fast"}\n'),
    ("models activePreset", "fast", "models: {a: 1, activePreset: b}\n", 'models: {a: 1, activePreset: "fast"}\n'),
    ("gateway limits maxSessions", 12, "a: 1\n", "a: 1\ngateway:\n  limits:\n    maxSessions: 12\n"),
    ("gateway limits maxSessions", 12, "gateway:\n  limits:\n    x: 1\n  host: h\n", "gateway:\n  limits:\n    x: 1\n    maxSessions: 12\n  host: h\n"),
    ("gateway limits maxSessions", 12, "gateway: {limits: {}}\n", 'gateway: {limits: {}}\n'.replace("{}}", '{"maxSessions": 12}}')),
    ("top", "no", "a: 1\r\n", 'a: 1\r\ntop: "no"\r\n'),
    ("top", None, "top: x\n", "top: null\n"),
    ("top", "two\nlines", "top: |\n  old\n  text\nz: 1\n", 'top: "two\\nlines"\nz: 1\n'),
])
def test_map_set(path, value, old, new):
    assert gno.yaml_map_set(old, path.split(), value) == new


EDITS = {
    "add": lambda text: gno.yaml_add(text, "collections", {"name": "n"}),
    "remove": lambda text: gno.yaml_remove(text, "collections", {"name": "a"}),
    "set": lambda text: gno.yaml_set(text, "collections", {"name": "a"}, "path", "/x"),
    "map": lambda text: gno.yaml_map_set(text, ["models", "activePreset"], "x"),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("text", [
    "collections:\n- &x {name: a}\n- *x\n", "x: &x 1\ncollections:\n- name: a\n", "collections: !!seq\n- name: a\n", "a: !x 1\n",
    "collections:\n- name: a\n---\nb: 1\n", "{collections: [{name: a}]}", "- name: a\n", "just text", "collections:\n- name: a\n bad\n", "a: [1\n",
    "collections:\n- name: a\ncollections:\n- name: a\n", "? [x]\n: 1\n", "a: \"\x01\"\n", "a: b: c\n",
])
def test_text_that_cannot_be_edited_is_refused(edit, text):
    with pytest.raises(gno.GnoError) as error:
        EDITS[edit](text)
    assert error.value.code == "CONFLICT" and error.value.message.startswith("index.yml: ")
    assert "cannot be edited in place" in error.value.message and error.value.hint == "edit the file by hand"


@pytest.mark.parametrize("edit, text", [
    ("add", "collections: {a: 1}\n"), ("add", "collections: text\n"), ("add", "collections: [\n  # - name: a\n]\n"),
    ("add", "a: 1\n...\n"), ("set", "collections:\n- name: a\n  path: [x]\n"), ("map", "models: text\n"), ("map", "models: [x]\n"),
    ("map", "models:\n  activePreset:\n    a: 1\n"), ("map", "a: |\n  no end of line"),
    ("remove", "collections: [{name: b}, # of b\n  {name: a}]\n"),
])
def test_edits_that_would_lose_something_are_refused(edit, text):
    with pytest.raises(gno.GnoError, match="cannot be edited in place"):
        EDITS[edit](text)


# ---- properties

WORDS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["yes", "no", "null", "~", "1.0", "00123", "2024-01-01", "22:30", "*a", "&a", "- a", "a: b", "a #b", "#a", " a", "a ", "'a'", '"',
                     "\\", "a,b", "[a]", "{a}", "?", "%x", "@x", "`x", "!x", "|", ">", "---", "...", "=", "<<", "\u2028", "\x85", "\x7f", "\ufeff",
                     "\U0001f600", "é", "a\nb", "\t", "C:\\notes", "/p/a b", "**/*.md", "\ud800"]))


@given(WORDS, st.lists(WORDS, max_size=3), st.booleans(), st.sampled_from(["collections: []\n", "collections:\n- a: 1\n", "collections: [a]\n"]))
def test_values_come_back_as_they_went_in(word, words, flag, text):
    item = {"name": word, "list": words, "flag": flag, "map": {"key": word}, word: "key"}
    assert yaml.safe_load(gno.yaml_add(text, "collections", item))["collections"][-1] == item
    assert yaml.safe_load(gno.yaml_map_set(text, ["a", "b"], word))["a"] == {"b": word}


COMMENT = st.sampled_from(["", "", "# note", "# a: b", "# - name: x", "#"])
NAME = st.sampled_from(["a", "b", "c"])


@st.composite
def configs(draw):
    "Configs in many layouts: indents, comments, blank lines, quotes, line ends."
    dash, gap = draw(st.sampled_from(["", "  ", "    "])), draw(st.sampled_from([" ", "   "]))
    field = dash + " " * (1 + len(gap))
    lines = []

    def remark(*indents):
        for comment in draw(st.lists(COMMENT, max_size=2)):
            lines.append(draw(st.sampled_from(indents)) + comment if comment else "")

    remark("")
    lines.append('version: "1.0"')
    lines.append(draw(st.sampled_from(["collections:", "collections: # all", "'collections':"])))
    for _ in range(draw(st.integers(0, 4))):
        remark(dash, field, dash + "  ")
        name = draw(st.sampled_from(["{}", "'{}'", '"{}" # which', "{} "])).format(draw(NAME))
        lines.append(f"{dash}-{gap}name: {name}")
        remark(field)
        if draw(st.booleans()):
            lines.append(field + draw(st.sampled_from(["path: /x y", "path: 'it''s'", "path:", "path: 007 # agent"])))
        if draw(st.booleans()):
            lines += [field + "include:", field + "- md", field + "# inner", field + "- 'txt'"]
        if draw(st.booleans()):
            lines += [field + "text: |", field + "  # no comment", "", field + "  - name: a"]
    remark(dash)
    lines += draw(st.sampled_from([[], ["models: {activePreset: x}"], ["models:", "    activePreset: x  # y", "    # z"], ["models:"]]))
    remark("", "  ")
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    if lines[-1].endswith("- name: a") or draw(st.booleans()):      # a text block keeps its last line end
        lines.append("")
    return draw(st.sampled_from(["", "\ufeff", "---" + newline])) + newline.join(lines)


@settings(max_examples=120, deadline=None)
@given(configs(), NAME)
def test_edits_do_what_was_meant_and_leave_the_other_lines(text, name):
    data = both(text)
    items = data["collections"] or []
    end = "\r\n" if "\r\n" in text else "\n"

    new = gno.yaml_add(text, "collections", {"name": "new", "path": "/p"})
    assert both(new) == data | {"collections": [*items, {"name": "new", "path": "/p"}]}
    gone, added = edits(text, new)
    assert gone == [] and [line.strip(" -") for line in added] == ["name: new", "path: /p"]
    assert end == "\n" or "\n" not in new.replace("\r\n", "")
    assert both(gno.yaml_remove(new, "collections", {"name": "new"})) == data | {"collections": items}

    new = gno.yaml_remove(text, "collections", {"name": name})
    kept = [item for item in items if item["name"] != name]
    assert both(new) == (data | {"collections": kept} if kept != items else data)
    gone, added = edits(text, new)
    assert all("collections" in line for line in added)
    assert len([line for line in gone if "name:" in line and "#" not in line[:line.index("name:")]]) >= len(items) - len(kept)

    if kept != items:
        for field, value in (("path", "/new"), ("fresh", True)):
            new = gno.yaml_set(text, "collections", {"name": name}, field, value)
            wanted = [item | {field: value if isinstance(value, str) else "true"} if item["name"] == name else item for item in items]
            assert both(new) == data | {"collections": wanted}
            gone, added = edits(text, new)
            assert len(added) == len(items) - len(kept) and all("path:" in line for line in gone)

    new = gno.yaml_map_set(text, ["models", "activePreset"], "y")
    assert both(new) == data | {"models": {"activePreset": "y"}}
    gone, added = edits(text, new)
    assert len(gone) <= 1 and len(added) <= 2


LINE = st.sampled_from(CONFIG.split("\n") + [
    "collections:", "- name: a", "  - name: a", "    path: x", "  path: x", "    - y", "  text: |", "  text: >-", "    # in", "'collections' : ",
    "collections: [{name: a}]", "collections: [", "  {name: a},", "]", "---", "...", "models: {activePreset:", "  x}", "? models", ": x", "\t", "  ",
    '  path: "two', '    lines"', "  - {name: a, # x", "     path: y}", "-", "- - name: a", "models: # x", "  activePreset: # x", "    plain"])


@settings(max_examples=300, deadline=None)
@given(st.lists(LINE, max_size=8).map("\n".join))
def test_any_text_is_edited_rightly_or_refused(text):
    for name, edit in EDITS.items():
        try:
            new = edit(text)
        except gno.GnoError as error:
            assert error.code in ("CONFLICT", "NOT_FOUND")
        else:
            before, after = both(text) or {"version": "1.0"}, both(new)
            assert {key: before.get(key) for key in before.keys() | after.keys() if key not in ("collections", "models")} \
                == {key: after[key] for key in after if key not in ("collections", "models")}
            remarks = [[line for line in lines.split("\n") if line.lstrip().startswith("#")] for lines in (text, new)]
            assert name == "remove" or remarks[0] == remarks[1]
