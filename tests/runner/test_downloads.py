"""Results that are waited for, where what was launched may wait for a process that is gone."""

import pytest
import torch

from quire.runner import transfer
from quire.runner.transfer import Download


class Late:
    """An event that comes when it was asked for so often."""

    def __init__(self, times):
        self.left = times

    def query(self):
        self.left -= 1
        return self.left < 0


def test_others_are_looked_after_meanwhile(monkeypatch):
    monkeypatch.setattr(transfer, "CHECK_INTERVAL_S", 0.0)
    download, asked = Download([torch.ones(2)]), []
    download._event = Late(3)
    assert download.wait(asked.append)[0].tolist() == [1.0, 1.0]
    assert 0 < len(asked) <= 3 and asked == sorted(asked)

    def gone(seconds):
        raise RuntimeError("it is gone")

    download._event = Late(10**9)
    with pytest.raises(RuntimeError, match="gone"):
        download.wait(gone)
