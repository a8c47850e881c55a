"""Where settings come from, which one wins, and what is refused by name."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from chatserve.cli import flags, settings
from chatserve.cli.config import config as config_command
from chatserve.cli.main import cli
from chatserve.cli.serve import serve
from chatserve.config import Config
from chatserve.errors import ConfigError


def by_path(config: Config) -> dict[str, object]:
    return settings.flatten(config)


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    """Every level is visible where the ones above it say nothing, and origins name the winner."""
    file = tmp_path / "c.toml"
    file.write_text('[server]\nport = 1\nhost = "127.0.0.2"\ndrain_timeout = 3\n[engine.scheduler]\nmax_num_seqs = 4\n')
    loaded = settings.load(
        {"port": "3"}, {"CHATSERVE_PORT": "2", "CHATSERVE_HOST": "127.0.0.3", "VLLM_API_KEY": "k"}, str(file)
    )
    server = loaded.config.server
    assert (server.port, server.host, server.drain_timeout, server.ui) == (3, "127.0.0.3", 3.0, True)
    assert loaded.config.engine.scheduler.max_num_seqs == 4
    assert server.api_keys == ("k",)
    assert loaded.origins["server.port"] == "flag --port"
    assert loaded.origins["server.host"] == "environment CHATSERVE_HOST"
    assert loaded.origins["server.drain_timeout"] == f"file {file}"
    assert loaded.origins["server.api_keys"] == "environment VLLM_API_KEY"
    assert "server.ui" not in loaded.origins


def test_our_own_variable_beats_another_servers() -> None:
    """VLLM_API_KEY is a fallback."""
    loaded = settings.load({}, {"CHATSERVE_API_KEY": "a,b", "VLLM_API_KEY": "c"}, None)
    assert loaded.config.server.api_keys == ("a", "b")


def test_every_flag_reaches_its_value() -> None:
    """No flag is parsed and then forgotten: each moves exactly its own path, by flag and by variable."""
    samples: dict[str, tuple[str, object]] = {
        "server.host": ("127.0.0.9", "127.0.0.9"),
        "server.uds": ("/tmp/s", "/tmp/s"),
        "server.ui": ("false", False),
        "server.trusted_proxies": ("10.0.0.0/8", ("10.0.0.0/8",)),
        "server.log_level": ("WARN", "warning"),
        "server.log_format": ("json", "json"),
        **{f"tenancy.{name}": ("seven", "seven") for name in ("database", "file", "admin_api_key")},
        "engine.model.name": ("m", "m"),
        "engine.model.dtype": ("half", "float16"),
        "engine.model.quantization": ("q8_0", "q8_0"),
        "engine.kernels": ("torch", "torch"),
        "engine.deterministic": ("true", True),
        "engine.cache.block_size": ("32", 32),
        "engine.model.max_model_len": ("4K", 4096),
        "engine.cache.preemption_mode": ("recompute", "recompute"),
        "engine.cache.kv_cache_memory_bytes": ("1.5g", 1_500_000_000),
    }
    default = by_path(Config())
    for setting in flags.SETTINGS:
        text, expected = samples.get(setting.path, ("7", ("7",) if setting.kind == "list" else 7))
        given: object = (text,) if setting.kind == "list" else expected if setting.kind == "switch" else text
        for loaded in (
            settings.load({setting.key: given}, {}, None),
            settings.load({}, {setting.variable: text}, None),
        ):
            changed = {p: v for p, v in by_path(loaded.config).items() if v != default[p]}
            assert changed == {setting.path: expected}, setting.flag


def test_the_flags_of_the_command_are_those_of_the_tables() -> None:
    """click offers exactly the tables' flags, and no flag is in both."""
    offered = {option for parameter in serve.params for option in parameter.opts if option.startswith("-")}
    supported = {name for s in flags.SETTINGS for name in (s.flag, *s.aliases)}
    refused = {name for u in flags.UNSUPPORTED for name in (u.flag, *u.aliases)}
    assert not supported & refused
    assert offered == supported | refused | {"--config"}


@pytest.mark.parametrize("unsupported", flags.UNSUPPORTED, ids=lambda u: u.flag)
def test_known_flags_that_do_nothing_are_refused_by_name(unsupported: flags.Unsupported) -> None:
    """By flag and by variable; only a value that asks for what happens anyway passes."""
    given: object = "false" not in unsupported.harmless if unsupported.switch else "17"
    if unsupported.switch and "true" in unsupported.harmless:
        given = False
    if str(given).lower() not in unsupported.harmless:
        for arguments in (({unsupported.key: given}, {}), ({}, {flags.variable(unsupported.flag): str(given)})):
            with pytest.raises(ConfigError, match=f"^{unsupported.flag} is not supported"):
                settings.load(*arguments, None)
    for value in unsupported.harmless:
        passed: object = {"true": True, "false": False}[value] if unsupported.switch else value
        assert settings.load({unsupported.key: passed}, {}, None).config == Config()


@pytest.mark.parametrize(
    ("given", "environ", "said"),
    [
        ({"port": "70000"}, {}, "server.port: Expected `int` <= 65535 (flag --port)"),
        ({"port": "x"}, {}, "server.port: Expected `int`, got `str` (flag --port)"),
        ({}, {"CHATSERVE_PORT": "tcp://10.0.0.1:80"}, "Kubernetes"),
        (
            {"block_size": "12"},
            {},
            "engine.cache.block_size: must be a power of two from 2 on, not 12 (flag --block-size)",
        ),
        ({"max_num_seqs": "0"}, {}, "engine.scheduler.max_num_seqs"),
        ({"threads": "-1"}, {}, "engine.threads"),
        ({"dtype": "int4"}, {}, "engine.model.dtype: Invalid enum value 'int4' (flag --dtype)"),
        ({"api_key": ("",)}, {}, "server.api_keys"),
        ({}, {"CHATSERVE_API_KEY": ""}, "server.api_keys"),
        ({}, {"CHATSERVE_API_KEY": "a b"}, "environment CHATSERVE_API_KEY"),
        ({"api_key": ("[1",)}, {}, "JSON list"),
        ({}, {"CHATSERVE_UI": "maybe"}, "server.ui"),
        ({"trusted_proxies": ("*",)}, {}, "server.trusted_proxies: must be addresses, networks or unix, not '*'"),
        ({}, {"CHATSERVE_TRUSTED_PROXIES": "unix,10.0.0.1/8"}, "not '10.0.0.1/8'"),
    ],
)
def test_a_bad_value_is_a_complaint_that_names_its_origin(
    given: dict[str, object], environ: dict[str, str], said: str
) -> None:
    """Never a traceback, and never a guess."""
    with pytest.raises(ConfigError) as caught:
        settings.load(given, environ, None)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server]\nprot = 1\n", "prot"),
        ("[sevrer]\nport = 1\n", "sevrer"),
        ("server = 3\n", "server"),
        ("model = 3\n", "model must be text"),
        ("[engine.model]\ntrust_remote_code = true\n", "never run"),
        ("[server\n", "cannot be read as TOML"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """A misspelt key does not silently keep its default."""
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        settings.load({}, {}, str(file))
    assert said in caught.value.message
    assert str(file) in caught.value.message


def test_default_toml_is_the_defaults() -> None:
    """The documented file says what the code does, and mentions every setting."""
    path = settings.find_config("default")
    assert settings.load({}, {}, str(path)).config == Config()
    text = path.read_text()
    mentioned = settings._flatten(tomllib.loads("\n".join(_uncommented(text))))
    assert set(by_path(Config())) - set(mentioned) <= {
        "engine.model.path",
        "engine.model.revision",
        "engine.model.trust_remote_code",
    }


def _uncommented(text: str) -> list[str]:
    """Lines of TOML with the ``# key = value`` ones switched on."""
    return [line.removeprefix("# ") if " = " in line and line.startswith("# ") else line for line in text.splitlines()]


def test_an_unknown_preset_lists_the_known_ones() -> None:
    """A typing error in --config is answered with what there is."""
    with pytest.raises(ConfigError, match=r"presets: default, demo"):
        settings.load({}, {}, "deflaut")


def test_config_show_prints_what_it_can_read_back_and_no_key(tmp_path: Path) -> None:
    """`config show` is TOML; `--origins` says whence; keys stay out of it."""
    arguments = ["show", "--port", "99", "--api-key", "very-secret", "--no-ui", "--max-num-seqs", "3"]
    plain = CliRunner().invoke(config_command, arguments, env={"CHATSERVE_THREADS": "2"})
    assert plain.exit_code == 0
    assert "very-secret" not in plain.output
    file = tmp_path / "again.toml"
    file.write_text(plain.output.replace('["***"]', '["very-secret"]'))
    again = settings.load({}, {}, str(file)).config
    assert (again.server.port, again.server.ui, again.engine.scheduler.max_num_seqs) == (99, False, 3)
    assert again.engine.threads == 2
    told = CliRunner().invoke(config_command, [*arguments, "--origins"], env={"CHATSERVE_THREADS": "2"})
    assert "port = 99  # --port; flag --port" in told.output
    assert "threads = 2  # --threads; environment CHATSERVE_THREADS" in told.output
    assert "block_size = 16  # --block-size; default" in told.output
    assert "\ndrain_timeout = 30.0  # --shutdown-timeout\n" in plain.output, "the flag where it has another name"


def test_variables_that_are_none_of_ours_are_named() -> None:
    """A typing error is told with the nearest name; what the system or our own scripts set is not."""
    harmless = {"CHATSERVE_HOME": "/x", "CHATSERVE_PORT_8000_TCP": "tcp://10.0.0.1:8000", "CHATSERVE_SERVICE_HOST": "h"}
    assert settings.load({}, {**harmless, "CHATSERVE_THREADS": "2", "OTHER": "x"}, None).warnings == ()
    typo, other = settings.load({}, {**harmless, "CHATSERVE_THREAD": "2", "CHATSERVE_ZZZ": ""}, None).warnings
    assert typo == "CHATSERVE_THREAD is no setting and has no effect. Is CHATSERVE_THREADS meant?"
    assert other == "CHATSERVE_ZZZ is no setting and has no effect."


def test_the_configuration_crosses_to_the_engine_unchanged() -> None:
    """What the engine process is given as JSON is what was asked for."""
    config = settings.load({"max_model_len": "1k", "dtype": "float32", "threads": "2"}, {}, None).config.engine
    assert msgspec.json.decode(msgspec.json.encode(config), type=type(config)) == config


def test_help_lists_every_subcommand() -> None:
    """The lazy group knows its commands without importing them."""
    result = CliRunner().invoke(cli, ["--help"])
    for name in ("serve", "chat", "models", "config", "version"):
        assert f"  {name} " in result.output
    assert CliRunner().invoke(cli, ["nonsense"]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--host", "0.0.0.0"], "--api-key"),
        (["serve", "--host", ""], "--api-key"),
        (["serve", "--kv-offloading-size", "4"], "--kv-offloading-size is not supported"),
        (["serve", "-tp", "2"], "--tensor-parallel-size is not supported"),
        (["serve", "--no-enable-prefix-caching"], "--enable-prefix-caching is not supported"),
        (["serve", "/no/such/model.gguf"], "/no/such/model.gguf"),
    ],
)
def test_serve_refuses_before_it_starts_anything(arguments: list[str], said: str) -> None:
    """One line on stderr, a non-zero exit, no traceback, and no engine."""
    result = subprocess.run(
        [sys.executable, "-m", "chatserve", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode in (1, 2)
    assert result.stderr.startswith("Error: ")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_file_that_declares_tenants_is_the_tenants_file() -> None:
    """The shipped example works by its name alone, and says where its tenants come from."""
    loaded = settings.load({}, {}, "multi-tenant")
    assert loaded.config.tenancy.file == str(settings.find_config("multi-tenant"))
    assert loaded.origins["tenancy.file"].startswith("file ")
    assert settings.load({"tenants_file": "mine.toml"}, {}, "multi-tenant").config.tenancy.file == "mine.toml"


def test_the_admin_key_is_a_key_of_its_own() -> None:
    """A client's key that opened the administration as well would be a trap."""
    with pytest.raises(ConfigError, match="keys that clients use"):
        settings.load({"api_key": ("k",), "admin_api_key": "k"}, {}, None)
    with pytest.raises(ConfigError, match="printable"):
        settings.load({"admin_api_key": ""}, {}, None)
    shown = CliRunner().invoke(config_command, ["show", "--admin-api-key", "secret-of-admin"]).output
    assert "admin_api_key" in shown
    assert "secret-of-admin" not in shown
