"""Batches in OpenAI's format: `quire run-batch`, and /v1/files and /v1/batches of a server with --batch-dir.

    input file ─► lines ─► run ─► calls ─► the app's routes, in process ─► run ─► output file
                            ▲
    quire run-batch: offline.py        /v1/batches: routes.py ─► store.py (files on disk) ◄─ worker.py ─► throttle.py

A line reaches the route of its URL by a function call of the ASGI app, without a socket: the handlers are the server's. Its
answer is one line of the output file, appended when it is complete. So the output file says which lines are done, and a run
that was killed goes on with the others.
"""
