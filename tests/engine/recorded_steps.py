"""A CPU that plays a device which records steps: rows with drafts become rows of one token, and graphs are chosen, borrowed and
replayed as on a GPU, but a replay does the same once more. No kernel is involved; rows beyond a step's own and inputs that stay
where they are, are."""

from dataclasses import replace

import numpy as np
import pytest

from quire.attn import backend
from quire.attn.backend import Room
from quire.attn.reference import ReferenceAttention, make_tiles
from quire.device.base import Prepared
from quire.device.cpu.device import CPUDevice
from quire.runner import graphs
from quire.runner.sampler.pipeline import Sampler

PAGE = 16


class Again:
    def __init__(self, run):
        self.replay = run


class Recorder:
    """What was never run refuses to be recorded, at first."""

    def __init__(self):
        self._warm = False

    def capture(self, run):
        if not self._warm:
            self._warm = True
            raise RuntimeError("not before it was run once")
        return Again(run)

    def taken_bytes(self):
        return 0


class Live:
    """Tiles of rows that are read off the device's arrays when they are run. Tokens that are left over see nothing."""

    def __init__(self, batch, group, window):
        self._batch, self._group, self._window = batch, group, window

    def __iter__(self):
        starts, lengths = self._batch.row_starts.tolist(), self._batch.kv_lengths.tolist()
        rows = [(first, end - first, n) for first, end, n in zip(starts, starts[1:], lengths, strict=False)]
        real = tuple(row if 0 < row[1] <= row[2] else (row[0], 0, 0) for row in rows)
        return iter(make_tiles(replace(self._batch, rows=real, plans={}), self._group, self._window, PAGE))


class Plans:
    def __init__(self, spec):
        self._spec = spec

    def cut(self, counts, lengths, window, find):
        return (), Room(len(counts), 0, int((counts > 1).sum()))

    def size(self, rows, room):
        return 0

    def numbers(self, cut, rows, room):
        return np.empty(0, np.int32)

    def renew(self, cut, lengths, numbers):
        return True

    def attach(self, batch, group, numbers, rows, room):
        batch.plans["reference", group] = Live(batch, group, self._spec.window)


@pytest.fixture
def recording(monkeypatch):
    play_recording(monkeypatch)


def play_recording(monkeypatch):
    """Fused draws are kernels: here the sampler goes on from the logits, as it does for rows that ask for more than a draw."""
    monkeypatch.setattr(graphs, "EAGER_STEPS", 1)
    monkeypatch.setattr(CPUDevice, "records", True)
    monkeypatch.setattr(CPUDevice, "recorder", lambda _: Recorder())
    monkeypatch.setattr(CPUDevice, "prepare", lambda _, model, setting: Prepared(model.run_blocks))
    monkeypatch.setattr(backend, "BACKENDS", {"reference": backend.BACKENDS["reference"]})
    monkeypatch.setattr(ReferenceAttention, "fixed", lambda _, spec, dtype: Plans(spec))
    monkeypatch.setattr(Sampler, "plain", lambda *_: False)
    monkeypatch.setattr(Sampler, "sample_fused", lambda *_: None)
