"""How a config of torchtitan is switched to symmetric memory, and what of it is filled in and logged."""

import importlib
import json
import sys

import pytest
import torch

import symm_a2a
from tests.integrations import titan_models as titan

# isort: split
# What imports torchtitan comes after the module that makes it use the CPU.
from torchtitan.config import ConfigManager
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.token_dispatcher import HybridEPTokenDispatcher, LocalTokenDispatcher
from torchtitan.models.deepseek_v3 import model_registry as deepseek_v3
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import logger

from symm_a2a.integrations.torchtitan import ExchangeSavingAC, SymmEPTokenDispatcher, use_symm_a2a


def dispatchers_of(config):
    return [found for _, found, *_ in config.model_spec.traverse(LocalTokenDispatcher.Config)]


@pytest.mark.parametrize("name", titan.MODELS)
def test_every_layer_with_experts_is_switched_and_filled_in(name):
    config = titan.config_of(name, dtype="bfloat16")
    before = [(of.num_experts, of.top_k) for of in dispatchers_of(config)]
    pool = use_symm_a2a(config, timeout=7, num_programs=9, overflow="drop")
    config.training.local_batch_size = 3
    titan.finish(config)
    layers = dispatchers_of(config)
    assert [(of.num_experts, of.top_k) for of in layers] == before
    assert len(layers) == titan.MOE_LAYERS
    for layer in layers:
        assert type(layer) is SymmEPTokenDispatcher.Config
        assert layer.pool is pool
        E, K = before[0]
        assert layer.ep_config(2) == symm_a2a.EPConfig(
            num_experts=E, top_k=K, hidden_dim=256, max_tokens_per_rank=3 * titan.TOKENS,
            dtype=torch.bfloat16, num_lanes=1, timeout=7, num_programs=9, overflow="drop",
        )  # fmt: skip


def test_a_model_is_built_on_the_meta_device_and_allocates_nothing():
    config = titan.config_of("deepseek_v3")
    pool = use_symm_a2a(config)
    titan.finish(config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    (dispatcher, _) = (block.moe.routed_experts.token_dispatcher for block in list(model.layers.values())[1:])
    assert isinstance(dispatcher, SymmEPTokenDispatcher)
    assert dispatcher.symm is None
    assert pool.dispatchers == ()


def test_the_command_line_is_seen():
    arguments = f"--module {titan.__name__} --config symm_deepseek --training.seq_len 32"
    config = ConfigManager().parse_args([*arguments.split(), "--training.local_batch_size", "5"])
    assert config.activation_checkpoint == SelectiveAC.Config()
    titan.finish(config)
    assert {layer.num_max_tokens_per_rank for layer in dispatchers_of(config)} == {5 * 32}
    assert len({id(layer.pool) for layer in dispatchers_of(config)}) == 1
    assert type(config.activation_checkpoint) is ExchangeSavingAC.Config


def test_what_torchtitan_logs_is_plain(monkeypatch):
    config = titan.config_of("qwen3")
    use_symm_a2a(config)
    warned = []
    monkeypatch.setattr(logger, "warning", warned.append)
    monkeypatch.setattr("torchtitan.config.configurable.logger.warning", warned.append)
    titan.finish(config)
    logged = json.loads(json.dumps(config.model_spec.model.to_dict()))
    dispatcher = logged["layers"][0]["moe"]["routed_experts"]["token_dispatcher"]
    assert dispatcher["dtype"] == "torch.float32"
    assert dispatcher["num_max_tokens_per_rank"] == titan.TOKENS
    assert "pool" not in dispatcher
    assert not [text for text in warned if "JSON" in text]


def test_selective_checkpointing_saves_exchanges_beside_its_own_operators():
    config = titan.config_of("qwen3", "selective")
    use_symm_a2a(config)
    use_symm_a2a(config)
    titan.finish(config)
    assert type(config.activation_checkpoint) is ExchangeSavingAC.Config
    saved = config.activation_checkpoint.build(dump_folder="").get_save_ops()
    plain = SelectiveAC.Config().build(dump_folder="").get_save_ops()
    assert saved - plain == set(symm_a2a.checkpoint_ops())
    assert plain < saved


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_other_checkpointing_is_left_alone(checkpointing):
    config = titan.config_of("qwen3", checkpointing)
    use_symm_a2a(config)
    titan.finish(config)
    assert config.activation_checkpoint == titan.CHECKPOINTING[checkpointing]
    assert config.override.imports == []


def test_a_class_of_the_users_own_is_left_alone():
    class MoreAC(SelectiveAC):
        Config = type("Config", (SelectiveAC.Config,), {"__slots__": ()})

    config = titan.config_of("qwen3")
    config.activation_checkpoint = MoreAC.Config()
    use_symm_a2a(config)
    titan.finish(config)
    assert type(config.activation_checkpoint) is MoreAC.Config


def test_cuda_graphs_are_allowed_with_a_capacity_factor_alone():
    config = titan.config_of("qwen3")
    config.training.disable_cuda_graphs = False
    use_symm_a2a(config)
    with pytest.raises(ValueError, match="SymmEPTokenDispatcher"):
        config._validate_cuda_graphs()
    use_symm_a2a(config, non_blocking_capacity_factor=0.5)
    config._validate_cuda_graphs()
    titan.finish(config)
    E, K, C = 64, 8, titan.TOKENS
    assert {layer.ep_config(2).capacity for layer in dispatchers_of(config)} == {C * min(K, E // 2)}
    # Of eight ranks one has eight experts, of sixteen it has four.
    assert dispatchers_of(config)[0].ep_config(16).capacity == 8 * C * 4


def test_what_a_dispatcher_has_already_is_kept():
    config = titan.config_of("deepseek_v3")
    config.model_spec = deepseek_v3(
        "debugmodel", moe_comm_backend="hybridep", non_blocking_capacity_factor=0.25
    )
    for layer in dispatchers_of(config):
        assert type(layer) is HybridEPTokenDispatcher.Config
        layer.pad_multiple = 16
    use_symm_a2a(config, num_max_tokens_per_rank=100)
    E, K = 8, 3
    for layer in dispatchers_of(config):
        cfg = layer.ep_config(2)
        assert (cfg.pad_multiple, cfg.max_tokens_per_rank) == (16, 100)
        assert cfg.capacity == 224  # of 2 * 100 * 3 rows a quarter, 4 * 15 to pad, up to a multiple of 16
    assert (layer.num_experts, layer.top_k) == (E, K)


def test_layers_of_multi_token_prediction_are_switched_too():
    config = titan.config_of("deepseek_v3")
    config.model_spec = deepseek_v3("debugmodel", num_mtp_layers=1)
    pool = use_symm_a2a(config)
    titan.finish(config)
    (predicting,) = config.model_spec.model.mtp_layers
    dispatcher = predicting.moe.routed_experts.token_dispatcher
    assert dispatcher.ep_config(2).max_tokens_per_rank == titan.TOKENS
    assert dispatcher.pool is pool


def test_one_rank_for_all_experts_is_refused():
    config = titan.config_of("qwen3")
    use_symm_a2a(config)
    config.parallelism.expert_parallel_degree = 1
    with pytest.raises(ValueError, match="expert_parallel_degree > 1"):
        titan.finish(config)


def test_a_model_without_experts_is_an_error():
    config = llama3_debugmodel()
    for spec in (config.model_spec, None):
        config.model_spec = spec
        with pytest.raises(symm_a2a.ConfigError, match="routed experts"):
            use_symm_a2a(config)


def test_the_error_without_torchtitan_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "torchtitan"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "symm_a2a.integrations.torchtitan")
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(symm_a2a.EnvironmentUnsupportedError, match=r"symm-a2a\[integrations\]"):
        importlib.import_module("symm_a2a.integrations.torchtitan")
