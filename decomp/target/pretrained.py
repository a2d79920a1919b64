"""The only door to Hugging Face folders of the Llama architecture: config.json, safetensors, tokenizer.json.

Everything a person can get wrong about a folder is found when it is opened, from the files' headers, before any
weight is read; weights are then read one tensor at a time, so that an 8B model never lies in memory twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from tokenizers import Tokenizer

from decomp.config.errors import UserError
from decomp.target.shape import LlamaShape, RopeScaling

BUILTIN = Path(__file__).parent / "builtin"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ACTS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_ACT_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_DTYPES = {"F64", "F32", "F16", "BF16"}
_SAVE_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def resolve_path(path: str) -> Path:
    """Absolute folder of a target: ``builtin:<name>`` lies inside the package, all else is a path."""
    if path.startswith("builtin:"):
        names = sorted(p.name for p in BUILTIN.iterdir() if p.is_dir()) if BUILTIN.is_dir() else []
        name = path.removeprefix("builtin:")
        if name not in names:
            raise UserError(f"target.path={path}: no such builtin target; there is {', '.join(names) or 'none'}")
        return BUILTIN / name
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise UserError(f"target.path={path}: no such folder; give a local Hugging Face folder or builtin:<name>")
    return folder


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file}: missing; a target is a Hugging Face folder with {file.name}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: holds a {type(value).__name__}, not an object; fetch the file again")
    return value


# ---------------------------------------------------------------- config.json
def read_shape(folder: Path) -> LlamaShape:
    """Sizes from config.json; a plain MLP shows in ``mlp_type`` or in the tensors' names.

    Raises UserError for another architecture, a missing size or a feature that the forward does not compute.
    """
    file = folder / "config.json"
    config = _read_json(file)
    _check_architecture(file, config)
    d_model, n_heads = _size(file, config, "hidden_size"), _size(file, config, "num_attention_heads")
    theta, scaling = _rope(file, config)
    shape = LlamaShape(
        n_layers=_size(file, config, "num_hidden_layers"),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=_size(file, config, "num_key_value_heads", n_heads),
        head_dim=_size(file, config, "head_dim", d_model // n_heads),
        d_mlp=_size(file, config, "intermediate_size"),
        vocab=_size(file, config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_eps=_number(file, config, "rms_norm_eps", 1e-6),
        act=_choice(file, config, "hidden_act", _ACTS, "silu"),
        gated=_gated(folder, config),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        max_positions=_size(file, config, "max_position_embeddings", 2048),
    )
    return _check_heads(file, shape)


def _check_architecture(file: Path, config: Mapping[str, Any]) -> None:
    names = config.get("architectures") or []
    if config.get("model_type") != "llama" or (names and "LlamaForCausalLM" not in names):
        found = f"model_type {config.get('model_type')!r}, architectures {names}"
        raise UserError(f"{file}: {found}; only the Llama architecture (LlamaForCausalLM) can be decomposed")
    if config.get("quantization_config") is not None:
        raise UserError(f"{file}: the weights are quantized; use the folder with bf16, fp16 or fp32 weights")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(
            f"{file}: partial_rotary_factor={config['partial_rotary_factor']} is not supported; it must be 1"
        )


def _number(file: Path, config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise UserError(f"{file}: {key}={value!r} must be a positive number")
    return float(value)


def _size(file: Path, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _number(file, config, key, default)
    if value != int(value):
        raise UserError(f"{file}: {key}={value!r} must be a positive whole number")
    return int(value)


def _choice(file: Path, config: Mapping[str, Any], key: str, table: Mapping[str, Any], default: str) -> Any:
    value = config.get(key, default)
    if value not in table:
        raise UserError(f"{file}: {key}={value!r} is not supported; one of {', '.join(table)}")
    return table[value]


def _rope(file: Path, config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = _number(file, {"rope_theta": scaling.get("rope_theta", config.get("rope_theta"))}, "rope_theta", 10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"{file}: rope scaling {kind!r} is not supported; one of default, llama3")
    return theta, RopeScaling(
        factor=_number(file, scaling, "factor"),
        low_freq_factor=_number(file, scaling, "low_freq_factor"),
        high_freq_factor=_number(file, scaling, "high_freq_factor"),
        original_max_positions=_size(file, scaling, "original_max_position_embeddings"),
    )


def _gated(folder: Path, config: Mapping[str, Any]) -> bool:
    if "mlp_type" in config:
        return _choice(folder / "config.json", config, "mlp_type", {"gated": True, "plain": False}, "gated")
    try:
        return not any(".mlp.c_fc." in name for name in _locate(folder))
    except UserError:  # the folder may hold no weights (a plan needs sizes only); open_tensors reports what is wrong
        return True


def _check_heads(file: Path, shape: LlamaShape) -> LlamaShape:
    if shape.n_heads % shape.n_kv_heads:
        raise UserError(
            f"{file}: num_key_value_heads={shape.n_kv_heads} must divide num_attention_heads={shape.n_heads}"
        )
    if shape.head_dim % 2:
        raise UserError(f"{file}: head_dim={shape.head_dim} must be even for rotary positions")
    return shape


# ---------------------------------------------------------------- weights
class Tensors(Mapping[str, np.ndarray]):
    """Lazy view of a folder's tensors: each look-up reads one tensor from disk in its stored dtype.

    bfloat16 tensors come as ``ml_dtypes.bfloat16``; shapes are the stored ones ([d_out, d_in] for matrices).
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = dict(files)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def __getitem__(self, name: str) -> np.ndarray:
        with safe_open(self._files[name], "numpy") as handle:
            return handle.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def open_tensors(folder: Path, shape: LlamaShape) -> Tensors:
    """The tensors that ``shape`` needs, all checked for presence, shape and dtype from the files' headers.

    Raises UserError for a missing, truncated or damaged file, and for a tensor that is missing or has another shape.
    """
    files, expected = _locate(folder), shape.tensors()
    missing = [name for name in expected if name not in files]
    if missing:
        hint = " (set tie_word_embeddings if the embedding is shared)" if "lm_head.weight" in missing else ""
        raise UserError(f"{folder}: lacks {len(missing)} tensor(s), first {missing[0]}{hint}; fetch the folder again")
    headers = {file: read_header(file) for file in {files[name] for name in expected}}
    for name, want in expected.items():
        got, dtype = headers[files[name]].get(name, (None, ""))
        if got is None:
            raise UserError(f"{files[name]}: lacks tensor {name}, which {_INDEX} places there; fetch the folder again")
        if got != want:
            raise UserError(f"{files[name]}: {name} has shape {list(got)}, config.json says {list(want)}; mend either")
        if dtype not in _DTYPES:
            raise UserError(f"{files[name]}: {name} has dtype {dtype}; use bf16, fp16 or fp32 weights")
    return Tensors({name: files[name] for name in expected})


def _locate(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the single file or the shards' index."""
    single, index = folder / _WEIGHTS, folder / _INDEX
    if single.exists() or not index.exists():
        return dict.fromkeys(read_header(single), single)
    return read_index(index)


def read_index(index: Path) -> dict[str, Path]:
    """Tensor name -> shard beside ``index``, a ``*.safetensors.index.json``. Raises UserError where it is none."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise UserError(f"{index}: has no weight_map of tensor names to files; fetch the file again")
    return {name: index.parent / Path(shard).name for name, shard in weight_map.items()}


def read_header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Tensor name -> (shape, dtype); opening also compares the file's length with its header."""
    try:
        with safe_open(file, "numpy") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (not a mapping)
            return {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except FileNotFoundError:
        raise UserError(
            f"{file}: missing; the weights are read from {_WEIGHTS} or from {_INDEX} and its shards"
        ) from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: truncated or damaged ({error}); fetch the file again") from None


# ---------------------------------------------------------------- tokenizer
def load_tokenizer(folder: Path, vocab: int) -> Tokenizer:
    """The folder's tokenizer.json; every id it can give must be a row of the model's embedding of ``vocab`` rows.

    Raises UserError for a missing or damaged file and for a tokenizer made for another model.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"{file}: missing; a target is a Hugging Face folder with its tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise UserError(f"{file}: cannot be read as a tokenizer ({error}); fetch the file again") from None
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    # Models pad their vocabulary a little; half of it unknown to the tokenizer is another model's tokenizer.
    if not ids or max(ids) >= vocab or 2 * len(ids) < vocab:
        raise UserError(
            f"{file}: {len(ids)} tokens up to id {max(ids, default=-1)} do not fit the model's vocab_size={vocab}; "
            "use the tokenizer that the model was trained with"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


# ---------------------------------------------------------------- writing a folder
def config_dict(shape: LlamaShape, dtype: str, separator: int | None) -> dict[str, Any]:
    """config.json as transformers (4 and 5) reads it; ``separator`` is the token that opens and ends a text."""
    scaling = None
    if s := shape.rope_scaling:
        scaling = {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            "original_max_position_embeddings": s.original_max_positions,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.d_model,
        "intermediate_size": shape.d_mlp,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": shape.tied,
        "hidden_act": _ACT_NAMES[shape.act],
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.mlp_bias,
        "bos_token_id": separator,
        "eos_token_id": separator,
        "pad_token_id": None,
        "torch_dtype": dtype,
    } | ({} if shape.gated else {"mlp_type": "plain"})


def save_folder(
    folder: Path,
    shape: LlamaShape,
    tensors: Mapping[str, np.ndarray],
    tokenizer: Tokenizer,
    dtype: str = "bfloat16",
    separator: int | None = None,
) -> None:
    """Write an ordinary Hugging Face folder; each file appears whole or not at all.

    ``tensors`` must be exactly ``shape.tensors()``; ``dtype`` is float32, float16 or bfloat16. Raises UserError where
    the folder cannot be written.
    """
    expected = shape.tensors()
    assert {name: t.shape for name, t in tensors.items()} == expected, "tensors do not match the shape"
    stored = {name: np.ascontiguousarray(np.asarray(t).astype(_SAVE_DTYPES[dtype])) for name, t in tensors.items()}
    config = json.dumps(config_dict(shape, dtype, separator), indent=1) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _part(folder, _WEIGHTS).write_bytes(save(stored, metadata={"format": "pt"}))
        _part(folder, "config.json").write_text(config, "utf-8")
        tokenizer.save(str(_part(folder, "tokenizer.json")), pretty=True)
        for name in (_WEIGHTS, "config.json", "tokenizer.json"):
            os.replace(_part(folder, name), folder / name)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: cannot be written ({error}); choose another folder") from None


def _part(folder: Path, name: str) -> Path:
    return folder / f".{name}.part"


# ---------------------------------------------------------------- identity
_WHOLE = 2**26  # bytes: files up to 64 MiB are hashed whole
_BLOCK, _BLOCKS = 2**16, 256


def content_hash(folder: Path) -> str:
    """Hash of what a target is: config.json, tokenizer.json and the weights, wherever the folder lies.

    Of a weight file above 64 MiB the length, the header and 256 evenly spaced blocks of 64 KiB count: two trained
    models differ everywhere, and 16 GB would take longer to read than a run takes to start.
    """
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.iterdir() if p.name in {"config.json", "tokenizer.json", _INDEX}):
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    for file in sorted(set(_locate(folder).values())):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        for block in _blocks(file):
            digest.update(block)
    return digest.hexdigest()


def _blocks(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as handle:
        if size <= _WHOLE:
            yield handle.read()
            return
        header = 8 + int.from_bytes(handle.read(8), "little")
        handle.seek(0)
        yield handle.read(header)
        for start in np.linspace(header, size - _BLOCK, _BLOCKS).astype(np.int64):
            handle.seek(int(start))
            yield handle.read(_BLOCK)
