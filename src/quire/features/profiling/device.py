"""The profiler of one rank. Traces are written in the process that ran the steps.

Steps go on whatever happens here: what fails is in the answer of `start` or `stop`, or in the log.
"""

import contextlib
import gzip
import logging
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from quire.device.base import Device
from quire.features.base import StepPart
from quire.features.profiling.host import TORCH, ProfilerSettings
from quire.types.plan import StepPlan, StepRows

logger = logging.getLogger(__name__)

Answer = tuple[str, str]  # what became of a call (ok, busy, idle, empty, error), and the file or the reason
TAIL_BYTES = 64
TABLE_ROWS = 50


class TraceRecorder(Protocol):
    def begin(self) -> None: ...

    def pause(self) -> None:
        """Record no more steps."""

    def end(self) -> str:
        """Return the written file; "": there is none."""

    def discard(self) -> None: ...


class CudaRecorder:
    """Mark the range for a profiler outside, such as `nsys profile -c cudaProfilerApi`."""

    def begin(self) -> None:
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]

    def pause(self) -> None:
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]

    def end(self) -> str:
        self.pause()
        return ""

    discard = pause


class TorchRecorder:
    def __init__(self, settings: ProfilerSettings, device: torch.device, name: str) -> None:
        """Raises OSError if no file can be written."""
        self._settings = settings
        folder = Path(settings.torch_profiler_dir)
        folder.mkdir(parents=True, exist_ok=True)
        ending = ".pt.trace.json.gz" if settings.torch_profiler_use_gzip else ".pt.trace.json"
        self._file = folder / f"{name}-{socket.gethostname()}-{os.getpid()}{ending}"
        handle, raw = tempfile.mkstemp(".part", self._file.name, folder)
        os.close(handle)
        self._raw = Path(raw)
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(
            activities=self._activities,
            record_shapes=settings.torch_profiler_record_shapes,
            profile_memory=settings.torch_profiler_with_memory,
            with_stack=settings.torch_profiler_with_stack,
            with_flops=settings.torch_profiler_with_flops,
            acc_events=True,  # otherwise torch warns on CUDA
        )
        self._begun = False

    def begin(self) -> None:
        self._profile.start()
        self._begun = True

    def pause(self) -> None:
        self._profile.toggle_collection_dynamic(False, self._activities)

    def end(self) -> str:
        try:
            self._stop()
            self._profile.export_chrome_trace(str(self._raw))
            self._check()
            self._write_table()
            if self._settings.torch_profiler_use_gzip:
                self._compress()
            self._raw.chmod(0o644)
            self._raw.rename(self._file)
        finally:
            self._raw.unlink(missing_ok=True)
        return str(self._file)

    def discard(self) -> None:
        self._raw.unlink(missing_ok=True)
        if self._begun:
            self._stop()

    def _stop(self) -> None:
        self._begun = False
        self._profile.stop()

    def _check(self) -> None:
        """Raise OSError unless the trace is complete: the profiler does not report a full disk."""
        with self._raw.open("rb") as file:
            file.seek(max(0, self._raw.stat().st_size - TAIL_BYTES))
            if not file.read().rstrip().endswith(b"}"):
                raise OSError(f"{self._file.parent} took only a part of the trace; is the disk full?")

    def _compress(self) -> None:
        packed = self._raw.with_suffix(".gz")
        try:
            with self._raw.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            packed.rename(self._raw)
        finally:
            packed.unlink(missing_ok=True)

    def _write_table(self) -> None:
        if self._settings.torch_profiler_dump_cuda_time_total:
            key = "self_cuda_time_total" if ProfilerActivity.CUDA in self._activities else "self_cpu_time_total"
            table = self._profile.key_averages().table(sort_by=key, row_limit=TABLE_ROWS)
            name = self._file.name.partition(".pt.trace.json")[0]
            self._file.with_name(f"{name}.txt").write_text(table, encoding="utf-8")


class ProfilingPart(StepPart):
    name = "profiling"

    def __init__(self, device: Device, dtype: torch.dtype, settings: ProfilerSettings) -> None:  # noqa: ARG002
        self._device, self._settings = device.torch_device, settings
        self._recorder: TraceRecorder | None = None
        self._profiled = ""  # the name of the profile
        self._delay = self._steps = 0  # steps until it begins, and that were recorded
        self._begun = self._over = False  # whether it records, or records no more
        self._failure = ""  # why it does not

    def start(self, name: str) -> Answer:
        if self._recorder is not None:
            return "busy", self._profiled
        settings = self._settings
        try:
            recorder: TraceRecorder = CudaRecorder()
            if settings.profiler == TORCH:
                recorder = TorchRecorder(settings, self._device, name)
            if not settings.delay_iterations:
                try:
                    recorder.begin()
                except BaseException:
                    recorder.discard()
                    raise
        except Exception as error:
            return "error", _reason(error)
        self._recorder, self._profiled, self._failure = recorder, name, ""
        self._delay, self._steps, self._begun, self._over = settings.delay_iterations, 0, not settings.delay_iterations, False
        return "ok", name

    def stop(self) -> Answer:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return "idle", ""
        if self._failure:
            return "error", self._failure
        if not self._begun:
            recorder.discard()
            return "empty", ""
        try:
            return "ok", recorder.end()
        except Exception as error:
            return "error", _reason(error)

    def discard(self, name: str) -> Answer:
        """Forget a profile that did not begin on all ranks."""
        if self._recorder is not None and self._profiled == name:
            self._discard()
        return "ok", ""

    def prepare(self, plan: StepPlan) -> None:
        if self._recorder is None or self._over or not len(plan.slot):
            return
        try:
            self._count_step(self._recorder)
        except Exception as error:
            self._failure, self._over = _reason(error), True
            logger.exception("the profile %s failed", self._profiled)
            with contextlib.suppress(Exception):
                self._recorder.discard()

    def _count_step(self, recorder: TraceRecorder) -> None:
        """Begin or pause the profile before a step."""
        if self._delay:
            self._delay -= 1
            return
        if not self._begun:
            recorder.begin()
            self._begun = True
        if self._steps == self._settings.max_iterations > 0:
            recorder.pause()
            self._over = True
            return
        self._steps += 1

    def close(self) -> None:
        if self._recorder is not None:
            logger.warning("the profile %s was not stopped: nothing is written", self._profiled)
            self._discard()

    def _discard(self) -> None:
        recorder, self._recorder = self._recorder, None
        with contextlib.suppress(Exception):
            if recorder is not None:
                recorder.discard()

    def graph_key(self, rows: StepRows) -> bool:  # noqa: ARG002
        return False


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
