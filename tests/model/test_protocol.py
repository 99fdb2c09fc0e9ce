"""Every order of steps of a small model of the protocol: the properties hold, and each rule is needed for one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("protocol_model", Path(__file__).with_name("protocol.py"))
assert _spec is not None
assert _spec.loader is not None
protocol = importlib.util.module_from_spec(_spec)
sys.modules["protocol_model"] = protocol
_spec.loader.exec_module(protocol)
Model, explore = protocol.Model, protocol.explore


@pytest.mark.parametrize(
    "model",
    [
        Model(order="host", steps=7),
        Model(order="stream", steps=7),
        Model(order="host", steps=5, toggles=2),
        Model(order="host", steps=5, intruder=True),
        Model(order="stream", steps=5, intruder=True),
        Model(order="host", steps=5, glitch=True),
        Model(order="stream", steps=5, glitch=True),
        Model(order="host", steps=6, tiers=True),
        Model(order="stream", steps=6, tiers=True),
        Model(order="host", steps=5, toggles=2, tiers=True),
        Model(order="host", steps=5, intruder=True, tiers=True),
    ],
    ids=[
        *("host", "stream", "host-toggled", "host-intruder", "stream-intruder", "host-glitch", "stream-glitch"),
        *("host-tiers", "stream-tiers", "host-toggled-tiers", "host-intruder-tiers"),
    ],
)
def test_no_order_of_steps_breaks_a_property(model: Model) -> None:
    states, broken = explore(model)
    assert broken is None, broken
    assert states > 1_000


LEFT_OUT = [
    (Model(without="raise-first", steps=6), "false alarm"),
    (Model(order="stream", without="raise-first", steps=6), "false alarm"),
    (Model(without="look-again", steps=6), "false alarm"),
    (Model(order="stream", without="look-again", steps=6), "false alarm"),
    (Model(without="confirm", steps=5, glitch=True), "memory is right"),
    (Model(order="stream", without="confirm", steps=5, glitch=True), "memory is right"),
    (Model(without="seal-fence", steps=6), "false alarm"),
    (Model(without="free-fence", steps=6), "false alarm"),
    (Model(without="admit-fence", steps=6, tiers=True), "false alarm"),
    (Model(without="epoch", steps=6, toggles=2), "false alarm"),
    (Model(without="applied-generation", steps=6), "false alarm"),
]


@pytest.mark.parametrize(
    ("model", "property_lost"), LEFT_OUT, ids=[f"{model.order}-{model.without}" for model, _ in LEFT_OUT]
)
def test_without_a_rule_a_property_breaks(model: Model, property_lost: str) -> None:
    _, broken = explore(model)
    assert broken is not None
    assert property_lost in broken.what


def test_every_rule_is_left_out() -> None:
    assert {model.without for model, _ in LEFT_OUT} == set(protocol.RULES)
