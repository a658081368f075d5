"""Weights from a folder into sharded models: right values, no byte twice, refusals that change nothing."""

import io
import pickle
import zipfile
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ragged_fsdp import Rows, fully_shard, weights
from ragged_fsdp.weights import saving, spans
from rank_pool import spmd
from weights_cases import Model, cut_experts, stored, write


def sharded(mesh, *, meta=True, dtype=torch.float32):
    with torch.device("meta" if meta else "cpu"):
        model = Model().to(dtype)
        if not meta:
            for p in model.parameters():
                nn.init.zeros_(p)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, orig_param_policy=lambda n, p: Rows(8) if p.ndim == 3 else None)
    fully_shard(model, mesh=mesh)
    return model


def assert_equal(model, reference, dtype=None):
    theirs = reference.state_dict()
    for name, value in model.state_dict().items():
        ours = value.full_tensor() if isinstance(value, DTensor) else value
        expected = theirs[name].to(dtype) if dtype and theirs[name].is_floating_point() else theirs[name]
        assert torch.equal(ours, expected), name


def init(module):
    module.table.fill_(3.0)


@spmd(1, 3, 4)
def test_every_rank_reads_what_it_holds(rank):
    """Two files, cut experts, tied and frozen weights, meta device, casts, replicas: each byte once."""
    torch.manual_seed(0)
    reference = Model()
    tensors = stored(reference, cut_experts)
    folder = rank.shared_dir / "cut"
    if rank.rank == 0:
        write(folder, tensors)
    dist.barrier()
    meshes = [rank.mesh()]
    if rank.world_size == 4:
        meshes.append(rank.mesh(2, 2, names=("replica", "shard")))
    whole = sum(t.numel() * t.element_size() for t in tensors.values())
    everywhere = sum(b.numel() * 8 for n, b in reference.state_dict().items() if n.endswith("count"))
    for mesh in meshes:
        model = sharded(mesh)
        seen = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spans, "GAP_BYTES", 0)  # or short gaps between these short runs would be read too
            report = weights.load(
                model,
                folder,
                names=cut_experts,
                init=init,
                progress=lambda *done, seen=seen: seen.append(done),
            )
        assert_equal(model, reference)
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.blocks[0].table, reference.blocks[0].table)
        assert model.blocks[0].frozen.requires_grad is False and report.missing == ()
        assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] == report.bytes_read
        read = torch.tensor(report.bytes_read)
        dist.all_reduce(read)
        assert read.item() == whole + (rank.world_size - 1) * everywhere  # buffers are on every rank
    model = sharded(rank.mesh(), dtype=torch.bfloat16)
    weights.load(model, folder, names=cut_experts, init=init)
    assert_equal(model, reference, torch.bfloat16)


@spmd(3)
def test_other_layouts_and_kinds_of_folders(rank):
    """Tensor parallelism, torch's own FSDP, one file, a tied name, and a distributed checkpoint."""
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    torch.manual_seed(0)
    reference = Model()
    own = lambda name, tensor: name  # noqa: E731
    if rank.rank == 0:
        tensors = stored(reference, own)
        tensors["head.weight"] = tensors.pop("embed.weight")
        write(rank.shared_dir / "own", tensors, files=1)
        (rank.shared_dir / "own/model.safetensors.index.json").unlink()
    dist.barrier()
    mesh = rank.mesh()
    model = sharded(mesh, meta=False)
    report = weights.load(model, rank.shared_dir / "own")
    assert report.tensors == 11 and report.unexpected == ()
    assert_equal(model, reference)

    model = Model()
    for dim, name in ((1, "experts"), (2, "experts"), (0, "frozen")):
        block = model.blocks[dim % 2]
        setattr(
            block,
            name,
            nn.Parameter(distribute_tensor(getattr(block, name).detach() * 0, mesh, [Shard(dim)])),
        )
    torch_fully_shard(model.blocks[0].proj, mesh=mesh)
    weights.load(model, rank.shared_dir / "own")
    assert_equal(model, reference)

    source = sharded(mesh, meta=False)
    weights.load(source, rank.shared_dir / "own")
    dcp.save(
        {"model": source.state_dict(), "optim": {"x": torch.ones(3)}}, checkpoint_id=rank.shared_dir / "dcp"
    )
    model = sharded(mesh)
    weights.load(model, rank.shared_dir / "dcp", init=init)
    assert_equal(model, reference)
    file = next((rank.shared_dir / "dcp").glob("__1_*"))
    dist.barrier()
    if rank.rank == 0:
        file.write_bytes(file.read_bytes()[:-10])
    dist.barrier()
    with pytest.raises((ValueError, RuntimeError), match="is truncated"):
        weights.load(model, rank.shared_dir / "dcp")


@spmd(1, 3)
def test_of_a_distributed_checkpoint_only_the_bytes_that_are_held_are_read(rank):
    """Stored whole by one rank, and in boxes by all: each element once; strides, names, computed parts."""
    torch.manual_seed(0)
    reference = Model()
    with torch.no_grad():
        reference.blocks[0].frozen = nn.Parameter(
            torch.randn(5, 3).t(), requires_grad=False
        )  # its strides too
    whole, shards = rank.shared_dir / "whole", rank.shared_dir / "shards"
    if rank.rank == 0:
        run = {"model": reference.state_dict(), "optim": {"x": torch.ones(3)}}
        dcp.save(run, checkpoint_id=whole, no_dist=True)
    dist.barrier()
    held = sum(p.nbytes for p in reference.parameters())
    for folder in (whole, shards):
        model, seen = sharded(rank.mesh()), []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spans, "GAP_BYTES", 0)  # or short gaps between these short runs would be read too
            report = weights.load(model, folder, init=init, progress=lambda *done, to=seen: to.append(done))
        assert_equal(model, reference)
        assert seen[0] == (0, report.bytes_read) and seen[-1] == (report.bytes_read,) * 2
        read = torch.tensor(report.bytes_read)
        dist.all_reduce(read)
        assert read.item() == held + rank.world_size * 2 * reference.blocks[0].count.nbytes
        if folder == whole:
            dcp.save(model.state_dict(), checkpoint_id=shards)

    model = nn.ModuleDict({"up": nn.Linear(24, 7, bias=False), "flipped": nn.Linear(24, 33, bias=False)})
    for layer in model.values():
        fully_shard(layer, mesh=rank.mesh())

    def naming(name, tensor):
        if name == "up.weight":
            return {"blocks.1.proj.weight": tensor}
        return {"embed.weight": tensor.flip(0)}

    for folder in (whole, shards):
        weights.load(model, folder, names=naming, strict="missing")
        assert torch.equal(model["up"].weight.full_tensor(), reference.blocks[1].proj.weight)
        assert torch.equal(model["flipped"].weight.full_tensor(), reference.embed.weight.flip(0))


@spmd(2)
def test_items_of_a_distributed_checkpoint_that_are_not_what_the_index_says(rank):
    """Found before anything changes, on every rank."""
    model = nn.Linear(40, 60, bias=False)
    nn.init.zeros_(model.weight)
    fully_shard(model, mesh=rank.mesh())
    content = {
        "damaged": torch.ones(60, 40),
        "behind": torch.ones(60, 40),
        "renamed": torch.ones(60, 40),
        "no item": torch.ones(60, 40),
        "of one rank": model.weight,
        "codes": torch.ones(60, 40).to(torch.float8_e4m3fn),
        "parameter": nn.Parameter(torch.ones(60, 40)),
        "bomb": torch.ones(60, 40),
    }
    errors = {
        "damaged": r"weight at \(0, 0\) is damaged",
        "behind": r"weight at \(0, 0\) is damaged: (9600 bytes at \d+ do not lie in its|Overlapped)",
        "renamed": r"weight at \(0, 0\) is damaged: File name in directory",
        "no item": r"weight at \(0, 0\) is damaged: File is not a zip file",
        "of one rank": r"weight of shape \(60, 40\) has pieces of 1280 elements, not of all",
        "codes": "weight is stored as torch.float8_e4m3fn",
        "parameter": "damaged: it asks for torch._utils._rebuild_parameter, which is no plain tensor",
        "bomb": "damaged: its byteorder has 1000000 bytes, too many for one tensor",
    }
    for name, error in errors.items():
        folder = rank.shared_dir / name
        if rank.rank == 0:
            dcp.save({"weight": content[name].detach()}, checkpoint_id=folder, no_dist=True)
            file = folder / "__0_0.distcp"
            if name == "damaged":
                file.write_bytes(file.read_bytes().replace(b"FloatStorage", b"FloatSt0rage"))
            if name in ("behind", "renamed"):
                changed = bytearray(file.read_bytes())
                header = changed.rindex(b"PK\3\4", 0, changed.index(b"/data/0"))
                changed[header + (29 if name == "behind" else 26)] += 0x40 if name == "behind" else 1
                file.write_bytes(changed)
            if name == "parameter":
                saved = io.BytesIO()
                torch.save(content[name], saved)
                file.write_bytes(saved.getvalue())
            if name == "bomb":
                with (
                    zipfile.ZipFile(io.BytesIO(file.read_bytes())) as whole,
                    zipfile.ZipFile(file, "w") as made,
                ):
                    for item in whole.namelist():
                        made.writestr(item, whole.read(item))
                    stem = whole.namelist()[0].partition("/")[0]
                    made.writestr(f"{stem}/byteorder", bytes(1000000), zipfile.ZIP_DEFLATED)
            if name in ("parameter", "no item", "bomb"):
                index = dcp.FileSystemReader(folder).read_metadata()
                length = 0 if name == "no item" else file.stat().st_size
                for key, place in index.storage_data.items():
                    index.storage_data[key] = replace(place, length=length)
                (folder / ".metadata").write_bytes(pickle.dumps(index))
        dist.barrier()
        with pytest.raises(ValueError, match=error):
            weights.load(model, folder)
        assert not model.weight.to_local().any()


@spmd(2)
def test_types_of_elements_in_a_distributed_checkpoint(rank):
    """Those with a storage class of their own and those without, also far from the ends of their items;
    elements that are not the values."""
    torch.manual_seed(0)
    dtypes = (torch.complex64, torch.complex128, torch.float16, torch.int16, torch.bool, torch.uint16)
    content = {str(i): (9 * torch.rand(6, 5)).to(dtype) for i, dtype in enumerate(dtypes)}
    folder, aligned, negated = (rank.shared_dir / name for name in ("types", "aligned", "negated"))
    if rank.rank == 0:
        dcp.save(content, checkpoint_id=folder, no_dist=True)
        with torch.utils.serialization.config.patch("save.storage_alignment", 1 << 15):
            dcp.save(content, checkpoint_id=aligned, no_dist=True)
        dcp.save({"0": torch._neg_view(torch.ones(3))}, checkpoint_id=negated, no_dist=True)
    dist.barrier()
    model = nn.Module()
    for name, value in content.items():
        model.register_buffer(name, torch.zeros_like(value))
    for place in (folder, aligned):
        for buffer in model.buffers():
            buffer.zero_()
        weights.load(model, place)
        assert all(torch.equal(model.get_buffer(name), value) for name, value in content.items())
    model = nn.Module()
    model.register_buffer("0", torch.zeros(3))
    with pytest.raises(ValueError, match=r"0 at \(0,\) is damaged: its elements are stored as {'neg': True}"):
        weights.load(model, negated)


@spmd(2)
def test_folders_at_a_url(rank):
    """What fsspec opens: safetensors with an index, and a distributed checkpoint."""
    torch.manual_seed(0)
    reference = Model()
    if rank.rank == 0:
        write(rank.shared_dir / "own", stored(reference, lambda name, tensor: name))
        dcp.save(reference.state_dict(), checkpoint_id=rank.shared_dir / "dcp", no_dist=True)
    dist.barrier()
    for name in ("own", "dcp"):
        model = sharded(rank.mesh())
        weights.load(model, f"file://{rank.shared_dir}/{name}", init=init)
        assert_equal(model, reference)
    with pytest.raises(ValueError, match=r"file://.*/nowhere is not a folder"):
        weights.load(model, f"file://{rank.shared_dir}/nowhere")
    with pytest.raises(ValueError, match="nosuch://here cannot be opened"):
        weights.load(model, "nosuch://here")


@spmd(2)
@pytest.mark.parametrize(
    "wrong",
    [{"threads": "x"}, {"threads": 0}, {"names": 3}, {"device": "x"}, {"strict": "no"}, {"init": id}],
    ids=str,
)
def test_an_argument_that_is_wrong_on_one_rank_is_refused_on_all(rank, wrong):
    folder = rank.shared_dir / "own"
    if rank.rank == 0:
        write(folder, stored(Model(), lambda name, tensor: name))
    dist.barrier()
    model = sharded(rank.mesh())
    if "init" in wrong:
        wrong = {"init": lambda module: 1 / 0}
    options = {"init": init, **(wrong if rank.rank else {})}
    with pytest.raises((ValueError, TypeError, RuntimeError, ZeroDivisionError)) as raised:
        weights.load(model, folder, **options)
    if rank.rank == 0:
        assert str(raised.value).startswith("rank 1 cannot load: ")
    assert "init" in wrong or all(p.is_meta for p in model.parameters())
    weights.load(sharded(rank.mesh()), folder, init=init, threads=3 if rank.rank else None)


@spmd(4)
def test_ranks_that_broadcast_and_ranks_that_do_not_are_refused(rank):
    if rank.rank == 0:
        write(rank.shared_dir / "own", stored(Model(), lambda name, tensor: name))
    dist.barrier()
    model = sharded(rank.mesh(2, 2, names=("replica", "shard")), meta=False)
    with pytest.raises(ValueError, match=r"rank 0 has 'broadcast False', rank 2 has 'broadcast True'"):
        weights.load(model, rank.shared_dir / "own", broadcast=rank.rank > 1)


@spmd(2)
def test_stored_together_and_held_apart(rank):
    """The other way round: the file has the experts as one tensor, the model has them apart."""
    fused = torch.randn(4, 6, 8)
    if rank.rank == 0:
        save_file(
            {"experts": fused, "permuted": fused[0].flip(0).contiguous()}, rank.shared_dir / "f.safetensors"
        )
    dist.barrier()
    model = nn.ModuleDict({str(i): nn.Linear(8, 6, bias=False) for i in range(4)})
    model["flipped"] = nn.Linear(8, 6, bias=False)
    for layer in model.values():
        fully_shard(layer, mesh=rank.mesh())

    def naming(name, tensor):
        if name.startswith("flipped"):
            return {"permuted": tensor.flip(0)}  # not a view: every element is asked where it belongs
        return {weights.Stored("experts", int(name.split(".")[0])): tensor}

    weights.load(model, rank.shared_dir, names=naming)
    for index in range(4):
        assert torch.equal(model[str(index)].weight.full_tensor(), fused[index])
    assert torch.equal(model["flipped"].weight.full_tensor(), fused[0])

    for index in ([3, 1], torch.tensor([0, 2]), (slice(None, None, 2),), (..., slice(2, 4), slice(None))):
        rows = fused[index]
        held = nn.ParameterDict({"w": torch.zeros(rows.shape)})
        fully_shard(held, mesh=rank.mesh())
        stored_rows = weights.Stored("experts", index)
        weights.load(
            held, rank.shared_dir, strict="missing", names=lambda name, t, stored=stored_rows: {stored: t}
        )
        assert torch.equal(held["w"].full_tensor(), rows), index


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_part_of_a_stored_tensor_is_read_alone(tmp_path, mode):
    """Under inference mode views have no base: all of the file's tensor was once read for each part of it."""
    fused = torch.arange(120.0).view(5, 6, 4)
    save_file({"experts": fused}, tmp_path / "f.safetensors")
    held = nn.ParameterDict({"w": torch.zeros(6, 4)})
    with mode():
        report = weights.load(
            held, tmp_path, strict="missing", names=lambda name, t: {weights.Stored("experts", (3,)): t}
        )
    assert torch.equal(held["w"], fused[3]) and report.bytes_read == fused[3].nbytes


@spmd(2)
def test_parts_that_leave_elements_without_values_are_refused_on_the_meta_device(rank):
    """Those that are forgotten keep what they are elsewhere; here they would be what lay in the memory."""
    if rank.rank == 0:
        save_file({"w.gate": torch.ones(3, 4)}, rank.shared_dir / "f.safetensors")
    dist.barrier()

    def naming(name, tensor):
        return {f"{name}.gate": tensor[:3]}

    for device in ("meta", "cpu"):
        held = nn.ParameterDict({"w": torch.zeros(6, 4, device=device)})
        fully_shard(held, mesh=rank.mesh())
        if device == "meta":
            with pytest.raises(ValueError, match=r"w: names= gives 12 of its 24 elements"):
                weights.load(held, rank.shared_dir, names=naming)
            assert held["w"].is_meta
            continue
        weights.load(held, rank.shared_dir, names=naming)
        assert torch.equal(held["w"].full_tensor(), torch.tensor([1.0] * 12 + [0.0] * 12).view(6, 4))


@spmd(2)
def test_refusals_on_every_rank_change_nothing(rank):
    """Missing and unexpected tensors, other shapes, codes, short and missing files, ranks that differ."""
    torch.manual_seed(0)
    tensors = stored(Model(), lambda name, tensor: name)
    endless = b'{"embed.weight":{"dtype":"F32","shape":[0,%d],"data_offsets":[0,0]}}' % 2**70
    wrong = {
        "missing": {n: t for n, t in tensors.items() if n != "blocks.1.proj.bias"},
        "extra": {**tensors, "blocks.9.odd": torch.ones(2)},
        "shape": {**tensors, "blocks.0.frozen": torch.ones(5, 3)},
        "codes": {**tensors, "blocks.0.frozen": torch.ones(3, 5).to(torch.float8_e4m3fn)},
    }
    if rank.rank == 0:
        for name, content in wrong.items():
            write(rank.shared_dir / name, content)
        write(rank.shared_dir / "short", tensors)
        file = rank.shared_dir / "short/part-1.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
        write(rank.shared_dir / "gone", tensors)
        (rank.shared_dir / "gone/part-1.safetensors").unlink()
        (rank.shared_dir / "empty").mkdir()
        (rank.shared_dir / "endless").mkdir()
        file = rank.shared_dir / "endless/model.safetensors"
        file.write_bytes(len(endless).to_bytes(8, "little") + endless)
        write(rank.shared_dir / "good", tensors)
    dist.barrier()
    model = sharded(rank.mesh(), meta=False)
    errors = {
        "missing": "has no tensor for 'blocks.1.proj.bias'",
        "extra": "has 'blocks.9.odd', which the model does not have",
        "shape": r"blocks.0.frozen has shape \(5, 3\); \(3, 5\) is expected",
        "codes": "blocks.0.frozen is stored as torch.float8_e4m3fn",
        "short": "is truncated",
        "gone": "lacks part-1.safetensors",
        "empty": r"has no \*.safetensors",
        "endless": r"embed.weight has shape \(0, \d+\); \(33, 24\) is expected",
        "nowhere": "is not a folder",
    }
    for name, message in errors.items():
        with pytest.raises((ValueError, RuntimeError), match=message):
            weights.load(model, rank.shared_dir / name)
    other = {"embed.weight": "elsewhere"} if rank.rank else None
    with pytest.raises(
        ValueError, match=r"has no tensor for 'embed.weight'|do not load the same|cannot load"
    ):
        weights.load(model, rank.shared_dir / "good", names=other)

    def raises(name, tensor):
        if rank.rank:
            raise KeyError(name)
        return name

    with pytest.raises((ValueError, KeyError), match=r"KeyError|embed"):
        weights.load(model, rank.shared_dir / "good", names=raises)
    on_meta = sharded(rank.mesh())
    with pytest.raises(ValueError, match=r"no checkpoint holds the buffer 'blocks.0.table'"):
        weights.load(on_meta, rank.shared_dir / "good")
    with pytest.raises(ValueError, match=r"'blocks.1.proj.bias', which would have no values"):
        weights.load(on_meta, rank.shared_dir / "missing", strict=False, init=init)
    assert all(p.is_meta for p in on_meta.parameters())
    assert all(not p.to_local().any() for p in model.parameters()), "a refused load wrote weights"

    report = weights.load(model, rank.shared_dir / "missing", strict=False)
    assert report.missing == ("blocks.1.proj.bias",)
    report = weights.load(model, rank.shared_dir / "extra", strict="missing")
    assert report.unexpected == ("blocks.9.odd",)


@spmd(1, 3)
def test_what_is_saved_is_loaded_again(rank):
    """Several files, other names and parts; a failure of the writer is raised on all and leaves nothing."""
    torch.manual_seed(3)
    model, other = Model(), Model()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for module in (model, other):
        for block in module.blocks:
            fully_shard(block, mesh=rank.mesh())
        fully_shard(module, mesh=rank.mesh())
    folder = rank.shared_dir / "saved"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "write_safetensors", _no_space)
        with pytest.raises((OSError, RuntimeError), match=r"no space|ended before bucket"):
            weights.save(model, folder, names=cut_experts)
        patch.setattr(saving, "write_safetensors", _no_space_at_the_end)
        for sharded in (model, Model()):  # after the last gather, or without any, no pass tells the others
            with pytest.raises((OSError, RuntimeError), match="no space"):
                weights.save(sharded, folder)
        patch.setattr(saving.os, "rename", _no_space)
        patch.setattr(saving, "write_safetensors", lambda folder, planned, values, **_: list(values))
        with pytest.raises((OSError, RuntimeError), match="no space"):
            weights.save(model, folder, names=cut_experts)
    assert not list(rank.shared_dir.iterdir())
    weights.save(model, folder, names=cut_experts, max_file_bytes=4000)
    assert [path.name for path in rank.shared_dir.iterdir()] == ["saved"]
    assert len(list(folder.glob("*.safetensors"))) > 2
    weights.load(other, folder, names=cut_experts)
    for name, value in other.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(whole.cpu(), expected[name]), name


@spmd(2)
@pytest.mark.parametrize("wrong", [{"folder": 3}, {"max_file_bytes": 0}, {"adapter": "x"}], ids=str)
def test_an_argument_of_save_that_is_wrong_on_one_rank_is_refused_on_all(rank, wrong):
    model = sharded(rank.mesh(), meta=False)
    options = {"folder": rank.shared_dir / "saved", **(wrong if rank.rank else {})}
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        weights.save(model, **options)
    assert not (rank.shared_dir / "saved").exists()


@spmd(2)
def test_folders_that_save_cannot_replace_are_refused_and_links_are_followed(rank):
    model, folder = sharded(rank.mesh(), meta=False), rank.shared_dir
    if rank.rank == 0:
        (folder / "file").touch()
        (folder / "target").mkdir()
        (folder / "link").symlink_to("target")
    dist.barrier()
    for name, error in {
        "s3://bucket/weights": "is a URL",
        "file": "is no folder",
        "": "the working directory",
    }.items():
        with pytest.raises((ValueError, RuntimeError), match=error):
            weights.save(model, folder / name if name == "file" else name, overwrite=True)
    for _ in range(2):
        weights.save(model, folder / "link", overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == ["file", "link", "target"]
    assert (folder / "link").is_symlink() and (folder / "target/model.safetensors").is_file()


@spmd(2)
def test_a_part_of_a_model_is_not_saved_for_the_whole(rank):
    """Stages of a pipeline: rank 0 would write its own, without a word of the others."""
    stage = nn.Sequential(*[nn.Linear(3, 3) for _ in range(1 + rank.rank)])
    fully_shard(stage, mesh=rank.mesh(2, 1, names=("stage", "shard"))["shard"])
    for part in (stage, nn.Linear(3, 1 + rank.rank)):
        with pytest.raises(ValueError, match="rank 1 does not have the tensors that rank 0 has"):
            weights.save(part, rank.shared_dir / "saved")
    assert not list(rank.shared_dir.iterdir())


@spmd(3)
def test_of_copies_on_meshes_of_their_own_that_of_rank_0_is_saved(rank):
    model = nn.Linear(3, 3)
    nn.init.constant_(model.weight, 2.0)
    nn.init.zeros_(model.bias)
    model.register_buffer("seen", torch.tensor(float(rank.rank // 2)))  # may differ: whose is written?
    meshes = [DeviceMesh(rank.device, ranks) for ranks in ([0, 1], [2])]
    fully_shard(model, mesh=meshes[rank.rank // 2], reshard_after_forward=False)
    model(torch.zeros(1, 3, device=rank.device))  # it stays gathered
    weights.save(model, rank.shared_dir / "saved")
    saved = load_file(rank.shared_dir / "saved/model.safetensors")
    assert torch.equal(saved["weight"], torch.full((3, 3), 2.0)) and saved["seen"] == 0


@spmd(3)
@pytest.mark.parametrize("is_sharded", [True, False])
def test_stages_with_equal_names_and_shapes_are_not_taken_for_copies(rank, is_sharded):
    """Rank 0's stage would be written for the model, without a word of the other."""
    stage = nn.Linear(3, 3)
    nn.init.zeros_(stage.bias)
    nn.init.constant_(stage.weight, rank.rank // 2)
    if is_sharded:
        meshes = [DeviceMesh(rank.device, ranks) for ranks in ([0, 1], [2])]
        fully_shard(stage, mesh=meshes[rank.rank // 2])
    with pytest.raises(ValueError, match="rank 2 has other values of 'weight' than rank 0"):
        weights.save(stage, rank.shared_dir / "saved")
    dist.barrier()  # rank 0 removes what it wrote after the others have heard
    assert not list(rank.shared_dir.iterdir())


class _Nested(nn.Module):
    """Names that begin as those of a run's checkpoint do, and one that ends as a wrapper's does."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.model = nn.Module()
        self.model.head = nn.Linear(3, 3)
        self.optim = nn.Linear(2, 3)
        self.my_orig_mod = nn.Linear(2, 2)


@pytest.mark.parametrize("is_run", [False, True])
@spmd(2)
def test_a_model_with_the_names_of_a_run(rank, is_run):
    """``model.head`` of the folder is the model's ``head``, or its own ``model.head``: never both."""
    torch.manual_seed(0)
    written, read = _Nested(), _Nested()
    reference = {name: value.clone() for name, value in written.state_dict().items()}
    for model in (written, read):
        fully_shard(model, mesh=rank.mesh())
    state = written.state_dict()
    stored = {"model": state, "optim": {"lr": 0.1, "step": torch.ones(2)}} if is_run else state
    dcp.save(stored, checkpoint_id=rank.shared_dir / "folder")
    for names in (None, lambda name, tensor: f"model.{name}" if is_run else name):
        with torch.no_grad():
            for parameter in read.parameters():
                parameter.zero_()
        weights.load(read, rank.shared_dir / "folder", names=names)
        for name, value in read.state_dict().items():
            assert torch.equal(value.full_tensor(), reference[name]), name


@spmd(2)
def test_two_saves_into_one_folder_do_not_mix(rank):
    """The second is refused on all ranks while the first writes, then since the folder is there."""
    model = sharded(rank.mesh(), meta=False)
    folder = rank.shared_dir / "saved"
    with ExitStack() as other:
        if rank.rank == 0:
            writing = other.enter_context(saving.new_folder(folder, overwrite=False))
            (writing / "first").touch()
        dist.barrier()
        with pytest.raises(
            (ValueError, RuntimeError), match=r"\.writing-saved is being written|ended before"
        ):
            weights.save(model, folder)
    dist.barrier()
    assert [path.name for path in folder.iterdir()] == ["first"]
    with pytest.raises((ValueError, RuntimeError), match=r"exists and is not empty|ended before"):
        weights.save(model, folder)
    if rank.rank == 0:
        left = rank.shared_dir / ".writing-saved"
        (left / "of a crash").mkdir(parents=True)
    weights.save(model, folder, overwrite=True)
    assert [path.name for path in rank.shared_dir.iterdir()] == ["saved"]
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


def _no_space_at_the_end(folder, planned, values, **_):
    list(values)
    raise OSError("no space left")


def _no_space(*_, **__):
    raise OSError("no space left")
