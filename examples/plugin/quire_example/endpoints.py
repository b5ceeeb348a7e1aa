"""An endpoint: POST /example/shout {"prompt": ..., "max_tokens": ...} returns the completion in capital letters."""

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.serve.endpoints import EndpointServer

router = APIRouter(prefix="/example", tags=["example"])


class ShoutRequest(BaseModel):
    prompt: str
    max_tokens: int = Field(16, ge=1, le=256)


@router.post("/shout")
async def shout(request: ShoutRequest, server: Annotated[EndpointServer, Depends(EndpointServer)]) -> dict[str, str]:
    params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, output_kind=RequestOutputKind.FINAL_ONLY)
    text = ""
    async for output in server.llm.generate(request.prompt, params, server.new_id(), cache_tenant=server.tenant):
        text = output.outputs[0].text
    return {"model": server.names[0], "text": text.upper()}
