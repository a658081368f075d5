"""Lightning: what a ``LightningModule``'s ``configure_model`` calls under ``ModelParallelStrategy``.

The strategy makes the device mesh, by default with all of a node for tensor parallelism, and leaves the
sharding to the module::

    class Task(lightning.LightningModule):
        def configure_model(self):
            shard_layers(self, self.model, self.model.layers)

    strategy = ModelParallelStrategy(data_parallel_size=8, tensor_parallel_size=1)
    trainer = lightning.Trainer(strategy=strategy, ...)
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from ragged_fsdp.api import FSDPModule, fully_shard

__all__ = ["shard_layers"]


def shard_layers(task: nn.Module, model: nn.Module, layers: Iterable[nn.Module], **options: Any) -> None:
    """Shard each layer, then the rest of ``model``, over the data-parallel part of the task's device mesh.

    ``model`` is the module that ``training_step`` calls: the task itself is never called, so parameters
    must not be left to it. ``options`` go to :func:`ragged_fsdp.fully_shard`, such as ``mp_policy`` and
    ``orig_param_policy``. Lightning may call ``configure_model`` again; what is sharded stays as it is.
    """
    mesh = getattr(task, "device_mesh", None)
    if mesh is None:
        raise ValueError(
            f"{type(task).__name__} has no device mesh; call shard_layers in configure_model, with "
            "Trainer(strategy=ModelParallelStrategy())"
        )
    for module in (*layers, model):
        if not isinstance(module, FSDPModule):
            fully_shard(module, mesh=mesh["data_parallel"], **options)
