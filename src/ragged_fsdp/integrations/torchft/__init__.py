"""torchft: replicas of a sharded model, each a job of its own, that go on when others die and rejoin.

A replica is an ordinary job of a few ranks, with ``fully_shard`` inside. torchft's lighthouse knows which
replicas live; :class:`Replicas` averages their gradients between the backward and the optimizer::

    replicas = Replicas(model, optimizer, replica=int(os.environ["REPLICA"]))
    while replicas.step < steps:
        replicas.begin()                       # who takes part is found out beside the forward
        loss = model(batch(replicas.step, replica)).mean()
        loss.backward()
        replicas.average()                     # gradients are now the mean over the replicas that are there
        optimizer.step()
        optimizer.zero_grad()

A replica that dies takes its own gradients with it and no step: the others average again what they have. One
that comes, or fell behind, copies the state of the same rank of a peer and takes part from the next step on.

    replicas    ``Replicas``: a step of this replica among the others
    first       the weights that replicas begin with
    groups      torchft's process groups, which know who they are made of and when to wait no more
    transport   torchft's way from one replica to another, over ours
"""

from ragged_fsdp.integrations.torchft.replicas import Replicas
from ragged_fsdp.replicas.roll import SplitError
from ragged_fsdp.replicas.steps import Averaged, Change

__all__ = ["Averaged", "Change", "Replicas", "SplitError"]
