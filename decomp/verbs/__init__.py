"""One verb each, thin: ``main(command) -> exit code``."""
