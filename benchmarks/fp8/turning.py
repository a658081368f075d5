"""The input gradient of experts: a weight turned by the product that reads it, or once before; ms by rows.

    PYTHONPATH=src:. python benchmarks/fp8/turning.py --out benchmarks/fp8/turning.json

The least of eight launches on one GPU, kept busy until each is queued. The weights are those of 64 experts of
GPT-OSS-120B's gate_up, in rows and in the order of tiles. ``fp8/hopper.py`` has the number of rows from which
it turns a weight once.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest import mock

import torch
from benchmarks.fp8.products import BF16, coded, least_ms, normal
from benchmarks.saving import save

from ragged_fsdp.fp8 import hopper, kernels

EXPERTS, INNER, COLUMNS = 64, 5760, 2880
ROWS = (64, 128, 256, 384, 512, 768, 1024)


def measured(rows: int) -> dict[str, list[float | str]]:
    """Turned on the way, and before, for a weight in rows and one in tiles."""
    counts = torch.full((EXPERTS,), rows, device="cuda")
    groups = kernels.groups_of(counts, EXPERTS * rows)
    codes, scales, _, _ = kernels.quantize(normal(EXPERTS * rows, INNER), groups, None)
    weight, weight_scales = coded(EXPERTS, INNER, COLUMNS)
    found: dict[str, list[float | str]] = {}
    for name, limit in (("on the way", rows), ("before", 0)):
        with mock.patch.object(hopper, "_LYING_ROWS", limit):
            found[name] = [
                least_ms(hopper.product, codes, scales, stored, weight_scales, groups, BF16, True, launches=8)
                for stored in (weight, weight.view(-1))
            ]
    return found


def main() -> None:
    """Measure all numbers of rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file of results (JSON)")
    options = parser.parse_args()
    save(options.out, ms_in_rows_and_in_tiles={str(rows): measured(rows) for rows in ROWS})


if __name__ == "__main__":
    main()
