"""Grammars: which tokens may come next.

    engine process                                  grammar process
    client.py   Open, Accept, Close ──────────────► worker.py      one matcher per request
                Opened, Accepted, Masked ◄────────                 llguidance.py or xgrammar.py (interface: backend.py)
                masks: shared memory                    │ vetting.py   forks a child that tries every new grammar first

A grammar that takes too much time, memory or stack while it is compiled ends a child process and nothing else. The first
request that needs a grammar starts the grammar process (wire.py); it is restarted when it is lost. Requests with slow grammars
get a second process (`constraints.py`). This package imports neither the scheduler nor torch.
"""
