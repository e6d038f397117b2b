"""Modelyard: one OpenAI-compatible endpoint in front of many LLMs on a Ray cluster.

This package root stays empty on purpose: engine child processes import from it (see ``orphan_guard``), and must not
pay for Ray or FastAPI.
"""

__version__ = "0.1.0"
