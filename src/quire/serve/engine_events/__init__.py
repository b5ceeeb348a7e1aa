"""`GET /engine/events`: what the engine is doing, told to whoever watches (docs/events.md). Never a tenant's text."""
