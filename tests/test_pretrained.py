"""decomp.target.pretrained: reading, checking and writing Hugging Face folders (SPEC F5, F6; case 5 for folders)."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_data import byte_tokenizer
from tokenizers import Tokenizer

from decomp.config.errors import UserError
from decomp.target import pretrained
from decomp.target.shape import LlamaShape, RopeScaling

SHAPE = LlamaShape(
    n_layers=2, d_model=8, n_heads=4, n_kv_heads=2, head_dim=4, d_mlp=12, vocab=257, tied=True, rms_eps=1e-5,
    max_positions=64,
)  # fmt: skip
LLAMA31 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
STORIES = Path(__file__).resolve().parents[2] / "shared" / "models" / "stories260K"


def tensors_of(shape: LlamaShape, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(dims).astype(np.float32) for name, dims in shape.tensors().items()}


def folder_of(path: Path, shape: LlamaShape = SHAPE, dtype: str = "float32") -> Path:
    pretrained.save_folder(path, shape, tensors_of(shape), byte_tokenizer("<|endoftext|>"), dtype, separator=0)
    return path


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def shard(folder: Path) -> dict[str, str]:
    """Split model.safetensors in two shards with an index, as large models are stored."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, chosen in parts.items():
        save_file({n: tensors[n] for n in chosen}, folder / file)
    weight_map = {n: file for file, chosen in parts.items() for n in chosen}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return weight_map


# ---------------------------------------------------------------- what is right
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tied": False},
        {"rope_scaling": LLAMA31, "rope_theta": 500000.0},
        {"gated": False, "act": "gelu"},
        {"gated": False, "act": "gelu_tanh", "mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True},
        {"n_kv_heads": 4, "head_dim": 6},
    ],
)
def test_a_written_folder_reads_back(tmp_path: Path, change: dict[str, Any]):
    shape = replace(SHAPE, **change)
    folder = folder_of(tmp_path / "m", shape)
    assert pretrained.read_shape(folder) == shape
    tensors = pretrained.open_tensors(folder, shape)
    assert set(tensors.names) == set(shape.tensors()) == set(tensors)
    for name, want in tensors_of(shape).items():
        np.testing.assert_array_equal(tensors[name], want)
    assert pretrained.load_tokenizer(folder, shape.vocab).encode("ab").ids
    assert not [p.name for p in folder.iterdir() if p.name.endswith(".part")]


@pytest.mark.parametrize(
    ("dtype", "numpy"), [("float32", np.float32), ("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)]
)
def test_stored_dtypes(tmp_path: Path, dtype: str, numpy: Any):
    tensors = pretrained.open_tensors(folder_of(tmp_path / "m", dtype=dtype), SHAPE)
    for name, want in tensors_of(SHAPE).items():
        got = tensors[name]
        assert got.dtype == numpy and got.shape == want.shape
        np.testing.assert_array_equal(got, want.astype(numpy))


def test_sharded_folder_equals_the_single_file(tmp_path: Path):
    folder = folder_of(tmp_path / "m")
    shard(folder)
    tensors = pretrained.open_tensors(folder, pretrained.read_shape(folder))
    for name, want in tensors_of(SHAPE).items():
        np.testing.assert_array_equal(tensors[name], want)


def test_plain_mlp_shows_in_the_tensors(tmp_path: Path):
    shape = replace(SHAPE, gated=False, act="gelu")
    folder = folder_of(tmp_path / "m", shape)
    edit_config(folder, mlp_type=...)
    assert pretrained.read_shape(folder) == shape
    shard(folder)
    assert pretrained.read_shape(folder) == shape


def test_config_needs_no_weights_and_has_the_usual_defaults(tmp_path: Path):
    folder = folder_of(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    edit_config(
        folder, head_dim=..., num_key_value_heads=..., tie_word_embeddings=..., rope_theta=..., attention_bias=...
    )
    want = replace(SHAPE, head_dim=2, n_kv_heads=4, tied=False)
    assert pretrained.read_shape(folder) == want


def test_llama31_config_of_transformers_4_and_5(tmp_path: Path):
    """Llama-3.1-8B's own config.json, and the form that transformers 5 writes."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": {**scaling, "rope_type": "llama3"}, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 128256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = pretrained.read_shape(tmp_path)
    assert shape == LlamaShape(
        n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, head_dim=128, d_mlp=14336, vocab=128256, tied=False,
        rope_theta=500000.0, rope_scaling=LLAMA31, rms_eps=1e-5, max_positions=131072,
    )  # fmt: skip
    del config["rope_theta"], config["rope_scaling"]
    config["rope_parameters"] = {**scaling, "rope_type": "llama3", "rope_theta": 500000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert pretrained.read_shape(tmp_path) == shape


def test_paths(tmp_path: Path):
    assert pretrained.resolve_path("builtin:pycode").is_dir()
    assert pretrained.resolve_path(str(tmp_path)) == tmp_path
    with pytest.raises(UserError, match=r"target.path=builtin:pycod: no such builtin target; there is pycode"):
        pretrained.resolve_path("builtin:pycod")
    with pytest.raises(UserError, match=r"target.path=no/where: no such folder"):
        pretrained.resolve_path("no/where")


def test_content_hash_follows_the_content_alone(tmp_path: Path):
    a, b = folder_of(tmp_path / "a"), tmp_path / "b"
    shutil.copytree(a, b)
    (b / "notes.txt").write_text("no part of the model")
    first = pretrained.content_hash(a)
    assert pretrained.content_hash(b) == first
    weights = bytearray((b / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (b / "model.safetensors").write_bytes(weights)
    second = pretrained.content_hash(b)
    edit_config(b, rope_theta=20000.0)
    assert len({first, second, pretrained.content_hash(b)}) == 3


def test_content_hash_of_a_large_file_samples_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pretrained, "_WHOLE", 1000)
    monkeypatch.setattr(pretrained, "_BLOCK", 16)
    a, b = folder_of(tmp_path / "a"), folder_of(tmp_path / "b")
    assert pretrained.content_hash(a) == pretrained.content_hash(b)
    size = (b / "model.safetensors").stat().st_size
    with (b / "model.safetensors").open("r+b") as handle:
        handle.seek(size - 1)
        handle.write(b"\x77")
    assert pretrained.content_hash(a) != pretrained.content_hash(b)


# ---------------------------------------------------------------- what a person gets wrong
def refused(folder: Path, match: str) -> str:
    """Opening ``folder`` says ``match`` in one line and names the file."""
    with pytest.raises(UserError, match=match) as caught:
        shape = pretrained.read_shape(folder)
        pretrained.open_tensors(folder, shape)
        pretrained.load_tokenizer(folder, shape.vocab)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


@pytest.mark.parametrize("cut", [0, 4, 40, -1, -100])
def test_truncated_weights(tmp_path: Path, cut: int):
    file = folder_of(tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    refused(file.parent, "truncated or damaged")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_file(tmp_path: Path, name: str):
    folder = folder_of(tmp_path / "m")
    (folder / name).unlink()
    assert name in refused(folder, "missing")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_damaged_json(tmp_path: Path, name: str):
    folder = folder_of(tmp_path / "m")
    (folder / name).write_text((folder / name).read_text()[:-20])
    assert name in refused(folder, "cannot be read")


def test_missing_tensor(tmp_path: Path):
    file = folder_of(tmp_path / "m") / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    refused(file.parent, r"lacks 1 tensor\(s\), first model\.layers\.1\.mlp\.up_proj\.weight")


def test_untied_without_head_names_the_setting(tmp_path: Path):
    folder = folder_of(tmp_path / "m")
    edit_config(folder, tie_word_embeddings=False)
    refused(folder, r"lm_head\.weight \(set tie_word_embeddings")


def test_wrong_shape(tmp_path: Path):
    folder = folder_of(tmp_path / "m")
    edit_config(folder, intermediate_size=16)
    refused(folder, r"gate_proj\.weight has shape \[12, 8\], config\.json says \[16, 8\]")


def test_integer_weights(tmp_path: Path):
    file = folder_of(tmp_path / "m") / "model.safetensors"
    save_file(load_file(file) | {"model.norm.weight": np.ones(8, np.int8)}, file)
    refused(file.parent, "dtype I8; use bf16, fp16 or fp32")


def test_damaged_index(tmp_path: Path):
    folder = folder_of(tmp_path / "m")
    weight_map = shard(folder)
    name = "model.norm.weight"
    other = next(f for f in weight_map.values() if f != weight_map[name])
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map | {name: other}}))
    refused(folder, "lacks tensor model.norm.weight")
    index.write_text(json.dumps({"weights": weight_map}))
    refused(folder, "has no weight_map")
    index.write_text(json.dumps({"weight_map": weight_map}))
    (folder / other).unlink()
    refused(folder, f"{other}: missing")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "model_type 'gpt2'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "only the Llama architecture"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"hidden_size": ...}, "hidden_size=None must be a positive number"),
        ({"hidden_size": "8"}, "hidden_size='8' must be a positive number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers=1.5 must be a positive whole number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
        ({"head_dim": 3}, "head_dim=3 must be even"),
        ({"hidden_act": "relu6"}, "hidden_act='relu6' is not supported; one of silu"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor=None must be"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"mlp_type": "moe"}, "mlp_type='moe' is not supported"),
    ],
)
def test_config_that_the_forward_does_not_compute(tmp_path: Path, change: dict[str, Any], match: str):
    folder = folder_of(tmp_path / "m")
    edit_config(folder, **change)
    refused(folder, match)


def test_config_that_is_no_object(tmp_path: Path):
    folder = folder_of(tmp_path / "m")
    (folder / "config.json").write_text("[]")
    refused(folder, "holds a list, not an object")


def test_tokenizer_that_does_not_fit(tmp_path: Path):
    folder = folder_of(tmp_path / "m")
    byte_tokenizer("<s>", "</s>").save(str(folder / "tokenizer.json"))
    refused(folder, r"258 tokens up to id 257 do not fit the model's vocab_size=257")
    with pytest.raises(UserError, match="do not fit the model's vocab_size=128256"):
        pretrained.load_tokenizer(folder, 128256)


def test_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        folder_of(tmp_path / "file" / "m")


# ---------------------------------------------------------------- a foreign model
@pytest.mark.skipif(not STORIES.is_dir(), reason="shared/models/stories260K is not beside this checkout")
def test_stories260k_opens():
    shape = pretrained.read_shape(STORIES)
    assert (shape.n_layers, shape.d_model, shape.d_mlp, shape.head_dim, shape.tied) == (5, 64, 172, 8, True)
    tensors = pretrained.open_tensors(STORIES, shape)
    assert sum(tensors[name].size for name in tensors) == 260_032
    tokenizer: Tokenizer = pretrained.load_tokenizer(STORIES, shape.vocab)
    assert tokenizer.encode("Once upon a time").ids[-4:] == [403, 407, 261, 378]
