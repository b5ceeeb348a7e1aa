import pytest
from oracle import FAMILIES, Checkpoint, make_checkpoint, open_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(name) -> the family's checkpoint, made once per session."""
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            make_checkpoint(FAMILIES[name], directory)
            made[name] = open_checkpoint(directory)
        return made[name]

    return get
