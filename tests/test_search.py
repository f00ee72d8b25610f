"""Keyword search: what a typed query means, what it finds, in which order, and where in the document the match is."""
import hashlib
import json
import os
import random
import re
import sqlite3
import time
import unicodedata
from collections import Counter
from datetime import UTC, datetime

import pytest
from conftest import VAULT, add, new_kb, run, write
from hypothesis import given, settings
from hypothesis import strategies as st

import gno

TOKENIZER = "porter unicode61 remove_diacritics 2"


def corpus(kb, root, files: dict, **arguments):
    "Index these files (relative path -> text or bytes) as the collection `notes`."
    add(kb, write(root / "notes", files), **arguments)
    return kb


def search(kb, query, **arguments):
    return run(kb, "search", query=query, **arguments)


def paths(found) -> list[str]:
    return [h["source"]["relPath"] for h in found["results"]]


def refused(kb, query, **arguments) -> gno.GnoError:
    "The error of a search that must be refused as INVALID_INPUT."
    with pytest.raises(gno.GnoError) as e:
        search(kb, query, **arguments)
    assert e.value.code == "INVALID_INPUT"
    return e.value


# ---- words of scripts without blanks: what goes into the index ----

def index_words(*texts: str) -> set[str]:
    "The words that FTS5 itself stores for these texts."
    db = sqlite3.connect(":memory:")
    db.execute(f"CREATE VIRTUAL TABLE t USING fts5(x, tokenize='{TOKENIZER}')")
    db.execute("CREATE VIRTUAL TABLE v USING fts5vocab(t, 'row')")
    db.executemany("INSERT INTO t VALUES (?)", [[t] for t in texts])
    return {row[0] for row in db.execute("SELECT term FROM v")}


def stems_of(words: set[str]) -> dict[str, frozenset[str]]:
    "What FTS5 makes of each word."
    db, order, out = sqlite3.connect(":memory:"), list(words), {word: set() for word in words}
    db.execute(f"CREATE VIRTUAL TABLE t USING fts5(x, tokenize='{TOKENIZER}')")
    db.execute("CREATE VIRTUAL TABLE v USING fts5vocab(t, 'instance')")
    db.executemany("INSERT INTO t(rowid, x) VALUES (?, ?)", enumerate(order))
    for term, n in db.execute("SELECT term, doc FROM v"):
        out[order[n]].add(term)
    return {word: frozenset(stems) for word, stems in out.items()}


SCRIPTS = {                                 # by Unicode name; the plain blocks that texts of today are written in
    "Han": ("CJK UNIFIED IDEOGRAPH", 0x3400, 0x3FFFF), "Hiragana": ("HIRAGANA LETTER", 0x3040, 0x30FF),
    "Katakana": ("KATAKANA LETTER", 0x3040, 0x31FF),
    "Hangul": ("HANGUL SYLLABLE", 0xAC00, 0xD7A3), "Thai": ("THAI", 0xE01, 0xE4E), "Lao": ("LAO", 0xE81, 0xECD),
    "Khmer": ("KHMER", 0x1780, 0x17D3), "Myanmar": ("MYANMAR", 0x1000, 0x103F),
    "halfwidth": ("HALFWIDTH KATAKANA LETTER", 0xFF66, 0xFF9D)}


def characters(script: str) -> list[str]:
    "Letters and marks of a script, from the Unicode data."
    name, low, high = SCRIPTS[script]
    return [c for c in map(chr, range(low, high + 1))
            if unicodedata.name(c, "").startswith(name) and unicodedata.category(c)[0] in "LM"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_index_word_survives_the_tokenizer_unchanged_and_unique(script):
    letters = characters(script)
    assert len(letters) > 30
    rng = random.Random(script)
    pairs = ["".join(rng.choices(letters, k=2)) for _ in range(20000)]
    singles = {w for c in letters for w in gno.bigrams(c)}
    doubles = {gno.bigrams(p)[0] for p in pairs}
    assert len(singles) == len(letters) and len(doubles) == len(set(pairs))
    assert not singles & doubles
    assert index_words(" ".join(singles), " ".join(doubles)) == singles | doubles


@pytest.mark.parametrize("run_, words", [("東", 1), ("東京", 2), ("東京都", 3), ("ภาษา", 4)])
def test_bigrams_are_neighbours_and_the_last_character(run_, words):
    grams = gno.bigrams(run_)
    assert len(grams) == words and len(set(grams)) == words
    assert grams[-1:] == gno.bigrams(run_[-1])
    assert grams[:-1] == [gno.bigrams(run_[i:i + 2])[0] for i in range(len(run_) - 1)]


@pytest.mark.parametrize("texts, count", [
    (("plain", "plain.md", "nothing but ASCII"), 0), (("Café", "über.md", "Ελλάδα, Россия, العربية, हिन्दी"), 0),
    (("", "", "東京"), 2),
    (("東", "京", "都"), 3),                                     # three runs of one character
    (("", "", "tower東京2020"), 4),                             # words that are glued to a run are index words too
    (("", "", "tower 東京 2020"), 2),
])
def test_which_texts_have_index_words(texts, count):
    assert len(gno.cjk(*texts).split()) == count


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60), st.text(st.sampled_from("東京都タワーกำ한국 aé1,"), max_size=40))
def test_the_index_words_of_any_text_are_words_to_the_tokenizer(a, b):
    for text in (a, b, a + b):
        words = [w for w in gno.cjk("", "", text).split() if re.fullmatch(r"(u\d+u){1,2}", w)]
        assert index_words(" ".join(words)) == set(words)


# ---- what a typed query means ----

@pytest.fixture(scope="module")
def words_kb(tmp_path_factory):
    "Small notes for the query language; what they have in common is in the table below."
    base = tmp_path_factory.mktemp("words")
    kb = corpus(new_kb(base / "gno"), base, {
        "tea.md": "Green tea is served near the window.", "coffee.md": "Black coffee is served near the door.",
        "pot.md": "A teapot of brass, by our decision.", "flag.md": "Start with --dry-run first.",
        "dry.md": "Dry weather for a run.",
        "run.md": "They run; hay is dry.", "hamlet.md": "To be, or not to be.",
        "ops.md": "AND OR NOT NEAR are literal here.",
        "client.md": "See client.ts and max_retry_count in release 2026-03-31 of v1.2.3.",
        "apart.md": "The client sells ts; retry max of the count.",
        "real.md": "A real-time dashboard.", "dec.md": "Decision DEC-0054 uses snake_case.",
        "quote.md": "He said 'hello' to O'Brien.",
        "cities.md": "Universities with Cafés.", "colon.md": "title: body: path: rowid",
        "mail.md": "Write to ada@example.org at 10:30."})
    yield kb
    kb.close()


NOTHING: set = set()


@pytest.mark.parametrize("query, full, partly", [
    # words: case, stems, all of them must occur; documents with some of them follow
    ("tea", {"tea"}, NOTHING),
    ("TEA", {"tea"}, NOTHING),
    ("serving", {"tea", "coffee"}, NOTHING),
    ("green tea", {"tea"}, NOTHING),
    ("green coffee", NOTHING, {"tea", "coffee"}),
    ("served tea", {"tea"}, {"coffee"}),
    ("te", NOTHING, NOTHING),                                  # words match whole
    ("  tea\t\n", {"tea"}, NOTHING),
    ("green\ntea", {"tea"}, NOTHING),
    # stop words are dropped unless nothing else is left
    ("what is the tea", {"tea"}, NOTHING),
    ("to be or not to be", {"hamlet"}, {"mail", "ops", "quote"}),
    # operators of other query languages are words like all others
    ("tea AND coffee", NOTHING, {"tea", "coffee"}),
    ("tea OR coffee", NOTHING, {"tea", "coffee"}),
    ("tea NOT green", {"tea"}, NOTHING),
    ("NEAR tea", {"tea"}, {"coffee", "ops"}),
    # `NEAR(tea` is two words next to each other, or else either of them
    ("NEAR(tea coffee, 5)", NOTHING, {"coffee", "tea", "ops"}),
    ("title:tea", NOTHING, NOTHING),
    ("{title} : tea", NOTHING, {"tea", "colon"}),
    ("title: body", {"colon"}, NOTHING),
    ("^tea", {"tea"}, NOTHING),
    ("+tea", {"tea"}, NOTHING),
    ("(tea", {"tea"}, NOTHING),
    ("tea)", {"tea"}, NOTHING),
    ("tea;--", {"tea"}, NOTHING),
    ("'; DROP TABLE documents; --", NOTHING, NOTHING),
    # prefixes only as word*
    ("te*", {"tea", "pot"}, NOTHING),
    ("teap*", {"pot"}, NOTHING),
    ("dash*", {"real"}, NOTHING),
    ("tea *", {"tea"}, NOTHING),
    ("*tea", {"tea"}, NOTHING),
    ("windo*", {"tea"}, NOTHING),
    ("litera*", {"ops"}, NOTHING),                             # longer than `liter`, the stem in the index
    ("decisio*", {"dec", "pot"}, NOTHING),
    ("releas*", {"client"}, NOTHING),
    ("universit*", {"cities"}, NOTHING),
    ("retr*", {"client", "apart"}, NOTHING),                   # a part of max_retry_count is a word
    ("max_ret*", {"client"}, NOTHING),                         # the last of several parts may be cut short
    ("client.t*", {"client"}, NOTHING),
    ("2026-0*", {"client"}, NOTHING),
    ("cafe*", {"cities"}, NOTHING),
    ("café*", {"cities"}, NOTHING),
    ("served -gree*", {"coffee"}, NOTHING),
    ("decision-0*", NOTHING, NOTHING),
    ('"te*"', NOTHING, NOTHING),                               # in quotes a star is only a star
    # phrases
    ('"green tea"', {"tea"}, NOTHING),
    ('"tea green"', NOTHING, NOTHING),
    ('"served near" coffee', {"coffee"}, NOTHING),
    ('"to be"', {"hamlet"}, NOTHING),
    ('"green tea" "the window"', {"tea"}, NOTHING),
    ('"green tea" brass window', NOTHING, {"tea"}),            # a phrase always holds
    ('"green tea" coffee served', NOTHING, {"tea"}),
    ('"green window" tea served', NOTHING, NOTHING),
    ('"" tea', {"tea"}, NOTHING),
    ('"?!" tea', {"tea"}, NOTHING),
    # an unbalanced quote is a character like any other
    ('"green tea', {"tea"}, NOTHING),
    ('tea"', {"tea"}, NOTHING),
    ('"tea green', {"tea"}, NOTHING),
    ('gre"en tea" x', NOTHING, {"tea"}),
    # exclusions
    ("served -green", {"coffee"}, NOTHING),
    ("-green served", {"coffee"}, NOTHING),
    ("served -greens", {"coffee"}, NOTHING),                   # stemmed like every word
    ('served -"green tea"', {"coffee"}, NOTHING),
    ('served -"tea green"', {"tea", "coffee"}, NOTHING),
    ("served -green -black", NOTHING, NOTHING),
    ("tea - green", {"tea"}, NOTHING),                         # a dash by itself is no operator
    ("brass coffee -green", NOTHING, {"pot", "coffee"}),
    ("tea-green", NOTHING, NOTHING),                           # a hyphenated word, not an exclusion
    # --flag is literal
    ("--dry-run", {"flag"}, NOTHING),
    ("--dry", {"flag", "dry", "run"}, NOTHING),
    # punctuation inside a word: its parts stand next to each other
    ("client.ts", {"client"}, NOTHING),
    ("max_retry_count", {"client"}, NOTHING),
    ("2026-03-31", {"client"}, NOTHING),
    ("v1.2.3", {"client"}, NOTHING),
    ("real-time", {"real"}, NOTHING),
    ("real time", {"real"}, NOTHING),
    ("DEC-0054", {"dec"}, NOTHING),
    ("dec-0054", {"dec"}, NOTHING),
    ("snake_case", {"dec"}, NOTHING),
    ("0054", {"dec"}, NOTHING),
    ("O'Brien", {"quote"}, NOTHING),
    ("ada@example.org", {"mail"}, NOTHING),
    ("10:30", {"mail"}, NOTHING),
    ("example.org.", {"mail"}, NOTHING),
    ("(client.ts)", {"client"}, NOTHING),
    # control characters are blanks
    ("green\x00tea", {"tea"}, NOTHING),
    ("\x01tea\x02\x1f\x7f", {"tea"}, NOTHING),
])
def test_what_a_query_finds(words_kb, query, full, partly):
    found = search(words_kb, query, limit=100)
    got = [p.removesuffix(".md") for p in paths(found)]
    assert set(got[:len(full)]) == full, got
    assert set(got[len(full):]) == partly
    assert found["meta"]["relaxed"] is bool(partly)
    assert found["meta"]["query"] == query and found["meta"]["totalResults"] == len(got)


@pytest.mark.parametrize("query", ["-tea", "-tea -green", '-"green tea"', "  -tea  ", "--", "-", "?", "…", '"', '""',
                                   '"?"', "***", "()", "\x00", " ", "🎉", "🎉 🎉", "~!@#$%^&*"])
def test_a_query_with_nothing_to_look_for_is_refused(words_kb, query):
    error = refused(words_kb, query)
    assert error.message and error.hint
    if query.strip().startswith("-t"):
        assert "exclude" in error.message


@pytest.mark.parametrize("arguments", [{"query": ""}, {"query": "tea", "limit": 0}, {"query": "tea", "limit": 101},
                                       {"query": "tea", "minScore": 1.5},
                                       {"query": "tea", "minScore": -0.1}, {"query": "a" * 10001}, {"query": 7}, {},
                                       {"query": "tea", "since": "soon"},
                                       {"query": "tea", "until": "2026-13-01"}, {"query": "tea", "since": ""}])
def test_arguments_outside_their_bounds_are_refused(words_kb, arguments):
    with pytest.raises(gno.GnoError) as e:
        run(words_kb, "search", **arguments)
    assert e.value.code == "INVALID_INPUT"


def filled(pieces) -> str:
    "10,000 characters made of pieces, one after the other."
    out, size = [], 0
    for piece in pieces:
        if size + len(piece) > 10000:
            break
        out.append(piece)
        size += len(piece)
    return "".join(out).ljust(10000, ".")


@pytest.mark.parametrize("name, query", [
    ("one word", "x" * 10000), ("words", filled(f"tea{i} " for i in range(9999))), ("one-letter parts", "a/" * 5000),
    ("phrases", filled(f'"tea {i}" ' for i in range(9999))),
    ("exclusions", filled(["tea "] + [f"-w{i} " for i in range(9999)])),
    ("excluded phrases", filled(["tea "] + [f'-"w {i}" ' for i in range(9999)])),
    ("prefixes", filled(f"t{i}* " for i in range(9999))),
    ("a run of different ideographs", "".join(map(chr, range(0x4E00, 0x4E00 + 10000)))),
    ("a run of one ideograph", "東" * 10000),
    ("runs", filled(chr(0x4E00 + i) * 5 + " " for i in range(9999))),
    ("a phrase of ideographs", '"' + "".join(map(chr, range(0x4E00, 0x4E00 + 9998))) + '"'),
    ("symbols", filled(f"c+{i % 90} " for i in range(9999))), ("quotes", '"' * 10000),
    ("brackets", "(" * 5000 + ")" * 5000), ("dashes", "-a" * 5000),
])
def test_ten_thousand_characters(words_kb, name, query):
    assert len(query) == 10000
    try:
        assert search(words_kb, query)["meta"]["query"] == query
    except gno.GnoError as e:
        assert e.code == "INVALID_INPUT" and name in ("quotes", "brackets", "dashes")


INNER = re.compile(r"fts5|sqlite|sql\b|syntax error|no such|malformed|\bMATCH\b|docs_fts|traceback|unterminated", re.I)
ODD = st.sampled_from(['"', "'", "*", "(", ")", "-", "--", "+", "^", ":", "{", "}", "NEAR", "AND", "OR", "NOT", "NEAR(",
                       " ", "\t", "\n", "\r", "\x00", "tea", "c++", "c#", "a/b",
                       "東京", "東", "ภาษา", "한국", "é", "e\u0301", "\u0301", "\u200d", "😀", "ß", "İ", "ſ", "\ufffd",
                       "\u2028", "²", "½", "\U0001e900", "\U00010d4a", ";", "--x", "%", "_", "__", "\\"])


@settings(max_examples=400, deadline=None)
@given(query=st.one_of(st.text(max_size=40), st.lists(ODD, max_size=12).map("".join),
                       st.lists(st.one_of(ODD, st.text(max_size=4)), max_size=12).map(" ".join)))
@pytest.mark.parametrize("tool", ["search", "query"])
def test_no_text_breaks_a_search(words_kb, tool, query):
    try:
        found = run(words_kb, tool, query=query)
    except gno.GnoError as e:
        assert e.code == "INVALID_INPUT"
        assert not INNER.search(e.message + e.hint)
    else:
        said = {k: v for k, v in found["meta"].items() if k != "query"}
        assert not INNER.search(json.dumps(said))
        assert all(0 <= h["score"] <= 1 and h["line"] >= 1 for h in found["results"])


# ---- letters: case, accents, normal forms ----

@pytest.mark.parametrize("written, typed", [
    ("café", "cafe"), ("cafe", "café"), ("CAFÉ", "café"), ("cafe\u0301", "café"), ("café", "cafe\u0301"),
    ("naïve", "NAIVE"), ("Ångström", "angstrom"),
    ("Straße", "Straße"), ("Straße", "STRAßE"), ("Straße", "STRASSE"), ("STRASSE", "Straße"),
    ("die Straße dort", '"die Straße"'),
    ("ﬁnal", "final"), ("ΟΔΥΣΣΕΎΣ", "Οδυσσεύς"), ("Οδυσσεύς", "Οδυσσεύς"), ("Fußgängerübergang", "fußgängerübergang"),
    ("Οδυσσεύς", "ΟΔΥΣΣΕΎΣ"), ("Φῶς", "φῶς"), ("Москва", "МОСКВА"),
    ("İstanbul", "İstanbul"), ("İstanbul", "istanbul"), ("ŉgaga", "ŉgaga"), ("ﬁnal", "ﬁnal"), ("ΐδιος", "ΐδιος"),
    ("Ārēja", "areja"), ("smørrebrød", "smørrebrød"), ("Łódź", "Łódź"),
    ("हिन्दी", "हिन्दी"), ("العربية", "العربية"), ("עברית", "עברית"), ("ไทย", "ไทย"), ("한국", "한국"), ("한국", "한국"),
    ("ｗｉｄｅ", "ｗｉｄｅ"), ("x²y", "x²y"),
])
def test_words_meet_whatever_their_case_accents_and_normal_form(kb, tmp_path, written, typed):
    corpus(kb, tmp_path, {"a.md": f"first line\n\nhere is {written} alone\n",
                          "b.md": "first line\n\nhere is another alone\n"})
    found = search(kb, typed)
    assert paths(found) == ["a.md"]
    assert found["results"][0]["line"] == 3


def test_every_letter_is_found_by_itself(kb, tmp_path):
    "A word with any cased letter of the first plane is found by the same word, as it is written and in the other case."
    letters = [c for c in map(chr, [*range(0x80, 0x590), *range(0x10A0, 0x1100), *range(0x1E00, 0x2000),
                                    *range(0xFB00, 0xFB18)]) if unicodedata.ucd_3_2_0.category(c) in ("Lu", "Ll", "Lt")]
    words = {c: f"q{n}{c}z" for n, c in enumerate(letters)}
    corpus(kb, tmp_path, {"a.md": "\n\n".join(words.values())})
    lost = []
    for c, word in words.items():
        for typed in {word, word.upper(), word.lower()}:
            known = all(unicodedata.ucd_3_2_0.category(t) != "Cn" for t in typed)   # SQLite's Unicode is an older one
            same = len(typed) == len(word) and typed.casefold() == word.casefold()
            match = gno.match_all(gno.parse_query(typed))
            if known and same and not kb.db.execute("SELECT 1 FROM docs_fts WHERE docs_fts MATCH ?",
                                                    [match]).fetchone():
                lost.append((c, typed))
    assert lost == []


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_file_names_are_found_in_either_normal_form(kb, tmp_path, form):
    corpus(kb, tmp_path, {unicodedata.normalize(form, "Übersicht café.md"): "nothing here\n"})
    for typed in ("übersicht", "café", "cafe\u0301", "U\u0308bersicht"):
        assert len(search(kb, typed)["results"]) == 1, typed


# ---- scripts without blanks ----

RUNS = {"zh.md": "# 笔记\n\n第一行。\n\n北京大学的学生在图书馆学习。\n",
        "ja.md": "# メモ\n\n一行目。\n\n東京タワーは京都にはありません。\n",
        "th.md": "# บันทึก\n\nบรรทัดแรก\n\nโรงเรียนอยู่ใกล้แม่น้ำ\n",
        "ko.md": "# 노트\n\n첫 줄\n\n서울대학교 도서관에서 공부합니다.\n",
        "mix.md": "# Mixed\n\nfirst line\n\nPython3入門とEXCEL表計算🎉\n", "lo.md": "# L\n\nx\n\nພາສາລາວ\n",
        "km.md": "# K\n\nx\n\nភាសាខ្មែរ\n", "my.md": "# M\n\nx\n\nမြန်မာဘာသာ\n",
        "emoji.md": "# Party\n\nfirst line\n\n🎉 confetti🎈 👩\u200d🚀 rocket\n"}


@pytest.fixture(scope="module")
def runs_kb(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    kb = corpus(new_kb(base / "gno"), base, RUNS)
    yield kb
    kb.close()


@pytest.mark.parametrize("query, expected, line", [
    ("北京大学", ["zh"], 5), ("图书馆", ["zh"], 5), ("学习", ["zh"], 5), ("京", ["ja", "zh"], 5), ("馆", ["zh"], 5),
    ("习", ["zh"], 5), ("笔记", ["zh"], 1), ("记", ["zh"], 1),
    ("東京タワー", ["ja"], 5), ("京都", ["ja"], 5), ("東", ["ja"], 5), ("ん", ["ja"], 5), ("一行目", ["ja"], 3),
    ("都京", [], 0),
    ("大北", [], 0),
    ("โรงเรียน", ["th"], 5), ("แม่น้ำ", ["th"], 5), ("น้ำ", ["th"], 5), ("เรียน", ["th"], 5), ("บันทึก", ["th"], 1),
    ("도서관", ["ko"], 5), ("서울대학교", ["ko"], 5), ("공부", ["ko"], 5), ("서울", ["ko"], 5), ("첫", ["ko"], 3),
    ("ພາສາ", ["lo"], 5), ("ខ្មែរ", ["km"], 5), ("မြန်မာ", ["my"], 5),
    ("Python3入門", ["mix"], 5), ("入門", ["mix"], 5), ("excel", ["mix"], 5), ("python3", ["mix"], 5),
    ("表計算", ["mix"], 5),
    ("excel表", ["mix"], 5),
    ("confetti", ["emoji"], 5), ("🎉 confetti", ["emoji"], 5), ("confetti🎈", ["emoji"], 5),
    ("rocket 👩\u200d🚀", ["emoji"], 5),
    ('"北京大学"', ["zh"], 5), ('"サッカー"', [], 0), ('"東京タワー"', ["ja"], 5),
])
def test_runs_without_blanks_are_found_on_their_line(runs_kb, query, expected, line):
    found = search(runs_kb, query)
    assert sorted(p.removesuffix(".md") for p in paths(found)) == expected
    assert all(h["line"] == line for h in found["results"])


@pytest.mark.parametrize("query, best",
                         [("北京大学生学习的图书馆", "zh"), ("東京の京都タワー", "ja"), ("โรงเรียนใกล้แม่น้ำ", "th"),
                                         ("서울 도서관", "ko"), ("도서관공부서울대학교", "ko")])
def test_a_long_run_relaxes_to_its_parts(runs_kb, query, best):
    found = search(runs_kb, query)
    assert paths(found)[0] == best + ".md" and found["results"][0]["line"] == 5


def test_exclusions_work_in_scripts_without_blanks(runs_kb):
    assert paths(search(runs_kb, "京 -大学")) == ["ja.md"]
    assert paths(search(runs_kb, "京 -東")) == ["zh.md"]


def test_a_short_run_finds_exactly_the_texts_that_contain_it(kb, tmp_path):
    rng = random.Random(5)
    texts = {f"{n:02}.md": "".join(rng.choices("東京都庁高層", k=rng.randint(1, 9))) for n in range(60)}
    corpus(kb, tmp_path, texts)
    for text in texts.values():
        for size in range(1, 5):
            for at in range(0, len(text) - size + 1, 2):
                part = text[at:at + size]
                assert sorted(paths(search(kb, part, limit=100))) == [p for p, t in texts.items() if part in t], part


# ---- order and scores ----

def test_title_beats_path_beats_body(kb, tmp_path):
    filler = "A long text about clay and glaze and the heat of the kiln. " * 8
    corpus(kb, tmp_path, {"a.md": f"# Plain\n\n{filler}\n\nThe atlas is only mentioned here.\n",
                          "atlas/b.md": f"# Other\n\n{filler}\n",
                          "c.md": f"# Atlas\n\n{filler}\n"})
    assert paths(search(kb, "atlas")) == ["c.md", "atlas/b.md", "a.md"]


VOCABULARY = [
    "kiln", "clay", "glaze", "oven", "potter", "wheel", "cobalt", "copper", "ash", "slip", "cone", "bisque",
    "raku", "kettle", "bowl", "plate", "river", "stone", "bridge", "lamp", "window", "garden", "letter", "winter",
    "summer", "engine", "signal", "harbor", "island", "market", "ticket", "violin", "carpet", "ladder", "mirror",
    "needle", "pencil", "rocket", "saddle", "tunnel", "velvet", "walnut", "yellow", "zebra", "anchor", "basket",
    "candle", "dragon", "eagle", "falcon", "ginger", "hammer", "iceberg", "jacket", "ketchup", "lemon", "magnet",
    "nectar", "orange", "pepper"]


def notes(seed: int, n: int) -> dict[str, str]:
    "Notes of random words with a heading each."
    rng = random.Random(seed)
    out = {}
    for i in range(n):
        title, text = " ".join(rng.sample(VOCABULARY, 2)), " ".join(rng.choices(VOCABULARY, k=rng.randint(5, 80)))
        out[f"{rng.choice(VOCABULARY)}/{i:03}.md"] = f"# {title}\n\n{text}.\n"
    return out


@pytest.fixture(scope="module")
def many_kb(tmp_path_factory):
    base = tmp_path_factory.mktemp("many")
    kb = corpus(new_kb(base / "gno"), base, notes(1, 150))
    yield kb
    kb.close()


def fts5_scores(files: dict[str, str], match: str) -> dict[str, float]:
    "BM25 of each file by FTS5 itself: title counts 4, path 1.5, body 1."
    db = sqlite3.connect(":memory:")
    db.execute(f"CREATE VIRTUAL TABLE t USING fts5(title, path, body, tokenize='{TOKENIZER}')")
    db.executemany("INSERT INTO t VALUES (?, ?, ?)", [(t.split("\n")[0][2:], path, t) for path, t in files.items()])
    return dict(db.execute("SELECT path, -bm25(t, 4.0, 1.5, 1.0) FROM t WHERE t MATCH ?", [match]).fetchall())


@pytest.mark.parametrize("query, full, any_", [
    ("kiln", "kiln", ""), ("kiln clay", "kiln AND clay", "kiln OR clay"),
    ("the raku kettles", "raku AND kettles", "raku OR kettles"),
    ("cobalt ash cone bowl", "cobalt AND ash AND cone AND bowl", "cobalt OR ash OR cone OR bowl"),
    ('"copper bowl"', '"copper bowl"', ""), ("plate -kiln", "plate NOT kiln", ""),
    ("kiln zeppelin", "kiln AND zeppelin", "kiln OR zeppelin")])
def test_scores_are_those_of_fts5_in_proportion(many_kb, query, full, any_):
    found = search(many_kb, query, limit=100)
    all_of, some_of = fts5_scores(notes(1, 150), full), fts5_scores(notes(1, 150), any_) if any_ else {}
    best = max(all_of.values(), default=1)
    floor = min(all_of.values(), default=best) / best
    rest = {p: s for p, s in some_of.items() if p not in all_of}
    expected = {p: s / best for p, s in all_of.items()} | {p: floor * s / max(rest.values()) for p, s in rest.items()}
    order = sorted(expected, key=lambda p: (p in rest, -expected[p], p))[:100]
    assert paths(found) == order
    assert [h["score"] for h in found["results"]] == pytest.approx([expected[p] for p in order], abs=1e-6)
    scores = [h["score"] for h in found["results"]]
    assert scores == sorted(scores, reverse=True) and (not scores or scores[0] == 1.0) and min(scores, default=0) >= 0


@pytest.mark.parametrize("limit", [1, 2, 5, 37])
def test_a_smaller_limit_gives_the_beginning_of_the_same_list(many_kb, limit):
    longest = search(many_kb, "raku kettle", limit=100)["results"]
    assert search(many_kb, "raku kettle", limit=limit)["results"] == longest[:limit]


def test_equal_documents_score_alike_and_stand_in_the_order_of_their_uris(kb, tmp_path):
    corpus(kb, tmp_path,
           {f"{name}.md": "the same words about a kiln" for name in ("b", "a", "d", "c")} | {"other.md": "nothing"})
    found = search(kb, "kiln")
    assert paths(found) == ["a.md", "b.md", "c.md", "d.md"] and {h["score"] for h in found["results"]} == {1.0}


@pytest.mark.parametrize("least", [0, 0.3, 0.7, 1])
def test_min_score_applies_to_the_shown_score(many_kb, least):
    words = ["cobalt", "ash", "cone"]
    everything = search(many_kb, " ".join(words), limit=100)
    full = fts5_scores(notes(1, 150), " AND ".join(words))
    assert 0 < len(full) < 100 and everything["meta"]["relaxed"] is True
    found = search(many_kb, " ".join(words), limit=100, minScore=least)
    assert found["results"] == [h for h in everything["results"] if h["score"] >= least]
    assert found["meta"]["relaxed"] is bool(set(paths(found)) - set(full)), "said to be there when they are shown"


def test_words_far_apart_in_one_document_are_found_together(kb, tmp_path):
    corpus(kb, tmp_path, {"a.md": "# One\n\nzebra\n\n" + "filler text here. " * 300 + "\n\n# Two\n\nxylophone\n",
                          "b.md": "zebra", "c.md": "xylophone"})
    found = search(kb, "zebra xylophone")
    assert paths(found)[0] == "a.md" and found["results"][0]["score"] == 1.0
    assert sorted(paths(found)[1:]) == ["b.md", "c.md"]


def test_one_hit_per_document(kb, tmp_path):
    corpus(kb, tmp_path, {"a.md": "# Kiln\n\n" + "The kiln is hot. " * 500, "b.md": "kiln"})
    assert sorted(paths(search(kb, "kiln", limit=50))) == ["a.md", "b.md"]


@pytest.mark.parametrize("rules, expected", [
    ([{"id": "job", "searchBoost": 1.5}, {"id": "talk", "searchBoost": 1}], {"job": 1.5, "talk": 1.0}),
    ([{"id": "a", "searchBoost": 9}, {"id": "b", "searchBoost": 0}, {"id": "c", "searchBoost": -3}], {"a": 2.0, "b": 0.5, "c": 0.5}),
    ([{"id": "a", "searchBoost": float("inf")}, {"id": "b", "searchBoost": 10 ** 400}], {"a": 2.0, "b": 2.0}),
    ([{"id": "a", "searchBoost": 1.2}, {"id": "a", "searchBoost": 1.4}, {"id": 7, "searchBoost": 1.1}], {"a": 1.2, "7": 1.1}),
    ([{"id": "a", "searchBoost": "1.5"}, {"id": "b", "searchBoost": True}, {"id": "c", "searchBoost": float("nan")}, {"id": "d", "searchBoost": [2]},
      {"id": "e", "searchBoost": None}, {"id": "f"}, {"searchBoost": 2}, 5, None, "g"], {}),
    (5, {}), ({"id": "a", "searchBoost": 2}, {}), (None, {})])
def test_the_factors_of_content_types(rules, expected):
    assert gno.boosts({"contentTypes": rules}) == expected and gno.boosts({}) == {}


TYPES = "contentTypes:\n- {{id: job, prefixes: [job/], searchBoost: {job}}}\n- {{id: talk, prefixes: [talk/], searchBoost: {talk}}}\n"


@pytest.fixture
def typed_kb(kb, tmp_path):
    "A function that configures the boosts of job/ and talk/; documents whose BM25 is equal but for one."
    corpus(kb, tmp_path, {f"{place}.md": "the kiln and clay" for place in ("any/a", "job/b", "talk/c", "zoo/z")}
           | {"job/best.md": "# Kiln\n\nthe kiln of clay", "talk/part.md": "only the kiln", "zoo/part.md": "only the kiln", "other.md": "nothing"})
    path = os.path.join(kb.dirs["config"], "index.yml")
    with open(path, encoding="utf-8") as f:
        plain = f.read()

    def configure(job, talk):
        with open(path, "w", encoding="utf-8") as f:
            f.write(plain + TYPES.format(job=job, talk=talk))
        run(kb, "sync")
        return kb
    configure("~", "~")
    return configure


def shown(found) -> dict[str, float]:
    return {h["source"]["relPath"]: h["score"] for h in found["results"]}


def test_boosts_multiply_the_shown_score(typed_kb):
    kb = typed_kb("~", "~")
    plain = shown(search(kb, '"kiln"', limit=100, exclude=["only"]))
    assert list(plain) == ["job/best.md", "any/a.md", "job/b.md", "talk/c.md", "zoo/z.md"] and plain["job/best.md"] == 1
    low = plain["any/a.md"]
    assert low == plain["job/b.md"] == plain["talk/c.md"] < 0.9
    half = shown(search(typed_kb(0.5, "~"), '"kiln"', limit=100, exclude=["only"]))
    assert half["job/best.md"] == pytest.approx(0.5, abs=1e-6) and half["job/b.md"] == pytest.approx(low / 2, abs=1e-6)
    assert list(half)[-1] == "job/b.md" and [p for p in half if "job" not in p] == ["any/a.md", "talk/c.md", "zoo/z.md"]
    assert "job/best.md" not in shown(search(kb, '"kiln"', limit=100, minScore=0.51))
    one = shown(search(typed_kb("~", 1.1), '"kiln"', limit=100, exclude=["only"]))
    assert one["talk/c.md"] == pytest.approx(low * 1.1, abs=1e-6) and list(one) == ["job/best.md", "talk/c.md", "any/a.md", "job/b.md", "zoo/z.md"]


def test_a_boost_reaches_beyond_the_limit_and_the_shown_score_stays_below_one(typed_kb):
    kb = typed_kb(1, 99)
    everything = search(kb, '"kiln"', limit=100, exclude=["only"])
    assert paths(everything) == ["talk/c.md", "job/best.md", "any/a.md", "job/b.md", "zoo/z.md"]
    assert shown(everything)["any/a.md"] > 0.5 and [h["score"] for h in everything["results"][:2]] == [1, 1]
    for limit in (1, 2, 3):
        assert search(kb, '"kiln"', limit=limit, exclude=["only"])["results"] == everything["results"][:limit]


def test_documents_with_all_words_stay_before_the_others(typed_kb):
    found = search(typed_kb(1, 2), "kiln clay", limit=100)
    assert sorted(paths(found)[:5]) == ["any/a.md", "job/b.md", "job/best.md", "talk/c.md", "zoo/z.md"] and found["meta"]["relaxed"] is True
    assert paths(found)[5:] == ["talk/part.md", "zoo/part.md"]
    scores = [h["score"] for h in found["results"]]
    assert scores == sorted(scores, reverse=True) and max(scores) == 1
    assert paths(search(typed_kb(1, 2), "kiln clay", limit=5)) == paths(found)[:5]


def test_without_a_boost_nothing_is_looked_up(typed_kb, monkeypatch):
    kb, ranked = typed_kb("~", "text"), [(2, 0.5), (1, 0.5)]
    statements = []
    kb.db.set_trace_callback(statements.append)
    assert gno.boosted(kb, ranked) is ranked and statements == []
    assert [w for w in kb.config.warnings if "searchBoost" in w and "talk" in w] == list(kb.config.warnings) != []
    kb = typed_kb(2, "~")
    ids = {path: n for n, path in kb.db.execute("SELECT id, path FROM documents")}
    order = [(ids["zoo/z.md"], 0.8), (ids["any/a.md"], 0.8), (ids["job/b.md"], 0.45), (ids["zoo/part.md"], 0.9)]
    assert gno.boosted(kb, order) == [(ids["job/b.md"], 0.9), (ids["zoo/part.md"], 0.9), (ids["any/a.md"], 0.8), (ids["zoo/z.md"], 0.8)]
    assert gno.boosted(kb, []) == []


# ---- symbols ----

@pytest.fixture(scope="module")
def symbols_kb(tmp_path_factory):
    base = tmp_path_factory.mktemp("symbols")
    kb = corpus(new_kb(base / "gno"), base, {
        "cpp.md": "templates in C++ are compiled", "c11.md": "we moved to c++11 templates",
        "csharp.md": "C# has a garbage collector", "plain.md": "The C language",
        "vitamin.md": "Vitamin C helps", "rate.md": "It reads 3 GB/s from disk", "size.md": "It has 3 GB s-shaped",
        "rd.md": "Our R&D budget", "apart.md": "R is used and D too; R D",
        "ab.md": "An A/B test", "fsharp.md": "F# is functional", "io.md": "Slow I/O",
        "c++/path.md": "no symbols in this text"})
    yield kb
    kb.close()


@pytest.mark.parametrize("query, expected", [
    ("C++", ["c++/path", "c11", "cpp"]), ("c++", ["c++/path", "c11", "cpp"]), ("C#", ["csharp"]), ("GB/s", ["rate"]),
    ("R&D", ["rd"]), ("A/B", ["ab"]), ("F#", ["fsharp"]), ("I/O", ["io"]),
    ("c++11", ["c11"]), ("C++.", ["c++/path", "c11", "cpp"]), ("(C#)", ["csharp"]), ("J#", []), ('"C++"', None),
])
def test_symbols_that_are_part_of_a_name_count(symbols_kb, query, expected):
    found = [p.removesuffix(".md") for p in paths(search(symbols_kb, query, limit=50))]
    assert sorted(found) == expected if expected is not None else "cpp" in found


def test_an_excluded_symbol_excludes_only_its_own(symbols_kb):
    assert paths(search(symbols_kb, "language -c#")) == ["plain.md"]
    assert paths(search(symbols_kb, "templates -c++11")) == ["cpp.md"]


def test_symbols_count_in_a_query_too(symbols_kb):
    assert paths(run(symbols_kb, "query", query="C#")) == ["csharp.md"]
    found = run(symbols_kb, "query", query="c++ language", limit=50)
    assert sorted(paths(found)) == ["c++/path.md", "c11.md", "cpp.md", "plain.md"]
    assert paths(run(symbols_kb, "query", query="language -c#")) == ["plain.md"]


def test_symbols_hold_among_further_words(symbols_kb):
    found = search(symbols_kb, "C# collector")
    assert paths(found)[0] == "csharp.md" and found["results"][0]["score"] == 1.0


# ---- filters ----

@pytest.fixture(scope="module")
def filters_kb(tmp_path_factory):
    "300 notes about a kiln; those with n % 43 == 0 carry what the filters ask for, and rank last."
    base = tmp_path_factory.mktemp("filters")
    files = {}
    for n in range(300):
        if n % 43 == 0:
            front = "author: Ada Lovelace\ncategory: Pottery\ntags: [common, rare/one]\nlang: cs"
            text = "words without meaning here. " * 200 + "kiln\n"
        else:
            front, text = "author: Bob\ncategory: Other\ntags: [common, often]\nlang: en", "# Kiln\n\nkiln kiln kiln\n"
        files[f"n{n:03}.md"] = f"---\n{front}\n---\n{text}"
    kb = corpus(new_kb(base / "gno"), base, files)
    old = datetime(2020, 5, 1, 12, tzinfo=UTC).timestamp()
    for n in range(0, 300, 43):
        os.utime(base / "notes" / f"n{n:03}.md", (old + n, old + n))
    run(kb, "sync")
    add(kb, write(base / "second", {"x.md": "kiln"}), name="second")
    yield kb
    kb.close()


RARE = {f"n{n:03}.md" for n in range(0, 300, 43)}              # seven of them


@pytest.mark.parametrize("where", [
    {"tagsAll": ["rare/one"]}, {"tagsAll": ["common", "rare/one"]}, {"tagsAny": ["rare/one", "nowhere"]},
    {"tagsAll": ["#Rare/One "]}, {"categories": ["pottery"]},
    {"categories": ["POTTERY", "nowhere"]}, {"author": "lovelace"}, {"author": "Ada L"}, {"until": "2020-12-31"},
    {"since": "2020-05-01", "until": "2020-05-01"},
    {"lang": "cs"}, {"lang": "CS"}, {"author": "LOVELACE"}, {"author": " lovelace "},
    {"tagsAll": [], "tagsAny": ["rare/one"]},
    {"tagsAll": ["rare/one"], "author": "ada", "until": "2021-01-01", "collection": "NOTES"}])
@pytest.mark.parametrize("limit", [3, 5, 100])
def test_a_selective_filter_still_fills_the_limit(filters_kb, where, limit):
    found = search(filters_kb, "kiln", limit=limit, **where)
    assert set(paths(found)) <= RARE and len(paths(found)) == min(limit, 7)


@pytest.mark.parametrize("where", [{"tagsAll": ["rare/one", "often"]}, {"tagsAny": ["nowhere"]}, {"tagsAll": ["rare"]},
                                   {"categories": ["pot"]}, {"author": "carol"}, {"until": "2019-12-31"}, {"lang": "c"},
                                   {"lang": "de"},
                                   {"since": "2020-05-02", "until": "2020-05-03"}])
def test_a_filter_that_nothing_passes_gives_nothing(filters_kb, where):
    found = search(filters_kb, "kiln", **where)
    assert found["results"] == [] and found["meta"]["totalResults"] == 0


def test_collections_are_told_apart(filters_kb):
    assert [h["uri"] for h in search(filters_kb, "kiln", collection="Second")["results"]] == ["gno://second/x.md"]
    with pytest.raises(gno.GnoError) as e:
        search(filters_kb, "kiln", collection="third")
    assert e.value.code == "NOT_FOUND" and "third" in e.value.message and "second" in e.value.hint


def test_filters_are_echoed_as_they_were_applied(filters_kb):
    meta = search(filters_kb, "kiln", collection="NOTES", since="2020-05-01", until="2020-05-01T13:00+02:00",
                  tagsAll=["#Rare/One "], categories=["Pottery"], author="Ada", lang="cs", exclude=["xyz"],
                  intent="pots")["meta"]
    assert meta["since"] == "2020-05-01T00:00:00.000Z" and meta["until"] == "2020-05-01T11:00:00.000Z"
    expected = {"collection": "notes", "tagsAll": ["rare/one"], "categories": ["Pottery"], "author": "Ada",
                "lang": "cs", "exclude": ["xyz"], "intent": "pots", "mode": "bm25"}
    assert {key: meta[key] for key in expected} == expected


@pytest.mark.parametrize("since, until, found", [
    ("0001-01-01", None, True), ("1600-01-01", "9999-12-31", True), ("1969-12-31", "2999-01-01", True),
    (None, "9999-12-31T23:59:59Z", True), ("2000 years ago", None, True),
    ("2999-01-01", None, False), ("9999-12-31", None, False), (None, "0001-01-01", False), (None, "1677-01-01", False),
    (None, "24000 months ago", False), ("2262-04-12", None, False)])
def test_dates_at_the_ends_of_the_calendar(kb, tmp_path, since, until, found):
    corpus(kb, tmp_path, {"a.md": "kiln"})
    assert bool(search(kb, "kiln", since=since, until=until)["results"]) is found


def test_tokens_are_of_the_clock_of_today(kb, tmp_path):
    corpus(kb, tmp_path, {"a.md": "kiln"})
    at = datetime.now(UTC).timestamp() - 3 * 86400
    os.utime(tmp_path / "notes" / "a.md", (at, at))
    run(kb, "sync")
    for arguments, found in (({"since": "7d"}, True), ({"since": "4 days ago", "until": "2 days ago"}, True),
                             ({"since": "recent"}, True), ({"since": "2 days ago"}, False),
                             ({"until": "4 days ago"}, False), ({"until": "today"}, True), ({"since": "today"}, False)):
        assert bool(search(kb, "kiln", **arguments)["results"]) is found, arguments


def test_bounds_are_inclusive_to_the_millisecond(kb, tmp_path):
    corpus(kb, tmp_path, {"a.md": "kiln"})
    at = 1_600_000_000_123_456_789
    os.utime(tmp_path / "notes" / "a.md", ns=(at, at))
    run(kb, "sync")
    inside = "2020-09-13T12:26:40.123Z"
    assert paths(search(kb, "kiln", since=inside, until=inside)) == ["a.md"]
    assert paths(search(kb, "kiln", since="2020-09-13T12:26:40.124Z")) == []
    assert paths(search(kb, "kiln", until="2020-09-13T12:26:40.122Z")) == []
    assert search(kb, "kiln")["results"][0]["source"]["modifiedAt"] == inside


@pytest.mark.parametrize("exclude, expected", [
    ([], ["a", "b", "c", "d"]), (["COBALT"], ["a", "c", "d"]), (["balt"], ["a", "c", "d"]),
    (["title words"], ["a", "b", "d"]), (["d.md"], ["a", "b", "c"]),
    (["cobalt", "STRASSE"], ["c", "d"]), ([" "], ["a", "b", "c", "d"]), (["."], []), (["%"], ["a", "b", "c", "d"]),
    (["cobalt,title"], ["a", "b", "c", "d"])])
def test_exclude_drops_documents_that_contain_a_text(kb, tmp_path, exclude, expected):
    corpus(kb, tmp_path, {"a.md": "kiln in the Straße", "b.md": "kiln, Cobalt", "c.md": "# Title Words\n\nkiln",
                          "d.md": "kiln"})
    assert sorted(p.removesuffix(".md") for p in paths(search(kb, "kiln", exclude=exclude))) == expected


def test_exclude_still_fills_the_limit(kb, tmp_path):
    corpus(kb, tmp_path, {f"{n:03}.md": "# Kiln\n\nkiln bad" for n in range(90)})
    write(tmp_path / "notes", {f"{n:03}.md": "a long text about a kiln among other words" for n in range(90, 100)})
    run(kb, "sync")
    assert len(search(kb, "kiln", limit=10, exclude=["bad"])["results"]) == 10


# ---- dates ----

NOW = datetime(2026, 3, 31, 15, 30, tzinfo=UTC)       # a Tuesday


@pytest.mark.parametrize("text, first, last", [
    ("today", "2026-03-31T00:00:00.000", "2026-03-31T23:59:59.999"),
    ("Yesterday", "2026-03-30T00:00:00.000", "2026-03-30T23:59:59.999"),
    ("this week", "2026-03-30T00:00:00.000", "2026-03-31T15:30:00.000"),
    ("last week", "2026-03-23T00:00:00.000", "2026-03-29T23:59:59.999"),
    ("this month", "2026-03-01T00:00:00.000", "2026-03-31T15:30:00.000"),
    ("LAST  month", "2026-02-01T00:00:00.000", "2026-02-28T23:59:59.999"),
    ("recent", "2026-03-01T15:30:00.000", "2026-03-31T15:30:00.000"),
    ("7d", "2026-03-24T00:00:00.000", "2026-03-24T23:59:59.999"),
    ("P7D", "2026-03-24T00:00:00.000", "2026-03-24T23:59:59.999"),
    ("2 weeks ago", "2026-03-17T00:00:00.000", "2026-03-17T23:59:59.999"),
    ("1 month ago", "2026-02-28T00:00:00.000", "2026-02-28T23:59:59.999"),
    ("13 months ago", "2025-02-28T00:00:00.000", "2025-02-28T23:59:59.999"),
    ("25 months ago", "2024-02-29T00:00:00.000", "2024-02-29T23:59:59.999"),
    ("3 days ago", "2026-03-28T00:00:00.000", "2026-03-28T23:59:59.999"),
    ("1 year ago", "2025-03-31T00:00:00.000", "2025-03-31T23:59:59.999"),
    ("3 months ago", "2025-12-31T00:00:00.000", "2025-12-31T23:59:59.999"),
    ("2025-12-24", "2025-12-24T00:00:00.000", "2025-12-24T23:59:59.999"),
    (" 2025-12-24 ", "2025-12-24T00:00:00.000", "2025-12-24T23:59:59.999"),
    ("2025-12-24T10:00:00Z", "2025-12-24T10:00:00.000", "2025-12-24T10:00:00.000"),
    ("2025-12-24T10:00", "2025-12-24T10:00:00.000", "2025-12-24T10:00:00.000"),
    ("2025-12-24T10:00:00+02:00", "2025-12-24T08:00:00.000", "2025-12-24T08:00:00.000"),
    ("2024-02-29", "2024-02-29T00:00:00.000", "2024-02-29T23:59:59.999"),
])
def test_dates_and_tokens(text, first, last):
    got = [at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] for at in gno.time_bound(text, NOW)]
    assert got == [first, last]


@pytest.mark.parametrize("text", ["", "soon", "2026-02-30", "2026-13-01", "31.12.2025", "99999 years ago", "-3d", "3",
                                  "tomorrow", "2026-03-31T25:00", "'; --", "0" * 300 + "d"])
def test_what_is_no_date_is_refused(text):
    with pytest.raises(gno.GnoError) as e:
        gno.time_bound(text, NOW)
    assert e.value.code == "INVALID_INPUT" and e.value.hint


@settings(max_examples=200)
@given(st.text(max_size=30))
def test_any_text_is_a_date_or_refused(text):
    try:
        first, last = gno.time_bound(text, NOW)
        assert first <= last
    except gno.GnoError as e:
        assert e.code == "INVALID_INPUT"


@pytest.mark.parametrize("query, newest_first", [("latest kiln", True), ("the newest kiln", True), ("kiln today", True),
                                                 ("most recent kiln", True), ("kiln", False),
                                                 ("kiln latestness", False)])
def test_recency_words_order_by_date_and_filter_nothing(kb, tmp_path, query, newest_first):
    corpus(kb, tmp_path, {"old.md": "# Kiln\n\nkiln kiln kiln latest newest today recent latestness",
                          "dated.md": "---\ndate: 2031-05-01\n---\nlatest newest today recent kiln latestness and more",
                          "new.md": "a latest newest today recent kiln latestness with a few words"})
    for name, at in (("old.md", 1_500_000_000), ("dated.md", 1_400_000_000), ("new.md", 1_600_000_000)):
        os.utime(tmp_path / "notes" / name, (at, at))
    run(kb, "sync")
    found = search(kb, query)
    assert len(found["results"]) == 3
    assert (paths(found) == ["dated.md", "new.md", "old.md"]) is newest_first
    assert found["meta"].get("order") == ("recency" if newest_first else None)
    assert "since" not in found["meta"] and "until" not in found["meta"]


# ---- where the match is ----

ODD_LINES = ["", "plain words", "a line\u2028with a line separator", "page\x0cbreak", "next\x85line",
             "tab\tand blanks   ", "日本語の行です", "🎉👩\u200d🚀 emoji", "e\u0301 accents é", "- item", "> quote",
             "| a | b |",
             "İstanbul ŉ ﬁ", "x" * 700, "many words on a line " * 60, "# Heading", "```", "    code"]


def odd_document(rng: random.Random, needle: str) -> tuple[bytes, int]:
    "A document of odd lines with the needle somewhere -> (its bytes, the 1-based line of the needle)."
    lines = [rng.choice(ODD_LINES) for _ in range(rng.randint(0, 60))]
    front = ["---", "title: Something", "tags: [a]", "---"] if rng.random() < 0.3 else []
    carrier = rng.choice(["{}", "before {} after", "words " * 150 + "{}" + " words" * 150,
                          "x" * 600 + " {} " + "y" * 600, "日本語{}日本語", "a\u2028{}\u2028b", "**{}**", "🎉{}🎉",
                          "\t{}"])
    at = rng.randint(0, len(lines))
    lines.insert(at, carrier.format(needle))
    text = rng.choice(["\n", "\r\n"]).join(front + lines) + rng.choice(["", "\n", "\n\n\n"])
    return (b"\xef\xbb\xbf" if rng.random() < 0.2 else b"") + text.encode(), len(front) + at + 1


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    "200 odd documents in an index -> (kb, {needle: true line})."
    base, rng = tmp_path_factory.mktemp("places"), random.Random(2026)
    made = {f"needle{n:03}": odd_document(rng, f"needle{n:03}") for n in range(200)}
    kb = corpus(new_kb(base / "gno"), base, {f"{name[6:]}.{rng.choice(['md', 'txt'])}": data for name,
                                             (data, _) in made.items()})
    yield kb, {name: line for name, (_, line) in made.items()}
    kb.close()


def check_place(kb, hit, needle: str):
    "The line, the snippet and its range say the truth about the document."
    line = run(kb, "get", ref=hit["uri"], fromLine=hit["line"], lineCount=1)["content"]
    assert needle in line
    first, last = hit["snippetRange"]["startLine"], hit["snippetRange"]["endLine"]
    assert 1 <= first <= hit["line"] <= last
    shown = run(kb, "get", ref=hit["uri"], fromLine=first, lineCount=last - first + 1)["content"]
    text = hit["snippet"].removeprefix("…").removesuffix("…")
    assert text and text in shown and text.count("\n") == last - first, "the snippet is exactly of these lines"
    assert needle in text and len(hit["snippet"]) <= 400
    if not hit["snippet"].startswith("…"):
        assert shown.startswith(text)
    if not hit["snippet"].endswith("…"):
        assert shown.rstrip().endswith(text.rstrip())


def test_line_and_snippet_show_the_match_in_every_document(places):
    kb, lines = places
    for needle, line in lines.items():
        (hit,) = search(kb, needle)["results"]
        assert hit["line"] == line, needle
        check_place(kb, hit, needle)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_place_of_a_match_in_any_body(data):
    "best_lines over arbitrary bodies: the line holds the match, the snippet is text of exactly its lines."
    before = data.draw(st.lists(st.sampled_from(ODD_LINES), max_size=12).map("\n".join))
    glue = data.draw(st.sampled_from(["\n", " ", "", "\n\n"]))
    after = data.draw(st.lists(st.sampled_from(ODD_LINES), max_size=12).map("\n".join))
    body = before + glue + "needle" + glue + after + "\n"
    at = len(before) + len(glue)
    place = gno.best_lines(body, [gno.Mark(at, at + 6, "needle")])
    lines = body.split("\n")
    assert place.line == body[:at].count("\n") + 1 and "needle" in lines[place.line - 1]
    text = place.text.removeprefix("…").removesuffix("…")
    assert text in "\n".join(lines[place.start_line - 1:place.end_line])
    assert text.count("\n") == place.end_line - place.start_line and place.start_line <= place.line <= place.end_line
    assert "needle" in text and len(place.text) <= gno.SNIPPET == 400


PLACES = """# Manual of firing

Text.

Only copper here.

The kiln, cobalt.

Only cobalt here.

A blue glaze.

Cobalt gives blue.

A glaze that is blue.

wood ash
"""


@pytest.mark.parametrize("query, line", [
    ("cobalt", 7), ("copper", 5), ("cobalt blue", 13), ("blue cobalt", 13), ('"blue glaze"', 11), ("glazes", 11),
    ("kiln", 7), ("kiln cobalt", 7), ("ash", 17), ("Manual", 1)])
def test_the_line_is_where_the_words_stand_together(kb, tmp_path, query, line):
    corpus(kb, tmp_path, {"a.md": PLACES})
    (hit,) = search(kb, query)["results"]
    assert hit["line"] == line
    check_place(kb, hit, "")


@pytest.mark.parametrize("text, query, line", [
    ("one\n\ngreen\ntea\n", '"green tea"', 3), ("green\n\n" * 100 + "green tea\n", "green tea", 201),
    ("one\n\n" + "many words make a phrase " * 60 + "\n", '"' + "many words make a phrase " * 40 + '"', 3),
    ("a\n\nthe Cafés\n", "cafe*", 3), ("a\n\nthe Cafés\n", "café*", 3), ("a\n\nmax_retry_count\n", "retr*", 3),
    ("tea\n" * 500 + "\n\nkiln tea\n", "kiln tea", 503), ("a\n\nthe kiln\n", "ki*", 3),
    ("a\n\n" + "x" * 5000 + " kiln " + "y" * 5000 + "\n", "kiln", 3),
    ("日本\n\n" * 40 + "日本語の窯\n", "日本語の窯", 81),
    ("é\n\nC\n\nC++\n", "c++", 5),
    ("car, car, car\n" + "x\n" * 300 + "cart, car\n", "cart car", 302),
    ("plan, plan, plan\n" + "x\n" * 300 + "plan, planet\n", "planet plan", 302),
    ("a planet\n" + "x\n" * 300 + "plan, planet\n", "plan planet", 302)])
def test_where_several_places_match(kb, tmp_path, text, query, line):
    corpus(kb, tmp_path, {"a.md": text})
    (hit,) = search(kb, query)["results"]
    assert hit["line"] == line
    check_place(kb, hit, "")


def test_the_line_is_right_in_every_file_of_the_vault(kb):
    "Words that stand once in a document: the hit's line is the one that get shows them on."
    add(kb, VAULT, "vault")
    listed = [h["source"]["relPath"] for h in search(kb, "e* a* t* s* o* 2*", limit=100)["results"]]
    tried = 0
    for path in listed:
        lines = run(kb, "get", ref=f"vault/{path}")["content"].split("\n")
        words = [(word, n) for n, line in enumerate(lines, 1) for word in re.findall(r"[^\W_]+", line)]
        stems = stems_of({word for word, _ in words})
        count = Counter(stems[word] for word, _ in words)
        once = [(w, n) for w, n in words if count[stems[w]] == 1 and len(w) > 3 and w.lower() not in gno.STOP_WORDS]
        for word, n in once[::7][:6]:
            (hit,) = [h for h in search(kb, word, limit=100)["results"] if h["source"]["relPath"] == path]
            assert hit["line"] == n, (path, word)
            check_place(kb, hit, "")
            tried += 1
    assert len({os.path.splitext(p)[1] for p in listed}) > 5 and tried > 50


def test_a_line_with_all_the_words_beats_lines_with_some(kb, tmp_path):
    rng, filler = random.Random(3), "other words of no interest " * 15 + "\n"
    truth = {}
    for n in range(40):
        lines = [rng.choice(["a kiln\n", "some clay\n", "the ash\n"]) + filler for _ in range(rng.randint(0, 12))]
        at = rng.randint(0, len(lines))
        lines.insert(at, "ash and clay in a kiln\n" + filler)
        truth[f"{n}.md"] = 2 * at + 1
        write(tmp_path / "notes", {f"{n}.md": "".join(lines)})
    add(kb, tmp_path / "notes")
    for tool in ("search", "query"):
        found = run(kb, tool, query="clay kiln ash", limit=100)
        assert {h["source"]["relPath"]: h["line"] for h in found["results"]} == truth


def test_a_long_file_full_of_matches_takes_no_time(kb, tmp_path):
    "Finding the place must not cost the length of the file once per match."
    lines = "an error, 1 of many\n"
    corpus(kb, tmp_path, {"log.txt": lines * 120_000 + "the error in the glaze kiln\n" + lines * 40_000})
    began = time.perf_counter()
    (hit,) = search(kb, "error glaze")["results"]
    assert time.perf_counter() - began < 5 and hit["line"] == 120_001
    check_place(kb, hit, "glaze")


NOTEBOOK = {"metadata": {}, "nbformat": 4, "nbformat_minor": 5, "cells": [
    {"cell_type": "markdown", "metadata": {}, "source": ["# One\n", "\n", "text"]},
    {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": 1, "source": ["x = 1\n", "needle = 2"]}]}


@pytest.mark.parametrize("name, text, words", [
    ("a.html", "<html><head><title>Pots</title></head><body><h1>Pots</h1><p>one</p><ul><li>the needle here</li></ul>",
     "needle here"),
    ("a.csv", "name,value\none,1\ntwo,2\nneedle,3\n", "needle"),
    ("a.json", '{"a": [1, 2, {"b": "the needle"}]}', "needle"),
    ("a.py", "import os\n\n\ndef needle():\n    pass\n", "needle"),
    ("a.txt", "one\r\n\r\nneedle\r\n", "needle"),
    ("a.yaml", "a:\n  - b\n  - needle\n", "needle"),
    ("a.ipynb", json.dumps(NOTEBOOK), "needle"),
    ("a.eml", "From: a@b.org\nTo: b@b.org\nSubject: Pots\nContent-Type: text/plain\n\none\n\nthe needle\n", "needle")])
def test_the_line_is_right_in_converted_files(kb, tmp_path, name, text, words):
    corpus(kb, tmp_path, {name: text})
    (hit,) = search(kb, words)["results"]
    check_place(kb, hit, words)


@pytest.mark.parametrize("text, query, line", [
    ("intro\n\n# Kiln book\n\ntext\n", "kiln", 3), ("---\ntitle: Kiln book\n---\n\ntext\n", "kiln", 2),
    ("---\ntitle: Kiln book\n---\n\nthe kiln\n", "kiln", 5),
    ("---\ntitle: \"Kiln: book\"\n---\n\ntext\n", "book", 2), ("no title at all\n", "stem", 1)])
def test_a_match_in_the_title_alone_gives_the_titles_line(kb, tmp_path, text, query, line):
    corpus(kb, tmp_path, {"stem.md": text})
    (hit,) = search(kb, query)["results"]
    assert hit["line"] == line and hit["snippet"]
    assert hit["snippetRange"]["startLine"] <= line <= hit["snippetRange"]["endLine"]


def test_a_body_beats_its_metadata(kb, tmp_path):
    corpus(kb, tmp_path,
           {"a.md": "---\ntags: [kiln]\ndescription: kiln kiln kiln\n---\n\n# Notes\n\nAbout the kiln.\n"})
    assert search(kb, "kiln")["results"][0]["line"] == 8


# ---- the shape of the answer ----

def test_a_hit_carries_what_a_reader_needs(kb, tmp_path):
    corpus(kb, tmp_path, {"meetings/2026 plan.md":
                          "---\nauthor: Ada\ndate: 2026-01-02\ntags: [work]\n---\n\n# Plan\n\nThe kiln is planned.\n"})
    found = search(kb, "kiln")
    (hit,) = found["results"]
    data = (tmp_path / "notes" / "meetings/2026 plan.md").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    assert hit["docid"] == "#" + digest[:8] and hit["uri"] == "gno://notes/meetings/2026%20plan.md"
    assert hit["title"] == "Plan" and hit["line"] == 9
    assert hit["contentType"] == "meeting" and "meeting" in hit["categories"]
    source, name = hit["source"], "meetings/2026 plan.md"
    assert source["absPath"] == str(tmp_path / "notes" / name) and source["relPath"] == name
    assert source["mime"] == "text/markdown" and source["ext"] == ".md"
    assert source["sizeBytes"] == len(data) and source["sourceHash"] == digest
    assert source["documentDate"].startswith("2026-01-02") and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z",
                                                                            source["modifiedAt"])
    assert set(found["meta"]) >= {"query", "mode", "totalResults", "queryLanguage"}


def test_removed_files_are_never_found(kb, tmp_path):
    corpus(kb, tmp_path, {"a.md": "kiln #pots", "b.md": "kiln #pots"})
    (tmp_path / "notes" / "a.md").unlink()
    run(kb, "sync")
    assert paths(search(kb, "kiln")) == ["b.md"] and run(kb, "list_tags")["tags"] == [{"tag": "pots", "count": 1}]
    run(kb, "remove_collection", collection="notes")
    assert search(kb, "kiln")["results"] == [] and run(kb, "list_tags")["tags"] == []


def test_an_empty_knowledge_base_answers_with_nothing(kb):
    assert search(kb, "kiln")["results"] == [] and not os.path.exists(kb.db_path)


# ---- tags ----

@pytest.fixture(scope="module")
def tags_kb(tmp_path_factory):
    base = tmp_path_factory.mktemp("tags")
    kb = corpus(new_kb(base / "gno"), base, {"a.md": "#work #work/project text #Ünder",
                                             "b.md": "---\ntags: [work, workshop]\n---\n#work/project/deep",
                                             "c.md": "#personal and `#code` and http://x.org/#anchor"})
    add(kb, write(base / "second", {"d.md": "#personal #work"}), name="second")
    yield kb
    kb.close()


@pytest.mark.parametrize("arguments, expected", [
    ({}, [("work", 3), ("personal", 2), ("work/project", 1), ("work/project/deep", 1), ("workshop", 1), ("ünder", 1)]),
    ({"collection": "Second"}, [("personal", 1), ("work", 1)]),
    ({"prefix": "work"}, [("work", 3), ("work/project", 1), ("work/project/deep", 1)]),
    ({"prefix": "work/"}, [("work", 3), ("work/project", 1), ("work/project/deep", 1)]),
    ({"prefix": " #WORK/Project "}, [("work/project", 1), ("work/project/deep", 1)]),
    ({"prefix": "wor"}, []), ({"prefix": "U\u0308nder"}, [("ünder", 1)])])
def test_list_tags(tags_kb, arguments, expected):
    found = run(tags_kb, "list_tags", **arguments)
    assert [(t["tag"], t["count"]) for t in found["tags"]] == expected and found["meta"]["totalTags"] == len(expected)
    assert found["meta"]["collection"] == ("second" if "collection" in arguments else None)


@pytest.mark.parametrize("arguments, code", [({"prefix": "a b"}, "INVALID_INPUT"), ({"prefix": "/"}, "INVALID_INPUT"),
                                             ({"prefix": "a//b"}, "INVALID_INPUT"), ({"prefix": "%"}, "INVALID_INPUT"),
                                             ({"collection": "third"}, "NOT_FOUND")])
def test_list_tags_refuses(tags_kb, arguments, code):
    with pytest.raises(gno.GnoError) as e:
        run(tags_kb, "list_tags", **arguments)
    assert e.value.code == code
