"""Load tests: what Modelyard costs and how fast it is, measured on the scripted fake engine."""
