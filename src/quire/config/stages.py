"""Which layers the stages of a pipeline have."""

from itertools import accumulate, pairwise

from quire.types.errors import ConfigError

PARTITION = "VLLM_PP_LAYER_PARTITION"  # environment: the same, as vLLM has it


def read_partition(text: str) -> tuple[int, ...]:
    """`8,12,12`: layers of each stage."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"pipeline_layer_partition must be how many layers each stage has, such as 8,12,12; got {text!r}")
    return tuple(int(part) for part in parts)


def split_layers(count: int, stages: int, partition: str | None = None) -> tuple[range, ...]:
    """As evenly as can be, if nothing is said; the first stage, which embeds tokens and draws them as well, has none more than
    others. ConfigError = the layers cannot be divided so."""
    if partition is not None:
        sizes = read_partition(partition)
        if len(sizes) != stages:
            raise ConfigError(
                f"pipeline_layer_partition {partition!r} is for {len(sizes)} stages, and pipeline_parallel_size is {stages}"
            )
        if sum(sizes) != count:
            raise ConfigError(
                f"pipeline_layer_partition {partition!r} divides {sum(sizes)} layers, and the model has {count}; "
                "they must add up to that"
            )
        return tuple(range(first, last) for first, last in pairwise(accumulate(sizes, initial=0)))
    if stages > max(count, 1):
        raise ConfigError(
            f"pipeline_parallel_size={stages}: the model's {count} layers cannot be divided among so many stages; {count} is "
            "the most"
        )
    return tuple(range(count * stage // stages, count * (stage + 1) // stages) for stage in range(stages))
