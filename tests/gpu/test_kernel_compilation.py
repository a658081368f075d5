"""Every kernel, as it is launched, becomes machine code: for the GPUs that it runs on, without one of them.

A driver that stands in for CUDA's compiles what the launchers ask for, with their types, alignments and
constants, down to the code that a GPU would load, and launches nothing. What registers spill to memory is
asserted; more shared memory than the GPU has is an error of Triton. So is, for the kernels of FP8, that no
register is read that nothing wrote: with one, codes had the bits of whatever was there.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

from interpreted import INTERPRETED

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler, not its interpreter")

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""That a thread block may have, by compute capability."""
KNOWN_SPILLS = {  # bytes of a thread, by kernel and warps
    ("step_kernel", 32): 1280,  # blocks of 128 x 128: with all the threads there can be, registers are few
    ("quantize_kernel", 8): 176,  # of 64 registers, so that four blocks run at once
    ("decode_tiles_kernel", 4): 16,
    ("_wire_repeat", 16): 1000,
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Compiled(NamedTuple):
    """What the assembler says of one kernel."""

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int


class Compiler:
    """A driver of Triton for a GPU that is not there; keeps what was compiled."""

    def __init__(self, capability):
        self.capability = capability
        self.compiled = []
        properties = {"max_shared_mem": SHARED_BYTES[capability]}
        self.utils = SimpleNamespace(load_binary=self._load, get_device_properties=lambda device: properties)

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability  # kernels are kept by device

    def get_current_stream(self, device):
        return 0

    def launcher_cls(self, source, metadata):
        self.warps = metadata.num_warps
        return lambda *arguments: None

    def _load(self, name, code, shared_bytes, device):
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(code)
            file.flush()
            said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
        used = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said.stdout)}
        spilled_bytes = used["STACK"] + used["LOCAL"]
        self.compiled.append(Compiled(name, used["REG"], spilled_bytes, shared_bytes, self.warps))
        return None, None, used["REG"], 0, 1024


@pytest.fixture(params=SHARED_BYTES)
def compiler(request, tmp_path):
    made = Compiler(request.param)
    with (
        mock.patch.object(triton.runtime.driver, "_active", made),
        mock.patch.object(triton.knobs.cache, "dir", str(tmp_path)),
    ):
        yield made
    print(made.capability, *made.compiled, sep="\n")


def assert_lean(compiler, *names):
    """All these were compiled, and none spills more than is known."""
    assert {kernel.name for kernel in compiler.compiled} == set(names)
    for kernel in compiler.compiled:
        assert kernel.spilled_bytes <= KNOWN_SPILLS.get((kernel.name, kernel.warps), 0), kernel


def read_but_never_written(source):
    """Registers of PTX that are named, but nowhere as what an instruction writes."""
    source = re.sub(r"//.*", "", source)
    source = re.sub(r"^\s*(\.loc.*|[$%]\S*:\s*)$", "", source, flags=re.MULTILINE)  # places and labels
    # an instruction with its guard, and its first operand, which may be several registers in braces
    first = r"(?:^|[;{}])\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(\{[^}]*\}|[^,;{}\[]+)"
    written = [operand for name, operand in re.findall(first, source) if not name.startswith(("st.", "bra"))]
    return set(re.findall(r"%[a-z]+\d+", source)) - set(re.findall(r"%[a-z]+\d+", " ".join(written)))


def test_adam(compiler):
    from ragged_fsdp.optim import Adam8bit, AdamW8bit
    from ragged_fsdp.optim.adam8bit import optimizer as of_adam

    stochastic, wide = {"stochastic_rounding": True}, {"block_shape": (128, 128), "maximize": True}
    cases = ((AdamW8bit, {}), (Adam8bit, stochastic), (AdamW8bit, wide), (AdamW8bit, {"block_shape": None}))
    with mock.patch.object(of_adam._Slot, "has_kernel", True):
        for kind, options in cases:
            for dtype in FLOATS[:2]:
                params = [
                    torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in ((256, 512), (36, 300), (96,))
                ]
                for param in params:
                    param.grad = torch.zeros_like(param)
                kind(params, weight_decay=0.1, **options).step()
    assert_lean(compiler, "step_kernel", "exact_step_kernel")


def test_passes_of_muon(compiler):
    from ragged_fsdp.optim.muon import passes_kernel

    with mock.patch.object(passes_kernel, "_table", lambda rows, device: torch.from_numpy(rows)):
        for dtype in FLOATS:
            for address in (4096, 4098):
                rows, device = np.array([[address, address, address, 4096]]), torch.device("cpu")
                for nesterov in (True, False):
                    passes_kernel.launch_momentum_rows(
                        rows, (dtype, dtype, torch.bfloat16), device, 0.9, nesterov
                    )
                passes_kernel.launch_apply_rows(rows, (dtype, torch.bfloat16), device, 0.9)
    assert_lean(compiler, "_momentum_kernel", "_apply_kernel")


def test_newton_schulz(compiler):
    from ragged_fsdp.optim.muon import newton_schulz_kernel
    from ragged_fsdp.optim.muon.newton_schulz import per_iteration

    if compiler.capability < 90:
        pytest.skip("runs from Hopper on")
    for shape in ((2, 256, 256), (2, 128, 640), (1, 640, 128)):
        x = torch.zeros(shape, dtype=torch.bfloat16)
        newton_schulz_kernel.orthogonalize_symmetric(x, per_iteration((3.4445, -4.7750, 2.0315), 5), 1e-7)
    assert_lean(compiler, "_gram_kernel", "_product_kernel")


def test_experts(compiler):
    from ragged_fsdp.experts import permute_triton

    tokens, per_token, groups = 64, 8, 384
    chosen = torch.zeros(tokens, per_token, dtype=torch.int64)
    for number_of in (None, torch.zeros(groups + 1, dtype=torch.int64)):
        find = permute_triton.count(chosen, groups, number_of, torch.zeros(groups, dtype=torch.int64))
        for parts in (1, 4, 8):
            find(torch.zeros(parts + 1, dtype=torch.int64))
        row_of = find()
    slot_of, kinds = torch.zeros_like(row_of), torch.zeros(groups, dtype=torch.int64)
    permute_triton.invert(row_of, slot_of)
    permute_triton.label(slot_of, chosen, kinds, slot_of)
    permute_triton.find_arrival(kinds, kinds, kinds, slot_of)
    for channels in (7168, 2880, 100):
        for dtype in FLOATS[:2]:
            x, weights = (
                torch.zeros(tokens, channels, dtype=dtype),
                torch.zeros(tokens, per_token, dtype=dtype),
            )
            rows = torch.zeros(len(row_of), channels, dtype=dtype)
            permute_triton.combine_backward(x, rows, weights, slot_of, (rows, weights))
            permute_triton.pick(x, slot_of, rows, per_token)
            permute_triton.take(x, row_of, rows)
            for given in (None, weights):
                permute_triton.weighted_sum(rows, given, row_of, x)
            permute_triton.fill_rest(rows, torch.zeros(16, dtype=torch.int64))
            permute_triton.take(rows, row_of, rows)
            permute_triton.weighted_sum(rows, None, row_of, rows, every=False)
    kernels = ("_count_groups", "_find_rows", "_invert", "_label", "_find_arrival", "_take_rows")
    kernels += ("_pick_rows", "_fill_rest", "_sum_rows", "_back_to_rows")
    assert_lean(compiler, *kernels)


def test_sums(compiler):
    from ragged_fsdp.fsdp.reduce import sums_triton

    for ranks, numel in ((8, 4096), (64, 4095)):
        for dtype in FLOATS:
            for out in FLOATS:
                rows = torch.zeros(ranks, numel, dtype=dtype)
                sums_triton.sum_rows(rows, torch.zeros(numel, dtype=out), ranks)
    assert_lean(compiler, "_sum_rows_kernel")


def test_codes(compiler):
    from ragged_fsdp import block_codes
    from ragged_fsdp.fsdp.gather.codes import MessageLayout
    from ragged_fsdp.fsdp.gather.codes_triton import Decoder, encode
    from ragged_fsdp.fsdp.parts.plan import GroupTensors, make_plan
    from ragged_fsdp.policy import BlockCodes, Tiles

    shape = (256, 384)
    for kind in ("int8", "float8_e4m3fn"):
        for tile in ((128, 128), (32, 32), (1, 128)):
            codes = BlockCodes(kind, tile)
            for dtype in FLOATS:
                bands = torch.zeros(shape, dtype=dtype).view(-1, *block_codes.band_shape(codes, shape[1]))
                packed = torch.empty(bands.shape, dtype=block_codes.code_dtype(codes))
                encode(bands, codes, (packed, torch.empty(bands.shape[0], bands.shape[2])))
                for stored in ((), (tile,)):
                    grain = Tiles(*tile) if stored else codes.granularity
                    tensors = GroupTensors(
                        ["w"], [shape], [grain.block_numel(shape)], [dtype], None, tiles=stored
                    )
                    layout = MessageLayout(make_plan(tensors, 2), (codes,))
                    message = torch.zeros(2, layout.part_bytes, dtype=torch.uint8)
                    out = torch.empty(layout.plan.layout.buffer_numel, dtype=dtype)
                    Decoder(layout, out.device)(message, out)
    assert_lean(compiler, "encode_kernel", "decode_kernel", "decode_tiles_kernel")


def test_fp8(compiler):
    from ragged_fsdp.fp8 import kernels
    from ragged_fsdp.fp8.groups import groups_of, one_group
    from ragged_fsdp.tiling import tiled

    if compiler.capability != 90:
        pytest.skip("runs on Hopper alone")
    rows, inner, columns, groups = 512, 272, 384, 20
    kernels.groups_of(torch.full((groups,), 16), rows)
    seen = torch.zeros(1, dtype=torch.int32)
    with mock.patch.object(torch.Tensor, "is_cuda", True):
        for cut, matrices in (
            (one_group(rows, torch.device("cpu")), 1),
            (groups_of(torch.full((groups,), 16), rows), groups),
        ):
            for dtype in (torch.float32, torch.bfloat16):
                x, dy = (torch.zeros(rows, size, dtype=dtype) for size in (inner, columns))
                for note in (None, seen):
                    codes, scales, turned, turned_scales = kernels.quantize(x, cut, note)
                    _, _, dy_turned, dy_turned_scales = kernels.quantize(dy, cut, note, rowwise=False)
                    dy_codes, dy_scales, _, _ = kernels.quantize(dy, cut, note, turned=False)
            weight = torch.zeros(matrices, columns, inner, dtype=torch.uint8)
            weight_scales = torch.zeros(matrices, 3, 3)
            for stored in (weight, tiled(weight, (128, 128))):
                operands = stored.view(codes.dtype), weight_scales, cut, torch.bfloat16
                kernels.product(codes, scales, *operands)
                kernels.lying_product(dy_codes, dy_scales, *operands)
            for dtype in (torch.bfloat16, torch.float32):
                kernels.weight_gradient(dy_turned, dy_turned_scales, turned, turned_scales, cut, dtype)
            kernels.transpose(weight.view(codes.dtype))
            for way in (True, False):
                kernels.untile(tiled(weight, (128, 128)).view(codes.dtype), weight.shape, way)
    names = ("quantize", "groups", "product", "lying_product", "weight_gradient", "transpose", "untile")
    assert_lean(compiler, *(f"{name}_kernel" for name in names))
    sources = list(Path(triton.knobs.cache.dir).glob("*/*.ptx"))
    assert sources
    for source in sources:
        assert not read_but_never_written(source.read_text()), source.name


def test_holding_a_stream(compiler):
    from benchmarks.step import spin

    from ragged_fsdp.predict import measure_limits

    for seconds in (1e-6, 0.05, 3.0):
        measure_limits.hold_multiprocessors(1, seconds, measure_limits.room_to_hold(torch.device("cpu")))
    for held in compiler.compiled:  # threads of a product take 64 registers at least, and are 128 at least
        assert 65536 - 64 * 128 < held.registers * held.warps * 32 <= 65536, held
    made = torch.zeros(4096, dtype=torch.uint8)
    with mock.patch.dict(spin._TIMES, {0: torch.zeros(1, dtype=torch.int64)}):
        spin.stamp(0)
        spin.hold_since(0, 1000)
        spin.spin_ns(1000)
        for start in (0, 1, 8):
            spin.repeat_by_channels(
                made[start : start + 1024], made[2048 + start :][:256], parts=4, skipped=1
            )
    assert_lean(compiler, "_hold", "_wire_stamp", "_wire_spin", "_wire_repeat")
