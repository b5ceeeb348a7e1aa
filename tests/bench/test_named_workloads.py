"""The named workloads are what they were when other engines were measured on them."""

import hashlib
from array import array

import pytest

from quire.bench.samples import WORKLOADS, workload
from quire.cli import bench_offline

DIGESTS = {
    ("single", 1000): "0d4c275120bebba6",
    ("single", 128256): "f4e66c6a714d458a",
    ("mixed", 1000): "84f2d4f262eb0223",
    ("mixed", 128256): "22d9ae50e4aebe15",
    ("batch", 1000): "118011b996b30578",
    ("prefill", 1000): "3382a629f67cf7c3",
    ("longctx", 1000): "4524fd83d55af4cb",
    ("shared", 1000): "9dbb8ffcec363c88",
    ("shared", 128256): "4152c8472d98a474",
    ("cpu1", 1000): "4a41cbc022760177",
    ("cpu16", 1000): "4e44441112a7244a",
    ("cpu64", 1000): "204cafe99466bc40",
}


@pytest.mark.parametrize(("name", "vocab_size"), DIGESTS)
def test_the_same_tokens_forever(name: str, vocab_size: int) -> None:
    digest = hashlib.sha256()
    for sample in workload(name, vocab_size):
        assert not isinstance(sample.prompt, str | None)
        digest.update(array("i", [len(sample.prompt), sample.output_tokens, *sample.prompt.tolist()]).tobytes())
    assert digest.hexdigest()[:16] == DIGESTS[name, vocab_size]


def test_the_command_offers_all() -> None:
    assert tuple(WORKLOADS) == bench_offline.WORKLOADS
    assert {name for name, _ in DIGESTS} == set(WORKLOADS)
