"""What stands in the README and the docs as code is run as it stands, and what they name is there.

`./dev docs` checks the rest: anchors, and that the reference can be made.
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys
from importlib import import_module

import pytest
import tyro

import symm_a2a
import symm_a2a.__main__
from bench.__main__ import COMMANDS

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_a_page_names_exist(page):
    for path in re.findall(r"`((?:\w+/)+[\w*]+\.(?:py|sh))`", page.read_text()):
        assert any(list(folder.glob(path)) for folder in (ROOT, ROOT / "symm_a2a")), path


def commands_of(page) -> list[list[str]]:
    """In blocks and within lines, up to a comment, a backtick or the end of a comment of HTML."""
    text = page.read_text().replace("\\\n", " ")
    found = re.findall(r"(\./dev|-m bench|-m symm_a2a)(?![\w.])((?:(?!-->)[^`#\n])*)", text)
    return [[*start.split()[-1:], *shlex.split(rest)] for start, rest in found]


def parse(command):
    """Read a command line as the program itself would, and run nothing."""
    match command:
        case ["./dev", "demo", *arguments]:
            parse(["bench", "train", "--ranks", "4", *arguments])
        case ["./dev", "bench", *arguments]:
            parse(["bench", *arguments])
        case ["./dev", "kernels", *arguments]:
            parse(["bench", "kernels", *arguments])
        case ["./dev", name, *_]:
            assert re.search(rf"^  {name} ", (ROOT / "dev").read_text(), flags=re.MULTILINE), name
        case ["bench", name, *arguments]:
            assert name in COMMANDS
            options = tyro.cli(import_module(f"bench.{name}.options").Options, args=arguments)
            if hasattr(options, "check"):
                options.check()
        case ["symm_a2a", *arguments]:
            symm_a2a.__main__._parser().parse_args(arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_and_their_options_exist(page, capsys):
    for command in commands_of(page):
        try:
            parse(command)
        except SystemExit:
            pytest.fail(f"{shlex.join(command)}\n{capsys.readouterr().err}")


def test_every_page_is_in_the_navigation():
    pages = re.findall(r"^ +- .*?([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(pages) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES[1:])


def test_every_public_name_is_in_the_reference():
    """By itself, or with all of its module."""
    reference = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^::: (\S+)$", reference, flags=re.MULTILINE)
    for name in symm_a2a.__all__:
        home = getattr(getattr(symm_a2a, name), "__module__", None)
        assert f"symm_a2a.{name}" in shown or home in shown, name
    assert len(set(shown)) == len(shown)


def test_every_promise_names_a_test_that_is_there():
    """In the page of promises: files, and `file::test`, a `::test` of the file before it."""
    file = None
    named = re.findall(
        r"`((?:tests|symm_a2a)/[\w/.]+)?(::\w+)?`", (ROOT / "docs" / "reliability.md").read_text()
    )
    assert len(named) > 30
    for path, name in named:
        if path:
            file = ROOT / path
            assert file.exists(), path
        if name:
            assert f"def {name[2:]}(" in file.read_text(), name
