"""Models of transformers, expert-parallel over symmetric memory, against the same models in one process."""

import pytest
import torch
import torch.distributed as dist

from symm_a2a.integrations.transformers import register
from symm_a2a.testing import run_ranks

pytest.importorskip("transformers")

from tests.integrations import hf_models as hf

OF_TWO = (
    dict(fsdp_size=2, ep_size=2),  # a batch each
    dict(tp_size=2, ep_size=2),  # one batch, attention split as well
)
OF_FOUR = (
    dict(
        tp_size=2, fsdp_size=2, ep_size=4
    ),  # two batches, each on two ranks; every rank has experts of its own
    dict(fsdp_size=4, ep_size=2),  # two groups, and FSDP halves each expert over them
    dict(tp_size=2, fsdp_size=2, ep_size=2),  # both
)


def applied(rank, group, name):
    logits, grads = hf.expected(hf.whole_model(name), dist.get_world_size(group))
    with register(max_tokens_per_rank=10) as pool:
        model = hf.shard_experts(hf.whole_model(name), hf.mesh_of(group))
        hf.assert_near(hf.forward_backward(model, rank), logits[rank], "logits")
        hf.assert_gradients(model, grads)
        (dispatcher,) = pool.dispatchers
        return dispatcher.stats().exchanges


@pytest.mark.parametrize("name", hf.MODELS)
def test_apply_expert_parallelism(name):
    for exchanges in run_ranks(applied, 2, name):
        assert exchanges["dispatch"] == exchanges["combine_backward"] == 2  # one in each layer


def loaded(rank, group, name, folder, layouts):
    return [load_and_compare(rank, name, folder, sizes) for sizes in layouts]


def load_and_compare(rank, name, folder, sizes):
    config = hf.layout(**sizes)
    batch = rank // config.tp_size
    logits, grads = hf.expected(hf.whole_model(name), config.dp_size)
    # The ranks that have the same tokens take a share each.
    most = max(torch.Size(shape).numel() for shape in hf.SHAPES[: config.dp_size])
    with register(max_tokens_per_rank=-(-most // config.tp_size)) as pool:
        model = hf.load(folder, config)
        hf.assert_near(hf.whole(hf.forward_backward(model, batch)), logits[batch], "logits")
        for parameter_name, parameter in model.named_parameters():
            # FSDP takes the mean over batches.
            grad = hf.whole(parameter.grad) * config.dp_size
            hf.assert_near(grad, grads[parameter_name], parameter_name)
        (dispatcher,) = pool.dispatchers
        return dispatcher.world_size, dispatcher.stats().exchanges


@pytest.mark.parametrize(
    ("name", "ranks", "layouts"),
    [*((name, 2, OF_TWO) for name in hf.MODELS), ("qwen3_moe", 4, OF_FOUR)],
)
def test_from_pretrained(name, ranks, layouts, tmp_path):
    hf.whole_model(name).save_pretrained(tmp_path)
    for results in run_ranks(loaded, ranks, name, tmp_path, layouts):
        for sizes, (world_size, exchanges) in zip(layouts, results, strict=True):
            assert world_size == sizes["ep_size"]
            assert exchanges["dispatch"] == exchanges["combine_backward"] == 2


def checkpointed(rank, group):
    logits, grads = hf.expected(hf.whole_model("mixtral"), 2)
    with register(max_tokens_per_rank=10) as pool:
        model = hf.shard_experts(hf.whole_model("mixtral"), hf.mesh_of(group))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        hf.assert_near(hf.forward_backward(model.train(), rank), logits[rank], "logits")
        hf.assert_gradients(model, grads)
        return pool.dispatchers[0].stats().exchanges


def test_gradient_checkpointing():
    for exchanges in run_ranks(checkpointed, 2):
        assert exchanges["dispatch"] == 2 * exchanges["dispatch_backward"] == 4


def compiled(rank, group):
    logits, grads = hf.expected(hf.whole_model("olmoe"), 2)
    with register(max_tokens_per_rank=10, capacity=40):
        model = hf.shard_experts(hf.whole_model("olmoe"), hf.mesh_of(group))
        with torch.no_grad():
            model(hf.tokens_of(rank))  # makes the dispatcher, which compiled code cannot
        in_one_graph = torch.compile(model, backend="aot_eager", fullgraph=True)
        hf.assert_near(hf.forward_backward(in_one_graph, rank), logits[rank], "logits")
        hf.assert_gradients(model, grads)
        return True


def test_compiled_in_one_graph():
    assert all(run_ranks(compiled, 2, timeout=200))
