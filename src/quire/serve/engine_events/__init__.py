"""`GET /engine/events`: live events of the engine (docs/events.md). They never contain text of requests."""
