"""A grammar process with faults on order: python faulty_grammar.py SOCKET MEMORY.

A pattern that begins with "deadly" kills the process as soon as its text is four tokens long, one with "stuck" keeps it busy
for ever then. One with "frail" kills it whenever another text is followed in the same turn.
"""

import os
import sys
import time

from quire.grammar import worker

accept, fill = worker.Live.accept, worker.Worker._fill
LETHAL = 4


def faulty_accept(self, tokens):
    accept(self, tokens)
    pattern = self.rules.params.regex or ""
    if self.sampled >= LETHAL and pattern.startswith("deadly"):
        os._exit(11)
    if self.sampled >= LETHAL and pattern.startswith("stuck"):
        time.sleep(600)


def faulty_fill(self, lives):
    if len(lives) > 1 and any((live.rules.params.regex or "").startswith("frail") for live in lives):
        os._exit(12)
    fill(self, lives)


worker.Live.accept, worker.Worker._fill = faulty_accept, faulty_fill
sys.exit(worker.main(sys.argv[1:]))
