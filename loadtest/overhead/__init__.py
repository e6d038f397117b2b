"""What Modelyard in front of an engine costs against ``vllm serve`` alone: ``python -m loadtest.overhead --help``."""
