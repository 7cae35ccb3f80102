"""An agent that does what a script says, one action for each time that it is run.

    python scripted_agent.py SCRIPT COUNTER      in the folder of kernel.py, with the prompt on standard input

SCRIPT has an action in each line; COUNTER, a file outside of the project, says which is next. After the last it starts anew.
"""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

KERNEL = Path("kernel.py")


def next_action(script: Path, counter: Path) -> tuple[int, list[str]]:
    actions = script.read_text().splitlines()
    with counter.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        number = int(file.read() or 0)
        file.truncate(0)
        file.write(str(number + 1))
    return number, actions[number % len(actions)].split()


def add(line: str) -> None:
    KERNEL.write_text(f"{KERNEL.read_text()}{line}\n")


def git(*arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", *arguments], check=True, capture_output=True)


def main() -> int:
    number, (action, *words) = next_action(Path(sys.argv[1]), Path(sys.argv[2]))
    assert f"kernel_{'rms' if 'rms' in KERNEL.read_text() else 'soft'}" in sys.stdin.read()
    if action == "speed":
        add(f"# speed {words[0]}")
    elif action == "faster":  # than whatever it is now
        add(f"# speed {1 + 0.1 * (number + 1):.1f}")
    elif action == "wrong":
        add(f"# wrong {number}")
        KERNEL.write_text(KERNEL.read_text().replace("tl.rsqrt(", f"{1.5 + number} * tl.rsqrt("))
    elif action == "syntax":
        add(f"def broken{number}(:")
    elif action == "cheat":
        call = "torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)"
        add(f"\n\ndef kernel_fn(x, weight=None, eps=1e-6):\n    return {call}  # {number}")
    elif action == "hang":
        if words:
            add(f"# speed 9.9 half done {number}")
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        time.sleep(1000)
    elif action == "other":
        Path(words[0]).parent.mkdir(exist_ok=True)
        path = Path(words[0])
        path.write_text((path.read_text() if path.exists() else "") + "# tampered\n")
        add("# speed 9.9")
    elif action == "commit":
        add(f"# speed {words[0]}")
        git("commit", "-qam", "mine")
    elif action == "branch":
        git("checkout", "-qb", f"mine{number}")
        add(f"# speed {words[0]}")
    elif action == "forge":
        results = Path("results.tsv")
        fields = results.read_text().splitlines()[-1].split("\t")
        results.write_text(results.read_text() + "\t".join(["999", *fields[1:]]) + "\n")
    elif action == "delete":
        KERNEL.unlink()
    elif action == "exit":
        return int(words[0])
    elif action == "slow":
        time.sleep(float(words[0]))
        add(f"# speed {words[1]}")
    print(f"\x1b[1m{action}\x1b[0m {' '.join(words)}", flush=True)
    return 3 if action == "speed" and words[1:] == ["dies"] else 0


if __name__ == "__main__":
    os.environ.pop("GIT_DIR", None)
    sys.exit(main())
