"""The oracle against tables worked out by hand, and against gradcheck."""

import pytest
import torch

from symm_a2a import reference
from symm_a2a.errors import ConfigError, ExpertIdError, InputError

# Two ranks, experts 0 and 1 on the first, 2 and 3 on the second. Rank 0's second token is routed to
# expert 1 twice, rank 1's first has a masked slot, its second is masked whole.
IDS = [torch.tensor([[3, 0], [1, 1], [0, 2]]), torch.tensor([[0, -1], [-1, -1], [1, 3]])]
# Rows worked out by hand: (origin rank, token, k), by (expert, origin rank, token, k).
EXPERT_ROWS = [
    [(0, 0, 1), (0, 2, 0), (1, 0, 0)],
    [(0, 1, 0), (0, 1, 1), (1, 2, 0)],
    [(0, 2, 1)],
    [(0, 0, 0), (1, 2, 1)],
]
PAD = (-1, -1, -1)


def rows_of(rank):
    return list(zip(rank.origin.tolist(), rank.token.tolist(), rank.k.tolist(), strict=True))


def coded(rank, num_tokens, dtype=torch.float64):
    """Return `(T, 2)` rows that say whose they are: (rank, token)."""
    return torch.tensor([[rank, token] for token in range(num_tokens)], dtype=dtype).reshape(-1, 2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_route_orders_by_expert_origin_and_slot(dtype):
    first, second = reference.route([ids.to(dtype) for ids in IDS], 4)
    assert rows_of(first) == EXPERT_ROWS[0] + EXPERT_ROWS[1]
    assert rows_of(second) == EXPERT_ROWS[2] + EXPERT_ROWS[3]
    assert first.tokens_per_expert.tolist() == [3, 3]
    assert second.tokens_per_expert.tolist() == [1, 2]
    assert first.tokens_per_expert.dtype == torch.int32
    assert (first.num_dropped, second.num_dropped) == (0, 0)


def test_route_pads_each_expert_to_the_next_multiple():
    first, second = reference.route(IDS, 4, pad_multiple=2)
    assert rows_of(first) == [*EXPERT_ROWS[0], PAD, *EXPERT_ROWS[1], PAD]
    assert rows_of(second) == [*EXPERT_ROWS[2], PAD, *EXPERT_ROWS[3]]
    assert first.tokens_per_expert.tolist() == [4, 4]
    assert second.tokens_per_expert.tolist() == [2, 2]


def test_an_expert_without_rows_has_no_padding():
    only, _ = reference.route([torch.tensor([[1]]), torch.empty(0, 1, dtype=torch.int64)], 4, pad_multiple=16)
    assert only.tokens_per_expert.tolist() == [0, 16]
    assert rows_of(only) == [(0, 0, 0)] + [PAD] * 15


@pytest.mark.parametrize(
    ("capacity", "first_counts", "first_rows", "dropped"),
    [
        (9, [4, 4], [*EXPERT_ROWS[0], PAD, *EXPERT_ROWS[1], PAD, PAD], (0, 0)),
        (8, [4, 4], [*EXPERT_ROWS[0], PAD, *EXPERT_ROWS[1], PAD], (0, 0)),
        (7, [4, 3], [*EXPERT_ROWS[0], PAD, *EXPERT_ROWS[1]], (0, 0)),
        (6, [4, 2], [*EXPERT_ROWS[0], PAD, *EXPERT_ROWS[1][:2]], (1, 0)),
        (4, [4, 0], [*EXPERT_ROWS[0], PAD], (3, 0)),
        (2, [2, 0], EXPERT_ROWS[0][:2], (4, 2)),
    ],
)
def test_route_with_a_capacity_clamps_counts_and_drops_the_last_rows(
    capacity, first_counts, first_rows, dropped
):
    first, second = reference.route(IDS, 4, pad_multiple=2, capacity=capacity)
    assert first.tokens_per_expert.tolist() == first_counts
    assert rows_of(first) == first_rows
    assert len(second.origin) == capacity
    assert (first.num_dropped, second.num_dropped) == dropped


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize(("pad_multiple", "capacity"), [(1, "exact"), (4, "exact"), (1, 5), (2, 9)])
def test_dispatch_gives_each_row_its_token(dtype, pad_multiple, capacity):
    xs = [coded(rank, 3, dtype) + 1 for rank in range(2)]
    rows, counts = reference.dispatch(xs, IDS, 4, pad_multiple, capacity)
    routed = reference.route(IDS, 4, pad_multiple, capacity)
    for y_RD, counts_L, rank in zip(rows, counts, routed, strict=True):
        expected = [[0, 0] if row == PAD else [row[0] + 1, row[1] + 1] for row in rows_of(rank)]
        assert y_RD.tolist() == expected
        assert y_RD.dtype == dtype
        assert torch.equal(counts_L, rank.tokens_per_expert)


def test_combine_weighs_and_sums_each_tokens_rows():
    # Row contents 1, 2, 4, ... name each row in a sum; each score has a power of two of its own.
    ys = [
        torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]]),
        torch.tensor([[64.0], [128.0], [256.0]]),
    ]
    scores = [
        torch.tensor([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]]),
        torch.tensor([[13.0, 9e9], [9e9, 9e9], [17.0, 19.0]]),
    ]
    first, second = reference.combine(ys, scores, IDS, 4)
    # Rank 0: token 0 has rows (expert 3, first) and (expert 0, first); and so on, from EXPERT_ROWS.
    assert first.tolist() == [[1 * 128.0 + 2 * 1.0], [3 * 8.0 + 5 * 16.0], [7 * 2.0 + 11 * 64.0]]
    assert second.tolist() == [[13 * 4.0], [0.0], [17 * 32.0 + 19 * 256.0]]
    assert first.dtype == torch.float64


def test_combine_drops_what_the_capacity_dropped():
    ys = [torch.tensor([[1.0], [2.0], [4.0], [8.0]]), torch.tensor([[64.0], [128.0], [256.0], [1e9]])]
    scores = [torch.ones(3, 2), torch.ones(3, 2)]
    first, second = reference.combine(ys, scores, IDS, 4, capacity=4)
    # Expert 1 keeps its first row of three, (0, 1, 0).
    assert first.tolist() == [[128.0 + 1.0], [8.0], [2.0 + 64.0]]
    assert second.tolist() == [[4.0], [0.0], [256.0]]


def test_nothing_of_masked_scores_or_padding_rows_gets_out():
    nan = float("nan")
    rows, _ = reference.dispatch([coded(0, 3), coded(1, 3)], IDS, 4, 4)
    routed = reference.route(IDS, 4, 4)
    ys = [
        y.masked_fill((rank.origin < 0)[:, None], nan).requires_grad_()
        for y, rank in zip(rows, routed, strict=True)
    ]
    scores = [torch.ones(3, 2).masked_fill(ids < 0, nan).requires_grad_() for ids in IDS]
    outs = reference.combine(ys, scores, IDS, 4, 4)
    torch.cat(outs).sum().backward()
    for value in [*outs, *(y.grad for y in ys), *(score.grad for score in scores)]:
        assert value.isfinite().all()
    for y, rank in zip(ys, routed, strict=True):
        assert torch.equal(y.grad, (rank.origin >= 0).double()[:, None].expand_as(y))


@pytest.mark.parametrize("accumulate", [torch.float32, torch.float64])
def test_combine_sums_in_the_given_dtype(accumulate):
    # 1 + 2**-30 is not an fp32 number.
    ys = [torch.tensor([[1.0], [2.0**-30]])]
    (out,) = reference.combine(ys, [torch.ones(1, 2)], [torch.tensor([[0, 1]])], 2, accumulate=accumulate)
    assert out.item() == (1 + 2.0**-30 if accumulate == torch.float64 else 1.0)


def random_case(seed, num_tokens, num_experts, top_k, hidden):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(-1, num_experts, (t, top_k), generator=generator) for t in num_tokens]
    xs = [torch.randn(t, hidden, generator=generator, dtype=torch.float64) for t in num_tokens]
    scores = [torch.rand(t, top_k, generator=generator, dtype=torch.float64) for t in num_tokens]
    weight = torch.randn(num_experts, hidden, generator=generator, dtype=torch.float64)
    return xs, scores, ids, weight


@pytest.mark.parametrize(("pad_multiple", "capacity"), [(1, "exact"), (3, "exact"), (1, 4), (3, 5), (1, 40)])
@pytest.mark.parametrize("num_tokens", [(3, 2), (0, 4), (0, 0)])
def test_gradients_of_a_layer(num_tokens, pad_multiple, capacity):
    xs, scores, ids, weight = random_case(0, num_tokens, 4, 3, 2)

    def layer(weight, *tensors):
        xs, scores = tensors[: len(ids)], tensors[len(ids) :]
        rows, counts = reference.dispatch(list(xs), ids, 4, pad_multiple, capacity)
        ys = []
        for rank, (rows_RD, counts_L) in enumerate(zip(rows, counts, strict=True)):
            used = int(counts_L.sum())
            expert_R = torch.arange(2 * rank, 2 * rank + 2).repeat_interleave(counts_L)
            ys.append(torch.cat([torch.tanh(rows_RD[:used] * weight[expert_R]), rows_RD[used:] + 1]))
        return tuple(reference.combine(ys, list(scores), ids, 4, pad_multiple, capacity))

    inputs = [tensor.requires_grad_() for tensor in (weight, *xs, *scores)]
    assert torch.autograd.gradcheck(layer, inputs)


def test_dropped_and_masked_slots_have_no_gradient():
    xs = [coded(rank, 3).requires_grad_() for rank in range(2)]
    scores = [torch.ones(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    rows, _ = reference.dispatch(xs, IDS, 4, capacity=4)
    outs = reference.combine([y + 1 for y in rows], scores, IDS, 4, capacity=4)
    grads = torch.autograd.grad(torch.cat(outs).sum(), [*xs, *scores])
    kept = {row for rank in reference.route(IDS, 4, capacity=4) for row in rows_of(rank)}
    for origin in range(2):
        for token in range(3):
            slots = [(origin, token, k) in kept for k in range(2)]
            assert grads[origin][token].tolist() == [sum(slots)] * 2
            assert [grad != 0 for grad in grads[2 + origin][token].tolist()] == slots


def test_counts_of_slots_and_distinct_copies():
    assert reference.count_slots(IDS, 4).tolist() == [[4, 2], [2, 1]]
    assert reference.count_copies(IDS, 4).tolist() == [[3, 2], [2, 1]]


def test_every_slot_of_some_hundreds_of_tokens_is_found_once():
    _, _, ids, _ = random_case(1, (200, 0, 100), 12, 8, 1)
    rows = [row for rank in reference.route(ids, 12) for row in rows_of(rank)]
    assert len(rows) == len(set(rows)) == sum(int((i >= 0).sum()) for i in ids)
    assert reference.count_slots(ids, 12).sum(1).tolist() == [int((i >= 0).sum()) for i in ids]


def test_wrong_arguments():
    ids = [torch.tensor([[0]]), torch.tensor([[1]])]
    with pytest.raises(ConfigError, match="got 3 experts for 2 ranks"):
        reference.route(ids, 3)
    with pytest.raises(ExpertIdError, match=r"expected ids in \[-1, 2\), got 2 on rank 1"):
        reference.route([ids[0], torch.tensor([[2]])], 2)
    with pytest.raises(ExpertIdError, match="got -2 on rank 0"):
        reference.count_copies([torch.tensor([[-2]]), ids[1]], 2)
    with pytest.raises(InputError, match="one K"):
        reference.route([ids[0], torch.tensor([[1, 0]])], 2)
    with pytest.raises(InputError, match="expected 1 rows of y on rank 0, got 2"):
        reference.combine([torch.ones(2, 1), torch.ones(1, 1)], [torch.ones(1, 1)] * 2, ids, 2)
