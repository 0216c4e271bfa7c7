"""Tokens are the same on every rank, and making them may take longer than any time-out."""

import dataclasses
import time
from pathlib import Path

from ranks_rig import run_ranks

TIMEOUT_S = 8


def _bring(me, corpus, demo, caches, progress=lambda *_: None):
    from llama405b.data.batches import open_batches
    from llama405b.settings.schema import Data

    me, cache = dataclasses.replace(me, local_rank=0), Path(caches) / me.host  # a host each
    batches = open_batches(Data(paths=(str(corpus),), seq_len=32), Path(demo), cache, me, progress, lambda _: None)
    return batches.mixture.sources[0].tokens_N.tobytes(), [
        str(file.relative_to(caches)) for file in cache.glob("*.bin")
    ]


def test_a_token_file_that_is_damaged_on_any_host_is_made_anew(corpus, demo, tmp_path):
    first = run_ranks(2, _bring, corpus, demo, tmp_path)
    assert first[0][0] == first[1][0]
    for _, [file] in first:
        whole = (tmp_path / file).read_bytes()
        for damaged in (whole[: len(whole) // 8 * 4], whole[:4000] + bytes([whole[4000] ^ 1]) + whole[4001:]):
            (tmp_path / file).write_bytes(damaged)
            assert run_ranks(2, _bring, corpus, demo, tmp_path) == first


def _tokenise_for_long(me, corpus, demo, caches):
    """Rank 0 reads text for longer than a collective may block; returns how often each rank told that it is alive."""
    from llama405b.data import encode, tokens
    from llama405b.data.documents import DocumentLocation, LocatedDocument
    from llama405b.distributed import ranks
    from llama405b.formats.document import Text

    ranks.set_timeout(TIMEOUT_S)
    told = []

    class Slow(tokens.Documents):
        def __iter__(self):
            began = time.monotonic()
            while time.monotonic() < began + TIMEOUT_S + 4:
                time.sleep(0.05)
                yield LocatedDocument(Text("", "text " * 50), DocumentLocation(Path("slow.txt")))
            yield from super().__iter__()

    tokens.Documents, encode.ENCODE_CHUNKS = Slow, 2
    _bring(me, corpus, demo, caches, lambda *bytes_: told.append(bytes_))
    return told


def test_no_rank_times_out_while_rank_0_tokenises(corpus, demo, tmp_path):
    is_rank0, waits = run_ranks(2, _tokenise_for_long, corpus, demo, tmp_path)
    assert len(is_rank0) > 10
    assert all(total > 0 for _, total in is_rank0[3:])
    waiting = [told for told in waits if told == (0, 0)]
    assert len(waiting) >= 3
