"""Text work that would hold up an event loop, or that may never end, in processes of its own.

`pool` is the event loop's side, `worker` the process, `wire` their messages.
"""
