"""Adapters whose numbers a device looks at and packs: what comes of it is what the host makes of them, bit by bit."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from lockstep import Lockstep

from adapters import halves, write_adapter
from patience import PATIENCE
from quire.dist.mesh import Position
from quire.features.lora.cache import LoRACache
from quire.features.lora.packing import adapt
from quire.features.lora.peft import read_adapter
from quire.files.adapter import stamp
from quire.load.load import load_weights
from quire.models.registry import build_model
from quire.prepare.shard import shard
from quire.types.adapter import AdapterRef
from quire.types.errors import AdapterError

LAYERS = "base_model.model.model.layers"


def open_tabled(case, dtype=torch.float32, rank=0, ranks=1):
    model = build_model(case.facts)
    if ranks > 1:
        shard(model, Position(rank, ranks), Lockstep(ranks).of(rank))
    adapters = adapt(model, device=torch.device("cpu"), dtype=dtype, tabled=(2, 16))
    if ranks == 1:
        load_weights(model, case.facts, device="cpu", dtype="float32")
    return LoRACache(adapters, model, 2, 16), adapters


def tensors(rank=3, dtype=torch.float32):
    found = {}
    for number, (name, outputs, inputs) in enumerate(
        [("self_attn.q_proj", 48, 48), ("self_attn.v_proj", 16, 48), ("self_attn.o_proj", 48, 48), ("mlp.gate_proj", 80, 48),
         ("mlp.down_proj", 48, 80)]
    ):  # fmt: skip
        for layer in (0, 2):
            found |= halves(f"{LAYERS}.{layer}.{name}", outputs, inputs, rank, number * 4 + layer)
    return {name: values.to(dtype) for name, values in found.items()}


def on_host(shelf, adapters, path):
    return adapters.pack(read_adapter(path, shelf._model)[0])


def same(flat, expected):
    """What lies between the tensors is nobody's."""
    pairs = zip(expected.views(flat), expected.views(expected.flat), strict=True)
    return all(torch.equal(ours[name], theirs[name]) for (_, ours), (_, theirs) in pairs for name in theirs)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_what_the_host_makes(checkpoint, tmp_path, stored, dtype, ranks):
    for rank in range(ranks):
        shelf, adapters = open_tabled(checkpoint("llama"), dtype, rank, ranks)
        shelf.warm_up()
        configs = {"lora_alpha": 4}, {"lora_alpha": 7.3}, {"alpha_pattern": {"q_proj": 5}, "use_rslora": True}
        for number, config in enumerate(configs):
            path = write_adapter(tmp_path / f"{number}", tensors(dtype=stored), r=3, **config)
            found, expected = shelf._upload.read(path), on_host(shelf, adapters, path)
            assert found is not None and found.rank == 3 and found.packed.where == expected.where
            assert (found.packed.row.entries == expected.row.entries).all() and same(found.flat, expected)
        assert len(shelf._upload._plans._known) == 2  # two differ by what they are multiplied by alone


def test_what_is_wrong_is_said_by_the_reader(checkpoint, tmp_path):
    """A device that has looked at numbers does not say which of them are wrong; neither is any of it used."""
    shelf, _ = open_tabled(checkpoint("llama"), torch.float16)
    name = f"{LAYERS}.2.mlp.down_proj.lora_B.weight"
    good = tensors()
    cases = {
        "not finite": {name: torch.full((48, 3), torch.nan)},
        "a value of 2e\\+06": {name: torch.full((48, 3), 2e6)},
        "add up to": {name: good[name] * 1e5, name.replace("_B", "_A"): good[name.replace("_B", "_A")] * 1e5},
        "too large for float16": {name: torch.full((48, 3), 60000.0), name.replace("_B", "_A"): torch.full((3, 80), 1e-6)},
        "has shape": {name: torch.ones(47, 3)},
        "has no lora_B": {name: None},
    }
    for number, (message, other) in enumerate(cases.items()):
        given = {key: values for key, values in (good | other).items() if values is not None}
        path = write_adapter(tmp_path / f"{number}", given, r=3, lora_alpha=6)
        with pytest.raises(AdapterError, match=message):
            shelf.read(AdapterRef(1, f"v{number}", path))
        assert shelf._upload.read(path) is None and not shelf._held and shelf._ready is None
    path = write_adapter(tmp_path / "good", good, r=3)
    (tmp_path / "good" / "adapter_config.json").write_text(json.dumps({"r": 3, "peft_type": "LORA", "bias": "other"}))
    with pytest.raises(AdapterError, match="bias must be"):
        shelf.read(AdapterRef(1, "bad", path))


def test_products_are_rounded_once(checkpoint, tmp_path):
    """A file of float16 may have products that only the model's type can hold."""
    shelf, adapters = open_tabled(checkpoint("llama"), torch.bfloat16)
    name = f"{LAYERS}.0.self_attn.q_proj"
    given = {
        f"{name}.lora_A.weight": torch.full((2, 48), 1e-3).half(),
        f"{name}.lora_B.weight": torch.full((48, 2), 300.0).half(),
    }
    path = write_adapter(tmp_path / "a", given, lora_alpha=1000)
    for flat in (shelf._upload.read(path).flat, on_host(shelf, adapters, path).flat):
        assert (flat[128:224] == torch.tensor(150_000.0).bfloat16()).all()


def test_others_are_read_on_the_host(checkpoint, tmp_path):
    shelf, _ = open_tabled(checkpoint("llama"))
    mixed = tensors()
    mixed[f"{LAYERS}.0.self_attn.q_proj.lora_A.weight"] = mixed[f"{LAYERS}.0.self_attn.q_proj.lora_A.weight"].half()
    head = tensors() | halves("base_model.model.lm_head", 199, 48, 3)
    for number, (given, config) in enumerate(((mixed, {}), (head, {}))):
        path = write_adapter(tmp_path / f"{number}", given, r=3, **config)
        assert shelf._upload.read(path) is None
        assert shelf.read(AdapterRef(1, f"v{number}", path)).rank == 3 and shelf._ready is None


def test_what_was_read_waits_on_the_device(checkpoint, tmp_path):
    """The latest alone; another is brought from the host's memory, and is the same."""
    shelf, adapters = open_tabled(checkpoint("llama"))
    refs = [AdapterRef(n, f"v{n}", write_adapter(tmp_path / f"{n}", tensors(), r=3, lora_alpha=n)) for n in (1, 2)]
    for ref in refs:
        shelf.read(ref)
    assert shelf._ready[0] is shelf._held["v2"]
    for place, ref in ((1, refs[0]), (2, refs[1])):
        shelf.put(ref, place)
        assert same(adapters._table_only[place][1], on_host(shelf, adapters, ref.path))
    assert shelf._ready is None
    shelf.read(refs[0])
    shelf.forget("v1")
    assert shelf._ready is None


def test_files_are_read_before_their_version_is_known(checkpoint, tmp_path):
    shelf, adapters = open_tabled(checkpoint("llama"))
    path = write_adapter(tmp_path / "a", tensors(), r=3)
    until = time.monotonic() + PATIENCE
    while not stamp(path) and time.monotonic() < until:  # they are too new
        time.sleep(0.02)
    ahead = AdapterRef(0, "", path, stamp=stamp(path))
    reads = list[str]()
    shelf._upload = SimpleNamespace(read=lambda path, read=shelf._upload.read: (reads.append(path), read(path))[1])
    shelf.read_ahead(ahead)
    shelf.read(AdapterRef(1, "v1", path, stamp=ahead.stamp))
    shelf.put(AdapterRef(1, "v1", path), 1)
    assert len(reads) == 1 and same(adapters._table_only[1][1], on_host(shelf, adapters, path))
    for later in (ahead.stamp, "", "other"):  # it was taken; files whose stamp does not tell; other files
        shelf.read_ahead(ahead if later else AdapterRef(0, "", path))
        shelf.read(AdapterRef(1, f"v{later}", path, stamp=later))
    shelf.read(AdapterRef(1, "again", path, stamp=ahead.stamp))
    assert len(reads) == 1 + 1 + 1 + 2 + 1
    write_adapter(tmp_path / "a", {name: values + 1 for name, values in tensors().items()}, r=3)
    shelf.read_ahead(ahead)
    assert len(reads) == 6 and shelf._ahead is None
