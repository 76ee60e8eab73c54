from __future__ import annotations

import pytest

from kvdock.errors import ArgumentValueError
from kvdock.plugins.settings import PluginSettings, Selector


def test_nothing_set_loads_everything() -> None:
    assert PluginSettings.from_environ({}) == PluginSettings(allow=None, deny=(), autoload=True, device_backends={})


@pytest.mark.parametrize("text", ["", " ", ",", " , "])
def test_empty_list_counts_as_not_set(text: str) -> None:
    settings = PluginSettings.from_environ({"KVDOCK_BACKENDS": text, "KVDOCK_BACKENDS_DENY": text})
    assert (settings.allow, settings.deny) == (None, ())


def test_lists_hold_names_and_distributions() -> None:
    settings = PluginSettings.from_environ({"KVDOCK_BACKENDS": "cpu, acme@My_Dist.x,", "KVDOCK_BACKENDS_DENY": "old"})
    assert settings.allow == (Selector("cpu"), Selector("acme", "my-dist-x"))
    assert settings.deny == (Selector("old"),)
    assert settings.lists() == "allow cpu,acme@my-dist-x; deny old; autoload on"


@pytest.mark.parametrize("item", ["@dist", "name@", "@"])
def test_incomplete_item_is_refused_with_the_variable(item: str) -> None:
    with pytest.raises(ArgumentValueError) as caught:
        PluginSettings.from_environ({"KVDOCK_BACKENDS_DENY": f"cpu,{item}"})
    assert str(caught.value) == (
        "KVDOCK_BACKENDS_DENY: expected plugin names separated by commas, each `name` or `name@distribution`, "
        f"got {item!r}. Fix: remove the item, or complete it; `kvdock doctor` lists the names"
    )


@pytest.mark.parametrize(
    ("selector", "name", "distribution", "matches"),
    [
        ("acme", "acme", "any", True),
        ("acme", "acme2", "any", False),
        ("acme", "Acme", "any", False),
        ("acme@my-dist", "acme", "My.Dist", True),
        ("acme@my-dist", "acme", "other", False),
        ("acme@my-dist", "acme", None, False),
    ],
)
def test_selector_matches(selector: str, name: str, distribution: str | None, matches: bool) -> None:
    assert Selector.parse(selector, "V").matches(name, distribution) is matches


@pytest.mark.parametrize(("text", "autoload"), [("1", False), ("TRUE", False), ("on", False), ("0", True), ("", True), ("no", True)])
def test_switch(text: str, autoload: bool) -> None:
    assert PluginSettings.from_environ({"KVDOCK_DISABLE_AUTOLOAD": text}).autoload is autoload


def test_switch_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ArgumentValueError, match=r"^KVDOCK_DISABLE_AUTOLOAD: expected 1 or 0, got 'perhaps'. Fix: "):
        PluginSettings.from_environ({"KVDOCK_DISABLE_AUTOLOAD": "perhaps"})


def test_backend_by_device_type() -> None:
    others = {"KVDOCK_BACKENDS": "x", "KVDOCK_BACKENDS_DENY": "y", "KVDOCK_BACKEND_": "z"}
    environ = {"KVDOCK_BACKEND_NPU": " acme ", "KVDOCK_BACKEND_CPU": "", **others}
    assert PluginSettings.from_environ(environ).device_backends == {"npu": "acme"}
