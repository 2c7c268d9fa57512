"""Targets and storages that people describe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.law.target import TOLERANCE, Target
from shardlaw.conformance.rank import storage
from shardlaw.conformance.rank.spmd import Function
from shardlaw.conformance.target import builtin as builtin_targets
from shardlaw.conformance.target.builtin import BUILTIN, check_devices
from shardlaw.conformance.target.config import DTYPES, find_target, get_target, parse_target, read_config, target_origins, with_storage
from shardlaw.conformance.world.join import call_by_name

UCX = """
[target.ucx]
backend = "ucx"
setup = "json:loads"
cannot = ["all_to_all"]
timeout = 20
startup_timeout = 90.5
env = { UCX_TLS = "tcp" }
init_method = "tcp://127.0.0.1:0"
options = { pg_options = "json:loads" }
tolerance = { float32 = 1e-4 }
dtypes = ["float32", "int64"]
storage = "s3"

[storage.s3]
writer = "torch.distributed.checkpoint:FileSystemWriter"
reader = "torch.distributed.checkpoint:FileSystemReader"
options = { path = "s3://bucket/{run}" }
"""


def write(folder: Path, text: str, name: str = "shardlaw.toml") -> Path:
    (folder / name).write_text(text)
    return folder


def test_a_block_becomes_a_target(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, UCX))
    assert config.targets["ucx"] == Target(
        name="ucx",
        backend="ucx",
        setup="json:loads",
        cannot=("all_to_all",),
        timeout=20.0,
        startup_timeout=90.5,
        env=(("UCX_TLS", "tcp"),),
        init_method="tcp://127.0.0.1:0",
        init_options=(("pg_options", "json:loads"),),
        tolerance={**TOLERANCE, "float32": 1e-4},
        dtypes=("float32", "int64"),
        storage="s3",
    )
    stored = with_storage(config.targets["ucx"], None, config)
    assert stored.writer == "torch.distributed.checkpoint:FileSystemWriter"
    assert dict(stored.options) == {"path": "s3://bucket/{run}"}
    assert with_storage(config.targets["ucx"], "filesystem", config).writer == ""
    hash(replace(stored, options=(("path", {"bucket": ["a"]}),)))  # a replay remembers what is expected of a target


def test_a_storage_may_lie_elsewhere(tmp_path: Path) -> None:
    place = "torch.distributed.checkpoint:FileSystem"
    for path, there in (
        (f"{tmp_path}/bucket/{{run}}/x", "bucket/tmp-shardlaw-1-case-2/x"),
        (f"{tmp_path}/bucket", "bucket/tmp-shardlaw-1-case-2"),
    ):
        target = Target(storage="mine", writer=f"{place}Writer", reader=f"{place}Reader", options=(("path", path), ("sync_files", False)))
        assert str(storage.make_writer(target, "/tmp/shardlaw-1/case-2", thread_count=2).path).endswith(there)
        assert str(storage.make_reader(target, "/tmp/shardlaw-1/case-2").path).endswith(there)


def test_pyproject_holds_the_same_tables(tmp_path: Path) -> None:
    text = UCX.replace("[target.", "[tool.shardlaw.target.").replace("[storage.", "[tool.shardlaw.storage.")
    assert read_config(write(tmp_path, text, "pyproject.toml")).targets["ucx"].backend == "ucx"


def test_shardlaw_toml_stands_before_pyproject(tmp_path: Path) -> None:
    write(tmp_path, "[tool.shardlaw.target.theirs]\nbackend = 'gloo'\n", "pyproject.toml")
    config = read_config(write(tmp_path, "[target.mine]\nbackend = 'gloo'\n"))
    assert list(config.targets) == ["mine"]


def test_no_config_is_no_error(tmp_path: Path) -> None:
    assert read_config(tmp_path).path is None
    assert read_config(write(tmp_path, "[tool.black]\nline-length = 3\n", "pyproject.toml")).path is None


def test_a_block_of_a_built_in_name_changes_it(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, "[target.nccl]\ntimeout = 33\n"))
    assert get_target("nccl", config) == replace(BUILTIN["nccl"], timeout=33.0)
    assert target_origins(config)["nccl"] == "shardlaw.toml"


def test_environment_and_options_of_a_built_in_target_are_added_to(tmp_path: Path) -> None:
    text = "[target.nccl]\nenv = { NCCL_DEBUG = 'INFO', TORCH_NCCL_BLOCKING_WAIT = '1' }\noptions = { device_id = false }\n"
    found = get_target("nccl", read_config(write(tmp_path, text)))
    assert dict(found.env) == {**dict(BUILTIN["nccl"].env), "NCCL_DEBUG": "INFO", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    assert dict(found.init_options) == {"device_id": False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[target.x]\nbackned = 'gloo'\n", "shardlaw.toml: [target.x]: unknown key 'backned' (nearest: backend"),
        ("[target.x]\ntimeout = 3\n", "[target.x]: want a backend"),
        ("[target.x]\nbackend = 3\n", "[target.x]: backend = 3: want a text"),
        ("[target.x]\nbackend = 'gloo'\nsetup = 'my register'\n", "setup = 'my register': want module:function, or a module"),
        ("[target.x]\nbackend = 'gloo'\ncannot = ['all_to_al']\n", "unknown 'all_to_al' (nearest: all_to_all"),
        ("[target.x]\nbackend = 'gloo'\ncannot = 'all_to_all'\n", "want a list of texts"),
        ("[target.x]\nbackend = 'gloo'\ntimeout = -1\n", "timeout = -1: want seconds"),
        ("[target.x]\nbackend = 'gloo'\ntimeout = true\n", "timeout = True: want seconds"),
        ("[target.x]\nbackend = 'gloo'\ntimeout = inf\n", "timeout = inf: want seconds"),
        ("[target.x]\nbackend = 'gloo'\ndtypes = ['floot32']\n", "unknown 'floot32' (nearest: float32"),
        ("[target.x]\nbackend = 'gloo'\nenv = { A = 1 }\n", "want a table of texts"),
        ("[target.x]\nbackend = 'gloo'\nenv = { 'A-B' = '1' }\n", "no name of an environment variable"),
        ("[target.x]\nbackend = 'gloo'\ninit_method = '/tmp/x'\n", "want tcp://, file:// or env://"),
        ("[target.x]\nbackend = 'gloo'\noptions = 3\n", "options = 3: want a table, such as { device_id = true"),
        ("[target.x]\nbackend = 'gloo'\noptions = { pgoptions = 'a:b' }\n", "options: unknown key 'pgoptions' (nearest: pg_options"),
        ("[target.x]\nbackend = 'gloo'\noptions = { device_id = 'cuda:0' }\n", "device_id = 'cuda:0': want true or false"),
        ("[target.x]\nbackend = 'gloo'\noptions = { device_id = true }\n", "want a device of its own for each rank, not the cpu"),
        ("[target.x]\nbackend = 'gloo'\noptions = { pg_options = 'b' }\n", "pg_options = 'b': want module:name"),
        ("[target.x]\nbackend = 'gloo'\ntolerance = { float32 = 'no' }\n", "want a relative error"),
        ("[target.x]\nbackend = 'gloo'\ntolerance = { int64 = 0.1 }\n", "unknown dtype 'int64'"),
        ("[target.x]\nbackend = 'gloo'\nstorage = 's3'\n", "storage 's3' is not described"),
        ("[target.x]\nbackend = 'gloo'\nexpect = ['none.toml']\n", "no such file"),
        ("[targets.x]\nbackend = 'gloo'\n", "shardlaw.toml: unknown key 'targets' (nearest: target"),
        ("target = 3\n", "want tables, such as target.NAME"),
        ("[storage.x]\nwriter = 'a:B'\n", "[storage.x]: want a reader"),
        ("[storage.x]\nwriter = 'a:B'\nreader = 'b'\n", "reader = 'b': want module:name"),
        ("[storage.x]\nwriter = 'a:B'\nreader = 'a:B'\nreader_options = 1\n", "reader_options = 1: want a table"),
        ("[storage.filesystem]\nwriter = 'a:B'\nreader = 'a:B'\n", "is built in"),
        ("[target.x\n", "shardlaw.toml: Expected"),
    ],
)
def test_values_are_checked_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    write(tmp_path, text)
    with pytest.raises(UsageError) as refused:
        read_config(tmp_path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_unknown_names_are_refused_with_the_nearest(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, UCX))
    with pytest.raises(UsageError, match=r"no target is called 'glo' \(nearest: gloo"):
        get_target("glo", config)
    with pytest.raises(UsageError, match=r"no storage is called 's4' \(nearest: s3"):
        with_storage(BUILTIN["gloo"], "s4", config)


def test_a_request_names_target_storage_and_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write(tmp_path, UCX))
    found = find_target("ucx", "filesystem", 3.0, 4)
    assert (found.name, found.storage, found.writer, found.timeout) == ("ucx", "filesystem", "", 3.0)
    assert find_target("gloo", None, None, 4) == Target()


def test_a_setup_may_be_a_module_that_need_only_be_imported(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, "[target.x]\nbackend = 'x'\nsetup = 'my_package.c10d'\n"))
    assert get_target("x", config).setup == "my_package.c10d"
    assert Function.from_setup("my_package.c10d") == Function("my_package.c10d", "", "")
    assert call_by_name("json") is None


def test_a_device_type_that_torch_does_not_have_is_told() -> None:
    with pytest.raises(UsageError, match="device = 'gpu': torch has no such device type"):
        check_devices(Target("x", device="gpu"), 2)


def test_a_setup_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write(tmp_path, "[target.x]\nbackend = 'x'\nsetup = 'no_such_module_here:register'\n"))
    with pytest.raises(UsageError, match="no module no_such_module_here"):
        find_target("x", None, None, 4)


def test_an_entry_point_may_give_a_table(tmp_path: Path) -> None:
    assert parse_target("entry point", "x", {"backend": "gloo", "timeout": 3}, tmp_path) == Target(name="x", timeout=3.0)


@pytest.mark.parametrize(
    ("name", "ranks", "seen", "message"),
    [
        ("gloo", 8, 0, None),
        ("nccl", 4, 4, None),
        ("nccl", 4, 1, "target nccl with 4 ranks needs 4 GPUs (one for each rank), 1 seen"),
        ("nccl", 4, 3, "; run --world-size 3 fits"),
        ("nccl", 1, 0, "target nccl with 1 rank needs 1 GPU (one for each rank), 0 seen"),
        ("cuda-gloo", 4, 1, None),
        ("cuda-gloo", 4, 0, "target cuda-gloo with 4 ranks needs 1 GPU (shared by the ranks), 0 seen"),
    ],
)
def test_devices_are_counted_before_anything_starts(
    name: str, ranks: int, seen: int, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin_targets, "count_devices", lambda target: seen)
    if message is None:
        check_devices(BUILTIN[name], ranks)
        return
    with pytest.raises(UsageError) as refused:
        check_devices(BUILTIN[name], ranks)
    assert message in str(refused.value)


def test_the_dtypes_are_those_of_the_tensors() -> None:
    from shardlaw.reference import tensors

    assert set(DTYPES) == set(tensors.DTYPES)
