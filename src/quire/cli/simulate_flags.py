"""The flags of `quire simulate`."""

import argparse
import math
from pathlib import Path

from quire.cli.bench_serve_flags import YES, Flags, N, X
from quire.cli.plan import read_size
from quire.sim.cards import CARDS
from quire.sim.router import ROUTERS
from quire.sim.trace import FORMATS

FILE = {"metavar": "FILE", "type": Path}
TRAFFIC: Flags = (
    ("trace", "Azure's CSV, Mooncake's JSON lines, ShareGPT's JSON", FILE),
    ("trace-format", "(default: by the file's name)", {"choices": ("auto", *FORMATS), "default": "auto"}),
    ("speedup", "requests of a trace come so many times as fast", X),
    ("workload", "one of `quire bench throughput`, all at once", {"metavar": "NAME"}),
    ("request-rate", "requests a second, where no trace has them", X | {"default": math.inf}),
    ("max-concurrency", "most requests at once, all replicas together", N),
)
GENERATED: Flags = (
    ("input-len", "tokens of prompts (default 1024)", N),
    ("output-len", "tokens of answers (default 128)", N),
    ("range-ratio", "lengths from (1 - X) to (1 + X) times that (default 0)", X),
    ("prefix-len", "tokens before each prompt, shared by many (default 0)", N),
    ("num-prefixes", "different ones of these (default 1)", N),
    ("turns", "of a conversation: a prompt is all that was said before, and more (default 1)", N),
    ("think-time", "seconds between turns (default 10)", X),
    ("burstiness", "of arrivals: 1 is Poisson, below comes in bursts, above is steadier (default 1)", X | {"default": 1.0}),
    ("chars-per-token", "of ShareGPT's texts, where there is no tokenizer", X),
)
DEVICE: Flags = (
    ("card", f"{', '.join(CARDS)}", {"metavar": "NAME"}),
    ("bandwidth", "of a card that is not in the list: 4.8TB/s", {"metavar": "RATE"}),
    ("flops", "of 16-bit floats, dense: 989T", {"metavar": "RATE"}),
    ("timing", "instead of a card: a file of `quire bench steps`", FILE),
)
FLEET: Flags = (
    ("replicas", "engines (default: as few as keep the objective, or 1)", N),
    ("router", "who gets a request (default balancer)", {"choices": ROUTERS, "default": "balancer"}),
    ("slo-ttft", "objective: milliseconds to the first token", X),
    ("slo-tpot", "objective: milliseconds for each token after it", X),
    ("slo-percentile", "of the requests that keep both (default 99)", X | {"default": 99.0}),
    ("max-replicas", "tried at most (default 256)", N | {"default": 256}),
    ("api-ms", "of a request before the engine has it: HTTP, text, messages (default: the file's, or 2.5; 0 --offline)", X),
    ("api-request-ms", "of these, which the API process has for one request at a time (default: the file's, or 1)", X),
    ("api-token-us", "of the API process for each token on its way out (default: the file's, or 45)", X),
    ("offline", "as `LLM` runs, not as a server", YES),
)
REPORT: Flags = (
    ("json", "print JSON", YES),
    ("html", "write a report with plots", FILE),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--num-prompts", "--limit", dest="limit", type=int, metavar="N", default=None,
        help="requests: a trace's first ones (default all), or generated (1000)",
    )  # fmt: skip
    groups = {"generated traffic": GENERATED, "device": DEVICE, "fleet": FLEET, "report": REPORT}
    for group, flags in [(traffic, TRAFFIC), *((parser.add_argument_group(title), flags) for title, flags in groups.items())]:
        if flags is DEVICE:
            group.add_argument("--memory", type=read_size, metavar="SIZE", default=None, help="of the device: 80GiB")
        for name, text, options in flags:
            group.add_argument(f"--{name}", help=text, **options)
