"""Reward functions that the tests send to worker processes. The completion says what to do."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def obey(completion: str, *, answer: str | None, metadata: Mapping[str, Any], prompt: str) -> Any:
    """Returns the number in the completion, or misbehaves in the way it names."""
    match completion.split(" ", 1):
        case ["hang"]:
            time.sleep(3600)
        case ["hang_holding_the_lock"]:
            re.match(r"(a+)+$", "a" * 64 + "b")
        case ["hang_with_child", pid_file]:
            child = subprocess.Popen(["sleep", "3600"])
            Path(pid_file).write_text(str(child.pid))
            time.sleep(3600)
        case ["raise"]:
            raise RuntimeError("the sandbox is down")
        case ["exit"]:
            os._exit(3)
        case ["sys_exit"]:
            sys.exit(4)
        case ["segfault"]:
            os.kill(os.getpid(), signal.SIGSEGV)
        case ["interrupt"]:
            os.kill(os.getpid(), signal.SIGINT)
            return 1.0
        case ["none"]:
            return None
        case ["text"]:
            return "1.0"
        case ["nan"]:
            return float("nan")
        case ["inf"]:
            return float("inf")
        case ["bool"]:
            return True
        case ["print"]:
            print("a line from the reward")
            return 1.0
        case ["torch_loaded"]:
            return float("torch" in sys.modules)
        case ["main_thread"]:
            return float(threading.current_thread() is threading.main_thread())
        case ["count", path]:
            with Path(path).open("a") as log:
                log.write("x")
            return 1.0
    return float(completion)


def only_completion(completion):
    return float(len(completion))


def completion_and_answer(text, answer):
    return float(text == answer)


def everything(completion, **context):
    return float(sorted(context) == ["answer", "metadata", "prompt"])


def demands_truth(completion, truth):
    return 1.0


def no_parameters():
    return 1.0


not_a_function = 3
