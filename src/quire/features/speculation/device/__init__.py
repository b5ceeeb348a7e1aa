"""The device half: `part` joins it to the runner, `drafter` is the interface of draft models and heads."""
