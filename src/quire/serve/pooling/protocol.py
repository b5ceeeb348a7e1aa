"""Request and response bodies of the pooling endpoints: OpenAI's, Jina's, Cohere's and vLLM's names."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from quire.serve.protocol import (
    LARGEST_INT,
    Int64,
    Integer,
    Objects,
    Prompts,
    PromptTokens,
    RequestBody,
    Strings,
    TemplateFields,
    one_error,
)

Task = Literal["embed", "classify", "token_embed", "token_classify"]
EmbeddingType = Literal["float", "base64", "binary", "ubinary"]


class PoolingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokens]


class PoolingFields(RequestBody):
    """What all pooling endpoints have in common."""

    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1, le=LARGEST_INT)] | None = Field(
        None, description="keep this many tokens of each input, special tokens included; -1: as many as the model takes"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="where tokens are cut off; default: the tokenizer's own side, which is right for nearly all models"
    )
    request_id: str | None = Field(None, min_length=1, description="part of the answer's id; X-Request-Id wins")
    priority: Int64 = Field(0, description="lower runs first; needs a server with scheduling_policy=priority")
    cache_salt: str | None = Field(None, min_length=1, description="cached prompts are shared only among equal salts")
    user: str | None = Field(None, description="has no effect, by definition of the API")


class ActivationFields(RequestBody):
    use_activation: bool | None = Field(
        None, description="normalize embeddings, apply softmax or sigmoid to class scores; default: as the model's files say"
    )


class EncodingFields(RequestBody):
    encoding_format: Literal["float", "base64"] = Field("float", description="numbers, or base64 of embed_dtype values")
    embed_dtype: Literal["float32", "float16", "bfloat16"] = Field("float32", description="of base64 values")
    endianness: Literal["native", "little", "big"] = Field("native", description="of base64 values")


class EmbedFields(ActivationFields, EncodingFields):
    dimensions: Annotated[Integer, Field(ge=1, le=LARGEST_INT)] | None = Field(
        None, description="length of the vectors; only for models that were trained to be cut (Matryoshka)"
    )
    normalize: bool | None = Field(None, description="older name of use_activation")
    prompt_name: str | None = Field(
        None, description="the prompt of the model's files that goes before each text; empty: none; default: the files' default"
    )


class InputFields(TemplateFields):
    """`input`, or one conversation in `messages`."""

    input: Prompts = Field(None, description="text, token ids, or a list of either: at most 2,048 inputs")
    messages: Objects | None = Field(None, description="one conversation, pooled as the chat template writes it")
    add_special_tokens: bool | None = Field(  # type: ignore[assignment]
        None, description="the tokenizer's special tokens around each input; default: true for input, false for messages"
    )
    add_generation_prompt: bool = Field(False, description="end the prompt with the start of the assistant's turn")


# ---- /v1/embeddings


class EmbeddingRequest(InputFields, EmbedFields, PoolingFields):
    pass


class Embedding(TypedDict):
    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingList(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


# ---- /v1/embed, /v2/embed


class CohereContent(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class CohereInput(BaseModel):
    model_config = ConfigDict(extra="allow")

    content: list[CohereContent]


class CohereEmbedRequest(RequestBody):
    texts: Strings | None = Field(None, description="at most 2,048 texts")
    inputs: Annotated[list[CohereInput], Field(fail_fast=True)] | None = Field(None, description="texts as lists of parts")
    images: list[Any] | None = Field(None, description="not supported: models here take text only")
    input_type: str | None = Field(None, description="chooses the model's prompt, if its files have prompts")
    embedding_types: Annotated[list[EmbeddingType], Field(fail_fast=True)] | None = None
    output_dimension: Annotated[Integer, Field(ge=1, le=LARGEST_INT)] | None = None
    max_tokens: Annotated[Integer, Field(ge=1, le=LARGEST_INT)] | None = Field(None, description="kept of each text")
    truncate: Literal["NONE", "START", "END"] | None = Field("END", description="which end of a long text is cut off")
    priority: Int64 = 0
    request_id: str | None = None


# ---- /pooling


class PoolingRequest(InputFields, EmbedFields, PoolingFields):
    task: Task | Literal["plugin"] | None = Field(None, description="default: the model's first task, or the IO processor's")
    data: Any = Field(None, description="instead of input: what the server's IO processor takes")


class Pooled(TypedDict):
    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str


class PooledList(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Pooled]
    usage: PoolingUsage


class ProcessedData(TypedDict):
    request_id: str
    created_at: int
    data: Any  # the IO processor's answer


# ---- /classify


class ClassifyRequest(InputFields, ActivationFields, PoolingFields):
    pass


class Classification(TypedDict):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationList(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage


# ---- /score


class ScoreFields(ActivationFields, PoolingFields):
    prompt_name: str | None = Field(
        None, description="of embedders: as in embeddings; /rerank puts it before the query; empty: no prompts"
    )


Texts = Annotated[str | Strings, one_error("should be a text or a list of texts")]


class ScoreRequest(ScoreFields):
    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = Field(None, description="another name of documents")


class Score(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


# ---- /rerank


class TextDocument(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: str


class RerankRequest(ScoreFields):
    query: str
    documents: Annotated[
        list[str | TextDocument], Field(fail_fast=True), one_error('should be a list of texts, or of objects {"text": ...}')
    ]
    top_n: Annotated[Integer, Field(ge=0, le=LARGEST_INT)] | None = Field(
        None, description="how many of the best documents are returned; 0 and null: all"
    )
    return_documents: bool = Field(True, description="results carry the documents' texts")
    max_tokens_per_doc: Annotated[Integer, Field(ge=1, le=LARGEST_INT)] | None = Field(
        None, description="keep this many tokens of each document"
    )


class RerankResult(TypedDict):
    index: int
    document: NotRequired[dict[str, str]]
    relevance_score: float


class RerankList(TypedDict):
    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]
    meta: dict[str, Any]
