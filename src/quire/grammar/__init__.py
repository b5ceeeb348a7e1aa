"""Structured outputs: which tokens may come next.

    engine process                                  grammar process
    lanes.py    who was slow has a process apart
    client.py   Open, Accept, Close ──────────────► worker.py      one matcher per request
                Opened, Accepted, Masked ◄────────                 llguidance.py, behind the seam of backend.py
                the masks themselves: shared memory     │ vetting.py   forks a child that tries every new grammar first

Compiling is done where it can do no harm: a grammar that eats time, memory or stack takes a child process with it and nothing
else. The grammar process (process.py) is started by the first request that needs it, and again when it is lost. This room knows
no scheduler and no torch.
"""
