"""Shared memory between processes: private, exact, unnamed; and groups that cannot share."""

import os
import stat

import pytest
import torch

import symm_a2a
from symm_a2a.memory import choose_backend, group, host


def test_a_segment_is_private_exact_and_never_someone_elses():
    path = host._draw_path()
    fd = host._create_segment(path, 12345)
    try:
        status = os.fstat(fd)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_uid == os.getuid()
        assert status.st_size == 12345
        assert status.st_blocks * 512 >= 12345, "the pages are taken now, not when a kernel writes"
        assert host._draw_path() != path
    finally:
        os.close(fd)
        os.unlink(path)


def test_a_name_that_is_taken_is_never_opened():
    path = host._draw_path()
    fd = host._create_segment(path, 16)
    try:
        with pytest.raises(FileExistsError):
            host._create_segment(path, 16)
    finally:
        os.close(fd)
        os.unlink(path)


def test_a_peers_segment_of_another_size_is_refused():
    path = host._draw_path()
    fd = host._create_segment(path, 4096)
    try:
        with pytest.raises(symm_a2a.EnvironmentUnsupportedError, match="segment of 8192 bytes, got 4096"):
            host._map_segment(fd, 8192)
    finally:
        os.close(fd)
        os.unlink(path)


def test_a_segment_without_room_is_refused_and_leaves_nothing():
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(symm_a2a.EnvironmentUnsupportedError, match="of room in /dev/shm"):
        host._create_segment(host._draw_path(), 1 << 45)
    mine = [name for name in set(os.listdir("/dev/shm")) - before if f"-{os.getpid()}-" in name]
    assert mine == []


def test_a_group_that_spans_machines_is_refused(monkeypatch):
    monkeypatch.setattr(group, "exchange", lambda *_: ["boot-a", "boot-a", "boot-b"])
    with pytest.raises(symm_a2a.EnvironmentUnsupportedError, match="rank 0 and rank 2 on different ones"):
        group.require_one_machine(None)


@pytest.mark.parametrize(
    ("device", "world_size", "backend"),
    [("cpu", 1, "virtual"), ("cuda:0", 1, "virtual"), ("cpu", 4, "host"), ("cuda:0", 4, "cuda")],
)
def test_the_backend_follows_from_device_and_group(device, world_size, backend):
    chosen, reason = choose_backend(torch.device(device), world_size)
    assert chosen == backend
    assert reason
