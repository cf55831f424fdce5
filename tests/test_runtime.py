"""Where kernels run is decided at import, and what cannot work says so."""

import os
import subprocess
import sys

import pytest
import torch

import symm_a2a
from symm_a2a import runtime

CREATE = (
    "symm_a2a.SymmTokenDispatcher("
    "symm_a2a.EPConfig(num_experts=2, top_k=1, hidden_dim=4, max_tokens_per_rank=2))"
)


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
    )


def test_without_a_gpu_the_interpreter_is_chosen_and_logged():
    done = python(f"import logging; logging.basicConfig(level=logging.INFO); import symm_a2a; {CREATE}")
    assert done.returncode == 0, done.stderr
    assert "no CUDA device: kernels run in Triton's interpreter" in done.stderr


def test_a_choice_in_the_environment_stays():
    done = python("import os, symm_a2a; print(os.environ['TRITON_INTERPRET'])", TRITON_INTERPRET="0")
    assert done.stdout.strip() == "0"


def test_compiled_kernels_want_a_gpu_and_say_so():
    done = python(f"import symm_a2a; {CREATE}", TRITON_INTERPRET="0")
    assert "EnvironmentUnsupportedError" in done.stderr
    assert "set TRITON_INTERPRET=1" in done.stderr


def test_triton_imported_first_is_named_not_a_riddle():
    done = python(f"import triton.language, symm_a2a; {CREATE}")
    assert "EnvironmentUnsupportedError" in done.stderr
    assert "import symm_a2a before" in done.stderr
    assert python(f"import triton.language, symm_a2a; {CREATE}", TRITON_INTERPRET="1").returncode == 0


@pytest.mark.parametrize(
    ("triton_version", "numpy_version", "works"),
    [("3.6.0", "2.4.6", False), ("3.6.0", "2.3.1", True), ("3.7.1", "2.4.6", True), ("4.0.0", "3.0.0", True)],
)
def test_an_interpreter_that_numpy_refuses_is_named(monkeypatch, triton_version, numpy_version, works):
    monkeypatch.setattr("triton.__version__", triton_version)
    monkeypatch.setattr("numpy.__version__", numpy_version)
    if works:
        runtime.require_runnable(torch.device("cpu"))
    else:
        with pytest.raises(symm_a2a.EnvironmentUnsupportedError, match=r"numpy < 2\.4"):
            runtime.require_runnable(torch.device("cpu"))
