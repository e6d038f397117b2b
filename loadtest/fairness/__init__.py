"""What a key waits beside others that ask for more than a model can do: ``python -m loadtest.fairness --help``."""
