# ruff: noqa: RUF009 - `setting` makes a dataclass field
"""Pooling models: arguments, the tasks that a model supports, and how each is pooled by default.

A model pools if its architecture has no LM head (`LlamaModel`, `Qwen2ForSequenceClassification`, ...), if it is stored with the
files of sentence-transformers, or if `runner` or `convert` ask for it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from quire.config.families import has_lm_head
from quire.config.fields import OBJECT, TEXT, setting
from quire.config.plugins import IO_PROCESSORS, find_plugins, why_missing
from quire.features.host import NO_MEMORY, Conflict, Feature, Memory, Sizes
from quire.features.pooling.sentence_files import LateInteraction, SentenceFiles, read_colbert_files, read_sentence_files
from quire.files.safetensors import read_header
from quire.types.cache import DTYPE_BYTES
from quire.types.errors import ConfigError, InvalidParameter, ModelError
from quire.types.pooling import Pooling, PoolingParams, PoolingTask, PoolingType

if TYPE_CHECKING:
    from quire.config.config import Config
    from quire.config.facts import ModelFacts

Head = Literal["embed", "classify", "tokens", "reward"]
Activation = Literal["identity", "sigmoid", "softmax"]
Role = Literal["query", "document"]  # of a text in retrieval

COLBERT = "HF_ColBERT"  # the class of Stanford's ColBERT checkpoints
# how class names of config.json end -> what the model has in place of an LM head
HEADS: Mapping[str, Head] = {
    "ForSequenceClassification": "classify", "ForTokenClassification": "tokens", "ForRewardModel": "reward",
    "ForProcessRewardModel": "reward", "RewardModel": "reward", "EmbeddingModel": "embed", "Model": "embed",
    "ForMaskedLM": "embed", COLBERT: "embed",
}  # fmt: skip
TASKS: Mapping[str, tuple[str, str]] = {  # what `task`, the older argument, stands for: runner, convert
    "auto": ("auto", "auto"), "generate": ("generate", "none"), "embed": ("pooling", "embed"),
    "embedding": ("pooling", "embed"), "classify": ("pooling", "classify"), "score": ("pooling", "classify"),
    "reward": ("pooling", "auto"),
}  # fmt: skip
SEQUENCE_TYPES = ("LAST", "CLS", "MEAN")
TOKEN_TYPES = ("ALL", "STEP")
SETTINGS = ("pooling_type", "seq_pooling_type", "tok_pooling_type", "normalize", "use_activation", "dimensions", "step_tag_id",
            "returned_token_ids")  # fmt: skip
_NOT_BUILT = {
    "logit_bias": "values are not shifted", "logit_mean": "values are not shifted", "logit_sigma": "values are not scaled",
    "enable_chunked_processing": "long texts are not split and averaged; truncate them or raise max_model_len",
    "max_embed_len": "long texts are not split and averaged; truncate them or raise max_model_len",
    "activation": "its name is use_activation",
}  # fmt: skip
_SCORE = re.compile(r"^(model\.)?(score|classifier)(\.(?P<layer>\d+))?\.(?P<kind>weight|bias)$")
_ACTIVATIONS: Mapping[str, Activation] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_PROBLEMS: Mapping[str, Activation] = {
    "regression": "identity", "single_label_classification": "softmax", "multi_label_classification": "sigmoid",
}  # fmt: skip
ROLES: Mapping[Role, tuple[str, ...]] = {  # names under which models keep the prompt of a role
    "query": ("query",), "document": ("document", "passage", "corpus"),
}  # fmt: skip
CHUNK = 1024  # tokens whose states are pooled at a time


@dataclass
class PoolingArgs:
    runner: str = setting(
        "auto", TEXT, "model", "what the model is for: to generate text, or to pool its hidden states into vectors; auto: by "
        "its architecture and files", choices=("auto", "generate", "pooling"), after="model_impl",
    )  # fmt: skip
    convert: str = setting(
        "auto", TEXT, "model", "what a pooling model without a head of its own becomes: embed returns vectors, classify "
        "returns scores of the tokens in hf_overrides classifier_from_token", choices=("auto", "none", "embed", "classify"),
        after="runner",
    )  # fmt: skip
    task: str = setting(
        "auto", TEXT, "model", "older name of runner and convert together", choices=tuple(TASKS), after="convert"
    )
    pooler_config: dict[str, Any] | None = setting(
        None, OBJECT, "model", f"how hidden states are pooled: {', '.join(SETTINGS)}; default: what the model's files say",
        after="task",
    )  # fmt: skip
    override_pooler_config: dict[str, Any] | None = setting(
        None, OBJECT, "model", "older name of pooler_config", after="pooler_config"
    )
    io_processor_plugin: str | None = setting(
        None, TEXT, "model", "IO processor of an installed package, for pooling requests with data; default: the one that "
        "config.json names", after="override_pooler_config",
    )  # fmt: skip


@dataclass(frozen=True)
class ModelPooling:
    """How a model pools: `Config.features["pooling"]`."""

    head: Head
    tasks: tuple[PoolingTask, ...]
    type: PoolingType  # of one result per prompt
    token_type: PoolingType  # of one result per token
    activate: bool  # by default
    activation: Activation  # of class scores
    size: int  # values of an embedding, or classes
    matryoshka: tuple[int, ...] | None  # lengths that an embedding may be cut to; (): any; None: it must not be cut
    labels: tuple[str, ...] = ()  # of classes, in their order
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    layers: int = 1  # of a classification head; between two there is a ReLU
    bias: bool = False  # of a classification head
    from_tokens: tuple[str, ...] = ()  # tokens whose rows of the LM head are the classes
    difference: bool = False  # the score is the second token's logit minus the first one's
    template: str = ""  # name of a built-in template for pairs of query and document
    files: SentenceFiles | None = None

    @property
    def default_task(self) -> PoolingTask:
        return self.tasks[0]

    def request(self, params: PoolingParams, task: str | None = None) -> Pooling:
        """Return how one request is pooled. Raise InvalidParameter for what this model cannot do."""
        name = params.task or task or self.default_task
        if name not in self.tasks:
            raise InvalidParameter(
                f"task {name!r} is not supported by this model; it supports {', '.join(self.tasks)}.{self._remedy(name)}",
                "task",
            )
        if name == "score":
            name = "embed" if self.head == "embed" else "classify"
        chosen, per_token = cast(PoolingTask, name), name.startswith("token_")
        self._check(params, chosen)
        activate = self.activate if params.activates is None else params.activates
        cut = params.dimensions or self.dimensions if chosen.endswith("embed") else None
        found = Pooling(chosen, self.token_type if per_token else self.type, activate, dimensions=cut)
        if chosen == "token_classify":
            tag = self.step_tag_id if params.step_tag_id is None else params.step_tag_id
            ids = self.returned_token_ids if params.returned_token_ids is None else tuple(params.returned_token_ids)
            kind: PoolingType = "ALL" if tag is None else "STEP"
            return replace(found, type=kind, step_tag_id=tag, returned_token_ids=ids)
        return found

    def before(self, name: str | None, text: bool = True) -> str:
        """Return what goes before a text: the prompt with this name in the model's files.

        name: None: the files' default; "": nothing goes before the text
        text: the input is a text; token ids have no prompt
        """
        prompts = {} if self.files is None else self.files.prompts
        if not name:
            default = None if self.files is None or name is not None or not text else self.files.default_prompt
            return "" if default is None else prompts[default]
        if not text:
            raise InvalidParameter(
                f"prompt_name requires a text, since it goes before texts only; got {name!r}. Remove it", "prompt_name"
            )
        if not prompts:
            raise InvalidParameter(
                f"prompt_name is not supported by this model, whose files have no prompts; got {name!r:.80}. Remove it",
                "prompt_name",
            )
        if name not in prompts:
            raise InvalidParameter(
                f"prompt_name must be one of {', '.join(prompts)}, or empty for no prompt; got {name!r:.80}", "prompt_name"
            )
        return prompts[name]

    @property
    def late(self) -> LateInteraction | None:
        """How queries and documents are read, of a model with a vector for each token; None: all texts alike."""
        return None if self.files is None else self.files.late

    def before_role(self, role: Role) -> str:
        """Return what goes before queries, or before documents, in retrieval: the files' prompt for them, or nothing."""
        prompts = {} if self.files is None else self.files.prompts
        return next((prompts[name] for name in ROLES[role] if name in prompts), "")

    def _remedy(self, task: str) -> str:
        if task in ("embed", "token_embed") and self.head != "embed":
            return " It has a classification head. Use another model for embeddings"
        if task in ("classify", "token_classify", "score"):
            return " Use a model with a classification head, or start the engine with convert='classify'"
        return ""

    def _check(self, params: PoolingParams, task: PoolingTask) -> None:
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions, task)
        if task != "token_classify":
            for name in ("step_tag_id", "returned_token_ids"):
                if getattr(params, name) is not None:
                    raise InvalidParameter(f"{name} requires the task token_classify; got {task}. Remove it", name)
        for token in params.returned_token_ids or ():
            if token >= self.size:
                raise InvalidParameter(
                    f"returned_token_ids must be below {self.size}, the number of the model's classes; got {token}",
                    "returned_token_ids",
                )

    def _check_dimensions(self, dimensions: int, task: str) -> None:
        if not task.endswith("embed"):
            raise InvalidParameter(f"dimensions requires the task embed; got {task}. Remove it", "dimensions")
        if self.matryoshka is None:
            raise InvalidParameter(
                f"dimensions is not supported by this model, which was not trained with Matryoshka representations; got "
                f"{dimensions}. Remove it, or set hf_overrides={{'is_matryoshka': True}} if it was",
                "dimensions",
            )
        if dimensions > self.size:
            raise InvalidParameter(
                f"dimensions must be at most {self.size}, the size of the model's embeddings; got {dimensions}", "dimensions"
            )
        if self.matryoshka and dimensions not in self.matryoshka:
            allowed = ", ".join(map(str, self.matryoshka))
            raise InvalidParameter(f"dimensions must be one of {allowed} for this model; got {dimensions}", "dimensions")


def pooling_of(config: "Config") -> ModelPooling | None:
    """Return how the model pools; None: it generates."""
    return cast("ModelPooling | None", config.features.get("pooling"))


def supported_tasks(config: "Config") -> tuple[str, ...]:
    """Return what requests may ask of the model."""
    found = pooling_of(config)
    return ("generate",) if found is None else found.tasks


def find_pooling(args: Any, facts: "ModelFacts") -> ModelPooling | None:
    """Return how the model pools; None: it generates."""
    runner, convert = _asked(args)
    own = head_of(facts.architecture)
    files = read_sentence_files(facts.files.path) if facts.files.path.is_dir() else None
    if files is None and facts.architecture == COLBERT:
        files = read_colbert_files(facts.files.path, facts.files.weights)
    if files is not None and files.late is not None and files.late.fill and not files.late.attended and not facts.encoder:
        raise ModelError("mask tokens that no token attends to are only supported with encoders; this is a decoder")
    if runner == "generate":
        if own is not None:
            raise ConfigError(f"runner='generate' requires an LM head, and {facts.architecture} has none. Use runner='auto'")
        return None
    asks = files is not None or (facts.files.format == "gguf" and facts.hf.get("pooling_type") is not None)
    if runner == "auto" and convert in ("auto", "none") and (facts.by_transformers or (own is None and not asks)):
        return None
    if convert == "none" and own is None:
        raise ConfigError(
            f"runner='pooling' with convert='none' requires a pooling model; got {facts.architecture}. Set convert"
        )
    settings = read_settings(args.pooler_config if args.override_pooler_config is None else args.override_pooler_config)
    head: Head = "classify" if own is None and convert == "classify" else own or "embed"
    if convert in ("embed", "classify") and own is not None and convert != _converted(own):
        raise ConfigError(f"convert={convert!r} is not supported with {facts.architecture}, which has a head of its own")
    found = _embedder(facts, files) if head == "embed" else _classifier(facts, head, own is None)
    return _with_settings(found, settings)


def head_of(architecture: str) -> Head | None:
    """Return what a model has in place of an LM head; None: it has an LM head."""
    if has_lm_head(architecture):
        return None
    return next((head for ending, head in HEADS.items() if architecture.endswith(ending)), None)


def _asked(args: Any) -> tuple[str, str]:
    """Return `runner` and `convert` after `task`. A convert that changes the model asks for the pooling runner."""
    runner, convert = (args.runner, args.convert) if args.task == "auto" else TASKS[args.task]
    if runner == "auto" and convert in ("embed", "classify"):
        runner = "pooling"
    if runner == "generate" and convert in ("embed", "classify"):
        raise ConfigError(f"convert={convert!r} requires runner='pooling'; got runner='generate'. Remove one of them")
    return runner, convert


def _converted(head: Head) -> str:
    return "embed" if head == "embed" else "classify"


def read_settings(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `pooler_config` checked, with `pooling_type` under seq_pooling_type or tok_pooling_type."""
    given = {name: value for name, value in (given or {}).items() if value is not None}
    for name in given:
        if name in _NOT_BUILT:
            raise ConfigError(f"pooler_config.{name} is not supported: {_NOT_BUILT[name]}. Remove it")
        if name not in SETTINGS:
            raise ConfigError(f"pooler_config has no {name!r}; it has {', '.join(SETTINGS)}")
    found = dict(given)
    kind = found.pop("pooling_type", None)
    if kind is not None:
        found.setdefault("tok_pooling_type" if kind in TOKEN_TYPES else "seq_pooling_type", kind)
    for name, values in (("seq_pooling_type", SEQUENCE_TYPES), ("tok_pooling_type", TOKEN_TYPES)):
        if name in found and found[name] not in values:
            raise ConfigError(f"pooler_config.{name} must be one of {', '.join(values)}; got {found[name]!r}")
    wanted = {name: found[name] for name in ("normalize", "use_activation", "dimensions", "step_tag_id", "returned_token_ids")
              if name in found}  # fmt: skip
    try:
        PoolingParams(**wanted)
    except InvalidParameter as error:
        raise ConfigError(f"pooler_config: {error}") from error
    return found


def _with_settings(found: ModelPooling, settings: Mapping[str, Any]) -> ModelPooling:
    changes: dict[str, Any] = {}
    if "seq_pooling_type" in settings:
        changes["type"] = settings["seq_pooling_type"]
        if "embed" not in found.tasks and found.head == "embed":  # an embedder whose files name no pooling
            changes["tasks"] = ("embed", "token_embed", "score")
    for name, field in (("tok_pooling_type", "token_type"), ("normalize", "activate"), ("use_activation", "activate"),
                        ("step_tag_id", "step_tag_id")):  # fmt: skip
        if name in settings:
            changes[field] = settings[name]
    if "returned_token_ids" in settings:
        changes["returned_token_ids"] = tuple(settings["returned_token_ids"])
    found = replace(found, **changes)
    if found.token_type == "STEP" and found.step_tag_id is None:
        raise ConfigError("pooler_config: tok_pooling_type STEP requires step_tag_id. Add it")
    try:
        asked = {name: settings[name] for name in ("dimensions", "returned_token_ids") if name in settings}
        found.request(PoolingParams(**asked, task="token_classify" if "returned_token_ids" in settings else None))
    except InvalidParameter as error:
        raise ConfigError(f"pooler_config: {error}") from error
    return replace(found, dimensions=settings.get("dimensions"))


def _embedder(facts: "ModelFacts", files: SentenceFiles | None) -> ModelPooling:
    tasks: tuple[PoolingTask, ...] = ("embed", "token_embed", "score")
    stored = facts.hf.get("pooling_type") if facts.files.format == "gguf" else None
    if (files is not None and files.pooling is None) or stored == "NONE":  # every token has a vector
        tasks = ("token_embed", "score")
    default = _default_type(facts, "pooling_type")
    lengths = facts.hf.get("matryoshka_dimensions")
    known = tuple(lengths) if isinstance(lengths, list) and all(type(one) is int for one in lengths) else ()
    return ModelPooling(
        head="embed",
        tasks=tasks,
        type=files.pooling if files is not None and files.pooling is not None else default,
        token_type="ALL",
        activate=files.normalize if files is not None else True,
        activation="identity",
        size=files.dense[-1].outputs if files is not None and files.dense else facts.hidden_size,
        matryoshka=known if known or facts.hf.get("is_matryoshka") else None,
        files=files,
    )


def _default_type(facts: "ModelFacts", name: str) -> PoolingType:
    """Return how a model pools whose files do not say: encoders by what config.json or the GGUF file has under `name`."""
    gguf = facts.files.format == "gguf"
    if not facts.encoder and not gguf:
        return "LAST"
    stored = str(facts.hf.get(name) or ("CLS" if facts.encoder else "LAST")).upper()
    if gguf and stored == "NONE":
        stored = "CLS"
    if stored not in SEQUENCE_TYPES:
        raise ModelError(f"{name} must be one of {', '.join(SEQUENCE_TYPES)}; got {facts.hf.get(name)!r}")
    return cast(PoolingType, stored)


def _classifier(facts: "ModelFacts", head: Head, converted: bool) -> ModelPooling:
    hf = facts.hf
    tokens, difference = _classes_from_tokens(facts) if converted or hf.get("classifier_from_token") else ((), False)
    stored = _stored_head(facts)
    size = (1 if difference else len(tokens)) or stored.get("size") or _count_labels(hf)
    stored_names = hf.get("id2label")
    names = stored_names if isinstance(stored_names, Mapping) else {}
    labels = tuple(str(names.get(str(i), names.get(i, f"LABEL_{i}"))) for i in range(size)) if len(names) == size else ()
    scored: tuple[PoolingTask, ...] = ("score",) if size == 1 else ()
    tasks: tuple[PoolingTask, ...] = ("classify", "token_classify", *scored) if head == "classify" else ("token_classify",)
    reward = head == "reward"
    return ModelPooling(
        head=head,
        tasks=tasks,
        type=_default_type(facts, "classifier_pooling"),
        token_type="ALL",
        activate=not (reward and size == 1),
        activation=_activation_of(hf, size),
        size=size,
        matryoshka=None,
        labels=labels,
        layers=stored.get("layers", 2 if reward else 1),
        bias=stored.get("bias", head != "classify"),
        from_tokens=tokens,
        difference=difference,
        template="qwen3_reranker" if hf.get("is_original_qwen3_reranker") else "",
    )


def _classes_from_tokens(facts: "ModelFacts") -> tuple[tuple[str, ...], bool]:
    tokens, method = facts.hf.get("classifier_from_token"), facts.hf.get("method")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ConfigError(
            f"convert='classify' requires a classification head, and {facts.architecture} has none. Set the tokens whose "
            "logits are the classes: hf_overrides={'classifier_from_token': ['no', 'yes'], 'method': 'from_2_way_softmax'}"
        )
    if method not in (None, "no_post_processing", "from_2_way_softmax"):
        raise ConfigError(f"hf_overrides method must be from_2_way_softmax or no_post_processing; got {method!r}")
    difference = method == "from_2_way_softmax" or (method is None and bool(facts.hf.get("is_original_qwen3_reranker")))
    if difference and len(tokens) != 2:
        raise ConfigError(f"from_2_way_softmax requires two tokens in classifier_from_token; got {len(tokens)}")
    return tuple(tokens), difference


def _stored_head(facts: "ModelFacts") -> dict[str, Any]:
    """Return classes, layers and bias of the head in the weight files; nothing if there are no safetensors."""
    if facts.files.format == "gguf":
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for path in facts.files.weights:
        found |= {name: info.shape for name, info in read_header(path).items() if _SCORE.match(name)}
    weights = sorted(name for name in found if name.endswith("weight"))
    if not weights:
        return {}
    return {
        "size": found[weights[-1]][0], "layers": len(weights), "bias": any(name.endswith("bias") for name in found),
    }  # fmt: skip


def _count_labels(hf: Mapping[str, Any]) -> int:
    labels = hf.get("id2label")
    count = hf.get("num_labels") or (len(labels) if isinstance(labels, Mapping) else 2)
    if type(count) is not int or count < 1:
        raise ModelError(f"num_labels must be a positive integer, got {count!r}")
    return count


def _activation_of(hf: Mapping[str, Any], size: int) -> Activation:
    """Return what turns class logits into scores: what sentence-transformers or transformers stored, else by their number."""
    inner = hf.get("sentence_transformers")
    stored = hf.get("sbert_ce_default_activation_function") or (
        inner.get("activation_fn") if isinstance(inner, Mapping) else None
    )
    if stored is not None:
        name = str(stored).rpartition(".")[2]
        if name not in _ACTIVATIONS:
            raise ModelError(f"the activation of scores {stored!r} is not supported; {', '.join(_ACTIVATIONS)} are")
        return _ACTIVATIONS[name]
    problem = hf.get("problem_type")
    if isinstance(problem, str) and problem in _PROBLEMS:
        return _PROBLEMS[problem]
    return "sigmoid" if size == 1 else "softmax"


def step_bytes(config: "Config") -> int:
    """Return the largest memory of pooling on the device: states of a chunk in float32 and float64, sums of all slots, and the
    float32 results of a step in which every token has one."""
    found = pooling_of(config)
    if found is None:
        return 0
    hidden, tokens = config.facts.hidden_size, config.max_batched_tokens
    states = min(CHUNK, tokens) * hidden * (8 + 4) + tokens * hidden * DTYPE_BYTES[config.dtype]
    return states + config.max_seqs * hidden * 8 + tokens * found.size * 4


def _pools(config: "Config") -> bool:
    return pooling_of(config) is not None


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "drafts of what samples nothing",
        lambda c: _pools(c) and c.speculation is not None,
        lambda _: "speculative_config is not supported with pooling, which generates no tokens. Remove it",
    ),
    Conflict(
        "pooling of what transformers runs",
        lambda c: _pools(c) and c.facts.by_transformers,
        lambda c: (
            f"runner='pooling' is not supported with {c.facts.architecture}, which transformers runs here; only models of a "
            "family of our own are pooled (`quire models` lists them)"
        ),
        "by transformers",
        "runner",
    ),
    Conflict(
        "pooling of states that are projected",
        lambda c: _pools(c) and c.facts.hf.get("word_embed_proj_dim") not in (None, c.facts.hidden_size),
        lambda c: (
            f"runner='pooling' is not supported with {c.facts.architecture} whose word_embed_proj_dim differs from its hidden "
            "size. Use a model of another size"
        ),
    ),
    Conflict(
        "pooling without a model",
        lambda c: _pools(c) and c.args.distributed_executor_backend == "fake",
        lambda _: "distributed_executor_backend='fake' is not supported with pooling, whose values need a model. Remove it",
    ),
    Conflict(
        "scores of tokens without a tokenizer",
        lambda c: (found := pooling_of(c)) is not None and bool(found.from_tokens) and c.args.skip_tokenizer_init,
        lambda _: "classifier_from_token requires a tokenizer. Remove skip_tokenizer_init",
    ),
    Conflict(
        "IO processor of a model that generates",
        lambda c: c.args.io_processor_plugin is not None and pooling_of(c) is None,
        lambda c: f"io_processor_plugin={c.args.io_processor_plugin!r} requires a model that pools. Set runner='pooling'",
    ),
)  # fmt: skip


def check_io_processor(name: str | None) -> None:
    """Raise ConfigError if no installed package has an IO processor of this name. Nothing is imported."""
    if name is not None and name not in (known := find_plugins(IO_PROCESSORS)):
        raise ConfigError(
            f"io_processor_plugin must be the IO processor of an installed package ({', '.join(known) or 'there are none'}); "
            f"got {name!r}{why_missing(IO_PROCESSORS, name)}"
        )


class PoolingModels(Feature):
    name = "pooling"
    conflicts = CONFLICTS
    part = "quire.features.pooling.device:PoolingPart"
    cache_salt = None  # how states are pooled does not change keys and values

    def check(self, args: Any) -> None:
        for name in ("runner", "convert"):
            if args.task != "auto" and getattr(args, name) != "auto":
                raise ConfigError(f"task={args.task!r} stands for runner and convert together. Remove task or {name}")
        if args.pooler_config and args.override_pooler_config:
            raise ConfigError("override_pooler_config is the older name of pooler_config. Remove one of them")
        read_settings(args.pooler_config or args.override_pooler_config)
        check_io_processor(args.io_processor_plugin)

    def resolve(self, args: Any, facts: "ModelFacts") -> ModelPooling | None:
        return find_pooling(args, facts)

    def part_options(self, config: "Config") -> dict[str, Any] | None:
        found = pooling_of(config)
        if found is None:
            return None
        return {"pooling": found, "tokenizer": config.args.tokenizer, "revision": config.args.tokenizer_revision,
                "files": config.facts.files, "reserved": step_bytes(config)}  # fmt: skip

    def memory(self, config: "Config", sizes: Sizes) -> Memory:  # noqa: ARG002
        return Memory(reserved=step_bytes(config)) if _pools(config) else NO_MEMORY
