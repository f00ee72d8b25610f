"""The walk: globs, what is wanted, ignore files (git itself is the judge), links and other odd things on disk."""
import os
import re
import shutil
import subprocess
import time
import unicodedata

import pytest
from conftest import write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gno

KNOWN = frozenset({".md", ".txt", ".py", ".js", ".ts", ".docx", ".json", ".yaml"})


def matcher(*arguments, **options):
    return gno.Matcher(*arguments, **{"extensions": KNOWN} | options)


def taken(root, m=None, **options):
    "Paths of the files that the walk yields."
    return [found.path for found in gno.walk(str(root), m or matcher(), **options) if isinstance(found, gno.Source)]


def paths(text):
    "Paths of a table, divided by blanks; `+` stands for a blank in a name."
    return [path.replace("+", " ") for path in text.split()]


def skipped(root, m=None, **options):
    "{path: code} of what it skips."
    return {found.path: found.code for found in gno.walk(str(root), m or matcher(), **options) if isinstance(found, gno.Skip)}


# ---- globs

@pytest.mark.parametrize("pattern, yes, no", [
    ("**/*", "a.md s/b.md s/t/c", ""),
    ("**", "a.md s/b.md .h/x", ""),
    ("*.md", "a.md .x.md", "s/a.md a.txt a.md.bak"),
    ("**/*.md", "a.md s/b.md s/t/c.md", "a.mdx amd"),
    ("**/*.MD", "a.md up/D.MD up/D.Md", "up/MD"),
    ("**/*.md", "D.MD", ""),
    ("README.md", "README.md README.MD", "readme.md"),              # only the extension's case is free
    ("./**/*.md", "a.md s/b.md", ""),
    ("/s/*.md", "s/b.md", "b.md s/t/b.md"),
    ("s/./b.md", "s/b.md", "b.md"),
    ("s/", "s/b.md s/t/c.txt", "s t/s/b.md sb.md"),
    ("s", "s", "s/b.md"),                                           # in a pattern, a folder is spelt `s/`
    ("s/**", "s/b.md s/t/c.txt", "s xs/b.md"),
    ("s/**/c.md", "s/c.md s/t/c.md s/t/u/c.md", "c.md s/xc.md"),
    ("a/**/b/**/c", "a/b/c a/x/b/y/c a/b/b/c", "a/c b/c a/bc"),
    ("a/**/b/c/**/d", "a/b/b/c/d a/b/c/b/c/x/d", "a/b/c a/b/d"),
    ("a?.md", "ab.md aé.md", "a.md a/.md abc.md"),
    ("[a-c]*.md", "apple.md c.md", "d.md"),
    ("[!a-c].md", "d.md", "a.md /.md"),
    ("[^a].md", "b.md", "a.md"),
    ("[*].md", "*.md", "a.md"),
    ("[]a].md", "].md a.md", "b.md"),
    ("a[,]b.md", "a,b.md", "ab.md"),
    ("a+(b).md", "a+(b).md", "aab.md"),                             # nothing else is special
    ("a.md,*.txt", "a.md d.txt", "s/b.md s/c.txt"),
    ("a.md, *.txt,", "a.md d.txt", "s/b.md"),
    ("{a.md,*.txt}", "a.md d.txt", "s/b.md"),
    ("{a,b}/**", "a/x b/y/z", "c/x ab/x"),
    ("{a,{b,c}d}/x{,.y}.md", "a/x.md bd/x.y.md cd/x.md", "b/x.md"),
    ("{s/b,t}.md", "s/b.md t.md", "s/t.md"),
    (".md", "a.md s/b.MD", "a.txt"),                                # a known extension
    ("md,txt", "a.md s/b.txt", "a.py md"),
    (".xyz", ".xyz", "a.xyz"),                                      # an unknown one is a name
    ("a**b.md", "axxb.md ab.md", "a/b.md"),
    ("*a*a*b.md", "aab.md xaxaxb.md", "ab.md"),
    ("caf\u00e9.md", "caf\u00e9.md", "cafe.md"),
    ("cafe\u0301.md", "caf\u00e9.md", "cafe.md"),                   # patterns are brought to NFC
    ("line\nbreak.md", "line\nbreak.md", ""),
])
def test_glob(pattern, yes, no):
    regex = gno.glob_regex(pattern, extensions=KNOWN)
    for path in yes.split(" "):
        assert not path or regex.match(path), path
    for path in no.split(" "):
        assert not path or not regex.match(path), path


@pytest.mark.parametrize("pattern, yes, no", [
    ("*.md", "a.md s/b.md", "a.txt"),
    ("s", "s s/b.md t/s/c.md t/s", "sb/c.md"),
    ("/s", "s s/b.md", "t/s/c.md"),
    ("./s", "s s/b.md", "t/s/c.md"),
    ("s/", "s/b.md t/s/c.md", "s t/s"),
    ("s/t", "s/t s/t/x.md", "x/s/t"),
    ("s/*", "s/b.md", "s/t/c.md t/s/b.md"),
    ("md", "a.md s/b.md", "md"),
    ("Smith, John.md", "Smith,+John.md s/Smith,+John.md", "John.md Smith"),
])
def test_glob_in_a_list(pattern, yes, no):
    regex = gno.glob_regex(pattern, listed=True, extensions=KNOWN)
    assert [path for path in paths(yes) if not regex.match(path)] == [] == [path for path in paths(no) if regex.match(path)]


@pytest.mark.parametrize("pattern", [
    "../x.md", "a/../b", "..", "[a.md", "a[", "{a,b", "a}", "{a,{b}", "a\0b", "C:/notes/*.md", "C:\\notes", "d:x", "a\\*.md", "", " ", ",",
    "[z-a].md", "[[:alpha:]].md", "!a.md", "{a,b}" * 12,
])
def test_a_malformed_glob_is_refused_and_named(pattern):
    for make in (gno.glob_regex, gno.Matcher, lambda p: gno.Matcher(include=[p]), lambda p: gno.Matcher(exclude=[p])):
        if pattern == "," and make not in (gno.glob_regex, gno.Matcher):
            continue                                                # a comma is a name there
        with pytest.raises(gno.GnoError) as error:
            make(pattern)
        assert error.value.code == "INVALID_INPUT" and error.value.hint and repr(pattern) in error.value.message


def test_hostile_globs_take_no_time(tmp_path):
    began = time.perf_counter()
    assert not gno.glob_regex("*a" * 40 + "b").match("a" * 250)
    assert not gno.glob_regex("**/a/" * 40 + "b").match("a/" * 200 + "c")
    assert gno.glob_regex("{a," * 60 + "b" + "}" * 60).match("b")
    write(tmp_path, {".git/HEAD": "", ".gitignore": "*a" * 40 + "b\n" + "/**/a" * 40 + "/b\n", "a" * 200 + ".md": ""})
    assert taken(tmp_path)
    assert time.perf_counter() - began < 2


NAMES = st.lists(st.text("ab.-é", min_size=1, max_size=4).filter(lambda name: name.strip(".") == name), min_size=1, max_size=4)


@given(NAMES, st.data())
def test_a_path_made_from_its_glob_matches(names, data):
    path = glob = unicodedata.normalize("NFC", "/".join(names))
    parts = [data.draw(st.sampled_from([name, "*", "**", name[0] + "*", "*" + name[-1], "{x," + name + "}", "?" * len(name)]))
             for name in path.split("/")]
    glob = "/".join(parts)
    assert gno.glob_regex(glob).match(path), glob
    if "**" not in parts:
        assert not gno.glob_regex(glob).match("z/" + path) and not gno.glob_regex(glob).match(path + "/z"), glob


# ---- what is wanted

@pytest.mark.parametrize("options, yes, no", [
    ({}, "a.md s/b.md d.txt up/D.MD", ".h/e.md s/.x.md a.bin Makefile LICENSE .md"),
    ({}, "a.js id.md key.txt builds/x.md mymap.txt notes.lock.md", "a.min.js a.min.JS x/package-lock.json pnpm-lock.yaml"),
    ({}, "n+(conflict).md ~x.md a.tmp.md", "e.md~ c.md.tmp .d.md.swp .#f.md ~$report.docx"),
    ({}, "git/x.md", ".git/x.md node_modules/p/README.md dist/a.md build/a.md s/__pycache__/a.py venv/a.py .obsidian/y.md"),
    ({"extensions": frozenset()}, "a.bin Makefile LICENSE", ".env .env.local x/id_rsa id_rsa.pub s/cert.pem cert.PEM x.key yarn.lock "
                                                            "thumbs.db.txt/.DS_Store Thumbs.db Thumbs.DB a.js.map"),
    ({"extensions": frozenset(), "exclude": ["!defaults"]}, "id_rsa s/cert.pem dist/a.md node_modules/a.md", ".env .git/config"),
    ({"exclude": ["s"]}, "a.md d.txt sb/x.md", "s/b.md s/c.txt t/s/b.md .git/x.md"),
    ({"exclude": ["s/**"]}, "a.md t/s/b.md", "s/b.md s/t/c.txt"),
    ({"exclude": ["/s"]}, "a.md t/s/b.md", "s/b.md"),
    ({"exclude": ["*.txt"]}, "a.md s/b.md", "d.txt s/c.txt s/C.TXT"),
    ({"exclude": ["*draft*", "[ab]-*.md"]}, "a.md x.md", "my+draft.md drafts/x.md a-x.md s/b-y.md"),
    ({"exclude": ["s/t"]}, "s/b.md t/x.md", "s/t/x.md s/t"),
    ({"exclude": ["s/"]}, "a.md s.md", "s/b.md x/s/b.md"),
    ({"exclude": ["Caf\u00e9*"]}, "a.md", "Cafe\u0301+x.md Caf\u00e9.md"),
    ({"exclude": [".txt"]}, "a.md txt/a.md", "d.txt s/c.txt"), ({"exclude": ["s"]}, "a.md d.txt", "s/c.txt s/b.md"),
    ({"exclude": ["/distant", "./xs.md"]}, "s.md s/xs.md", "distant/x.md xs.md dist/x.md"),
    ({"pattern": "*.md"}, "a.md", "d.txt s/b.md"),
    ({"pattern": "*.md", "include": ["docs"]}, "a.md docs/x.txt s/docs/y.md", "d.txt s/b.md"),
    ({"pattern": "*.md", "include": ["txt", "s/*.py"]}, "a.md s/c.txt s/x.py", "x.py s/t/x.py"),
    ({"pattern": "**/*.md", "include": ["**/*.bin"]}, "a.md", "a.bin"),                    # unsupported stays out
    ({"include": [".github/**"]}, "a.md .github/w/x.yaml", ".h/e.md .github/.x/a.md x/.github/a.md .git/x.md"),
    ({"include": [".notes"]}, "a.md .notes/x.md s/.notes/t/x.md", ".notes/.x/a.md .h/a.md"),
    ({"include": [".env"]}, "a.md", ".env"),                                              # the default exclude holds
    ({"pattern": ".h/*.md"}, ".h/e.md", ".h/.x.md a.md .g/e.md"),
    ({"pattern": "a.md,s/"}, "a.md s/b.md s/t/c.md", "d.txt s/.x.md"),
])
def test_wanted(options, yes, no):
    m = matcher(**options)
    for path in paths(yes):
        assert m.wants(path), path
        for folder in [path[:n] for n, char in enumerate(path) if char == "/"]:
            assert m.enters(folder), folder
    assert [path for path in paths(no) if m.wants(path)] == []


@pytest.mark.parametrize("options, yes, no", [
    ({}, "s s/t", ".git s/.h node_modules s/node_modules/p .h/t"),
    ({"pattern": "s/**/*.md"}, "s s/t", "t ss"),                    # folders that cannot hold a match are not read
    ({"pattern": "*.md"}, "", "s"),
    ({"pattern": "*.md", "include": ["a/b/*.txt"]}, "a a/b", "b a/c a/b/c"),
    ({"include": ["a/.h/x.md"]}, "a a/.h b", ".h b/.h"),
])
def test_folders_entered(options, yes, no):
    m = matcher(**options)
    assert [path for path in yes.split() if not m.enters(path)] == [] == [path for path in no.split() if m.enters(path)]
    assert m.enters("")


def test_walk_and_wants_agree(tmp_path):
    write(tmp_path, dict.fromkeys(("a.md", "s/b.md", "s/c.txt", "up/D.MD", ".h/e.md", "s/.x.md", "dist/a.md", "s/t/u/v.md", "a.min.js", "b.js", "Makefile", "e.md~"), "x"))
    files = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    for options in ({}, {"pattern": "*.md"}, {"pattern": "s/"}, {"exclude": ["s/t", "*.txt"]}, {"include": [".h/*"]}, {"extensions": frozenset()},
                    {"pattern": "**/*.{md,txt}"}, {"exclude": ["!defaults"]}):
        m = matcher(**options)
        assert taken(tmp_path, m) == sorted((path for path in files if m.wants(path)), key=os.fsencode), options


# ---- the walk itself

def test_order_is_the_byte_order_of_whole_paths(tmp_path):
    names = ["a-b.md", "a.md", "a/x.md", "a/b/y.md", "a b.md", "B.md", "a/é.md", "z/\U0001f600.md", "z/\uff5e.md", "é/1.md"]
    write(tmp_path, dict.fromkeys(names, ""))
    found = taken(tmp_path)
    assert found == sorted(names, key=str.encode) == taken(tmp_path)


def test_a_source_is_what_stat_says(tmp_path):
    write(tmp_path, {"s/b.md": "hello"})
    info = (tmp_path / "s/b.md").stat()
    assert list(gno.walk(tmp_path, matcher())) == [gno.Source("s/b.md", 5, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)]


def test_names_stay_as_on_disk(tmp_path):
    name = unicodedata.normalize("NFD", "Résumé/naïve.md")
    write(tmp_path, {name: "x"})
    assert taken(tmp_path) == [name] and taken(tmp_path, matcher(unicodedata.normalize("NFC", "Résumé/*ï*.md"))) == [name]


def test_links_are_never_followed(tmp_path):
    write(tmp_path / "out", {"hidden.md": "secret"})
    root = write(tmp_path / "root", {"a/real.md": "", "x/one.md": "", "z/two.md": ""})
    for target, link in [("..", "a/up"), ("../z", "x/y"), ("../x", "z/w"), ("nowhere", "dead"), ("self.md", "self.md"), (".", "loop"),
                         ("a/real.md", "alias.md"), ("../out", "secret"), ("../out", "n2"), ("../out/hidden.md", "leak.md"),
                         ("../rootless", "beside"), ("a/real.md", "alias.bin"), ("../out", ".hidden"), ("../out", "build")]:
        (root / link).symlink_to(target)
    write(tmp_path / "rootless", {"x.md": ""})
    found = {skip.path: skip for skip in gno.walk(root, matcher()) if isinstance(skip, gno.Skip)}
    assert taken(root) == ["a/real.md", "x/one.md", "z/two.md"]
    assert {skip.code for skip in found.values()} == {"SYMLINK"}
    for word, links in [("within", "a/up x/y z/w loop alias.md"), ("nowhere", "dead self.md"), ("out of", "secret n2 leak.md beside")]:
        for link in links.split():
            assert word in found.pop(link).message, link
    assert not found                                                # links to what nobody wants are not worth a word
    (tmp_path / "entry").symlink_to(root)
    assert taken(tmp_path / "entry") == taken(root)                 # the root itself may be a link


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")
def test_odd_files_are_named_and_never_opened(tmp_path):
    write(tmp_path, {"doc.md": "local", ".doc2.md.icloud": b"bplist00", "big.md": "x" * 3000, "empty.md": ""})
    os.mkfifo(tmp_path / "pipe.md")
    os.mkfifo(tmp_path / "pipe.sock")
    os.mkfifo(tmp_path / ".gitignore")                              # opening it would block for ever
    (tmp_path / ".git").mkdir()
    with open(tmp_path / "evicted.md", "wb") as file:
        file.truncate(1 << 20)
    with open(tmp_path / "small-sparse.md", "wb") as file:
        file.truncate(4096)                                         # may be a file kept in its inode
    assert skipped(tmp_path, max_bytes=2000) == {"pipe.md": "SPECIAL", "evicted.md": "TOO_LARGE", "big.md": "TOO_LARGE",
                                                 "small-sparse.md": "TOO_LARGE"}
    assert skipped(tmp_path) == {"pipe.md": "SPECIAL", "evicted.md": "PLACEHOLDER"}
    assert taken(tmp_path) == ["big.md", "doc.md", "empty.md", "small-sparse.md"]


@pytest.mark.skipif(os.name == "nt" or os.uname().sysname == "Darwin", reason="the file system takes only UTF-8 names")
def test_names_that_are_not_utf8(tmp_path):
    for name in (b"bad\xff.md", b"d\xe9/x.md", b"bad\xff.bin"):
        path = os.path.join(os.fsencode(tmp_path), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "wb").close()
    assert skipped(tmp_path) == {"bad\\xff.md": "BAD_NAME", "d\\xe9": "BAD_NAME"}    # readable, and safe to send as JSON
    assert taken(tmp_path) == []


def test_a_root_that_is_not_there(tmp_path):
    write(tmp_path, {"file.md": ""})
    for root in (tmp_path / "none", tmp_path / "file.md"):
        with pytest.raises(gno.GnoError) as error:
            list(gno.walk(root, matcher()))
        assert error.value.code == "PATH_NOT_FOUND" and str(root) in error.value.message and error.value.hint


def test_what_cannot_be_read_is_skipped_what_vanished_is_not(tmp_path, monkeypatch):
    write(tmp_path, {"a.md": "", "locked/x.md": "", "gone/x.md": "", "z.md": ""})
    scandir = os.scandir

    def deny(path):
        if str(path).rstrip("/").endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        if str(path).rstrip("/").endswith("gone"):
            shutil.rmtree(path)
        return scandir(path)
    monkeypatch.setattr(os, "scandir", deny)
    found = []
    for item in gno.walk(tmp_path, matcher()):
        found.append((item.path, getattr(item, "code", None)))
        if item.path == "a.md":
            (tmp_path / "z.md").unlink()                            # between the listing and the look at it
    assert found == [("a.md", None), ("locked", "PERMISSION")]
    monkeypatch.setattr(os, "scandir", lambda path: deny(str(path) + "locked"))
    with pytest.raises(gno.GnoError, match="Permission denied"):
        list(gno.walk(tmp_path, matcher()))


# ---- ignore files

def test_gitignore_in_a_repository(tmp_path):
    write(tmp_path, {".gitignore": "dist/\n*.log\n!keep.log\n/root-only.md\n", "ok.md": "", "root-only.md": "", "a.log": "", "keep.log": "",
                     "web/.gitignore": ".output\nsecret-*.md\n", "web/.output/junk.md": "", "web/root-only.md": "", "web/secret-1.md": ""})
    m = matcher(extensions=KNOWN | {".log"})
    everything = ["a.log", "keep.log", "ok.md", "root-only.md", "web/root-only.md", "web/secret-1.md"]
    assert taken(tmp_path, m) == everything                         # no work tree: an ignore file is only a file
    write(tmp_path, {".git/info/exclude": "ok.md\n"})
    assert taken(tmp_path, m) == ["keep.log", "web/root-only.md"]
    assert taken(tmp_path, m, gitignore=False) == everything
    assert taken(tmp_path / "web", m) == ["root-only.md"]           # rules of the folders above apply
    write(tmp_path, {"web/.gitignore": "!secret-1.md\n!*.log\n", ".gitignore": "*.log\nsecret-*\n", "web/x.log": ""})
    assert taken(tmp_path / "web", m) == ["root-only.md", "secret-1.md", "x.log"]       # and the nearest wins


def test_a_root_that_git_ignores_was_chosen_nevertheless(tmp_path):
    write(tmp_path, {".git/HEAD": "", ".gitignore": "*\n!/work\n", "home/notes/a.md": "", "home/notes/.gitignore": "b.md\n", "home/notes/b.md": ""})
    assert taken(tmp_path) == []
    assert taken(tmp_path / "home" / "notes") == ["a.md"]           # its own ignore file still holds


def test_work_trees_below_the_root_have_rules_of_their_own(tmp_path):
    write(tmp_path, {".gitignore": "a.md\n", "one/.git/info/exclude": "x.md\n", "one/.gitignore": "b.md\n", "one/a.md": "", "one/b.md": "",
                     "one/x.md": "", "two/b.md": "", "a.md": "", "one/sub/.git": "gitdir: ../.git/modules/sub\n",
                     "one/.git/modules/sub/info/exclude": "c.md\n", "one/sub/b.md": "", "one/sub/c.md": "",
                     "tree/.git": "gitdir: ../one/.git/worktrees/tree\n", "one/.git/worktrees/tree/commondir": "../..\n",
                     "tree/x.md": "", "tree/y.md": ""})
    assert taken(tmp_path) == ["a.md", "one/a.md", "one/sub/b.md", "tree/y.md", "two/b.md"]


def test_ignore_files_below_decomposed_names_and_unreadable_ones(tmp_path, monkeypatch):
    name = unicodedata.normalize("NFD", "Übungen/é")
    write(tmp_path, {".git/HEAD": "", name + "/.gitignore": "a.md\n/t/é.md\n", name + "/a.md": "", name + "/b.md": "", name + "/t/é.md": ""})
    assert taken(tmp_path) == [name + "/b.md"]
    assert taken(tmp_path / name) == ["b.md"]
    write(tmp_path / "linked", {"c.md": ""})
    (tmp_path / "linked" / ".gitignore").symlink_to("../" + name + "/.gitignore")
    (tmp_path / "linked" / "a.md").touch()
    assert taken(tmp_path / "linked") == ["a.md", "c.md"]           # git reads no ignore file through a link

    def deny(file, *arguments, **options):
        raise PermissionError(13, "Permission denied", file)
    monkeypatch.setattr("builtins.open", deny)
    assert taken(tmp_path / name) == ["a.md", "b.md", "t/é.md"]     # as git does after a warning


def test_gitignore_forms_that_git_leaves_open(tmp_path):
    write(tmp_path, {".git/HEAD": "", ".gitignore": "caf?.md\n[[:alpha:]].md\n[z-a].md\nx\\\n", "café.md": "", "a.md": "", "x": "", "y.md": ""})
    assert taken(tmp_path) == ["a.md", "y.md"]                      # ? is a character, not a byte; classes are not understood


class Git:
    "One repository with many files, whose ignore files are written anew for each example."
    FOLDERS = ["", "a", "foo", "b/foo"]

    def __init__(self, root):
        self.root = root
        self.env = {"PATH": os.environ["PATH"], "HOME": str(root), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
        subprocess.run(["git", "init", "-q", str(root)], env=self.env, check=True)
        names = ["a", "b", "a.md", "b.log", "foo", "ba r", "x]", "#h", "!n", "a*b", "ends ", "abc.md"]
        self.files = [folder + name for n, folder in enumerate(["", "a/", "a/b/", "foo/", "b/foo/", "b/foo/a/", "b/a/d.x/", "d.x/a/foo/"])
                      for name in names[n % 3:] if folder + name not in ("a", "b", "foo", "a/b", "b/foo/a")]
        write(root, dict.fromkeys(self.files, ""))
        self.matcher = gno.Matcher(exclude=["!defaults"])

    def kept(self, rules: dict[str, str]) -> tuple[list, list]:
        "(files that git keeps, files that the walk takes) under these ignore files, by folder."
        for folder in self.FOLDERS:
            (self.root / folder / ".gitignore").write_bytes(rules.get(folder, "").encode())
        ignored = subprocess.run(["git", "check-ignore", "--no-index", "--stdin", "-z"], cwd=self.root, env=self.env, text=True,
                                 input="\0".join(self.files), capture_output=True).stdout.split("\0")
        return sorted(set(self.files) - set(ignored)), taken(self.root, self.matcher)


@pytest.fixture(scope="module")
def git(tmp_path_factory):
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    return Git(tmp_path_factory.mktemp("git"))


@pytest.mark.parametrize("rules", [
    "a", "a/", "/a", "/a/", "a/*", "a/**", "**/a", "**/a/", "a/**/b", "**", "**/", "*", "/*", "*/", "*/*", "/**", "**/*.md", "**/foo/**",
    "*.md", "*.md\n!a.md", "!a.md\n*.md", "*.md\n!a.md\na.md", "foo\n!foo/a.md", "foo/*\n!foo/a.md", "/*\n!/foo", "*\n!*/\n!*.md",
    "#h", "\\#h", "!n", "\\!n", "ends", "ends ", "ends\\ ", "ends\\  ", "ba r", "ba\\ r", "ba r  ", "a\\*b", "a*b", "a?b", "x]", "x[]]", "[x]]",
    "[ab].md", "[!ab].md", "[^ab].md", "[a-c]*", "[a\\]x]]", "[]x]]", "[", "a[", "a\\", "\\a.md", "\\", "/", "//", "!", "!!n", "! a", "foo//", "a//b",
    "b/foo", "/b/foo/", "foo/a", "d.x/a/foo/*", "b/**/foo", "b/**/d.x/", "**/b/**", "a/b/**/", "a.md/", "./a.md", "*/foo/*.md", "\ta.md",
    "a.md\r", "\ufeffa.md", "*.log\r\n!b.log\r\n", "a.md\n\n\nb.log\n", "foo/**/a/**/*.md", "**/*", "***", "a/***/b", "b*", "*b", "?", "??", "*?*",
])
def test_gitignore_table_as_git(git, rules):
    kept, walked = git.kept({"": rules})
    assert walked == sorted(kept, key=os.fsencode)


TOKENS = st.sampled_from(["a", "b", "foo", ".", "*", "**", "?", "/", "/", "[ab]", "[!a]", "[a-c]", "\\", "#", " ", "ba", "log", "md", "]", "x",
                          "[^b]", "[]x]", "[a\\-b]", "**/", "/**", "\\*", "\t", "\\ ", "!"])
# Two corners are left out: git takes a `**` glued to a name for a folder wildcard, against its own page, and wants a
# folder for the `**` before an escaped slash.
LINES = st.lists(TOKENS, min_size=1, max_size=5).map("".join).filter(lambda line: not re.search(r"[^/!]\*\*|\\/", line))
FILES = st.dictionaries(st.sampled_from(Git.FOLDERS), st.lists(LINES, min_size=1, max_size=4).map("\n".join), min_size=1)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much])
@given(FILES)
def test_gitignore_as_git(git, rules):
    kept, walked = git.kept(rules)
    assert walked == sorted(kept, key=os.fsencode)


def test_the_walk_costs_little_more_than_looking(tmp_path):
    for folder in range(60):
        write(tmp_path, {f"area {folder % 6}/folder {folder}/some note {n}.md": "x" for n in range(50)})

    def bare(top):
        with os.scandir(top) as listing:
            for entry in listing:
                if entry.is_dir(follow_symlinks=False):
                    bare(entry.path)
                else:
                    entry.stat(follow_symlinks=False)

    def cost(work):
        began = time.process_time()         # other processes do not count
        work()
        return time.process_time() - began
    m = matcher()
    ratios = [cost(lambda: taken(tmp_path, m)) / cost(lambda: bare(tmp_path)) for _ in range(15)]
    assert min(ratios) < 2.5                # about 1.6 on a quiet machine
