"""Show where a model's time goes: by operation, with true shapes, on this GPU (or this CPU); writes workspace/profile.json.

    uv run profile.py --model models/gpt2.py --class-name GPT2 --input-shape 1,1024
    uv run profile.py --model models/llama_7b.py --class-name LlamaModel --input-shape 1,512 --dtype float16
    uv run profile.py --module transformers --class-name AutoModelForCausalLM --pretrained NAME --input-shape 1,2048

On a CPU the operations are ranked by CPU time, and what needs a GPU is `unmeasured`.
"""

from __future__ import annotations  # so that nothing below is needed when this file is only imported

import sys

if __name__ == "profile":
    # The standard library has a module of this name, which cProfile imports, and torch._dynamo imports cProfile. Run from
    # this folder, they find this file: let them have what they asked for.
    import importlib.machinery
    import importlib.util
    import sysconfig

    _found = importlib.machinery.PathFinder.find_spec("profile", [sysconfig.get_path("stdlib")])
    if _found is None or _found.loader is None:
        raise ImportError("the standard library has no module 'profile'")
    sys.modules["profile"] = importlib.util.module_from_spec(_found)
    _found.loader.exec_module(sys.modules["profile"])
else:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from autokernel import breakdown, cli, hardware, models, profiling, report
    from autokernel.capture import Capture, NotCapturable, shortened
    from autokernel.pieces import Pieces, capture_or_pieces
    from autokernel.state import ROOT, Profile, ProfileRow, UnmatchedRow, save

# In the tables; profile.json has them all.
SITES_SHOWN = 3
KERNELS_SHOWN = 3


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__)
    models.add_model_arguments(parser)
    source = models.source_of(parser.parse_args(argv))
    device = torch.device(source.device)
    on_gpu = device.type == "cuda"

    cli.note(f"loading {source.class_name}")
    loaded = models.load(source)
    args, kwargs = models.inputs(loaded, seed=0)
    models.run(loaded, args, kwargs)  # what is wrong with its inputs is said before anything is measured
    wall_us = profiling.wall_us(loaded.model, args, kwargs, device)

    limits = hardware.limits() if on_gpu else None
    cli.note("capturing its graph")
    rows: tuple[ProfileRow, ...] = ()
    unmatched: tuple[UnmatchedRow, ...]
    reason = ""
    try:
        captured = capture_or_pieces(loaded.model, args, kwargs)
    except NotCapturable as fault:
        reason = fault.reason
        cli.note("profiling its operators")
        graphs = 0
        owned, calls = profiling.run_operators(loaded.model, args, kwargs, device)
        unmatched, total_us = breakdown.of_operators(owned, calls)
    else:
        reason, graphs = captured.reason, len(captured.parts)
        _note_refusals(captured)
        cli.note(f"profiling {len(captured.regions)} operations")
        owned = profiling.run_graph(captured, args, kwargs, device)
        rows, unmatched, total_us = breakdown.of_graph(captured, owned, limits)

    profile = Profile(
        source=source,
        parameters=loaded.parameters,
        gpu=hardware.gpu_name() if on_gpu else "cpu",
        versions=hardware.versions(),
        clock="gpu kernels" if on_gpu else "cpu operators",
        captured=graphs > 0,
        graphs=graphs,
        not_captured_because=reason,
        total_us=total_us,
        wall_us=wall_us,
        rows=rows,
        unmatched=unmatched,
    )
    path = save(profile)
    _print(profile, limits, path)
    return cli.OK


def _note_refusals(captured: Capture | Pieces) -> None:
    counts: dict[str, int] = {}
    for refusal in captured.refused:
        text = f"{refusal.region.operation}: {refusal.reason}"
        counts[text] = counts.get(text, 0) + 1
    for text, count in counts.items():
        cli.note(f"left to PyTorch, {count} x {text}")


def _print(profile: Profile, limits: hardware.Limits | None, path: Path) -> None:
    matched = sum(row.share for row in profile.rows)
    cli.say("model", profile.source.class_name)
    cli.say("parameters", profile.parameters)
    cli.say("gpu", profile.gpu)
    cli.say("dtype", profile.source.dtype)
    cli.say("clock", profile.clock)
    cli.say("ceilings", report.UNMEASURED if limits is None else limits.origin)
    cli.say("total_us", f"{profile.total_us:.1f}")
    cli.say("wall_us", f"{profile.wall_us:.1f}")
    pieces = "yes" if not profile.not_captured_because else f"in {profile.graphs} pieces, between which Python decides"
    cli.say("captured", pieces if profile.captured else "no")
    if profile.not_captured_because:
        cli.say("not_captured_because", profile.not_captured_because)
    if not profile.captured:
        cli.say("left_out", "extract.py and verify.py need the graph of this model, which torch.export could not make")
    cli.say("regions", sum(row.count for row in profile.rows))
    cli.say("matched_share", f"{matched:.4f}")
    cli.say("unmatched_share", f"{sum(row.share for row in profile.unmatched):.4f}")
    cli.say("profile", path.relative_to(ROOT))
    # On a CPU a row's time is that of PyTorch's operators, as the profiler saw them.
    time = "gpu us" if profile.clock == "gpu kernels" else "cpu time us"
    if profile.rows:
        header = ("rank", "operation", "count", "shape", "dtype", time, "share", "bound", "% roofline", "saved us", "sites")
        print("\n" + report.table(header, (_cells(rank, row) for rank, row in enumerate(profile.rows, 1))))
    if profile.unmatched:
        others = ("not matched", "count", time, "share", "kernels" if profile.clock == "gpu kernels" else "operators")
        print("\n" + report.table(others, map(_unmatched_cells, profile.unmatched)))
    print()


def _cells(rank: int, row: ProfileRow) -> tuple[str, ...]:
    return (
        str(rank),
        row.operation,
        str(row.count),
        report.shape_text(row.shape),
        row.dtype,
        f"{row.time_us:.1f}",
        f"{row.share:.1%}",
        row.bound,
        report.figure(row.pct_roofline),
        report.figure(row.saved_us),
        shortened(row.sites, most=SITES_SHOWN),
    )


def _unmatched_cells(row: UnmatchedRow) -> tuple[str, ...]:
    names = ", ".join(kernel.name[:60] for kernel in row.kernels[:KERNELS_SHOWN])
    left = len(row.kernels) - KERNELS_SHOWN
    return (
        row.operator,
        str(row.count),
        f"{row.time_us:.1f}",
        f"{row.share:.1%}",
        names + (f" and {left} more" if left > 0 else ""),
    )


if __name__ == "__main__":
    cli.run_stage(main)
