"""One `Config` from four places: defaults, a TOML file, the environment, flags; the later wins.

Remembers where each value came from, so that a complaint can name the flag, the variable or the file. Reads the
tables of `chatserve.cli.flags`; does not start anything. Called by ``chatserve serve`` and ``chatserve config``.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

import chatserve
from chatserve.cli.flags import SETTINGS, UNSUPPORTED, Setting, variable
from chatserve.config import Config
from chatserve.errors import ConfigError

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])(?:iB|B)?")
_AT = re.compile(r"(?P<problem>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)

_PREFIX = "CHATSERVE_"
_OTHER_VARIABLES = (
    "CHATSERVE_CONFIG",
    "CHATSERVE_MODEL",
    "CHATSERVE_HOME",
    "CHATSERVE_KEY_PEPPER",
    "CHATSERVE_CPU_ISA",
    "CHATSERVE_URL",
    "CHATSERVE_TEST",
)
"""Read in other places than the table of flags."""

_FOREIGN_VARIABLE = re.compile(r"CHATSERVE_(?:SERVICE|PORT|PEER|BENCH|SCRIPT|VENV|E2E)(?:_|$)")
"""Kubernetes' words for a Service named chatserve, and those of the scripts and benchmarks of a checkout."""


class Settings(msgspec.Struct, frozen=True):
    """What the user asked for.

    Attributes:
        model: name, file, folder or hub id, if a file or variable names one (the command line argument wins).
        origins: dotted path of each value that is not a default → where it came from, for people to read.
        warnings: sentences about variables that have no effect.
    """

    config: Config
    model: str | None
    origins: dict[str, str]
    warnings: tuple[str, ...] = ()


def load(flags: Mapping[str, object], environ: Mapping[str, str], config_file: str | None) -> Settings:
    """Merge every source.

    Args:
        flags: click's keywords; ``None`` or ``()`` where a flag was not given.
        config_file: path of a TOML file or name of a preset; ``None`` takes ``CHATSERVE_CONFIG``, or none.

    Raises:
        ConfigError: an unreadable file, a value out of range (with its origin), or a flag not supported yet.
    """
    _refuse_unsupported(flags, environ)
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    config_file = config_file or environ.get(variable("--config"))
    if config_file:
        path = find_config(config_file)
        for key, value in _flatten(_read(path)).items():
            values[key], origins[key] = value, f"file {path}"
        if values.pop("tenants", None) is not None:  # the file declares tenants as well
            values["tenancy.file"], origins["tenancy.file"] = str(path), origins.pop("tenants")
    for setting in SETTINGS:
        for name in (*reversed(setting.variables), setting.variable):
            if name in environ:
                values[setting.path], origins[setting.path] = _parse(setting, environ[name]), f"environment {name}"
        given = flags.get(setting.key)
        if given is not None and given != ():
            values[setting.path], origins[setting.path] = _parse(setting, given), f"flag {setting.flag}"
    model = environ.get("CHATSERVE_MODEL", values.pop("model", None))
    if model is not None and not isinstance(model, str):
        raise ConfigError(f"model must be text, not {model!r} ({origins['model']}).")
    origins.pop("model", None)
    return Settings(_convert(values, origins), model, origins, _unknown_variables(environ))


def _unknown_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence for each variable that looks like ours and is none."""
    known = {*_OTHER_VARIABLES, *(setting.variable for setting in SETTINGS)}
    known |= {variable(unsupported.flag) for unsupported in UNSUPPORTED}
    warnings = []
    for name in sorted(environ):
        if not name.startswith(_PREFIX) or name in known or _FOREIGN_VARIABLE.match(name):
            continue
        near = difflib.get_close_matches(name.removeprefix(_PREFIX), (k.removeprefix(_PREFIX) for k in known), n=1)
        warnings.append(f"{name} is no setting and has no effect." + (f" Is {_PREFIX}{near[0]} meant?" if near else ""))
    return tuple(warnings)


def presets_folder() -> Path:
    """Where the shipped TOML files are: inside an installed package, or beside it in a checkout."""
    package = Path(chatserve.__file__).parent
    installed = package / "_configs"
    return installed if installed.is_dir() else package.parent / "configs"


def find_config(name: str) -> Path:
    """A path as given, or a preset by its bare name."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    preset = presets_folder() / f"{name}.toml"
    if "/" not in name and preset.is_file():
        return preset
    known = ", ".join(sorted(file.stem for file in presets_folder().glob("*.toml")))
    raise ConfigError(f"--config: there is no file {name!r}, and no preset of that name (presets: {known}).")


def flatten(config: Config) -> dict[str, object]:
    """Every value of a configuration by its dotted path, in the order of the classes."""
    return _flatten(msgspec.to_builtins(config))


def _refuse_unsupported(flags: Mapping[str, object], environ: Mapping[str, str]) -> None:
    for unsupported in UNSUPPORTED:
        given = flags.get(unsupported.key)
        if given is None:
            given = environ.get(variable(unsupported.flag))
        if given is None or str(given).lower() in unsupported.harmless:
            continue
        accepted = f" Accepted: {', '.join(unsupported.harmless)}." if unsupported.harmless else ""
        raise ConfigError(
            f"{unsupported.flag} is not supported by this version of chatserve (got {str(given)!r}). "
            f"{unsupported.why}{accepted}"
        )


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}.") from error


def _parse(setting: Setting, given: object) -> object:
    """A value as the command line or the environment spells it, ready for `msgspec.convert`."""
    if setting.kind == "list":
        return _parse_list(given)
    if not isinstance(given, str):
        return given
    if setting.kind == "size" and (match := _SIZE.fullmatch(given)):
        return int(float(match[1]) * _SUFFIXES[match[2]])
    if setting.kind == "switch":
        return {"1": True, "0": False, "true": True, "false": False}.get(given.lower(), given)
    return setting.spellings.get(given.lower(), given.lower() if setting.spellings else given)


def _parse_list(given: object) -> object:
    """Repeated flags, a comma-separated variable, or either as a JSON array."""
    if isinstance(given, str):
        if given.lstrip().startswith("["):
            try:
                return msgspec.json.decode(given, type=list[str])
            except msgspec.DecodeError as error:
                raise ConfigError(f"{given!r} is no JSON list of texts: {error}.") from error
        return [part.strip() for part in given.split(",")]
    if isinstance(given, tuple) and len(given) == 1 and str(given[0]).lstrip().startswith("["):
        return _parse_list(given[0])
    return given


def _convert(values: Mapping[str, object], origins: Mapping[str, str]) -> Config:
    tree: dict[str, object] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            inner = node.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{section} must be a table ({origins[path]}).")
            node = inner
        node[name] = value
    try:
        config = msgspec.convert(tree, Config, strict=False)
    except msgspec.ValidationError as error:
        match = _AT.fullmatch(str(error))
        assert match is not None
        raise _complaint(match["path"] or "", match["problem"], origins) from error
    _check(config, origins)
    return config


def _check(config: Config, origins: Mapping[str, str]) -> None:
    """Rules that a type cannot say."""
    block_size = config.engine.cache.block_size
    if block_size < 2 or block_size & (block_size - 1):
        raise _complaint("engine.cache.block_size", f"must be a power of two from 2 on, not {block_size}", origins)
    if config.engine.model.trust_remote_code:
        raise _complaint("engine.model.trust_remote_code", "code from model folders is never run", origins)
    for proxy in config.server.trusted_proxies:
        if proxy != "unix" and not _is_network(proxy):
            problem = f"must be addresses, networks or unix, not {proxy!r}"
            raise _complaint("server.trusted_proxies", problem, origins)
    admin_key = config.tenancy.admin_api_key
    for path, keys in (
        ("server.api_keys", config.server.api_keys),
        ("tenancy.admin_api_key", () if admin_key is None else (admin_key,)),
    ):
        for key in keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise _complaint(path, "a key must be printable ASCII without spaces, and not empty", origins)
    if admin_key in config.server.api_keys:
        raise _complaint("tenancy.admin_api_key", "must not be one of the keys that clients use", origins)


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def _complaint(path: str, problem: str, origins: Mapping[str, str]) -> ConfigError:
    bare = re.sub(r"\[.*", "", path)
    origin = origins.get(bare) or next((o for p, o in origins.items() if p.startswith(bare)), "defaults")
    hint = ""
    if origin == "environment CHATSERVE_PORT":
        hint = (
            " (Kubernetes sets this variable for a Service named chatserve: rename the Service or disable its links.)"
        )
    return ConfigError(f"{bare or 'configuration'}: {problem} ({origin}).{hint}")


def _flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
