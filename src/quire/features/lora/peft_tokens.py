"""Rows of embedding and head that an adapter brings: replaced rows (`trainable_token_indices`) and added vocabulary.

A tied head uses the replaced rows of its embedding unless it has its own. Added vocabulary needs the same number of rows in
embedding and head; where these are low-rank as well, an added row is the saved row plus the low-rank product.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from quire.features.lora.peft_config import EMBEDDING
from quire.features.lora.sites import Addition, HeadSite, Site
from quire.types.errors import AdapterError

if TYPE_CHECKING:
    from quire.features.lora.peft import Named


KINDS = {"embedding": 1, "head": 0}  # of a site that has the vocabulary -> which of its two sizes that is


def tokens_of(site: Site) -> int | None:
    """The model's, if it is a layer that has a row for each."""
    return None if site.kind not in KINDS else next(iter(site.shapes.values()))[KINDS[site.kind]]


@dataclass
class AddedTokens:
    room: int  # for so many there is
    readable: bool  # can whoever makes tokens of text see how many there are?
    _seen: "dict[int, Named]" = field(default_factory=dict)  # number of added tokens -> a tensor that has so many

    def allow(self, named: "Named", shape: tuple[int, ...], site: Site) -> bool:
        """Does it differ from the shape by added tokens alone? Raises why it cannot have them."""
        found, own = tuple(named.values.shape), tokens_of(site)
        other = [i for i, size in enumerate(found) if size != shape[i]] if len(found) == len(shape) else []
        if own is None or len(other) != 1 or shape[other[0]] != own or found[other[0]] < own:
            return False
        count = found[other[0]] - own
        if count > self.room:
            raise named.wrong(
                f"has {count} tokens more than the model's {own:,}: added vocabulary needs lora_extra_vocab_size of at least "
                f"{count}, and it is {self.room}"
            )
        if not self.readable:
            raise named.wrong(f"has {count} tokens more than the model's {own:,}: save such an adapter as safetensors")
        if len(found) == 1:
            raise named.wrong(f"has {count} tokens more than the model's {own:,}, which only matrices can have")
        self._seen.setdefault(count, named)
        return True

    def split(self, addition: Addition, site: Site, first: "Named") -> Addition:
        """The rows beyond the model's own, apart."""
        own = tokens_of(site)
        if own is None or not self._seen:
            return addition
        whole, down, up = addition.whole, addition.down, addition.up
        more = None if whole is None or len(whole) == own else whole[own:].float()
        beyond = None
        if down is not None and up is not None and site.kind == "head" and len(up) > own:
            beyond, up = addition.scale * up[own:].float() @ down.float(), up[:own]
        elif down is not None and up is not None and site.kind == "embedding" and down.shape[1] > own:
            beyond, down = addition.scale * down[:, own:].t().float() @ up.t().float(), down[:, :own]
        if beyond is not None:
            if more is None or len(more) != len(beyond):
                raise first.wrong("adds to tokens that the model does not have: save_embedding_layers saves what it adds to")
            more = more + beyond
        return replace(addition, whole=None if whole is None else whole[:own], down=down, up=up, more=more)

    def check(self, found: Mapping[str, Addition], sites: Mapping[str, Site]) -> None:
        """Embedding and head must have the same."""
        for named in list(self._seen.values())[1:]:
            raise named.wrong(f"has another number of added tokens than {next(iter(self._seen.values())).name}")
        for count, named in self._seen.items():
            for path, site in sites.items():
                addition = found.get(path)
                if site.kind in KINDS and (addition is None or addition.more is None or len(addition.more) != count):
                    raise AdapterError(
                        f"tensor {named.name!r} has {count} tokens that the model does not have, and there are no rows of "
                        f"{path} for them; save embedding and head both (modules_to_save or save_embedding_layers)",
                        "lora_path",
                    )


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
