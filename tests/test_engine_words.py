"""How the vLLM adapter words a refusal; needs no vLLM."""

from serve_app import errors
from serve_app.model import engine


def test_faults_are_those_of_the_branch_that_was_meant() -> None:
    """A union's other branches do not speak, and no class name is shown."""
    where = ("body", "messages", 0)
    faults = [
        {"type": "literal_error", "loc": (*where, "SystemParam", "role"), "msg": "Input should be 'system'"},
        {"type": "string_type", "loc": (*where, "SystemParam", "content"), "msg": "should be a text"},
        {"type": "missing", "loc": (*where, "HarmonyMessage", "author"), "msg": "Field required"},
        {"type": "string_type", "loc": (*where, "UserParam", "content", "str"), "msg": "should be text"},
    ]
    error = errors.invalid_body(engine._meant(faults))
    assert (error.param, error.message) == ("messages.0.content", "messages.0.content: should be text")


def test_faults_stay_where_no_branch_was_meant() -> None:
    """A constant that fits no branch is still a fault."""
    fault = {"type": "literal_error", "loc": ("body", "input", "Item", "type"), "msg": "Input should be 'message'"}
    assert errors.invalid_body(engine._meant([fault])).param == "input.type"
