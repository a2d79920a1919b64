"""decomp/init_from.py: fine-tuning starts from another run's decomposition; case 25."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from fake_runs import draw_nothing, go_on, start
from fake_trainer import FakeTrainer, State, Table, config

from decomp import init_from, loop
from decomp.checkpoint import restore_decomposition
from decomp.config.errors import UserError
from decomp.folder import read_config
from decomp.logger import read_metrics
from decomp.loop import DONE
from decomp.manifest import write_manifest


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch)


def _tree(folder: Path) -> tuple[int, list[bytes]]:
    step, tree, _ = restore_decomposition(folder)
    return step, [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        code, folder = start(config(tmp_path_factory.mktemp("whole")))
    assert code == DONE
    return folder


@pytest.fixture
def origin(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "origin")
    return tmp_path / "origin"


class Seeing(FakeTrainer):
    """Keeps what the first update is given."""

    first: list[Any]

    def step(self, state: State, tokens: np.ndarray) -> Any:
        if not self.first:
            self.first.append(jax.tree.map(np.asarray, state))
        return super().step(state, tokens)


def _from(tmp_path: Path, origin: Path, **more: Any) -> tuple[Path, State]:
    build = type("Here", (Seeing,), {"first": []})
    code, folder = start(config(tmp_path / "out", init_from=str(origin), stop_after=2, seed=1, **more), build)
    assert code == DONE
    return folder, build.first[0]


def test_a_run_begins_with_another_ones_decomposition(tmp_path: Path, origin: Path, capsys: Any) -> None:
    """Optimizer, sources and step fresh, no faithfulness warm-up; the lineage is written down."""
    folder, state = _from(tmp_path, origin)
    assert [x.tobytes() for x in jax.tree.leaves(state.decomposition)] == _tree(origin)[1]
    assert int(state.progress["step"]) == 0 and not state.progress["optim"]["components"]["mu"].any()
    assert [r["step"] for r in read_metrics(folder)] == [2]
    (line,) = (folder / "lineage.txt").read_text().splitlines()
    assert re.fullmatch(rf"{origin} after 20 updates, content [0-9a-f]{{16}}", line)
    cfg = read_config(folder)
    assert (cfg.init_from, cfg.init_from_step) == (str(origin), 20)
    said = capsys.readouterr().out
    assert f"begins with the decomposition of {line}; no faithfulness warm-up" in said
    assert "faithfulness warm-up: 3" not in said
    shutil.rmtree(origin)  # a run that has a checkpoint needs its origin no more
    assert go_on(folder, stop_after=4) == DONE


def test_an_older_step_and_grandchildren(tmp_path: Path, origin: Path) -> None:
    child, _ = _from(tmp_path, origin, init_from_step=15)
    grandchild, state = _from(tmp_path / "next", child)
    first, second = (grandchild / "lineage.txt").read_text().splitlines()
    assert first.startswith(f"{origin} after 15 updates") and second.startswith(f"{child} after 2 updates")
    assert [x.tobytes() for x in jax.tree.leaves(state.decomposition)] == _tree(child)[1]


@pytest.mark.parametrize("primary", [True, False])
def test_its_files_are_checked_once_and_by_the_primary(
    tmp_path: Path, origin: Path, monkeypatch: pytest.MonkeyPatch, primary: bool
) -> None:
    """Also where a run that was stopped before its first checkpoint begins again."""
    real, checked = init_from.find_decomposition, []
    monkeypatch.setattr(init_from, "find_decomposition", lambda *a: (checked.append(1), real(*a))[1])
    from_primary = (lambda make: make()) if primary else (lambda make: (str(origin), 20))
    monkeypatch.setattr(init_from, "processes", SimpleNamespace(from_primary=from_primary))
    folder, first = _from(tmp_path, origin)
    assert len(checked) == primary
    shutil.rmtree(folder / "checkpoints" / "2")
    build = type("Here", (Seeing,), {"first": []})
    assert loop.run(read_config(folder), folder, build) == DONE
    assert len(checked) == 2 * primary
    assert [x.tobytes() for x in jax.tree.leaves(build.first[0])] == [x.tobytes() for x in jax.tree.leaves(first)]


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_one_line(tmp_path: Path, origin: Path) -> None:
    """As it trains on, while the target of the new one loads."""

    class Slow(FakeTrainer):
        def end_warmup(self) -> None:
            pytest.fail("it began without")

        def init_state(self) -> State:
            shutil.rmtree(origin / "checkpoints" / "20")
            return super().init_state()

    with pytest.raises(UserError, match=r"its checkpoint 20 is gone: start again"):
        start(config(tmp_path / "out", init_from=str(origin)), Slow)


def _without_ci_fn(folder: Path) -> None:
    """As ``migrate`` leaves a folder: one step, components only, no progress."""
    root = folder / "checkpoints"
    _, tree, manifest = restore_decomposition(folder)
    shutil.rmtree(root)
    components = {"components": tree["components"]}
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as door:
        door.save((root / "0" / "decomposition").absolute(), args=ocp.args.StandardSave(components))
    arrays = [e for e in manifest["arrays"] if e["path"][:2] == ["decomposition", "components"]]
    write_manifest(root / "0", 0, {"sites": manifest["identity"]["sites"], "target": "target-2"}, arrays)


def test_components_alone_get_a_fresh_ci_function(tmp_path: Path, origin: Path, capsys: Any) -> None:
    _without_ci_fn(origin)
    _, state = _from(tmp_path, origin)
    components = [x.tobytes() for x in jax.tree.leaves(state.decomposition["components"])]
    assert components == _tree(origin)[1] and not state.decomposition["ci_fn"]["head.weight"].any()
    said = capsys.readouterr().out
    assert "components and no CI function: that is drawn fresh" in said
    assert "warning: it decomposes another target" in said


class Regrouped(FakeTrainer):
    """The same sites, each in a stack of its own, as with an optimizer group for each."""

    class table(Table):
        @staticmethod
        def describe() -> str:
            return ""

        @staticmethod
        def to_json() -> dict[str, Any]:
            rows = Table().to_json()
            return {name: row | {"group": f"stack {row['slot']}", "slot": 0} for name, row in rows.items()}

    def _init(self) -> State:
        state = super()._init()
        (pair,) = state.decomposition["components"].values()
        stacks = {f"stack {i}": {f: x[i : i + 1] for f, x in pair.items()} for i in range(2)}
        return state._replace(decomposition=state.decomposition | {"components": stacks})


def test_other_stack_groups_are_filled_site_by_site(tmp_path: Path, origin: Path) -> None:
    trainer = Regrouped(config(tmp_path, init_from=str(origin)))
    found = init_from.of_pinned(init_from.pinned(trainer.cfg))
    assert found is not None
    abstract, fresh = trainer.abstract_state().decomposition, trainer.init_state().decomposition
    tree = init_from.restore(found, trainer.table.to_json(), abstract, fresh)
    _, stored, _ = restore_decomposition(origin)
    for i in range(2):
        for f in "VU":
            assert tree["components"][f"stack {i}"][f][0].tobytes() == stored["components"]["4x4_C3"][f][i].tobytes()


def _smaller(**changes: int) -> type[FakeTrainer]:
    rows = {name: row | changes for name, row in Table().to_json().items()}
    return type("Smaller", (FakeTrainer,), {"table": SimpleNamespace(to_json=lambda: rows)})


def test_what_cannot_be_begun_with_is_one_line_and_leaves_no_folder(tmp_path: Path, origin: Path) -> None:
    """Case 25: the first differing sites are named."""
    lost = tmp_path / "lost"
    shutil.copytree(origin, lost)
    shutil.rmtree(lost / "checkpoints" / "20" / "decomposition")
    shutil.rmtree(lost / "checkpoints" / "15")
    ci_fn = type("Wider", (FakeTrainer,), {"abstract_state": lambda self: _wider(FakeTrainer.abstract_state(self))})
    first = r"model\.layers\.0\.mlp\.down_proj\.C is 3 there, 2 here; model\.layers\.1"
    for path, more, build, told in (
        (origin, {}, _smaller(C=2), f"its sites and C must be those of this run: {first}"),
        (origin, {}, ci_fn, r"its CI function is another: head\.weight is \[5\] there, \[6\] here: set ci_fn"),
        (tmp_path / "nothing", {}, FakeTrainer, "init_from=.*nothing: no such folder"),
        (origin / "logs", {}, FakeTrainer, "init_from=.*logs: not a run folder"),
        (origin, {"init_from_step": 7}, FakeTrainer, "no checkpoint of step 7; there are 15, 20"),
        (lost, {}, FakeTrainer, "no whole checkpoint there: 20 is damaged"),
    ):
        with pytest.raises(UserError, match=told) as error:
            loop.start(config(tmp_path / "out", init_from=str(path), **more), [], build)
        assert "\n" not in str(error.value)
    assert list((tmp_path / "out" / "fake").iterdir()) == []


def _wider(state: State) -> State:
    head = jax.ShapeDtypeStruct((6,), np.float32)
    return state._replace(decomposition=state.decomposition | {"ci_fn": {"head.weight": head}})
