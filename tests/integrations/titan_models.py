"""torchtitan's debug models, cut to a few layers, and what they lose in four steps on two CPU ranks."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

# Skips whatever imports this file.
utils = pytest.importorskip(
    "torchtitan.tools.utils", reason="torchtitan is not installed; ./dev test-integrations has it"
)
# Without a GPU torchtitan takes CUDA all the same; the modules below read this when they are imported.
utils.device_type, utils.device_module = "cpu", torch.cpu

from torchtitan.config import (  # noqa: E402
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
    apply_overrides,
)
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel  # noqa: E402
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug  # noqa: E402

from symm_a2a.integrations.torchtitan import use_symm_a2a  # noqa: E402

STEPS, TOKENS, MOE_LAYERS = 4, 16, 2
CHECKPOINTING = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
MODELS = {"deepseek_v3": (deepseek_v3_debugmodel, 3), "qwen3": (qwen3_moe_debug, 2)}
"""The debug config, and how many of its layers make two with experts."""


def config_of(name, checkpointing="none", *, compiled=False, dtype="float32"):
    registered, num_layers = MODELS[name]
    config = registered()
    model = config.model_spec.model
    model.layers = model.layers[:num_layers]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training = TrainingConfig(
        local_batch_size=1, seq_len=TOKENS, steps=STEPS, mixed_precision_param=dtype, disable_cuda_graphs=True
    )
    config.parallelism = ParallelismConfig(
        data_parallel_shard_degree=-1, expert_parallel_degree=2, spmd_backend="partial_dtensor"
    )
    config.activation_checkpoint = CHECKPOINTING[checkpointing]
    config.compile = CompileConfig(enable=compiled)
    return config


def symm_deepseek():
    """A function of a config registry, as --config names one."""
    config = config_of("deepseek_v3", "selective")
    use_symm_a2a(config)
    return config


def finish(config):
    """Do what torchtitan's trainer does to a config before it builds the model."""
    config.model_spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    return config


def build(config):
    """Build, parallelize and initialise a model as torchtitan's trainer does, over gloo."""
    dims = ParallelDims.from_config(config.parallelism, 2)
    set_spmd_backend(config.parallelism.spmd_backend)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model = config.model_spec.parallelize_fn(
        model, parallel_dims=dims, training=config.training, parallelism=config.parallelism,
        compile_config=config.compile, ac_config=config.activation_checkpoint, dump_folder="",
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo has no reduction with a factor.
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


def train(config, rank):
    """Return the losses of four steps."""
    model = build(finish(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(config.model_spec.model.vocab_size, (1, TOKENS + 1), generator=gen)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
