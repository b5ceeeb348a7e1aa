"""The engine: one scheduler, one executor, one loop. It knows tokens and steps; text and sockets are outside."""
