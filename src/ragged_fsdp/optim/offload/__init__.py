"""Optimizer state in the host's memory: it comes to the device for the update, and goes back.

The parameters of an optimizer are taken in *parts*, some tens of megabytes of state each. The state of a part
is one pinned buffer on the host. A step moves it through three slots of device memory, which exist only while
the step runs::

    copies in     part 0 | part 1 | part 2 | part 3 | ...
    update                 part 0 | part 1 | part 2 | part 3 | ...
    copies out                      part 0 | part 1 | part 2 | part 3 | ...

The host waits for nothing: ``optimizer.state`` does, when it is read, until the copies out have arrived. Each
part is stepped by a copy of the optimizer that knows its parameters alone, so the arithmetic is the
optimizer's own. An optimizer whose parameters must be stepped together (Muon, which divides its matrices over
the ranks; any that is not torch's or ours) has one part.

    wrapper   ``offload_state``, and what it adds to the class of an optimizer
    lanes     all parts: cut from the parameters; fetched, stepped and stored on the streams of each device
    part      one part: its state on the host, and the slot it takes on the device
"""

from ragged_fsdp.optim.offload.wrapper import OffloadedState, offload_state

__all__ = ["OffloadedState", "offload_state"]
