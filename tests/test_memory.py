"""Shared memory between processes: private, exact, unnamed; and groups that cannot share."""

import os
import stat

import pytest
import torch

import symm_a2a
from symm_a2a.check.footprint import shared_names
from symm_a2a.memory import choose_backend, group, host


@pytest.fixture
def segment():
    fd = host.create_segment(12345)
    yield fd
    os.close(fd)


def test_a_segment_is_private_exact_and_has_no_name(segment):
    status = os.fstat(segment)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.getuid()
    assert status.st_size == 12345
    assert status.st_blocks * 512 >= 12345, "the pages are taken now, not when a kernel writes"
    assert status.st_nlink == 0
    with pytest.raises(OSError):  # noqa: PT011
        os.link(f"/proc/self/fd/{segment}", "/dev/shm/symm_a2a-linked", follow_symlinks=True)


def test_a_segment_is_mapped_through_its_owners_descriptor(segment):
    with host.open_segment(host.Segment.of(segment), 12345) as mapped:
        mapped[7] = 42
        assert os.pread(segment, 1, 7) == b"*"


def test_a_peers_segment_of_another_size_is_refused(segment):
    with pytest.raises(symm_a2a.EnvironmentUnsupportedError, match="segment of 8192 bytes, got 12345"):
        host.open_segment(host.Segment.of(segment), 8192)


def test_nothing_but_the_segment_is_mapped(segment):
    """Descriptors are given out again, and so are the numbers of processes."""
    other = host.create_segment(12345)
    try:
        wrong = host.Segment.of(segment)._replace(descriptor=other)
        with pytest.raises(symm_a2a.EnvironmentUnsupportedError, match="got another file"):
            host.open_segment(wrong, 12345)
    finally:
        os.close(other)
    with pytest.raises(symm_a2a.EnvironmentUnsupportedError, match="got No such file"):
        host.open_segment(host.Segment.of(segment)._replace(descriptor=other), 12345)


def test_a_segment_without_room_is_refused_and_leaves_nothing():
    before = len(os.listdir("/proc/self/fd")), shared_names()
    with pytest.raises(symm_a2a.EnvironmentUnsupportedError, match="of room in /dev/shm"):
        host.create_segment(1 << 45)
    assert (len(os.listdir("/proc/self/fd")), shared_names()) == before


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
