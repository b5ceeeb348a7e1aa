"""The commands. Each is a file with `add_parser(subparsers)` and `run(namespace) -> int`; torch is imported to run a model."""
