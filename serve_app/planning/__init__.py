"""What a deployment file will need, before anything starts: memory per GPU, packing onto nodes, and what would change.

Pure but for two adapters: ``checkpoint`` reads a model's ``config.json`` and ``live`` reads a running cluster.
"""
