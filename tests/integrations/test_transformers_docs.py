"""The code of the page on transformers is run as it stands."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "integrations" / "transformers.md"


def test_the_code_of_the_page_runs(tmp_path):
    """Two ranks train for three steps, and lose less at the end; two layers went backward in each."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script], env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for losses, backwards in ast.literal_eval(done.stdout.splitlines()[-1]):
        assert losses[-1] < losses[0]
        assert backwards == 6
