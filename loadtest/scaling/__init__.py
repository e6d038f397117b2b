"""Replays arrivals against simulated engines, scaled by Modelyard's policy and by others. Needs no GPU and no cluster.

``traces``: what arrives. ``engine``: one engine. ``fleet``: one model's gateway and replicas on shared GPUs.
``systems``: who decides how many replicas there are. ``replay``: the loop. ``report`` and ``plot``: what comes out.
"""
