"""decomp.target.pretrain and the verb: the figures are what they say, and a tiny run goes through."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decomp.config.compose import Command
from decomp.config.errors import UserError
from decomp.data import stdlib
from decomp.sites import empty_table
from decomp.target import llama, pretrain, pretrained
from decomp.target.shape import LlamaShape
from decomp.verbs import pretrain as verb

SHAPE = LlamaShape(
    n_layers=2, d_model=16, n_heads=2, n_kv_heads=1, head_dim=8, d_mlp=24, vocab=32, tied=True, max_positions=32
)
RECIPE = pretrain.Recipe(
    steps=90, muon_lr=0.05, adam_lr=0.03, warmup_steps=5, weight_decay=0.01, clip=1.0, seed=0, points=3
)  # fmt: skip


@pytest.fixture(scope="module")
def params() -> llama.Params:
    return llama.init_params(SHAPE, empty_table(SHAPE.matrices()), 0)


# ---------------------------------------------------------------- scoring
@pytest.mark.parametrize("n_tokens", [9, 10, 12, 13, 16, 17, 40, 101])
def test_every_token_is_scored_once_with_context(n_tokens: int):
    starts, counts = pretrain.scored_windows(n_tokens, 8)
    scored = np.zeros(n_tokens, int)
    for start, count in zip(starts, counts, strict=True):
        scored[start + 1 : start + 9] += count.astype(int)
        if start:
            assert not count[:4].any(), "half a window of context"
    assert scored[0] == 0 and (scored[1:] == 1).all()


def test_mean_nll_is_the_mean_over_the_stream(params: llama.Params):
    stream = np.random.default_rng(0).integers(0, 32, 530)
    starts, counts = pretrain.scored_windows(530, 8)
    windows = stream[starts[:, None] + np.arange(9)]
    scores = np.asarray(pretrain.logits(SHAPE, params, jnp.asarray(windows[:, :-1], jnp.int32)), np.float64)
    log_p = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    total = -(np.take_along_axis(log_p, windows[:, 1:, None], -1)[..., 0] * counts).sum()
    assert len(starts) > 64  # more than one call, the last one filled up
    assert pretrain.mean_nll(SHAPE, params, stream, 8) == pytest.approx(total / 529, rel=1e-5)
    assert pretrain.mean_nll(SHAPE, params, stream, 8, every=4) != pytest.approx(total / 529, rel=1e-5)


def test_bits_per_byte():
    # 2 tokens of ln 8 nats are 6 bits; over 3 bytes 2 bits each.
    assert verb.Text(n_bytes=3, n_tokens=2).bits_per_byte(math.log(8)) == pytest.approx(2.0)


def test_gzip_bits():
    documents = [stdlib.Document("a.py", "x = 1\n" * 50), stdlib.Document("b.py", "y = é\n" * 50)]
    texts = [d.text.encode() for d in documents]
    got = verb.gzip_bits(documents)
    assert got["gzip_per_file"] == 8 * sum(len(gzip.compress(t, 9, mtime=0)) for t in texts) / sum(map(len, texts))
    assert got["gzip_concatenated"] < got["gzip_per_file"]


# ---------------------------------------------------------------- training
def test_training_learns_and_decays_to_the_end():
    """A stream whose next token is a function of the last one: from ln 32 to nearly nothing."""
    stream = (np.arange(4000) * 7) % 32
    points: list[pretrain.Point] = []
    batch = lambda step: np.stack([stream[i : i + 17] for i in range(step, step + 8)])  # noqa: E731
    trained = pretrain.train(SHAPE, RECIPE, batch, stream[:600], points.append)
    assert [p.step for p in points] == [30, 60, 90]
    assert points[0].train > points[1].train > points[2].train
    assert points[2].held_out < 0.5 < math.log(32)
    assert pretrain.continuation(SHAPE, trained, [0, 7], 6) == [14, 21, 28, 3, 10, 17]
    assert all((a == b.astype(jnp.bfloat16).astype(jnp.float32)).all() for a, b in zip(
        jax.tree.leaves(pretrain.rounded(trained)), jax.tree.leaves(trained), strict=True))  # fmt: skip


def test_muon_moves_the_blocks_matrices_and_only_them(params: llama.Params):
    """DESIGN 6: optax gives 3-D stacks AdamW unless told otherwise."""
    chosen = pretrain._matrices(params)
    flat = jax.tree_util.tree_leaves_with_path(params)
    labels = jax.tree.leaves(chosen, is_leaf=lambda x: x is None or isinstance(x, tuple))
    frozen = ["frozen" in jax.tree_util.keystr(path) for path, _ in flat]
    assert frozen == [label is not None for label in labels] and any(frozen) and not all(frozen)
    optim = pretrain.optimizer(RECIPE)
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), params)

    @jax.jit
    def two_updates(params: Any, grads: Any) -> Any:  # the first has a learning rate of 0
        with jax.numpy_dtype_promotion("standard"):
            _, state = optim.update(grads, optim.init(params), params)
            return optim.update(grads, state, params)[0]

    updates = two_updates(params, grads)
    update = np.asarray(updates["frozen"]["q_proj"][1] + 0.01 * 0.01 * params["frozen"]["q_proj"][1])
    singular = np.linalg.svd(update, compute_uv=False)
    assert singular.max() / singular.min() < 2.5, "Newton-Schulz brings all singular values near each other"


def test_continuation_follows_the_argmax_and_the_seed(params: llama.Params):
    greedy = pretrain.continuation(SHAPE, params, [3, 1], 5)
    ids = [3, 1]
    for _ in range(5):
        padded = jnp.asarray([ids + [0] * (8 - len(ids))], jnp.int32)
        ids.append(int(pretrain._jit_logits(SHAPE, params, padded)[0, len(ids) - 1].argmax()))
    assert greedy == ids[2:]
    sampled = [pretrain.continuation(SHAPE, params, [3, 1], 20, 1.0, seed) for seed in (0, 0, 1)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_tokenizer_round_trips_anything():
    tokenizer = pretrain.train_tokenizer(["def f(x):\n    return x\n"] * 20, 270)
    assert tokenizer.get_vocab_size() == 270 and stdlib.separator_id(tokenizer) == 0
    text = "\tdef é(x):\r\n  return '\x00\U0001f40d'"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("def f(x):\n    return x").ids) < 15


# ---------------------------------------------------------------- the verb
def test_verb_writes_a_folder_a_record_and_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = stdlib.read_corpus()
    small = stdlib.Corpus(whole.train[:40], whole.held_out[:3], "hash of a part")
    monkeypatch.setattr(stdlib, "read_corpus", lambda root=None: small)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    texts = (
        "target=pycode", "out=model", "docs=page.md", "model.n_layers=1", "model.d_model=16", "model.d_mlp=16",
        "model.vocab=300", "train.steps=4", "train.batch_size=2", "train.seq_len=32", "train.points=2",
    )  # fmt: skip
    assert verb.main(Command("pretrain", texts)) == 0
    folder = tmp_path / "model"
    shape = pretrained.read_shape(folder)
    assert (shape.n_layers, shape.d_model, shape.vocab, shape.max_positions, shape.tied) == (1, 16, 300, 32, True)
    assert pretrained.open_tensors(folder, shape)["model.norm.weight"].dtype.name == "bfloat16"
    assert stdlib.separator_id(pretrained.load_tokenizer(folder, shape.vocab)) == 0
    record = json.loads((folder / "training.json").read_text())
    assert [row["step"] for row in record["curve"]] == [2, 4]
    assert record["corpus"]["held_out_bytes"] == verb.n_bytes(small.held_out)
    assert 2 < record["held_out"]["bits_per_byte"] < 9
    assert record["command"] == " ".join(["python -m decomp pretrain", *texts])
    page = (tmp_path / "page.md").read_text()
    assert f"{record['held_out']['bits_per_byte']:.3f}" in page and record["command"] in page


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("train.steps=1", r"train\.steps=1: .*greater than or equal to 2"),
        ("model.vocab=100", r"model\.vocab=100: .*257"),
        ("model.n_heads=5", "each must divide the one before"),
        ("train.muon_lr=fast", "train.muon_lr='fast': .*number"),
        ("data.batch_size=4", r"data\.batch_size=4: pretrain reads target, data, seed and its own keys"),
        ("sites=attn", "sites=attn: pretrain reads"),
    ],
)
def test_verb_refuses_what_cannot_be(override: str, match: str):
    with pytest.raises(UserError) as caught:
        verb.main(Command("pretrain", ("target=pycode", override)))
    assert re.search(match, str(caught.value))


# ---------------------------------------------------------------- what ships
def test_shipped_pycode_is_what_its_record_says():
    folder = pretrained.resolve_path("builtin:pycode")
    record = json.loads((folder / "training.json").read_text())
    shape = pretrained.read_shape(folder)
    n = sum(math.prod(dims) for dims in shape.tensors().values())
    assert 200_000 <= n == record["model"]["parameters"] <= 1_000_000
    assert sum(f.stat().st_size for f in folder.iterdir()) < 3e6
    assert record["held_out"]["bits_per_byte"] < record["held_out"]["gzip_per_file"]


def test_shipped_pycode_beats_gzip_on_this_interpreters_held_out_files():
    """A sample of the held-out text; the whole of it stands in docs/pycode.md."""
    folder = pretrained.resolve_path("builtin:pycode")
    shape = pretrained.read_shape(folder)
    loaded = llama.load_params(pretrained.open_tensors(folder, shape), shape, empty_table(shape.matrices()))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), loaded)
    tokenizer, documents = pretrained.load_tokenizer(folder, shape.vocab), stdlib.read_corpus().held_out
    stream = stdlib.encode(tokenizer, documents).astype(np.int64)
    text = verb.Text(verb.n_bytes(documents), len(stream))
    bits = text.bits_per_byte(pretrain.mean_nll(shape, params, stream, shape.max_positions, every=20))
    assert bits < verb.gzip_bits(documents)["gzip_per_file"]
    prompt = [stdlib.separator_id(tokenizer) or 0, *tokenizer.encode(verb.PROMPT).ids]
    text_out = tokenizer.decode(pretrain.continuation(shape, params, prompt, 96, temperature=0.7))  # as the page has it
    assert "self." in text_out and "):\n" in text_out and "    return " in text_out
