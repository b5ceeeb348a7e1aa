"""How long a test waits for what must come. Machines may be busy: a limit is there so that a test ends, not to measure."""

PATIENCE = 240.0  # seconds: many times what the longest wait takes on a machine with four times as much to do as cores
