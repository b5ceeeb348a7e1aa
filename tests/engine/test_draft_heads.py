"""Heads that draft from the model's states: trained ones are mostly right, all guess what a plain computation would, and none
changes a token."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from recorded_steps import PAGE, recording  # noqa: F401
from safetensors.torch import load_file, save_file
from test_speculation import STEM, same, some_params
from tiny import make_model, open_model
from torch import nn

from quire import SamplingParams
from quire.features.speculation.device.part import SpeculationPart
from quire.sched.speeds import Speeds
from quire.types.errors import ConfigError, ModelError

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import train_draft_head as trainer

PROMPTS = [[*STEM[:size], 5 + size] for size in (9, 17, 33, 4)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SIZE = 32
GLM = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 320, "max_position_embeddings": 256, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip


LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """An EAGLE-3 and a Medusa head."""
    from transformers import AutoModelForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # there is nothing to share
    large, out = AutoModelForCausalLM.from_pretrained(model).eval(), tmp_path_factory.mktemp("heads")
    trainer.train_eagle3(large, PROMPTS, out / "eagle3", tokens=40, steps=60, taps=[0, 1, 1])
    trainer.train_medusa(large, PROMPTS, out / "medusa", tokens=40, steps=50, heads=3)
    torch.set_num_threads(threads)
    return {"eagle3": out / "eagle3", "medusa": out / "medusa"}


@pytest.fixture(scope="module")
def eagle(tmp_path_factory):
    """A head in EAGLE's layout, whose weights mean nothing."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    torch.manual_seed(2)
    sizes = {"hidden_size": SIZE, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=320, max_position_embeddings=256)
    layer, fc = LlamaDecoderLayer(config, 0).eval(), nn.Linear(2 * SIZE, SIZE)
    layer.input_layernorm = nn.Identity()
    tensors = {f"layers.0.{name}": value for name, value in layer.state_dict().items()}
    directory = tmp_path_factory.mktemp("eagle")
    write(directory, tensors | {"fc.weight": fc.weight, "fc.bias": fc.bias}, config.to_dict())
    rotary = LlamaRotaryEmbedding(config)

    def forward(embedded, hidden):
        x = fc(torch.cat((embedded, hidden), -1))
        return apply(layer, rotary, x)

    return directory, forward


@pytest.fixture(scope="module", params=["Glm4Moe", "DeepseekV3"])
def with_layer(request, tmp_path_factory):
    """A model with an MTP layer."""
    import transformers

    torch.manual_seed(3)
    directory = make_model(tmp_path_factory.mktemp("mtp"))  # the tokenizer's files
    name, latent = request.param, LATENT if request.param == "DeepseekV3" else {}
    config = getattr(transformers, f"{name}Config")(**GLM | latent)
    large = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    large.save_pretrained(directory)
    code = sys.modules[type(large).__module__]
    part = {kind: getattr(code, f"{name}{kind}") for kind in ("DecoderLayer", "RMSNorm", "RotaryEmbedding")}
    layer, (enorm, hnorm, norm) = part["DecoderLayer"](config, 1).eval(), (part["RMSNorm"](SIZE) for _ in range(3))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    eh_proj, head = nn.Linear(2 * SIZE, SIZE, bias=False), nn.Linear(SIZE, 320, bias=False)
    own = layer.state_dict()
    experts = {name: own.pop(name) for name in list(own) if ".experts." in name}
    for i in range(GLM["n_routed_experts"]):  # as checkpoints have them
        gate, up = experts["mlp.experts.gate_up_proj"][i].chunk(2)
        own |= {f"mlp.experts.{i}.gate_proj.weight": gate, f"mlp.experts.{i}.up_proj.weight": up}
        own[f"mlp.experts.{i}.down_proj.weight"] = experts["mlp.experts.down_proj"][i]
    own |= {"enorm.weight": enorm.weight, "hnorm.weight": hnorm.weight, "eh_proj.weight": eh_proj.weight}
    own |= {"shared_head.norm.weight": norm.weight, "shared_head.head.weight": head.weight}
    own["embed_tokens.weight"] = large.model.embed_tokens.weight
    path = directory / "model.safetensors"
    more = {f"model.layers.2.{name}": value.detach().contiguous().clone() for name, value in own.items()}
    save_file(load_file(path) | more, path)
    rotary = part["RotaryEmbedding"](config)

    def forward(embedded, hidden):
        embedded = embedded.clone()
        embedded[0, 0] = 0
        x = apply(layer, rotary, eh_proj(torch.cat((enorm(embedded), hnorm(hidden)), -1)))
        return norm(x)

    return directory, forward, large, head


def apply(layer, rotary, x):
    positions = torch.arange(x.shape[1])[None]
    out = layer(x, position_ids=positions, position_embeddings=rotary(x, positions))
    return out[0] if isinstance(out, tuple) else out


def write(directory, tensors, config):
    directory.mkdir(exist_ok=True)
    save_file({name: value.detach().contiguous() for name, value in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


def expect(large, forward, head, text, most):
    """What follows a text, all of it computed at once."""
    with torch.no_grad():
        ids = torch.tensor([text])
        embed, guesses = large.get_input_embeddings(), []
        hidden = large(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
        embedded = embed(ids[:, 1:])
        for _ in range(most):
            out = forward(embedded, hidden)
            guesses.append(int(head(out[0, -1]).argmax()))
            hidden = torch.cat((hidden, out[:, -1:]), 1)
            embedded = torch.cat((embedded, embed(torch.tensor([[guesses[-1]]]))), 1)
    return guesses


def listen(llm):
    """Every text that the drafter continues, and how."""
    runner, heard = llm.llm_engine.core.executor._runner, []
    drafter, slots = runner.part(SpeculationPart).drafter, runner._state.slots
    follow = drafter.follow

    def listening(ran):
        follow(ran)
        for row in ran.sampled.tolist():
            slot, size = int(ran.plan.slot[row]), int(ran.text[row])
            heard.append((slots.tokens[slot, :size].tolist(), drafter.expects(slot, ran.plan.next_drafts).tolist()))

    drafter.follow = listening
    return heard


def check_guesses(directory, config, forward, large, head):
    """Also of prompts that come in pieces, beside each other, and behind drafts that were wrong."""
    llm = open_model(
        directory, dtype="float32", max_num_batched_tokens=24, enable_prefix_caching=False, block_size=16,
        speculative_config={**config, "num_speculative_tokens": 2, "adaptive": False},
    )  # fmt: skip
    heard = listen(llm)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
    assert len(heard) > 25 and llm.llm_engine.core.stats.drafts.rows > 20
    for text, guesses in heard[:: max(1, len(heard) // 16)]:
        assert guesses == expect(large, forward, head, text, 2)
    plain = open_model(directory, dtype="float32", max_num_batched_tokens=24)
    same(answers, plain.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False))
    for each in (llm, plain):
        each.llm_engine.shutdown()


def test_eagle_guesses_as_a_plain_computation_does(model, eagle):
    from transformers import AutoModelForCausalLM

    (path, forward), large = eagle, AutoModelForCausalLM.from_pretrained(model).eval()
    check_guesses(model, {"method": "eagle", "model": str(path)}, forward, large, large.lm_head)


def test_mtp_layers_guess_as_a_plain_computation_does(with_layer):
    directory, forward, large, head = with_layer
    check_guesses(directory, {"method": "mtp"}, forward, large, head)


@pytest.fixture(scope="module")
def expected(model):
    """Requests, and what is answered without drafts."""
    llm, rng = open_model(model, dtype="float32"), random.Random(7)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    prompts += [{"prompt_token_ids": [*STEM[: rng.choice((1, 9, 33, 60))], rng.randrange(5, 9)]} for _ in range(14)]
    params = [GREEDY] * len(PROMPTS) + [some_params(rng, ["the", "a"]) for _ in prompts[len(PROMPTS) :]]
    answers = llm.generate(prompts, params, use_tqdm=False)
    llm.llm_engine.shutdown()
    return prompts, params, answers


@pytest.mark.parametrize("name", ["eagle3", "medusa", "eagle"])
def test_the_same_tokens(name, model, trained, eagle, expected):
    """In little memory: with preemption, pieces of prompts, prefix hits and forks."""
    path = eagle[0] if name == "eagle" else trained[name]
    asked = {"model": str(path), "num_speculative_tokens": 3, **({"method": "eagle"} if name == "eagle" else {})}
    asked["adaptive"] = False
    llm = open_model(
        model, dtype="float32", max_num_seqs=6, num_gpu_blocks_override=36, max_num_batched_tokens=24, speculative_config=asked
    )
    prompts, params, answers = expected
    same(llm.generate(prompts, params, use_tqdm=False), answers)
    core = llm.llm_engine.core
    core.step()
    core.scheduler.roster.check()
    stats, before = core.stats, core.stats.drafts
    assert stats.free_pages == stats.pages and stats.preemptions > 0 and stats.drafts.tokens > 50
    if name == "medusa":  # of what it was trained on; an EAGLE-3 head is short of pages here
        llm.generate(prompts[: len(PROMPTS)], GREEDY, use_tqdm=False)
        after = core.stats.drafts
        assert after.accepted - before.accepted > 0.5 * (after.tokens - before.tokens)
    llm.llm_engine.shutdown()


@pytest.mark.parametrize("name", [None, "itself", "eagle3", "medusa"])
def test_the_same_tokens_of_recorded_steps(name, model, trained, expected, recording):  # noqa: F811
    asked = {"model": str(trained.get(name, model)), "num_speculative_tokens": 3, "adaptive": False} if name else None
    llm = open_model(
        model, dtype="float32", max_num_seqs=6, num_gpu_blocks_override=40, max_num_batched_tokens=24, block_size=PAGE,
        speculative_config=asked,
    )  # fmt: skip
    core, runner = llm.llm_engine.core, llm.llm_engine.core.executor._runner
    prompts, params, answers = expected
    same(llm.generate(prompts[:12], params[:12], use_tqdm=False), answers[:12])
    core.step()
    core.scheduler.roster.check()
    assert runner.graphs.captures and runner.graphs.replays and not runner.graphs.eager
    assert core.stats.free_pages == core.stats.pages
    if name is not None:
        assert core.stats.drafts.tokens > 50 and core.stats.drafts.accepted
    if name == "itself":
        drafter = runner.part(SpeculationPart).drafter
        assert drafter._graphs.captures and drafter._graphs.replays > 9
    llm.llm_engine.shutdown()


def test_speculators_are_read(model, trained, tmp_path):
    """The same head in the words of another project; how many tokens it drafts is said there."""
    config = json.loads((trained["eagle3"] / "config.json").read_text())
    taps = config.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"]
    vocabulary = config.pop("draft_vocab_size")
    told = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": vocabulary,
        "norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": taps, "transformer_layer_config": config,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": str(model)},
                               "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 2}]},
    }  # fmt: skip
    tensors = load_file(trained["eagle3"] / "model.safetensors")
    write(tmp_path, {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}, told)
    llm = open_model(model, dtype="float32", speculative_config={"model": str(tmp_path), "adaptive": False})
    assert llm.llm_engine.config.speculation.method == "eagle3"
    llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY, use_tqdm=False)
    counts = llm.llm_engine.core.stats.drafts
    assert len(counts.per_position) == 2 and counts.accepted > 0.5 * counts.tokens
    llm.llm_engine.shutdown()


def test_what_does_not_fit_is_named(model, trained, tmp_path):
    def refused(message, error=ConfigError, **asked):
        with pytest.raises(error, match=message):
            open_model(model, dtype="float32", speculative_config=asked)

    refused(r"LlamaForCausalLM has no supported MTP layers", method="mtp")
    refused(r"num_speculative_tokens 5 is more than the 3 heads", model=str(trained["medusa"]), num_speculative_tokens=5)
    config = json.loads((trained["eagle3"] / "config.json").read_text())
    path = tmp_path / "head"
    path.mkdir()
    (path / "model.safetensors").write_bytes((trained["eagle3"] / "model.safetensors").read_bytes())
    for changes, message in (
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 7]}},
            r"before the layers \[0, 7\], and the model has layers 0 to 1",
        ),
        ({"target_hidden_size": 64}, r"hidden_size 64, but the model has 32"),
        ({"speculators_model_type": "dflash"}, r"kind 'dflash', which is not supported"),
    ):
        (path / "config.json").write_text(json.dumps(config | changes))
        refused(message, model=str(path))
    (path / "config.json").write_text(json.dumps(config))
    refused(r"does not fit the model", ModelError, method="eagle", model=str(path))
    refused(r"no tensor 'fc.weight'", method="eagle3", model=str(model))


@pytest.mark.parametrize("drafter", ["eagle", "draft model"])
def test_pages_in_host_memory_come_back_with_what_the_drafter_has_of_them(model, eagle, monkeypatch, drafter):
    """A head's keys and values come back; a draft model computes its own again. Drafts are those of pages that never left."""
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    method = {"model": str(eagle[0]), "method": "eagle"} if drafter == "eagle" else {"model": str(model)}
    tier, found = {"num_gpu_blocks_override": 20, "kv_offloading_size": 0.01}, []
    for args in ({}, tier):
        llm = open_model(
            model, dtype="float32", block_size=4, max_model_len=64, max_num_seqs=1, **args,
            speculative_config={**method, "num_speculative_tokens": 2, "adaptive": False},
        )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        for ids in (PROMPTS[2], [9, *PROMPTS[2]], [8, *PROMPTS[2]]):
            llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        heard = listen(llm)
        [output] = llm.generate([{"prompt_token_ids": PROMPTS[2]}], params, use_tqdm=False)
        found.append((list(output.outputs[0].token_ids), output.num_cached_tokens, heard))
        counts = llm.llm_engine.core.stats.tier
        assert bool(counts.fetched) == bool(args) and not counts.lost
        llm.llm_engine.shutdown()
    assert found[0] == found[1] and found[0][1] == 32 and len(found[0][2]) > 2
