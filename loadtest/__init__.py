"""Load tests and measurements. Each is a module to run: ``python -m loadtest.NAME --help``."""
