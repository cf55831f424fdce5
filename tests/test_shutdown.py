"""The end of the interpreter, with exchanges in flight: no word, no wait, and the peers learn of it."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
import torch.distributed as dist
import symm_a2a

rank, folder, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
sizes = dict(num_experts=2, top_k=1, hidden_dim=4, max_tokens_per_rank=3)
dispatcher = symm_a2a.SymmTokenDispatcher(symm_a2a.EPConfig(**sizes, dtype=torch.float32, timeout=30))
group = symm_a2a.SequenceGroup(dist.group.WORLD, timeout=30)
x, scores, ids = torch.ones(3, 4, requires_grad=True), torch.ones(3, 1), torch.tensor([[0], [1], [1]])
heads = symm_a2a.seq_to_head(x.view(1, 3, 2, 2), group)
rows, _, handle = dispatcher.dispatch(x, scores, ids)
pending = dispatcher.combine_async(rows, handle)
if how == "one stays" and rank == 1:
    try:
        pending.join()
        for _ in range(3):
            dispatcher.dispatch(x, scores, ids)
    except symm_a2a.PeerLostError:
        print("lost")
    try:
        for _ in range(3):
            symm_a2a.seq_to_head(heads.view(1, 3, 2, 2), group)
    except symm_a2a.PeerLostError:
        print("lost")
if how == "raises":
    raise SystemExit(3)
if how == "in a thread":
    import threading
    threading.Thread(target=lambda: print("ended", flush=True)).start()
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("all go", 0, ["", ""]),
        ("one stays", 0, ["", "lost\nlost\n"]),
        ("raises", 3, ["", ""]),
        ("in a thread", 0, ["ended\n"] * 2),
    ],
)
def test_an_interpreter_ends_with_exchanges_in_flight(tmp_path, how, code, said):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        out, err = process.communicate(timeout=100)
        assert (process.returncode, out, err) == (code, said[rank], "")


def test_a_virtual_world_in_flight_ends_without_a_word():
    program = """
import torch, symm_a2a
sizes = dict(num_experts=2, top_k=1, hidden_dim=4, max_tokens_per_rank=3, dtype=torch.float32)
world = symm_a2a.VirtualWorld(symm_a2a.EPConfig(**sizes), 2, "cpu")
x, scores, ids = torch.ones(3, 4, requires_grad=True), torch.ones(3, 1), torch.tensor([[0], [1], [1]])
pending = [d.dispatch_async(x, scores, ids) for d in world.dispatchers]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
