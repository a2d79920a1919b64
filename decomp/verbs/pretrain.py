"""``pretrain target=pycode``: trains the small language model that ships with decomp, and says how good it is.

Writes a Hugging Face folder with ``training.json`` beside it, and on request the page that documents it. Nothing in
either is typed by hand.
"""

from __future__ import annotations

import gzip
import json
import math
import platform
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from decomp.config import schema
from decomp.config.compose import Command
from decomp.config.errors import UserError

if TYPE_CHECKING:  # jax is imported after the options are known to be valid
    from decomp.data.stdlib import Corpus, Document
    from decomp.target.pretrain import Point
    from decomp.target.shape import LlamaShape

PROMPT = "def __init__(self,"
USED = ("target", "data", "seed")
_SAMPLE = 96  # tokens of a continuation


class ModelOptions(schema.Model):
    """Sizes of the model; tied embeddings, gated MLP, no biases."""

    n_layers: PositiveInt
    d_model: PositiveInt
    n_heads: PositiveInt
    n_kv_heads: PositiveInt
    d_mlp: PositiveInt
    vocab: int = Field(ge=257, le=2**16)  # bytes and the separator


class TrainOptions(schema.Model):
    """How it is trained; tokens seen = steps x batch_size x seq_len."""

    steps: int = Field(ge=2)
    batch_size: PositiveInt
    seq_len: int = Field(ge=2)
    muon_lr: PositiveFloat
    adam_lr: PositiveFloat
    warmup_steps: PositiveInt
    weight_decay: schema.NonNegative
    clip: PositiveFloat
    points: PositiveInt


class Options(schema.Model):
    """The keys of conf/verb/pretrain.yaml."""

    out: str
    docs: str | None
    model: ModelOptions
    train: TrainOptions


@dataclass(frozen=True)
class Text:
    """Sizes of the held-out text, for turning nats per token into bits per byte."""

    n_bytes: int
    n_tokens: int

    def bits_per_byte(self, nats_per_token: float) -> float:
        return nats_per_token / math.log(2) * self.n_tokens / self.n_bytes


def main(command: Command) -> int:
    """Trains, measures, writes. Returns 0; raises UserError for options that cannot be."""
    options = parse(command.options)
    cfg = command.config()
    _check_target(cfg, command.overrides)
    shape = _shape(options)
    result = _train(options, shape, cfg.seed, shlex.join(["python", "-m", "decomp", "pretrain", *command.texts]))
    _write(Path(options.out) / "training.json", json.dumps(result, indent=1) + "\n")
    if options.docs is not None:
        _write(Path(options.docs), page(result))
    print(summary(result))
    return 0


def parse(values: dict[str, Any]) -> Options:
    """The verb's options; a UserError lists every one that is wrong."""
    try:
        return Options(**values)
    except ValidationError as error:
        lines = (f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors())
        raise UserError("\n".join(lines)) from None


def _check_target(cfg: schema.RunConfig, overrides: Sequence[str]) -> None:
    unused = [text for text in overrides if text.partition("=")[0] not in USED]
    if unused:
        raise UserError(
            f"{', '.join(unused)}: pretrain reads {', '.join(USED)} and its own keys; see decomp pretrain --help"
        )
    if not (cfg.target.path or "").startswith("builtin:"):
        raise UserError(f"target.path={cfg.target.path}: pretrain trains a built-in target; give target=pycode out=...")


def _shape(options: Options) -> LlamaShape:
    from decomp.target.shape import LlamaShape

    m = options.model
    if m.d_model % m.n_heads or m.n_heads % m.n_kv_heads or m.d_model // m.n_heads % 2:
        raise UserError(
            f"model.d_model={m.d_model}, model.n_heads={m.n_heads}, model.n_kv_heads={m.n_kv_heads}: each must "
            "divide the one before, with an even d_model / n_heads"
        )
    sizes: dict[str, Any] = m.model_dump() | {
        "head_dim": m.d_model // m.n_heads,
        "max_positions": options.train.seq_len,
    }
    return LlamaShape(**sizes, tied=True, rms_eps=1e-5)


def _train(options: Options, shape: LlamaShape, seed: int, command: str) -> dict[str, Any]:
    from decomp.data import stdlib
    from decomp.sites import empty_table
    from decomp.target import llama, pretrain
    from decomp.target.pretrained import save_folder

    begun, t = time.monotonic(), options.train
    corpus = stdlib.read_corpus()
    tokenizer = pretrain.train_tokenizer((d.text for d in corpus.train), shape.vocab)
    # One token more than the model reads: the last is only a target.
    data_cfg = schema.StdlibData(batch_size=t.batch_size, seq_len=t.seq_len + 1)
    data = stdlib.StdlibData(data_cfg, tokenizer, seed)
    separator = stdlib.separator_id(tokenizer)
    assert separator is not None
    # The closing separator lets the end of the last file be scored, as the others' ends are.
    held_out = np.append(np.asarray(stdlib.cached_tokens(tokenizer, corpus, "held_out")), separator).astype(np.int32)
    if len(held_out) <= t.seq_len + 1:
        raise UserError(
            f"train.seq_len={t.seq_len}: the held-out text has {len(held_out)} tokens; choose a smaller one"
        )
    train_text = Text(n_bytes(corpus.train), data.n_train_tokens)
    text = Text(n_bytes(corpus.held_out), len(held_out) - 1)
    rows: list[dict[str, float]] = []

    def report(point: Point) -> None:
        rows.append(_row(point, t, train_text, text))
        print(_plain_row(rows[-1]), flush=True)

    recipe = pretrain.Recipe(seed=seed, **t.model_dump(exclude={"batch_size", "seq_len"}))
    params = pretrain.rounded(pretrain.train(shape, recipe, data.batch, held_out, report))
    save_folder(
        Path(options.out), shape, llama.export_tensors(params, shape, empty_table(shape.matrices())), tokenizer,
        separator=separator,
    )  # fmt: skip
    nll = pretrain.mean_nll(shape, params, held_out, t.seq_len)
    prompt = [separator, *tokenizer.encode(PROMPT).ids]
    room = min(_SAMPLE, shape.max_positions - len(prompt))
    samples = {
        name: PROMPT + tokenizer.decode(pretrain.continuation(shape, params, prompt, room, temperature))
        for name, temperature in (("greedy", 0.0), ("temperature 0.7", 0.7))
    }
    return {
        "command": command,
        "model": options.model.model_dump() | {"parameters": sum(math.prod(s) for s in shape.tensors().values())},
        "train": t.model_dump() | {"seed": seed},
        "corpus": _corpus_facts(corpus, train_text, text),
        "machine": f"Python {platform.python_version()}, {platform.machine()}",
        "minutes": (time.monotonic() - begun) / 60,
        "curve": rows,
        "held_out": {"nats_per_token": nll, "bits_per_byte": text.bits_per_byte(nll)} | gzip_bits(corpus.held_out),
        "samples": samples,
    }


# ---------------------------------------------------------------- figures
def n_bytes(documents: Sequence[Document]) -> int:
    return sum(len(d.text.encode()) for d in documents)


def gzip_bits(documents: Sequence[Document]) -> dict[str, float]:
    """Bits per byte of ``gzip -9``: each file by itself, and all of them as one stream."""
    texts = [d.text.encode() for d in documents]
    total = sum(map(len, texts))
    pack = lambda data: 8 * len(gzip.compress(data, 9, mtime=0)) / total  # noqa: E731
    return {"gzip_per_file": sum(map(pack, texts)), "gzip_concatenated": pack(b"".join(texts))}


def _corpus_facts(corpus: Corpus, train: Text, held_out: Text) -> dict[str, Any]:
    return {
        "hash": corpus.hash,
        "train_files": len(corpus.train),
        "train_bytes": train.n_bytes,
        "train_tokens": train.n_tokens,
        "held_out_files": len(corpus.held_out),
        "held_out_bytes": held_out.n_bytes,
        "held_out_tokens": held_out.n_tokens,
    }


def _row(point: Point, options: TrainOptions, train: Text, held_out: Text) -> dict[str, float]:
    return {
        "step": point.step,
        "tokens": point.step * options.batch_size * options.seq_len,
        "seconds": round(point.seconds, 1),
        "train_bits_per_byte": train.bits_per_byte(point.train),
        "held_out_nats_per_token": point.held_out,
        "held_out_bits_per_byte": held_out.bits_per_byte(point.held_out),
    }


def _plain_row(row: dict[str, float]) -> str:
    return (
        f"step {row['step']}  {row['seconds']:.0f} s  bits per byte: train {row['train_bits_per_byte']:.3f}  "
        f"held out {row['held_out_bits_per_byte']:.3f}"
    )


def summary(result: dict[str, Any]) -> str:
    """The figures in three lines."""
    held = result["held_out"]
    return (
        f"held-out files: {held['bits_per_byte']:.3f} bits per byte; gzip -9: {held['gzip_per_file']:.3f} "
        f"file by file, {held['gzip_concatenated']:.3f} as one stream\n"
        f"{result['model']['parameters']:,} parameters, {result['minutes']:.1f} minutes\n"
        f"{result['samples']['greedy']}"
    )


def page(result: dict[str, Any]) -> str:
    """docs/pycode.md."""
    model, train, corpus, held = (result[key] for key in ("model", "train", "corpus", "held_out"))
    size = lambda part: "{:,} files, {:,} bytes, {:,} tokens".format(  # noqa: E731
        *(corpus[f"{part}_{what}"] for what in ("files", "bytes", "tokens"))
    )
    heads = f"{model['n_heads']} / {model['n_kv_heads']}"
    curve = "\n".join(
        f"| {r['step']} | {r['tokens'] / 1e6:.2f} | {r['seconds']:.0f} | {r['train_bits_per_byte']:.3f} | "
        f"{r['held_out_nats_per_token']:.3f} | {r['held_out_bits_per_byte']:.3f} |"
        for r in result["curve"]
    )
    samples = "\n\n".join(f"{name}:\n\n```python\n{text}\n```" for name, text in result["samples"].items())
    return f"""\
# pycode, the shipped target

Written by the `pretrain` verb; do not edit. The same command trains it again:

    {result["command"]}

A Llama of {model["parameters"]:,} parameters, trained on the source text of the Python standard library.

| | |
|---|---|
| layers; d; heads / kv heads; gated MLP | {model["n_layers"]}; {model["d_model"]}; {heads}; {model["d_mlp"]} |
| vocabulary | {model["vocab"]}, byte-level BPE trained on the training files; tied embeddings |
| positions | {train["seq_len"]} |
| training text | {size("train")} |
| held-out text | {size("held_out")} |
| corpus | {result["machine"]}; hash `{corpus["hash"][:16]}` |
| steps | {train["steps"]:,} of {train["batch_size"]} x {train["seq_len"]} tokens; {result["minutes"]:.0f} minutes |
| peak learning rates | Muon {train["muon_lr"]:g} (blocks' matrices), Adam {train["adam_lr"]:g} (embedding, norms) |

Held-out files are chosen by a hash of their relative path, and are never trained on.

## Held-out figures

By the stored bf16 weights; every held-out token is scored once, in half-overlapping windows of {train["seq_len"]}.

| | bits per byte |
|---|---|
| pycode | {held["bits_per_byte"]:.3f} ({held["nats_per_token"]:.3f} nats per token) |
| gzip -9, file by file | {held["gzip_per_file"]:.3f} |
| gzip -9, all files as one stream | {held["gzip_concatenated"]:.3f} |

## Loss curve

Held-out figures of the curve are estimates from every eighth window.

| step | million tokens | seconds | train bits/byte | held-out nats/token | held-out bits/byte |
|---|---|---|---|---|---|
{curve}

## Samples

Continuations of `{PROMPT}`.

{samples}
"""


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({error.strerror}); choose another path") from None
