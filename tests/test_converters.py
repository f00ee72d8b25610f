"""Section Converters: bytes of one file in, Markdown out. Office and PDF files come from the real libraries."""
import base64
import datetime
import io
import json
import sys
import threading
import time
import zipfile
from email.message import EmailMessage

import docx
import openpyxl
import pptx
import pytest
from docx.oxml import parse_xml
from docx.oxml.ns import nsdecls
from hypothesis import given, settings
from hypothesis import strategies as st
from openpyxl.comments import Comment
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.pdfgen.canvas import Canvas

import gno


def convert(ext, data):
    "(mirror, title, warning codes) of the bytes of a file with that extension."
    warnings = []
    markdown, title = gno.CONVERTERS[ext](data if isinstance(data, bytes) else data.encode(), warnings)
    assert all(len(w) == 2 and all(isinstance(part, str) and part for part in w) for w in warnings), warnings
    return gno.canonical(markdown), title, [code for code, _ in warnings]


def code_of(ext, data):
    "The error code that converting raises, or \"\"."
    try:
        convert(ext, data)
    except gno.GnoError as error:
        assert error.message
        return error.code
    return ""


def saved(thing):
    out = io.BytesIO()
    thing.save(out)
    return out.getvalue()


def zipped(parts, method=zipfile.ZIP_DEFLATED):
    "A zip of {name: text or bytes}."
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return out.getvalue()


def parts_of(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def with_related(data, part, **added):
    "The package with parts added: kind=(file name, content), each related to `part` by a relation of that kind."
    parts = parts_of(data)
    folder, _, name = part.rpartition("/")
    rels = f"{folder}/_rels/{name}.rels"
    for n, (kind, (target, content)) in enumerate(added.items()):
        parts[f"{folder}/{target}"] = content
        link = f'<Relationship Id="rNew{n}" Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/{kind}"'
        before = parts.get(rels, EMPTY_RELATIONS)
        parts[rels] = before.replace(b"</Relationships>", f'{link} Target="{target}"/></Relationships>'.encode())
    return zipped(parts)


EMPTY_RELATIONS = b'<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"></Relationships>'
W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
P = 'xmlns:p="http://schemas.openxmlformats.org/presentationml/2006/main"'
S = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'


# ---- text: what the mirror is

def test_canonical():
    for text, mirror in [
        ("", ""),
        ("\n \n\t\n", ""),
        ("a", "a\n"),
        ("a\n\n\n", "a\n"),
        ("\n\na\n\n\nb", "\n\na\n\n\nb\n"),                         # blank lines are kept, those at the end are not
        ("a\r\nb\rc\n", "a\nb\nc\n"),
        ("\ufeffa", "a\n"),
        ("a  \nb\t \nc", "a\nb\nc\n"),
        ("a\u00a0\u3000\nä \u2009\n", "a\nä\n"),
        ("a\u2028\nb\u0085\nc\u2029d", "a\u2028\nb\u0085\nc\u2029d\n"),     # these three end no line
        ("  a\n\tb", "  a\n\tb\n"),
        ("a\x1b[31mb\x07\x00\x0c\x7f", "a[31mb\n"),
        ("u\u0308ber e\u0301te\u0301", "über été\n"),
        ("e\x01\u0301", "é\n"),                                     # composed after the control character is gone
        ("a\ud800b", "a\ufffdb\n"),
        ("\x0b\ufeff\x01", ""),
    ]:
        assert gno.canonical(text) == mirror, text
        assert gno.canonical(mirror) == mirror, text


ANY_TEXT = st.text(st.one_of(st.sampled_from(" \t\n\r\x0b\x0c\x1b\u0085\u00a0\u2028\ufeff\u0301e|#"), st.characters()), max_size=60)


@given(ANY_TEXT)
@settings(max_examples=400, deadline=None)
def test_canonical_properties(text):
    mirror = gno.canonical(text)
    assert gno.canonical(mirror) == mirror
    assert "\r" not in mirror and "\ufeff" not in mirror
    assert mirror == "" or mirror.endswith("\n") and not mirror.endswith("\n\n")
    mirror.encode()                                                 # no lone surrogate
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    kept = mirror.split("\n")[:-1]
    assert len(kept) <= len(lines)                                  # line N of the source is line N of the mirror
    for source, line in zip(lines, kept, strict=False):
        assert line == gno.canonical(source).removesuffix("\n")


def test_decode():
    for data, text, codes in [
        (b"", "", []),
        ("naïve – 漢字".encode(), "naïve – 漢字", []),
        (b"\xef\xbb\xbf# T", "# T", []),
        ("Zebra ä".encode("utf-16"), "Zebra ä", []),
        (b"\xfe\xff" + "Gnu".encode("utf-16-be"), "Gnu", []),
        (b"\xff\xfe\0\0" + "Yak".encode("utf-32-le"), "Yak", []),
        (b"\0\0\xfe\xff" + "Emu".encode("utf-32-be"), "Emu", []),
        ("Garçon “x” €".encode("cp1252"), "Garçon “x” €", ["ENCODING_GUESSED"]),
        (b"price \x81 5", "price \ufffd 5", ["ENCODING_GUESSED"]),
        (b"un caf\xe9", "un café", ["ENCODING_GUESSED"]),           # one stray byte after ASCII: an old é
        (b"word \xe2\x82", "word \ufffd", ["ENCODING_GUESSED"]),    # two: a euro sign cut in half
        ("é ".encode() + b"\xe2", "é \ufffd", ["ENCODING_GUESSED"]),
        (b"\x1b[31mred\x1b[0m \x07", "\x1b[31mred\x1b[0m \x07", []),
    ]:
        warnings = []
        assert gno.decode(data, warnings) == text, data
        assert [code for code, _ in warnings] == codes, data
    for data in (b"a\0b", "ab".encode("utf-16-le"), b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\x01\x02\x03\x04 a", b"\xff\xfea\0\0\0"):
        assert code_of(".md", data) == "BINARY", data


def test_a_source_file_is_its_text():
    source = "\n\ndef f():  \n\treturn 1\n\n\n"
    for ext in (".py", ".md", ".txt", ".rs", ".rst"):
        assert convert(ext, source) == ("\n\ndef f():\n\treturn 1\n", "", []), ext
    assert code_of(".txt", b"x" * 50_000_001) == "TOO_LARGE"


def test_every_extension_has_its_names():
    for ext, name, mime in [
        (".md", "gno/markdown", "text/markdown"), (".mdx", "gno/markdown", "text/markdown"), (".txt", "gno/text", "text/plain"),
        (".py", "gno/code", "text/x-python"), (".tsv", "gno/csv", "text/tab-separated-values"), (".htm", "gno/html", "text/html"),
        (".docx", "gno/docx", "application/vnd.openxmlformats-officedocument.wordprocessingml.document"),
        (".xlsx", "gno/xlsx", "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"),
        (".pptx", "gno/pptx", "application/vnd.openxmlformats-officedocument.presentationml.presentation"),
        (".pdf", "gno/pdf", "application/pdf"), (".epub", "gno/epub", "application/epub+zip"), (".eml", "gno/eml", "message/rfc822"),
        (".json", "gno/json", "application/json"), (".yml", "gno/yaml", "application/yaml"), (".toml", "gno/toml", "application/toml"),
    ]:
        assert (gno.converter_id(ext), gno.MIME[ext]) == (name, mime)
    assert set(gno.MIME) == set(gno.CONVERTERS)
    assert all(ext.startswith(".") and ext == ext.lower() for ext in gno.CONVERTERS)
    assert {".md", ".txt", ".log", ".org"} <= gno.TEXT_EXTENSIONS and not gno.TEXT_EXTENSIONS & gno.CODE_EXTENSIONS
    named = """py pyi js jsx mjs cjs ts tsx go rs c h cc cpp hpp cs java kt swift rb php m mm sh bash zsh fish ps1 sql r jl lua pl
        scala dart vue svelte css scss less ini cfg conf properties tex bib adoc proto graphql tf dockerfile"""
    assert {"." + ext for ext in named.split()} <= gno.CODE_EXTENSIONS


# ---- data files

def test_data_files_stay_as_they_are_written():
    for ext, text, codes in [
        (".json", '{"a": 1.10, "a": 2}\n', []),
        (".json", '{"a":\n', ["PARSE_WARNING"]),
        (".json", "[" * 5000 + "\n", ["PARSE_WARNING"]),
        (".jsonl", '{"a": 1}\n\n{"b": 2}\n', []),
        (".jsonl", '{"a": 1}\n{"b":\n', ["PARSE_WARNING"]),
        (".yaml", "# c\na: [1, 2]\nb: &x {k: v}\nc: *x\n", []),
        (".yaml", "a: [1\nb: 2\n", ["PARSE_WARNING"]),
        (".yaml", "{{ template }}: {%\n", ["PARSE_WARNING"]),
        (".toml", 'a = 1.10\n[b]\nc = "x"\n', []),
        (".toml", "a =\n", ["PARSE_WARNING"]),
    ]:
        assert convert(ext, text) == (text, "", codes), text
    assert convert(".json", "[" + "7" * 5000 + "]")[2] == []            # a long number is valid


def test_json_on_one_long_line_gets_lines():
    filler = "x" * 400
    text = '{"a":1.10,"b":[],"c":{ },"a":["' + filler + '","p\\"q, {r}: [s]"],"u":"\\ud800"}'
    assert convert(".json", text)[0] == (
        '{\n "a": 1.10,\n "b": [],\n "c": { },\n "a": [\n  "' + filler + '",\n  "p\\"q, {r}: [s]"\n ],\n "u": "\\ud800"\n}\n')
    short = '{"a":[1,2]}\n'
    assert convert(".json", short)[0] == short


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)))
@settings(max_examples=100, deadline=None)
def test_json_lines_change_no_value(value):
    wide = [value, "x" * 400]
    assert json.loads(gno.CONVERTERS[".json"](json.dumps(wide).encode(), [])[0]) == wide


def test_csv():
    for text, table in [
        ("a,b\n1,2\n", "| a | b |\n| --- | --- |\n| 1 | 2 |\n"),
        ("a;b;c\n1,5;2;x|y\n", "| a | b | c |\n| --- | --- | --- |\n| 1,5 | 2 | x\\|y |\n"),
        ("a\tb\n1\t2\n", "| a | b |\n| --- | --- |\n| 1 | 2 |\n"),
        ("a|b\n1|2\n", "| a | b |\n| --- | --- |\n| 1 | 2 |\n"),
        ('a;b\n"x; y";"one\r\ntwo"\n', "| a | b |\n| --- | --- |\n| x; y | one<br>two |\n"),
        ("a,b\n\n1\n2,3,4\n", "| a | b |  |\n| --- | --- | --- |\n| 1 |  |  |\n| 2 | 3 | 4 |\n"),
        ("sep=;\na,b;c\n", "| a,b | c |\n| --- | --- |\n"),
        ("word\n", "| word |\n| --- |\n"),
        ("", ""),
    ]:
        for ext in (".csv", ".tsv"):
            assert convert(ext, text) == (table, "", []), text
    mirror, _, codes = convert(".csv", 'size,what\n5",pipe\n7,tube\n')
    assert codes == ["PARSE_WARNING"] and '| 5" | pipe |' in mirror and "| 7 | tube |" in mirror
    big = "x" * 200_000
    assert big in convert(".csv", f'a,b\n"{big}",1\n')[0]
    mirror, _, _ = convert(".csv", "a" + "," * 60_000 + "\n" + "b\n" * 1000)
    assert mirror.count("\n| b |\n") and len(mirror) < 1_000_000     # one long row does not make the others long


def notebook(*cells, **metadata):
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": list(cells)})


def test_notebook():
    png = "iVBOR" + "A" * 5000
    text = notebook(
        {"cell_type": "markdown", "source": ["intro\n", "## Ocean model #\n", f"![p](data:image/png;base64,{png})"],
         "attachments": {"p.png": {"image/png": png}}},
        {"cell_type": "code", "source": "s = '''\n```\n'''\n", "outputs": [
            {"output_type": "stream", "text": ["10%\r", "100%\n", "tide ok 7\n"]},
            {"output_type": "display_data", "data": {"image/png": png, "text/plain": "<Figure size 640x480 with 1 Axes>"}},
            {"output_type": "execute_result", "data": {"text/plain": ["42"]}},
            {"output_type": "error", "traceback": ["\x1b[0;31mValueError\x1b[0m", "bad \x1b[1mtide\x1b[0m"]}]},
        {"cell_type": "raw", "source": "raw words"}, {"cell_type": "code", "source": "", "outputs": []}, 7,
        kernelspec={"language": "python", "name": "python3"})
    assert convert(".ipynb", text) == (
        "intro\n## Ocean model #\n![p]()\n\n````python\ns = '''\n```\n'''\n````\n\n```\n100%\ntide ok 7\n```\n\n```\n42\n```\n\n"
        "```\nValueError\nbad tide\n```\n\nraw words\n", "Ocean model", [])
    for broken in ("", "{", "[]", "7", '{"cells": 3}', '{"nbformat": 4}', "[" * 5000, text[:-1]):
        assert code_of(".ipynb", broken) == "CORRUPT", broken[:40]


# ---- HTML

def test_html():
    for page, mirror in [
        ("<h1>A <b>b</b></h1><p>one\n  two<p>three", "# A b\n\none two\n\nthree\n"),
        ("x<br>y<br/>z", "x\ny\nz\n"),
        ("<ul><li>a<ul><li>b<li>c</ul><li>d</ul>e", "- a\n    - b\n    - c\n- d\n\ne\n"),
        ("<ol start=3><li>c</li><li>d<p>more</p></li></ol>", "3. c\n4. d\n\n  more\n"),
        ("<ol start=0><li>a<li>b</ol><li>c", "0. a\n1. b\n- c\n"),
        ("<ol><li>a<ul><li>x</ul></li><li>b</li></ol>", "1. a\n    - x\n2. b\n"),
        ("<blockquote>q<p>r</blockquote>s", "> q\n\n> r\n\ns\n"),
        ("a<hr>b", "a\n\n* * *\n\nb\n"),
        ("&eacute;t&eacute; &lt;b&gt; &amp;amp; 3 < 4 && 5&nbsp;€ &#x26; &#9999999999;", "été <b> &amp; 3 < 4 && 5\u00a0€ & \ufffd\n"),
        ("<a href='x.md'>li<b>n</b>k</a> <a href='#top'>up</a> <a href=javascript:f()>js</a> <a>no</a>", "[link](x.md) up js no\n"),
        ("<a href='a b(c)'>[1]</a>", "[\\[1\\]](a%20b%28c%29)\n"),
        ("go <a href=u> there </a>now", "go [there](u) now\n"),
        ("<a href=u><h3>T</h3><p>d</p></a>", "### [T](u)\n\n[d](u)\n"),
        ("<img alt='the chart' src=c.png> <img src=x.png> <img alt=t src='data:a'>", "![the chart](c.png) t\n"),
        ("<pre>\na  b\n  &lt;c&gt; <span>d</span>\n</pre>", "```\na  b\n  <c> d\n```\n"),
        ("<ul><li><pre>x\n\ny</pre></ul>", "- ```\n  x\n\n  y\n  ```\n"),
        ("<pre>```</pre>", "````\n```\n````\n"),
        ("10<sup>3</sup>", "10^3\n"),
        ("<table><caption>C</caption><tr><th>a<th>b<tr><td>1|2<td><p>x<p>y</table>", "C\n\n| a | b |\n| --- | --- |\n| 1\\|2 | x<br>y |\n"),
        ("<table><tr><td colspan=2>a<td>b<tr><td>c</table>", "| a |  | b |\n| --- | --- | --- |\n| c |  |  |\n"),
        ("<table><tr><td><h2>H</h2><table><tr><td>a<td>b</table>t</table>", "H\n\n| a | b |\n| --- | --- |\n\nt\n"),
        ("<table><tr><td>only</table>", "only\n"),
        ("<table><tr><td><ul><li>a<li>b</table><p>c", "- a\n- b\n\nc\n"),
        ("<table><tr><td>x<td><ol><li>a<li>b</ol></table>", "| x | 1. a<br>2. b |\n| --- | --- |\n"),
        ("<script>a<b</script><style>p{}</style><noscript>n</noscript><template><p>t</template><svg><text>s</svg>z", "z\n"),
        ("<script src=x />kept<title/>", "kept\n"),
        ("a<!-- b > c -->d<!doctype x><?pi?></>e<![if !x]>f<![endif]>", "adef\n"),
        ("a<!-- never closed", "a<!-- never closed\n"),
        ("a<p class='never closed>b<p>c", "a\n\nb\n\nc\n"),
        ("a <b", "a\n"),
        ("a<script>alert('never closed')", "a\n"),
        ("<p># no heading<p>> no quote<p>---<p>#tag", "\\# no heading\n\n\\> no quote\n\n\\---\n\n#tag\n"),
        ("<h2>open<p>text<p>more", "## open\n\ntext\n\nmore\n"),
        ("<textarea>a<b>c</textarea>", ""),
        ("", ""),
    ]:
        for ext in (".html", ".htm", ".xhtml"):
            assert convert(ext, page)[0] == mirror, page


def test_html_title_and_charset():
    page = "<html><head>{}<title> T &amp;\n U </title></head><body><svg><title>no</title></svg>Straße</body></html>"
    for meta, encoding in [
        ("", "utf-8"), ("", "utf-16"), ('<meta charset="iso-8859-1">', "latin-1"),
        ('<meta http-equiv="Content-Type" content="text/html; charset=ISO-8859-2">', "iso-8859-2"),
        ("<meta charset=koi8-r>", "utf-8"),                         # what is valid UTF-8 is UTF-8
    ]:
        assert convert(".html", page.format(meta).encode(encoding)) == ("Straße\n", "T & U", []), meta
    assert convert(".html", "<meta charset=koi8-r>лодка".encode("koi8-r"))[0] == "лодка\n"
    assert convert(".xhtml", "<?xml version='1.0' encoding='koi8-r'?>лодка".encode("koi8-r"))[0] == "лодка\n"
    assert convert(".html", "<meta charset=iso-2022-jp>潮位計".encode("iso-2022-jp"))[0] == "潮位計\n"
    for charset in ("nonsense", "hex", "idna", "utf-7", "unicode_escape"):
        assert "Stra" in convert(".html", f"<meta charset={charset}>Straße".encode("cp1252"))[0], charset


HOSTILE = ["<", "<!--", "<a ", "<a '", "</", "</a ", "<!", "<![", "&", "<?", "<a b=", "<a/", "<x y='z", "<a b >' ", "<title>", "<svg>",
           "<div>", "<ul><li>", "</ul>", "<blockquote>", "<table><tr><td>", "</table>", "<a href=x><p>", "<pre>", "<h1>", "<b>"]


@pytest.mark.parametrize("piece", HOSTILE)
def test_html_takes_linear_time_and_no_recursion(piece):
    started = time.perf_counter()
    convert(".html", piece * 50_000 + "end")
    assert time.perf_counter() - started < 8                        # a quadratic reader takes minutes


# ---- Word

def lease():
    "A Word document with a bit of everything python-docx can make."
    document = docx.Document()
    document.core_properties.title = ""
    document.add_heading("Lease", 0)
    document.add_paragraph("Ten years.\nFrom 2024.")
    document.add_heading("Rent", 1)
    document.add_heading("Due dates", 2)
    for text, style in [("one", "List Bullet"), ("deeper", "List Bullet 2"), ("two", "List Bullet"), ("first", "List Number"),
                        ("second", "List Number")]:
        document.add_paragraph(text, style=style)
    table = document.add_table(rows=2, cols=3)
    table.cell(0, 0).merge(table.cell(0, 1)).text = "Year|Term"
    table.cell(0, 2).text = "Rent"
    table.cell(1, 0).text = "2024"
    table.cell(1, 2).text = "240\neuro"
    table.cell(1, 1).add_table(rows=1, cols=2).cell(0, 1).text = "inner"
    document.add_paragraph("# not a heading")
    document.sections[0].header.paragraphs[0].text = "Parish of Kestrel Hill"
    document.sections[0].footer.paragraphs[0].text = "7"
    return document


def test_docx():
    mirror, title, codes = convert(".docx", saved(lease()))
    assert (title, codes) == ("Lease", [])
    assert mirror == (
        "# Lease\n\nTen years.\nFrom 2024.\n\n# Rent\n\n## Due dates\n\n- one\n    - deeper\n- two\n1. first\n2. second\n\n"
        "| Year\\|Term |  | Rent |\n| --- | --- | --- |\n| 2024 | inner | 240<br>euro |\n\n\\# not a heading\n\n"
        "## Headers and footers\n\nParish of Kestrel Hill\n")
    named = lease()
    named.core_properties.title = "Lease of the plot"
    assert convert(".docx", saved(named))[1] == "Lease of the plot"
    named.core_properties.title = "Node.js"
    assert convert(".docx", saved(named))[1] == "Node.js"
    for made_up in ("Word Document", "Microsoft Word - lease.doc", "lease v2.docx", " "):
        named.core_properties.title = made_up
        assert convert(".docx", saved(named))[1] == "Lease", made_up
    assert convert(".docx", saved(docx.Document())) == ("", "", [])


def body(*blocks):
    "A Word document of raw w: blocks."
    document = docx.Document()
    for block in blocks:
        document.element.body.insert(len(document.element.body) - 1, parse_xml(block))
    return document


def paragraph(inside):
    return f'<w:p {nsdecls("w", "r", "wp", "a")} xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006">{inside}</w:p>'


def run(text, tag="t"):
    return f'<w:r><w:{tag} xml:space="preserve">{text}</w:{tag}></w:r>'


def test_docx_shows_what_word_shows():
    box = f"<w:txbxContent><w:p>{run('in the box')}</w:p><w:p>{run('second line')}</w:p></w:txbxContent>"
    cell = "<w:tc><w:p>{}</w:p></w:tc>"
    for inside, mirror in [
        (run("Price is 10 ") + f"<w:del>{run('draft', 'delText')}</w:del><w:ins>{run('final')}</w:ins>", "Price is 10 final\n"),
        (f"<w:moveFrom>{run('gone')}</w:moveFrom><w:moveTo>{run('here')}</w:moveTo>", "here\n"),
        (run("a") + "<w:r><w:tab/></w:r>" + run("b") + "<w:r><w:br/></w:r>" + run("c"), "a b\nc\n"),
        (run("c") + "<w:r><w:noBreakHyphen/></w:r>" + run("d"), "c-d\n"),
        (run("PAGE", "instrText") + run("3"), "3\n"),
        (f"<w:sdt><w:sdtContent>{run('control')}</w:sdtContent></w:sdt>", "control\n"),
        (f'<w:hyperlink w:anchor="top">{run("up")}</w:hyperlink>', "up\n"),
        ("<w:pPr><w:outlineLvl w:val=\"2\"/></w:pPr>" + run("by outline"), "### by outline\n"),
        (run("before ") + "<w:r><mc:AlternateContent><mc:Choice Requires=\"wps\">" + box + "</mc:Choice><mc:Fallback>" + box
         + "</mc:Fallback></mc:AlternateContent></w:r>" + run("after"), "before after\n\nin the box\n\nsecond line\n"),
    ]:
        assert convert(".docx", saved(body(paragraph(inside))))[0] == mirror, inside
    table = f"<w:tbl {W}><w:tr>{cell.format(run('kept'))}{cell.format(run('b'))}</w:tr>" \
            f"<w:tr><w:trPr><w:del/></w:trPr>{cell.format(run('deleted row'))}</w:tr></w:tbl>"
    assert convert(".docx", saved(body(table)))[0] == "| kept | b |\n| --- | --- |\n"


def test_docx_links_localized_styles_and_lists():
    document = docx.Document()
    link = document.part.relate_to("https://example.org/a b", docx.opc.constants.RELATIONSHIP_TYPE.HYPERLINK, is_external=True)
    p = document.add_paragraph("see ")
    p._p.append(parse_xml(f'<w:hyperlink {nsdecls("w", "r")} r:id="{link}">{run("the [page]")}</w:hyperlink>'))
    styles = document.styles.element
    styles.append(parse_xml(f'<w:style {W} w:type="paragraph" w:styleId="Eigen"><w:name w:val="Eigen"/>'
                            '<w:basedOn w:val="berschrift9"/></w:style>'))
    styles.append(parse_xml(f'<w:style {W} w:type="paragraph" w:styleId="berschrift9"><w:name w:val="Kapitel"/>'
                            '<w:pPr><w:outlineLvl w:val="1"/></w:pPr></w:style>'))
    for style in ("Kapitel", "Eigen"):
        document.add_paragraph(f"in {style}", style=style)
    mirror = convert(".docx", saved(document))[0]
    assert mirror == "see [the \\[page\\]](https://example.org/a%20b)\n\n## in Kapitel\n\n## in Eigen\n"

    numbering = f'''<w:numbering {W}><w:abstractNum w:abstractNumId="0">
        <w:lvl w:ilvl="0"><w:start w:val="5"/><w:numFmt w:val="decimal"/></w:lvl>
        <w:lvl w:ilvl="1"><w:start w:val="1"/><w:numFmt w:val="lowerLetter"/></w:lvl></w:abstractNum>
        <w:num w:numId="3"><w:abstractNumId w:val="0"/></w:num></w:numbering>'''
    item = '<w:pPr><w:numPr><w:ilvl w:val="{}"/><w:numId w:val="3"/></w:numPr></w:pPr>'
    document = body(*(paragraph(item.format(level) + run(text)) for level, text in
                      [(0, "a"), (1, "b"), (1, "c"), (0, "d"), (1, "e"), (7, "f")]))
    data = parts_of(saved(document))
    data["word/numbering.xml"] = numbering
    assert convert(".docx", zipped(data))[0] == "5. a\n    1. b\n    2. c\n6. d\n    1. e\n        - f\n"


def test_docx_comments_and_notes():
    document = docx.Document()
    p = document.add_paragraph()
    spoken = p.add_run("the rent")
    p.add_run(" is low")
    document.add_comment([spoken], text="ask finance\nagain", author="Ann")
    p._p.append(parse_xml(f'<w:r {W}><w:endnoteReference w:id="3"/></w:r>'))
    p._p.append(parse_xml(f'<w:r {W}><w:footnoteReference w:id="9"/></w:r>'))
    p._p.append(parse_xml(f'<w:del {W}><w:r><w:footnoteReference w:id="8"/></w:r></w:del>'))
    note = '<w:{0} w:id="{1}"><w:p><w:r><w:{0}Ref/></w:r>{2}</w:p><w:p>' + run("more") + "</w:p></w:{0}>"
    data = with_related(
        saved(document), "word/document.xml",
        footnotes=("footnotes.xml", f"<w:footnotes {W}><w:footnote w:id=\"0\"><w:p>{run('separator')}</w:p></w:footnote>"
                   f"{note.format('footnote', 8, run('deleted note'))}{note.format('footnote', 9, run('low note'))}</w:footnotes>"),
        endnotes=("endnotes.xml", f"<w:endnotes {W}>{note.format('endnote', 3, run('end note'))}</w:endnotes>"))
    assert convert(".docx", data)[0] == (
        "the rent is low[^1][^2]\n\n[^1]: end note more\n\n[^2]: low note more\n\n## Comments\n\n"
        "> Comment by Ann on “the rent”: ask finance again\n")


# ---- PowerPoint

def test_pptx():
    deck = pptx.Presentation()
    opening = deck.slides.add_slide(deck.slide_layouts[0])
    opening.shapes.title.text = "Open night"
    opening.placeholders[1].text = "17 May"
    opening.notes_slide.notes_text_frame.text = "Welcome all.\nThen the lamp."
    last = deck.slides.add_slide(deck.slide_layouts[1])
    last.shapes.title.text = "Last\vwords"
    frame = last.placeholders[1].text_frame
    frame.text = "Saturn"
    deeper = frame.add_paragraph()
    deeper.text, deeper.level = "its rings", 1
    spoken = frame.add_paragraph().add_run()
    spoken.text, spoken.hyperlink.address = "the map", "https://example.org/map"
    second = deck.slides.add_slide(deck.slide_layouts[6])
    table = second.shapes.add_table(2, 2, 0, 0, 999999, 999999).table
    for cell, text in zip(table.iter_cells(), ("Group", "Price", "School|class", "free"), strict=True):
        cell.text = text
    box = second.shapes.add_group_shape().shapes.add_textbox(0, 0, 99999, 99999)
    box.text_frame.text = "in a group\n# shout"
    order = deck.slides._sldIdLst
    order.append(order[1])                                          # the order of the list, not of the file names
    data = with_related(saved(deck), "ppt/slides/slide1.xml", comments=("comment1.xml", (
        f'<p:cmLst {P}><p:cm authorId="0"><p:text>too early?</p:text></p:cm></p:cmLst>')))
    data = with_related(data, "ppt/presentation.xml", commentAuthors=("commentAuthors.xml", (
        f'<p:cmAuthorLst {P}><p:cmAuthor id="0" name="Ann"/></p:cmAuthorLst>')))
    assert convert(".pptx", data) == (
        "## Slide 1: Open night\n\n17 May\n\nNotes: Welcome all.\nThen the lamp.\n\n> Comment by Ann: too early?\n\n"
        "## Slide 2\n\n| Group | Price |\n| --- | --- |\n| School\\|class | free |\n\nin a group\n\n\\# shout\n\n"
        "## Slide 3: Last words\n\n- Saturn\n    - its rings\n- [the map](https://example.org/map)\n", "Open night", [])
    deck.core_properties.title = "Saturn week"
    assert convert(".pptx", saved(deck))[1] == "Saturn week"


# ---- Excel

def test_xlsx():
    book = openpyxl.Workbook()
    plan = book.active
    plan.title = "Plan"
    plan["A1"] = "PROGRESS"
    plan.merge_cells("A1:D1")
    for row, cells in [(3, ["Task", None, "Owner", "State"]), (4, ["Design", None, "Ana", "Done | closed"]),
                       (6, ["Build", None, "Ben\nEva"])]:
        for column, value in enumerate(cells, 1):
            plan.cell(row, column, value)
    plan["A1048576"] = "bottomcell"
    plan["C3"].comment = Comment("who  pays?", "Ann")
    values = book.create_sheet("Values")
    for column, (head, value, shape) in enumerate([
        ("int", 1650, None), ("float", 0.1 + 0.2, None), ("big", 1e21, None), ("yes", True, None), ("error", "#DIV/0!", None),
        ("formula", "=SUM(A1:B1)", None), ("date", datetime.date(2026, 3, 31), None),
        ("moment", datetime.datetime(2026, 3, 31, 14, 30, 5), None), ("midnight", datetime.datetime(2026, 3, 31), None),
        ("time", datetime.time(7, 5), None), ("span", datetime.timedelta(hours=30), "[h]:mm"),
        ("german", datetime.date(1999, 12, 1), 'd". Tag im "mmmm yyyy'), ("month", datetime.date(2020, 2, 1), "mmm"),
        ("quoted", 46112, '0 "days"'), ("red", 46112, "[Red]#,##0;General"), ("early", 1, "yyyy-mm-dd"), ("negative", -5, "yyyy-mm-dd"),
    ], 1):
        values.cell(1, column, head)
        cell = values.cell(2, column, value)
        if shape:
            cell.number_format = shape
    book.create_sheet("Empty")
    hidden = book.create_sheet("Hidden")
    hidden.sheet_state = "hidden"
    hidden["B2"] = "secret"
    book.properties.title = "Plan of the year"
    mirror, title, codes = convert(".xlsx", saved(book))
    assert (title, codes) == ("Plan of the year", [])
    assert mirror == (
        "## Plan\n\nPROGRESS\n\n| Task | Owner | State |\n| --- | --- | --- |\n| Design | Ana | Done \\| closed |\n"
        "| Build | Ben<br>Eva |  |\n| bottomcell |  |  |\n\n> Comment by Ann on “C3”: who pays?\n\n"
        "## Values\n\n| int | float | big | yes | error | formula | date | moment | midnight | time | span | german | month | quoted | red"
        " | early | negative |\n|" + " --- |" * 17 + "\n"
        "| 1650 | 0.3 | 1e+21 | TRUE | #DIV/0! | =SUM(A1:B1) | 2026-03-31 | 2026-03-31 14:30:05 | 2026-03-31 | 07:05:00 | 30:00:00"
        " | 1999-12-01 | 2020-02-01 | 46112 | 46112 | 1900-01-01 | -5 |\n\n## Empty\n\n## Hidden\n\nsecret\n")


def test_xlsx_other_calendar_and_raw_cells():
    book = openpyxl.Workbook()
    book.epoch = openpyxl.utils.datetime.CALENDAR_MAC_1904
    book.active["A1"] = datetime.date(2026, 3, 31)
    assert "2026-03-31" in convert(".xlsx", saved(book))[0]

    rows = """<row><c t="s"><v>0</v></c><c t="s"><v>1</v></c><c t="s"><v>99</v></c></row>
        <row><c t="str"><f>A1</f><v>cached</v></c><c><f>40+2</f><v>42</v></c><c t="b"><v>0</v></c><c t="e"><v>#REF!</v></c></row>
        <row><c t="inlineStr"><is><r><t>in</t></r><r><t>line</t></r></is></c><c><v>junk</v></c><c s="99"><v>7</v></c></row>"""
    strings = """<si><t>plain_x000D_</t></si><si><r><t>ri</t></r><r><t>ch</t></r><rPh sb="0" eb="1"><t>guide</t></rPh></si>"""
    assert convert(".xlsx", workbook(rows, strings))[0] == (
        "## Sheet\n\n| plain | rich |  |  |\n| --- | --- | --- | --- |\n| cached | 42 | FALSE | #REF! |\n| inline | junk | 7 |  |\n")


# ---- EPUB and mail

def book(**changed):
    parts = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
                                  '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>',
        "OEBPS/book.opf": '<package xmlns="http://www.idpf.org/2007/opf" xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata>'
                          '<dc:title>Tides &amp; Moons</dc:title></metadata><manifest><item id="a" href="text/one%20a.xhtml"/>'
                          '<item id="b" href="two.xhtml"/><item id="z" href="gone.xhtml"/></manifest>'
                          '<spine><itemref idref="b"/><itemref idref="a"/><itemref idref="b"/><itemref idref="z"/></spine></package>',
        "OEBPS/text/one a.xhtml": '<?xml version="1.0"?><html><head><title/><script src="x"/></head><body><h1>Ebb</h1>'
                                  '<a href="two.xhtml">back</a> <a href="https://example.org">out</a></body></html>',
        "OEBPS/two.xhtml": "<html><body><h1>Flood</h1><p>high&nbsp;water</p></body></html>",
    }
    return zipped(parts | changed)


def test_epub():
    assert convert(".epub", book()) == (
        "# Flood\n\nhigh\u00a0water\n\n# Ebb\n\nback [out](https://example.org)\n", "Tides & Moons", ["PART_MISSING"])
    locked = '<encryption xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><CipherReference URI="OEBPS/two.xhtml"/></encryption>'
    assert code_of(".epub", book(**{"META-INF/encryption.xml": locked})) == "ENCRYPTED"
    assert convert(".epub", book(**{"META-INF/encryption.xml": locked.replace("two.xhtml", "font.otf")}))[1] == "Tides & Moons"
    assert code_of(".epub", zipped({"a.txt": "x"})) == "CORRUPT"


def mail(subject="Offer for the mirror – 500 mm"):
    message = EmailMessage()
    message["From"] = "Lumen <orders@lumen.example>"
    message["To"] = "Tobias Wren <tobias@kestrel.example>"
    message["Date"] = "Mon, 10 Feb 2025 09:15:00 +0100"
    message["Subject"] = subject
    return message


HEADS = ("From: Lumen <orders@lumen.example>\nTo: Tobias Wren <tobias@kestrel.example>\nDate: Mon, 10 Feb 2025 09:15:00 +0100\n"
         "Subject: Offer for the mirror – 500 mm\n\n")


def test_eml():
    title = "Offer for the mirror – 500 mm"
    plain = mail()
    plain.set_content("Dear Mr Wren,\n\n  890 €.\n", charset="iso-8859-15")
    assert convert(".eml", plain.as_bytes()) == (HEADS + "Dear Mr Wren,\n\n  890 €.\n", title, [])

    both = mail()
    both.set_content("plain words")
    both.add_alternative("<p>html <b>words</b></p>", subtype="html")
    both.add_attachment(b"%PDF", maintype="application", subtype="pdf", filename="offer ü.pdf")
    both.add_attachment("notes", filename="notes.txt")
    assert convert(".eml", both.as_bytes()) == (HEADS + "plain words\n\nAttachments: offer ü.pdf, notes.txt\n", title, [])

    html = mail()
    html.set_content("<h1>Hi</h1><a href='https://example.org'>x</a><img alt=logo src=cid:1>", subtype="html")
    html.add_related(b"GIF", maintype="image", subtype="gif", cid="<1>")
    assert convert(".eml", html.as_bytes())[0] == HEADS + "# Hi\n\n[x](https://example.org)logo\n"

    forward = mail("Fwd")
    forward.set_content("see below")
    forward.add_attachment(plain)
    assert convert(".eml", forward.as_bytes())[0] == (
        HEADS.replace(title, "Fwd") + "see below\n\n" + HEADS + "Dear Mr Wren,\n\n  890 €.\n")

    for raw, mirror in [
        (b"Subject: =?utf-8?q?caf=C3=A9?= =?iso-8859-1?b?6Q==?=\r\n\r\nx", "Subject: caféé\n\nx\n"),
        ("Subject: Grüße\n\nx".encode(), "Subject: Grüße\n\nx\n"),
        (b"Subject: Gr\xfc\xdfe\n\nx", "Subject: Grüße\n\nx\n"),
        (b"Subject: =?iso-2022-jp?b?" + base64.b64encode("潮位計".encode("iso-2022-jp")) + b"?=\n\nx", "Subject: 潮位計\n\nx\n"),
        (b"Subject: a\n b\n\nx", "Subject: a b\n\nx\n"),
        (b"Subject: =?utf-8?b?!?= =?none?q?x?=\n\nx", None),
        (b"Subject: a\nContent-Type: text/plain; charset=iso-2022-jp\n\n" + "潮位計".encode("iso-2022-jp"), "Subject: a\n\n潮位計\n"),
        (b"Subject: a\nContent-Type: text/plain; charset=\"\"\nContent-Transfer-Encoding: base64\n\n!!!", None),
    ]:
        assert convert(".eml", raw)[0] == mirror or mirror is None, raw
    for other in (b"", b"just words\nand more", b"<html>x</html>", b"\x89PNG\r\n\x1a\n\0"):
        assert code_of(".eml", other) == "CORRUPT", other


# ---- PDF

def pdf(*pages, title="", **options):
    "A PDF of pages of lines; None is a page with a drawing only."
    out = io.BytesIO()
    canvas = Canvas(out, **options)
    canvas.setTitle(title)
    for lines in pages:
        for n, line in enumerate(lines or ()):
            canvas.drawString(72, 720 - 20 * n, line)
        canvas.rect(72, 72, 99, 99)
        canvas.showPage()
    canvas.save()
    return out.getvalue()


def test_pdf():
    assert convert(".pdf", pdf(["Seeing report", "# 118 nights"], title="Seeing 2024")) == (
        "Seeing report\n\\# 118 nights\n", "Seeing 2024", [])
    two = pdf(["one"], ["two"], title="Microsoft Word - report.docx")
    assert convert(".pdf", two) == ("## Page 1\n\none\n\n## Page 2\n\ntwo\n", "", [])
    assert convert(".pdf", pdf(None, None)) == ("", "", ["NO_TEXT_LAYER"])
    mirror, _, codes = convert(".pdf", pdf(["alpha"], None))
    assert codes == ["PARTIAL_TEXT_LAYER"] and mirror == "## Page 1\n\nalpha\n\n## Page 2\n\n(page 2 has no text layer)\n"
    warnings = []
    gno.CONVERTERS[".pdf"](pdf(None, None), warnings)
    gno.CONVERTERS[".pdf"](pdf(["a"], None), warnings)
    gno.CONVERTERS[".pdf"](pdf(["a"], None, None), warnings)
    assert [text for _, text in warnings] == ["no text layer (2 pages); scanned pages need OCR", "page 2 has no text layer",
                                              "pages 2, 3 have no text layer"]


def test_pdf_errors(monkeypatch):
    whole = pdf(["text"])
    for data, code in [
        (pdf(["secret"], encrypt=StandardEncryption("letmein", canPrint=0)), "ENCRYPTED"),
        (b"", "CORRUPT"), (b"<html>a page</html>", "CORRUPT"), (whole[:200], "CORRUPT"), (whole[:len(whole) * 2 // 3], "CORRUPT"),
        (b"%PDF-1.7\nnothing\n%%EOF", "CORRUPT"),
    ]:
        assert code_of(".pdf", data) == code, data[:30]
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    with pytest.raises(gno.GnoError) as caught:
        convert(".pdf", whole)
    assert (caught.value.code, caught.value.hint) == ("MISSING_PACKAGE", "pip install pypdfium2")


def test_pdf_from_several_threads(capfd):
    found, files = [], [pdf([f"file {n}"] * 30, [f"end {n}"]) for n in range(4)]
    def work(n):
        for _ in range(5):
            found.append((n, convert(".pdf", files[n])[0].count(f"file {n}")))
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted((n, 30) for n in range(4) for _ in range(5))
    assert capfd.readouterr() == ("", "")


# ---- damage and malice

def document_xml(inside, prolog=""):
    return f"{prolog}<w:document {W}><w:body>{inside}</w:body></w:document>"


def minimal(document, **more):
    main = '<Relationships><Relationship Id="r1" Type="x/officeDocument" Target="word/document.xml"/></Relationships>'
    return zipped({"_rels/.rels": main, "word/document.xml": document, **more})


def test_bombs_and_other_malice():
    word = f"<w:p>{run('word')}</w:p>"
    assert convert(".docx", minimal(document_xml(word)))[0] == "word\n"
    external = '<!DOCTYPE d [<!ENTITY x SYSTEM "file:///secret">]>'
    entities = '<!DOCTYPE d [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;">]>'
    overlapping = "".join(f'<Relationship Id="r{n}" Type="x/slide" Target="s.xml?{n}"/>' for n in range(9))
    for ext, data, code in [
        (".docx", minimal(document_xml(f"<w:p>{run('A' * (40 << 20))}</w:p>")), "TOO_LARGE"),           # 1000 : 1
        (".docx", zipped({"a.xml": b"\0" * (60 << 20)}), "TOO_LARGE"),
        (".docx", minimal(document_xml(f"<w:p>{run('&b;')}</w:p>", entities)), "TOO_LARGE"),
        (".docx", minimal(document_xml(word, '<!DOCTYPE d SYSTEM "file:///secret">')), ""),
        (".docx", minimal(document_xml(f"<w:p>{run('&x;')}</w:p>", external)), "TOO_LARGE"),
        (".docx", minimal(document_xml("<w:sdt>" * 5000 + word + "</w:sdt>" * 5000)), "TOO_LARGE"),
        (".docx", minimal(document_xml("<w:p>")), "CORRUPT"),
        (".docx", minimal(document_xml(word, '<?xml version="1.0" encoding="klingon"?>')), "CORRUPT"),
        (".docx", minimal(b"\xff\xfe" + document_xml(word).encode("utf-16-le")), ""),
        (".docx", minimal(b""), "CORRUPT"),
        (".docx", zipped({"_rels/.rels": overlapping}), "CORRUPT"),
        (".docx", zipped({}), "CORRUPT"),
        (".docx", minimal(document_xml(f'<w:p><w:pPr><w:numPr><w:ilvl w:val="{"9" * 5000}"/></w:numPr></w:pPr>{run("x")}</w:p>')), ""),
        (".xlsx", saved(docx.Document()), "CORRUPT"),
        (".docx", saved(openpyxl.Workbook()), "CORRUPT"),
        (".pptx", saved(docx.Document()), "CORRUPT"),
        (".epub", saved(docx.Document()), "CORRUPT"),
        (".docx", b"", "CORRUPT"), (".docx", b"plain text", "CORRUPT"), (".xlsx", pdf(["x"]), "CORRUPT"),
        (".pdf", minimal("<x/>"), "CORRUPT"),
    ]:
        assert code_of(ext, data) == code, (ext, data[:80], code)
    for ext in (".docx", ".xlsx", ".pptx"):
        assert code_of(ext, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600) == "ENCRYPTED"


def test_a_zip_with_a_password_is_encrypted():
    data = bytearray(minimal(document_xml("")))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):          # the flag stands in both headers
        at = data.find(signature)
        while at >= 0:
            data[at + offset] |= 1
            at = data.find(signature, at + 1)
    assert code_of(".docx", bytes(data)) == "ENCRYPTED"


def workbook(rows, strings):
    "A workbook whose only sheet has those <row> elements, with shared strings."
    parts = parts_of(saved(openpyxl.Workbook()))
    parts["xl/worksheets/sheet1.xml"] = f"<worksheet {S}><sheetData>{rows}</sheetData></worksheet>"
    parts["xl/sharedStrings.xml"] = shared = f"<sst {S}>{strings}</sst>"
    if b"sharedStrings" in parts["xl/_rels/workbook.xml.rels"]:
        return zipped(parts)
    return with_related(zipped(parts), "xl/workbook.xml", sharedStrings=("sharedStrings.xml", shared))


def test_one_long_text_shown_many_times_is_too_large():
    assert code_of(".xlsx", workbook('<row><c t="s"><v>0</v></c></row>' * 9000, f"<si><t>{'x y z ' * 2000}</t></si>")) == "TOO_LARGE"


def test_shared_strings_take_linear_time():
    rows = "".join(f'<row><c t="s"><v>{n}</v></c><c><v>{n}</v></c></row>' for n in range(40_000))
    started = time.perf_counter()
    mirror = convert(".xlsx", workbook(rows, "".join(f"<si><t>s{n}</t></si>" for n in range(40_000))))[0]
    assert "| s39999 | 39999 |" in mirror and time.perf_counter() - started < 8


def test_hostile_text_files_end_soon():
    started = time.perf_counter()
    for ext, data in [
        (".toml", "a." * 100_000 + "a = 1"), (".toml", "a = " + "[" * 50_000), (".yaml", "{a: " * 10_000), (".yaml", "- " * 40_000),
        (".json", "[" * 900 + "1," * 100_000 + "1" + "]" * 900), (".csv", '"' * 100_001), (".csv", "," * 100_000),
        (".eml", b"Subject: " + b"=?utf-8?q?a?= " * 50_000 + b"\n\nx"),
        (".eml", b"Subject: a\n" + b"".join(b"Content-Type: multipart/mixed; boundary=b%d\n\n--b%d\n" % (n, n) for n in range(2000))),
        (".eml", b"Subject: a\n" + b"Content-Type: message/rfc822\n\n" * 2000),
    ]:
        assert code_of(ext, data) in ("", "CORRUPT", "TOO_LARGE"), ext
    assert time.perf_counter() - started < 8


def samples():
    "One small real file for each of the formats that can be damaged."
    deck, sheet = pptx.Presentation(), openpyxl.Workbook()
    deck.slides.add_slide(deck.slide_layouts[0]).shapes.title.text = "Title"
    sheet.active["A1"] = "word"
    letter = mail()
    letter.set_content("plain")
    letter.add_alternative("<p>html</p>", subtype="html")
    return {".docx": minimal(document_xml(f"<w:p>{run('word')}</w:p>")), ".pptx": saved(deck), ".xlsx": saved(sheet), ".epub": book(),
            ".eml": letter.as_bytes(), ".pdf": pdf(["one"], ["two"]), ".ipynb": notebook({"cell_type": "code", "source": "x"}).encode(),
            ".html": b"<table><tr><td>a<td>&eacute;</table><pre>x</pre><!-- c --><a href='u'>l</a>", ".csv": b'a;"b\nc"\n1;2\n'}


def test_truncated_files():
    for ext, data in samples().items():
        for size in range(0, len(data), 50):
            code = code_of(ext, data[:size])
            assert code in ("", "CORRUPT", "BINARY"), (ext, size, code)
            assert code == "CORRUPT" or ext not in (".docx", ".pptx", ".xlsx", ".epub", ".ipynb"), (ext, size)


SAMPLES = samples()


@given(st.sampled_from(sorted(SAMPLES)), st.data())
@settings(max_examples=300, deadline=None)
def test_flipped_bits(ext, data):
    changed = bytearray(SAMPLES[ext])
    for at in data.draw(st.lists(st.integers(0, 8 * len(changed) - 1), min_size=1, max_size=5)):
        changed[at // 8] ^= 1 << at % 8
    assert code_of(ext, bytes(changed)) in {"", *gno.ERRORS}


@given(st.sampled_from(sorted(SAMPLES)), st.sampled_from(sorted(gno.CONVERTERS)))
@settings(max_examples=100, deadline=None)
def test_a_file_under_another_extension(ext, other):
    assert code_of(other, SAMPLES[ext]) in {"", *gno.ERRORS}


MARKUP = st.lists(st.sampled_from([
    b"<", b">", b"&", b"\"", b"'", b"/", b"!--", b"table", b"<td>", b"<li>", b"</ul>", b"<a href=x>", b"{", b"[", b"]", b"}", b":", b",",
    b"- ", b"\n", b"Subject: ", b"=?utf-8?q?", b"?=", b"\x1b[", b"\xe9", b"\xc3\xa9", b"\0", b"|", b"#", b"PK\x03\x04", b"%PDF-1.4",
    b"%%EOF", b"Content-Type: multipart/alternative; boundary=x\n\n--x\n"]), max_size=30).map(b"".join)


@given(st.sampled_from(sorted(gno.CONVERTERS)), st.binary(max_size=200) | MARKUP)
@settings(max_examples=500, deadline=None)
def test_any_bytes_give_text_or_an_error(ext, data):
    try:
        markdown, title = gno.CONVERTERS[ext](data, [])
    except gno.GnoError as error:
        assert error.code in ("BINARY", "CORRUPT", "ENCRYPTED", "TOO_LARGE")
    else:
        assert isinstance(markdown, str) and isinstance(title, str) and "\n" not in title
        assert gno.canonical(gno.canonical(markdown)) == gno.canonical(markdown)
