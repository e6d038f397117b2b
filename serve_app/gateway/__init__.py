"""The gateway: one OpenAI-compatible endpoint in front of every model application of the cluster.

``import_path: serve_app.gateway:app`` in a deployment file.
"""

from serve_app.gateway.app import app

__all__ = ["app"]
