"""Modules that not every rank runs: a tower for images on ranks whose batch has none.

A collective needs all ranks, so ranks must know of each other's runs. Between two modules that all ranks
start there is a gap in which a conditional one may run. In that gap, once per forward, every rank says which
conditional modules it is about to run: a rank that runs one says so there, the others where they have come to
the end of the gap. Nobody runs it: nothing happens. Somebody does::

                     rank that runs it                       rank that does not
    vote             before its forward                      before the next module, or at the forward's end
    gather           all that is sharded below, in one order, on all ranks
    until backward   gathered: no rank is alone in a gather  released at once
    end of backward  say which parameters have gradients     say none has
                     reduce its gradients, release           reduce zeros for those of others

So the backward of the module, a second run, and what a checkpoint computes again need no collective at all,
whatever the loss depends on. The price is memory on ranks that run it: it is not gathered again in backward.

Where it trains, what it computes needs gradients, and with it all that modules behind it compute from it,
frozen ones too. On a rank without a run they might not, and its backward would come past fewer modules, or
could not start. So inputs of modules behind it, and the outputs of the forward, need gradients on every rank.

The gap is learnt: until a module has run, ranks vote in every gap; then only in the one where it ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from ragged_fsdp.agreement import largest
from ragged_fsdp.collectives import explain_failure
from ragged_fsdp.fsdp.autograd import in_backward, tensors_in
from ragged_fsdp.fsdp.runtime.group import ParamGroup, Residence
from ragged_fsdp.torch_internals import reaches_host

__all__ = ["Conditional", "Conditionals"]

_HOST = torch.device("cpu")


class Conditional:
    """One such module, with all that is sharded below it."""

    def __init__(self, name: str, turns: Sequence[Any]) -> None:
        self.name = name
        self._turns = tuple(turns)
        self.runs: bool | None = None
        """What the ranks decided in this forward; None before."""
        self.used = False
        """Whether this rank runs it in this forward."""
        self.by_vote = False
        """Whether this rank ran it last after a vote, and not in a forward that began inside of it."""
        self.pending = False
        """Whether a backward of this rank may need the gathered weights."""
        self.owed = False
        """Whether the ranks have still to reduce it; the same on all of them."""
        self.gaps: dict[Any, int] = {}
        """Per root of a forward: behind how many starts of other modules it runs."""
        self._needed = False

    @property
    def groups(self) -> list[ParamGroup]:
        """All that is sharded in it, asked anew each time: when experts have moved there are other groups."""
        return [group for turn in self._turns for group in turn.groups]

    @property
    def has_trainable(self) -> bool:
        """Whether a parameter of it trains."""
        return any(param.sharded.requires_grad for group in self.groups for param in group.params)

    def gather(self, *, keep: bool) -> None:
        """With all ranks: gather anew, since some may have kept it; without ``keep`` release it at once."""
        self.release()
        for group in self.groups:
            group.unshard()
            if not keep:
                group.wait_for_unshard()
                group.reshard()

    def check_gathered(self, group: ParamGroup) -> None:
        """Raise instead of starting a gather in which this rank would be alone."""
        if group.residence is Residence.SHARDED:
            raise RuntimeError(
                f"{group.label}: conditional module '{self.name}' is used after its weights were released, "
                "by the end of a backward or by hand, and other ranks may not gather with this one. Before a "
                "backward that is not the last call set_is_last_backward(False)."
            )

    def begin_forward(self) -> None:
        """Nothing is decided."""
        self.runs, self.used, self._needed = None, False, False

    def note_run(self, output: Any) -> None:
        """A forward of it ended on this rank: see whether a backward can come."""
        computed_again = not torch.is_grad_enabled()  # perhaps, by a checkpoint
        self._needed |= computed_again or any(tensor.requires_grad for tensor in tensors_in(output))

    def end_forward(self, trains: bool) -> None:
        """Release the weights unless a backward may need them."""
        self.pending |= trains and self.used and self._needed
        self.used = self._needed = False
        self.release_unused()

    def end_backward(self, somewhere: Iterator[int], *, is_last: bool) -> None:
        """Reduce with the other ranks; then nobody needs the weights.

        ``somewhere`` says of each parameter whether a rank has a gradient of it.
        """
        for group in reversed(self.groups):
            group.hand_over()  # autograd lets this stream wait for those of the backward
            group.post_backward(release=is_last, zeros=list(islice(somewhere, len(group.params))))
        # some rank may have more to come, and this one cannot know
        self.owed = not is_last or not all(group.settings.reduce_grads for group in self.groups)
        self.pending &= not is_last

    def release_unused(self) -> None:
        """Free what the vote has gathered, unless this rank runs it or a backward may need it."""
        if self.runs and not self.used and not self.pending:
            self.release()

    def release(self) -> None:
        """Free what is gathered."""
        for group in self.groups:
            group.to_sharded()

    def forget(self) -> None:
        """After a failed iteration."""
        self.begin_forward()
        self.pending = self.owed = False


class Conditionals:
    """All of them below one root, often none, and the votes of a forward."""

    def __init__(
        self,
        found: Sequence[Conditional] = (),
        groups: Sequence[dist.ProcessGroup | None] = (),
        device: torch.device = _HOST,
    ) -> None:
        self.all = list(found)
        self._pgs = [pg for pg in groups if pg is not None and pg.size() > 1]
        # over the host where it can be: the answer of the device would come behind all it has still to do
        self._device = _HOST if all(map(reaches_host, self._pgs)) else device
        self._root: Any = None
        self._undecided: list[Conditional] = []
        self._held: list[Conditional] = []
        """Gathered because others run them; this rank may run them too while it is in the gap."""
        self._starts = 0
        self._trains = False
        self.trained: list[Conditional] = []
        """Modules on which ranks may part in this forward and that have a parameter that trains."""

    def begin(self, root: Any) -> None:
        """A forward starts at ``root``; in one that starts inside a conditional module, or that a backward
        computes again, nobody is asked."""
        if in_backward():
            return
        self._root, self._starts, self._trains = root, 0, torch.is_grad_enabled()
        self._undecided, self._held = [] if root.under is not None else list(self.all), []
        self.trained = [each for each in self._undecided if self._trains and each.has_trainable]
        for each in self.all:
            each.begin_forward()
            each.by_vote &= root.under is not each

    def pass_gap(self) -> bool:
        """This rank starts a module that all ranks start, or ends the forward, and runs none before it.

        Whether the module's inputs may need gradients on some ranks and not on others.
        """
        here = self._starts  # behind none there is no gap: the root starts
        while here and any(each.gaps.get(self._root, here) == here for each in self._undecided):
            if not self._vote(None):
                break
        for each in self._held:
            each.release_unused()
        self._held = []
        self._starts += 1
        return any(each.gaps.get(self._root, self._starts) <= here for each in self.trained)

    def run(self, wanted: Conditional) -> None:
        """This rank runs one: gather it with the others, unless they have in this forward."""
        if wanted.runs and wanted.used:
            return
        gap = wanted.gaps.get(self._root, self._starts)
        if gap != self._starts or wanted.runs is False:
            raise RuntimeError(
                f"conditional module '{wanted.name}': this rank runs it after {self._starts} starts of other "
                f"modules; its place is after {gap}, where other ranks are asked. Run it first at one place."
            )
        wanted.used = wanted.by_vote = True
        if wanted.runs is None:
            self._vote(wanted)

    def end_forward(self) -> None:
        """The forward that began last is over."""
        if self._root is None or in_backward():
            return
        self.pass_gap()
        self._root = None
        for each in self.all:
            each.end_forward(self._trains)

    def end_backward(self, *, is_last: bool) -> None:
        """Reduce, with all ranks and in one order, what some of them ran.

        The ranks tell each other first which parameters have gradients: what no backward reached stays
        without one on every rank.
        """
        owed = [each for each in self.all if each.owed]
        if not owed:
            return
        groups = [group for each in owed for group in reversed(each.groups)]
        said = [int(has) for group in groups for has in group.has_gradients()]
        if any(group.settings.reduce_grads for group in groups):
            said = self._agree("which parameters of conditional modules have gradients", owed, said)
        somewhere = iter(said)
        for each in owed:
            each.end_backward(somewhere, is_last=is_last)

    def abort_forward(self) -> None:
        """The forward raised: the next one gathers anew."""
        self._root = None
        for each in self.all:
            if each.runs:
                each.release()
            each.begin_forward()

    def _vote(self, wanted: Conditional | None) -> bool:
        """Hear what the ranks are about to run, and gather it with them; whether there was anything."""
        here, names = self._starts, _names(self._undecided)
        said = [*(int(each is wanted) for each in self._undecided), here, -here]
        said = self._agree("vote on conditional modules", self._undecided, said)
        most, fewest = said[-2], -said[-1]
        if most != fewest:
            raise RuntimeError(
                f"conditional modules {names}: some ranks vote after {fewest} starts of other modules, some "
                f"after {most}; all ranks must start those in the same order."
            )
        chosen = [each for each, runs in zip(self._undecided, said) if runs]
        for each in chosen:
            each.runs, each.gaps[self._root] = True, here
            each.owed |= self._trains
            # a rank that is still in the gap may run what others have asked for
            each.gather(keep=wanted is not None or each.pending)
        self._held += chosen
        if not chosen:  # all ranks have come to the end of the gap
            for each in self._undecided:
                if each.gaps.get(self._root) == here:
                    each.runs = False
        self._undecided = [each for each in self._undecided if each.runs is None]
        return bool(chosen)

    def _agree(self, phase: str, about: Sequence[Conditional], said: list[int]) -> list[int]:
        """The largest of what the ranks say, place by place."""
        for pg in self._pgs:
            with explain_failure(phase, _names(about), pg):
                said = largest(said, pg, self._device)
        return said


def _names(conditionals: Sequence[Conditional]) -> str:
    return ", ".join(f"'{each.name}'" for each in conditionals)
