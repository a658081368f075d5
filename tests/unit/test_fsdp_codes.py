"""Which code makes and reads block codes."""

import logging

from ragged_fsdp.fsdp import quantized


def test_without_triton_cuda_uses_torch_and_says_so(monkeypatch, caplog):
    choose = quantized._kernels.__wrapped__
    assert choose("cpu") is None
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, "ragged_fsdp"):
        assert choose("cuda") is None
    assert "Triton is not installed" in caplog.text
