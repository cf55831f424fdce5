"""Tiny models of transformers, what they should give, and how near to it fp32 must come.

Batches differ from rank to rank in tokens. The expected logits and gradients are those of the whole model
in one process, the gradients summed over the ranks' batches.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism

MODELS = ("olmoe", "qwen3_moe", "mixtral")
E, K, VOCAB = 8, 2, 40
SHAPES = ((2, 5), (1, 3), (3, 4), (1, 1))
"""(batch, sequence) of each rank: the number of tokens differs."""


def config_of(name, hidden=16):
    common = dict(
        vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=2, num_experts_per_tok=K,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    if name == "olmoe":
        return OlmoeConfig(**common, intermediate_size=24, num_experts=E)
    if name == "mixtral":
        return MixtralConfig(**common, intermediate_size=24, num_local_experts=E)
    return Qwen3MoeConfig(
        **common, intermediate_size=20, moe_intermediate_size=24, num_experts=E, head_dim=hidden // 2,
        norm_topk_prob=True,
    )  # fmt: skip


def whole_model(name, hidden=16):
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config_of(name, hidden), dtype=torch.float32)


def mesh_of(group):
    """All ranks share the experts, and each has tokens of its own."""
    return init_device_mesh("cpu", (dist.get_world_size(group), 1), mesh_dim_names=("ep", "tp"))


def shard_experts(model, mesh, implementation="symm_a2a"):
    layers = range(model.config.num_hidden_layers)
    plan = {rule.replace("*", str(i)): style for i in layers for rule, style in model.ep_plan.items()}
    return apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, ep_implementation=implementation)


def load(folder, config):
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32)


def layout(**sizes):
    return DistributedConfig(**sizes, ep_implementation="symm_a2a")


def tokens_of(rank, shape=None):
    gen = torch.Generator().manual_seed(100 + rank)
    return torch.randint(3, VOCAB, shape or SHAPES[rank], generator=gen)


def loss_of(logits, rank):
    """A sum in which every logit has a factor of its own."""
    gen = torch.Generator().manual_seed(200 + rank)
    return (logits * torch.randn(logits.shape, generator=gen)).sum()


def forward_backward(model, rank):
    logits = model(tokens_of(rank), use_cache=False).logits
    loss_of(logits, rank).backward()
    return logits.detach()


def expected(model, num_batches):
    """The whole model's logits for each rank's batch, and by name its gradients of all of them together."""
    logits = [forward_backward(model, rank) for rank in range(num_batches)]
    return logits, {name: parameter.grad for name, parameter in model.named_parameters()}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_gradients(model, want):
    """The whole gradients of a model whose other parameters every rank has, against those of `expected`."""
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        if not isinstance(grad, DTensor):
            grad = grad.clone()
            dist.all_reduce(grad)
        assert_near(whole(grad), want[name], name)


def assert_near(got, want, what):
    """Within fp32 rounding: 64 times that of the largest number, after two layers and their backward."""
    assert got is not None, what
    assert got.shape == want.shape, what
    error, scale = (got - want).abs().max().item(), want.abs().max().item()
    assert error <= 64 * torch.finfo(torch.float32).eps * scale, f"{what}: off by {error} of {scale}"
