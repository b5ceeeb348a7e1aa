"""Tokens that an adapter adds to a model's own: its embedding and its head have rows beyond the model's, for the same tokens.
Where they are low-rank as well, a row beyond is that of the matrix beside them with what they add to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quire.prepare.adapter_sites import Addition, Site
from quire.types.errors import AdapterError

if TYPE_CHECKING:
    from quire.load.adapter import Named

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
