"""/v1/load_lora_adapter and /v1/unload_lora_adapter."""

from pydantic import BaseModel, ConfigDict, Field


class LoadAdapterRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    lora_name: str = Field(min_length=1, max_length=255, description="what requests call it, as their model")
    lora_path: str = Field(min_length=1, max_length=4096, description="its directory, on the server")
    load_inplace: bool = Field(False, description="replace the one of that name; requests that have begun keep the old one")


class UnloadAdapterRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    lora_name: str = Field(min_length=1, max_length=255)
    lora_int_id: int | None = Field(None, description="not needed: the name says which")
