"""Training a small Llama from scratch: how the shipped ``pycode`` target was made.

The forward is the one that decomposition runs (``decomp.target.llama``), so a target trained here is measured with the
code that it will be decomposed with. Learning rates warm up linearly and fall along a cosine to a twentieth of the
peak.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from decomp.placement import Axes
from decomp.sites import empty_table
from decomp.target import llama
from decomp.target.shape import LlamaShape

SEPARATOR = "<|endoftext|>"
_EVAL_WINDOWS = 64  # windows in one evaluation call
_ONE_DEVICE = Axes({"replicate": 1, "fsdp": 1, "tp": 1})


@dataclass(frozen=True)
class Recipe:
    """What is trained for how long; learning rates are peaks, ``points`` is the number of rows of the loss curve."""

    steps: int
    muon_lr: float
    adam_lr: float
    warmup_steps: int
    weight_decay: float
    clip: float
    seed: int
    points: int


class Point(NamedTuple):
    """One row of the loss curve: updates done, wall seconds, nats per token on training and held-out text."""

    step: int
    seconds: float
    train: float
    held_out: float


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte-level BPE of exactly ``vocab`` tokens (at least 257): any text round-trips; id 0 separates documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


# ---------------------------------------------------------------- the loss
def logits(shape: LlamaShape, params: llama.Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T vocab"]:
    """Next-token logits of the clean forward, every matrix of it trainable."""
    clean = llama.clean_forward(_ONE_DEVICE, shape, empty_table(shape.matrices()), params, tokens)
    return llama.logits(shape, params, clean.hidden)


def token_nll(shape: LlamaShape, params: llama.Params, window: Int[Array, "B T1"]) -> Float[Array, "B T"]:
    """Negative log-likelihood in nats of ``window[:, 1:]`` given what stands before each token."""
    scores = logits(shape, params, window[:, :-1])
    chosen = jnp.take_along_axis(scores, window[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(scores, axis=-1) - chosen


class Scored(NamedTuple):
    """Windows of a stream in which every token but the first counts exactly once."""

    starts: Int[np.ndarray, " n"]
    counts: Float[np.ndarray, "n T"]  # 1 where the window's target is scored here, else 0


def scored_windows(n_tokens: int, length: int) -> Scored:
    """Half-overlapping windows of ``length`` targets: from the second on, only targets with half a window of context or
    more count. The last window is moved back to end with the stream, whose length must exceed ``length``."""
    assert n_tokens > length, "a stream shorter than one window"
    half, last = max(1, length // 2), n_tokens - 1 - length
    starts = np.minimum(np.arange(0, last + half, half), last)
    ends = starts + length
    already = np.concatenate([[0], ends[:-1]])
    targets = starts[:, None] + 1 + np.arange(length)
    return Scored(starts, (targets > already[:, None]).astype(np.float32))


def mean_nll(
    shape: LlamaShape, params: llama.Params, stream: Int[np.ndarray, " N"], length: int, every: int = 1
) -> float:
    """Mean nats per token of ``stream``; ``every`` > 1 estimates it from each ``every``-th window."""
    starts, counts = (a[::every] for a in scored_windows(len(stream), length))
    total = 0.0
    for i in range(0, len(starts), _EVAL_WINDOWS):
        rows, counted = starts[i : i + _EVAL_WINDOWS], counts[i : i + _EVAL_WINDOWS]
        windows = stream[rows[:, None] + np.arange(length + 1)].astype(np.int32)
        fill = _EVAL_WINDOWS - len(rows)  # one shape, one compilation
        nll = np.asarray(_jit_nll(shape, params, np.pad(windows, ((0, fill), (0, 0)))), np.float64)
        total += float((nll[: len(rows)] * counted).sum())
    return total / float(counts.sum())


_jit_nll = jax.jit(token_nll, static_argnums=0)


# ---------------------------------------------------------------- training
def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Muon on the matrices of the blocks, Adam on embedding and norms, after clipping by the global norm.

    On the same tokens Muon is 0.13 bits per byte ahead of AdamW after half a million tokens. Only matrices are decayed.
    """

    def curve(peak: float) -> optax.Schedule:
        warmup = min(recipe.warmup_steps, recipe.steps - 1)
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, recipe.steps, 0.05 * peak)

    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        optax.contrib.muon(
            curve(recipe.muon_lr),
            adam_learning_rate=curve(recipe.adam_lr),
            adam_b2=0.98,
            weight_decay=recipe.weight_decay,
            muon_weight_dimension_numbers=_matrices,
        ),
    )


def _matrices(params: Any) -> Any:
    """Which leaves take Muon. Stacks are named matrices outright: left to itself optax gives 3-D leaves Adam."""
    stack = optax.contrib.MuonDimensionNumbers(-2, -1)
    which = lambda path, _: stack if "frozen" in jax.tree_util.keystr(path) else None  # noqa: E731
    return jax.tree_util.tree_map_with_path(which, params)


def train(
    shape: LlamaShape,
    recipe: Recipe,
    batch: Callable[[int], Int[np.ndarray, "B T1"]],
    held_out: Int[np.ndarray, " N"],
    report: Callable[[Point], None],
) -> llama.Params:
    """Train on ``batch(step)`` [B, T + 1]; ``report`` is called at each of ``recipe.points`` steps and at the end."""
    params = _start(shape, recipe.seed)
    optim = optimizer(recipe)
    state = optim.init(params)
    update = jax.jit(partial(_update, shape, optim), donate_argnums=(0, 1))
    losses: list[Array] = []
    begun, every = time.monotonic(), max(1, recipe.steps // recipe.points)
    for step in range(recipe.steps):
        tokens = batch(step)
        params, state, loss = update(params, state, tokens)
        losses.append(loss)
        if (step + 1) % every == 0 or step + 1 == recipe.steps:
            seen = float(np.mean([np.asarray(x) for x in losses]))
            held = mean_nll(shape, params, held_out, tokens.shape[1] - 1, every=8)
            report(Point(step + 1, time.monotonic() - begun, seen, held))
            losses.clear()
    return params


def rounded(params: llama.Params) -> llama.Params:
    """``params`` as the stored bfloat16 weights give them back, in float32: what is measured is what ships."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)


def _start(shape: LlamaShape, seed: int) -> llama.Params:
    """Initial parameters with matrices at 0.4 of their usual scale: at full scale the blocks' output drowns the small
    tied embedding, and the first thousand steps go into undoing that."""
    params = llama.init_params(shape, empty_table(shape.matrices()), seed)
    return params | {"frozen": jax.tree.map(lambda w: w * 0.4, params["frozen"])}


def _update(shape: LlamaShape, optim: optax.GradientTransformation, params: Any, state: Any, tokens: Array) -> Any:
    loss, grads = jax.value_and_grad(lambda p: token_nll(shape, p, tokens).mean())(params)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes Python floats with its integer counters
        updates, state = optim.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss


# ---------------------------------------------------------------- sampling
def continuation(
    shape: LlamaShape, params: llama.Params, prompt: list[int], n: int, temperature: float = 0.0, seed: int = 0
) -> list[int]:
    """``n`` more ids after ``prompt``; greedy at temperature 0. Prompt and continuation must fit ``max_positions``."""
    length, key = len(prompt) + n, jax.random.key(seed)
    assert length <= shape.max_positions, "the continuation leaves the positions that were trained"
    ids = np.zeros((1, length), np.int32)
    ids[0, : len(prompt)] = prompt
    for at in range(len(prompt), length):  # causal: the zeros behind `at` are not seen
        scores = _jit_logits(shape, params, ids)[0, at - 1]
        key, draw = jax.random.split(key)
        chosen = jax.random.categorical(draw, scores / temperature) if temperature else scores.argmax()
        ids[0, at] = int(chosen)
    return ids[0, len(prompt) :].tolist()


_jit_logits = jax.jit(logits, static_argnums=0)
