"""The one exception that a stage turns into a sentence instead of a traceback. Imports nothing."""


class InputError(Exception):
    """What was asked cannot be done: the message is one sentence that says what is wrong and what to do.

    Stages print it as `error: <sentence>` and exit with status 2 (see `autokernel.cli.run_stage`).
    """
