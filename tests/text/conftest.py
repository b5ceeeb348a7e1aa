import pytest

from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import read_tokenizer
from text.tiny_tokenizers import KINDS, save


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: read_tokenizer(save(root / name, make(), **config)) for name, (make, config) in KINDS.items()}
