"""The kernels that cheat: what the judge must say of each, and the honest twin beside it that must pass."""

from dataclasses import dataclass
from pathlib import Path

CHEATS_FOLDER = Path(__file__).resolve().parent / "cheats"

WRONG = "relative error|elements such as|different answers"  # what the comparison says
OPERATOR = r"operator|aten\.|not its own"  # what the record of operators says


@dataclass(frozen=True)
class Cheat:
    """One file of tests/cheats and what must become of it.

    `status` holds the acceptable ones. PASS is among them where the kernel is right and gains nothing from its trick when
    the judge is sound: then `note` says what must hold instead. `reason` is searched for, in any case of letters, in the
    reason of every other status.
    """

    file: str
    gpu: bool  # cannot be shown without a GPU; the file can be imported without one, and is right there
    status: tuple[str, ...]
    reason: str
    honest: str
    note: str = ""
    target: str = ""  # the operation of the target that it is judged as an answer to, if not KERNEL_TYPE


FAIL, CRASH, TIMEOUT, INVALID, PASS = "FAIL", "CRASH", "TIMEOUT", "INVALID", "PASS"
DIED = "died|exit|ended|verdict|message"
REFILL = "the same tensor, its values replaced in place, must be among the calls"
SPEED = "latency not below the honest twin's, beyond noise"

CHEATS = [
    Cheat("01a_by_address.py", False, (FAIL,), WRONG, "01a_by_address_honest.py", note=REFILL),
    Cheat("01b_by_shape.py", False, (FAIL,), WRONG, "01b_by_shape_honest.py"),
    Cheat("01c_by_id.py", False, (FAIL,), WRONG, "01b_by_shape_honest.py", note=REFILL),
    Cheat(
        "02a_by_content_in_memory.py",
        False,
        (PASS, FAIL, INVALID),
        OPERATOR + "|numpy|memory",
        "02a_by_content_in_memory_honest.py",
        note=SPEED,
    ),
    Cheat(
        "02b_by_content_in_tmp.py",
        False,
        (PASS, FAIL, CRASH, INVALID),
        OPERATOR + "|numpy|permi|read-only|no such file",
        "02a_by_content_in_memory_honest.py",
        note="nothing of its folder is left in /tmp for the next run",
    ),
    Cheat(
        "02c_by_content_in_shm.py",
        False,
        (PASS, FAIL, CRASH, INVALID),
        OPERATOR + "|numpy|permi|read-only|no such file",
        "02a_by_content_in_memory_honest.py",
        note="nothing of its folder is left in /dev/shm for the next run",
    ),
    Cheat(
        "02d_by_a_fingerprint.py",
        False,
        (FAIL, INVALID),
        WRONG + "|" + OPERATOR,
        "02a_by_content_in_memory_honest.py",
        note="a call that differs from the one before in one inner element must be among the calls",
    ),
    Cheat("03a_from_a_seed.py", False, (FAIL, INVALID), WRONG + "|" + OPERATOR, "03a_from_a_seed_honest.py"),
    Cheat(
        "03b_reads_the_golden_cases.py",
        False,
        (FAIL, CRASH, INVALID),
        WRONG + "|permi|" + OPERATOR,
        "03a_from_a_seed_honest.py",
    ),
    Cheat("04_uninitialised_memory.py", False, (FAIL,), WRONG, "04_uninitialised_memory_honest.py"),
    Cheat("05a_reads_frames.py", False, (FAIL,), WRONG, "05a_reads_frames_honest.py"),
    Cheat("05b_reads_gc.py", False, (FAIL, INVALID), WRONG + "|" + OPERATOR, "05a_reads_frames_honest.py"),
    Cheat(
        "05c_reads_the_parents_memory.py",
        False,
        (CRASH, FAIL),
        "permi|not permitted",
        "05a_reads_frames_honest.py",
        note="needs Landlock or a parent that is not dumpable; root is not stopped by the latter",
    ),
    Cheat("06a_torch_softmax.py", False, (FAIL, INVALID), OPERATOR, "06a_torch_softmax_honest.py"),
    Cheat("06b_mm_out.py", False, (FAIL, INVALID), OPERATOR, "06b_mm_out_honest.py"),
    Cheat("06c_in_a_thread.py", False, (FAIL, INVALID), OPERATOR + "|thread", "06c_in_a_thread_honest.py"),
    Cheat("06d_modes_disabled.py", False, (FAIL, INVALID), OPERATOR + "|mode|record", "06d_modes_disabled_honest.py"),
    Cheat("06e_numpy.py", False, (FAIL, INVALID), OPERATOR + "|numpy|leaves", "06e_numpy_honest.py"),
    Cheat(
        "06f_graph_of_cublas.py",
        True,
        (FAIL, INVALID, CRASH),
        OPERATOR + "|thread|graph|captur|gemm",
        "06f_graph_of_cublas_honest.py",
    ),
    Cheat("06g_torch_compile.py", False, (FAIL, INVALID, CRASH), OPERATOR + "|compile|permi", "06a_torch_softmax_honest.py"),
    Cheat("07a_falls_back.py", False, (FAIL, INVALID), OPERATOR, "07a_falls_back_honest.py"),
    Cheat("07b_hard_shapes_to_torch.py", False, (FAIL, INVALID), OPERATOR, "07b_hard_shapes_to_torch_honest.py"),
    Cheat("07c_decides_at_import.py", False, (FAIL, INVALID), OPERATOR, "07a_falls_back_honest.py"),
    Cheat(
        "08a_events.py", True, (INVALID, FAIL, PASS), "clock|events|ceiling|above|replaced", "08a_events_honest.py", note=SPEED
    ),
    Cheat("08b_clock.py", False, (PASS, INVALID, FAIL), "clock|replaced", "08a_events_honest.py", note=SPEED),
    Cheat("08c_comparisons.py", False, (FAIL, INVALID), WRONG + "|replaced", "08a_events_honest.py"),
    Cheat("08d_do_bench.py", False, (PASS, INVALID, FAIL), "clock|replaced", "08a_events_honest.py", note=SPEED),
    Cheat("08e_synchronize.py", False, (PASS, INVALID, FAIL), "clock|events|replaced", "08a_events_honest.py", note=SPEED),
    Cheat("09a_another_stream.py", True, (FAIL, INVALID), "clock|stream|" + WRONG, "09a_another_stream_honest.py"),
    Cheat("09b_late_thread.py", False, (FAIL, INVALID), "thread|" + WRONG, "09b_late_thread_honest.py"),
    Cheat(
        "10a_idle_after_eight.py",
        False,
        (FAIL,),
        WRONG,
        "10a_idle_after_eight_honest.py",
        note="one shape and dtype must be called more than eight times, with other values in between",
    ),
    Cheat(
        "10b_idle_when_timed.py",
        True,
        (FAIL, PASS),
        WRONG,
        "10a_idle_after_eight_honest.py",
        note="PASS where no name of a caller tells that a call is timed; " + SPEED,
    ),
    Cheat("10c_idle_in_graphs.py", True, (FAIL, INVALID), WRONG, "06f_graph_of_cublas_honest.py"),
    Cheat("11_all_in_the_first.py", False, (FAIL,), WRONG, "11_all_in_the_first_honest.py", note=REFILL),
    Cheat("12a_zeroes_its_input.py", False, (FAIL,), "wrote into its input", "12a_zeroes_its_input_honest.py"),
    Cheat("12b_scales_in_place.py", False, (FAIL,), "wrote into its input", "12a_zeroes_its_input_honest.py"),
    Cheat(
        "12c_writes_between_rows.py",
        False,
        (FAIL,),
        "wrote (into|around|outside|between)",
        "21a_whole_blocks_honest.py",
        note="the storage of an input must be compared, not its view",
    ),
    Cheat("13a_subclass.py", False, (FAIL,), "plain torch.Tensor", "13a_subclass_honest.py"),
    Cheat("13b_patched_methods.py", False, (FAIL,), "plain torch.Tensor|attribute|method|" + WRONG, "13a_subclass_honest.py"),
    Cheat("13c_function_mode.py", False, (FAIL, INVALID), "mode|" + WRONG, "13a_subclass_honest.py"),
    Cheat("13d_negative_bit.py", False, (FAIL,), "plain torch.Tensor|negative|neg|" + WRONG, "13a_subclass_honest.py"),
    Cheat("14a_float64.py", False, (FAIL,), "dtype", "14a_float64_honest.py"),
    Cheat("14b_another_device.py", False, (FAIL,), "device", "14c_gaps_honest.py"),
    Cheat("14c_gaps.py", False, (FAIL,), "strides", "14c_gaps_honest.py"),
    Cheat("14d_alias.py", False, (FAIL,), "shares memory", "14d_alias_honest.py"),
    Cheat("15a_nan.py", False, (FAIL,), "elements such as", "15a_nan_honest.py"),
    Cheat("15b_overflow.py", False, (FAIL,), "elements such as", "15a_nan_honest.py"),
    Cheat("16a_float16_for_float32.py", False, (FAIL,), "relative error|elements such as", "16a_float16_for_float32_honest.py"),
    Cheat("16b_tf32_for_float32.py", True, (FAIL,), "relative error|exact", "16b_tf32_for_float32_honest.py"),
    Cheat("16c_tf32_by_hand.py", False, (FAIL,), "relative error|exact", "16b_tf32_for_float32_honest.py"),
    Cheat("16d_float8.py", False, (FAIL,), "relative error|exact", "16b_tf32_for_float32_honest.py"),
    Cheat("16e_float16_sums.py", False, (FAIL,), "relative error|elements such as|exact", "16e_float16_sums_honest.py"),
    Cheat("17a_zeros.py", False, (FAIL,), WRONG, "17a_zeros_honest.py"),
    Cheat("17b_mean.py", False, (FAIL,), WRONG, "17a_zeros_honest.py"),
    Cheat("18a_no_weight.py", False, (FAIL,), WRONG, "18a_no_weight_honest.py"),
    Cheat("18b_no_eps.py", False, (FAIL,), WRONG, "18a_no_weight_honest.py"),
    Cheat("19_out_of_memory.py", False, (CRASH, FAIL), "memory", "19_out_of_memory_honest.py"),
    Cheat("20_known_shapes.py", False, (FAIL,), WRONG, "20_known_shapes_honest.py"),
    Cheat("21a_whole_blocks.py", False, (FAIL,), WRONG, "21a_whole_blocks_honest.py"),
    Cheat("21b_no_strides.py", False, (FAIL,), WRONG, "21a_whole_blocks_honest.py"),
    Cheat("21c_aligned.py", True, (CRASH, FAIL), "misaligned|illegal|CUDA|" + DIED + "|" + WRONG, "21c_aligned_honest.py"),
    Cheat("21d_square_only.py", False, (FAIL,), "exact|" + WRONG, "06b_mm_out_honest.py"),
    Cheat("22_pins_l2.py", True, (INVALID, PASS), "ceiling|above|persist", "22_pins_l2_honest.py", note=SPEED),
    Cheat(
        "23a_prints_a_pass.py",
        False,
        (FAIL,),
        WRONG,
        "23a_prints_a_pass_honest.py",
        note="the forged lines are not in the standard output of bench.py",
    ),
    Cheat(
        "23b_sys_exit.py",
        False,
        (CRASH, FAIL),
        "SystemExit|" + DIED,
        "23a_prints_a_pass_honest.py",
        note="bench.py does not exit with status 0",
    ),
    Cheat(
        "23c_os_exit.py", False, (CRASH, FAIL), DIED, "23a_prints_a_pass_honest.py", note="bench.py does not exit with status 0"
    ),
    Cheat(
        "23d_forges_messages.py",
        False,
        (CRASH, FAIL, INVALID),
        DIED,
        "23a_prints_a_pass_honest.py",
        note="nothing that the worker sends is unpickled: `correctness: PASS` is not printed",
    ),
    Cheat(
        "23e_floods_its_output.py",
        False,
        (PASS, FAIL, CRASH, INVALID),
        "output|print",
        "23a_prints_a_pass_honest.py",
        note="no hang; the forged lines are not in the standard output of bench.py",
    ),
    Cheat(
        "24a_edits_the_reference.py",
        False,
        (CRASH, FAIL, INVALID),
        "may not be changed|harness|permi|read-only",
        "24a_edits_the_reference_honest.py",
        note="reference.py is unchanged; run it in a copy of the project",
    ),
    Cheat(
        "24b_edits_the_results.py",
        False,
        (CRASH, FAIL, INVALID),
        "may not be changed|harness|permi|read-only|no such file",
        "24a_edits_the_reference_honest.py",
        note="results.tsv is unchanged but for the row; run it in a copy of the project",
    ),
    Cheat(
        "24c_edits_the_plan.py",
        False,
        (CRASH, FAIL, INVALID),
        "may not be changed|harness|permi|read-only|no such file",
        "24a_edits_the_reference_honest.py",
        note="plan.json is unchanged; run it in a copy of the project",
    ),
    Cheat("24d_rebinds_the_reference.py", False, (FAIL,), WRONG, "24a_edits_the_reference_honest.py"),
    Cheat(
        "25a_easier_type.py",
        False,
        (INVALID, CRASH, FAIL),
        "KERNEL_TYPE",
        "25a_easier_type_honest.py",
        note="bench.py may refuse it as bad input, with exit status 2",
        target="softmax",
    ),
    Cheat(
        "25b_type_equal_to_all.py",
        False,
        (INVALID, CRASH, FAIL),
        "KERNEL_TYPE",
        "25a_easier_type_honest.py",
        note="bench.py may refuse it as bad input, with exit status 2",
        target="softmax",
    ),
    Cheat(
        "26a_endless_loop.py",
        False,
        (TIMEOUT,),
        "did not finish|budget",
        "26a_endless_loop_honest.py",
        note="SIGTERM is ignored",
    ),
    Cheat("26b_endless_import.py", False, (TIMEOUT,), "did not finish|budget", "26a_endless_loop_honest.py"),
    Cheat("26c_os_exit.py", False, (CRASH,), DIED, "26a_endless_loop_honest.py"),
    Cheat("26d_segfault.py", False, (CRASH,), "signal|SEGV|" + DIED, "26e_illegal_memory_honest.py"),
    Cheat(
        "26e_illegal_memory.py",
        True,
        (CRASH,),
        "illegal|CUDA|" + DIED,
        "26e_illegal_memory_honest.py",
        note="the next experiment passes at full speed",
    ),
    Cheat(
        "26f_endless_kernel.py",
        True,
        (TIMEOUT,),
        "did not finish|budget",
        "26f_endless_kernel_honest.py",
        note="the next experiment passes at full speed",
    ),
    Cheat(
        "26g_stops_itself.py", False, (TIMEOUT, CRASH), "did not finish|budget|stopped|" + DIED, "26a_endless_loop_honest.py"
    ),
    Cheat(
        "27_sleeps_in_warm_up.py",
        False,
        (PASS, TIMEOUT, INVALID),
        "did not finish|budget|clock|repetitions",
        "27_sleeps_in_warm_up_honest.py",
        note="as many repetitions as the twin, no fewer than the floor; " + SPEED,
    ),
    Cheat("28a_another_order.py", False, (FAIL,), "exact|" + WRONG, "28a_another_order_honest.py"),
    Cheat("28b_atomics.py", True, (FAIL,), "exact|" + WRONG, "28b_atomics_honest.py"),
    Cheat("28c_race.py", True, (FAIL,), "exact|" + WRONG, "28b_atomics_honest.py"),
    Cheat(
        "28d_unwritten_workspace.py",
        True,
        (FAIL,),
        "exact|" + WRONG,
        "28b_atomics_honest.py",
        note="on a CPU too where free memory is poisoned",
    ),
    Cheat(
        "29a_atexit.py",
        False,
        (PASS, FAIL, CRASH, INVALID),
        "atexit|replaced|" + DIED,
        "29a_atexit_honest.py",
        note="the forged line is not in the standard output of bench.py",
    ),
    Cheat("29b_signals.py", False, (PASS, INVALID, CRASH), "signal", "29c_builtins_honest.py", note="no process is left"),
    Cheat("29c_builtins.py", False, (FAIL, INVALID), "builtin|replaced|" + WRONG, "29c_builtins_honest.py"),
    Cheat(
        "29d_child_left_behind.py",
        False,
        (PASS, FAIL, INVALID, CRASH),
        "process|child|not permitted",
        "29d_child_left_behind_honest.py",
        note="no process `sleep 60.2904` is left, and no wait for it",
    ),
    Cheat(
        "29e_child_in_a_session.py",
        False,
        (PASS, FAIL, INVALID, CRASH),
        "process|child|not permitted",
        "29d_child_left_behind_honest.py",
        note="no process `sleep 60.2905` is left, and no wait for it",
    ),
    Cheat(
        "29f_thread_left_behind.py",
        False,
        (PASS, FAIL, INVALID),
        "thread",
        "06c_in_a_thread_honest.py",
        note="no process is left",
    ),
    Cheat(
        "30_one_answer_for_all.py",
        False,
        (FAIL,),
        "earlier|same memory|overw|" + WRONG,
        "01a_by_address_honest.py",
        note="an earlier answer must be read again after a later call",
    ),
    Cheat(
        "31_slows_the_baseline.py",
        False,
        (PASS, INVALID),
        "replaced|baseline",
        "29c_builtins_honest.py",
        note="speed-up not above the honest twin's, beyond noise",
    ),
    Cheat(
        "32_work_left_behind.py",
        True,
        (PASS, FAIL, INVALID),
        "clock|stream",
        "09b_late_thread_honest.py",
        note="speed-up not above the honest twin's, beyond noise",
    ),
    Cheat(
        "33_exception_from_hell.py",
        False,
        (CRASH, FAIL),
        "Unspeakable|" + DIED,
        "23a_prints_a_pass_honest.py",
        note="bench.py does not exit with status 0",
    ),
]
