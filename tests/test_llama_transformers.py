"""Our Llama against the field's own implementation, and a foreign trained model against what it is known to say.

Random tiny configurations go through a folder on disk, so that loader, config and forward are compared together
(SPEC F3, F5). Bound: 1e-4 on the logits, float32.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_data import byte_tokenizer

from decomp.sites import empty_table
from decomp.target import llama, pretrain, pretrained
from decomp.target.shape import LlamaShape, RopeScaling

STORIES = Path(__file__).resolve().parents[2] / "shared" / "models" / "stories260K"
TINY = LlamaShape(
    n_layers=3, d_model=24, n_heads=4, n_kv_heads=2, head_dim=6, d_mlp=40, vocab=300, tied=True, rms_eps=1e-5,
    max_positions=64,
)  # fmt: skip
# Bands that matter at 40 positions: some pairs keep their frequency, some are blended, some are divided.
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
CONFIGS = {
    "gqa": {},
    "mha_untied": {"n_kv_heads": 4, "tied": False},
    "mqa_wide_heads": {"n_kv_heads": 1, "head_dim": 10},
    "llama31": {"rope_scaling": SCALING, "rope_theta": 500.0, "head_dim": 16, "tied": False},
    "biases": {"attention_bias": True, "mlp_bias": True, "rms_eps": 1e-6},
    "gelu_gated": {"act": "gelu_tanh"},
    "plain_gelu": {"gated": False, "act": "gelu"},
    "plain_gelu_bias": {"gated": False, "act": "gelu_tanh", "mlp_bias": True, "tied": False},
}


@pytest.fixture(scope="module")
def hf() -> Any:
    """(torch, transformers); both warn about their own future when imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e .[test-torch]")
        transformers = pytest.importorskip("transformers", reason="transformers is not installed: .[test-torch]")
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        return torch, transformers


def random_tensors(shape: LlamaShape) -> dict[str, np.ndarray]:
    """Weights that keep logits near 1; norms and biases are far from their defaults, so none can be skipped."""
    rng = np.random.default_rng(0)

    def one(name: str, dims: tuple[int, ...]) -> np.ndarray:
        x = rng.standard_normal(dims)
        return (1 + 0.3 * x if "norm" in name else 0.3 * x if name.endswith("bias") else x / dims[-1] ** 0.5).astype(
            "f4"
        )

    return {name: one(name, dims) for name, dims in shape.tensors().items()}


def our_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    shape = pretrained.read_shape(folder)
    params = llama.load_params(pretrained.open_tensors(folder, shape), shape, empty_table(shape.matrices()))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    return np.asarray(pretrain.logits(shape, params, jnp.asarray(tokens)))


def their_logits(hf: Any, folder: Path, tokens: np.ndarray) -> np.ndarray:
    torch, transformers = hf
    shape = pretrained.read_shape(folder)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if shape.gated:
            model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        else:
            model = plain_model(hf, folder, shape)
        return model.eval()(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def plain_model(hf: Any, folder: Path, shape: LlamaShape) -> Any:
    """transformers' Llama has gated MLPs only: the rest of it with torch's Linear, GELU, Linear in their place."""
    torch, transformers = hf

    class PlainMLP(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_fc = torch.nn.Linear(shape.d_model, shape.d_mlp, bias=shape.mlp_bias)
            self.down_proj = torch.nn.Linear(shape.d_mlp, shape.d_model, bias=shape.mlp_bias)
            self.act = torch.nn.GELU(approximate="none" if shape.act == "gelu" else "tanh")

        def forward(self, x: Any) -> Any:
            return self.down_proj(self.act(self.c_fc(x)))

    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder))
    for layer in model.model.layers:
        layer.mlp = PlainMLP()
    tensors = pretrained.open_tensors(folder, shape)
    state = {name: torch.tensor(tensors[name].astype(np.float32)) for name in tensors}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if shape.tied else set())
    model.tie_weights()
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(hf: Any, tmp_path: Path, name: str):
    shape = replace(TINY, **CONFIGS[name])
    pretrained.save_folder(tmp_path, shape, random_tensors(shape), byte_tokenizer("<s>"), "float32", separator=0)
    tokens = np.random.default_rng(1).integers(0, shape.vocab, (2, 40))
    ours, theirs = our_logits(tmp_path, tokens), their_logits(hf, tmp_path, tokens)
    assert np.std(theirs) > 0.3, "the comparison would be of zeros"
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def test_rope_scaling_changes_the_logits(tmp_path: Path):
    """Else the case `llama31` would pass with the scaling left out."""
    tokens = np.arange(40)[None]
    for folder, scaling in (("a", SCALING), ("b", None)):
        shape = replace(TINY, **CONFIGS["llama31"] | {"rope_scaling": scaling})
        pretrained.save_folder(tmp_path / folder, shape, random_tensors(shape), byte_tokenizer("<s>"), "float32")
    assert np.abs(our_logits(tmp_path / "a", tokens) - our_logits(tmp_path / "b", tokens)).max() > 1e-2


def test_shipped_pycode_equals_transformers(hf: Any):
    folder = pretrained.resolve_path("builtin:pycode")
    shape = pretrained.read_shape(folder)
    tokens = np.random.default_rng(2).integers(0, shape.vocab, (2, min(shape.max_positions, 128)))
    np.testing.assert_allclose(our_logits(folder, tokens), their_logits(hf, folder, tokens), atol=1e-4, rtol=0)


def test_transformers_tokenizer_gives_the_same_ids(hf: Any):
    folder = pretrained.resolve_path("builtin:pycode")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = hf[1].PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    text = "class A:\n    def __init__(self, é):\n\treturn '\\x00'\n"
    ids = pretrained.load_tokenizer(folder, pretrained.read_shape(folder).vocab).encode(text).ids
    assert theirs(text)["input_ids"] == ids and theirs.decode(ids) == text


@pytest.mark.skipif(not STORIES.is_dir(), reason="shared/models/stories260K is not beside this checkout")
def test_stories260k_says_what_it_is_known_to_say():
    expected = json.loads((STORIES / "expected.json").read_text())
    ids, n_prompt = expected["greedy_ids"], len(expected["prompt_ids"])
    scores = our_logits(STORIES, np.array([ids]))[0]
    # Each token is the argmax given those before it: the greedy continuation, by induction.
    assert scores[n_prompt - 1 : -1].argmax(-1).tolist() == ids[n_prompt:]
    for position, first in expected["logits_first8_of_positions_0_4_31"].items():
        np.testing.assert_allclose(scores[int(position), :8], first, atol=1e-4, rtol=0)
    # The recorded mean is over the whole text, prompt included.
    nll = np.log(np.exp(scores[:-1].astype(np.float64)).sum(-1)) - scores[np.arange(len(ids) - 1), ids[1:]]
    assert abs(nll.mean() - expected["mean_nll_nats"]) < 1e-4
    tokenizer = pretrained.load_tokenizer(STORIES, 512)
    assert tokenizer.decode(ids) == expected["greedy_text"]
