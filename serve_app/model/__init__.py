"""One model: a Serve application of engine replicas, and the card that describes it to gateways.

``import_path: serve_app.model:app`` in a deployment file.
"""

from serve_app.model.app import app

__all__ = ["app"]
