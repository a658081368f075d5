"""Which weights ``codes="fp8"`` sends as codes, by their names."""

import pytest

from ragged_fsdp.weights.codes import coded


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.0.mlp.gate_proj.weight", True),
        ("model.layers.0.self_attn.output_proj.weight", True),
        ("model.embed_tokens.weight", False),
        ("embed.weight", False),
        ("tok_embeddings.weight", False),
        ("lm_head.weight", False),
        ("output.weight", False),
        ("score.weight", False),
        ("classifier.weight", False),
        ("model.layers.0.mlp.gate.weight", False),
    ],
)
def test_codes_leave_embeddings_heads_and_routers(name: str, expected: bool) -> None:
    is_coded = coded("fp8")
    assert is_coded is not None
    assert is_coded(name, (256, 256)) is expected
