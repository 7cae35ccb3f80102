"""Put the kernels back into the model: is its output still right, was each kernel called, is the model faster?

    uv run verify.py                 the model of workspace/plan.json, or any other that makes the same calls:
    uv run verify.py --model models/gpt2.py --class-name GPT2 --input-shape 1,1024 --dtype float16
    uv run verify.py --diagnose      also: the error of each kernel in its place, and which one is at fault
    uv run verify.py --save DIR      also: a folder of the kernels to use, which autokernel.apply reads in your program
    uv run verify.py --compile none  without torch.compile, which takes a while; `max-autotune` for more of it

On a GPU, PyTorch's ways to run the model (eager, in a CUDA graph, torch.compile) are timed in turn with ours, which uses those
kernels that make the whole model faster. `speedup_end_to_end` is the fastest of ours over the fastest of theirs.
Exit status: 0 correct, 1 not, 2 bad input.
"""

import secrets
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from autokernel import cli, contest, diagnosis, hardware, memory, models, optimized, report, state, verification
from autokernel.capture import Capture, NotCapturable
from autokernel.contest import Contest
from autokernel.errors import InputError
from autokernel.judge import cases
from autokernel.models import LoadedModel
from autokernel.pieces import Pieces, capture_or_pieces
from autokernel.state import Machine, Plan, Replacement, Verification
from autokernel.substitute import Substitution, substitute
from autokernel.verification import Accuracy, Choice, Inputs

UNMEASURED = "unmeasured"
KEY = str.maketrans({".": "_", " ": "_", "-": "_"})
# Modes of torch.compile that are timed, by what --compile says.
MODES = {"none": (), "default": ("default", "reduce-overhead"), "max-autotune": ("default", "reduce-overhead", "max-autotune")}


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__)
    models.add_model_arguments(parser, required=False)
    parser.add_argument("--diagnose", action="store_true", help="say which kernel is at fault")
    parser.add_argument("--save", metavar="DIR", type=Path, help="write the kernels in use, for autokernel.apply")
    parser.add_argument("--compile", choices=MODES, default="default", help="how far torch.compile is tried on a GPU")
    arguments = parser.parse_args(argv)
    if arguments.save is not None:
        optimized.refuse_other_folders(arguments.save)
    plan = state.load(Plan)
    source = models.source_of(arguments) if models.given(arguments) else plan.source
    if hardware.dtype(source.dtype) not in cases.dtypes_checked(torch.device(source.device)):
        raise InputError(f"kernels cannot be run in {source.dtype} on a CPU: verify in float16 or float32, or on a GPU")
    loaded = models.load(source)
    seeds = [secrets.randbelow(2**31) for _ in range(verification.INPUTS)]
    batches = [models.inputs(loaded, seed) for seed in seeds]
    models.run(loaded, *batches[0])  # says why the inputs do not fit the model
    try:
        return verify(plan, loaded, seeds, batches, arguments.diagnose, MODES[arguments.compile], arguments.save)
    except RuntimeError as fault:
        if not memory.is_shortage(fault):
            raise
        shape = ",".join(str(size) for size in source.input_shape)
        raise InputError(
            f"verifying {source.class_name} at {shape} needs more memory than there is: use a smaller --input-shape"
        ) from None


def verify(
    plan: Plan,
    loaded: LoadedModel,
    seeds: Sequence[int],
    batches: Sequence[Inputs],
    diagnose: bool,
    modes: Sequence[str],
    folder: Path | None,
) -> int:
    """Check and time the model with the plan's kernels in it; the exit status."""
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
    held = Contest(())
    if accuracy.correct and loaded.source.device == "cuda":
        held = hold_contest(loaded, captured, choice, batches, modes)
        accuracy = in_use(loaded, captured, choice, batches, exact, held) or accuracy
    say_accuracy(accuracy, seeds, choice, substitution)
    if diagnose and not accuracy.fault:
        dtype = verification.exact_dtype(hardware.dtype(loaded.source.dtype))
        worst = accuracy.worst
        say_diagnosis(diagnosis.diagnose(captured, choice, batches[worst], exact[worst], dtype, accuracy.limit))
    elif not accuracy.correct and not accuracy.fault:
        cli.note("`uv run verify.py --diagnose` says which kernel is at fault")

    say_contest(held)
    found = Verification(
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
        ways=held.ways,
        theirs=held.theirs,
        ours=held.ours,
        speedup=held.speed.speedup if held.speed else None,
        speedup_low=held.speed.low if held.speed else None,
        speedup_high=held.speed.high if held.speed else None,
    )
    cli.say("verification", state.save(found))
    if folder is not None:
        pieces = "nothing: apply() needs a model that is one graph"
        cli.say("saved", pieces if captured.reason else save(folder, found, choice))
    return cli.OK if accuracy.correct else cli.FAILED


def save(folder: Path, found: Verification, choice: Choice) -> str:
    """Write the kernels of our fastest way, or where nothing was timed all of them; says what was written."""
    if not found.correct:
        return "nothing: the model is not right with the kernels"
    way = next((way for way in found.ways if way.name == found.ours), None)
    if found.ways and way is None:
        return "nothing: no kernel makes the model faster"
    used = way.kernels if way else tuple(chosen.target.name for chosen in choice.chosen)
    text = report.markdown(state.load_if_there(Machine), None, None, [], found)
    optimized.save(folder, choice, used, found, text)
    return f"{folder} ({len(used)} kernels)"


def captured_model(loaded: LoadedModel, batch: Inputs) -> Capture | Pieces:
    """The model's graph, or its pieces; InputError if it cannot be captured."""
    args, kwargs = batch
    try:
        captured = capture_or_pieces(loaded.model, args, kwargs)
    except NotCapturable as fault:
        name = loaded.source.class_name
        raise InputError(f"{name} cannot be captured, so no kernel can be put into it ({fault.reason})") from None
    if captured.reason:
        cli.note(f"{loaded.source.class_name} is no single graph ({captured.reason}): it runs in {len(captured.parts)} pieces")
    return captured


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


def hold_contest(
    loaded: LoadedModel, captured: Capture | Pieces, choice: Choice, batches: Sequence[Inputs], modes: Sequence[str]
) -> Contest:
    """Time every way to run the model; ours with the kernels that make it faster."""
    names = [chosen.target.name for chosen in choice.chosen]
    return contest.hold(loaded.model, names, lambda used: with_kernels(captured, choice, used).module, batches, modes)


def with_kernels(captured: Capture | Pieces, choice: Choice, used: Collection[str]) -> Substitution:
    """The model with the kernels of these targets alone."""
    targets = choice.targets()
    kernels = {region: kernel for region, kernel in choice.kernels().items() if targets[region] in used}
    return substitute(captured, kernels, targets)


def in_use(
    loaded: LoadedModel,
    captured: Capture | Pieces,
    choice: Choice,
    batches: Sequence[Inputs],
    exact: Sequence[list[torch.Tensor]],
    held: Contest,
) -> Accuracy | None:
    """The accuracy of the model with the kernels of our fastest way, if that is not right; it may use some of them only."""
    used = next((way.kernels for way in held.ways if way.name == held.ours), ())
    if not used or len(used) == len(choice.chosen):
        return None
    accuracy = verification.check(loaded.model, with_kernels(captured, choice, used), batches, exact)
    return None if accuracy.correct else accuracy


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


def say_contest(held: Contest) -> None:
    """A line for each way, then the fastest of either side."""
    for way in held.ways:
        key = way.name.lower().replace(" in a cuda graph", "_graph").translate(KEY) + "_ms"
        cli.say(key, _number(way.ms, ".4f") + (f" ({way.note})" if way.note else ""))
        if way.kernels:
            cli.say(key.removesuffix("_ms") + "_kernels", " ".join(way.kernels))
        for name, why in way.dropped.items():
            cli.say(key.removesuffix("_ms") + "_not_used", f"{name}: {why}")
    speed = held.speed
    cli.say("fastest_theirs", held.theirs or UNMEASURED)
    cli.say("fastest_ours", held.ours or ("none: no kernel makes the model faster" if held.ways else UNMEASURED))
    cli.say("speedup_end_to_end", _number(speed.speedup if speed else None, ".4f"))
    cli.say("speedup_low", _number(speed.low if speed else None, ".4f"))
    cli.say("speedup_high", _number(speed.high if speed else None, ".4f"))
    cli.say("end_to_end", speed.verdict if speed else UNMEASURED)


def _number(value: float | None, form: str, missing: str = UNMEASURED) -> str:
    return missing if value is None else format(value, form)


if __name__ == "__main__":
    cli.run_stage(main)
