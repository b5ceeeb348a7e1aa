"""From files to a filled model, and what is said when they do not fit."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from quire.attn.batch import PLAIN
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear, MergedLinear
from quire.layers.moe import MoE
from quire.layers.norm import RMSNorm
from quire.load.assign import broken_parameters, rename, slices_of_model
from quire.load.load import load_weights, refuse_broken
from quire.load.safetensors import SafetensorsSource
from quire.types.errors import ModelError


class Tiny(nn.Module):
    """One of each kind of entry."""

    renames = ((r"^model\.", ""), (r"inv_freq$", None), (r"\.w1\.", ".gate_proj."))

    def __init__(self, tied=False):
        super().__init__()
        self.embed_tokens = Embedding(11, 4)
        self.qkv = MergedLinear(4, {"q_proj": 6, "k_proj": 2}, bias=True)
        self.out = Linear(6, 4, transposed=True)
        self.moe = MoE(4, 3, "silu", experts=2, top_k=1, renormalize=True)
        self.norm = RMSNorm(4, 1e-6)
        self.lm_head = Head(11, 4, tied=self.embed_tokens if tied else None)


def tensors():
    torch.manual_seed(0)
    expert = {"w1": (3, 4), "up_proj": (3, 4), "down_proj": (4, 3)}
    shapes = {
        "model.embed_tokens.weight": (11, 4),
        "model.q_proj.weight": (6, 4),
        "model.q_proj.bias": (6,),
        "model.k_proj.weight": (2, 4),
        "model.k_proj.bias": (2,),
        "model.out.weight": (6, 4),
        "model.moe.gate.weight": (2, 4),
        **{f"model.moe.experts.{e}.{name}.weight": shape for e in (0, 1) for name, shape in expert.items()},
        "model.norm.weight": (4,),
        "model.rotary.inv_freq": (2,),
        "lm_head.weight": (11, 4),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def facts_of(directory, files=None):
    weights = tuple(sorted(directory.glob("*.safetensors"))) if files is None else files
    return SimpleNamespace(files=SimpleNamespace(path=directory, format="hf", weights=weights), architecture="Tiny")


def load(directory, model=None, **options):
    if model is None:
        with torch.device("meta"):
            model = Tiny()
    load_weights(model, facts_of(directory), **{"device": "cpu", "dtype": "float32"} | options)
    return model


def refused(directory, **options):
    with pytest.raises(ModelError) as info:
        load(directory, **options)
    return str(info.value)


def write(directory, content, name="model.safetensors"):
    save_file(content, directory / name)


def shard(directory, content, count=2):
    names = sorted(content)
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    where = {name: files[i % count] for i, name in enumerate(names)}
    for file in files:
        write(directory, {name: content[name] for name in names if where[name] == file}, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return files


def check(model, given):
    assert torch.equal(model.qkv.weight, torch.cat((given["model.q_proj.weight"], given["model.k_proj.weight"])))
    assert torch.equal(model.qkv.bias, torch.cat((given["model.q_proj.bias"], given["model.k_proj.bias"])))
    assert torch.equal(model.out.weight, given["model.out.weight"].t())
    for expert in (0, 1):
        path = f"model.moe.experts.{expert}"
        gate_up = torch.cat((given[f"{path}.w1.weight"], given[f"{path}.up_proj.weight"]))
        assert torch.equal(model.moe.experts.up[expert], gate_up)
        assert torch.equal(model.moe.experts.down[expert], given[f"{path}.down_proj.weight"])
    assert torch.equal(model.lm_head.weight, given["lm_head.weight"])
    assert torch.equal(model.norm.weight, given["model.norm.weight"])


def test_every_tensor_finds_its_place(tmp_path):
    write(tmp_path, tensors())
    check(load(tmp_path), tensors())


def test_shards(tmp_path):
    shard(tmp_path, tensors(), 3)
    check(load(tmp_path), tensors())


def test_the_models_type_wins_over_the_files(tmp_path):
    write(tmp_path, {name: value.half() for name, value in tensors().items()})
    model = load(tmp_path, dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.norm.weight, tensors()["model.norm.weight"].half().bfloat16())


@pytest.mark.parametrize("stored", [True, False])
def test_a_tied_head_may_be_stored_or_not(tmp_path, stored):
    content = tensors()
    if not stored:
        del content["lm_head.weight"]
    write(tmp_path, content)
    with torch.device("meta"):
        model = Tiny(tied=True)
    load(tmp_path, model)
    hidden = torch.randn(2, 4)
    assert torch.equal(model.lm_head(hidden, PLAIN), hidden @ content["model.embed_tokens.weight"].t())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_vectors_that_are_not_finite(tmp_path, value):
    content = tensors()
    content["model.k_proj.bias"][1] = value
    write(tmp_path, content)
    assert "'model.k_proj.bias' has values that are NaN or infinite" in refused(tmp_path)
    content["model.k_proj.bias"].fill_(3e38)  # their sum is not, but they are
    write(tmp_path, content)
    load(tmp_path)


class Vectors(nn.Module):
    """Whatever they are called, and a single number."""

    renames = ()

    def __init__(self):
        super().__init__()
        self.D, self.sinks, self.beta = (
            nn.Parameter(torch.zeros(3)),
            nn.Parameter(torch.zeros(3)),
            nn.Parameter(torch.zeros(())),
        )


def test_vectors_of_other_names_that_are_not_finite(tmp_path):
    for name, value in [("D", "nan"), ("D", "inf"), ("sinks", "nan"), ("sinks", "inf"), ("beta", "nan")]:
        write(tmp_path, {"D": torch.ones(3), "sinks": torch.ones(3), "beta": torch.tensor(1.0)})
        load(tmp_path, Vectors())
        content = {"D": torch.ones(3), "sinks": torch.ones(3), "beta": torch.tensor(1.0)}
        content[name].view(-1)[:1] = float(value)
        write(tmp_path, content)
        with pytest.raises(ModelError, match=f"'{name}' has values that are NaN or infinite"):
            load(tmp_path, Vectors())
    write(tmp_path, {"D": torch.ones(3), "sinks": torch.full((3,), float("-inf")), "beta": torch.tensor(1.0)})
    assert broken_parameters(load(tmp_path, Vectors())) == []  # heads without a sink


def test_matrices_that_are_not_finite(tmp_path):
    """As a GPU looks at what it was given: everything but the rows of tokens."""
    content = tensors()
    content["model.embed_tokens.weight"][7] = content["lm_head.weight"][3] = float("nan")
    write(tmp_path, content)
    assert broken_parameters(load(tmp_path)) == []
    content["model.moe.experts.1.w1.weight"][2, 1] = float("inf")
    write(
        tmp_path,
        {name: value for name, value in content.items() if len(value) != 11}
        | {name: torch.zeros(11, 4) for name in ("model.embed_tokens.weight", "lm_head.weight")},
    )
    model, source = load(tmp_path), SafetensorsSource(tmp_path, (tmp_path / "model.safetensors",))
    assert broken_parameters(model) == ["moe.experts.up"]
    with pytest.raises(ModelError, match=r"here: tensor 'model.moe.experts.1.w1.weight' has values that are NaN or infinite"):
        refuse_broken(model, source, "here", torch.float32)


def test_numbers_that_a_type_cannot_hold(tmp_path):
    content = tensors()
    content["model.out.weight"][0, 0] = 1e6
    write(tmp_path, content)
    model, source = load(tmp_path, dtype="float16"), SafetensorsSource(tmp_path, (tmp_path / "model.safetensors",))
    with pytest.raises(ModelError, match=r"here: out.weight has values beyond the range of float16; use another dtype"):
        refuse_broken(model, source, "here", torch.float16)


def test_all_misfits_are_told_at_once(tmp_path):
    content = tensors()
    del content["model.k_proj.bias"], content["lm_head.weight"]
    content["model.extra.weight"] = torch.zeros(3)
    content["model.norm.weight"] = torch.zeros(5)
    write(tmp_path, content)
    message = refused(tmp_path)
    assert str(tmp_path) in message
    assert "missing (2): k_proj.bias, lm_head.weight" in message
    assert "unknown (1): model.extra.weight" in message
    assert "misshaped (1): model.norm.weight is [5], the model requires [4]" in message


def test_a_long_list_is_cut(tmp_path):
    write(tmp_path, tensors() | {f"model.layers.{i}.weight": torch.zeros(1) for i in range(30)})
    message = refused(tmp_path)
    assert "unknown (30): model.layers.0.weight, model.layers.1.weight, model.layers.2.weight" in message
    assert message.endswith("and 20 more")


def test_two_names_for_one_place(tmp_path):
    write(tmp_path, tensors() | {"norm.weight": torch.zeros(4)})
    assert "given twice (1)" in refused(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_named(tmp_path, keep):
    write(tmp_path, tensors())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in refused(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    files = shard(tmp_path, tensors(), 3)
    (tmp_path / files[1]).unlink()
    assert files[1] in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "2 of 3 shards" in refused(tmp_path)


def test_a_shard_the_index_does_not_know(tmp_path):
    shard(tmp_path, tensors(), 2)
    write(tmp_path, {"other": torch.zeros(1)}, "model-00003-of-00003.safetensors")
    assert "model-00003-of-00003.safetensors" in refused(tmp_path)


def test_a_shard_without_a_promised_tensor(tmp_path):
    files = shard(tmp_path, tensors(), 2)
    write(tmp_path, {"model.norm.weight": torch.zeros(4)}, files[1])
    assert "lists" in refused(tmp_path)


def test_a_broken_index_is_named(tmp_path):
    shard(tmp_path, tensors(), 2)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert "model.safetensors.index.json" in refused(tmp_path)


def test_no_weights_and_unknown_formats(tmp_path):
    assert "no .safetensors files" in refused(tmp_path)
    write(tmp_path, tensors())
    assert "'pt'" in refused(tmp_path, load_format="pt")
    assert "has safetensors" in refused(tmp_path, load_format="gguf")


def test_dummy_weights_depend_on_seed_and_name_only(tmp_path):
    first, again, other = (load(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    for name, value in first.named_parameters():
        assert torch.equal(value, again.get_parameter(name))
        assert not torch.equal(value, other.get_parameter(name))
        assert 0 < value.abs().max() < 0.2
    with torch.device("meta"):
        small = nn.ModuleDict({"norm": RMSNorm(4, 1e-6)})
    load(tmp_path, small, load_format="dummy", seed=1)
    assert torch.equal(small["norm"].weight, first.norm.weight)


def test_renames_apply_in_order():
    renames = ((r"^a\.", ""), (r"^b", "c"), (r"\.skip$", None))
    assert rename("a.b.weight", renames) == "c.weight"
    assert rename("a.b.skip", renames) is None


def test_claims_are_views_of_the_parameters():
    model = Tiny()
    for entry in slices_of_model(model).values():
        for part in () if entry is None else entry.destinations:
            part.view.fill_(3.0)
    assert all((parameter == 3.0).all() for parameter in model.parameters())
