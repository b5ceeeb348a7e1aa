"""Several API processes on one port, in front of the same engines (`--api-server-count`).

    quire serve ─┬─ the hub (this process): signals, the socket, engines with their supervisors, who has which request
                 ├─ API process 1   HTTP, tokenizers, templates, detokenization: all that `serve` does for one process
                 ├─ API process 2   ...                 all accept from the one socket that they inherited: whoever is idle does
                 └─ engine processes

Requests, deltas and questions go between an API process and the hub over a pair of sockets that nobody else has, as msgpack
frames (`wire`). One that is lost is replaced: its connections break, its requests end in the engines, and nobody else notices.
"""
