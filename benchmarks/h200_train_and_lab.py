"""Whole runs and the performance lab on one GPU: pieces one after another, each in a process group of its own.

usage: python benchmarks/h200_train_and_lab.py OUT [NAME ...] [--seconds N] [--work FOLDER] [--tiny]

A piece is a chain of commands with a time limit for all of them; the pieces that matter most come first, and one whose
usual seconds no longer fit into --seconds is skipped and named. OUT gets `results.json` (rewritten after every piece)
and a `NAME.tar.gz` for a piece that has a run's folder. Models and runs stay in --work; an ablation begun there is gone
on with when the script is called again. --tiny takes shapes for a CPU: it shows that every piece runs, nothing else.
Exit code 1 when a piece failed or ran out of time.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PACELINE = (sys.executable, "-m", "paceline")
_HERE = Path(__file__).parent
_LARGEST_ARCHIVE = 16 * 2**20
_TAIL = 8_000  # characters of a command's output that are kept
_REWARD = '''
def even_share(completion, *, answer, metadata, prompt):
    """Share of words with an even number; 0 for an empty completion."""
    words = completion.split()
    return sum(int(word[1:]) % 2 == 0 for word in words if word[1:].isdigit()) / len(words) if words else 0.0
'''


@dataclass(frozen=True, slots=True)
class Piece:
    """Commands run in order until one fails; `usual_s` was expected of all of them, `limit_s` ends them."""

    usual_s: int
    limit_s: int
    commands: tuple[tuple[str, ...], ...]
    folder: Path | None = None  # bundled into OUT


def write_inputs(work: Path, shape: str) -> None:
    """A random-weight model folder with a word for every token id, prompts, and a reward that random samples earn."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from paceline.bench.shapes import shape_config
    from paceline.model.loading import resolve_device, resolve_dtype

    config, device = shape_config(shape), resolve_device("auto")
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"w{index}": index for index in range(3, config.vocab_size)}
    raw = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=resolve_dtype("auto", device))
    model.save_pretrained(work / "model")
    tokenizer.save_pretrained(work / "model")
    prompts = [" ".join(f"w{3 + (7 * row + word) % 80}" for word in range(48)) for row in range(512)]
    rows = (json.dumps({"prompt": prompt, "answer": "w4"}) + "\n" for prompt in prompts)
    (work / "prompts.jsonl").write_text("".join(rows))
    (work / "lab_reward.py").write_text(_REWARD)


def make_pieces(work: Path, tiny: bool) -> dict[str, Piece]:
    """All pieces, those worth most first."""
    recipe = str(_HERE.parent / "recipes" / "grpo-own-data.yaml")
    prompts, samples, tokens, budget = (4, 4, 8, 256) if tiny else (32, 8, 256, 16_384)
    common = (
        f"model.path={work / 'model'}",
        f"task.path={work / 'prompts.jsonl'}",
        "task.reward=lab_reward:even_share",
        "task.eval_size=8",
        f"batch.num_prompts={prompts}",
        f"batch.num_samples={samples}",
        f"batch.token_budget={budget}",
        f"rollout.max_new_tokens={tokens}",
        f"run.dir={work / 'runs'}",
        "run.eval_every=0",
        "checkpoint.every=0",
        "checkpoint.save_final=false",
        "checkpoint.export_hf=false",
        "telemetry.live=off",
    )
    run, again = work / "runs" / "grpo", work / "ablation"
    small = ("--model", "tiny", "--tokens", "256") if tiny else ()
    train = (*_PACELINE, "bench", "train", "--json", "--repeats", "2")
    memory = (sys.executable, str(_HERE / "memory_estimate.py"), "--json", "--case")
    ends = ("--estimate-only",) if tiny else ()
    padded = ("--model", "tiny", "--shortest", "16", "--longest", "32") if tiny else ()
    device = f"cluster.device={'cpu' if tiny else 'cuda'}"
    lab = (*common, device, "batch.layout=padded", "batch.share_prefixes=off", "train.preset=plain")
    features = (
        "padded_shapes:batch.pad_to=bucket",
        f"dynamic_batch:batch.token_budget={4 * budget}",
        "share_prefixes:batch.layout=packed",
        *(() if tiny else ("compile:train.preset=fast",)),  # the same on a CPU
    )
    profiled = ("telemetry.profile_every=2", "telemetry.keep_traces=true", "run.num_steps=4")
    ppo = ("algorithm.name=ppo", "critic.pretrain_steps=1", "run.num_steps=3", "run.name=ppo")
    return {
        "grpo": Piece(
            90,
            150,
            (
                (*_PACELINE, "train", recipe, *common, "run.name=grpo", *profiled),
                *((*_PACELINE, what, str(run), "--json") for what in ("diagnose", "explain", "report")),
                (*_PACELINE, "report", str(run)),
                (*_PACELINE, "profile", recipe, *common, "run.name=profile", "--json"),
            ),
            run,
        ),
        "doctor": Piece(30, 60, ((*_PACELINE, "doctor", "--measure", "--json"),)),
        "ppo": Piece(40, 80, ((*_PACELINE, "train", recipe, *common, *ppo),)),
        "offload": Piece(30, 60, ((*memory, "1.7b-fast-all-offload-16k", *ends),)),
        "1.7b-fast": Piece(35, 70, ((*train, *(small or ("--model", "qwen3-1.7b"))),)),
        "1.7b-plain": Piece(25, 50, ((*train, "--preset", "plain", *(small or ("--model", "qwen3-1.7b"))),)),
        "llama3-8b": Piece(
            50,
            90,
            (
                (
                    *train,
                    *(small or ("--model", "llama3-8b")),
                    "--recompute",
                    "selective",
                    "--no-optimizer",
                ),
            ),
        ),
        "padded": Piece(
            50,
            90,
            ((*_PACELINE, "bench", "padded", "--micro-batches", "8", "--repeats", "1", "--json", *padded),),
        ),
        "ablation": Piece(
            240,
            280,
            (
                (
                    *_PACELINE,
                    "ablate",
                    recipe,
                    *lab,
                    *(part for feature in features for part in ("--features", feature)),
                    *("--pairs", "1" if tiny else "4", "--steps", "4", "--warmup", "2", "--out", str(again)),
                ),
            ),
            again,
        ),
        "pytest": Piece(
            90,
            120,
            (
                (
                    sys.executable,
                    "-m",
                    "pytest",
                    "-q",
                    "-n",
                    "0",
                    "-m",
                    "gpu",
                    "--ignore=tests/rollout",
                    "tests",
                ),
            ),
        ),
    }


def run_piece(piece: Piece, work: Path, limit_s: float) -> dict[str, Any]:
    """Runs a piece's commands: exit code, seconds and the output's end of each."""
    paths = [str(work), str(_HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    ends, found = time.monotonic() + limit_s, []
    for command in piece.commands:
        started, timed_out = time.monotonic(), False
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=_HERE.parent,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=max(1.0, ends - started))
        except subprocess.TimeoutExpired:
            timed_out = True
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        seconds = round(time.monotonic() - started, 1)
        found.append(
            {
                "command": " ".join(command[1:]),
                "exit_code": process.returncode,
                "timed_out": timed_out,
                "seconds": seconds,
                "left_out_characters": max(0, len(output) - _TAIL),
                "output": output[-_TAIL:],
            }
        )
        if process.returncode:
            break
    return {
        "ok": not found[-1]["exit_code"],
        "seconds": round(sum(row["seconds"] for row in found), 1),
        "commands_left": len(piece.commands) - len(found),
        "commands": found,
    }


def bundle(folder: Path, archive: Path) -> str:
    """Packs a run's folder without weights; an archive that is too large is packed again without traces."""
    for left_out in (("checkpoints",), ("checkpoints", "profiles")):
        with tarfile.open(archive, "w:gz") as tar:
            for path in sorted(folder.rglob("*")):
                inside = path.relative_to(folder)
                if path.is_file() and path.suffix != ".safetensors" and not set(left_out) & set(inside.parts):
                    tar.add(path, str(Path(folder.name) / inside))
        if archive.stat().st_size <= _LARGEST_ARCHIVE:
            return f"{archive.name}, without {', '.join(left_out)} and weights"
    size = archive.stat().st_size
    archive.unlink()
    return f"none: {size} bytes"


def main() -> int:
    """Runs the pieces; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seconds", type=float, default=570.0)
    parser.add_argument("--work", type=Path, default=Path("runs/h200-lab"))
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    ends, work = time.monotonic() + arguments.seconds, arguments.work.resolve()
    pieces = make_pieces(work, arguments.tiny)
    if unknown := set(arguments.names) - set(pieces):
        parser.error(f"NAME {', '.join(sorted(unknown))} must be one of {', '.join(pieces)}")
    for folder in (arguments.out, work):
        folder.mkdir(parents=True, exist_ok=True)
    if not (work / "lab_reward.py").exists():  # written last
        # a process of its own: what it holds on the GPU must be gone before anything is measured
        shape = "tiny" if arguments.tiny else "qwen3-0.6b"
        code = f"import h200_train_and_lab as lab, pathlib; lab.write_inputs(pathlib.Path({str(work)!r}), {shape!r})"
        paths = os.pathsep.join((str(_HERE), str(_HERE.parent / "src")))
        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": paths})
    results: dict[str, Any] = {}
    for name, piece in pieces.items():
        if arguments.names and name not in arguments.names:
            continue
        left = ends - time.monotonic()
        if left < piece.usual_s and not arguments.tiny:
            results[name] = {"skipped": f"{left:.0f} s left, {piece.usual_s} s expected"}
        else:
            results[name] = run_piece(piece, work, min(left, piece.limit_s))
            if piece.folder and piece.folder.exists():
                results[name]["archive"] = bundle(piece.folder, arguments.out / f"{name}.tar.gz")
        (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        print(name, results[name].get("skipped") or f"{results[name]['seconds']} s", flush=True)
    for name, row in results.items():
        if "skipped" in row:
            print(f"{name:<12} skipped: {row['skipped']}")
            continue
        last = row["commands"][-1]
        state = "ok" if row["ok"] else "out of time" if last["timed_out"] else f"exit {last['exit_code']}"
        print(f"{name:<12} {state:<12} {row['seconds']:6.1f} s  {row.get('archive', '')}")
        if not row["ok"]:
            print("   ", last["command"][:100], "|", last["output"].strip()[-300:])
    return 0 if all("skipped" in row or row["ok"] for row in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
