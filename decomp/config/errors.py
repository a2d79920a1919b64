"""The one exception that means "the person can mend this": printed as its message, exit code 2."""


class UserError(Exception):
    """A mistake in the input. The message names the value and the fix, and is all the person sees."""
