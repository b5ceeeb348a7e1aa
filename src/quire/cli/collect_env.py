"""`quire collect-env`: versions, hardware, and what Quire chooses on this machine and why, for a report of a problem."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire import __version__
from quire.bench.machine import commit, cpu_name
from quire.config.plugins import describe_plugins

CPU_INFO = Path("/proc/cpuinfo")
INSTRUCTION_SETS = (  # those that kernels and libraries choose by
    "sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip
LIBRARIES = (
    "torch", "triton", "numpy", "openvino", "transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf", "msgspec",
    "jinja2", "llguidance", "xgrammar", "fastapi", "uvicorn", "uvloop", "httptools", "pydantic", "prometheus-client", "ray",
    "opentelemetry-sdk",
)  # fmt: skip
# variables whose values are shown: settings without secrets
SHOWN_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "GOMP_SPINCOUNT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "KMP_AFFINITY",
    "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_ARENA_MAX", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME",
    "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTHONHASHSEED", "PYTHONPATH", "PYTORCH_CUDA_ALLOC_CONF",
    "QUIRE_CACHE", "QUIRE_LOGGING_LEVEL", "QUIRE_LOG_STATS_INTERVAL", "QUIRE_MAX_STOP_STRINGS", "QUIRE_PLUGINS",
    "QUIRE_PLUGIN_TIMEOUT", "QUIRE_SERVER_DEV_MODE",
    "QUIRE_TEMPLATE_SECONDS", "RANK", "TORCH_CUDA_ARCH_LIST", "TRITON_CACHE_DIR", "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_LOGGING_LEVEL", "VLLM_LOG_STATS_INTERVAL", "VLLM_MAX_STOP_STRINGS", "VLLM_PLUGINS", "VLLM_PP_LAYER_PARTITION",
    "VLLM_SERVER_DEV_MODE", "WORLD_SIZE", "XDG_CACHE_HOME",
)  # fmt: skip
# variables of which only is shown that they are set: they may contain a key or a password
HIDDEN_VARIABLES = (
    "QUIRE_API_KEY", "VLLM_API_KEY", "QUIRE_CLUSTER_KEY", "HF_TOKEN", "HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY",
    "http_proxy", "https_proxy", "no_proxy", "RAY_ADDRESS", "OTEL_EXPORTER_OTLP_HEADERS",
)  # fmt: skip
SET = "(set)"
TITLES = {"cpu": "CPU", "gpus": "GPUs", "plugins": "Plug-ins"}
GPU_FIELDS = ("name", "driver_version", "memory.total", "compute_cap", "pci.bus_id")
COMMAND_TIMEOUT_S = 20.0
TYPICAL_HEADS = (32, 8, 128)  # query heads, KV heads and head size of the layer whose attention backend is shown


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "collect-env",
        help="show versions, hardware, and what Quire chooses here",
        description="Shows versions, processor, GPUs, libraries, and which kernels and backends Quire chooses here and why. "
        "Environment variables are shown by a fixed list; of those that may hold a secret, only that they are set.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    found = gather()
    print(json.dumps(found, indent=2) if namespace.json else render(found))
    return 0


def gather() -> dict[str, Any]:
    return {
        "quire": _quire(),
        "system": _system(),
        "cpu": _cpu(),
        "gpus": _gpus(),
        "plugins": describe_plugins(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "chosen": _chosen(),
        "environment": environment(os.environ),
    }


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    shown = {name: variables[name] for name in SHOWN_VARIABLES if name in variables}
    return dict(sorted((shown | {name: SET for name in HIDDEN_VARIABLES if variables.get(name)}).items()))


def _quire() -> dict[str, Any]:
    file = Path(__file__)
    return {"version": __version__, "commit": commit(file), "directory": str(file.parents[1])}


def _system() -> dict[str, Any]:
    libc = " ".join(part for part in platform.libc_ver() if part)
    return {
        "os": _os_name(),
        "kernel": f"{platform.system()} {platform.release()}",
        "libc": libc or None,
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {platform.python_compiler()})",
        "executable": sys.executable,
    }


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def _cpu() -> dict[str, Any]:
    from quire.config.host import available_host_bytes, count_threads, usable_cores

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    flags = cpu_flags()
    return {
        "name": cpu_name(),
        "architecture": platform.machine(),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
        "cpus": os.cpu_count(),
        "allowed_cpus": allowed,
        "usable_cores": usable_cores(),
        "engine_threads": count_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "available_bytes": available_host_bytes(),
    }


def cpu_flags() -> set[str]:
    """Return the instruction sets of the first CPU, by the kernel's names."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))), set())


def _gpus() -> dict[str, Any]:
    """Return the GPUs that the driver lists, or why there are none."""
    question = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(question, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    except FileNotFoundError:
        return {"found": [], "reason": "nvidia-smi is not installed"}
    except (OSError, subprocess.SubprocessError) as error:
        return {"found": [], "reason": f"nvidia-smi: {error}"}
    if done.returncode:
        return {"found": [], "reason": f"nvidia-smi: {(done.stdout or done.stderr).strip().splitlines()[0][:200]}"}
    rows = [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return {"found": [dict(zip(GPU_FIELDS, row, strict=False)) for row in rows], "reason": None}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _chosen() -> dict[str, Any]:
    """Return what `device=auto` and the kernels become here, each with its reason."""
    found: dict[str, Any] = {"c_kernels": _c_kernels()}
    try:
        import torch

        from quire.device.registry import describe, find_device

        name = find_device()
        facts = describe(name)
    except Exception as error:  # the report shows a broken installation, whatever is broken
        return found | {"device": _choice(None, f"{type(error).__name__}: {error}")}
    seen = f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
    built = torch.version.cuda or torch.version.hip
    found["device"] = _choice(name, seen if built else f"torch {torch.__version__} is built without CUDA")
    found["dtype"] = _choice(facts.dtype or "the checkpoint's", "the default of the device")
    layouts = ", ".join(sorted(facts.keeps))
    found["quantized_weights"] = _choice(
        f"stay in {layouts}" if layouts else "are dequantized", facts.advice or "kernels are there"
    )
    if name == "cpu":
        packed = "packed copies, by C kernels" if facts.packs_floats else "torch"
        why = (
            "the kernels are built and the CPU has their instructions"
            if facts.packs_floats
            else ("the C kernels are not built, or this CPU lacks their instructions (AVX-512 VNNI, or ARM's dot products)")
        )
        found["float32_gemm"] = _choice(packed, why)
    found["attention"] = _attention(name, facts.dtype)
    return found


def _choice(value: Any, reason: str) -> dict[str, Any]:
    return {"value": value, "reason": reason}


def _c_kernels() -> dict[str, Any]:
    spec = importlib.util.find_spec("quire.ops._native")
    if spec is None:
        return _choice("not built", "no compiler was there when Quire was installed; install one and reinstall Quire")
    return _choice("built", str(spec.origin))


def _attention(device: str, dtype: str | None) -> dict[str, Any]:
    """Return the attention backend of a typical layer, and why those before it are not used."""
    import torch

    from quire.attn.backend import BACKENDS, AttentionSpec

    heads, kv_heads, head_dim = TYPICAL_HEADS
    spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5)
    number = getattr(torch, dtype or "bfloat16")
    refused: list[str] = []
    for name, target in BACKENDS.items():
        module, attribute = target.split(":")
        try:
            refusals = getattr(importlib.import_module(module), attribute)().refuse(spec, torch.device(device), number)
        except ImportError as error:
            refusals = [str(error)]
        if not refusals:
            shape = f"for {heads} heads, {kv_heads} KV heads, head size {head_dim}"
            return _choice(name, "; ".join([shape, *refused]))
        refused.append(f"{name}: {', '.join(refusals)}")
    return _choice(None, "; ".join(refused))


def render(found: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for section, content in found.items():
        title = TITLES.get(section, section.capitalize())
        lines += ["", title] if lines else [title]
        if section == "gpus":
            rows = [(f"{number}", ", ".join(gpu.values())) for number, gpu in enumerate(content["found"])]
            rows = rows or [("none", content["reason"])]
        elif section == "plugins":
            rows = [(row["name"], f"{row['kind']}, {row['package']}: {row['state']}") for row in content]
        elif section == "chosen":
            rows = [(name, f"{choice['value']} ({choice['reason']})") for name, choice in content.items()]
        else:
            rows = [(name, _text(name, value)) for name, value in content.items()]
        lines += [f"  {name:<20} {text}" for name, text in rows or [("none", "")]]
    return "\n".join(lines)


def _text(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, list):
        return " ".join(value) or "none"
    return "-" if value is None else str(value)
