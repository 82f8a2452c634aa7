"""The documentation does not drift: its Python runs, its files and commands exist."""

import re
from pathlib import Path

import pytest

from segue.cli import COMMANDS, parser

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md")]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda page: page.name
)
def test_the_python_in_the_documentation_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in blocks(page, "python"):
        names = {}
        exec(compile(code, page.name, "exec"), names)
        if "first" in names:
            first, second = names["first"], names["second"]
            assert second.reuse.held == first.state.num_tokens - 1 and second.reuse.recomputed == 0


def test_the_readmes_commands_are_understood():
    lines = [line.split(" #")[0].strip() for block in blocks(ROOT / "README.md", "sh") for line in block.splitlines()]
    commands = [line.split(maxsplit=1)[1] for line in lines if line.startswith("segue ")]
    assert {command.split()[0] for command in commands} == set(COMMANDS)
    for command in commands:
        parser().parse_args(re.findall(r'"[^"]*"|\S+', command))
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {line.split()[1] for line in lines if line.startswith("make ")} == {"run", "test"} <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_file_names_exist(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (page.parent / link).exists(), link
    for name in re.findall(r"`((?:base|toolcalls|kv|state|policies|engine|model|server|cli)/[\w/]*(?:\.py)?)`", text):
        assert (ROOT / "src/segue" / name).exists(), name
