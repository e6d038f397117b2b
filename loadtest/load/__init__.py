"""Load tests of a running endpoint on locust: scenarios, users who stream, and a report. See docs/loadtest.md."""
