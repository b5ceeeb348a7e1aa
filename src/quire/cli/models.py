"""`quire models`: list model families, file formats, and the models with short names; `--local`: the models on this disk."""

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.cli.model_store import StoredModel


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "models",
        help="list model families, formats and aliases",
        description="Lists the architectures that Quire implements, the formats it reads, and the models with short names.",
    )
    parser.add_argument("--local", action="store_true", help="list the models on this disk, with their sizes")
    parser.add_argument("--download-dir", default=None, metavar="DIR", help="with --local: the hub's cache directory")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    if namespace.local:
        return _run_local(namespace)
    found = gather()
    print(json.dumps(found, indent=2) if namespace.json else render(found))
    return 0


def gather() -> dict[str, Any]:
    from quire.config.args import DEFAULT_MODEL
    from quire.config.families import architectures, class_path, gguf_rows
    from quire.config.families.composites import COMPOSITES
    from quire.config.quantization import quantization_table
    from quire.features.media.families import FAMILIES
    from quire.files import cache, wheel
    from quire.files.gguf import READABLE_TYPES

    cached = {name: wheel.cached(name) for name in wheel.ALIASES}
    return {
        "architectures": {name: class_path(card) for name, card in sorted(architectures().items())},
        "images_of": sorted(FAMILIES),
        "text_of": sorted(COMPOSITES),
        "fallback": _fallback(),
        "formats": {
            "safetensors": "a directory or hub id with config.json and *.safetensors",
            "gguf": "a .gguf file (or its shards), org/repo:QUANT or org/repo/FILE.gguf; stays in its blocks on a CPU, "
            "in 4, 6 or 8 bits on a GPU if there are kernels for the type, else dequantized",
        },
        "quantization": quantization_table(),
        "gguf_architectures": sorted({row.name for _, row in gguf_rows()}),
        "gguf_types": list(READABLE_TYPES),
        "default": DEFAULT_MODEL,
        "cache": str(cache.cache_directory()),
        "aliases": {
            name: {
                "what": model.what,
                "from": f"the wheel {model.requirement} of the package index",
                "bytes": model.nbytes,
                "cached": None if cached[name] is None else str(cached[name]),
            }
            for name, model in wheel.ALIASES.items()
        },
    }


def _fallback() -> str | None:
    """Return the version of transformers, which serves all other architectures, or None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def render(found: dict[str, Any]) -> str:
    families: dict[str, list[str]] = {}
    for architecture, target in found["architectures"].items():
        families.setdefault(target.partition(":")[0].removeprefix("quire.models."), []).append(architecture)
    lines = ["Architectures"]
    lines += [f"  {family:<12} {', '.join(names)}" for family, names in sorted(families.items())]
    lines.append(f"  {'images of':<12} {', '.join(found['images_of'])}, where the text model is one of these")
    text_only = [name for name in found["text_of"] if name not in found["images_of"]]
    lines.append(f"  {'text of':<12} {', '.join(text_only)}, likewise; their images are refused")
    version = found["fallback"]
    lines.append(
        f"  {'others':<12} " + (f"through transformers {version}" if version else "need `pip install quire[transformers]`")
    )
    lines += ["", "Formats"]
    lines += [f"  {name:<12} {what}" for name, what in found["formats"].items()]
    lines += [f"  {'':<12} architectures: {', '.join(found['gguf_architectures'])}"]
    lines += [f"  {'':<12} types: {', '.join(found['gguf_types'])}"]
    lines += ["", "Quantization of safetensors (which schemes a device runs quantized; others are dequantized)"]
    for name, method in found["quantization"].items():
        native = "; ".join(f"{device} runs {', '.join(kinds)}" for device, kinds in method["kept"].items() if kinds)
        lines.append(f"  {name:<18} {native or ('dequantized' if method['forms'] else 'stays quantized')}")
    lines += ["", f"Aliases (stored in {found['cache']})"]
    for name, alias in found["aliases"].items():
        default = ", the default model" if name == found["default"] else ""
        state = "in the cache" if alias["cached"] else f"{alias['bytes'] / 1e6:.0f} MB, fetched on first use"
        lines.append(f"  {name:<12} {alias['what']}{default}")
        lines.append(f"  {'':<12} from {alias['from']}; {state}")
    return "\n".join(lines)


def _run_local(namespace: argparse.Namespace) -> int:
    from quire.cli.hub_download import hub_directory
    from quire.cli.model_store import stored_models
    from quire.files.cache import cache_directory

    hub = hub_directory(namespace.download_dir)
    models = stored_models(hub)
    if namespace.json:
        print(json.dumps([dataclasses.asdict(model) | {"path": str(model.path)} for model in models], indent=2))
    elif models:
        print(render_local(models))
    else:
        print(f"no models in {hub} or {cache_directory()}: quire pull MODEL fetches one")
    return 0


def render_local(models: "list[StoredModel]") -> str:
    from quire.cli.hub_download import megabytes

    head = ("NAME", "REVISION", "SIZE", "FORMAT", "SERVED", "WHAT")
    rows = [head] + [
        (model.name, model.revision or "-", megabytes(model.nbytes), model.format, "yes" if model.served else "no", model.about)
        for model in models
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows)
