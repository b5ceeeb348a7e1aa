"""A grammar process with faults on order: python faulty_grammar.py SOCKET MEMORY.

A pattern that begins with "deadly" kills the process as soon as its text is four tokens long, one with "stuck" keeps it busy
for ever then. One with "frail" kills it whenever another text is followed in the same turn. Masks of one with "slow" take a
tenth of a second of processor time, and those of one with "sleepy" anything up to 40 milliseconds.
"""

import os
import random
import sys
import time

from quire.features.structured.grammar import worker

accept, fill = worker.Live.accept, worker.GrammarWorker._fill
LETHAL = 4


def faulty_accept(self, tokens):
    accept(self, tokens)
    pattern = self.rules.params.regex or ""
    if self.sampled >= LETHAL and pattern.startswith("deadly"):
        os._exit(11)
    if self.sampled >= LETHAL and pattern.startswith("stuck"):
        time.sleep(600)


def faulty_fill(self, places):
    patterns = [live.rules.params.regex or "" for live, _ in places]
    if len(places) > 1 and any(pattern.startswith("frail") for pattern in patterns):
        os._exit(12)
    if any(pattern.startswith("sleepy") for pattern in patterns):
        time.sleep(random.random() * 0.04)
    for pattern in patterns:
        until = time.thread_time() + 0.1 * pattern.startswith("slow")
        while time.thread_time() < until:
            pass
    fill(self, places)


worker.Live.accept, worker.GrammarWorker._fill = faulty_accept, faulty_fill
sys.exit(worker.main(sys.argv[1:]))
