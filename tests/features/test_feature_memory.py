"""What `quire plan` counts for a feature (`Feature.memory`) is what an engine allocates for it."""

import pytest
import torch

from oracle import FAMILIES, make_checkpoint
from quire import LLM
from quire.config.args import EngineArgs
from quire.config.features import FEATURES
from quire.config.resolve import resolve
from quire.device.cpu.device import CPUDevice
from quire.device.registry import open_device
from quire.dist.mesh import Position
from quire.engine.layouts import state_bytes, whole_layout
from quire.engine.memory import _NoGroup, feature_memory, rank_sizes
from quire.features.experts.device import ExpertBalancer
from quire.features.experts.host import EplbConfig
from quire.features.host import Feature
from quire.features.lora.packing import adapt
from quire.models.registry import build_model
from quire.prepare.shard import shard
from recurrent_families import RECURRENT
from tiny_model import make_model, make_tokenizer

CACHE = 8 * 2**20
SEQS = 4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    def make(name):
        directory = tmp_path_factory.getbasetemp() / f"memory-{name}"
        if not directory.exists():
            directory.mkdir()
            make_checkpoint((FAMILIES | RECURRENT)[name], directory)
            make_tokenizer(directory)
        return directory

    return make


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("llama"))


def config_of(directory, device="cpu", **options):
    args = EngineArgs(model=str(directory), device=device, max_num_seqs=SEQS, **options)
    return resolve(args, lambda: device, lambda name: open_device(name).facts(memory=8 << 30))


def started(config, monkeypatch):
    """The runner of an engine, its pages, and the bytes of everything that it allocated as cache."""
    taken, allocate = [], CPUDevice.allocate

    def count(self, pages, page_bytes):
        taken.append(pages * page_bytes)
        return allocate(self, pages, page_bytes)

    monkeypatch.setattr(CPUDevice, "allocate", count)
    llm = LLM.from_engine_args(config.args)
    return llm, llm.llm_engine.core.stats, sum(taken)


@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("drafts", [False, True])
def test_pages_of_the_model_and_of_who_drafts(llama, monkeypatch, kind, drafts):
    speculation = {"model": str(llama), "num_speculative_tokens": 2} if drafts else None
    config = config_of(llama, kv_cache_dtype=kind, kv_cache_memory_bytes=CACHE, speculative_config=speculation)
    (sizes,) = rank_sizes(config)
    memory = feature_memory(config, sizes)
    llm, stats, taken = started(config, monkeypatch)
    layout = whole_layout(config)
    beside = sum(each.per_page for each in memory.values())
    assert taken == (stats.pages + 1) * (layout.bytes_per_page + beside) and bool(beside) is drafts
    assert CACHE - 2 * (layout.bytes_per_page + beside) < taken <= CACHE
    weights = 4 * sum(tensor.numel() for tensor in build_model(config.facts).parameters())
    assert memory["speculation"].weights == (weights if drafts else 0)
    llm.llm_engine.shutdown()


@pytest.mark.parametrize("speculation", [None, {"method": "ngram", "num_speculative_tokens": 2}])
def test_recurrent_states(checkpoints, monkeypatch, speculation):
    config = config_of(checkpoints("bamba"), kv_cache_memory_bytes=CACHE, speculative_config=speculation)
    per_slot = feature_memory(config, rank_sizes(config)[0])["recurrent"].per_slot
    llm, stats, taken = started(config, monkeypatch)
    pages = (stats.pages + 1) * whole_layout(config).bytes_per_page
    snapshots, rest = divmod(taken - pages - SEQS * per_slot, state_bytes(config))
    assert snapshots == 1 + 4 * SEQS and not rest  # one for idle slots; prefixes have four for each request
    assert per_slot == (1 if speculation is None else 2) * state_bytes(config)
    llm.llm_engine.shutdown()


def test_adapters(llama):
    """The plan builds the model on the meta device; an engine asks the adapters of the model that it loaded."""
    config = config_of(llama, "cuda", enable_lora=True, max_loras=3, max_lora_rank=8, dtype="float32")
    memory = feature_memory(config, rank_sizes(config)[0])
    cpu = torch.device("cpu")
    adapters = adapt(build_model(config.facts), device=cpu, dtype=torch.float32)
    assert memory["lora"].reserved == (3 + 2) * adapters.bytes_of(8) and not memory["lora"].weights


@pytest.mark.parametrize(("ranks", "copies"), [(2, 3), (2, 4)])
def test_redundant_experts(checkpoints, ranks, copies):
    directory = checkpoints("qwen3-moe")
    options = {"tensor_parallel_size": ranks, "enable_expert_parallel": True, "enable_eplb": True}
    config = config_of(directory, num_redundant_experts=copies, **options)
    planned = max(feature_memory(config, sizes)["experts"].weights for sizes in rank_sizes(config))
    grown = []
    for rank in range(ranks):
        model = build_model(config.facts).to_empty(device="cpu")
        shard(model, Position(rank, ranks, True), _NoGroup(), None)
        before = sum(parameter.nbytes for parameter in model.parameters())
        ExpertBalancer(model, Position(rank, ranks, True), _NoGroup(), EplbConfig(num_redundant_experts=copies))
        grown.append(sum(parameter.nbytes for parameter in model.parameters()) - before)
    assert planned == pytest.approx(max(grown), rel=0.02)


def test_features_that_are_off_take_nothing(llama):
    config = config_of(llama)
    assert all(
        not each.weights + each.reserved + each.per_page for each in feature_memory(config, rank_sizes(config)[0]).values()
    )
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)


def test_a_feature_must_state_its_memory_and_cache_salt():
    class Forgetful(Feature):
        name = "forgetful"

    with pytest.raises(TypeError, match=r"cache_salt.*memory"):
        Forgetful()
