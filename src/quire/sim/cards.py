"""GPUs by their names: what their makers state, dense (no sparsity), for one card."""

import re
from dataclasses import dataclass

from quire.types.errors import ConfigError

_RATE = re.compile(r"^(?P<number>\d+(\.\d+)?(e\d+)?)\s*(?P<unit>[KMGTP]?)(?P<rest>[A-Za-z/]*)$", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
GIB = 2**30


@dataclass(frozen=True)
class Card:
    name: str
    memory: int  # bytes
    bandwidth: float  # bytes per second
    flops: float  # per second, of 16-bit floats

    def __post_init__(self) -> None:
        for flag, value in (("memory", self.memory), ("bandwidth", self.bandwidth), ("flops", self.flops)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"--{flag} must be above 0, got {value:g}")


CARDS = {
    card.name: card
    for card in (
        Card("a10", 24 * GIB, 600e9, 125e12),
        Card("a100-40g", 40 * GIB, 1555e9, 312e12),
        Card("a100-80g", 80 * GIB, 2039e9, 312e12),
        Card("b200", 180 * GIB, 8e12, 2250e12),
        Card("h100", 80 * GIB, 3350e9, 989e12),
        Card("h100-pcie", 80 * GIB, 2000e9, 756e12),
        Card("h20", 96 * GIB, 4000e9, 148e12),
        Card("h200", 141 * 10**9, 4800e9, 989e12),
        Card("l4", 24 * GIB, 300e9, 121e12),
        Card("l40s", 48 * GIB, 864e9, 362e12),
        Card("mi300x", 192 * GIB, 5300e9, 1307e12),
        Card("rtx-4090", 24 * GIB, 1008e9, 165e12),
        Card("rtx-5090", 32 * GIB, 1792e9, 209e12),
        Card("t4", 16 * GIB, 320e9, 65e12),
    )
}


def find_card(name: str) -> Card:
    card = CARDS.get(name.lower().replace("_", "-").replace(" ", "-"))
    if card is None:
        raise ConfigError(
            f"--card {name!r} is not known; there are {', '.join(CARDS)}; or give --memory instead, and for a simulation "
            "--bandwidth and --flops"
        )
    return card


def read_rate(flag: str, text: str) -> float:
    """`4.8TB/s`, `989T`, `989TFLOPS`, `3.35e12`."""
    match = _RATE.match(text.strip())
    if match is None or match["rest"].lower() not in ("", "b", "b/s", "flops", "flop", "flop/s", "flops/s"):
        raise ConfigError(f"--{flag} {text!r} is not a rate such as {'4.8TB/s' if flag == 'bandwidth' else '989T'}")
    return float(match["number"]) * 1000.0 ** _POWERS[match["unit"].upper()]
