"""Ranks on GPUs add, where no GPU is needed to see it."""

import os
import subprocess
import sys
from pathlib import Path

from quire.proc.spawn import environment

RANKS = Path(__file__).with_name("gathering_ranks.py")


def test_cards_that_cannot_read_each_other_gather_by_nccl():
    settings = {**(environment() or os.environ), "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run([sys.executable, str(RANKS)], env=settings, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
