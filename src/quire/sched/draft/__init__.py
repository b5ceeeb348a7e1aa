"""Speculation on the host: who guesses tokens from the tokens that are known (`base`), and how many guesses are worth it
(`speculation`). Guesses never change what is sampled. A model that guesses is the device's: `features/speculation/device/`."""
