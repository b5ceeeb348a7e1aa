"""Speculation: whoever guesses the next tokens (`base`), and what becomes of the guesses (`verify`)."""
