"""``decomp [verb] [group=option ...] [key=value ...]``: the verb, the config, the work.

Exit codes: 0 done, 1 a bug (with its traceback), 2 the person's mistake (one line each), 3 diverged, 75 pre-empted
with what there is saved, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser

import decomp
from decomp.config import fields
from decomp.config.compose import VERSION_BASE, Command, conf_dir, verbs
from decomp.config.errors import UserError

OK, MISTAKE, INTERRUPTED = 0, 2, 130


def main() -> int:
    try:
        return _dispatch(sys.argv[1:])
    except UserError as error:
        for line in str(error).splitlines():
            print(f"decomp: {line}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("decomp: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`decomp --cfg job | head`); nothing is left to be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _dispatch(argv: list[str]) -> int:
    verb, rest = split_verb(argv)
    args = _parse(rest)
    if args.shell_completion:
        return _complete(rest)
    command = Command(verb, tuple(args.overrides), _config_dirs(args))
    if args.help or args.hydra_help or args.cfg or args.info:
        return _hydras_own(command, rest, args)
    if args.multirun:
        return importlib.import_module("decomp.verbs.multirun").main(command)
    return importlib.import_module(f"decomp.verbs.{verb}").main(command)


def split_verb(argv: list[str]) -> tuple[str, list[str]]:
    """The verb is the first word when it has no ``=`` and does not begin with - ~ or +; no verb means ``run``."""
    if not argv or "=" in argv[0] or argv[0][:1] in ("-", "~", "+", ""):
        return "run", argv
    if argv[0] not in verbs():
        raise UserError(f"{argv[0]}: no such verb; {fields.hint(argv[0], verbs())}")
    return argv[0], argv[1:]


def _parse(rest: list[str]) -> argparse.Namespace:
    """Hydra's flags, with our version and one-line mistakes."""
    if "--version" in rest:
        print(f"decomp {decomp.__version__}")
        raise SystemExit(OK)
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{message}; decomp --hydra-help lists the flags")

    parser.error = refuse
    args = parser.parse_intermixed_args(rest)
    for flag in ("config_path", "config_name", "experimental_rerun"):
        if getattr(args, flag) is not None:
            raise UserError(f"--{flag.replace('_', '-')}: not supported; add a folder of options with --config-dir")
    return args


def _config_dirs(args: argparse.Namespace) -> tuple[Path, ...]:
    if args.config_dir is None:
        return ()
    if not Path(args.config_dir).is_dir():
        raise UserError(f"--config-dir {args.config_dir}: no such folder; name one with <group>/<option>.yaml in it")
    return (Path(args.config_dir).absolute(),)


def _hydras_own(command: Command, rest: list[str], args: argparse.Namespace) -> int:
    """--help, --cfg, --info and --hydra-help are Hydra's, once what was typed is known to compose."""
    flags = [word for word in rest if word not in args.overrides]
    return _hydra_main([*flags, *command.hydra_texts()])


def _hydra_main(argv: list[str]) -> int:
    def never(cfg: object) -> NoReturn:
        raise AssertionError("Hydra was asked to show something and ran something")

    sys.argv = [sys.argv[0], *argv]
    hydra.main(config_path=str(conf_dir()), config_name="config", version_base=VERSION_BASE)(never)()
    return OK


def _complete(rest: list[str]) -> int:
    """Shell completion: Hydra's, with the verb taken out of the line and offered as a first word."""
    if not any(word.startswith("query=") for word in rest):
        return _hydra_main(rest)
    app, *words = os.environ.get("COMP_LINE", "decomp ").split(" ")
    first = words[0] if words else ""
    if len(words) > 1 and first in verbs():
        words[0] = f"verb={first}"
    if len(words) <= 1:
        print("\n".join(verb for verb in verbs() if verb.startswith(first)))
    os.environ["COMP_LINE"] = " ".join([app, *words])
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        return _hydra_main(rest)
    return OK


if __name__ == "__main__":
    sys.exit(main())
