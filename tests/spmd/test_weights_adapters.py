"""LoRA adapters: merged weights under the names of the model without them, and folders of both."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from ragged_fsdp import MixedPrecisionPolicy, fully_shard, weights
from rank_pool import spmd
from weights_cases import handed_over


class Lora(nn.Module):
    """What PEFT makes of a linear layer or an embedding, as far as its weights go."""

    def __init__(self, base, rank=3, *, bias=False, dtype=torch.float32):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.scaling, self.active_adapters, self.merged_adapters = {"a": 0.7, "b": 2.0}, ["a", "b"], []
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.lora_embedding_A, self.lora_embedding_B = nn.ParameterDict(), nn.ParameterDict()
        rows, columns = base.weight.shape
        for name in ("a", "b"):
            if isinstance(base, nn.Embedding):
                self.lora_embedding_A[name] = nn.Parameter(torch.randn(rank, rows))
                self.lora_embedding_B[name] = nn.Parameter(torch.randn(columns, rank))
            else:
                self.lora_A[name] = nn.Linear(columns, rank, bias=False, dtype=dtype)
                self.lora_B[name] = nn.Linear(rank, rows, bias=bias, dtype=dtype)

    def delta(self):
        """Added to the weight, as PEFT computes it."""
        if isinstance(self.base_layer, nn.Embedding):
            pairs = [
                (self.lora_embedding_B[n] @ self.lora_embedding_A[n], self.scaling[n]) for n in ("a", "b")
            ]
            return sum(product.t() * scale for product, scale in pairs)
        return sum(
            (self.lora_B[n].weight.float() @ self.lora_A[n].weight.float()) * self.scaling[n]
            for n in ("a", "b")
        )

    def forward(self, x):
        return x


class Layer(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.q = Lora(nn.Linear(24, 37, dtype=dtype), bias=True)
        self.norm = nn.LayerNorm(7, dtype=dtype)
        self.down = Lora(nn.Linear(50, 24, bias=False, dtype=dtype))

    def forward(self, x):
        return x


def _model(dtype):
    torch.manual_seed(0)
    model = nn.Module()
    model.embed = Lora(nn.Embedding(30, 24, dtype=dtype))
    model.layers = nn.ModuleList(Layer(dtype) for _ in range(2))
    return model


def _merged(model):
    """The plain state dict, merged as PEFT does it."""
    merged = {}
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, Lora):
                weight = module.base_layer.weight
                merged[f"{name}.weight"] = (weight.float() + module.delta()).to(weight.dtype)
                bias = getattr(module.base_layer, "bias", None)
                if bias is not None:
                    add = sum(module.lora_B[n].bias * module.scaling[n] for n in ("a", "b"))
                    merged[f"{name}.bias"] = (bias.float() + add).to(bias.dtype)
            elif isinstance(module, nn.LayerNorm):
                merged |= {f"{name}.{n}": p.detach().clone() for n, p in module.named_parameters()}
    return merged


def _close(got, expected, dtype):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        wanted = value if dtype is None else value.to(dtype)
        assert got[name].dtype == wanted.dtype
        # sums of few products in fp32; in bf16 a last bit may be rounded the other way
        bound = 1e-5 if wanted.dtype == torch.float32 else 1e-2
        assert torch.allclose(got[name].float(), wanted.float(), atol=bound, rtol=bound), name
        assert wanted.dtype == torch.float32 or (got[name] == wanted).float().mean() > 0.98, name


@spmd(1, 3)
def test_weights_are_merged_by_the_ranks_that_hold_them(rank):
    """One dtype and two, in one gather or one by one, snapshots and deltas; what is sent follows them."""
    cases = [
        (torch.float32, None, {}),
        (torch.float32, torch.bfloat16, {"snapshot": True}),
        (torch.bfloat16, torch.bfloat16, {}),  # adapters of fp32 beside bf16: gathered whole
        (torch.bfloat16, None, {}),
        (torch.float32, torch.bfloat16, {"delta": True}),
    ]
    for base, sent, options in cases:
        model = _model(base)
        expected = _merged(model)
        policy = MixedPrecisionPolicy(sent)
        for layer in model.layers:
            fully_shard(layer, mesh=rank.mesh(), mp_policy=policy)
        fully_shard(model.embed, mesh=rank.mesh(), mp_policy=policy)
        stream = weights.stream(model, dtype=sent, **options)
        assert not any("lora" in record.name or "base" in record.name for record in stream.metadata())
        got = {}
        for bucket in stream:
            got.update((name, value.clone()) for name, value in bucket.tensors())
        _close(got, expected, sent)
        if not options.get("delta"):
            taken = handed_over(stream, rank.rank == 0)
            assert rank.rank or all(torch.equal(taken[name], value) for name, value in got.items())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    parameter.mul_(0.5)
        model.layers[1].q.scaling["a"] = 4 * 0.7
        model.layers[1].q.scaling["b"] = 4 * 2.0
        if options.get("snapshot"):
            stream.refresh()
        if options.get("delta"):
            changed = {name: value.clone() for name, value in got.items()}
            for delta in stream:
                assert isinstance(delta, weights.Delta)
                delta.apply(changed)
            again = dict(weights.stream(model, dtype=sent).tensors())
            assert all(torch.equal(changed[name], value) for name, value in again.items())
        else:
            again = dict(stream.tensors())
        kept, moved = "layers.1.q.weight", "layers.0.q.weight"  # a quarter of the product, four times as much
        assert torch.equal(again[kept], got[kept]) and not torch.equal(again[moved], got[moved])


@spmd(2)
def test_adapters_that_are_off_merged_or_of_another_kind(rank):
    model = _model(torch.float32)
    fully_shard(model, mesh=rank.mesh())
    base = model.layers[0].q.base_layer.weight.full_tensor()
    model.layers[0].q.disable_adapters = True
    model.layers[1].q.merged_adapters = ["a", "b"]
    got = dict(weights.stream(model).tensors())
    assert torch.equal(got["layers.0.q.weight"], base)
    assert torch.equal(got["layers.1.q.weight"], model.layers[1].q.base_layer.weight.full_tensor())
    model.layers[1].down.lora_variant = {"b": "DoRA"}
    with pytest.raises(ValueError, match=r"layers.1.down: the adapter 'b' is no plain LoRA"):
        weights.stream(model)
    model.layers[1].down.lora_variant = {}
    model.layers[1].down.fan_in_fan_out = True
    with pytest.raises(
        ValueError, match=r"layers.1.down: the adapter 'a' makes a matrix of shape \(50, 24\)"
    ):
        weights.stream(model)


@spmd(2)
def test_a_model_of_peft_streams_what_merge_and_unload_gives(rank):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = _llama_config()

    def build():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        lora = peft.LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "down_proj", "embed_tokens"],
            modules_to_save=["lm_head"],
            init_lora_weights=False,
        )
        return peft.get_peft_model(model, lora)

    plain = build()
    with torch.no_grad():
        plain.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    expected = plain.merge_and_unload().state_dict()
    for whole in (True, False):
        model = build()
        with torch.no_grad():
            model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=rank.mesh())
        if whole:
            fully_shard(model, mesh=rank.mesh())
        got = dict(weights.stream(model if whole else model.get_base_model()).tensors())
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(got[name], value, atol=1e-6), name
    other = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_config(config),
        peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
    )
    with pytest.raises(ValueError, match="is no plain LoRA"):
        weights.stream(other)
    ia3 = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    other = peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(config), ia3)
    with pytest.raises(ValueError, match="cannot be merged into a stream"):
        weights.stream(other)


def _llama_config():
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return transformers.LlamaConfig(**sizes, **heads)


def _peft_llama(config, **options):
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(config)
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"], **options
    )
    return peft.get_peft_model(model, lora)


@spmd(1, 2)
def test_folders_of_the_plain_model_and_of_an_adapter_are_loaded(rank):
    """Also on the meta device, where adapters get the values they begin with; PEFT wrote the folders."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = _llama_config()
    torch.manual_seed(5)
    plain = transformers.AutoModelForCausalLM.from_config(config)
    folder, adapter = rank.shared_dir / "plain", rank.shared_dir / "adapter"
    if rank.rank == 0:
        plain.save_pretrained(folder)
    trained = peft.PeftModel(plain, _peft_llama(config).peft_config["default"])
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora" in name or "modules_to_save" in name:
                parameter.normal_()
    if rank.rank == 0:
        trained.save_pretrained(adapter)
    dist.barrier()
    expected = trained.state_dict()

    def sharded(device, **options):
        with torch.device(device):
            model = _peft_llama(config, **options)
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=rank.mesh())
        return fully_shard(model, mesh=rank.mesh())

    for device in ("cpu", "meta"):
        model = sharded(device)
        before = {n: p.full_tensor() for n, p in model.named_parameters() if device == "cpu" and "lora" in n}
        report = weights.load(model, folder)
        assert not report.missing and not report.unexpected
        values = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
        for name, value in values.items():
            if "modules_to_save" in name:
                name = name.replace("modules_to_save.default", "original_module")
            if "lora" not in name:
                assert torch.equal(value, expected[name]), name
            elif device == "cpu":
                assert torch.equal(value, before[name]), name
            else:  # without effect, and not all zero
                zero = "lora_B" in name or "embedding_A" in name
                assert value.isfinite().all() and (value.abs().max() == 0) == zero, name
        weights.load(model, adapter)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), expected[name]), name
    with pytest.raises(ValueError, match=r"no tensor for .* on the meta device"):
        weights.load(sharded("meta"), adapter)  # before the plain weights
    with pytest.raises(ValueError, match="the folder is of an adapter, whose names are PEFT's"):
        weights.load(model, adapter, names={})
    with pytest.raises(ValueError, match=r"no tensor for .*lora.* on the meta device"):
        weights.load(sharded("meta", init_lora_weights="pissa"), folder)


@spmd(1, 2)
def test_saved_folders_are_merged_or_the_adapter_alone(rank):
    """transformers and PEFT load what was saved: same tokens, same tensors."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    origin, merged, adapter = (rank.shared_dir / name for name in ("origin", "merged", "adapter"))
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(_llama_config())
    if rank.rank == 0:
        plain.config.use_cache = True
        plain.save_pretrained(origin)
        (origin / "tokenizer.json").write_text("{}")
    dist.barrier()
    model = transformers.AutoModelForCausalLM.from_pretrained(origin)
    model.config.use_cache = False
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(model, lora)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name or "modules_to_save" in name:
                parameter.normal_()
    whole = copy.deepcopy(model)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    weights.save(model, merged, max_file_bytes=8000)
    weights.save(model, adapter, adapter="default")
    again = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(origin), adapter
    ).state_dict()
    for name, value in whole.state_dict().items():
        assert torch.equal(again[name], value), name
    served = transformers.AutoModelForCausalLM.from_pretrained(merged)
    assert served.config.use_cache is True and type(served).__name__ == "LlamaForCausalLM"
    assert (merged / "tokenizer.json").exists() and (merged / "generation_config.json").exists()
    assert len(list(merged.glob("*.safetensors"))) > 1 and not list(rank.shared_dir.glob(".*"))
    prompt = torch.arange(1, 9)[None]
    whole = whole.merge_and_unload()
    written = [m.eval().generate(prompt, max_new_tokens=8, do_sample=False) for m in (served, whole)]
    assert torch.equal(*written)
    for refused, message in (
        ({"folder": merged}, "exists and is not empty|ended before bucket"),
        ({"folder": merged / "new", "source": adapter}, "has no config.json|ended before bucket"),
        ({"folder": merged / "new", "adapter": "other"}, r"no adapter 'other'; it has \['default'\]"),
        ({"folder": merged, "adapter": "default"}, "exists and is not empty"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            weights.save(model, **refused)
    assert not (merged / "new").exists()
    dist.barrier()
    weights.save(model, merged, dtype=torch.bfloat16, overwrite=True)
    assert transformers.AutoModelForCausalLM.from_pretrained(merged).dtype == torch.bfloat16


@spmd(2)
def test_nothing_of_an_adapter_or_a_tied_weight_is_lost_without_a_word(rank):
    """Biases that an adapter trains, a tied weight of which one layer has a copy, another scaling, dtypes."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")

    def sharded(*, tied=False, modules=("q_proj",), **options):
        config = _llama_config()
        config.attention_bias, config.tie_word_embeddings = True, tied
        torch.manual_seed(0)
        plain = transformers.AutoModelForCausalLM.from_config(config)
        lora = {"r": 4, "lora_alpha": 8, "target_modules": list(modules), **options}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PEFT, about what is tied
            model = peft.get_peft_model(plain, peft.LoraConfig(**lora))
        whole = copy.deepcopy(model)
        return fully_shard(model, mesh=rank.mesh()), whole

    for bias, count in (("lora_only", 2), ("all", 8)):
        model, _ = sharded(bias=bias)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.fill_(7)
        folder = rank.shared_dir / bias
        weights.save(model, folder, adapter="default", dtype=torch.bfloat16)
        saved = load_file(folder / "adapter_model.safetensors")
        assert sum(name.endswith("bias") for name in saved) == count
        assert {value.dtype for value in saved.values()} == {torch.bfloat16}
        other, _ = sharded(bias=bias)
        weights.load(other, folder)
        got = [p.full_tensor() for n, p in other.named_parameters() if n.endswith("q_proj.base_layer.bias")]
        assert len(got) == 2 and all((value == 7).all() for value in got)
    for changed, message in (
        ({"lora_alpha": 32}, r"lora_alpha = 8; the model's 'default' has 32"),
        ({"bias": "none"}, r"bias = 'all'; the model's 'default' has 'none'"),
    ):
        other, _ = sharded(**{"bias": "all", **changed})
        with pytest.raises(ValueError, match=message):
            weights.load(other, folder)
    with pytest.raises(ValueError, match="names= and source= are for whole models"):
        weights.save(model, folder, adapter="default", names={})

    model, whole = sharded(tied=True, modules_to_save=["embed_tokens"])
    for built in (model, whole):
        with torch.no_grad():
            for name, parameter in built.named_parameters():
                if "modules_to_save" in name:
                    parameter.mul_(2)
    weights.save(model, rank.shared_dir / "tied")
    served = transformers.AutoModelForCausalLM.from_pretrained(rank.shared_dir / "tied")
    prompt = torch.arange(1, 9)[None]
    assert not torch.equal(served.lm_head.weight, served.model.embed_tokens.weight)
    torch.testing.assert_close(served(prompt).logits, whole(prompt).logits)
    for modules in (("q_proj", "embed_tokens"), ("q_proj", "lm_head")):
        model, _ = sharded(tied=True, modules=modules)
        with pytest.raises(ValueError, match="are one tied weight, and the adapter 'default' is"):
            weights.stream(model)


@spmd(2)
def test_an_adapter_that_cannot_be_saved_whole_is_refused_on_all_ranks(rank):
    """Stages of a pipeline, with other layers or with equal ones; no values; a dtype that is none."""
    peft = pytest.importorskip("peft")

    def adapted(layers, mesh, device="cpu"):
        torch.manual_seed(0)
        with torch.device(device):
            plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
            names = [str(index) for index in range(layers)]
            model = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=names))
        return fully_shard(model, mesh=mesh)

    def refused(model, message, **options):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            weights.save(model, rank.shared_dir / "saved", adapter="default", **options)
        dist.barrier()
        assert not list(rank.shared_dir.iterdir())

    of_stage = rank.mesh(2, 1, names=("stage", "shard"))["shard"]
    refused(adapted(1 + rank.rank, of_stage), "rank 1 does not have the tensors that rank 0 has")
    stage = adapted(1, of_stage)
    with torch.no_grad():
        dict(stage.named_parameters())["base_model.model.0.lora_A.default.weight"].add_(rank.rank)
    refused(stage, "rank 1 has other values of 'base_model.model.0.lora_A.default.weight' than rank 0")
    refused(adapted(1, rank.mesh(), "meta"), "is on the meta device and has no weights")
    for dtype in ("bfloat16", torch.int8):
        refused(adapted(1, rank.mesh()), "dtype must be a floating-point dtype", dtype=dtype)
