"""For locust's own command, with its web interface: python -m locust -f loadtest/locustfile.py --scenario steady"""

from loadtest.load.users import Arrivals, People, Shape

__all__ = ["Arrivals", "People", "Shape"]
