"""Images with the other features of an engine: transformers' tokens, or a refusal that names both."""

import base64
import copy
import functools
import itertools
import json
import shutil
from pathlib import Path

import pytest
import test_qwen_vl
import torch
from media_files import clip
from media_models import NEW_TOKENS, MediaCase, pictures
from safetensors.torch import load_file, save_file

import media_towers
import selection
from adapters import halves, write_adapter
from forked import nursery
from matrix_case import write_checkpoint
from quantized_checkpoints import compressed, ints, packed
from quire import LLM, SamplingParams
from quire.engine.executor import workers
from quire.features.media.workers.videos import decode_video
from quire.lora.request import LoRARequest
from quire.ops.native import multiplies_floats
from quire.types.errors import AdapterError, ConfigError, NotSupported
from quire.types.sampling import BeamSearchParams
from quire.types.structured import StructuredOutputsParams
from rounded_cache import RoundedCache

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
NAMES = ("llava", "qwen2.5-vl", "gemma3")


def families(*core):
    """Run a test for these families, or for all with QUIRE_MATRIX=all."""
    return pytest.mark.parametrize("name", dict.fromkeys((*core, *(NAMES if selection.ALL else ()))))


pytestmark = pytest.mark.usefixtures("processed_here")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return functools.cache(lambda name: MediaCase(name, tmp_path_factory.mktemp(name)))


def engine(case, directory=None, **options):
    defaults = {
        "dtype": "float32", "device": "cpu", "block_size": 4, "max_num_seqs": 8, "kv_cache_memory_bytes": 16 << 20,
        "max_model_len": 1024, "max_num_batched_tokens": 96 if case.family.bidirectional == "prompt" else 24,
    }  # fmt: skip
    return LLM(str(directory or case.directory), **defaults | options)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def run(llm, case, params=GREEDY, **more):
    return llm.generate([case.prompt(parts) for parts in case.prompts], params, use_tqdm=False, **more)


def answers(case, outputs, model=None, **more):
    """Return transformers' tokens for the same prompts."""
    pairs = [(output.prompt_token_ids, parts) for output, parts in zip(outputs, case.prompts, strict=True)]
    if model is None:
        return [case.answer(*pair)[0] for pair in pairs]
    return [case.generate(model, *pair, **more)[0] for pair in pairs]


def check(case, **options):
    """Compare tokens with transformers', for new prompts and for cached ones."""
    with engine(case, **options) as llm:
        for _ in range(2):
            outputs = run(llm, case)
            assert tokens(outputs) == answers(case, outputs)


# ---- sampling ---------------------------------------------------------------------------------------------------------------


@families("qwen2.5-vl")
def test_structured_outputs(case, name):
    """Beside requests without a grammar: transformers' likeliest tokens of those that the grammar allows."""
    row = case(name)
    masked = SamplingParams(temperature=0.0, max_tokens=9, structured_outputs=StructuredOutputsParams(regex="[01]{5}"))
    with engine(row) as llm:
        allowed = [llm.get_tokenizer().encode(text, add_special_tokens=False)[0] for text in "01"]
        outputs = run(llm, row, [masked if index % 2 else GREEDY for index in range(len(row.prompts))])
    for index, (output, parts) in enumerate(zip(outputs, row.prompts, strict=True)):
        if not index % 2:
            assert output.outputs[0].token_ids == row.answer(output.prompt_token_ids, parts)[0]
            continue
        found = list[int]()
        for _ in range(5):
            last = row.logprobs(output.prompt_token_ids, parts, found)[-1]
            found.append(max(allowed, key=lambda token: last[token].item()))
        assert output.outputs[0].token_ids[:5] == found
        assert len(output.outputs[0].text) == 5


@families("gemma3", "paligemma")
def test_logprobs_of_prompts(case, name):
    row = case(name)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with engine(row) as llm:
        for output, parts in zip(run(llm, row, params), row.prompts, strict=True):
            ids = output.prompt_token_ids
            expected = row.logprobs(ids, parts)[torch.arange(len(ids) - 1), ids[1:]]
            found = [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
            assert (torch.tensor(found) - expected).abs().max() < 1e-4


def beams(case, ids, parts, width, count):
    """Return the likeliest continuations by transformers, best first."""
    found = [(0.0, ())]
    for _ in range(count):
        longer = []
        for total, following in found:
            last = case.logprobs(ids, parts, following)[-1]
            values, chosen = last.topk(2 * width)
            longer += [
                (total + value, (*following, token)) for value, token in zip(values.tolist(), chosen.tolist(), strict=True)
            ]
        found = sorted(longer, reverse=True)[:width]
    return [list(following) for _, following in found]


@families("qwen2.5-vl", "paligemma")
def test_beam_search(case, name):
    row = case(name)
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    with engine(row) as llm:
        ids = [output.prompt_token_ids for output in run(llm, row)]
        outputs = llm.beam_search([row.prompt(parts) for parts in row.prompts], params)
    for prompt, parts, output in zip(ids, row.prompts, outputs, strict=True):
        assert [beam.tokens[len(prompt) :] for beam in output.sequences] == beams(row, prompt, parts, 2, 4)


VIDEO_TEMPLATE = (
    "{% for part in messages[0].content %}{% if part.type == 'video' %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %}"
)


def test_video_files(case):
    """A file in a message is answered as its frames; media_io_kwargs choose them."""
    row, file = case("qwen2.5-vl"), clip(20, 32, 24)
    mark = row.family.placeholder("video")
    template = VIDEO_TEMPLATE.replace("MARK", mark)
    url = "data:video/mp4;base64," + base64.b64encode(file).decode()
    chat = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": " well"}]}]
    frames = decode_video(file, {}).frames
    assert len(frames) == 20
    with engine(row) as llm:
        [asked] = llm.chat(chat, GREEDY, use_tqdm=False, chat_template=template)
        prompt = {"prompt": f"{mark} well", "multi_modal_data": {"video": (frames, {"fps": 25.0})}}
        [given] = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert asked.prompt_token_ids == given.prompt_token_ids and tokens([asked]) == tokens([given])
        prompt = {**prompt, "multi_modal_data": {"video": file}, "media_io_kwargs": {"video": {"num_frames": 4}}}
        [fewer] = llm.generate(prompt, GREEDY, use_tqdm=False)
    [whole, part] = (output.prompt_token_ids.count(row.entry.marks["<|video_pad|>"]) for output in (given, fewer))
    assert whole == 5 * part > 0


WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}  # sizes that the kernels for CPUs support


@pytest.mark.skipif(not multiplies_floats(), reason="deterministic is refused on other CPUs")
@families("qwen2.5-vl", "gemma3")
def test_deterministic(name, tmp_path, monkeypatch):
    """Tokens and bits of logprobs are those of each prompt alone: beside others, with prefix hits, chunks and drafts."""
    for key, value in WIDE.items():
        monkeypatch.setitem(media_towers.TEXT, key, value)
    monkeypatch.setitem(test_qwen_vl.MROPE, "mrope_section", [16, 8, 8])
    row = MediaCase(name, tmp_path)
    prompts = [*map(row.prompt, row.prompts), "only text " * 6]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)

    def bits(llm, some):
        found = [output.outputs[0] for output in llm.generate(some, params, use_tqdm=False)]
        return [
            (one.token_ids, [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)])
            for one in found
        ]

    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "adaptive": False}
    with engine(row, deterministic=True, max_num_batched_tokens=512) as llm:
        alone = [bits(llm, [prompt])[0] for prompt in prompts if llm.reset_prefix_cache()]
        assert bits(llm, prompts) == alone
    with engine(row, deterministic=True, max_num_batched_tokens=48, speculative_config=drafts) as llm:
        assert bits(llm, prompts) == bits(llm, prompts[::-1])[::-1] == alone


# ---- the language model -----------------------------------------------------------------------------------------------------


def adapted(case, directory):
    """Return an adapter of the language model, and transformers' model with it in its matrices."""
    model, added = copy.deepcopy(case.model), {}
    with torch.no_grad():
        for index, (name, module) in enumerate(model.named_modules()):
            if "language_model" in name and name.endswith("_proj"):
                named = halves(f"base_model.model.{name}", *module.weight.shape, seed=index)
                down, up = named.values()
                module.weight += up @ down * 2
                added |= named
    return write_adapter(directory, added), model


@families("qwen2.5-vl")
def test_adapters(case, name, tmp_path):
    """Beside requests without one."""
    row = case(name)
    path, model = adapted(row, tmp_path)
    with engine(row, enable_lora=True, max_loras=1, max_lora_rank=4) as llm:
        for _ in range(2):
            chosen = [LoRARequest("adapter", 1, path) if index % 2 else None for index in range(len(row.prompts))]
            outputs = run(llm, row, lora_request=chosen)
            plain, merged = answers(row, outputs), answers(row, outputs, model)
            assert plain != merged
            assert tokens(outputs) == [(merged if chosen[index] else plain)[index] for index in range(len(plain))]


def test_adapters_of_the_encoder_are_refused(case, tmp_path):
    """They are ignored where no encoder is loaded."""
    row = case("llava")
    path, model = adapted(row, tmp_path / "language")
    [name] = [name for name, _ in model.named_modules() if name.endswith("layers.0.self_attn.q_proj") and "vision" in name]
    added = load_file(Path(path) / "adapter_model.safetensors")
    both = LoRARequest("both", 1, write_adapter(tmp_path / "both", added | halves(f"base_model.model.{name}", 16, 16)))
    with engine(row, enable_lora=True, max_lora_rank=4) as llm:
        with pytest.raises(
            AdapterError, match=r"tensor .*vision_tower.* adds to the encoder of images, which is not supported"
        ):
            run(llm, row, lora_request=both)
        outputs = run(llm, row)
        assert tokens(outputs) == answers(row, outputs)
    with engine(row, enable_lora=True, max_lora_rank=4, language_model_only=True) as llm:
        [output] = llm.generate("no picture at all", GREEDY, use_tqdm=False, lora_request=both)
        assert output.outputs[0].token_ids == row.generate(model, output.prompt_token_ids, ["no picture at all"])[0]


@families("llava")
def test_quantized_weights(case, name, tmp_path):
    """The language model in 8 bits, and for LLaVA also the encoder."""
    row = case(name)
    stored, values = {}, {}
    for key, weight in load_file(row.directory / "model.safetensors").items():
        stored[key] = values[key] = weight
        language = "visual" not in key and "vision" not in key and "projector" not in key
        if key.endswith(("_proj.weight", "fc1.weight")) and (language or name == "llava"):
            del stored[key]
            found, values[key] = packed(8, -1)(key, weight)
            stored |= {f"{key.removesuffix('.weight')}.{end}": tensor for end, tensor in found.items()}
    assert len(stored) > len(values)
    ignored = {} if name == "llava" else {"ignore": ["lm_head", "re:.*visual.*", "re:.*vision.*", "re:.*projector.*"]}
    scheme = compressed("pack-quantized", ints(8, -1), **ignored)
    for kind, tensors, config in (("quantized", stored, {"quantization_config": scheme}), ("floats", values, {})):
        write_checkpoint(tmp_path / kind, row.directory, tensors, **config)
        for file in row.directory.glob("*.json"):
            if file.name != "config.json":
                shutil.copy(file, tmp_path / kind)
    model = type(row.model).from_pretrained(tmp_path / "floats", dtype=torch.float32).eval()
    with engine(row, tmp_path / "quantized") as llm:
        outputs = run(llm, row)
    assert tokens(outputs) == answers(row, outputs, model)


@families("gemma3")
def test_8_bit_cache(case, name):
    row = case(name)
    kind = {"llava": torch.float8_e5m2}.get(name, torch.float8_e4m3fn)
    with engine(row, kv_cache_dtype="fp8_e5m2" if name == "llava" else "fp8") as llm:
        for _ in range(2):
            outputs = run(llm, row)
            for output, parts, found in zip(outputs, row.prompts, tokens(outputs), strict=True):
                cache = RoundedCache(row.model.config.get_text_config(), kind)
                assert found == row.generate(row.model, output.prompt_token_ids, parts, past_key_values=cache)[0]


# ---- speculation ------------------------------------------------------------------------------------------------------------


DRAFTERS = [("llava", "suffix"), ("qwen2.5-vl", "itself"), ("qwen3-vl", "ngram"), ("gemma3", "itself")]
DRAFTERS += [("qwen2.5-vl", "eagle"), ("llava", "medusa")]
if selection.ALL:
    DRAFTERS = [*itertools.product((*NAMES, "qwen3-vl", "paligemma"), ("ngram", "suffix", "itself", "eagle", "medusa"))]


def write_head(case, directory, method):
    """Write a draft head with random weights."""
    text = case.model.config.get_text_config()
    size, generator = text.hidden_size, torch.Generator().manual_seed(5)

    def linear(rows, columns=size):
        return torch.randn(rows, columns, generator=generator) * 0.3

    if method == "medusa":
        config = {"model_type": "medusa", "medusa_num_heads": 3, "medusa_num_layers": 1, "hidden_size": size}
        tensors = {}
        for at in range(3):
            own = {"0.linear.weight": linear(size), "0.linear.bias": linear(1)[0], "1.weight": linear(text.vocab_size)}
            tensors |= {f"{at}.{name}": value for name, value in own.items()}
    else:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        made = LlamaConfig(
            hidden_size=size, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
            vocab_size=text.vocab_size, max_position_embeddings=1024,
        )  # fmt: skip
        layer = {name: value.detach().clone() for name, value in LlamaDecoderLayer(made, 0).state_dict().items()}
        tensors = {f"layers.0.{name}": value for name, value in layer.items() if not name.startswith("input_layernorm")}
        config, tensors["fc.weight"] = made.to_dict(), linear(size, 2 * size)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.parametrize(("name", "drafter"), DRAFTERS)
def test_speculation(case, name, drafter, tmp_path):
    row = case(name)
    asked = {"num_speculative_tokens": 3, "adaptive": False}
    asked |= {"model": str(row.directory)} if drafter == "itself" else {"method": drafter}
    asked |= {"model": write_head(row, tmp_path, drafter)} if drafter in ("eagle", "medusa") else {}
    asked |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1} if drafter == "ngram" else {}
    if (name, drafter) == ("gemma3", "itself"):
        with pytest.raises(ConfigError, match=r"speculative_config\.model"):
            engine(row, speculative_config=asked)
        return
    with engine(row, speculative_config=asked) as llm:
        for _ in range(2):
            outputs = run(llm, row)
            assert tokens(outputs) == answers(row, outputs)
        assert llm.llm_engine.core.stats.drafts.tokens > 0


# ---- several processes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with nursery(tmp_path_factory.mktemp("nursery"), "rank") as command, pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "COMMAND", command)
        yield


DIVIDED = [("qwen2.5-vl", "tensor_parallel_size"), ("paligemma", "tensor_parallel_size")]
DIVIDED += [(name, "pipeline_parallel_size") for name in ("gemma3", "qwen3-vl", "paligemma", "qwen3.5")]
if selection.ALL:
    either = "tensor_parallel_size", "pipeline_parallel_size"
    DIVIDED = [*itertools.product((*NAMES, "qwen3-vl", "qwen3.5", "paligemma"), either)]


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(("name", "argument"), DIVIDED)
def test_divided_models(case, name, argument):
    row = case(name)
    if argument == "pipeline_parallel_size" and name in ("qwen3-vl", "paligemma"):  # deep stack, undivided prompts
        with pytest.raises(ConfigError, match=f"pipeline_parallel_size=2.* {row.config['architectures'][0]}"):
            engine(row, pipeline_parallel_size=2)
        return
    check(row, **{argument: 2})


@families("qwen2.5-vl")
@pytest.mark.usefixtures("quick")
def test_several_engines(case, name):
    check(case(name), data_parallel_size=2)


# ---- loading ----------------------------------------------------------------------------------------------------------------


@families("llava")
def test_without_the_encoder(case, name):
    row = case(name)
    off = {"image": 0, "video": 0}
    with engine(row, limit_mm_per_prompt=off) as llm, engine(row) as whole:
        with pytest.raises(NotSupported, match="limit_mm_per_prompt"):
            llm.generate(row.prompt([pictures()[0], "?"]), GREEDY, use_tqdm=False)
        [output] = llm.generate("no picture at all", GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == row.answer(output.prompt_token_ids, ["no picture at all"])[0]
        bare, full = (each.collective_rpc("describe_rank")[0] for each in (llm, whole))
        assert bare["parameters"] == full["parameters"] and "encoder_parameters" not in bare
        assert full["encoder_parameters"] > 1000


@families("qwen2.5-vl")
def test_random_weights(case, name):
    row = case(name)
    with engine(row, load_format="dummy") as llm:
        once, again = (tokens(run(llm, row)) for _ in range(2))
    assert once == again
    assert all(len(found) == NEW_TOKENS for found in once)
