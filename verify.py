"""Put the kernels back into the model: is its output still right, was each kernel called, is the model faster?

    uv run verify.py                 the model of workspace/plan.json, or any other that makes the same calls:
    uv run verify.py --model models/gpt2.py --class-name GPT2 --input-shape 1,1024 --dtype float16
    uv run verify.py --diagnose      also: the error of each kernel in its place, and which one is at fault

Exit status: 0 correct, 1 not, 2 bad input.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import torch

from autokernel import cli, diagnosis, hardware, memory, models, state, verification, walltime
from autokernel.capture import Capture, NotCapturable, capture
from autokernel.errors import InputError
from autokernel.judge import cases
from autokernel.models import LoadedModel
from autokernel.state import Plan, Replacement, Verification
from autokernel.substitute import Substitution, substitute
from autokernel.verification import Accuracy, Choice, Inputs
from autokernel.walltime import Speed

UNMEASURED = "unmeasured"


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__)
    models.add_model_arguments(parser, required=False)
    parser.add_argument("--diagnose", action="store_true", help="say which kernel is at fault")
    arguments = parser.parse_args(argv)
    plan = state.load(Plan)
    source = models.source_of(arguments) if models.given(arguments) else plan.source
    if hardware.dtype(source.dtype) not in cases.dtypes_checked(torch.device(source.device)):
        raise InputError(f"kernels cannot be run in {source.dtype} on a CPU: verify in float16 or float32, or on a GPU")
    loaded = models.load(source)
    seeds = [secrets.randbelow(2**31) for _ in range(verification.INPUTS)]
    batches = [models.inputs(loaded, seed) for seed in seeds]
    models.run(loaded, *batches[0])  # says why the inputs do not fit the model
    try:
        return verify(plan, loaded, seeds, batches, arguments.diagnose)
    except RuntimeError as fault:
        if not memory.is_shortage(fault):
            raise
        shape = ",".join(str(size) for size in source.input_shape)
        raise InputError(
            f"verifying {source.class_name} at {shape} needs more memory than there is: use a smaller --input-shape"
        ) from None


def verify(plan: Plan, loaded: LoadedModel, seeds: Sequence[int], batches: Sequence[Inputs], diagnose: bool) -> int:
    captured = captured_model(loaded, batches[0])
    choice = verification.choose(plan, captured)
    for name, reason in choice.left_out.items():
        cli.say("left_out", f"{name}: {reason}")
    if not choice.sites_found:
        raise InputError("this model makes none of the calls of plan.json: run profile.py and extract.py for it")

    cli.note("the exact output, in a higher precision")
    exact = verification.exact_outputs(loaded, batches)
    cli.note("the model without and with the kernels")
    substitution = substitute(captured, choice.kernels(), choice.targets())
    accuracy = verification.check(loaded.model, substitution, batches, exact)
    replacements = replacements_of(choice, substitution)
    say_accuracy(accuracy, seeds, choice, substitution)
    if diagnose and not accuracy.fault:
        dtype = verification.exact_dtype(hardware.dtype(loaded.source.dtype))
        worst = accuracy.worst
        say_diagnosis(diagnosis.diagnose(captured, choice, batches[worst], exact[worst], dtype, accuracy.limit))
    elif not accuracy.correct and not accuracy.fault:
        cli.note("`uv run verify.py --diagnose` says which kernel is at fault")

    speed = graphs = None
    if accuracy.correct and loaded.source.device == "cuda":
        speed, graphs = time_models(loaded, substitution, batches)
    say_speed(speed, graphs)
    saved = state.save(
        Verification(
            source=loaded.source,
            gpu=hardware.gpu_name() if loaded.source.device == "cuda" else "cpu",
            versions=hardware.versions(),
            correct=accuracy.correct,
            reason=accuracy.reason,
            error=verification.finite(accuracy.error),
            error_without=verification.finite(accuracy.error_without),
            error_limit=verification.finite(accuracy.limit),
            exact_dtype=hardware.dtype_name(exact[0][0].dtype),
            replacements=replacements,
            left_out=choice.left_out,
            sites_found=choice.sites_found,
            sites_replaced=len(substitution.sites),
            eager_ms=speed.eager_ms if speed else None,
            ours_ms=speed.ours_ms if speed else None,
            speedup=speed.speedup if speed else None,
            speedup_low=speed.low if speed else None,
            speedup_high=speed.high if speed else None,
            eager_graph_ms=graphs.eager_ms if graphs else None,
            ours_graph_ms=graphs.ours_ms if graphs else None,
        )
    )
    cli.say("verification", saved)
    return cli.OK if accuracy.correct else cli.FAILED


def captured_model(loaded: LoadedModel, batch: Inputs) -> Capture:
    """The model's graph; InputError if it cannot be captured."""
    args, kwargs = batch
    try:
        return capture(loaded.model, args, kwargs)
    except NotCapturable as fault:
        name = loaded.source.class_name
        raise InputError(f"{name} cannot be captured, so no kernel can be put into it ({fault.reason})") from None


def replacements_of(choice: Choice, substitution: Substitution) -> tuple[Replacement, ...]:
    """Where each kernel was put, and how often it was called there in the last forward pass."""
    replacements = []
    for chosen in choice.chosen:
        sites = [site for site in substitution.sites if site.target == chosen.target.name]
        replacements.append(
            Replacement(
                target=chosen.target.name,
                kernel_sha256=chosen.kernel.sha256,
                verdict=chosen.verdict,
                sites=tuple(site.name for site in sites),
                calls=tuple(site.calls for site in sites),
            )
        )
    return tuple(replacements)


def time_models(loaded: LoadedModel, substitution: Substitution, batches: Sequence[Inputs]) -> tuple[Speed, Speed | None]:
    """Eager against ours, launched from Python and in CUDA graphs."""

    def run(forward: Any, repeat: int) -> None:
        args, kwargs = batches[repeat % len(batches)]
        forward(*args, **kwargs)

    def eager(repeat: int) -> None:
        run(loaded.model, repeat)

    def ours(repeat: int) -> None:
        run(substitution.module, repeat)

    cli.note("timing")
    with torch.no_grad():
        return walltime.time_both(eager, ours), walltime.time_graphs(eager, ours)


def say_accuracy(accuracy: Accuracy, seeds: Sequence[int], choice: Choice, substitution: Substitution) -> None:
    cli.say("correctness", "PASS" if accuracy.correct else "FAIL")
    if accuracy.reason:
        cli.say("reason", accuracy.reason)
    cli.say("error", f"{accuracy.error:.4g}")
    cli.say("error_without", f"{accuracy.error_without:.4g}")
    cli.say("error_limit", f"{accuracy.limit:.4g}")
    cli.say("argmax_agreement", _number(accuracy.agreement, ".5f", "none"))
    cli.say("argmax_agreement_without", _number(accuracy.agreement_without, ".5f", "none"))
    cli.say("seeds", " ".join(str(seed) for seed in seeds))
    cli.say("sites_found", choice.sites_found)
    cli.say("sites_replaced", len(substitution.sites))
    for chosen in choice.chosen:
        sites = [site for site in substitution.sites if site.target == chosen.target.name]
        calls, copies = sum(site.calls for site in sites), sum(site.copies for site in sites)
        restrided = f", {copies} results copied for their strides" if copies else ""
        cli.say(chosen.target.name, f"{chosen.verdict}, sites {len(sites)}, calls {calls} in one forward pass{restrided}")


def say_diagnosis(found: diagnosis.Diagnosis) -> None:
    for site in found.sites:
        errors = f"isolated {site.isolated:.3g}, PyTorch {site.isolated_without:.3g}, accumulated {site.accumulated:.3g}"
        cli.say(f"site {site.site}", f"{site.target}, {errors}")
    cli.say("error_with_all", f"{found.error:.4g}")
    for target, error in found.without.items():
        cli.say(f"error_without_{target}", f"{error:.4g}")
    cli.say("guilty", found.guilty or "none")


def say_speed(speed: Speed | None, graphs: Speed | None) -> None:
    cli.say("eager_ms", _number(speed.eager_ms if speed else None, ".4f"))
    cli.say("ours_ms", _number(speed.ours_ms if speed else None, ".4f"))
    cli.say("speedup_end_to_end", _number(speed.speedup if speed else None, ".4f"))
    cli.say("speedup_low", _number(speed.low if speed else None, ".4f"))
    cli.say("speedup_high", _number(speed.high if speed else None, ".4f"))
    cli.say("end_to_end", speed.verdict if speed else UNMEASURED)
    cli.say("eager_graph_ms", _number(graphs.eager_ms if graphs else None, ".4f"))
    cli.say("ours_graph_ms", _number(graphs.ours_ms if graphs else None, ".4f"))
    cli.say("speedup_in_graphs", _number(graphs.speedup if graphs else None, ".4f"))
    cli.say("in_graphs", graphs.verdict if graphs else UNMEASURED)


def _number(value: float | None, form: str, missing: str = UNMEASURED) -> str:
    return missing if value is None else format(value, form)


if __name__ == "__main__":
    cli.run_stage(main)
