"""The README says what is true: its tool table is current and its commands and names exist."""
import re
import shlex

from conftest import ROOT

import gno

README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- tools: [^>]*-->\n)(.*?)(<!-- /tools -->)", re.S)


def tools_table() -> str:
    "The tools of this version as a Markdown table, from the registry."
    rows = ["| MCP tool | command | |", "|---|---|---|"]
    shown = sorted((t for t in gno.TOOLS.values() if not t.only), key=lambda t: t.effect != "read")
    rows += [f"| `gno_{t.name}` | `gno {t.cli}` | {t.summary.partition('. ')[0].rstrip('.')}{' (write)' if t.effect != 'read' else ''} |"
             for t in shown]
    return "\n".join(rows) + "\n"


def test_tool_table_is_current():
    "Run this file as a program to write it anew."
    assert BLOCK.search(README.read_text("utf-8"))[2] == tools_table()


def test_commands_of_the_readme_exist():
    commands = {t.cli for t in gno.TOOLS.values()} | {"mcp"}
    blocks = re.findall(r"```sh\n(.*?)```", README.read_text("utf-8"), re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    words = [shlex.split(part, comments=True) for line in lines for part in re.findall(r"(?:^|/|&& )(?:gno|python gno\.py) [^&]*", line)]
    used = [w[1] if w[0].endswith("gno") else w[2] for w in words]
    assert len(used) >= 8 and set(used) <= commands


def test_flags_of_the_readme_exist():
    text = README.read_text("utf-8")
    flags = {"--" + p.name.rstrip("_").replace("_", "-") for t in gno.TOOLS.values() for p in t.params} | set(gno.GLOBALS) | {"--enable-write"}
    assert set(re.findall(r"`(--[a-z][a-z-]+)", text)) <= flags


def test_every_section_of_the_source_has_its_banner():
    banners = re.findall(r"(?m)^# ==== (.+?) =+$", (ROOT / "gno.py").read_text("utf-8"))
    assert len(banners) == len(set(banners)) >= 15 and all(":" in b for b in banners)


if __name__ == "__main__":
    text = README.read_text("utf-8")
    README.write_text(BLOCK.sub(lambda m: m[1] + tools_table() + m[3], text), "utf-8")
