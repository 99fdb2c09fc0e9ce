"""Settings: where they come from, which source wins, and that every bad value is refused by name."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_canary.errors import KVCanaryError, SettingsError
from kv_canary.settings import Budget, Settings, live_settings, parse_budget

# name: (as text, as TOML, the value)
VALUES: dict[str, tuple[str, str, Any]] = {
    "enabled": ("on", "true", True),
    "host": ("0.0.0.0", '"0.0.0.0"', "0.0.0.0"),
    "port": ("8080", "8080", 8080),
    "token_file": ("/run/token", '"/run/token"', Path("/run/token")),
    "allowed_hosts": ("a.example, b.example", '"a.example, b.example"', "a.example, b.example"),
    "budget": ("500MiB/s", '"500MiB/s"', Budget(bytes_per_second=500 * 2**20)),
    "sweep_deadline": ("12.5", "12.5", 12.5),
    "drill_interval": ("30", "30", 30.0),
    "on_mismatch": ("quarantine", '"quarantine"', "quarantine"),
    "coverage": ("partial", '"partial"', "partial"),
    "allow_content_drills": ("yes", "true", True),
    "incident_capacity": ("10", "10", 10),
    "incident_log": ("/var/log/canary.jsonl", '"/var/log/canary.jsonl"', Path("/var/log/canary.jsonl")),
    "incident_log_bytes": ("8192", "8192", 8192),
    "incident_log_backups": ("0", "0", 0),
    "threads": ("2", "2", 2),
}
every_setting = pytest.mark.parametrize("name", VALUES)
quick = settings(max_examples=200, deadline=None)


def variable(name: str) -> str:
    return "KV_CANARY" if name == "enabled" else f"KV_CANARY_{name.upper()}"


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "canary.toml"
    path.write_text(text)
    return str(path)


def test_the_table_of_this_test_knows_every_setting() -> None:
    assert list(VALUES) == [field.name for field in fields(Settings)]


def test_every_setting_has_a_help_text() -> None:
    assert all(field.metadata["help"].endswith(".") for field in fields(Settings))


# Sources


@every_setting
def test_every_setting_can_be_set_by_a_variable(name: str) -> None:
    found = Settings.from_environment({variable(name): VALUES[name][0]})
    assert getattr(found, name) == VALUES[name][2] != getattr(Settings(), name)


@every_setting
def test_every_setting_can_be_set_in_the_file(name: str, tmp_path: Path) -> None:
    found = Settings.from_environment({"KV_CANARY_CONFIG": toml(tmp_path, f"{name} = {VALUES[name][1]}")})
    assert getattr(found, name) == VALUES[name][2]


@every_setting
def test_every_setting_can_be_set_by_a_mapping(name: str) -> None:
    assert getattr(Settings.from_mapping({name: VALUES[name][0]}), name) == VALUES[name][2]
    assert getattr(Settings.from_mapping({name: VALUES[name][2]}), name) == VALUES[name][2]


@every_setting
def test_a_setting_leaves_all_others_at_their_defaults(name: str) -> None:
    found = Settings.from_environment({variable(name): VALUES[name][0]})
    others = [field.name for field in fields(Settings) if field.name != name]
    assert [getattr(found, other) for other in others] == [getattr(Settings(), other) for other in others]


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Settings.from_environment({}) == Settings()
    assert not Settings().enabled


def test_variables_of_others_are_left_alone() -> None:
    assert Settings.from_environment({"PATH": "/bin", "KV_CANARYX": "1", "VLLM_PORT": "x"}) == Settings()


def test_the_process_s_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_CANARY_THREADS", "3")
    assert Settings.from_environment().threads == 3


def test_a_variable_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    environment = {"KV_CANARY_CONFIG": toml(tmp_path, "port = 1111\nthreads = 5"), "KV_CANARY_PORT": "2222"}
    for order in (environment, dict(reversed(environment.items()))):
        found = Settings.from_environment(order)
        assert (found.port, found.threads, found.host) == (2222, 5, Settings().host)


def test_an_empty_config_variable_names_no_file() -> None:
    assert Settings.from_environment({"KV_CANARY_CONFIG": ""}) == Settings()


@pytest.mark.parametrize("text", ["on", "ON", " true ", "1", "yes"])
def test_words_for_on(text: str) -> None:
    assert Settings.from_environment({"KV_CANARY": text}).enabled


@pytest.mark.parametrize("text", ["off", "Off", "false", "0", "no"])
def test_words_for_off(text: str) -> None:
    assert not Settings.from_environment({"KV_CANARY": text}).enabled


@pytest.mark.parametrize("name", ["token_file", "incident_log"])
def test_an_empty_path_is_no_path(name: str) -> None:
    assert getattr(Settings.from_mapping({name: " "}), name) is None


# Bad values

BAD = [
    ("enabled", "maybe", "on or off"),
    ("enabled", 2, "on or off"),
    ("host", " ", "a text that is not empty"),
    ("host", 7, "a text that is not empty"),
    ("port", 70_000, "a whole number from 0 to 65535"),
    ("port", -1, "a whole number from 0 to 65535"),
    ("port", "80.5", "a whole number from 0 to 65535"),
    ("port", 80.5, "a whole number from 0 to 65535"),
    ("port", True, "a whole number from 0 to 65535"),
    ("port", float("nan"), "a whole number from 0 to 65535"),
    ("port", float("inf"), "a whole number from 0 to 65535"),
    ("port", "http", "a whole number from 0 to 65535"),
    ("port", "9" * 5000, "a whole number from 0 to 65535"),
    ("token_file", 5, "a path"),
    ("allowed_hosts", ["a", "b"], "a text"),
    ("budget", "-1GB/s", "a rate above 0"),
    ("budget", "150%", "a share of the read bandwidth above 0% and up to 100%"),
    ("budget", "0%", "above 0%"),
    ("budget", "0GB/s", "a rate above 0"),
    ("budget", "9" * 400 + "GB/s", "a rate above 0"),
    ("budget", "2GB", "'2GB/s'"),
    ("budget", "fast", "or 'off'"),
    ("budget", "", "or 'off'"),
    ("budget", 5, "or 'off'"),
    ("budget", True, "or 'off'"),
    ("sweep_deadline", 0, "a number above 0 and up to 86400"),
    ("sweep_deadline", "nan", "a number above 0 and up to 86400"),
    ("sweep_deadline", float("nan"), "a number above 0 and up to 86400"),
    ("sweep_deadline", "inf", "a number above 0 and up to 86400"),
    ("sweep_deadline", -3, "a number above 0 and up to 86400"),
    ("sweep_deadline", None, "a number above 0 and up to 86400"),
    ("sweep_deadline", 10**400, "a number above 0 and up to 86400"),
    ("drill_interval", 0.5, "a number from 1 to 86400"),
    ("on_mismatch", "panic", "log, quarantine, raise"),
    ("on_mismatch", None, "log, quarantine, raise"),
    ("coverage", "most", "none, partial, all"),
    ("coverage", [], "none, partial, all"),
    ("incident_capacity", 0, "a whole number from 1 to 100000"),
    ("incident_log", [], "a path"),
    ("incident_log_bytes", 100, "a whole number from 4096 to "),
    ("incident_log_backups", -1, "a whole number from 0 to 1000"),
    ("threads", 0, "a whole number from 1 to 256"),
    ("deadline", 5, "no setting of that name; known: enabled, host, port, "),
]
every_bad_value = pytest.mark.parametrize(
    ("key", "value", "allowed"), BAD, ids=[f"{key}={value!r:.20}" for key, value, _ in BAD]
)


@every_bad_value
def test_a_bad_value_is_refused_with_key_value_and_what_is_allowed(key: str, value: object, allowed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_mapping({key: value})
    assert str(caught.value).startswith(f"{key}: {value!r} is not allowed; allowed: ")
    assert allowed in str(caught.value)
    assert (caught.value.key, caught.value.value is value) == (key, True)


@every_bad_value
def test_a_bad_value_changes_nothing(key: str, value: object, allowed: str) -> None:
    base = Settings(port=1234)
    with pytest.raises(SettingsError):
        Settings.from_mapping({"threads": 7, key: value}, base=base)
    assert base == Settings(port=1234)


def test_an_error_names_the_variable() -> None:
    with pytest.raises(SettingsError, match=r"^KV_CANARY_PORT: '70000' is not allowed; allowed: a whole number from 0"):
        Settings.from_environment({"KV_CANARY_PORT": "70000"})


def test_an_error_of_the_master_switch_names_it() -> None:
    with pytest.raises(SettingsError, match=r"^KV_CANARY: '' is not allowed; allowed: on or off$"):
        Settings.from_environment({"KV_CANARY": ""})


def test_an_unknown_variable_is_told_the_known_ones() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment({"KV_CANARY_BUDGE": "1%"})
    assert str(caught.value).startswith(
        "KV_CANARY_BUDGE: '1%' is not allowed; allowed: no setting of that name; known: KV_CANARY, KV_CANARY_CONFIG, "
    )
    assert all(variable(name) in str(caught.value) for name in VALUES)


def test_an_error_in_the_file_names_file_and_key(tmp_path: Path) -> None:
    path = toml(tmp_path, "sweep_deadline = nan")
    with pytest.raises(
        SettingsError, match=re.escape(f"{path}: sweep_deadline: nan is not allowed; allowed: a number")
    ):
        Settings.from_environment({"KV_CANARY_CONFIG": path})


def test_an_unknown_key_of_the_file_is_refused(tmp_path: Path) -> None:
    path = toml(tmp_path, "[kv_canary]\nport = 1")
    with pytest.raises(SettingsError, match=re.escape(f"{path}: kv_canary: ")):
        Settings.from_environment({"KV_CANARY_CONFIG": path})


@pytest.mark.parametrize(
    "content", [b"port = ", b"port = 1\nport = 2", b"\xff\xfe\x00port"], ids=["cut", "twice", "binary"]
)
def test_a_broken_file_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "canary.toml"
    path.write_bytes(content)
    with pytest.raises(
        SettingsError, match=r"^KV_CANARY_CONFIG: '.*canary\.toml' is not allowed; allowed: a valid TOML"
    ):
        Settings.from_environment({"KV_CANARY_CONFIG": str(path)})


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_a_file_that_cannot_be_read_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "none.toml" if kind == "missing" else tmp_path
    with pytest.raises(
        SettingsError, match=r"^KV_CANARY_CONFIG: '.*' is not allowed; allowed: a TOML file that can be read \("
    ):
        Settings.from_environment({"KV_CANARY_CONFIG": str(path)})


def test_a_settings_error_is_a_value_error_and_one_of_ours() -> None:
    assert issubclass(SettingsError, ValueError)
    assert issubclass(SettingsError, KVCanaryError)


# Changes while running


def test_only_these_settings_are_live() -> None:
    assert live_settings() == ("budget", "sweep_deadline", "drill_interval", "on_mismatch")


@every_setting
def test_patched_changes_live_settings_and_refuses_all_others(name: str) -> None:
    before = Settings(port=1234)
    if name in live_settings():
        after = before.patched({name: VALUES[name][0]})
        assert getattr(after, name) == VALUES[name][2]
        assert after.port == 1234
    else:
        with pytest.raises(SettingsError, match=f"^{name}: .* only these can change while running: budget, "):
            before.patched({name: VALUES[name][0]})
    assert before == Settings(port=1234)


def test_patched_refuses_an_unknown_key() -> None:
    with pytest.raises(SettingsError, match=r"^deadline: 5 is not allowed; allowed: only these"):
        Settings().patched({"deadline": 5})


def test_patched_changes_nothing_when_one_value_is_bad() -> None:
    before = Settings()
    with pytest.raises(SettingsError, match=r"^sweep_deadline: 0 is not allowed"):
        before.patched({"budget": "5%", "sweep_deadline": 0})
    assert before == Settings()


def test_settings_as_json_can_be_read_again() -> None:
    text = {name: text for name, (text, _, _) in VALUES.items()}
    found = Settings.from_mapping(text)
    assert Settings.from_mapping(found.as_json()) == found
    assert Settings.from_mapping(Settings().as_json()) == Settings()


# Budget


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("1%", Budget(share=0.01)),
        (" 0.5 % ", Budget(share=0.005)),
        ("100%", Budget(share=1.0)),
        ("2GB/s", Budget(bytes_per_second=2e9)),
        ("2 gb/s", Budget(bytes_per_second=2e9)),
        ("1.5G/s", Budget(bytes_per_second=1.5e9)),
        (".5KiB/s", Budget(bytes_per_second=512)),
        ("1TiB/s", Budget(bytes_per_second=2**40)),
        ("100B/s", Budget(bytes_per_second=100)),
        ("off", Budget()),
        ("OFF", Budget()),
        (False, Budget()),
    ],
)
def test_spellings_of_a_budget(text: object, budget: Budget) -> None:
    assert parse_budget("budget", text) == budget


@quick
@given(share=st.decimals("0.0000001", "100", places=7))
def test_a_share_can_be_read_back_as_it_is_printed(share: Any) -> None:
    budget = parse_budget("budget", f"{share:f}%")
    assert parse_budget("budget", str(budget)) == budget


@quick
@given(
    number=st.decimals("0.001", "999999999", places=3),
    unit=st.sampled_from(["", "K", "Ki", "M", "Mi", "G", "Gi", "T", "Ti"]),
)
def test_a_rate_can_be_read_back_as_it_is_printed(number: Any, unit: str) -> None:
    budget = parse_budget("budget", f"{number:f}{unit}B/s")
    again = parse_budget("budget", str(budget))
    assert again.bytes_per_second == pytest.approx(budget.bytes_per_second, rel=1e-14)
    assert str(again) == str(budget)


@pytest.mark.parametrize(
    "text", ["off", "1%", "0.00001%", "7%", "2GB/s", "1.5MB/s", "10B/s", "0.00001B/s", "5000000TB/s"]
)
def test_a_budget_prints_plainly(text: str) -> None:
    assert str(parse_budget("budget", text)) == text


def test_a_budget_resolves_against_the_read_bandwidth() -> None:
    assert [budget.resolve(1e9) for budget in (Budget(share=0.01), Budget(bytes_per_second=5e6), Budget())] == [
        1e7,
        5e6,
        0,
    ]


def test_only_a_budget_of_nothing_is_off() -> None:
    budgets = (Budget(), Budget(share=0.01), Budget(bytes_per_second=1.0))
    assert [budget.is_off for budget in budgets] == [True, False, False]
