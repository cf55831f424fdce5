"""Every kernel compiles for every target; the machine code keeps what the protocol needs."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import symm_a2a

ROOT = pathlib.Path(symm_a2a.__file__).parent.parent
KERNELS = sorted((ROOT / "symm_a2a" / "kernels").glob("*.py"))
SYS_SCOPE = re.compile(r"\.sys\.(acquire|release)|\.(acquire|release)\.sys")
# How often each form acquires and releases at system scope: one of the releases, two where a launch
# checks its credit and then waits for peers, is the failure report; the others publish.
FORMS = {
    "_count_kernel": (1, 2),
    "_row_count_kernel": (1, 1),
    "_credit_kernel[KIND=1]": (1, 1),
    "_scatter_kernel[PLACE=1,KIND=0]": (1, 2),
    "_scatter_kernel[PLACE=0,KIND=3]": (2, 4),
    "_expand_kernel": (1, 2),
    "_expand_grad_kernel": (1, 2),
    "_gather_kernel[WEIGHTED=1,HAS_SCORES=1,KIND=1]": (2, 3),
    "_gather_kernel[WEIGHTED=0,HAS_SCORES=1,KIND=2]": (2, 3),
    "_finish_kernel[HAS_SCORES=0,KIND=1]": (1, 2),
    "_finish_kernel[HAS_SCORES=1,KIND=2]": (1, 2),
}
# The payload accesses that a flag announces, or ends.
PUBLISHES = {
    "_scatter_kernel[PLACE=1,KIND=0]": "tt.store",
    "_scatter_kernel[PLACE=0,KIND=3]": "tt.store",
    "_gather_kernel[WEIGHTED=1,HAS_SCORES=1,KIND=1]": "tt.store",
    "_gather_kernel[WEIGHTED=0,HAS_SCORES=1,KIND=2]": "tt.store",
    "_expand_kernel": "tt.load",
    "_expand_grad_kernel": "tt.load",
    "_finish_kernel[HAS_SCORES=0,KIND=1]": "tt.load",
    "_finish_kernel[HAS_SCORES=1,KIND=2]": "tt.load",
}
WRITES_PEER_ROWS = ("_scatter_kernel", "_gather_kernel")
SHAPES = {
    "aligned": dict(num_experts=64, top_k=8, hidden_dim=2048, world_size=8),
    "odd": dict(num_experts=12, top_k=3, hidden_dim=70, world_size=4),
}
SCRIPT = """
import json, sys, warnings
import torch
warnings.simplefilter("ignore")
from bench.compile import TARGETS, launches_of
import symm_a2a
shape, targets = json.loads(sys.argv[1]), sys.argv[2].split(",")
world_size = shape.pop("world_size")
cfg = symm_a2a.EPConfig(max_tokens_per_rank=64, dtype=torch.bfloat16, capacity=512, num_lanes=1,
                        pad_multiple=4, **shape)
print(json.dumps({
    launch.variant: {
        target: {kind: launch.compile(TARGETS[target]).asm.get(kind, "") for kind in ("ttir", "ptx")}
        for target in targets
    }
    for launch in launches_of(cfg, world_size, num_tokens=64)
}))
"""


def compiled(shape: str, targets: str) -> dict[str, dict[str, dict[str, str]]]:
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, json.dumps(SHAPES[shape]), targets]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(("shape", "targets"), [("aligned", "sm_80,sm_90,sm_100,gfx942"), ("odd", "sm_90")])
def test_kernels_compile_with_wide_peer_stores_and_ordered_flags(shape, targets):
    forms = compiled(shape, targets)
    assert set(forms) == set(FORMS)
    for name, by_target in forms.items():
        for target, code in by_target.items():
            if target == "gfx942":
                continue
            ptx = code["ptx"]
            where = f"{name} for {target}"
            orders = [first or second for first, second in SYS_SCOPE.findall(ptx)]
            assert (orders.count("acquire"), orders.count("release")) == FORMS[name], where
            if name.startswith(WRITES_PEER_ROWS):
                stores = re.findall(r"st\.global[.\w]*", ptx)
                # Rows are the only bfloat16 that these kernels store.
                assert "st.global.v4.b32" in stores, where
                assert not [s for s in stores if s.endswith("b16")], where
            if name in PUBLISHES:
                assert_published_last(code["ttir"], PUBLISHES[name], where)


def assert_published_last(ttir: str, access: str, where: str) -> None:
    """All payload accesses, then the count of programs, then the flags: in program order.

    `report` releases too, to one word of one address; flags go to a tensor of addresses.
    """
    lines = ttir.splitlines()
    accesses = [n for n, line in enumerate(lines) if access in line and re.search(r"x!tt\.ptr<bf16>", line)]
    counted = [n for n, line in enumerate(lines) if "tt.atomic_rmw add, acq_rel, gpu" in line]
    published = [
        n for n, line in enumerate(lines) if "tt.atomic_rmw exch, release, sys" in line and "tensor<" in line
    ]
    assert accesses, where
    assert len(counted) == 1, where
    assert published, where
    assert max(accesses) < counted[0] < min(published), where
    # Triton puts no barrier ahead of an atomic: without these, one thread's would overtake the
    # accesses of the others, or they would overtake its acquire.
    for n, line in enumerate(lines):
        if "acq_rel, gpu" in line or "release, sys" in line:
            assert "barrier" in lines[n - 1], (where, line)
        if "acquire, sys" in line:
            assert "barrier" in lines[n + 1], (where, line)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_no_loop_polls_memory_but_through_atomics(path):
    """A `while` runs as often as memory says: what it reads must not be cached or torn."""
    for loop in ast.walk(ast.parse(path.read_text())):
        if isinstance(loop, ast.While):
            calls = [ast.unparse(node.func) for node in ast.walk(loop) if isinstance(node, ast.Call)]
            reads = [call for call in calls if not call.startswith(("tl.min", "tl.max", "tl.where"))]
            assert reads, "a loop without an atomic read waits for nothing"
            assert all(call.startswith("tl.atomic_") for call in reads), reads


def test_only_the_wait_loops():
    loops = [
        (path.stem, node.lineno)
        for path in KERNELS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.While)
    ]
    assert [stem for stem, _ in loops] == ["flags"]
