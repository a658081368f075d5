"""What a type checker knows of the public names. Checked by mypy (``make lint``), never run."""

from typing import assert_type

import torch
from torch import nn

import ragged_fsdp
from ragged_fsdp import describe, fully_shard
from ragged_fsdp.description import Description
from ragged_fsdp.optim import AdamW8bit

model = fully_shard(nn.Linear(2, 2), reduction="two_level")
model.set_requires_gradient_sync(False)  # FSDPModule's
model.parameters()  # nn.Module's
model(torch.zeros(2)).sum().backward()
fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])[0].reshard()
fully_shard(nn.Linear(2, 2), reduction="ring")  # type: ignore[call-overload]
fully_shard(nn.Linear(2, 2), granularity=None)  # type: ignore[call-overload]
AdamW8bit(model.parameters(), lr=1e-3, stochastic_rounding=True)
AdamW8bit(model.parameters(), stochastic=True)  # type: ignore[call-arg]
assert_type(describe(model), Description)
ragged_fsdp.weights.load(model, "folder")
ragged_fsdp.optim.Muon(model.named_parameters(), lr=1e-2).step()
ragged_fsdp.optim.Muon(model.named_parameters(), rate=1e-2)  # type: ignore[call-arg]
