"""decomp.exchange.staging and factors: stacks from factors, bit for bit, whole or not at all (SPEC K5)."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exchange_source import bits, command, factors, frozen, orbax, safetensors, same, sharded, target, torch_names

import decomp
from decomp import checkpoint
from decomp.checkpoint import item_leaves
from decomp.config.errors import UserError
from decomp.config.schema import RunConfig
from decomp.exchange import factors as stacks
from decomp.exchange import sources, staging
from decomp.folder import read_config
from decomp.lock import RunLock
from decomp.manifest import damage_of, read_manifest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return safetensors(tmp_path / "old.safetensors", factors())


@functools.cache
def config(model: Path, *texts: str) -> tuple[RunConfig, tuple[str, ...]]:
    typed = command(Path("src"), Path("dst"), model, *texts)
    return typed.config(), typed.overrides


def job(src: Path, model: Path, *texts: str, step: int = 0) -> staging.Job:
    cfg, overrides = config(model, *texts)
    return stacks.job(cfg, sources.open_source(str(src)), step, overrides)


def silent(_: str) -> None:
    pass


# ---------------------------------------------------------------- what is right
def test_the_run_folder_opens_with_the_same_bits(src: Path, model: Path, tmp_path: Path) -> None:
    before, dst = frozen(src), tmp_path / "new" / "run"
    staging.carry_out(job(src, model, step=40), dst, silent)
    run = decomp.open_run(dst)
    assert run.step == 40 and same(bits(run), factors())
    assert frozen(src) == before
    assert {p.name for p in dst.parent.iterdir()} == {"run"}
    assert {"config.yaml", "overrides.txt", "revision.txt", "checkpoints", "migration.json"} <= set(os.listdir(dst))
    assert "run.lock" not in os.listdir(dst)
    assert read_config(dst).sites.layers == (1, 2)
    assert run.origin == {"src": str(src), "layout": "safetensors"}


def test_the_checkpoint_is_one_that_init_from_can_read(src: Path, model: Path, tmp_path: Path) -> None:
    """A whole manifest with the site table, and an item of stacks and nothing else."""
    wanted = job(src, model)
    staging.carry_out(wanted, tmp_path / "run", silent)
    step = tmp_path / "run" / "checkpoints" / "0"
    assert damage_of(step) is None
    manifest = read_manifest(step)
    assert manifest["identity"] == dict(wanted.identity)
    leaves = {("decomposition", *path): spec for path, spec in item_leaves(step / "decomposition").items()}
    assert leaves == {a.path: (a.shape, a.dtype) for a in wanted.arrays}
    assert [e["path"] for e in manifest["arrays"]] == [list(a.path) for a in wanted.arrays]
    assert sorted(os.listdir(step)) == ["decomposition", "manifest.json"]


def test_every_layout_gives_the_same_arrays(src: Path, model: Path, tmp_path: Path) -> None:
    paths = [src, sharded(tmp_path / "s", factors()), orbax(tmp_path / "tree", factors())]
    wanted = {a.path: a.whole() for a in job(src, model).arrays}
    for path in paths[1:]:
        assert all(same({"": a.whole()}, {"": wanted[a.path]}) for a in job(path, model).arrays)


def test_a_published_state_dict(model: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {name: torch.from_numpy(x.copy()) for name, x in torch_names(factors()).items()}
    torch.save(state | {"target_model.wte.weight": torch.ones(3)}, tmp_path / "model_40.pth")
    wanted = job(tmp_path / "model_40.pth", model)
    assert "1 other tensors are passed over" in wanted.told[0]
    staging.carry_out(wanted, tmp_path / "run", silent)
    assert same(bits(decomp.open_run(tmp_path / "run")), factors())


def test_no_ci_function_and_opening_says_so(src: Path, model: Path, tmp_path: Path) -> None:
    staging.carry_out(job(src, model), tmp_path / "run", silent)
    with pytest.raises(UserError, match=f"has no CI function: its components come from {src}"):
        _ = decomp.open_run(tmp_path / "run").ci_fn


def test_16_bit_factors_widen_and_64_bit_ones_need_64_bit_masters(model: Path, tmp_path: Path) -> None:
    half: Any = ml_dtypes.bfloat16
    src = safetensors(tmp_path / "a.safetensors", factors(dtype=half))
    (array, *_) = job(src, model).arrays
    assert array.dtype == np.float32 and not array.differs(array.whole())
    wide = safetensors(tmp_path / "b.safetensors", factors(dtype=np.float64))
    with pytest.raises(UserError, match=r"is float64, and masters are float32: give precision=fp64"):
        job(wide, model)
    assert {a.dtype for a in job(wide, model, "precision=fp64").arrays} == {np.dtype(np.float64)}


def test_sites_may_be_typed_and_must_agree(src: Path, model: Path) -> None:
    given = ["sites.kinds=[k_proj,up_proj,down_proj]", "sites.C={k_proj: 6, up_proj: 10, down_proj: 10}"]
    assert job(src, model, *given, "sites.layers=[1,2]").stored_record == job(src, model).stored_record
    with pytest.raises(UserError, match=r"sites: model.layers.0.self_attn.k_proj is not in the source"):
        job(src, model, *given)


# ---------------------------------------------------------------- what stands in the way
def test_an_occupied_destination_is_left_alone(src: Path, model: Path, tmp_path: Path) -> None:
    dst = tmp_path / "run"
    dst.mkdir()
    (dst / "mine").write_text("x")
    with pytest.raises(UserError, match=f"dst={dst}: exists already"):
        staging.carry_out(job(src, model), dst, silent)
    assert os.listdir(dst) == ["mine"] and not list(tmp_path.glob(".*"))
    (dst / "mine").unlink()
    staging.carry_out(job(src, model), dst, silent)  # an empty folder will do
    done = frozen(dst)
    staging.carry_out(job(src, model), dst, silent)  # done once is done
    assert frozen(dst) == done
    os.utime(src)
    with pytest.raises(UserError, match="exists already"):
        staging.carry_out(job(src, model), dst, silent)


def test_other_unfinished_work_is_named(src: Path, model: Path, tmp_path: Path) -> None:
    work = tmp_path / ".run.migrating"
    work.mkdir()
    (work / staging.RECORD).write_text(json.dumps(job(src, model, step=3).stored_record))
    with pytest.raises(UserError, match=r"another migration \(step is 3 there, 0 here\): repeat that one, or delete"):
        staging.carry_out(job(src, model), tmp_path / "run", silent)


def test_two_at_once(src: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / ".run.migrating").mkdir()
    with RunLock(tmp_path / ".run.migrating"), pytest.raises(UserError, match="writes here since"):
        staging.carry_out(job(src, model), tmp_path / "run", silent)


def test_a_small_disk_is_refused_before_anything_is_written(
    src: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_free", lambda _: 100)
    with pytest.raises(UserError, match=r"needs [\d.]+ kB and the disk has 100 bytes free"):
        staging.carry_out(job(src, model), tmp_path / "run", silent)
    assert not (tmp_path / "run").exists() and not list(tmp_path.rglob("checkpoints"))


def test_a_disk_that_fills_is_one_line_and_the_next_call_goes_on(
    src: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = checkpoint.ItemWriter.finish, []

    def full(self: Any) -> None:
        calls.append(self)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        real(self)

    monkeypatch.setattr(checkpoint.ItemWriter, "finish", full)
    with pytest.raises(UserError, match=r"cannot be written \(no space left.*repeat the command") as error:
        staging.carry_out(job(src, model), tmp_path / "run", silent)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()
    staging.carry_out(job(src, model), tmp_path / "run", silent)
    assert same(bits(decomp.open_run(tmp_path / "run")), factors())


def test_a_bit_that_reads_back_wrong_is_found(
    src: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoint.read_leaf

    def flipped(item: Path, path: Any, *spec: Any) -> np.ndarray:
        out = real(item, path, *spec).copy()
        if path[-1] == "U":
            out.view(np.uint32).flat[3] ^= 1
        return out

    monkeypatch.setattr(staging, "read_leaf", flipped)
    with pytest.raises(UserError, match=r"decomposition/components/\S+/U does not read back as the source has it"):
        staging.carry_out(job(src, model), tmp_path / "run", silent)
    assert not (tmp_path / "run").exists()
    assert damage_of(tmp_path / ".run.migrating/checkpoints/0") is not None


def test_work_that_was_damaged_after_a_kill_is_not_taken(
    src: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(staging, "read_leaf", dying(_die, staging, "read_leaf", 0, "", 0))
        with pytest.raises(Killed):
            staging.carry_out(job(src, model), tmp_path / "run", silent)
    item = tmp_path / ".run.migrating" / "checkpoints" / "0" / "decomposition"
    data = [p for p in item.rglob("*") if p.is_file() and p.parent.name == "d"]
    for file in data:
        os.truncate(file, 20)
    assert data
    with pytest.raises(UserError, match=rf"does not read back.*Delete {tmp_path}/.run.migrating and start again"):
        staging.carry_out(job(src, model), tmp_path / "run", silent)
    assert not (tmp_path / "run").exists()


def test_bits_not_values_are_compared() -> None:
    x = np.asarray([[np.nan, 0.0]], np.float32)
    array = staging.Array(("a", "b"), x.shape, x.dtype, lambda: iter([(..., x)]))
    assert not array.differs(x.copy())
    assert array.differs(-x) and array.differs(x.astype(np.float64)) and array.differs(x[:, :1])


# ---------------------------------------------------------------- killed
class Killed(BaseException):
    """What no handler of ours catches."""


ARRAYS = 6
POINTS = {  # moment -> (owner, name, calls let through, end of the call's first argument, arrays written anew)
    "before the first array": (checkpoint.ItemWriter, "add", 0, "", ARRAYS),
    "while an array is written": (checkpoint, "_nested", 1, "", ARRAYS - 1),
    "before the last array": (checkpoint.ItemWriter, "add", 5, "", 1),
    "before the parts are joined": (checkpoint.ItemWriter, "finish", 0, "", 0),
    "while the parts are joined": (checkpoint.shutil, "rmtree", 2, "", ARRAYS),
    "after they are joined": (checkpoint.ItemWriter, "_move", 0, "", 0),
    "while joined parts are moved": (checkpoint.shutil, "rmtree", 0, "decomposition.parts", 0),
    "before verification": (staging, "read_leaf", 0, "", 0),
    "in the midst of it": (staging, "read_leaf", 2, "", 0),
    "before the manifest": (staging, "write_manifest", 0, "", 0),
    "after the manifest": (stacks, "write_config", 0, "", 0),
    "before the move into place": (staging.os, "rename", 0, ".migrating", 0),
}


def dying(die: Callable[[], Any], owner: Any, name: str, calls: int, end: str, _: int) -> Callable[..., Any]:
    """``owner.name`` as it is, but for call number ``calls``, which ends the process or the test's version of it."""
    real, left = getattr(owner, name), [calls]

    def called(*args: Any, **kwargs: Any) -> Any:
        left[0] -= str(args[0]).endswith(end)
        if left[0] == -1:
            die()
        return real(*args, **kwargs)

    return called


def _die() -> None:
    raise Killed


SLOW = [p for p in POINTS if p not in ("while an array is written", "while the parts are joined", "in the midst of it")]


@pytest.mark.parametrize("point", [pytest.param(p, marks=pytest.mark.slow if p in SLOW else ()) for p in POINTS])
def test_a_kill_at_any_point_is_gone_on_from(
    src: Path, model: Path, tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, *_, anew = POINTS[point]
    monkeypatch.setattr(staging, "CHUNK", 1)  # each array in a write of its own
    wanted, dst = job(src, model), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dying(_die, *POINTS[point]))
        with pytest.raises(Killed):
            staging.carry_out(wanted, dst, silent)
    assert not dst.exists()
    said: list[str] = []
    staging.carry_out(wanted, dst, said.append)
    assert sum(line.startswith("write") for line in said) == anew
    assert same(bits(decomp.open_run(dst)), factors()) and damage_of(dst / "checkpoints" / "0") is None
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


KILL = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import test_exchange_staging as t
from pathlib import Path

t.staging.CHUNK = 1
if {point!r}:
    point = t.POINTS[{point!r}]
    setattr(*point[:2], t.dying(lambda: os.kill(os.getpid(), signal.SIGKILL), *point))
t.staging.carry_out(t.job(Path({src!r}), Path({model!r})), Path({dst!r}), t.silent)
"""


def launch(point: str, src: Path, model: Path, dst: Path) -> subprocess.Popen[str]:
    tests = str(Path(__file__).parent)
    code = KILL.format(tests=tests, point=point, src=str(src), model=str(model), dst=str(dst))
    path = os.pathsep.join([str(Path(tests).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, text=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_9_at_every_point(src: Path, model: Path, tmp_path: Path) -> None:
    before = frozen(src)
    for n, point in enumerate(POINTS):
        dst = tmp_path / f"run{n}"
        assert launch(point, src, model, dst).wait(120) == -9, point
        assert not dst.exists(), point
        with pytest.raises(UserError):
            decomp.open_run(dst)
    for n, point in enumerate(POINTS):
        staging.carry_out(job(src, model), tmp_path / f"run{n}", silent)
        assert same(bits(decomp.open_run(tmp_path / f"run{n}")), factors()), point
    assert frozen(src) == before
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_9_at_any_moment(src: Path, model: Path, tmp_path: Path) -> None:
    """One migration, killed again and again, each time a little later after its start."""
    dst, delay, kills = tmp_path / "run", 1.0, 0
    while not dst.exists():
        process = launch("", src, model, dst)
        time.sleep(delay)
        process.kill()
        kills += process.wait(60) == -9
        delay *= 1.1
    assert kills > 2
    assert launch("", src, model, dst).wait(120) == 0
    assert same(bits(decomp.open_run(dst)), factors())


# ---------------------------------------------------------------- memory
MEMORY = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from decomp.verbs import export, migrate
from decomp.config.compose import Command
from exchange_source import command

def memory(name):  # getrusage would give the peak of the process that started this one
    (line,) = [line for line in open("/proc/self/status") if line.startswith(name)]
    return int(line.split()[1]) * 1024

def added(module, command):
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = memory("VmRSS:")
    assert module.main(command) == 0
    return memory("VmHWM:") - before

tmp = Path({tmp!r})
small = command(tmp / "small.safetensors", tmp / "small", tmp / "model")
assert migrate.main(small) == 0  # everything is imported
migrated = added(migrate, command(tmp / "big", tmp / "run", tmp / "model"))
exported = added(export, Command("export", (f"run={{tmp / 'run'}}", f"out={{tmp / 'out'}}", "shard_gb=0.02")))
print("PEAK", migrated, exported)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_is_that_of_one_stack_not_of_a_tree(tmp_path: Path) -> None:
    """540 MB of factors in fourteen stacks of at most 68 MB: the peak is a few stacks, far below one tree."""
    from test_data import byte_tokenizer
    from test_pretrained import tensors_of

    from decomp.target import pretrained
    from decomp.target.shape import LlamaShape

    shape = LlamaShape(
        n_layers=16, d_model=256, n_heads=4, n_kv_heads=2, head_dim=64, d_mlp=512, vocab=257, tied=True,
        max_positions=64,
    )  # fmt: skip
    pretrained.save_folder(tmp_path / "model", shape, tensors_of(shape), byte_tokenizer("<|endoftext|>"), separator=0)
    tensors = _random_factors(shape)
    sharded(tmp_path / "big", tensors)
    first = {name: x for name, x in tensors.items() if ".layers.0." in name}
    safetensors(tmp_path / "small.safetensors", first)
    tree = sum(x.nbytes for x in tensors.values())
    del tensors, first
    code = MEMORY.format(tests=str(Path(__file__).parent), tmp=str(tmp_path))
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("PEAK")]
    migrated, exported = (int(word) for word in line.split()[1:])
    stack = 16 * 2056 * 512 * 4  # the largest, of up_proj
    print(
        f"peak of migrate {migrated / stack:.2f}, of export {exported / stack:.2f}, the tree {tree / stack:.2f} stacks"
    )
    assert tree > 7 * stack
    assert max(migrated, exported) < 3 * stack
    assert same(bits(decomp.open_run(tmp_path / "run")), _random_factors(shape))
    shutil.rmtree(tmp_path / "big")


def _random_factors(shape: Any) -> dict[str, np.ndarray]:
    """Each kind has its own C, and so its own stacks."""
    rng, out = np.random.default_rng(0), {}
    for m in shape.matrices():
        C = 2016 + 8 * list(shape.kinds).index(m.kind)
        out[f"{m.name}.V"] = rng.standard_normal((m.d_in, C), dtype=np.float32)
        out[f"{m.name}.U"] = rng.standard_normal((C, m.d_out), dtype=np.float32)
    return out
