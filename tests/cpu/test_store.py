"""Tuned tables: which one answers, what is refused, and that serving never stumbles over one."""

from __future__ import annotations

import ast
import dataclasses
import json
import logging
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from sglang_kt_sm120 import (
    devices,
    doctor,
    env,
    heuristic,
    limits,
    select,
    shapes,
    tune,
    variants,
    warm,
)
from sglang_kt_sm120.backends import cutlass
from sglang_kt_sm120.configs import store, table

SERVER = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
EDITIONS = [
    SERVER,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
]
OTHERS = ["NVIDIA GeForce RTX 5090", "NVIDIA GB10"]
N, K = 2112, 7168
DIRECT = heuristic.Config("direct", 8, 64, num_warps=4, unroll=2, fused=True, splits=5)
RING = heuristic.Config("pipelined", 64, 64, num_warps=4, num_stages=4, splits=3)
TILED = heuristic.Config("tiled", 64, 64, num_warps=8, num_stages=2, group_m=4)


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    """Folders of this test alone, nothing read before."""
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    user, shipped = tmp_path / "user", tmp_path / "shipped"
    for folder in (user, shipped):
        folder.mkdir()
    monkeypatch.setenv(env.CONFIG_DIR.name, str(user))
    monkeypatch.setattr(store, "SHIPPED", (shipped,))
    monkeypatch.setattr(limits, "versions", lambda: dict(VERSIONS))
    store.forget()
    yield {"user": user, "shipped": shipped}
    store.forget()


PROVEN = limits.Known(proven=("flashinfer",))
VERSIONS = {"sglang_jit": "sglang-kt 0.7.2", "flashinfer": "flashinfer-python 0.7.2"}


def row(m: int, config=None, backend: str | None = "triton") -> dict:
    backend = backend if config is not None or backend == "cutlass" else None
    written = store.config_dict(config) if dataclasses.is_dataclass(config) else config
    return {"m": m, "backend": backend, "config": written}


def make(name: str, *rows: dict, n: int = N, k: int = K, **changes) -> dict:
    data = {
        "schema": 1,
        "gpu": store.facts(devices.describe(name)),
        "kernels": {**table.revisions(), **VERSIONS},
        "method": {"stand_in": False},
        "shapes": [{"n": n, "k": k, "dtype": "bfloat16", "rows": list(rows)}],
    }
    return {**data, **changes}


def put(folder: Path, data: dict, file: str | None = None) -> Path:
    path = folder / (file or store.user_file(data["gpu"]["name"]).name)
    store.save(path, data)
    return path


def choose(
    m: int, name: str = SERVER, cutlass: limits.Known = select.NOTHING_KNOWN, n: int = N, **problem
):
    asked = select.Problem(select.bucket(m), n, K, **problem)
    return select.choose(asked, devices.describe(name), cutlass)


def default(m: int, name: str = SERVER, n: int = N):
    return heuristic.config_for(heuristic.Case(select.bucket(m), n, K), devices.describe(name))


def test_the_order_is_user_device_class_heuristic(places):
    """Each place is asked only where those before it are silent about the M."""
    workstation = EDITIONS[1]
    for_class, for_device, for_user = (
        dataclasses.replace(DIRECT, splits=splits) for splits in (2, 3, 4)
    )
    ms = (1, 4, 8)
    put(places["shipped"], make(workstation, *(row(m, for_class) for m in ms)), "a.json")
    put(places["shipped"], make(SERVER, *(row(m, for_device) for m in ms[:2])), "b.json")
    put(places["user"], make(SERVER, row(1, for_user)))
    answers = [choose(m) for m in (1, 4, 8, 9)]
    assert [a.evidence for a in answers] == [
        "user table", "device table", "class table", "heuristic",
    ]  # fmt: skip
    assert [a.config for a in answers] == [for_user, for_device, for_class, default(9)]
    assert "b.json" in answers[1].table
    assert workstation in answers[2].table
    assert answers[3].table == ""


@pytest.mark.parametrize("tuned", EDITIONS)
@pytest.mark.parametrize("name", [*EDITIONS, *OTHERS])
def test_editions_of_one_gpu_share_a_table_and_other_gpus_do_not(places, tuned, name):
    put(places["shipped"], make(tuned, row(4, DIRECT)), "given.json")
    expected = "device table" if name == tuned else "class table"
    assert choose(4, name).evidence == (expected if name in EDITIONS else "heuristic")


def test_a_class_is_sm_count_memory_and_capability():
    device = devices.describe(SERVER)
    written = table.parse(json.dumps(make(EDITIONS[1])))
    assert store.relation(written, device) == "class table"
    for change in (
        {"sm_count": 120},
        {"bandwidth_gbs": 900.0},
        {"bandwidth_gbs": 0.0},  # not known
        {"capability": (12, 1)},
    ):
        assert store.relation(written, dataclasses.replace(device, **change)) is None, change
    unknown = {**written.gpu, "bandwidth_gbs": 0.0}
    other = dataclasses.replace(device, bandwidth_gbs=0.0)
    assert store.relation(dataclasses.replace(written, gpu=unknown), other) is None


def test_the_laptop_and_the_cut_down_card_take_no_table_of_the_full_one():
    measured = {"sm_count": 170, "capability": (12, 0)}
    full = table.parse(json.dumps(make(OTHERS[0])))
    names = ("NVIDIA GeForce RTX 5090 D v2", "NVIDIA GeForce RTX 5090 Laptop GPU")
    first, second = (devices.describe(name, **measured) for name in names)
    assert store.relation(full, first) is store.relation(full, second) is None
    of_first = dataclasses.replace(full, gpu=store.facts(first))
    assert store.relation(of_first, second) is None  # unknown is not equal to unknown
    assert store.relation(of_first, first) == "device table"


def test_a_stand_in_serves_no_other_gpu():
    device = devices.describe(SERVER)
    written = make(EDITIONS[1], method={"stand_in": True})
    assert store.relation(table.parse(json.dumps(written)), device) is None
    own = make(SERVER, method={"stand_in": True})
    assert store.relation(table.parse(json.dumps(own)), device) == "device table"


def test_a_tuned_m_answers_for_fewer_rows_of_its_own_class(places):
    tuned = {8: DIRECT, 64: RING, 256: TILED, 2048: RING}
    put(places["user"], make(SERVER, *(row(m, config) for m, config in tuned.items())))
    expected = {
        1: None, 2: 8, 8: 8, 9: None, 16: None, 17: None, 32: None, 33: 64, 64: 64, 65: 256,
        127: 256, 256: 256, 257: None, 448: None, 449: 2048, 512: 2048, 2048: 2048,
        2049: 2048, 8192: 2048, 8193: None,
    }  # fmt: skip
    for m, by in expected.items():
        answer = choose(m)
        if by is None:
            assert (answer.evidence, answer.config) == ("heuristic", default(m)), m
        else:
            assert (answer.evidence, answer.config) == ("user table", tuned[by]), m


def test_a_tuned_m_of_prefill_never_decides_for_more_rows_below_the_largest(places):
    """97 rows take no tile that was tuned for 96; those of the tuner's own list decide exactly."""
    ms = [m for m in tune.MS if m > 64]
    config = {m: dataclasses.replace(TILED, chunk=place) for place, m in enumerate(sorted(ms), 1)}
    put(places["user"], make(SERVER, *(row(m, config[m]) for m in sorted(ms))))
    for m in (*range(65, 1100), 2048, 2049, 4096, 8192):
        expected = config[min(tuned for tuned in ms if tuned >= m)]
        assert choose(m).config == expected, m


def test_a_row_decides_for_no_other_class_of_rows(places):
    """Each M of decode, a row at each: a 16-row tile must not serve what an 8-row tile can."""
    bounds = (0, *(rows for rows, _ in heuristic._DECODE))
    assert bounds[1:] == table.CLASSES
    for tuned in range(1, 65):
        config = dataclasses.replace(RING, chunk=32)
        parsed = table.parse(json.dumps(make(SERVER, row(tuned, config))))
        served = [m for m in range(1, 200) if parsed.row(m, N, K, "bfloat16")]
        below = max(bound for bound in bounds if bound < tuned)
        assert served == [m for m in range(below + 1, tuned + 1) if tuned <= 4 * m], tuned


def test_a_huge_m_does_not_hold_up_the_load(places, caplog):
    """What a load walks is bounded; the other rows of the file serve."""
    put(places["user"], make(SERVER, row(4, DIRECT), row(table.MAX_M, TILED), row(10**9, TILED)))
    problem, device = select.Problem(4, N, K), devices.describe(SERVER)
    assert max(select.tuned_rows(problem, device)) == table.MAX_M == 16384
    assert len(variants.rows(problem, device)) < 2000
    assert choose(4).config == DIRECT
    assert choose(4 * table.MAX_M).config == TILED
    assert choose(4 * table.MAX_M + 64).evidence == "heuristic"
    assert f"M={10**9}: rows end at M=16384" in caplog.text


def test_a_row_without_a_winner_keeps_the_heuristic_against_later_tables(places):
    put(places["shipped"], make(SERVER, row(4, DIRECT)), "given.json")
    put(places["user"], make(SERVER, row(4)))
    assert choose(4).evidence == "heuristic"
    assert choose(4).config == default(4) != DIRECT


def test_neighbours_of_m_never_differ_for_divisibility(places):
    """M from 1 to 257 with a full table: the backend changes where a row says so, nowhere else."""
    rows = [row(m, RING if m <= 64 else None) for m in (1, 2, 4, 8, 16, 32, 64)]
    rows += [row(128, TILED), row(256, None, "cutlass")]
    put(places["user"], make(SERVER, *rows, n=4096))
    device = devices.describe(SERVER)

    def backend(m):
        return select.choose(select.Problem(select.bucket(m), 4096, K), device, PROVEN).backend

    assert [backend(m) for m in range(1, 258)] == ["triton"] * 128 + ["cutlass"] * 129


def test_tables_are_not_asked_where_they_do_not_apply(places, monkeypatch):
    put(places["user"], make(SERVER, row(4, DIRECT)))
    assert choose(4, deterministic=True).evidence == "heuristic"
    assert choose(4, prequantised=True).evidence == "heuristic"
    assert choose(4, dtype="float16").evidence == "heuristic"
    monkeypatch.setenv(env.BACKEND.name, "triton")
    forced = choose(4)
    assert (forced.evidence, forced.config) == ("forced", DIRECT)
    monkeypatch.setenv(env.BACKEND.name, "reference")
    assert choose(4).config is None


def test_a_table_asks_for_cutlass_only_where_it_is_proven(places):
    put(places["user"], make(SERVER, row(4, None, "cutlass"), n=4096))
    problem, device = select.Problem(4, 4096, K), devices.describe(SERVER)
    proven = select.choose(problem, device, PROVEN)
    assert (proven.backend, proven.evidence) == ("cutlass", "user table")
    assert proven.config == limits.Cutlass("flashinfer")
    struck = limits.Known(struck=(("flashinfer", "RuntimeError: Error Internal"),))
    struck = select.choose(problem, device, struck)
    assert (struck.backend, struck.evidence) == ("triton", "heuristic")
    assert struck.config == heuristic.config_for(problem, device)


def test_the_kernel_that_a_table_names_is_probed_and_no_other(places):
    rows = [row(4, {"kernel": "flashinfer"}, "cutlass"), row(256, RING)]
    put(places["user"], make(SERVER, *rows, n=4096))
    problem, device = select.Problem(4, 4096, K), devices.describe(SERVER)
    assert select.wanted_kernels(problem, device, "") == (("flashinfer",), ())
    own = ("sglang_jit", "flashinfer")  # the host's default beside it
    assert select.wanted_kernels(problem, device, "sglang_jit") == (own, ())
    others = limits.Known(proven=("sglang_jit",), host_default="sglang_jit")
    assert select.choose(problem, device, others).backend == "triton"
    both = limits.Known(proven=("sglang_jit", "flashinfer"), host_default="sglang_jit")
    assert select.choose(problem, device, both).config == limits.Cutlass("flashinfer")


def with_config(**fields) -> dict:
    return make(SERVER, {"m": 4, "backend": "triton", "config": {**asdict(DIRECT), **fields}})


def asdict(config) -> dict:
    return dataclasses.asdict(config)


# 147,456 bytes: the ring of 64 x 128 tiles that a stock table of another card asks for.
GREEDY = heuristic.Config("tiled", 64, 128, num_warps=4, num_stages=7)
BAD_FILES = {
    "empty": ("", "empty"),
    "truncated": (json.dumps(make(SERVER, row(4, DIRECT)))[:-40], "no JSON"),
    "binary": (b"\xff\xfe\x00\x01", "cannot be read"),
    "a list": ("[]", "wrong kind"),
    "another schema": (json.dumps(make(SERVER, schema=2)), "schema is 2"),
    "no shapes": (json.dumps({k: v for k, v in make(SERVER).items() if k != "shapes"}), "shapes"),
    "another GPU": (json.dumps(make(OTHERS[0], row(4, DIRECT))), "RTX 5090"),
    "falling M": (json.dumps(make(SERVER, row(8, DIRECT), row(4, DIRECT))), "must rise"),
    "one M twice": (json.dumps(make(SERVER, row(4, DIRECT), row(4, DIRECT))), "must rise"),
    "M of zero": (json.dumps(make(SERVER, row(0, DIRECT))), "must rise"),
    "M as text": (json.dumps(make(SERVER, {**row(4, DIRECT), "m": "4"})), "must rise"),
    "an odd K": (json.dumps(make(SERVER, row(4, DIRECT), k=7100)), "k=7100"),
    "a line break in the credit": (
        json.dumps(make(SERVER, row(4, DIRECT), shared_by="me\nERROR a line of my own")),
        "shared_by",
    ),
    "an escape in the credit": (
        json.dumps(make(SERVER, row(4, DIRECT), shared_by="\x1b[2J")),
        "shared_by",
    ),
    "a credit that is long": (
        json.dumps(make(SERVER, row(4, DIRECT), shared_by="x" * 81)),
        "80 characters",
    ),
    "a credit that is a list": (
        json.dumps(make(SERVER, row(4, DIRECT), shared_by=[])),
        "shared_by",
    ),
    "a line break in the name": (
        json.dumps(make(SERVER, gpu={**make(SERVER)["gpu"], "name": "a\nb"})),
        "gpu.name",
    ),
    "sm_count as text": (json.dumps(make(SERVER, gpu={"name": SERVER})), "capability"),
}
BAD_ROWS = {
    "shared memory": (make(SERVER, row(256, GREEDY)), "147456 bytes of shared memory"),
    "recorded shared memory": (
        make(SERVER, {**row(4, DIRECT), "shared_bytes": 147456}),
        "147456 bytes of shared memory",
    ),
    "an old kernel": (
        make(SERVER, row(4, DIRECT), kernels={**table.revisions(), "direct": "0" * 12}),
        "direct kernel has changed",
    ),
    "no revision": (make(SERVER, row(4, DIRECT), kernels={}), "has changed"),
    "an unknown key": (with_config(block_k=128), "unknown key 'block_k'"),
    "a missing key": (make(SERVER, {"m": 4, "backend": "triton", "config": {}}), "no block_m"),
    "a float": (with_config(splits=2.0), "splits=2.0"),
    "a flag for a number": (with_config(splits=True), "splits=True"),
    "warps": (with_config(num_warps=3), "num_warps=3"),
    "splits": (with_config(splits=1000), "splits=1000"),
    "more rows than the tile": (make(SERVER, row(16, DIRECT)), "serves 8 rows, not 16"),
    "an unknown kernel": (with_config(kernel="stream"), "kernel='stream'"),
    "an unknown backend": (make(SERVER, row(4, DIRECT, "trtllm")), "trtllm"),
    "block-scaled": (
        make(SERVER, row(256, dataclasses.replace(TILED, unit_scaled=True))), "plain FP8",
    ),
    "a null row of an old kernel": (
        make(SERVER, row(4), kernels={**table.revisions(), "tiled": "0" * 12}),
        "has changed since none beat the heuristic",
    ),
    **{
        f"cutlass: {name}": (
            make(SERVER, {"m": 4, "backend": "cutlass", "config": config}, n=n, kernels=kernels),
            reason,
        )
        for name, config, n, kernels, reason in [
            ("an unknown kernel", {"kernel": "nonsense"}, 4096, VERSIONS, "'nonsense' is none of"),
            ("a kernel that is a list", {"kernel": []}, 4096, VERSIONS, "kernel [] is none of"),
            ("an unknown key", {"kernel": "flashinfer", "tile": 1}, 4096, VERSIONS, "'tile': 1"),
            ("no key", {}, 4096, VERSIONS, "neither"),
            ("text", "flashinfer", 4096, VERSIONS, "neither"),
            ("odd N", {"kernel": "flashinfer"}, 2112, VERSIONS, "not in whole 128 x 128 blocks"),
            ("odd N, any kernel", None, 2112, VERSIONS, "not in whole 128 x 128 blocks"),
            ("no version", {"kernel": "flashinfer"}, 4096, {}, "no version of flashinfer"),
            ("no version, any kernel", None, 4096, {}, "no version of sgl_kernel or sglang_jit"),
            (
                "another version", {"kernel": "sglang_jit"}, 4096,
                {**VERSIONS, "sglang_jit": "sglang-kt 0.7.1"},
                "tuned with sglang_jit of sglang-kt 0.7.1, here is sglang_jit of sglang-kt 0.7.2",
            ),
            (
                "a library that is not here", {"kernel": "sgl_kernel"}, 4096,
                {"sgl_kernel": "sgl-kernel 0.3.21"}, "sgl-kernel 0.3.21, here is none",
            ),
            (
                "any kernel, one of another version", None, 4096,
                {**VERSIONS, "flashinfer": "flashinfer-python 0.6.3"}, "here is sglang_jit of",
            ),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_with_its_name_and_the_reason(places, case, caplog):
    content, reason = BAD_FILES[case]
    file = store.user_file(SERVER)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    check_refused(file, reason, caplog)


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_refused_with_its_file_and_the_reason(places, case, caplog):
    data, reason = BAD_ROWS[case]
    check_refused(put(places["user"], data), reason, caplog, data["shapes"][0]["n"])


@pytest.mark.parametrize("case", BAD_ROWS)
def test_where_a_row_is_refused_the_next_table_answers(places, case):
    """A bad row, or a stale one, hides no good one that ships."""
    data, _ = BAD_ROWS[case]
    (shape,) = data["shapes"]
    m = shape["rows"][0]["m"]
    good = DIRECT if m <= 8 else RING if m <= 64 else TILED
    put(places["user"], data)
    assert store.rows(select.Problem(m, shape["n"], K), devices.describe(SERVER)) == []
    store.forget()
    put(places["shipped"], make(SERVER, row(m, good), n=shape["n"]), "given.json")
    choice = choose(m, n=shape["n"], cutlass=limits.Known(limits.NAMES))
    assert (choice.evidence, choice.config) == ("device table", good)


def test_a_row_of_the_hosts_kernel_stands_where_its_version_is_here(places):
    for config in ({"kernel": "sglang_jit"}, None):
        line = {"m": 4, "backend": "cutlass", "config": config}
        put(places["user"], make(SERVER, line, n=4096))
        store.forget()
        known = limits.Known(("sglang_jit",))
        choice = choose(4, n=4096, cutlass=known)
        assert (choice.backend, choice.evidence) == ("cutlass", "user table")
        assert choice.config == limits.Cutlass("sglang_jit")


def test_versions_are_read_from_metadata_and_import_nothing(tmp_path):
    """Three distributions bring one of the kernels; each that is installed is named."""
    for name, version in (("sgl-kernel", "0.3.21"), ("kt-kernel", "0.7.2"), ("sglang", "0.5.9")):
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (tmp_path / "flashinfer_python-0.6.3.dist-info").mkdir()  # what an interrupted pip leaves
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}]\n"
        "from sglang_kt_sm120.configs import table\n"
        "print([item for item in table.revisions().items() if item[0] not in table.SOURCES])\n"
        "assert not {'torch', 'sgl_kernel', 'sglang', 'flashinfer'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == (
        "[('sgl_kernel', 'sgl-kernel 0.3.21, kt-kernel 0.7.2'), ('sglang_jit', 'sglang 0.5.9')]"
    ), result.stderr


def check_refused(file: Path, reason: str, caplog, n: int = N) -> None:
    for m in (1, 4, 16, 256):
        choice = choose(m, n=n, cutlass=limits.Known(limits.NAMES))
        assert (choice.evidence, choice.config) == ("heuristic", default(m, n=n))
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1, warnings
    assert str(file) in warnings[0]
    assert reason in warnings[0]
    assert "the next table decides" in warnings[0]
    assert "or the" in warnings[0]


def test_a_tile_that_this_triton_cannot_make_is_refused():
    old = dataclasses.replace(devices.describe(SERVER), tokens=16)
    parsed = table.parse(json.dumps(make(SERVER, row(4, DIRECT), row(64, RING))), old)
    assert [r.refused for r in parsed.shapes[N, K, "bfloat16"]] == [True, False]
    assert "no product with 8 tokens" in parsed.refused[0]


def test_a_bad_row_leaves_its_neighbours_in_force(places):
    bad = {**row(8, DIRECT), "config": {**asdict(DIRECT), "num_warps": 3}}
    put(places["user"], make(SERVER, row(4, DIRECT), bad, row(16, RING)))
    assert choose(3).config == DIRECT
    assert choose(8).config == default(8)  # not the next one's
    assert choose(9).config == RING


def test_a_file_that_is_cut_anywhere_never_raises(places):
    """Each prefix of a table, and tables with one random byte changed, serve or are refused."""
    text = json.dumps(make(SERVER, row(4, DIRECT), row(64, RING), row(256, TILED)))
    numbers = random.Random(7)
    spoilt = [text[:cut] for cut in range(0, len(text), 37)]
    for _ in range(150):
        at = numbers.randrange(len(text))
        spoilt.append(text[:at] + chr(numbers.randrange(32, 127)) + text[at + 1 :])
    for content in spoilt:
        store.user_file(SERVER).write_text(content)
        store.forget()
        for m in (4, 64, 256):
            choice = choose(m)
            table.check(choice.config, min(m, 8) if choice.config.kernel == "direct" else m, K)


def test_a_folder_that_is_not_there_is_nothing_to_warn_of(places, monkeypatch, caplog):
    (places["user"] / "file").touch()
    for folder in ("missing", "file"):
        monkeypatch.setenv(env.CONFIG_DIR.name, str(places["user"] / folder))
        assert choose(4).evidence == "heuristic"
        assert store.trouble(devices.describe(SERVER)) is None
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_unreadable_place_serves_by_the_heuristic(monkeypatch):
    monkeypatch.setenv(env.CONFIG_DIR.name, "/proc/1/root/nowhere")
    assert choose(4).evidence == "heuristic"
    monkeypatch.delenv(env.CONFIG_DIR.name)
    monkeypatch.setattr(Path, "expanduser", raise_no_home)
    store.forget()
    assert choose(4).evidence == "heuristic"


def test_a_mistake_of_ours_is_no_crash_of_the_server(places, monkeypatch, caplog):
    put(places["user"], make(SERVER, row(4, DIRECT)))
    monkeypatch.setattr(store, "read", lambda *_: {}["missing"])
    assert choose(4).evidence == choose(8).evidence == "heuristic"
    assert caplog.text.count("KeyError: 'missing'") == 1


def test_a_folder_that_may_not_be_read_hides_no_table_that_ships(places, monkeypatch, caplog):
    put(places["shipped"], make(SERVER, row(4, DIRECT)), "given.json")
    user, real = store.user_file(SERVER), Path.stat

    def refuse(path, *arguments, **options):
        if path == user:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(Path, "read_text", lambda path, real=Path.read_text, **options: (
        refuse(path) and real(path, **options)
    ))  # fmt: skip
    assert (choose(4).evidence, choose(4).config) == ("device table", DIRECT)
    assert "Permission denied" in caplog.text
    assert "Permission denied" in store.trouble(devices.describe(SERVER))


def raise_no_home(self):
    raise RuntimeError("Could not determine home directory.")


def test_files_are_read_once_and_every_thread_gets_the_same_answer(places, monkeypatch):
    put(places["user"], make(SERVER, row(4, DIRECT)))
    reads = []
    monkeypatch.setattr(
        store, "read", lambda f, d=None, real=store.read: reads.append(f) or real(f, d)
    )
    first = choose(4)
    put(places["user"], make(SERVER, row(4, dataclasses.replace(DIRECT, splits=7))))
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(choose(4))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [first] * 8
    assert len(reads) == 1
    store.forget()
    assert choose(4).config.splits == 7


def test_a_configuration_that_fails_at_load_leaves_its_shape_to_the_heuristic(places, caplog):
    put(places["user"], make(SERVER, row(4, DIRECT)))
    problem, device = select.Problem(4, N, K), devices.describe(SERVER)
    assert select.choose(problem, device).config == DIRECT
    assert select.drop_tables(problem, device, "OutOfResources: shared memory")
    assert select.choose(problem, device).evidence == "heuristic"
    assert "OutOfResources" in caplog.text
    assert not select.drop_tables(problem, device, "again")
    assert not select.drop_tables(select.Problem(4, 128, 128), device, "no table speaks for it")


def test_a_load_goes_on_when_a_tuned_configuration_fails(places, monkeypatch, tmp_path, caplog):
    """The layer is warmed anew with what the heuristic takes; another failure is not hidden."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    put(places["user"], make(SERVER, row(4, DIRECT)))
    device, met = devices.describe(SERVER), []
    monkeypatch.setattr(devices, "device", lambda index: device)
    monkeypatch.setattr(warm, "_compile", lambda *_: 0)
    monkeypatch.setattr(warm, "_warmed", set())
    weight = torch.zeros(N, K, dtype=torch.float8_e4m3fn)
    scale = torch.ones(-(-N // 128), K // 128)

    def linear(*, input, **_):
        problem = select.Problem(select.bucket(input.shape[0]), N, K)
        choice = select.choose(problem, device)
        met.append(choice.evidence)
        if choice.evidence == "user table" or "broken" in met:
            raise RuntimeError("out of resource: shared memory")

    warm.layer(linear, weight, scale, torch.bfloat16)
    assert "user table" in met
    assert met[-1] == "heuristic"
    assert "out of resource" in caplog.text
    store.forget()
    warm._warmed.clear()
    met.append("broken")
    with pytest.raises(RuntimeError, match="out of resource"):
        warm.layer(linear, weight, scale, torch.bfloat16)


def test_a_configuration_that_fails_on_another_rank_is_left_here_too(
    places, monkeypatch, tmp_path, caplog
):
    """Ranks with other kernels on a replicated layer would drift apart."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    put(places["user"], make(SERVER, row(4, DIRECT)))
    device, met, asked = devices.describe(SERVER), [], []
    monkeypatch.setattr(devices, "device", lambda index: device)
    monkeypatch.setattr(warm, "_compile", lambda *_: 0)
    monkeypatch.setattr(warm, "_warmed", set())

    def agreed(question, where, why):
        asked.append((question, why))
        return "another rank cannot use it: OutOfMemoryError"

    monkeypatch.setattr(cutlass, "agreed", agreed)

    def linear(*, input, **_):
        problem = select.Problem(select.bucket(input.shape[0]), N, K)
        met.append(select.choose(problem, device).evidence)

    weight = torch.zeros(N, K, dtype=torch.float8_e4m3fn)
    warm.layer(linear, weight, torch.ones(-(-N // 128), K // 128), torch.bfloat16)
    assert asked == [(f"table/{N}x{K}/bfloat16", None)]
    assert "user table" in met
    assert met[-1] == "heuristic"
    assert select.choose(select.Problem(4, N, K), device).evidence == "heuristic"


@pytest.mark.parametrize("ms", [(4, 64, 256), (100, 300, 700, 1000), (1024,), (8, 96)])
def test_every_variant_that_a_table_brings_is_warmed(places, ms):
    """What a layer runs once at load holds every variant that any M can take, table or not."""
    numbers = random.Random(3)
    layers = shapes.unique(shapes.SHAPE_SETS["deepseek-r1"])
    made = []
    for layer in layers:
        rows = []
        for m in ms:
            base = DIRECT if m <= 8 else RING if m <= 64 else TILED
            rows.append(row(m, dataclasses.replace(base, chunk=numbers.randrange(1, 33), splits=1)))
        made.append({"n": layer.n, "k": layer.k, "dtype": "bfloat16", "rows": rows})
    put(places["user"], make(SERVER, shapes=made))
    device = devices.describe(SERVER)
    for layer in layers:
        problem = select.Problem(1, layer.n, layer.k)

        def variant(m, layer=layer):
            asked = select.Problem(select.bucket(m), layer.n, layer.k)
            return select.choose(asked, device).config.variant()

        warmed = {variant(m) for m in warm.representatives(problem, device)}
        met = {variant(m) for m in (*range(1, 1200), *range(1200, 40_000, 61))}
        assert met <= warmed, (layer, met - warmed)
        tuned = {table.config_from(r["config"]).variant() for shape in made for r in shape["rows"]}
        assert met & tuned
    assert {config.variant() for config in select.tuned_configs(device)} == tuned


def test_a_revision_covers_everything_that_a_kernel_is_made_of():
    """Its own file and what that imports; and quantisation, unless it always does that itself."""
    for kernel, sources in table.SOURCES.items():
        reached, todo = set(), [f"{kernel}.py"] + ["quant.py"] * (kernel != "direct")
        while todo:
            name = todo.pop()
            reached.add(name)
            for node in ast.walk(ast.parse((table.KERNELS / name).read_text())):
                if isinstance(node, ast.ImportFrom) and node.level:
                    named = node.module or ""
                    assert named, f"{name}: from . import hides what is imported"
                    todo += [f"{named}.py"] if f"{named}.py" not in reached else []
        assert reached == set(sources), kernel
    ours = {table.revisions()[kernel] for kernel in table.SOURCES}
    assert len(ours) == len(table.SOURCES)


def test_saving_is_atomic_and_merging_keeps_what_still_holds(places):
    old = make(SERVER, row(4, DIRECT), row(8, DIRECT))
    new = make(SERVER, row(8, None), row(16, RING))
    merged = store.merge(old, new)
    assert [(r["m"], r["backend"]) for r in merged["shapes"][0]["rows"]] == [
        (4, "triton"), (8, None), (16, "triton"),
    ]  # fmt: skip
    here, there = {"driver": "580.1"}, {"driver": "570.2"}
    merged_too = store.merge({**old, "environment": there}, {**new, "environment": here})
    assert merged_too["environment"] == here
    where = [r.get("environment") for r in merged_too["shapes"][0]["rows"]]
    assert where == [there, None, None]
    again = store.merge(merged_too, {**new, "environment": {"driver": "590.3"}})
    where = [r.get("environment") for r in again["shapes"][0]["rows"]]
    assert where == [there, None, None]  # the row's own, not that of the table it came in
    elsewhere = make(SERVER, row(4, DIRECT), method={"stand_in": True})
    assert [r["m"] for r in store.merge(elsewhere, new)["shapes"][0]["rows"]] == [8, 16]
    file = put(places["user"], merged)
    with pytest.raises(TypeError):
        store.save(file, {"schema": object()})
    assert json.loads(file.read_text()) == merged
    assert [path.name for path in places["user"].iterdir()] == [file.name]


def test_tuning_is_offered_until_it_has_run(places, caplog):
    caplog.set_level(logging.INFO)
    choose(4)
    assert "tune --quick" in caplog.text
    assert SERVER in caplog.text
    caplog.clear()
    file = put(places["user"], make(SERVER, row(4, DIRECT)))
    store.forget()
    choose(4)
    assert "tune --quick" not in caplog.text
    assert f"user table {file}" in caplog.text


def test_doctor_offers_tuning_and_names_the_table(places):
    seen = {"name": SERVER, "capability": "12.0", "sm_count": 188}

    def row_of(**changes):
        store.forget()
        (found,) = doctor._tables({"devices": [seen | changes, seen | changes]})
        return found

    assert row_of().status == doctor.WARN
    assert "tune --quick" in row_of().fix
    file = put(places["user"], make(SERVER, row(4, DIRECT)))
    assert (row_of().status, row_of().value.startswith(f"user table {file}")) == (doctor.OK, True)
    put(places["user"], make(SERVER, row(256, GREEDY)))
    assert (row_of().status, "147456 bytes" in row_of().value) == (doctor.WARN, True)
    file.write_text("")
    assert "it is empty" in row_of().value
    file.write_text(json.dumps(make(OTHERS[0])))
    assert "it is for NVIDIA GeForce RTX 5090" in row_of().value
    assert list(doctor._tables({"devices": [seen | {"capability": "9.0"}]})) == []


def assert_of_an_sm120(gpu: dict) -> None:
    """Any SM12x card may share; of one whose data sheet is known, the facts must be those."""
    capability = tuple(map(int, gpu["capability"].split(".")))
    assert capability in select.SM120, gpu
    assert gpu["sm_count"] > 0, gpu
    assert gpu["shared_bytes"] >= 101376, gpu
    measured = {key: gpu[key] for key in ("sm_count", "shared_bytes")}
    seen = devices.describe(gpu["name"], capability=capability, **measured)
    assert store.facts(seen) == gpu
    try:
        known = devices.describe(gpu["name"])
    except ValueError:
        return
    assert store.facts(known) == gpu


@pytest.mark.parametrize("folder", [store.HERE / "shipped", store.HERE / "community"])
def test_every_table_in_the_wheel_is_valid(folder):
    """The gate for a table that comes by pull request."""
    for file in sorted(folder.glob("*.json")):
        found = store.read(file)
        assert not found.refused, (file, found.refused)
        assert not found.stand_in, file
        assert_of_an_sm120(found.gpu)
        proof = json.loads(file.read_text())
        if folder.name == "community":
            assert found.credit, file
            for key in ("power_limit", "driver", "host"):
                assert proof["environment"][key], (file, key)
            assert isinstance(proof["environment"]["host"], dict), file
        for shape in proof["shapes"]:
            for line in shape["rows"]:
                assert line["backend"] is None or 0 < line["error"] <= 5e-3, (file, line)
                assert line["backend"] is None or line["us"] <= 0.98 * line["over_us"], (file, line)
