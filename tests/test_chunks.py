"""Chunks: spans of a mirror that cover it in order, end at good places and never split a character."""
import random
import time
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gno

LONGEST = gno.CHUNK + gno.STRETCH          # no chunk of ordinary text is longer


def check(text: str, code: bool = False) -> list[gno.Chunk]:
    "What holds of the chunks of every text."
    chunks = gno.split_chunks(text, code)
    assert chunks == gno.split_chunks(text, code)
    assert bool(chunks) == bool(text.strip())
    covered = 0
    for c in chunks:
        assert not text[covered:c.start].strip(), "only white space may lie between two chunks"
        assert c.start < c.end <= len(text) and text[c.start:c.end].strip()
        assert c.start_line == 1 + text[:c.start].count("\n")
        assert c.end_line == 1 + text[:c.end - 1].count("\n")
        covered = c.end
    assert not text[covered:].strip()
    for a, b in pairwise(chunks):
        assert a.start < b.start and a.end < b.end and a.end - b.start <= gno.OVERLAP
    return chunks


@pytest.mark.parametrize("text", ["", " ", "\n", "\n\n \t\n" * 1000, "\u2028\u3000\x0c" * 900])
@pytest.mark.parametrize("code", [False, True])
def test_white_space_alone_has_no_chunks(text, code):
    assert check(text, code) == []


@pytest.mark.parametrize("text", ["a", "a\n", "\n\na\n\n", "x" * LONGEST, "word " * (LONGEST // 5)])
def test_a_short_text_is_one_chunk(text):
    assert [(c.start, c.end) for c in check(text)] == [(0, len(text))]


def test_lines_count_line_feeds_alone():
    text = "one\u2028still one\x0cstill one\x85still one\rstill one\ntwo\n" * 40
    chunks = check(text)
    assert chunks[-1].end_line == 80 and len(chunks) > 3


SENTENCES = ["The kiln was cold again this morning. ", "Nobody had ordered new clay! ", "Was it Ada (or Ben)? ",
             "It cost 3.50 e.g. in May. "]


def prose(n: int, seed: int, joiner="") -> str:
    return joiner.join(random.Random(seed).choices(SENTENCES, k=n))


def test_prose_ends_at_a_sentence():
    text = prose(200, 1)
    for c in check(text)[:-1]:
        assert text[c.end - 2] in ".!?" and c.end - c.start <= LONGEST
    for c in check(text)[1:]:
        assert text[c.start - 2] in ".!?", "the overlap begins with a sentence too"


def test_neighbours_overlap_by_a_whole_sentence_or_line_at_most_120_characters():
    text = prose(300, 2)
    chunks = check(text)
    shared = [a.end - b.start for a, b in pairwise(chunks)]
    assert min(shared) > 0 and max(shared) <= gno.OVERLAP == 120


def test_prose_prefers_blank_lines_to_sentences():
    text = "\n\n".join(prose(8, n).strip() for n in range(30))         # paragraphs of 180 to 310 characters
    for c in check(text)[:-1]:
        assert text[c.end - 2:c.end] == "\n\n"


def test_headings_begin_chunks():
    sections = [f"{'#' * (1 + n % 6)} Part {n}\n\n{prose(13, n)}\n\n" for n in range(20)]
    text = "".join(sections)
    assert all(LONGEST / 2 < len(s) <= gno.CHUNK for s in sections)    # each fits one chunk, and two never do
    starts = [sum(map(len, sections[:n])) for n in range(20)]
    assert [c.start for c in check(text)] == starts
    assert [c.end for c in check(text)] == starts[1:] + [len(text)]    # a heading is no place to repeat text


def test_headings_in_a_row_stay_together():
    text = "# One\n\n## Two\n\n### Three\n\n" + prose(60, 3)
    assert check(text)[0].start == 0 and "### Three" in text[:check(text)[0].end]


@pytest.mark.parametrize("heading, starts", [("# A", True), ("###### A", True), ("#A", False), ("####### A", False),
                                             (" # A", False)])
def test_what_is_a_heading(heading, starts):
    before = ("word " * 60).strip() + "\n"                             # 300 characters: past LEAST, short of CHUNK
    text = before + heading + "\n" + "more " * 120
    assert (check(text)[0].end == len(before)) is starts


FUNCTION = """def step_{n}(value, other):
    first = value + other  # {pad}
    if first:

        return first * {n}
    return None


"""


@pytest.mark.parametrize("line", [
    "def f(x):", "class Kiln(Base):", "async def f():", "@cached", "function fire() {", "export function fire() {",
    "export default class A {",
    "func (k *Kiln) Fire() error {", "pub(crate) fn fire() {", "pub struct Kiln {", "impl Kiln {",
    "const heat = () => {", "interface Kiln {",
    "public static class Kiln {", "trait Warm {", "enum Glaze {", "type Kiln struct {"])
def test_code_ends_at_a_definition(line):
    before = "x = 1; y = 2; z = 3\n" * 15                              # 300 characters
    text = before + line + "\n" + "    call(one, two)\n" * 60
    chunks = check(text, code=True)
    assert chunks[0].end == len(before) and chunks[1].start == len(before)
    assert len(before) not in [c.start for c in check(text, code=False)] or not line


def test_code_functions_are_not_torn():
    functions = [FUNCTION.format(n=n, pad="p" * (120 + n)) for n in range(30)]
    text = "".join(functions)
    assert all(gno.LEAST < len(f) <= gno.CHUNK / 2 + 60 for f in functions)
    starts = {sum(map(len, functions[:n])) for n in range(30)}
    assert {c.start for c in check(text, code=True)} <= starts


def test_the_same_text_is_cut_differently_as_code_and_as_prose():
    text = "".join(FUNCTION.format(n=n, pad="p" * 150) for n in range(30))
    assert check(text, code=True) != check(text, code=False)


@pytest.mark.parametrize("name, text", [
    ("one line without a blank", "x" * 3_000_000),
    ("one line of words", "lorem ipsum " * 250_000),
    ("base64", "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo0NTY3ODkrLw==" * 60_000),
    ("one line of JSON", '{"id":12,"name":"kiln"},' * 120_000),
    ("CJK without blanks", "窯は今朝も冷たかった誰も粘土を頼んでいない" * 60_000),
    ("line feeds between words", "a\n" * 1_000_000), ("flags", "🇩🇪" * 250_000),
])
def test_size_and_time_are_bounded(name, text):
    began = time.perf_counter()
    chunks = gno.split_chunks(text, False)
    assert time.perf_counter() - began < 10, name                      # generous: quadratic work takes minutes here
    assert max(c.end - c.start for c in chunks) <= LONGEST
    assert max(a.end - b.start for a, b in pairwise(chunks)) <= gno.OVERLAP
    assert chunks[0].start == 0 and chunks[-1].end == len(text)
    assert len(chunks) <= len(text) / (gno.LEAST - gno.OVERLAP)


def test_cjk_ends_at_its_own_full_stops():
    text = ("窯は今朝も冷たかった。" "誰も粘土を頼んでいない！" "本当ですか？") * 100
    for c in check(text)[:-1]:
        assert text[c.end - 1] in "。！？"


# One character on paper, several code points: none of them may be torn apart (Unicode Standard Annex 29)
CLUSTERS = {
    "combining acute": "x\u0301", "two marks": "q\u0323\u0307", "Thai vowel sign": "ก\u0e34",
    "Thai vowel and tone": "ก\u0e31\u0e49",
    "Devanagari vowel sign": "क\u093f", "Tamil": "த\u0bbf", "Hebrew point": "ש\u05c1", "variation selector": "☂\ufe0f",
    "keycap": "1\ufe0f\u20e3", "family": "👨\u200d👩\u200d👧", "skin tone": "👍🏽",
    "skin tone and joiner": "👩🏽\u200d🚀",
    "enclosing circle": "a\u20dd", "full stop and variation selector": "。\ufe00", "rainbow flag": "🏳\ufe0f\u200d🌈",
    "national flag": "🇩🇪",
    "Scotland": "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
}


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("code", [False, True])
def test_no_cut_inside_a_character(name, code):
    cluster = CLUSTERS[name]
    for shift in range(len(cluster)):
        text = "a" * shift + cluster * 1500
        for c in check(text, code):
            for at in (c.start, c.end):
                assert at <= shift or (at - shift) % len(cluster) == 0, (shift, at)


EMOJI = "👨👩👧👍🚀"


def continues(text: str, at: int) -> bool:
    "Whether a cut at text[at] would tear a base from its mark or an emoji sequence from its joiner."
    if not 0 < at < len(text) or text[at - 1].isspace():
        return False
    before, after = text[at - 1], text[at]
    return unicodedata.category(after)[0] == "M" or after == "\u200d" or before == "\u200d" and after in EMOJI


PIECES = st.sampled_from([
    "word", "Satz", " ", "  ", "\n", "\n\n", "\n# Heading\n", "\ndef f():\n", "\nclass A:\n", ". ", "! ", "。",
    "東京大学", "ภาษาไทย", "한국어", "e\u0301", "ก\u0e34", "👨\u200d👩\u200d👧", "👍🏽", "\u200d", "\u0301", "\u2028",
    "\x0c", "\t",
    "x" * 97, "wort " * 31, "長い" * 59, "- item\n", "```\n", "\ufeff"])
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=12), st.builds(lambda p, n: p * n, PIECES, st.integers(1, 200))),
                 max_size=60).map("".join)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.booleans())
def test_every_text_is_covered_in_order(text, code):
    chunks = check(text, code)
    for c in chunks:
        assert not continues(text, c.start) and not continues(text, c.end)
        marks = sum(unicodedata.category(ch)[0] == "M" or ch == "\u200d" for ch in text[c.start:c.end])
        assert c.end - c.start <= LONGEST + 2 * marks, "only a heap of marks on one letter makes it longer"


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_what_follows_does_not_move_what_came_before(text):
    "Appending to a note leaves the chunks far above the end as they are, so that their vectors stay."
    longer = text + "\n\nappended words. " * 40
    kept = [c for c in gno.split_chunks(text, False) if c.end <= len(text) - LONGEST - gno.CHUNK]
    assert gno.split_chunks(longer, False)[:len(kept)] == kept


@pytest.mark.parametrize("title, text, expected", [
    ("", "  body\n", "body"), ("Kiln", "\n\nbody ", "Kiln\nbody"), ("t" * 400, "body", "t" * 160 + "\nbody")])
def test_chunk_input_is_title_and_chunk(title, text, expected):
    assert gno.chunk_input(title, text) == expected
