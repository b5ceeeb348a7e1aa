"""Rows of embedding and head that an adapter has in place of the model's: `trainable_token_indices`. Of a head that is tied to
its embedding they are the same, unless it has its own."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from quire.load.adapter_config import EMBEDDING
from quire.load.adapter_vocabulary import KINDS, tokens_of
from quire.prepare.adapter_sites import Addition, HeadSite, Site
from quire.types.errors import AdapterError

if TYPE_CHECKING:
    from quire.load.adapter import Named


@dataclass
class TokenRows:
    indices: Mapping[str, tuple[int, ...]]  # AdapterConfig.tokens
    _read: set[str] = field(default_factory=set)  # those of them that there were rows for

    def read(self, addition: Addition, named: "Named", module: str, site: Site) -> Addition:
        """With these rows. Those of tokens that the model does not have go to the whole matrix that is saved beside them."""
        own, name = tokens_of(site), self._name_of(module, site)
        if own is None or name is None:
            raise named.wrong(f"has rows of tokens that trainable_token_indices does not name for {module}")
        self._read.add(name)
        given, wide = self.indices[name], site.shapes[site.path][1 - KINDS[site.kind]]
        if tuple(named.values.shape) != (len(given), wide):
            raise named.wrong(
                f"has shape {list(named.values.shape)}, where {len(given)} of trainable_token_indices need {[len(given), wide]}"
            )
        if addition.magnitude is not None:
            raise named.wrong("has rows of a matrix that DoRA changes, too, which cannot be run together")
        index, rows, whole = torch.tensor(given), named.values, addition.whole
        beyond = index >= own
        if beyond.any():
            if whole is None or int(index.max()) >= len(whole):
                raise named.wrong(
                    f"has a row of token {int(index.max())}, which the model does not have: it has {own:,}, and "
                    "save_embedding_layers saves what an adapter adds to them"
                )
            whole = whole.index_copy(0, index[beyond], rows[beyond].to(whole.dtype))
            index, rows = index[~beyond], rows[~beyond]
        index, order = index.sort()
        return replace(addition, whole=whole, tokens=index if len(index) else None, rows=rows[order] if len(index) else None)

    def finish(self, found: dict[str, Addition], sites: Mapping[str, Site]) -> None:
        """Gives a tied head what its embedding has; raises if there are no rows for something that was named."""
        for path, site in sites.items():
            source = site.tied_to(sites.values()) if isinstance(site, HeadSite) else None
            given, own = found.get(source or ""), found.get(path, Addition())
            if given is not None and given.tokens is not None and own.tokens is None:
                if own.magnitude is not None:
                    raise AdapterError(f"{path}: DoRA and trainable_token_indices cannot be run together there", "lora_path")
                found[path] = replace(own, tokens=given.tokens, rows=given.rows)
                self._read |= {name for name in self.indices if name and path.endswith(name)}
        for name in self.indices.keys() - self._read:
            raise AdapterError(
                f"trainable_token_indices names tokens of {name or 'the embedding'}, and there is no "
                f"{name or 'embed_tokens'}.token_adapter.trainable_tokens_delta",
                "lora_path",
            )

    def _name_of(self, module: str, site: Site) -> str | None:
        if EMBEDDING in self.indices and site.kind == "embedding":
            return EMBEDDING
        fitting = [name for name in self.indices if name and module.endswith(name)]
        if not fitting and isinstance(site, HeadSite) and site.tied and len(self.indices) == 1:
            fitting = [*self.indices]
        return fitting[0] if fitting else None
