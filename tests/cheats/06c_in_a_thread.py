"""Calls torch.softmax in a thread, where a TorchDispatchMode of the caller sees nothing. Seen by counting threads."""

import threading

import torch

KERNEL_TYPE = "softmax"


def kernel_fn(x):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(torch.softmax(x, dim=-1).contiguous()))
    thread.start()
    thread.join()
    return answers[0]
