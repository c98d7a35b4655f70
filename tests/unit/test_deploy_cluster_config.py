"""The configuration of a cluster: what it accepts, refuses and prints."""

from pathlib import Path

import pytest
import yaml

from deploy.cluster_config import ClusterConfig, ConfigError, load_config, parse_config, render_config

TLS = {"cert": "a.pem", "key": "a.key", "ca": "ca.pem"}


def test_printed_configuration_reads_back_as_the_default() -> None:
    content = yaml.safe_load(render_config(ClusterConfig()))
    assert parse_config(content, "printed") == ClusterConfig()


@pytest.mark.parametrize(
    "content",
    [
        {"model": "m", "pools": {"decode": {"workers": 3, "worker": {"step_tokens": 64}}}},
        {"worker": {"tls": TLS}, "router": {"tls": TLS, "api_keys_file": "keys", "host": "0.0.0.0"}},
    ],
)
def test_printed_configuration_reads_back_as_what_was_set(content: dict[str, object]) -> None:
    config = parse_config(content, "test")
    assert parse_config(yaml.safe_load(render_config(config)), "printed") == config


def test_every_printed_key_has_a_comment() -> None:
    lines = render_config(ClusterConfig()).splitlines()
    keys = [number for number, line in enumerate(lines) if not line.lstrip().startswith("#")]
    assert keys
    assert all(len(lines[number - 1].lstrip()) > 3 and "# " in lines[number - 1] for number in keys)
    assert "None" not in "".join(line for line in lines if line.lstrip().startswith("#"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"modle": "m"}, "unknown key 'modle' (did you mean 'model'?)"),
        ({"pools": {"prefil": {}}}, "unknown key 'pools.prefil' (did you mean 'prefill'?)"),
        ({"worker": {"blocksize": 8}}, "unknown key 'worker.blocksize' (did you mean 'block_size'?)"),
        ({"router": {"xyzzy": 1}}, "unknown key 'router.xyzzy'"),
        ({"worker": {"model_path": "/m"}}, "unknown key 'worker.model_path'"),
        ({"pools": {"decode": {"workers": 0}}}, "pools.decode.workers: Input should be greater"),
        (
            {"pools": {"decode": {"worker": {"max_model_len": 32}}}},
            "max_model_len must be the same in both pools, not None and 32",
        ),
        (
            {"pools": {"decode": {"worker": {"kv_dtype": "fp8"}}}},
            "the prefill pool hands off KV in auto, the decode pool keeps it in fp8",
        ),
        (
            {"pools": {"prefill": {"worker": {"kv_wire_dtype": "int8"}}}},
            "the prefill pool hands off KV in int8, the decode pool keeps it in auto",
        ),
        ({"router": {"host": "0.0.0.0"}}, "router: host: 0.0.0.0 can be reached from other machines"),
        ({"router": {"client_ca": "ca.pem"}}, "router: client_ca: needs tls"),
        ({"worker": {"tls": TLS}}, "tls: give it to both router and worker, or to neither"),
        ({"router": {"tls": {"crt": "a.pem"}}}, "unknown key 'router.tls.crt' (did you mean 'cert'?)"),
        (
            {"worker": {"tls": TLS, "kv_transport": "gloo"}, "router": {"tls": TLS}},
            "gloo cannot encrypt: with TLS it is used only where --kv-trusted-network",
        ),
    ],
)
def test_a_wrong_key_or_value_is_named(content: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(content, "cluster.yaml")
    assert str(error.value).startswith("cluster.yaml: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    "pools",
    [
        {"decode": {"worker": {"block_size": 32}}},
        {"prefill": {"worker": {"kv_wire_dtype": "int8"}}, "decode": {"worker": {"kv_conversion": True}}},
        {"decode": {"worker": {"kv_dtype": "fp8", "kv_conversion": True}}},
    ],
)
def test_pools_may_differ_in_what_is_converted(pools: dict[str, object]) -> None:
    parse_config({"pools": pools}, "cluster.yaml")


def test_a_file_that_is_not_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("model: [")
    with pytest.raises(ConfigError, match=r"broken\.yaml: not YAML"):
        load_config(path)


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").touch()
    assert load_config(tmp_path / "empty.yaml") == ClusterConfig()


def test_a_pool_overrides_what_both_are_told() -> None:
    config = parse_config(
        {
            "worker": {"step_tokens": 256, "dtype": "float32"},
            "pools": {"prefill": {"worker": {"step_tokens": 1024}}},
        },
        "test",
    )
    assert config.worker_config("prefill").step_tokens == 1024
    assert config.worker_config("decode").step_tokens == 256
    assert config.worker_config("prefill").dtype == "float32"


@pytest.mark.parametrize(
    ("model", "model_name", "served"),
    [("smollm2-135m", None, "smollm2-135m"), ("owner/name", None, "owner/name"), ("owner/name", "n", "n")],
)
def test_clients_see_the_models_name(model: str, model_name: str | None, served: str) -> None:
    config = ClusterConfig(model=model, model_name=model_name)
    assert config.served_name == config.router_config().model_name == served


def test_clients_see_the_name_of_a_models_folder(tmp_path: Path) -> None:
    assert ClusterConfig(model=str(tmp_path)).served_name == tmp_path.name


def test_workers_on_machines_that_others_can_reach_need_tls() -> None:
    with pytest.raises(ConfigError, match=r"^worker: host: 10\.1\.2\.3 can be reached"):
        ClusterConfig().check_workers_at(["127.0.0.1", "10.1.2.3"])
    ClusterConfig().check_workers_at(["127.0.0.1"])
    for worker in ({"tls": TLS}, {"insecure": True}):
        router = {"tls": TLS} if "tls" in worker else {}
        parse_config({"worker": worker, "router": router}, "test").check_workers_at(["10.1.2.3"])
