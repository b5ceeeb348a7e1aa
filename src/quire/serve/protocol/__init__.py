"""What goes over the wire: requests as pydantic models (they are checked), answers as typed dicts (they are only written)."""
