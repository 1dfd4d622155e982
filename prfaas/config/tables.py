"""Tables of a TOML file become checked values, or a ConfigError that names value and limit."""

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from prfaas.errors import ConfigError

MAX_FILE_BYTES = 64 << 20


class Table:
    """One table of a file, read key by key; `finish` refuses the keys that nobody has read.

    Every method raises ConfigError with the file, the key, the value and what is allowed.
    """

    def __init__(self, entries: Mapping[str, object], path: Path, name: str = "") -> None:
        self.path = path
        self._entries = entries
        self._name = name
        self._read: dict[str, None] = {}

    def __contains__(self, key: str) -> bool:
        """Return whether the file sets the key."""
        return key in self._entries

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys that the file sets."""
        return tuple(self._entries)

    def text(self, key: str, default: str | None = None) -> str:
        """Return printable text of at least one character."""
        raw = self._get(key, default)
        if not isinstance(raw, str) or not raw or not raw.isprintable():
            raise self.error(key, f"expected printable text, not {raw!r}")
        return raw

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        """Return one of the choices."""
        raw = self._get(key, default)
        if not isinstance(raw, str) or raw not in choices:
            raise self.error(key, f"expected one of {', '.join(choices)}, not {raw!r}")
        return raw

    def number(
        self,
        key: str,
        *,
        above: float | None = None,
        minimum: float | None = None,
        maximum: float,
        default: float | None = None,
    ) -> float:
        """Return a finite number within the limits."""
        raw = self._get(key, default)
        return self._number(key, raw, above=above, minimum=minimum, maximum=maximum)

    def integer(self, key: str, *, minimum: int, maximum: int, default: int | None = None) -> int:
        """Return a whole number within the limits."""
        raw = self._get(key, default)
        if not isinstance(raw, int) or isinstance(raw, bool):
            raise self.error(key, f"expected a whole number, not {_shown(raw)}")
        self._check(key, raw, above=None, minimum=minimum, maximum=maximum)
        return raw

    def boolean(self, key: str, *, default: bool | None = None) -> bool:
        """Return true or false."""
        raw = self._get(key, default)
        if not isinstance(raw, bool):
            raise self.error(key, f"expected true or false, not {_shown(raw)}")
        return raw

    def numbers(
        self, key: str, *, above: float | None = None, minimum: float | None = None, maximum: float
    ) -> tuple[float, ...]:
        """Return a list of finite numbers within the limits, one at least."""
        raw = self._get(key, None)
        if not isinstance(raw, list) or not raw:
            raise self.error(key, f"expected a list of numbers, not {_shown(raw)}")
        return tuple(
            self._number(f"{key}[{index}]", entry, above=above, minimum=minimum, maximum=maximum)
            for index, entry in enumerate(raw)
        )

    def table(self, key: str) -> "Table":
        """Return the table under a key."""
        raw = self._get(key, None)
        if not isinstance(raw, dict):
            raise self.error(key, f"expected a table [{self._path(key)}], not {_shown(raw)}")
        return Table(raw, self.path, self._path(key))

    def tables(self, key: str) -> tuple["Table", ...]:
        """Return the tables [[key]], one at least."""
        raw = self._get(key, None)
        if not isinstance(raw, list) or not raw or not all(isinstance(x, dict) for x in raw):
            raise self.error(key, f"expected tables [[{self._path(key)}]], not {_shown(raw)}")
        return tuple(
            Table(entry, self.path, f"{self._path(key)}[{i}]") for i, entry in enumerate(raw)
        )

    def file(self, key: str) -> Path:
        """Return the path under a key; a relative one starts at this file."""
        return self.path.parent / Path(self.text(key)).expanduser()

    def finish(self) -> None:
        """Refuse what was not read."""
        for key in self._entries:
            if key not in self._read:
                near = difflib.get_close_matches(key, self._read, n=1, cutoff=0.6)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"{self.path}: unknown key {self._path(key)}{hint}")

    def error(self, key: str, what: object) -> ConfigError:
        """Return a ConfigError about a key."""
        return ConfigError(f"{self.path}: {self._path(key)}: {what}")

    def _path(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key

    def _get(self, key: str, default: object) -> object:
        self._read[key] = None
        if key in self._entries:
            return self._entries[key]
        if default is None:
            raise self.error(key, "is not set")
        return default

    def _number(
        self,
        key: str,
        raw: object,
        *,
        above: float | None,
        minimum: float | None,
        maximum: float,
    ) -> float:
        if not isinstance(raw, int | float) or isinstance(raw, bool):
            raise self.error(key, f"expected a number, not {_shown(raw)}")
        if not math.isfinite(raw):
            raise self.error(key, f"expected a finite number, not {raw:g}")
        self._check(key, raw, above=above, minimum=minimum, maximum=maximum)
        return float(raw)

    def _check(
        self,
        key: str,
        value: float,
        *,
        above: float | None,
        minimum: float | None,
        maximum: float,
    ) -> None:
        if above is not None and value <= above:
            raise self.error(key, f"{value:.15g} must be above {above:.15g}")
        if minimum is not None and value < minimum:
            raise self.error(key, f"{value:.15g} is below the minimum of {minimum:.15g}")
        if value > maximum:
            raise self.error(key, f"{value:.15g} is above the maximum of {maximum:.15g}")


def read_toml(path: Path) -> Table:
    """Return the top table of a TOML file. Raises ConfigError if it cannot be read."""
    return Table(_entries(path), path)


def _entries(path: Path) -> dict[str, object]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES:,} bytes")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _shown(raw: object) -> str:
    return str(raw).lower() if isinstance(raw, bool) else repr(raw)
