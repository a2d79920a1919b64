"""Calibration text that every machine has: the running interpreter's standard library, split by file.

A file belongs to the held-out part by a hash of its relative path, so the split is the same on every machine and
interpreter, and no document is ever in both parts (SPEC R4). Token ids are kept in the user's cache folder
(``$XDG_CACHE_HOME/decomp``), keyed by the hashes of the text and of the tokenizer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer

from decomp.config import schema
from decomp.config.errors import UserError
from decomp.data.base import Windows, name_key

HELD_OUT = 0.05
# The first of these that a tokenizer has opens every document.
SEPARATORS = ("<|begin_of_text|>", "<|endoftext|>", "<s>", "<bos>", "<|im_start|>", "</s>")
_FORMAT = "1"  # of the cache: part of its key
_NOT_OURS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_ENCODE_AT_ONCE = 128  # files; bounds the memory that `tokenizers` keeps for offsets


@dataclass(frozen=True)
class Document:
    """One source file: its path relative to the library's folder (posix) and its text."""

    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents in the order of their paths; ``hash`` covers paths and text of both parts."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    hash: str


def is_held_out(path: str) -> bool:
    """Whether a file is kept for evaluation: about one in twenty, by the hash of its relative path alone."""
    return name_key("stdlib/held-out", path) < HELD_OUT * 2**64


def _is_ours(folder: str) -> bool:
    """Installed packages are not the library; build settings name this machine's folders, not code. The library's own
    tests are over half of the text where they are installed, and many distributions leave them out."""
    return folder not in _NOT_OURS and not folder.startswith("config-")


def _is_source(name: str) -> bool:
    return name.endswith(".py") and not name.startswith(("_sysconfigdata", "sitecustomize"))


def _paths(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = filter(_is_ours, below)  # os.walk goes on into what is left here
        found += (Path(folder, name).relative_to(root) for name in names if _is_source(name))
    return sorted(found, key=lambda path: path.as_posix())


def _read(root: Path, paths: Iterable[Path]) -> Iterable[Document]:
    """Readable UTF-8 files; a few of the library's own tests are in other encodings on purpose."""
    for path in paths:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = (root / path).read_bytes().decode("utf-8")
            if text:
                yield Document(path.as_posix(), text)


def read_corpus(root: str | Path | None = None) -> Corpus:
    """The standard library's text under ``root`` (default: the running interpreter's).

    Raises UserError where there are no sources (a zipped or stripped library) or too few to hold any out.
    """
    folder = Path(root if root is not None else sysconfig.get_path("stdlib"))
    documents = tuple(_read(folder, _paths(folder)))
    train = tuple(d for d in documents if not is_held_out(d.path))
    held_out = tuple(d for d in documents if is_held_out(d.path))
    if not train or not held_out:
        raise UserError(
            f"data=stdlib: {len(train)} training and {len(held_out)} held-out *.py files in {folder}; "
            "use a Python whose standard library is installed as source files"
        )
    return Corpus(train, held_out, _hash_documents(documents))


def _hash_documents(documents: Iterable[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        data = document.text.encode()
        digest.update(f"{document.path}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


# ---------------------------------------------------------------- tokens
def separator_id(tokenizer: Tokenizer) -> int | None:
    """Id of the token that opens a document, None where the tokenizer has none of the known names."""
    ids = (tokenizer.token_to_id(name) for name in SEPARATORS)
    return next((i for i in ids if i is not None), None)


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> Int[np.ndarray, " N"]:
    """All documents as one stream of ids, each opened by the separator; uint16 where the vocabulary allows."""
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    separator = separator_id(tokenizer)
    opening = [] if separator is None else [separator]
    parts = [np.empty(0, dtype)]
    for i in range(0, len(documents), _ENCODE_AT_ONCE):
        texts = [document.text for document in documents[i : i + _ENCODE_AT_ONCE]]
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            parts.append(np.asarray(opening + encoding.ids, dtype))
    return np.concatenate(parts)


def cache_folder() -> Path | None:
    """``$XDG_CACHE_HOME/decomp`` or ``~/.cache/decomp``; None for an account without a home."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "decomp"
    with contextlib.suppress(RuntimeError):
        return Path.home() / ".cache" / "decomp"
    return None


def _open_cached(file: Path) -> Int[np.ndarray, " N"] | None:
    """Memory map of a cache file; None where it is absent or damaged (it is then written anew)."""
    try:
        tokens = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    return tokens if tokens.ndim == 1 and tokens.dtype in (np.uint16, np.uint32) else None


def _write_cached(file: Path, tokens: Int[np.ndarray, " N"]) -> None:
    """Whole file or none: written beside and renamed, so two processes may write at once. No cache is no error."""
    temporary = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=file.stem, delete=False) as handle:
            temporary = handle.name
            np.save(handle, tokens)
        os.replace(temporary, file)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def cached_tokens(tokenizer: Tokenizer, corpus: Corpus, part: str) -> Int[np.ndarray, " N"]:
    """Ids of ``part`` ("train" or "held_out") of the corpus, from the cache where it has them."""
    documents: tuple[Document, ...] = getattr(corpus, part)
    folder = cache_folder()
    if folder is None:
        return encode(tokenizer, documents)
    key = hashlib.sha256("\0".join((_FORMAT, corpus.hash, *SEPARATORS, tokenizer.to_str())).encode()).hexdigest()[:32]
    file = folder / "stdlib" / f"{key}-{part}.npy"
    tokens = _open_cached(file)
    if tokens is None:
        tokens = encode(tokenizer, documents)
        _write_cached(file, tokens)
    return tokens


class StdlibData:
    """``decomp.data.base.Data`` over the standard library (SPEC R3, R4).

    Raises UserError where the library has no sources or a part is shorter than ``data.seq_len``.
    """

    def __init__(self, cfg: schema.StdlibData, tokenizer: Tokenizer, seed: int, root: str | Path | None = None) -> None:
        corpus = read_corpus(root)
        self.batch_size, self.corpus_hash = cfg.batch_size, corpus.hash
        train, held_out = (cached_tokens(tokenizer, corpus, part) for part in ("train", "held_out"))
        self._train = Windows(train, cfg.seq_len, name_key("data/train", seed), "training text")
        # Held-out batches depend on no seed and keep their borders: figures of two runs compare.
        self._eval = Windows(held_out, cfg.seq_len, name_key("data/eval"), "held-out text", jitter=False)

    @property
    def n_train_tokens(self) -> int:
        return len(self._train.tokens)

    @property
    def n_eval_tokens(self) -> int:
        return len(self._eval.tokens)

    def batch(self, step: int) -> Int[np.ndarray, "B T"]:
        """Training tokens of one step, int32; no window twice within an epoch."""
        return self._train.take(step * self.batch_size, self.batch_size)

    def eval_batch(self, index: int) -> Int[np.ndarray, "B T"]:
        """Held-out tokens, int32; ``index`` runs on past the text's end, which then repeats in another order."""
        return self._eval.take(index * self.batch_size, self.batch_size)
