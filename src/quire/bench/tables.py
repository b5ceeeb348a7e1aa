"""The offline measurements as people read them."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.bench.offline import Latency, Run, best
from quire.bench.report import WIDTH
from quire.bench.startup import StartupTimes


def heading(title: str, facts: Mapping[str, Any]) -> str:
    lines = [f" {title} ".center(WIDTH, "=")]
    lines += [f"{name + ':':<16} {value}" for name, value in facts.items() if value is not None]
    return "\n".join(lines)


def throughput_lines(name: str, runs: Sequence[Run]) -> list[str]:
    """A line for each run, the best marked."""
    top = best(runs)
    lines = [
        f"{name}: {top.num_requests:,} requests, {top.input_tokens:,} tokens in, {top.output_tokens:,} out",
        f"{'run':>6}{'seconds':>11}{'requests/s':>13}{'output tok/s':>15}{'total tok/s':>14}"
        f"{'first, in/s':>13}{'then, out/s':>13}{'ms/token':>11}",
    ]
    for number, run in enumerate(runs, 1):
        figures, each = run.figures(), run.ms_per_token
        phases = ("-", "-") if run.phases is None else tuple(f"{rate:,.1f}" for rate in run.phases)
        lines.append(
            f"{number:>5}{'*' if run is top and len(runs) > 1 else ' '}"
            f"{run.elapsed_time:>11,.3f}{figures['requests_per_second']:>13,.2f}"
            f"{figures['output_tokens_per_second']:>15,.1f}{figures['tokens_per_second']:>14,.1f}"
            f"{phases[0]:>13}{phases[1]:>13}{'-' if each is None else f'{each:.3f}':>11}"
        )
    return lines


def latency_lines(latency: Latency) -> list[str]:
    return [
        f"{'mean latency (s)':<34}{latency.avg_latency:>12.4f}",
        *(f"{f'P{cut} latency (s)':<34}{value:>12.4f}" for cut, value in latency.percentiles.items()),
        f"{'mean time to first token (ms)':<34}{latency.mean_ttft_ms:>12.3f}",
        f"{'mean time per output token (ms)':<34}{'-' if latency.mean_tpot_ms is None else f'{latency.mean_tpot_ms:.3f}':>12}",
    ]


def startup_lines(starts: Sequence[StartupTimes]) -> list[str]:
    """Each start, and where its seconds went."""
    lines = [f"{'start':<12}{'ready (s)':>11}{'first token (s)':>17}   parts"]
    for number, start in enumerate(starts, 1):
        parts = " + ".join(f"{name} {seconds:.2f}" for name, seconds in start.parts)
        kind = "cold" if start.cold else "warm"
        lines.append(f"{f'{number} ({kind})':<12}{start.ready:>11.2f}{start.first_token:>17.2f}   {parts}")
    return lines
