"""Adapters of a server: loaded at its start (--lora-modules), through /v1/load_lora_adapter, or found by a resolver.

An adapter's name is a model name. A request runs with the version that the name has when the request arrives.

A resolver is asked when a request names a model that the server does not have. It is a class with
`async def resolve_lora(self, base_model_name, lora_name)`, which returns a LoRARequest or None. Packages offer resolvers under
the entry point group `quire.lora_resolvers`; --lora-resolver chooses them. The resolver for a folder is built in.
"""

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Protocol

from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse

from quire.async_llm import AsyncLLM
from quire.config.args import EngineArgs
from quire.config.plugins import LORA_RESOLVERS, find_plugins, why_missing
from quire.config.resolve import choose_names
from quire.config.server_args import ServerArgs
from quire.features.lora.client import NamedAdapter, absolute
from quire.features.lora.host import LoRAModule, read_modules
from quire.files.adapter import CONFIG, AdapterBounds, check_header
from quire.files.reading import shown
from quire.serve.body import JSONRoute
from quire.serve.errors import ErrorBody, HttpError
from quire.serve.protocol import LoadAdapterRequest, UnloadAdapterRequest
from quire.types.adapter import LoRARequest
from quire.types.errors import AdapterError, ConfigError, InvalidParameter, RequestError

logger = logging.getLogger(__name__)

router = APIRouter(route_class=JSONRoute, tags=["LoRA"])
closed_router = APIRouter(include_in_schema=False)

ALLOW_VARIABLES = ("QUIRE_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
FOLDER_VARIABLES = ("QUIRE_LORA_RESOLVER_CACHE_DIR", "VLLM_LORA_RESOLVER_CACHE_DIR")


def updates_allowed(settings: ServerArgs, environment: Mapping[str, str] = os.environ) -> bool:
    asked = any(environment.get(name, "").lower() in ("1", "true") for name in ALLOW_VARIABLES)
    return settings.allow_runtime_lora_updating or asked


def resolver_folder(settings: ServerArgs, environment: Mapping[str, str] = os.environ) -> str | None:
    return settings.lora_resolver_dir or next((environment[name] for name in FOLDER_VARIABLES if environment.get(name)), None)


def check_adapters(settings: ServerArgs, args: EngineArgs) -> None:
    """Check the settings and the files they name before anything is loaded."""
    modules, enabled = read_modules(settings.lora_modules), args.enable_lora
    for name in ("lora_modules", "lora_resolver", "lora_resolver_dir", "allow_runtime_lora_updating"):
        if getattr(settings, name) and not enabled:
            raise ConfigError(f"{name} needs enable_lora")
    if enabled:
        make_resolvers(settings.lora_resolver, resolver_folder(settings))
    for module in modules:
        if module.name in choose_names(args):
            raise ConfigError(f"lora_modules: {module.name!r} is the name of the model itself; give the adapter another one")
        try:
            check_header(absolute(module.path), AdapterBounds(max_rank=args.max_lora_rank))
        except AdapterError as error:
            raise _cannot_be_loaded(module, error) from error


def _cannot_be_loaded(module: LoRAModule, error: RequestError) -> ConfigError:
    return ConfigError(f"lora_modules: {module.name} cannot be loaded: {error}")


class ServedAdapters:
    def __init__(self, llm: AsyncLLM, settings: ServerArgs) -> None:
        self._llm, self._names = llm, llm.adapters
        self._allowed = settings.allowed_lora_path
        self._resolvers: list[LoRAResolver] = []
        if self._names.enabled:
            self._resolvers = make_resolvers(settings.lora_resolver, resolver_folder(settings))
        self._finding: dict[str, asyncio.Task[NamedAdapter | None]] = {}

    @property
    def all(self) -> list[NamedAdapter]:
        return self._names.all

    def get(self, name: str) -> NamedAdapter | None:
        return self._names.find(name)

    async def find(self, name: str) -> NamedAdapter | None:
        """Return the adapter of a name, asking the resolvers if it is not loaded; concurrent requests share the answer."""
        found = self._names.find(name)
        if found is not None or not self._resolvers:
            return found
        if name not in self._finding:
            self._finding[name] = task = asyncio.create_task(self._resolve(name))
            task.add_done_callback(lambda _: self._finding.pop(name, None))
        return await asyncio.shield(self._finding[name])

    async def load(self, name: str, path: str, base: str | None = None, inplace: bool = False, only_new: bool = False) -> None:
        """Load an adapter. Concurrent loads of one name load it once; `only_new` refuses all but the first."""
        if name in self._llm.config.served_names:
            raise InvalidParameter(f"{name!r} is the name of the model itself; give the adapter another one", "lora_name")
        there = self._names.find(name)
        key = self._names.fresh_key() if there is None else there.ref.key
        await self._llm.add_lora(LoRARequest(name, key, path, base, load_inplace=inplace), only_new)

    async def load_from_client(self, name: str, path: str, inplace: bool) -> None:
        for field, value in (("lora_name", name), ("lora_path", path)):
            if not value.isprintable():
                raise InvalidParameter(f"{field} must be of printable characters", field)
        if self._allowed is not None and not await asyncio.to_thread(_inside, absolute(path), self._allowed):
            raise InvalidParameter(
                "lora_path, or a file that a link in it leads to, is outside of the folder that adapters may be loaded from",
                "lora_path",
            )
        try:
            await self.load(name, path, inplace=inplace, only_new=True)
        except AdapterError as error:
            raise HttpError(400, str(error), error.parameter, own=(absolute(path), path)) from error

    async def unload(self, name: str) -> None:
        adapter = self._names.find(name)
        if adapter is None:
            raise HttpError(404, f"The lora adapter '{name}' cannot be found.", "lora_name")
        if not await self._llm.remove_lora(adapter.ref.key):
            raise HttpError(404, f"The lora adapter '{name}' cannot be found.", "lora_name")

    async def _resolve(self, name: str) -> NamedAdapter | None:
        for resolver in self._resolvers:
            try:
                found = await resolver.resolve_lora(self._llm.config.served_names[0], name)
            except RequestError:
                raise
            except Exception:
                logger.exception("a resolver of adapters failed")
                continue
            if found is not None:
                if self._names.find(name) is None:
                    await self.load(name, found.lora_path, found.base_model_name)
                    logger.info("loaded adapter %s from %s, which a resolver found", name, found.lora_path)
                return self._names.find(name)
        return None


async def load_modules(llm: AsyncLLM, settings: ServerArgs) -> None:
    """Load the adapters of --lora-modules; an error ends the server."""
    adapters = ServedAdapters(llm, settings)
    for module in read_modules(settings.lora_modules):
        if adapters.get(module.name) is not None:  # another API process was first
            continue
        try:
            await adapters.load(module.name, module.path, module.base_model_name)
        except RequestError as error:
            raise _cannot_be_loaded(module, error) from error
        logger.info("loaded adapter %s from %s", module.name, module.path)


@router.post("/v1/load_lora_adapter", responses={400: {"model": ErrorBody}})
async def load_adapter(request: LoadAdapterRequest, raw: Request) -> Response:
    adapters: ServedAdapters = raw.app.state.server.adapters
    raw.app.state.server.unknown_fields.log(request, request.model_extra or ())
    with _logged(f"adapter {shown(request.lora_name)} from {shown(request.lora_path)} was not loaded"):
        await adapters.load_from_client(request.lora_name, request.lora_path, request.load_inplace)
    logger.info("loaded adapter %s from %s", request.lora_name, request.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", responses={404: {"model": ErrorBody}})
async def unload_adapter(request: UnloadAdapterRequest, raw: Request) -> Response:
    adapters: ServedAdapters = raw.app.state.server.adapters
    raw.app.state.server.unknown_fields.log(request, request.model_extra or ())
    with _logged(f"adapter {shown(request.lora_name)} was not unloaded"):
        await adapters.unload(request.lora_name)
    logger.info("unloaded adapter %s", request.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


@contextmanager
def _logged(what: str) -> Iterator[None]:
    try:
        yield
    except (RequestError, HttpError) as error:
        logger.warning("%s: %s", what, error.detail if isinstance(error, HttpError) else error)
        raise


async def _closed(_: Request) -> Response:
    raise HttpError(
        404, "adapters cannot be loaded or unloaded here: start the server with --enable-lora --allow-runtime-lora-updating"
    )


for _path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
    closed_router.add_api_route(_path, _closed, methods=["POST"], response_model=None)


def _inside(path: str, folder: str) -> bool:
    """Check that an adapter's directory and all files in it are inside of `folder`, where links lead to."""
    try:
        root, directory = Path(folder).expanduser().resolve(), Path(path).resolve()
        if not directory.is_relative_to(root):
            return False
        folders = [found for found in (directory, directory / "additional_chat_templates") if found.is_dir()]
        links = (file for found in folders for file in found.iterdir() if file.is_symlink() and file.is_file())
        return all(found.resolve().is_relative_to(root) for found in chain(folders, links))
    except (OSError, RuntimeError, ValueError):  # RuntimeError: links lead in a circle; ValueError: a null character
        return False


# ---- resolvers

LONGEST_NAME = 255


class LoRAResolver(Protocol):
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None: ...


class FolderResolver:
    """DIRECTORY/NAME is the adapter NAME. Names that lead out of the directory are unknown."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory).expanduser().absolute()
        if not self._directory.is_dir():
            raise ConfigError(f"lora_resolver_dir {directory!r} is not a directory")

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:  # noqa: ARG002
        if not lora_name or len(lora_name) > LONGEST_NAME or "\0" in lora_name or ".." in Path(lora_name).parts:
            return None
        found = await asyncio.to_thread(self._find, lora_name)
        return None if found is None else LoRARequest(lora_name, 1, str(found))

    def _find(self, name: str) -> Path | None:
        path = self._directory / name
        try:
            inside = path.resolve().is_relative_to(self._directory.resolve()) and path.resolve() != self._directory.resolve()
            return path if inside and (path / CONFIG).is_file() else None
        except (OSError, RuntimeError):  # RuntimeError: links lead in a circle
            return None


def make_resolvers(names: Sequence[str], directory: str | None) -> list[LoRAResolver]:
    found: list[LoRAResolver] = [] if directory is None else [FolderResolver(directory)]
    brought = find_plugins(LORA_RESOLVERS)
    for name in names:
        if name not in brought:
            known, hint = ", ".join(brought) or "none", why_missing(LORA_RESOLVERS, name)
            raise ConfigError(
                f"lora_resolver must be in the entry point group {LORA_RESOLVERS.groups[0]} of an installed package; got "
                f"{name!r}, available: {known}{hint}"
            )
        plugin = brought[name]
        resolver = plugin.run(plugin.load())
        with plugin.blamed():
            if not callable(getattr(resolver, "resolve_lora", None)):
                raise ConfigError("it has no resolve_lora")
        found.append(resolver)
    return found
