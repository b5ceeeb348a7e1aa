"""What a model writes becomes events: text, reasoning, tool calls. One machine, one table per format.

`machine` reads, `formats` has the tables, `registry` finds them by name; the rest are readers of what stands inside of a call.
Knows nothing of tokens, HTTP or the engine.
"""
