"""README and docs say what is there: links, files, commands, measured numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flash_rt.flashrt_hf.bench import record, table
from flash_rt.flashrt_hf.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [link for link in links if ":" not in link and not (page.parent / link).exists()]
    assert missing == []


def test_the_readme_links_every_document():
    links = re.findall(r"\]\((docs/[^)#]+)", (ROOT / "README.md").read_text())
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= set(links)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page):
    named = re.findall(
        r"`((?:examples|structures|flashrt_hf|kernel_sources|docs|benchmarks)/[\w./]+)`",
        page.read_text(),
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_commands_exist(page):
    named = re.findall(r"^\s*(?:eval \"\$\()?flash-rt ([a-z]+)", page.read_text(), re.MULTILINE)
    assert set(named) <= set(COMMANDS)


@pytest.mark.parametrize(
    ("page", "shown"),
    [(ROOT / "README.md", table.summary), (ROOT / "docs/results.md", table.details)],
    ids=["README.md", "results.md"],
)
def test_measured_numbers_are_the_records(page, shown):
    """Refill with the command of benchmarks/records/README.md."""
    files = sorted((ROOT / "benchmarks" / "records").glob("*.json"))
    text = page.read_text()
    assert files
    assert table.fill(text, shown({path.name: record.read(path) for path in files})) == text
