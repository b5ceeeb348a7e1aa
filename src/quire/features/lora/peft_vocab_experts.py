"""Tensors of an adapter for the vocabulary and for experts.

Vocabulary: replaced rows of embedding and head (`trainable_token_indices`), and added rows.

A tied head uses the replaced rows of its embedding unless it has its own. Added vocabulary needs the same number of rows in
embedding and head; where these are low-rank as well, an added row is the saved row plus the low-rank product.

Experts: two matrices for each matrix of each expert, or two matrices for a parameter that has all experts:

    A [experts * rank, inputs]: expert after expert      B [outputs, rank * experts]: all experts of each rank
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from quire.features.lora.peft_config import EMBEDDING
from quire.features.lora.sites import Addition, ExpertsSite, HeadSite, Site
from quire.types.errors import AdapterError

if TYPE_CHECKING:
    from quire.features.lora.peft import Named


KINDS = {"embedding": 1, "head": 0}  # kind of site -> index of the vocabulary size in its shape


def tokens_of(site: Site) -> int | None:
    """Return the model's vocabulary size if the site has a row for each token; otherwise None."""
    return None if site.kind not in KINDS else next(iter(site.shapes.values()))[KINDS[site.kind]]


@dataclass
class AddedTokens:
    """Checks the vocabulary entries that an adapter adds.

    room: how many the engine has room for
    readable: the API process can read their count from the file's header
    """

    room: int
    readable: bool
    _seen: "dict[int, Named]" = field(default_factory=dict)  # count of added tokens -> a tensor with this count

    def allow(self, named: "Named", shape: tuple[int, ...], site: Site) -> bool:
        """Return whether added tokens are the only difference from the shape. Raise if they are not supported."""
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
        """Return the addition with the rows of added tokens in `more`."""
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
        """Raise unless embedding and head have the same count of added tokens."""
        for named in list(self._seen.values())[1:]:
            raise named.wrong(f"has another count of added tokens than {next(iter(self._seen.values())).name}")
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
    _read: set[str] = field(default_factory=set)  # names whose rows were read

    def read(self, addition: Addition, named: "Named", module: str, site: Site) -> Addition:
        """Return the addition with these rows. Rows of added tokens are written to the adapter's whole matrix."""
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
            raise named.wrong("has rows of a matrix that DoRA changes, which is not supported")
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
        """Give a tied head the rows of its embedding. Raise if a name in `indices` has no rows."""
        for path, site in sites.items():
            source = site.tied_to(sites.values()) if isinstance(site, HeadSite) else None
            given, own = found.get(source or ""), found.get(path, Addition())
            if given is not None and given.tokens is not None and own.tokens is None:
                if own.magnitude is not None:
                    raise AdapterError(f"{path}: DoRA is not supported with trainable_token_indices", "lora_path")
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


# ---- experts

ONE = re.compile(r"^(?P<path>.+)\.(?P<expert>\d+)\.(?P<matrix>gate_proj|up_proj|down_proj)$")
NESTED = ".base_layer"  # of a parameter whose neighbour has additions, too

Target = tuple[ExpertsSite, int | None, str]  # site; expert (None: all); matrix ("": found by its shape)


class Terms(Protocol):
    """Checks of a module against adapter_config.json."""

    def check_rank(self, named: "Named", rank: int, module: str, merged: int = 1) -> None:
        """Raise unless the rank is the configured one. merged: matrices whose ranks are concatenated in it."""

    def check_size(self, down: "Named", up: "Named", module: str) -> None: ...

    def scale_of(self, module: str) -> float: ...


@dataclass(frozen=True)
class Pair:
    down: "Named"
    up: "Named"
    rank: int
    module: str  # as transformers calls it


@dataclass
class ExpertTensors:
    terms: Terms
    _stacks: dict[str, list[Pair]] = field(default_factory=dict)
    _single: dict[str, dict[tuple[int, str], Pair]] = field(default_factory=dict)

    def find(self, path: str, sites: Mapping[str, Site]) -> Target | None:
        match = ONE.match(path)
        if match is not None and isinstance(site := sites.get(match["path"]), ExpertsSite):
            return site, int(match["expert"]), match["matrix"]
        while path.endswith(NESTED):
            path = path.removesuffix(NESTED)
        site = sites.get(path)
        return (site, None, "") if isinstance(site, ExpertsSite) else None

    def add(self, target: Target, down: "Named", up: "Named", module: str) -> None:
        site, expert, matrix = target
        if down.values.ndim != 2 or up.values.ndim != 2:
            raise down.wrong(f"and its lora_B must be matrices, but are {list(down.values.shape)} and {list(up.values.shape)}")
        rank, rest = divmod(down.values.shape[0], site.count if expert is None else 1)
        if rest or down.values.shape[0] != up.values.shape[1]:
            raise down.wrong(f"of shape {list(down.values.shape)} does not go with lora_B of shape {list(up.values.shape)}")
        if not site.holds_floats:
            raise down.wrong("adds to experts, which are quantized on this device. It requires unquantized weights")
        pair = Pair(down, up, rank, module.replace(NESTED, ""))
        self.terms.check_size(down, up, pair.module)
        if expert is None:
            self._stacks.setdefault(site.path, []).append(pair)
            return
        self.terms.check_rank(down, rank, module)
        if site.together:
            raise down.wrong("is of one expert, but the model has all experts in one parameter")
        if expert >= site.count:
            raise down.wrong(f"is of expert {expert}; the model has {site.count}")
        outputs, inputs = (site.hidden, site.inner) if matrix == "down_proj" else (site.inner, site.hidden)
        for named, shape in ((down, (rank, inputs)), (up, (outputs, rank))):
            if tuple(named.values.shape) != shape:
                raise named.wrong(f"has shape {list(named.values.shape)}, where the model needs {list(shape)}")
        self._single.setdefault(site.path, {})[expert, matrix] = pair

    def finish(self, sites: Mapping[str, Site]) -> dict[str, Addition]:
        found: dict[str, Addition] = {}
        swapped = any(_is_transposed(pair, sites[path]) for path, pairs in self._stacks.items() for pair in pairs)
        for path, pairs in self._stacks.items():
            both: dict[str, tuple[Tensor, Tensor]] = {}
            for pair in pairs:
                name, (down, up) = _unfold(pair, sites[path], swapped)
                if name in both or path in self._single:
                    raise pair.down.wrong("is a second addition to the same experts")
                self.terms.check_rank(pair.down, pair.rank, f"{pair.module}.{name}", 2 if name == "gate_up_proj" else 1)
                both[name] = down, up * self.terms.scale_of(f"{pair.module}.{name}")
            found[path] = Addition(gate_up=both.get("gate_up_proj"), back=both.get("down_proj"))
        for path, single in self._single.items():
            site = sites[path]
            assert isinstance(site, ExpertsSite)
            found[path] = self._stack(site, single)
        return found

    def _stack(self, site: ExpertsSite, single: Mapping[tuple[int, str], Pair]) -> Addition:
        """Return the pairs of single experts as stacked matrices, padded to the largest rank."""
        gate_up = {key: pair for key, pair in single.items() if key[1] != "down_proj"}
        back = {key: pair for key, pair in single.items() if key[1] == "down_proj"}
        both: list[tuple[Tensor, Tensor] | None] = []
        for pairs, outputs, inputs in ((gate_up, 2 * site.inner, site.hidden), (back, site.hidden, site.inner)):
            if not pairs:
                both.append(None)
                continue
            totals = [sum(pair.rank for (owner, _), pair in pairs.items() if owner == expert) for expert in range(site.count)]
            down = torch.zeros(site.count, max(totals), inputs)
            up = torch.zeros(site.count, outputs, max(totals))
            used = [0] * site.count
            for (expert, matrix), pair in pairs.items():
                first, last = used[expert], used[expert] + pair.rank
                scale, start = self.terms.scale_of(pair.module), site.inner if matrix == "up_proj" else 0
                down[expert, first:last] = pair.down.values.float()
                up[expert, start : start + pair.up.values.shape[0], first:last] = pair.up.values.float() * scale
                used[expert] = last
            both.append((down, up))
        return Addition(gate_up=both[0], back=both[1])


def _is_transposed(pair: Pair, site: Site) -> bool:
    """Return whether the file surely has [E, inputs, outputs] in place of [E, outputs, inputs], as some versions of PEFT do."""
    assert isinstance(site, ExpertsSite)
    shape = (pair.up.values.shape[0], pair.down.values.shape[1])
    across = {(site.hidden, 2 * site.inner), (site.inner, site.hidden)}
    return shape in across and shape not in {(2 * site.inner, site.hidden), (site.hidden, site.inner)}


def _unfold(pair: Pair, site: Site, swapped: bool) -> tuple[str, tuple[Tensor, Tensor]]:
    assert isinstance(site, ExpertsSite)
    experts, rank = site.count, pair.rank
    down = pair.down.values.float().view(experts, rank, -1)  # [E, rank, K]
    up = pair.up.values.float().view(-1, rank, experts).permute(2, 0, 1)  # [E, N, rank]
    if swapped:
        down, up = up.mT, down.mT
    shape = (up.shape[1], down.shape[2])
    wanted = {(2 * site.inner, site.hidden): "gate_up_proj", (site.hidden, site.inner): "down_proj"}
    if shape not in wanted:
        sizes = " or ".join(f"{n} x {k}" for n, k in wanted)
        raise pair.down.wrong(f"and its lora_B add {shape[0]} x {shape[1]} to every expert, where the model has {sizes}")
    return wanted[shape], (down, up)
