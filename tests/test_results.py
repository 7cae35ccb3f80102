"""results.tsv: no row lost, doubled or torn, whatever its text and however many write at once."""

import csv
import math
import multiprocessing
from pathlib import Path

import pandas
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autokernel import results, state
from autokernel.errors import InputError
from autokernel.results import COLUMNS, FIGURES, Row, Status

FIRST_COLUMNS = """
    experiment tag kernel_type throughput_tflops latency_us pct_peak speedup_vs_pytorch correctness peak_vram_mb description
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(state, "ROOT", tmp_path)
    monkeypatch.setattr(state, "WORKSPACE", tmp_path / "workspace")
    return tmp_path


def row(**changes) -> Row:
    usual = {
        "kernel_type": "softmax",
        "correctness": Status.PASS,
        "dtype": "float16",
        "shape": {"M": 4096, "N": 4096},
        "kernel_sha256": "ab" * 32,
        "harness_sha256": "cd" * 32,
        "gpu": "NVIDIA H200",
        "torch": "2.11.0",
        "triton": "3.6.0",
    }
    return Row(**{**usual, **changes})


def test_columns_are_the_fields_in_their_order() -> None:
    assert list(COLUMNS[:10]) == FIRST_COLUMNS.split()
    results.append(row())
    assert results.path().read_text().split("\n")[0].split("\t") == list(COLUMNS)


def test_flags_are_words_in_the_file_and_truth_values_in_the_table() -> None:
    for allowed in (True, False):
        results.append(row(allow_torch=allowed))
    fields = dict(zip(COLUMNS, results.path().read_text().split("\n")[1].split("\t"), strict=True))
    assert fields["allow_torch"] == "yes"
    assert [found.allow_torch for found in results.rows()] == results.read()["allow_torch"].tolist() == [True, False]


def test_numbers_follow_each_other() -> None:
    assert [results.append(row(tag=str(i))) for i in range(3)] == [1, 2, 3]
    table = results.read()
    assert table["experiment"].tolist() == [1, 2, 3]
    assert table["tag"].tolist() == ["0", "1", "2"]


def test_a_reserved_number_is_used_once_and_by_nobody_else(root: Path) -> None:
    results.append(row())
    assert results.reserve() == 2
    assert (root / "workspace" / "experiments" / "2").is_dir()
    assert results.append(row()) == 3
    assert results.append(row(experiment=2)) == 2
    assert results.reserve() == 4
    with pytest.raises(ValueError, match="experiment 2 has its row already"):
        results.append(row(experiment=2))
    assert [there.experiment for there in results.rows()] == [1, 3, 2]


@pytest.mark.parametrize("status", Status)
def test_every_status_survives(status: Status) -> None:
    results.append(row(correctness=status))
    assert results.rows()[0].correctness is status
    assert results.read()["correctness"].tolist() == [status.value]


def test_unmeasured_figures_are_the_word_in_the_file_and_nan_in_the_table() -> None:
    results.append(row(latency_us=19.25))
    results.append(row(latency_us=math.nan, pct_peak=math.inf))
    fields = dict(zip(COLUMNS, results.path().read_text().split("\n")[1].split("\t"), strict=True))
    assert fields["latency_us"] == "19.25"
    assert {fields[name] for name in FIGURES - {"latency_us"}} == {"unmeasured"}
    table = results.read()
    assert all(table[name].dtype == "float64" for name in FIGURES)
    assert table["latency_us"].tolist()[0] == 19.25
    assert table[sorted(FIGURES)].iloc[1].isna().all()


def test_no_file_is_an_empty_table_with_the_same_columns() -> None:
    empty = results.read()
    results.append(row())
    full = results.read()
    assert empty.columns.tolist() == full.columns.tolist() == list(COLUMNS)
    assert len(empty) == 0
    assert {name: empty[name].dtype for name in FIGURES} == {name: full[name].dtype for name in FIGURES}


AWKWARD = [
    "tab\there",
    "line\nbreak\r\n",
    'a "quoted" word',
    '"starts',
    "back\\slash \\n \\t \\\\",
    "\x0b\x0c\x1c\u2028é",
    "",
    " ",
]


@pytest.mark.parametrize("text", AWKWARD, ids=repr)
def test_awkward_text_survives(text: str) -> None:
    results.append(row(description=text, tag=text, reason=text, target=text, shape={"activation": text}))
    results.append(row(description="next"))
    first, second = results.rows()
    assert (first.description, first.tag, first.reason, first.target) == (text,) * 4
    assert first.shape == {"activation": text}
    assert second.description == "next"


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(text: str) -> None:
    assert results._unescape(results._escape(text)) == text
    assert not set(results._escape(text)) & set("\t\n\r")


@pytest.mark.parametrize("text", AWKWARD, ids=repr)
def test_other_readers_see_the_same_rows(text: str) -> None:
    for _ in range(3):
        results.append(row(description=text))
    # pandas honours quotation marks unless told otherwise
    assert len(pandas.read_csv(results.path(), sep="\t")) == 3
    with results.path().open(newline="") as file:
        assert {len(line) for line in csv.reader(file, delimiter="\t")} == {len(COLUMNS)}


def test_text_that_is_no_unicode_is_written_all_the_same() -> None:
    results.append(row(description="caf\udce9"))  # as an argument in another encoding arrives
    assert results.rows()[0].description == "caf?"


@pytest.mark.parametrize(
    "header",
    ["experiment\ttag\tkernel_type\n", "\t".join(reversed(COLUMNS)) + "\n1\t2\n", "notes of mine", "\n"],
    ids=["fewer", "another order", "another file", "blank"],
)
def test_a_file_with_other_columns_is_left_alone(header: str) -> None:
    results.path().write_text(header)
    for use in (lambda: results.append(row()), results.read):
        with pytest.raises(InputError, match=r"other columns.*mv results.tsv"):
            use()
    assert results.path().read_text() == header


@pytest.mark.parametrize(
    ("cut", "kept"), [(1, True), (5, False), (120, False), (300, False)], ids=["its end", "in seconds", "in time", "in figures"]
)
def test_a_line_cut_short_by_a_crash_costs_no_other_row(cut: int, kept: bool, capfd) -> None:
    for number in range(3):
        results.append(row(tag=str(number)))
    whole = results.path().read_bytes()
    results.path().write_bytes(whole[:-cut])
    assert results.append(row(tag="after")) == 4
    assert results.path().read_bytes().startswith(whole[:-cut] + b"\n4\t")
    table = results.read()
    assert table["tag"].tolist() == (["0", "1", "2", "after"] if kept else ["0", "1", "after"])
    assert ("line 4 of results.tsv is incomplete" in " ".join(capfd.readouterr().err.split())) != kept


@pytest.mark.parametrize("cut", [0, 1, 5, -1])
def test_a_crash_while_the_header_was_written(cut: int) -> None:
    header = "\t".join(COLUMNS)
    results.path().write_text(header[:cut] if cut >= 0 else header)
    assert len(results.read()) == 0
    assert results.append(row()) == 1
    assert results.read()["experiment"].tolist() == [1]


def test_last_for_finds_the_newest_row_of_a_file_and_target() -> None:
    one, other = "1" * 64, "2" * 64
    for sha256, target in [(one, "kernel_a_1"), (one, "kernel_b_2"), (other, "kernel_a_1"), (one, "kernel_a_1"), (one, "")]:
        results.append(row(kernel_sha256=sha256, target=target))
    for arguments, experiment in [((one,), 5), ((one, "kernel_a_1"), 4), ((one, "kernel_b_2"), 2), ((other,), 3)]:
        found = results.last_for(*arguments)
        assert found is not None
        assert found.experiment == experiment
    assert results.last_for("3" * 64) is None
    assert results.last_for(other, "kernel_b_2") is None


PROCESSES, ROWS_EACH = 8, 5


def _append_some(root: Path, writer: int, barrier) -> None:
    state.ROOT, state.WORKSPACE = root, root / "workspace"
    barrier.wait()
    for _ in range(ROWS_EACH):
        results.append(row(tag=f"writer {writer}", description="x" * 3000 + "\n\t"))


def test_forty_rows_from_many_processes_are_forty_rows(root: Path) -> None:
    # Forked, for importing torch anew costs seconds each; the barrier makes them write at the same time.
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(PROCESSES)
    writers = [context.Process(target=_append_some, args=(root, number, barrier)) for number in range(PROCESSES)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * PROCESSES
    table = results.read()
    assert table["experiment"].tolist() == list(range(1, PROCESSES * ROWS_EACH + 1))
    assert table["tag"].value_counts().to_dict() == {f"writer {number}": ROWS_EACH for number in range(PROCESSES)}


def test_the_lock_lies_where_git_ignores_it(root: Path) -> None:
    results.append(row())
    assert sorted(path.name for path in root.iterdir()) == ["results.tsv", "workspace"]


def test_a_lock_that_is_never_released_is_a_sentence(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import filelock

    monkeypatch.setattr(results, "LOCK_TIMEOUT_S", 0.1)
    (root / "workspace").mkdir()
    with filelock.FileLock(root / "workspace" / ".results.lock"), pytest.raises(InputError, match="holds the lock"):
        results.append(row())
