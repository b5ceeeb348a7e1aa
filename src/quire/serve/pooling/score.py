"""/score and /rerank: how well documents answer a query.

A cross-encoder reads each query and document together and returns the score itself. An embedder reads each text once, and the
score is the cosine of two vectors; a late-interaction model has a vector for each token, and the score is the sum, over the
query's tokens, of the best match in the document.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.features.pooling.host import ModelPooling
from quire.features.pooling.requests import ROLES_OF_PAIRS, engine_template, pair_prompt, similarity
from quire.serve.body import JSONRoute
from quire.serve.errors import ErrorBody, json_response
from quire.serve.limits import refuse_more
from quire.serve.pooling.protocol import RerankList, RerankRequest, ScoreFields, ScoreList, ScoreRequest
from quire.serve.pooling.work import (
    MAX_INPUTS,
    InputReader,
    PoolingJob,
    Result,
    collect,
    entry,
    list_answer,
    make_job,
    model_pooling,
    usage_of,
)
from quire.serve.server import Server, server_of
from quire.text.workers.wire import Cut
from quire.types.errors import InvalidParameter, NotSupported
from quire.types.pooling import PoolingParams, PoolingTask
from quire.types.prompts import Prompt

score_router = APIRouter(route_class=JSONRoute, tags=["pooling"])
rerank_router = APIRouter(route_class=JSONRoute, tags=["Jina, Cohere"])
_ERRORS: dict[int | str, dict[str, Any]] = {400: {"model": ErrorBody}, 404: {"model": ErrorBody}}
SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
_FIELDS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))


@dataclass(frozen=True)
class Pairs:
    """Queries and documents of one request, and the fields that they came in. One query is for all documents."""

    queries: list[str]
    documents: list[str]
    query_field: str
    document_field: str

    def __post_init__(self) -> None:
        refuse_more(self.document_field, len(self.documents), MAX_INPUTS, "texts")
        if not self.queries or not self.documents:
            empty = self.document_field if self.queries else self.query_field
            raise InvalidParameter(f"{empty} is empty: send at least one text", empty)
        if len(self.queries) not in (1, len(self.documents)):
            raise InvalidParameter(
                f"{self.query_field} must be one text or as many as {self.document_field} has ({len(self.documents)}); "
                f"got {len(self.queries)}",
                self.query_field,
            )

    def query(self, i: int) -> int:
        """Return the number of the query of document i."""
        return 0 if len(self.queries) == 1 else i

    @staticmethod
    def names(parameter: str, texts: list[str]) -> list[str]:
        return [entry(parameter, i, len(texts)) for i in range(len(texts))]


def score_task(server: Server) -> PoolingTask:
    """Return the task whose results the model's scores are made of."""
    found = model_pooling(server)
    if found.head != "embed":
        return "score"
    return "embed" if "embed" in found.tasks else "token_embed"


async def compute(
    server: Server, raw: Request, request: ScoreFields, prefix: str, pairs: Pairs, document_tokens: int | None = None
) -> tuple[PoolingJob, list[float], list[Result]]:
    """Return the score of every document, and the results that they were computed from.

    document_tokens: most tokens of a document
    """
    model = request.model or server.names[0]
    task = score_task(server)
    reader = await InputReader.of(server, request.model, request.cache_salt)
    params = PoolingParams(task=task, use_activation=request.use_activation)
    before = _prompts_before(model_pooling(server), request)
    read = partial(_read_apart, before=before) if task != "score" else _read_together
    prompts = await read(reader, request, pairs, document_tokens)
    names = [] if task == "score" else pairs.names(pairs.query_field, pairs.queries)
    names += pairs.names(pairs.document_field, pairs.documents)
    job = make_job(server, raw, request, prefix, model, prompts, params, pairs.document_field, names)
    results = await collect(server, job)
    if task == "score":
        return job, [float(result.outputs.data.reshape(-1)[0]) for result in results], results
    vectors = [result.outputs.data for result in results]
    queries, documents = vectors[: len(pairs.queries)], vectors[len(pairs.queries) :]
    return job, [similarity(queries[pairs.query(i)], document) for i, document in enumerate(documents)], results


# ---- prompts


def _prompts_before(pooling: ModelPooling, request: ScoreFields) -> tuple[str, str]:
    """Return what goes before queries and before documents. /score, which treats both texts alike, has one prompt."""
    chosen = pooling.before(request.prompt_name)
    if not isinstance(request, RerankRequest):
        return chosen, chosen
    if request.prompt_name == "":
        return "", ""
    return pooling.before_role("query") if request.prompt_name is None else chosen, pooling.before_role("document")


async def _read_apart(
    reader: InputReader, request: ScoreFields, pairs: Pairs, document_tokens: int | None, before: tuple[str, str]
) -> list[Prompt]:
    """Read queries, then documents, each as a prompt of its own."""
    special = reader.special(True)
    cut = reader.cut(request, special)
    late = model_pooling(reader.server).late is not None and request.prompt_name != ""
    first, second = ROLES_OF_PAIRS if late else (None, None)
    queries = await reader.texts(pairs.queries, cut, pairs.query_field, before=before[0], role=first)
    if document_tokens is not None:
        keep = reader.kept(min(document_tokens + sum(special), reader.longest), "max_tokens_per_doc", sum(special))
        cut = Cut(reader.longest, keep if cut.keep is None else min(keep, cut.keep), True, *special)
    return queries + await reader.texts(pairs.documents, cut, pairs.document_field, before=before[1], role=second)


async def _read_together(reader: InputReader, request: ScoreFields, pairs: Pairs, document_tokens: int | None) -> list[Prompt]:
    """Read each query and its document as one prompt, joined as the tokenizer joins pairs."""
    tokenizer = reader.prompts.tokenizer
    if tokenizer is None:
        raise InvalidParameter("texts cannot be scored: the server was started with skip_tokenizer_init", pairs.query_field)
    if model_pooling(reader.server).template or engine_template(reader.server.llm.config):
        return await _fill_template(reader, request, pairs, document_tokens)
    template = tokenizer.template
    most = reader.longest
    keep = request.truncate_prompt_tokens
    if keep is not None:
        most = reader.kept(keep, "truncate_prompt_tokens", template.pair_count + 1)
    right = reader.cuts_right(request.truncation_side)
    whole = Cut(1 << 40) if keep is None else Cut(most, most, right)
    shortened = whole if document_tokens is None else Cut(most, min(document_tokens, most), True)
    queries = await reader.texts(pairs.queries, whole, pairs.query_field, add_special_tokens=False)
    documents = await reader.texts(pairs.documents, shortened, pairs.document_field, add_special_tokens=False)
    prompts = []
    for i, document in enumerate(documents):
        first, second = queries[pairs.query(i)].ids, document.ids
        if keep is not None:
            first, second = (
                Cut(most, count, right).of(ids)[1] or []
                for ids, count in zip((first, second), template.fit(len(first), len(second), most), strict=True)
            )
        ids, segment = template.join(first, second)
        if len(ids) > most:
            long_query = len(first) + template.pair_count >= most
            field = pairs.query_field if long_query else pairs.document_field
            name = entry(field, pairs.query(i), len(pairs.queries)) if long_query else entry(field, i, len(documents))
            raise reader.too_long(field, name)
        prompts.append(replace(document, text=None, ids=ids, extras=replace(document.extras, segment=segment)))
    return prompts


async def _fill_template(reader: InputReader, request: ScoreFields, pairs: Pairs, document_tokens: int | None) -> list[Prompt]:
    """Read each query and its document as the model's own template writes them."""
    if document_tokens is not None:
        raise NotSupported("max_tokens_per_doc is not supported with this model's template. Leave it out", "max_tokens_per_doc")
    pooling, keep, most = model_pooling(reader.server), request.truncate_prompt_tokens, reader.longest
    if keep is not None:
        keep = most = reader.kept(keep, "truncate_prompt_tokens")
    template = engine_template(reader.server.llm.config)
    prompts = []
    for i, document in enumerate(pairs.documents):
        query = pairs.queries[pairs.query(i)]
        for text, field in ((query, pairs.query_field), (document, pairs.document_field)):
            if not text:
                raise InvalidParameter(f"{field} has an empty text: send a text", field)
        prompt = await reader.server.llm.offload.thread(
            pair_prompt, reader.prompts, pooling, query, document, keep, reader.extras, template
        )
        if len(prompt.ids) > most:
            raise reader.too_long(pairs.document_field, entry(pairs.document_field, i, len(pairs.documents)))
        prompts.append(reader.finished(prompt))
    return prompts


# ---- /score


def _pairs_of(request: ScoreRequest) -> Pairs:
    sent = [names for names in _FIELDS if all(getattr(request, name) is not None for name in names)]
    names = {name for pair in _FIELDS for name in pair if getattr(request, name) is not None}
    if len(sent) != 1 or names != set(sent[0]):
        raise InvalidParameter(
            "two fields must be sent: text_1 and text_2, data_1 and data_2, queries and documents, or queries and items; "
            f"got {', '.join(sorted(names)) or 'none of them'}",
            sent[0][0] if sent else "text_1",
        )
    [(first, second)] = sent
    texts = [getattr(request, name) for name in (first, second)]
    queries, documents = ([text] if isinstance(text, str) else list(text) for text in texts)
    return Pairs(queries, documents, first, second)


async def create_score(request: ScoreRequest, raw: Request) -> Response:
    server = server_of(raw)
    await server.check(request)
    job, scores, results = await compute(server, raw, request, "score", _pairs_of(request))

    def show(i: int) -> dict[str, Any]:
        return {"index": i, "object": "score", "score": scores[i]}

    return list_answer(server, job, results, show, len(scores))


# ---- /rerank


async def rerank(request: RerankRequest, raw: Request) -> Response:
    server = server_of(raw)
    await server.check(request)
    documents = [one if isinstance(one, str) else one.text for one in request.documents]
    pairs = Pairs([request.query], documents, "query", "documents")
    job, scores, results = await compute(server, raw, request, "rerank", pairs, request.max_tokens_per_doc)
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: request.top_n or len(scores)]
    shown: list[dict[str, Any]] = []
    for i in best:
        document = {"document": {"text": documents[i]}} if request.return_documents else {}
        shown.append({"index": i, **document, "relevance_score": scores[i]})
    usage = usage_of(server, results)
    meta = {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": usage["prompt_tokens"]},
    }
    return json_response({"id": job.id, "model": job.model, "usage": usage, "results": shown, "meta": meta})


for _path in SCORE_PATHS:
    score_router.add_api_route(_path, create_score, methods=["POST"], responses={200: {"model": ScoreList}, **_ERRORS})
for _path in RERANK_PATHS:
    rerank_router.add_api_route(_path, rerank, methods=["POST"], responses={200: {"model": RerankList}, **_ERRORS})
