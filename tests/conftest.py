import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """name -> a tiny random checkpoint of that family, made once by transformers."""
    from models.oracle import FAMILIES, make_checkpoint, open_checkpoint

    made = {}

    def get(name: str):
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            make_checkpoint(FAMILIES[name], directory)
            made[name] = open_checkpoint(directory)
        return made[name]

    return get
