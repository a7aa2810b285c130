"""Rewards that behave as badly as rewards do, for the scorer's tests."""

import math
import os
import re
import signal
import sys
import time


def length(text, record):
    return len(text) + record.get("bonus", 0)


def by_text(text, record):
    """Does what the response says."""
    if text == "hang":
        time.sleep(3600)
    if text == "hang holding the interpreter":
        re.match("(a+)+b", "a" * 60)
    if text == "raise":
        raise KeyError("no\nsuch key")
    if text == "exit":
        os._exit(3)
    if text == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "nan":
        return math.nan
    if text == "print":
        print("noise on stdout")
    return 1.0


def always_raises(text, record):
    raise RuntimeError("broken")


def always_hangs(text, record):
    time.sleep(3600)


def environment(text, record):
    return float("torch" in sys.modules or os.environ["CUDA_VISIBLE_DEVICES"] != "")


def process_id(text, record):
    return os.getpid()
