"""torchtitan's trainer on CPU ranks, started by torchrun with ``--module torchtitan_on_cpu --config ...``.

It asks its device for memory and names, which CPUs do not have, and its attention runs on GPUs only: both are
replaced here. The rest is ``torchtitan.train`` and the configs of ``examples/torchtitan_ragged.py``.
"""

import types

import torch
from torch import _utils

__all__ = ["ragged", "stock"]


def _on_cpu(config):
    from torchtitan.models.common.attention import ScaledDotProductAttention

    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.mixed_precision_param = "float32"  # losses can be compared to many digits
    config.training.local_batch_size, config.training.seq_len = 2, 32
    return config


def ragged():
    """The config of the example."""
    import torchtitan_ragged

    return _on_cpu(torchtitan_ragged.debugmodel())


def stock():
    """What the example would be without ragged_fsdp."""
    import torchtitan_ragged
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.models.llama3 import model_registry

    config = torchtitan_ragged.debugmodel()
    config.model_spec = spec = model_registry("debugmodel")
    parallelize = spec.parallelize_fn

    def with_plain_sums(*arguments, **keywords):
        model = parallelize(*arguments, **keywords)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
        return model

    spec.parallelize_fn = with_plain_sums
    return _on_cpu(config)


def main() -> None:
    """``torchtitan.train`` where CPUs count as the accelerator."""
    none = lambda device=None: None  # noqa: E731
    answers = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "empty_cache": none,
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=2**30),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": none,
    }
    for name, answer in answers.items():
        setattr(torch.cpu, name, answer)
    _utils._get_available_device_type = lambda: "cpu"  # asked when torchtitan is imported
    from torchtitan.train import main

    main()


if __name__ == "__main__":
    main()
