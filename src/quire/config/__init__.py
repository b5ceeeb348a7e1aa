"""What the user asked for and what the model is, resolved once into a frozen `Config`.

This room reads headers and JSON. It does not know torch, pages or requests, and nobody below the engine receives a Config.
"""
