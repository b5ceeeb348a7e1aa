import pytest


@pytest.fixture(scope="session")
def make_tokenizer():
    """Return a maker of tokenizers of single characters, runs of newlines, and special tokens by attribute."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(*others, **named):
        special = ["<pad>", "<s>", "</s>", "<unk>", *named.values(), *others]
        letters = [chr(code) for code in range(32, 127)] + ["\n" * count for count in range(1, 6)]
        inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(special + letters)}, "<unk>"))
        inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|[\s\S]"), "isolated")
        return PreTrainedTokenizerFast(
            tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
            extra_special_tokens=named, additional_special_tokens=list(others),
        )  # fmt: skip

    return make


class _InThisProcess:
    """Media workers without processes of their own: each would import transformers for every engine of a test."""

    pids = ()

    def __init__(self, source):
        from quire.features.media.workers.worker import MediaWorker

        self._worker = MediaWorker(None, source)

    async def run(self, head, blob, what, parameter):
        import msgspec

        from quire.features.media.workers import wire

        return msgspec.to_builtins(
            self._worker._process(wire.decode_job(b"".join(head)), b"".join(blob)), builtin_types=(bytes,)
        )

    def stop(self):
        pass


class _NoServer:
    def __init__(self, *_):
        pass

    def prepare(self):
        pass

    def close(self):
        pass


@pytest.fixture(scope="module")
def processed_here():
    """Images are processed in this process."""
    from quire.features.media import reader

    def processes(self):
        self._fork_server()
        return _InThisProcess(self._source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "LazyForkServer", _NoServer)
        patch.setattr(reader.MediaReader, "_processes", processes)
        yield
