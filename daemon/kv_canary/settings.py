"""Settings: the one reader of the environment and of the settings file.

Order of precedence, low to high: default, TOML file named by `KV_CANARY_CONFIG`, `KV_CANARY_<KEY>` variables. An
unknown key or a value that is not allowed is a `SettingsError` that names the key, the value and what is allowed.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from kv_canary.errors import SettingsError

DEFAULT_PORT = 10470
PREFIX = "KV_CANARY_"

Coverage = Literal["none", "partial", "all"]
OnMismatch = Literal["log", "quarantine", "raise"]

_RATE = re.compile(r"([0-9]*\.?[0-9]+)\s*([KMGT]i?)?B?/s", re.IGNORECASE)
_SHARE = re.compile(r"([0-9]*\.?[0-9]+)\s*%")
_SCALE = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TRUE, _FALSE = {"on", "true", "1", "yes"}, {"off", "false", "0", "no"}

BUDGET_ALLOWED = (
    "a rate above 0 such as '2GB/s', a share of the read bandwidth above 0% and up to 100% such as '1%', or 'off'"
)


@dataclass(frozen=True, slots=True)
class Budget:
    """How many bytes a second the background sweep may read.

    Exactly one of the two is set, or neither: then background sweeps are off (seals, claims, confirms, drills and
    sweeps that somebody asks for still run).
    """

    bytes_per_second: float | None = None
    share: float | None = None

    @property
    def is_off(self) -> bool:
        return self.bytes_per_second is None and self.share is None

    def resolve(self, read_bandwidth_bytes_per_second: float) -> float:
        """Bytes a second, given what the device was measured to read in a second."""
        if self.share is not None:
            return self.share * read_bandwidth_bytes_per_second
        return self.bytes_per_second or 0.0

    def __str__(self) -> str:
        if self.share is not None:
            return f"{_plain(self.share * 100)}%"
        if self.bytes_per_second is None:
            return "off"
        for unit in ("T", "G", "M", "K"):
            scale = _SCALE[unit.lower()]
            if self.bytes_per_second >= scale:
                return f"{_plain(self.bytes_per_second / scale)}{unit}B/s"
        return f"{_plain(self.bytes_per_second)}B/s"


def _plain(number: float) -> str:
    """15 significant digits at most and no exponent: what is printed can be read back."""
    return f"{Decimal(f'{number:.15g}'):f}"


def parse_budget(key: str, value: object) -> Budget:
    """Reads `'1%'`, `'2GB/s'`, `'500MiB/s'` or `'off'`."""
    if isinstance(value, Budget):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if text.lower() == "off" or value is False:
        return Budget()
    if match := _SHARE.fullmatch(text):
        share = float(match[1]) / 100
        if 0 < share <= 1:
            return Budget(share=share)
    elif match := _RATE.fullmatch(text):
        rate = float(match[1]) * _SCALE[(match[2] or "").lower()]
        if 0 < rate < float("inf"):
            return Budget(bytes_per_second=rate)
    raise SettingsError(key, value, BUDGET_ALLOWED)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a setting takes: the words for it, and how it is read. `parse` raises `SettingsError` with those words."""

    allowed: str
    parse: Callable[[str, object], Any]


def _read_boolean(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise SettingsError(key, value, "on or off")


def _number(low: float, high: float, *, low_open: bool = False, whole: bool = False) -> _Kind:
    kind = "a whole number" if whole else "a number"
    allowed = f"{kind} {'above' if low_open else 'from'} {low:g} {'and up' if low_open else ''} to {high:.15g}".replace(
        "  ", " "
    )

    def parse(key: str, value: object) -> float | int:
        try:
            if isinstance(value, bool) or not isinstance(value, (int, float, str)):
                raise ValueError
            number = int(value) if whole else float(value)
            if whole and isinstance(value, float) and value != number:
                raise ValueError
        except (ValueError, OverflowError):
            raise SettingsError(key, value, allowed) from None
        if not (low < number if low_open else low <= number) or not number <= high:  # NaN fails here too
            raise SettingsError(key, value, allowed)
        return number

    return _Kind(allowed, parse)


def _choice(*choices: str) -> _Kind:
    allowed = ", ".join(choices)

    def parse(key: str, value: object) -> str:
        text = value.strip().lower() if isinstance(value, str) else value
        if text in choices:
            return str(text)
        raise SettingsError(key, value, allowed)

    return _Kind(allowed, parse)


def _read_text(key: str, value: object) -> str:
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise SettingsError(key, value, "a text that is not empty")


def _read_text_or_nothing(key: str, value: object) -> str:
    if isinstance(value, str):
        return value.strip()
    raise SettingsError(key, value, "a text")


def _read_optional_path(key: str, value: object) -> Path | None:
    if value is None or isinstance(value, Path):
        return value
    if isinstance(value, str):
        return Path(value) if value.strip() else None
    raise SettingsError(key, value, "a path")


_BOOLEAN = _Kind("on or off", _read_boolean)
_TEXT = _Kind("a text that is not empty", _read_text)
_TEXT_OR_NOTHING = _Kind("a text", _read_text_or_nothing)
_OPTIONAL_PATH = _Kind("a path", _read_optional_path)
_BUDGET = _Kind(BUDGET_ALLOWED, parse_budget)


def _setting(default: Any, kind: _Kind, help: str, *, live: bool = False) -> Any:
    metadata = {"parse": kind.parse, "allowed": kind.allowed, "help": help, "live": live}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings, checked.

    Build one with `from_environment`, `from_mapping`, or by keyword with values of the right type.
    """

    enabled: bool = _setting(False, _BOOLEAN, "Guard this server. Set by `KV_CANARY=on`; unset, no hook is installed.")
    host: str = _setting("127.0.0.1", _TEXT, "Address that the HTTP server binds.")
    port: int = _setting(
        DEFAULT_PORT,
        _number(0, 65535, whole=True),
        "Port of local rank 0; rank r takes port + r, or the next free one. 0 takes any free port.",
    )
    token_file: Path | None = _setting(
        None, _OPTIONAL_PATH, "File that holds the bearer token for writes. Re-read for every write."
    )
    allowed_hosts: str = _setting(
        "",
        _TEXT_OR_NOTHING,
        "More host names, comma separated, that the Host header may carry; * for any.",
    )
    budget: Budget = _setting(
        Budget(share=0.01),
        _BUDGET,
        "Read budget of background sweeps: a rate, a share of the read bandwidth, or off.",
        live=True,
    )
    sweep_deadline: float = _setting(
        60.0,
        _number(0, 86400, low_open=True),
        "Seconds within which every sealed page should be verified again.",
        live=True,
    )
    drill_interval: float = _setting(
        600.0, _number(1, 86400), "Seconds between two automatic fingerprint drills.", live=True
    )
    on_mismatch: OnMismatch = _setting(
        "log",
        _choice("log", "quarantine", "raise"),
        "What a confirmed mismatch leads to: a log line, and besides the page leaves the prefix cache (quarantine) or "
        "the engine's next step fails (raise).",
        live=True,
    )
    coverage: Coverage = _setting(
        "all",
        _choice("none", "partial", "all"),
        "Bytes of a page that are checked; partial is the first 16 of each token's row, none only follows who owns it.",
    )
    allow_content_drills: bool = _setting(False, _BOOLEAN, "Allow drills that flip a real byte of the cache.")
    incident_capacity: int = _setting(1000, _number(1, 100_000, whole=True), "Incidents kept in memory.")
    incident_log: Path | None = _setting(None, _OPTIONAL_PATH, "JSON Lines file that every incident is appended to.")
    incident_log_bytes: int = _setting(
        16 << 20, _number(4096, 1 << 40, whole=True), "Size at which the incident log is rotated."
    )
    incident_log_backups: int = _setting(4, _number(0, 1000, whole=True), "Rotated incident logs kept.")
    threads: int = _setting(1, _number(1, 256, whole=True), "CPU threads of one verification.")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object], *, base: Settings | None = None, label: str = "") -> Settings:
        """Checks and takes over `values`; every key is a setting's name.

        `label` is put before keys in error messages.
        """
        parsers = {f.name: f.metadata["parse"] for f in fields(cls)}
        checked: dict[str, Any] = {}
        for key, value in values.items():
            if key not in parsers:
                raise SettingsError(f"{label}{key}", value, "no setting of that name; known: " + ", ".join(parsers))
            checked[key] = parsers[key](f"{label}{key}", value)
        return replace(base or cls(), **checked)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Reads `KV_CANARY`, `KV_CANARY_CONFIG` and `KV_CANARY_<KEY>`."""
        environment = os.environ if environment is None else environment
        settings = cls()
        if path := environment.get(PREFIX + "CONFIG"):
            settings = cls.from_mapping(_read_toml(path), label=f"{path}: ")
        parsers = {f.name: f.metadata["parse"] for f in fields(cls)}
        changes: dict[str, Any] = {}
        for variable, value in environment.items():
            if variable == "KV_CANARY":
                changes["enabled"] = _read_boolean(variable, value)
            elif variable.startswith(PREFIX) and variable != PREFIX + "CONFIG":
                key = variable.removeprefix(PREFIX).lower()
                if key not in parsers:
                    known = ", ".join(PREFIX + name.upper() for name in parsers if name != "enabled")
                    raise SettingsError(
                        variable, value, f"no setting of that name; known: KV_CANARY, {PREFIX}CONFIG, {known}"
                    )
                changes[key] = parsers[key](variable, value)
        return replace(settings, **changes)

    def patched(self, changes: Mapping[str, object]) -> Settings:
        """A copy with live settings changed; `SettingsError` when a key is unknown or needs a restart."""
        live = live_settings()
        for key, value in changes.items():
            if key not in live:
                raise SettingsError(key, value, "only these can change while running: " + ", ".join(live))
        return Settings.from_mapping(changes, base=self)

    def as_json(self) -> dict[str, Any]:
        """JSON-ready values, spelled the way they are read."""
        out: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            out[f.name] = str(value) if isinstance(value, (Budget, Path)) else value
        return out


def live_settings() -> tuple[str, ...]:
    """Names of the settings that `PATCH /v1/settings` takes."""
    return tuple(f.name for f in fields(Settings) if f.metadata["live"])


def _read_toml(path: str) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise SettingsError(PREFIX + "CONFIG", path, f"a TOML file that can be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(PREFIX + "CONFIG", path, f"a valid TOML file ({error})") from error
