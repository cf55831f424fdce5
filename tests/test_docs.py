"""What stands in the README and the docs as code is run as it stands, and what they link to is there."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def code_of(page) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


# Two need packages that are not here: tests/integrations runs them.
ELSEWHERE = ("torchtitan.md", "transformers.md")
WITH_CODE = [page for page in PAGES[1:] if code_of(page) and page.name not in ELSEWHERE]


def run(folder, code):
    script = folder / "example.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_of_the_readme_runs(tmp_path):
    (code,) = code_of(ROOT / "README.md")
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    assert run(tmp_path, code).count("(100, 64)") == 4


def test_the_page_on_domino_adds_up_what_was_hidden_and_writes_two_files(tmp_path):
    shown = run(tmp_path, "\n".join([*code_of(ROOT / "docs" / "domino.md"), "print(sorted(hidden))"]))
    assert shown == "['backward', 'forward']\n"
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "timeline.json").stat().st_size > 1000


@pytest.mark.parametrize(
    "page",
    WITH_CODE,
    ids=lambda page: page.name,
)
def test_the_code_of_every_page_runs(tmp_path, page):
    """From top to bottom, as one program."""
    run(tmp_path, "\n".join(code_of(page)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_links_to_exists(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
