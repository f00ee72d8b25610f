"""gno where people put it: copied into another tree, run by path, from a wheel, and without the packages it can do without."""
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from conftest import ROOT, environment, write

NOTES = {"a.md": "# Boiler\n\nThe boiler needs new seals in May.\n", "b.md": "# Roof\n\nThe roof was painted.\n"}


def child(base: Path, *words: str, **more: str):
    "A command in a process that only finds what is on its own path -> stdout."
    env = environment(base) | {"PYTHONPATH": ""} | more
    done = subprocess.run(words, capture_output=True, text=True, cwd=base, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refuse(folder: Path, *names: str) -> str:
    "A folder for PYTHONPATH whose sitecustomize makes these packages impossible to import."
    write(folder, {"sitecustomize.py": f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
"""})
    return str(folder)


def test_import_loads_the_standard_library_only(tmp_path):
    "Modules outside the standard library would show here; heavy ones of it must not be loaded either."
    said = child(tmp_path, sys.executable, "-c", "import sys; before = set(sys.modules); import gno; "
                 "print(*sorted(set(sys.modules) - before))", PYTHONPATH=str(ROOT))
    loaded = {name.partition(".")[0] for name in said.split()} - {"gno"}
    assert loaded <= set(sys.stdlib_module_names)
    assert not loaded & {"asyncio", "urllib", "zipfile", "email", "html", "concurrent", "argparse", "inspect", "dataclasses", "uuid"}


def test_copied_alone_and_run_by_path(tmp_path):
    "One file in an empty folder: keyword search, reading and indexing work, and vector search says what it needs."
    shutil.copy(ROOT / "gno.py", tmp_path / "gno.py")
    notes = write(tmp_path / "my notes", NOTES)
    said = child(tmp_path, sys.executable, str(tmp_path / "gno.py"), "search", "seals", "--folder", str(notes), "--json")
    assert [r["source"]["relPath"] for r in json.loads(said)["results"]] == ["a.md"]
    said = child(tmp_path, sys.executable, str(tmp_path / "gno.py"), "query", "heating", "--folder", str(notes), "--json", "--quiet")
    meta = json.loads(said)["meta"]
    if not any(Path(p, "gno_models").exists() for p in sys.path):           # an installed gno brings the model with it
        assert meta["mode"] in ("bm25_only", "hybrid")


def test_vendored_in_a_package(tmp_path):
    package = write(tmp_path / "app" / "vendor", {"__init__.py": "", "../__init__.py": ""})
    shutil.copy(ROOT / "gno.py", package / "gno.py")
    notes = write(tmp_path / "notes", NOTES)
    said = child(tmp_path, sys.executable, "-c", f"""
from app.vendor import gno
kb = gno.KB(writable=True, folders=[{str(notes)!r}])
gno.call(kb, "sync", {{}}, inline=gno.Progress())
print(gno.call(kb, "search", {{"query": "painted"}})["results"][0]["source"]["relPath"])
""")
    assert said.strip() == "b.md"


@pytest.mark.parametrize("absent, works", [
    (("numpy",), "bm25_only"), (("onnxruntime",), "bm25_only"), (("tokenizers",), "bm25_only"),
    (("numpy", "onnxruntime", "tokenizers", "sqlite_vec", "pypdfium2", "yaml"), "bm25_only"), (("sqlite_vec",), "hybrid")])
def test_without_optional_packages(tmp_path, absent, works):
    "What is missing is named, with how to get it; everything else goes on."
    notes = write(tmp_path / "notes", NOTES | {"x.pdf": b"%PDF-1.4 broken"})
    path = os.pathsep.join([refuse(tmp_path / "site", *absent), str(ROOT)])
    gno = [sys.executable, str(ROOT / "gno.py")]
    found = json.loads(child(tmp_path, *gno, "query", "seals", "--folder", str(notes), "--json", PYTHONPATH=path))
    assert found["results"][0]["source"]["relPath"] == "a.md" and found["meta"]["mode"] == works
    if works == "bm25_only":
        note = " ".join(found["meta"]["notes"])
        assert any(package in note for package in absent) and "pip install" in note
    read = json.loads(child(tmp_path, *gno, "get", "notes/a.md:3", "--folder", str(notes), "--json", PYTHONPATH=path))
    assert read["content"].startswith("The boiler needs")
    state = json.loads(child(tmp_path, *gno, "status", "--folder", str(notes), "--json", PYTHONPATH=path))
    assert state["capabilities"]["bm25"] and state["totalDocuments"] == 2


def test_a_package_installed_later_is_used_on_unchanged_files(tmp_path):
    notes = write(tmp_path / "notes", {"r.pdf": (ROOT / "tests/vault/files/seeing-report.pdf").read_bytes()})
    without = os.pathsep.join([refuse(tmp_path / "site", "pypdfium2", "yaml"), str(ROOT)])
    ls = [sys.executable, str(ROOT / "gno.py"), "ls", "--folder", str(notes), "--json"]
    first = json.loads(child(tmp_path, *ls, PYTHONPATH=without))["documents"]
    assert first[0]["error"] == "MISSING_PACKAGE"
    then = json.loads(child(tmp_path, *ls, PYTHONPATH=str(ROOT)))["documents"]
    assert "error" not in then[0]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    "The wheel built from a copy of the checkout."
    tree = tmp_path_factory.mktemp("tree")
    for name in ("gno.py", "gno_http.py", "pyproject.toml", "README.md", "LICENSE", "models"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, tree / name)
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tree / "out"), str(tree)],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next((tree / "out").glob("gno-*.whl"))


def test_wheel_holds_the_modules_and_the_model_and_nothing_else(wheel):
    import zipfile
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert names - {"gno_http.py"} == {"gno.py"} | {f"gno_models/{n}" for n in (
        "card.json", "all-minilm-l6-v2.int8.onnx", "knn-int8.onnx", "tokenizer.json", "LICENSE", "NOTICE")}


def test_wheel_installed_in_an_empty_venv_works_from_another_folder(wheel, tmp_path):
    "The packages come from this environment by a .pth file: what is tested is gno's own wheel."
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    site = next(home.glob("lib/python*/site-packages"))
    import zipfile
    zipfile.ZipFile(wheel).extractall(site)
    (site / "packages.pth").write_text("\n".join(p for p in sys.path if p.endswith("-packages")))
    notes = write(tmp_path / "notes", NOTES)
    said = child(tmp_path, str(home / "bin" / "python"), "-c", "import sys, gno; sys.exit(gno.main())", "query",
                 "when is the heating repaired", "--folder", str(notes), "--json")
    found = json.loads(said)
    assert found["meta"]["mode"] == "hybrid" and found["results"][0]["source"]["relPath"] == "a.md"
