"""Several API processes on one port that share the engines (`--api-server-count`).

    quire serve ─┬─ the router (this process): signals, the listening socket, engines with their supervisors, owners of requests
                 ├─ API process 1   HTTP, tokenizers, templates, detokenization: all of `serve` for one process
                 ├─ API process 2   ...                       all accept from the listening socket that they inherited
                 └─ engine processes

Requests, deltas and calls travel between an API process and the router as msgpack frames over a socket pair (`wire`). A process
that dies is replaced: its connections break, its requests are aborted in the engines, and the other processes go on.
"""
