"""decomp.data.base and decomp.data.stdlib: SPEC R3 and R4, case 17."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from decomp.config import schema
from decomp.config.errors import UserError
from decomp.data import base, stdlib


def byte_tokenizer(*special: str) -> Tokenizer:
    """Every byte is a token; needs no training."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def library(folder: Path, n: int = 200, chars: int = 120) -> Path:
    """A folder like a standard library: file i says only its own number."""
    for i in range(n):
        file = folder / f"pkg{i % 7}" / f"m{i}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"<{i}>" * (chars // len(f"<{i}>")))
    return folder


def data(root: Path, seed: int = 0, **keys: int) -> stdlib.StdlibData:
    values: dict[str, Any] = {"batch_size": 8, "seq_len": 16} | keys
    cfg = schema.StdlibData(**values)
    return stdlib.StdlibData(cfg, byte_tokenizer("<|endoftext|>"), seed, root)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "decomp" / "stdlib"


# ---------------------------------------------------------------- order
@pytest.mark.parametrize("size", [1, 2, 3, 17, 64, 65, 1000, 4097])
def test_permute_is_a_permutation(size: int):
    out = base.permute(np.arange(size), size, key=123)
    assert sorted(out.tolist()) == list(range(size))


def test_permute_mixes_and_depends_on_the_key():
    a, b = (base.permute(np.arange(5000), 5000, key) for key in (1, 2))
    assert (a == b).mean() < 0.01
    for order in (a, b):
        assert abs(np.corrcoef(order, np.arange(5000))[0, 1]) < 0.05
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05


@pytest.mark.parametrize("jitter", [True, False])
def test_each_epoch_reads_every_window_once(jitter: bool):
    windows = base.Windows(np.arange(1003), 10, key=5, what="text", jitter=jitter)
    starts = windows.starts(np.arange(3 * windows.count)).reshape(3, windows.count)
    for epoch in starts:
        assert len(np.unique(epoch)) == windows.count
        assert len(np.unique(epoch % 10)) == 1, "windows of an epoch do not overlap"
        assert epoch.min() >= 0 and epoch.max() + 10 <= 1003
    assert not np.array_equal(starts[0], starts[1])
    assert (len({int(e[0] % 10) for e in starts}) > 1) == jitter


def test_take_does_not_depend_on_how_examples_are_grouped():
    windows = base.Windows(np.arange(403), 10, key=5, what="text")
    whole = windows.take(0, 120)  # three epochs and a bit
    assert np.array_equal(whole, np.concatenate([windows.take(i, 8) for i in range(0, 120, 8)]))
    assert np.array_equal(whole[:, 1:] - whole[:, :-1], np.ones((120, 9)))


# ---------------------------------------------------------------- R3
def test_batch_is_a_pure_function_of_seed_and_step(tmp_path: Path):
    root = library(tmp_path / "lib")
    first, again, other = data(root), data(root), data(root, seed=1)
    assert first.batch(7).shape == (8, 16) and first.batch(7).dtype == np.int32
    late = [first.batch(step) for step in (9, 2, 7)]
    assert all(np.array_equal(b, again.batch(step)) for b, step in zip(late, (9, 2, 7), strict=True))
    assert not np.array_equal(first.batch(7), other.batch(7))
    assert not np.array_equal(first.batch(7), first.batch(8))


def test_seeking_is_constant_time(tmp_path: Path):
    d = data(library(tmp_path / "lib"))
    begun = time.perf_counter()
    d.batch(10**12)
    assert time.perf_counter() - begun < 1.0


# ---------------------------------------------------------------- R4, case 17
def test_held_out_files_are_never_trained_on(tmp_path: Path):
    root = library(tmp_path / "lib")
    d, tokenizer = data(root, seq_len=24), byte_tokenizer("<|endoftext|>")
    corpus = stdlib.read_corpus(root)
    held = {doc.path.split("/m")[1].removesuffix(".py") for doc in corpus.held_out}
    assert 0 < len(held) < 30

    def numbers(rows: np.ndarray) -> set[str]:
        return {n for row in rows for n in re.findall(r"<(\d+)>", tokenizer.decode(row.tolist()))}

    train = set().union(*(numbers(d.batch(step)) for step in range(200)))
    evaluation = set().union(*(numbers(d.eval_batch(i)) for i in range(20)))
    assert evaluation == held
    assert len(train) > 150 and not train & held


def test_evaluation_is_the_same_for_every_seed(tmp_path: Path):
    root = library(tmp_path / "lib")
    assert np.array_equal(data(root, seed=0).eval_batch(3), data(root, seed=1).eval_batch(3))


def test_split_depends_on_the_path_alone(tmp_path: Path):
    a, b = library(tmp_path / "a", n=200), library(tmp_path / "b", n=150, chars=400)
    held = [{d.path for d in stdlib.read_corpus(root).held_out} for root in (a, b)]
    assert held[1] == {p for p in held[0] if int(p.split("/m")[1].removesuffix(".py")) < 150}
    paths = [f"pkg/mod{i}.py" for i in range(20_000)]
    assert 0.045 < np.mean([stdlib.is_held_out(p) for p in paths]) < 0.055


def test_running_interpreter_has_a_library_worth_training_on():
    corpus = stdlib.read_corpus()
    paths = [d.path for d in (*corpus.train, *corpus.held_out)]
    assert sum(len(d.text) for d in corpus.train) > 5e6
    assert 0.02 < sum(len(d.text) for d in corpus.held_out) / sum(len(d.text) for d in corpus.train) < 0.12
    assert not [p for p in paths if "site-packages" in p or "dist-packages" in p or "_sysconfigdata" in p]
    assert "json/decoder.py" in paths


def test_corpus_hash_covers_paths_and_both_parts(tmp_path: Path):
    hashes = [stdlib.read_corpus(library(tmp_path / "lib")).hash]
    for document in (stdlib.read_corpus(tmp_path / "lib").train[0], stdlib.read_corpus(tmp_path / "lib").held_out[0]):
        (tmp_path / "lib" / document.path).write_text("changed")
        hashes.append(stdlib.read_corpus(tmp_path / "lib").hash)
    (tmp_path / "lib" / "pkg0" / "m0.py").rename(tmp_path / "lib" / "pkg0" / "m00.py")
    hashes.append(stdlib.read_corpus(tmp_path / "lib").hash)
    assert len(set(hashes)) == 4


# ---------------------------------------------------------------- documents
def test_only_readable_library_sources_count(tmp_path: Path):
    root = library(tmp_path / "lib")
    before = stdlib.read_corpus(root).hash
    for name in (
        "site-packages/x.py",
        "dist-packages/y.py",
        "__pycache__/z.py",
        "test/t.py",
        "idlelib/idle_test/u.py",
        "config-3/c.py",
        "_sysconfigdata_x.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("print()")
    (root / "latin.py").write_bytes(b"# \xe9\n")
    (root / "empty.py").write_text("")
    (root / "notes.txt").write_text("no code")
    assert stdlib.read_corpus(root).hash == before


@pytest.mark.parametrize("special", [("<|endoftext|>",), ("<s>", "</s>"), ()])
def test_documents_open_with_the_separator(special: tuple[str, ...]):
    tokenizer = byte_tokenizer(*special)
    documents = [stdlib.Document("a.py", "ab"), stdlib.Document("b.py", "cé")]
    ids = stdlib.encode(tokenizer, documents)
    opening = [0] if special else []
    expected = [i for d in documents for i in opening + tokenizer.encode(d.text).ids]
    assert ids.tolist() == expected and ids.dtype == np.uint16


# ---------------------------------------------------------------- cache
def test_second_opening_reads_the_cache(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    root = library(tmp_path / "lib")
    first = data(root)
    assert len(list(cache.iterdir())) == 2

    def never(*_: object) -> None:
        raise AssertionError("encoded again")

    monkeypatch.setattr(stdlib, "encode", never)
    again = data(root)
    assert isinstance(again._train.tokens, np.memmap)
    assert np.array_equal(first.batch(3), again.batch(3)) and np.array_equal(first.eval_batch(3), again.eval_batch(3))


def test_cache_follows_text_and_tokenizer(tmp_path: Path, cache: Path):
    root = library(tmp_path / "lib")
    data(root)
    stdlib.StdlibData(schema.StdlibData(seq_len=16), byte_tokenizer("<s>", "</s>"), 0, root)
    assert len(list(cache.iterdir())) == 4
    (root / "pkg0" / "m0.py").write_text("changed")
    data(root)
    assert len(list(cache.iterdir())) == 6


@pytest.mark.parametrize("damage", [b"", b"not numpy", None])
def test_damaged_cache_is_written_anew(tmp_path: Path, cache: Path, damage: bytes | None):
    root = library(tmp_path / "lib")
    want = data(root).batch(0)
    for file in cache.iterdir():
        file.write_bytes(file.read_bytes()[:-5] if damage is None else damage)
    assert np.array_equal(data(root).batch(0), want)
    assert all(np.load(file).size for file in cache.iterdir())


def test_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = library(tmp_path / "lib")
    want = data(root).batch(0)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert np.array_equal(data(root).batch(0), want)


def test_failed_cache_write_leaves_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    data(library(tmp_path / "lib"))
    assert list(cache.iterdir()) == []


# ---------------------------------------------------------------- a person's mistakes
def test_no_sources(tmp_path: Path):
    with pytest.raises(UserError, match=r"data=stdlib: 0 training and 0 held-out .*installed as source"):
        data(tmp_path)


def test_seq_len_longer_than_a_part(tmp_path: Path):
    root = library(tmp_path / "lib")
    n_eval, n_train = data(root).n_eval_tokens, data(root).n_train_tokens
    with pytest.raises(UserError, match=rf"data.seq_len={n_eval + 1}: the held-out text has only {n_eval} tokens"):
        data(root, seq_len=n_eval + 1)
    with pytest.raises(UserError, match=rf"data.seq_len={n_train + 1}: the training text has only {n_train} tokens"):
        data(root, seq_len=n_train + 1)
    assert data(root, seq_len=n_eval).eval_batch(0).shape == (8, n_eval)
