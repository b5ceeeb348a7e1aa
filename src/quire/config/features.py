"""All features, in the order in which their step parts run."""

from quire.features.determinism.host import Determinism
from quire.features.experts.host import ExpertParallel
from quire.features.host import Feature
from quire.features.kv_quant.host import QuantizedCache
from quire.features.logits_processors.host import LogitsProcessors
from quire.features.lora.host import LoRA
from quire.features.media.host import Media
from quire.features.pooling.host import PoolingModels
from quire.features.profiling.host import Profiling
from quire.features.quantization.host import QuantizedWeights
from quire.features.recurrent.host import Recurrent
from quire.features.speculation.host import SpeculativeDecoding
from quire.features.structured.host import StructuredOutputs
from quire.features.tiers.host import Tiers
from quire.types.prompts import Extras

FEATURES: tuple[Feature, ...] = (
    Determinism(), ExpertParallel(), QuantizedWeights(), QuantizedCache(), PoolingModels(), LoRA(), Media(), Recurrent(),
    SpeculativeDecoding(), StructuredOutputs(), LogitsProcessors(), Tiers(), Profiling(),
)  # fmt: skip
SALTS = tuple(feature.cache_salt for feature in FEATURES if feature.cache_salt is not None)


def cache_salt(extras: Extras) -> tuple[str, ...]:
    """Return the salt of a request's prefix-cache key: what its keys and values depend on besides its tokens."""
    return tuple(part for salt in SALTS for part in salt(extras))
