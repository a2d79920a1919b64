"""``python -m decomp`` as a person meets it: verbs, flags, exit codes, one line for a mistake (issue 2, cases 3, 5)."""

from __future__ import annotations

import sys

import pytest

from decomp import __main__ as cli
from decomp.config.compose import verbs
from decomp.verbs import multirun


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path):
    """Exit code, stdout and stderr of ``decomp`` in this process, in an empty folder that has to stay empty."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["decomp", *args])
        try:
            code = cli.main()
        except SystemExit as exit:
            code = 0 if exit.code is None else int(exit.code)
        said = capsys.readouterr()
        assert list(tmp_path.iterdir()) == []
        return code, said.out, said.err

    return run


MISTAKES = {
    "mehs=dp8": "mesh",
    "mesh=dp9": "dp8",
    "optim.components.lr=abc": "must be a number or a schedule",
    "data.batch_size=0": "must be above 0",
    "sites.layers=..": "must be all or a list",
    "experiment=nope": "pycode",
    "target=llama": "target.path: is required",
    "resum": "did you mean resume?",
    "--cgf": "unrecognized arguments: --cgf",
    "--config-name=x": "--config-name: not supported",
    "--config-dir=nowhere": "no such folder",
}


@pytest.mark.parametrize(("typed", "wanted"), MISTAKES.items(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_and_exit_2(answer, typed: str, wanted: str):
    code, out, err = answer(typed)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("decomp: ")
    assert wanted in err


def test_several_mistakes_are_several_lines(answer):
    code, _, err = answer("optim.components.lr=abc", "data.batch_size=0", "ci_fn.d_model=130")
    assert code == 2
    assert err.count("\n") == 3


@pytest.mark.parametrize("typed", ["mehs=dp8", "mesh=dp9", "optim.compnents.lr=1"])
def test_a_mistake_before_cfg_is_one_line_too(answer, typed: str):
    code, out, err = answer("--cfg", "job", typed)
    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("verb", ["", *verbs()])
def test_cfg_job_works_for_every_verb(answer, verb: str):
    code, out, err = answer(*[verb] * bool(verb), "--cfg", "job", "seed=7", "sites.C.down_proj=64")
    assert (code, err) == (0, "")
    assert "\nseed: 7\n" in out and "down_proj: 64" in out


def test_cfg_job_shows_a_verbs_keys_as_text(answer):
    _, out, _ = answer("resume", "run=1e5", "--cfg", "job")
    assert "\nrun: '1e5'\n" in out


def test_cfg_job_shows_one_package_resolved(answer):
    code, out, _ = answer("--cfg", "job", "--package", "mesh", "mesh=dp32")
    assert code == 0 and "replicate: 4" in out and "target" not in out
    assert "experiment: smoke" in answer("--cfg", "job", "--resolve", "experiment=smoke")[1]


@pytest.mark.parametrize("verb", ["", *verbs()])
def test_help_works_for_every_verb(answer, verb: str):
    code, out, err = answer(*[verb] * bool(verb), "--help")
    assert (code, err) == (0, "")
    assert "decomp [verb] [group=option ...]" in out and "mesh: auto, cpu8" in out


def test_version(answer):
    assert answer("--version")[:2] == (0, "decomp 0.1.0\n")


def test_the_verb_is_the_first_word():
    assert cli.split_verb(["resume", "run=x"]) == ("resume", ["run=x"])
    assert cli.split_verb([]) == ("run", [])
    for first in ("a=b", "-m", "~loss.frequency", "+a.b=1"):
        assert cli.split_verb([first, "x=y"]) == ("run", [first, "x=y"])


def test_a_bug_is_a_traceback(answer, monkeypatch: pytest.MonkeyPatch):
    from decomp.verbs import run

    def broken(command: object) -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(run, "main", broken)
    with pytest.raises(ZeroDivisionError):
        answer()


@pytest.mark.parametrize("code", [0, 3, 75])
def test_a_verbs_exit_code_is_the_programs(answer, monkeypatch: pytest.MonkeyPatch, code: int):
    from decomp.verbs import run

    monkeypatch.setattr(run, "main", lambda command: code)
    assert answer("seed=1")[0] == code


# ---------------------------------------------------------------- completion
def complete(answer, monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    monkeypatch.setenv("COMP_LINE", line)
    code, out, err = answer("-sc", "query=bash")
    assert (code, err) == (0, "")
    return out.split()


def test_completion_knows_verbs_and_what_follows_them(answer, monkeypatch: pytest.MonkeyPatch):
    assert complete(answer, monkeypatch, "decomp re")[:2] == ["report", "resume"]
    assert "run=" in complete(answer, monkeypatch, "decomp resume ru")
    assert "mesh=dp32tp2" in complete(answer, monkeypatch, "decomp resume run=x mesh=dp")
    assert "optim.components." in complete(answer, monkeypatch, "decomp optim.comp")


def test_completion_of_a_mistyped_line_is_silent(answer, monkeypatch: pytest.MonkeyPatch):
    assert complete(answer, monkeypatch, "decomp mehs=dp8 zzz") == []


def test_completion_installs(answer):
    code, out, _ = answer("-sc", "install=bash")
    assert code == 0 and out.rstrip().endswith("hydra_bash_completion decomp")


# ---------------------------------------------------------------- sweeps
def test_a_sweep_runs_every_point_and_hides_none(answer, monkeypatch: pytest.MonkeyPatch):
    """Case 36: one failed point leaves the others and stands in the summary; the sweep's exit code says so."""
    codes = {"seed=0": 0, "seed=1": 2, "seed=2": 0}
    ran: list[str] = []

    def fake(command):
        ran.append(command[-1])
        return codes[command[-1]], False

    monkeypatch.setattr(multirun, "_run", fake)
    code, out, _ = answer("-m", "seed=0,1,2")
    assert (code, ran) == (1, list(codes))
    assert [line.split()[1] for line in out.splitlines()[-3:]] == ["done", "refused", "done"]


def test_a_stopped_sweep_says_what_was_not_started(answer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(multirun, "_run", lambda command: (75, True))
    code, out, _ = answer("-m", "seed=0,1")
    assert code == 1 and ": stopped " in out and "not started" in out


def test_a_sweep_point_is_a_process_of_its_own(decomp_cli):
    """Both points refuse their config, one after the other, and the summary names both."""
    done = decomp_cli("-m", "experiment=smoke", "data.batch_size=0", "seed=0,1", timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("data.batch_size=0: must be above 0") == 2
    assert done.stdout.count("refused") == 2


def test_only_runs_are_swept(answer):
    assert answer("resume", "-m", "run=a,b")[0] == 2


def test_python_m_decomp_answers(decomp_cli):
    done = decomp_cli("mesh=dp9", timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("decomp: mesh=dp9: ") and done.stderr.count("\n") == 1
