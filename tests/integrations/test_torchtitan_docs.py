"""The code of the page on torchtitan is run as it stands."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed; ./dev test-integrations has it")

ROOT = pathlib.Path(__file__).parents[2]
PARSE = """
from torchtitan.config import ConfigManager
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

arguments = "--module my_configs --config deepseek_v3_16b_symm --parallelism.expert_parallel_degree 8"
config = ConfigManager().parse_args(arguments.split())
config.model_spec.model.update_from_config(config=config)
found = [layer for _, layer, *_ in config.model_spec.traverse(LocalTokenDispatcher.Config)]
print(len(found), {type(layer).__qualname__ for layer in found}, {layer.hidden_dim for layer in found})
"""


def run(folder, name, code):
    (folder / name).write_text(code)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}"}
    done = subprocess.run([sys.executable, name], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_the_code_of_the_page_runs(tmp_path):
    page = (ROOT / "docs" / "integrations" / "torchtitan.md").read_text()
    configs, by_itself = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "my_configs.py").write_text(configs)
    assert run(tmp_path, "parse.py", PARSE) == "26 {'SymmEPTokenDispatcher.Config'} {2048}"
    assert run(tmp_path, "by_itself.py", by_itself) == "[((100, 64), 1), ((100, 64), 1)]"
