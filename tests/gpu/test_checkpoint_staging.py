"""A save copies behind training: what the next update changes is saved as it was."""

import pytest
import torch

from ragged_fsdp.checkpoint.staging import HostStaging

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_an_update_waits_for_the_copies_and_the_host_does_not():
    buffer = torch.randn(64 << 20, device="cuda")  # 256 MiB: a copy of several milliseconds
    state = {
        "a": buffer[: 32 << 20].view(1 << 15, -1),
        "b": buffer[32 << 20 :],
        "own": torch.ones(3, device="cuda"),
    }
    expected = {name: tensor.cpu() for name, tensor in state.items()}
    staging = HostStaging()
    for _ in range(3):
        torch.cuda._sleep(200_000_000)  # the copies start late
        copied = staging.copy(state)
        assert (
            staging._under_way is not None and not staging._under_way[0].query()
        )  # the host was not held up
        del state["own"]
        torch.zeros(3, device="cuda")  # would take the memory of the tensor that only the state had
        staging.before_update()
        buffer.zero_()
        staging.wait()
        assert all(torch.equal(copied[name], value) for name, value in expected.items())
        assert copied["a"].untyped_storage().data_ptr() == copied["b"].untyped_storage().data_ptr()
        state["own"] = torch.ones(3, device="cuda")
        state["a"].copy_(expected["a"])
        state["b"].copy_(expected["b"])


def test_memory_is_pinned_once():
    state, staging = {"a": torch.ones(1 << 20, device="cuda")}, HostStaging()
    staging.copy(state)
    staging.wait()
    (block,) = staging._blocks
    assert block.is_pinned()
    staging.copy(state)
    staging.wait()
    assert staging._blocks[0] is block
