"""``decomp report run=<folder>``: draws the figures and report.html of a run again."""

from __future__ import annotations

from decomp.config.compose import Command
from decomp.config.errors import UserError


def main(command: Command) -> int:
    """Returns the exit code. Needs no accelerator and no target; a run that is still training may be looked at."""
    if command.overrides:
        raise UserError(f"{command.overrides[0]}: report takes run=... only: a report changes nothing of a run")
    from decomp import figures
    from decomp.folder import open_folder

    print(figures.report(open_folder(command.options["run"])))
    return 0
