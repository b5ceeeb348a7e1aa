"""Expert parallelism: memory of redundant experts, and of experts that other engines have."""

from typing import TYPE_CHECKING

from quire.config.eplb import read_eplb
from quire.features.host import NO_MEMORY, Feature, Memory, Sizes
from quire.types.prompts import Extras

if TYPE_CHECKING:
    from quire.config.config import Config


class ExpertParallel(Feature):
    name = "experts"

    def memory(self, config: "Config", sizes: Sizes) -> Memory:
        if not config.args.enable_eplb:
            return NO_MEMORY
        redundant = read_eplb(config.args.eplb_config, config.args.num_redundant_experts).num_redundant_experts
        return Memory(weights=-(-redundant // config.expert_ranks) * sizes.expert)

    def cache_salt(self, extras: Extras) -> tuple[str, ...]:  # noqa: ARG002
        return ()
